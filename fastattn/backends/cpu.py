"""The CPU backend (csrc/cpu/): fused forward and backward in C++, over the keys and queries that a mask leaves."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..spec import FEATURES, LOG2E, Spec, shared_along
from . import build
from .gradients import RowStats, Sums, learned_gradients, wanted_sums

NAME = "cpu"
WHERE = "CPU: AMX, AVX-512, AVX2, or whatever there is"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_KEYS = 2**31 - 1  # keys are numbered by 32-bit integers inside the kernels


def features(device: torch.device) -> frozenset[str]:
    """Every feature, on every device."""
    return FEATURES


def lacks(device: torch.device) -> frozenset[str]:
    """Names of no functions: this backend has all of them."""
    return frozenset()


def unsupported(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> list[str]:
    """Sentences about the device, the dtype and the lengths."""
    result = [] if q.device.type == "cpu" else [f"q must be on the CPU, got {q.device.type}"]
    if q.dtype not in _DTYPES:
        result.append(f"q must be float32, bfloat16 or float16, got {q.dtype}")
    if max(q.shape[2], k.shape[2]) > _MOST_KEYS:
        result.append(f"n_q and n_k must be at most {_MOST_KEYS}, got {q.shape[2]} and {k.shape[2]}")
    return result


def unavailable(device: torch.device) -> str | None:
    """One sentence where the C++ module cannot be had; builds it if that has not been done."""
    return build.CPU.unavailable()


def by_name_only(device: torch.device) -> str | None:
    """Never: it serves every call that it supports."""
    return None


def capability() -> str:
    """The instruction set in use: "amx", "avx512_bf16", "avx512", "avx2" or "portable".

    FASTATTN_CPU_CAPABILITY lowers it. The first two differ from "avx512" in bf16 only.

    Raises:
        ValueError: FASTATTN_CPU_CAPABILITY is none of these.
    """
    return build.CPU.load().capability()


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """o [B, H, n_q, d_v] in the dtype of q, and lse [B, H, n_q] in fp32."""
    return build.CPU.load().forward(q, k, v, spec)


def short_way() -> Callable:
    """The C++ function that `short_way` of fastattn/plan.py calls."""
    return build.CPU.load().short_way


def backward(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    spec: Spec,
    output_mask: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, bias, alibi_slopes and sinks, in their dtypes; dk and dv come together."""
    wants_dq, wants_dk, wants_dv, wants_dbias, _, wants_dsinks = output_mask
    rounded = o.dtype != torch.float32  # else the rounding of the sums would add more to delta than that of O has taken
    wanted = wanted_sums(spec, output_mask, rounded and wants_dsinks)  # nothing is made good in the gradient of slopes
    dq, dk, dv, *sums = build.CPU.load().backward(
        do, dlse, q, k, v, o, lse, spec, (wants_dq, wants_dk or wants_dv, *wanted)
    )
    sums, stats = Sums(*sums), None
    if wants_dsinks or (wants_dbias and shared_along(spec.bias) == "keys"):
        stats = _row_stats(do, dlse, o, lse, spec.sinks, sums.of_queries, rounded)
    return dq, dk, dv, *learned_gradients(spec, output_mask, sums, stats, p_by_distance=None)


def weights(q: Tensor, k: Tensor, lse: Tensor | None, spec: Spec, average_heads: bool) -> Tensor:
    """The weights after dropout in the dtype of q, [B, n_q, n_k] or [B, H, n_q, n_k]."""
    result = build.CPU.load().weights(q, k, lse, spec, average_heads)
    return result[:, 0] if average_heads else result


def received(q: Tensor, k: Tensor, spec: Spec) -> Tensor:
    """The sum over the queries of the weights, [B, H, n_k] in fp32."""
    return build.CPU.load().received(q, k, spec)


def top_keys(q: Tensor, k: Tensor, spec: Spec, top_k: int) -> tuple[Tensor, Tensor]:
    """The largest weights of every query in fp32, and their keys in int64: [B, H, n_q, top_k]."""
    return build.CPU.load().top_keys(q, k, spec, top_k)


def _row_stats(
    do: Tensor | None,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    ds_of_queries: Tensor | None,
    rounded: bool,
) -> RowStats:
    seen, zero = lse != -math.inf, lse.new_zeros(())  # padding may have left NaN in do and dlse of the other queries
    dlse = torch.where(seen, zero if dlse is None else dlse, zero)
    delta = zero if do is None else torch.where(seen, (do.float() * o.float()).sum(-1), zero)
    lse_log2 = torch.where(seen, lse.double() * LOG2E, math.inf)
    return RowStats(lse_log2, None, delta - dlse, dlse, sinks, ds_of_queries, rounded)
