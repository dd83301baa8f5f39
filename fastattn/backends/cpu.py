"""The CPU backend (csrc/cpu/): fused forward and backward in C++, over the keys and queries that a mask leaves."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..spec import FEATURES, LOG2E, Spec, is_above
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
    if is_above(q.shape[2], _MOST_KEYS) or is_above(k.shape[2], _MOST_KEYS):
        result.append(f"n_q and n_k must be at most {_MOST_KEYS}, got {q.shape[2]} and {k.shape[2]}")
    return result


def unavailable(device: torch.device) -> str | None:
    """One sentence where the C++ module cannot be had; builds it if that has not been done."""
    return build.CPU.unavailable()


def by_name_only(device: torch.device) -> str | None:
    """Never: it serves every call that it supports."""
    return None


def capability() -> str:
    """The instruction set in use: "amx", "avx512_bf16", "avx512", "avx2" or "portable"; on Arm "neon_bf16" or "neon".

    FASTATTN_CPU_CAPABILITY lowers it. Sets with bf16 in their names, and "amx", differ from the one below in bf16 only.

    Raises:
        ValueError: FASTATTN_CPU_CAPABILITY is none of these.
    """
    return build.CPU.load().capability()


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """o [B, H, n_q, d_v] in the dtype of q, and lse [B, H, n_q] in fp32."""
    return build.CPU.load().forward(q, k, v, spec)


def forward_paged(q: Tensor, k: Tensor, v: Tensor, table: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """As `forward`, for keys and values in pages [pages, H_kv, page_size, D or d_v].

    Args:
        table: int32 or int64 [B, pages of a sample], whose keys are those of its pages one after the other.
    """
    return build.CPU.load().forward_paged(q, k, v, table.int(), spec, None, None)


def forward_quantized(
    q: Tensor, k: Tensor, v: Tensor, k_scales: Tensor, v_scales: Tensor, table: Tensor, spec: Spec
) -> tuple[Tensor, Tensor]:
    """As `forward_paged`, for keys and values of int8 or float8_e4m3fn, each row times its scale.

    Args:
        k_scales, v_scales: fp32 [pages, H_kv, page_size].
    """
    return build.CPU.load().forward_paged(q, k, v, table.int(), spec, k_scales, v_scales)


def short_way() -> tuple[Callable, Callable, Callable]:
    """The C++ functions that `short_way` of ops.py calls, forward and backward, and `_short_way` of paged.py."""
    module = build.CPU.load()
    return module.attend, module.attend_backward, module.attend_paged


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
    d_weights: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, bias, alibi_slopes and sinks, in their dtypes.

    Args:
        d_weights: what arrives at the weights of the same call after dropout, broadcastable to [B, H, n_q, n_k].
    """
    of_weights = None if d_weights is None else _zeros_of_queries(q, k, spec)
    _, _, _, wants_dbias, wants_dslopes, wants_dsinks = output_mask
    sums, rounded = _NO_SUMS, o.dtype != torch.float32
    if wants_dbias or wants_dslopes or wants_dsinks:
        # In 16 bits the rounding of the sums would add more to delta than that of O has taken. Nothing is made good in
        # the gradient of slopes.
        wanted = wanted_sums(spec, output_mask, rounded and wants_dsinks)
        sums = Sums(*(zeros(q, k, spec) if each else None for each, zeros in zip(wanted, _ZERO_SUMS, strict=True)))
    gradients = build.CPU.load().backward(do, dlse, q, k, v, o, lse, spec, output_mask, *sums, d_weights, of_weights)
    if sums is _NO_SUMS:
        return *gradients, None, None, None
    if sums.of_pairs is not None and spec.bias_by_distance:
        sums = sums._replace(of_pairs=sums.of_pairs.double())  # what rounding has taken is added to the sums
    stats = None
    if wants_dsinks or (wants_dbias and spec.bias_shared_along() == "keys"):
        stats = _row_stats(do, dlse, o, lse, spec.sinks, sums.of_queries, rounded, of_weights)
    return *gradients, *learned_gradients(spec, output_mask, sums, stats, p_by_distance=None)


def weights(q: Tensor, k: Tensor, lse: Tensor | None, spec: Spec, average_heads: bool) -> Tensor:
    """The weights after dropout in the dtype of q, [B, n_q, n_k] or [B, H, n_q, n_k]."""
    B, H, n_q, _ = q.shape
    result = q.new_empty(B, 1 if average_heads else H, n_q, k.shape[2])
    build.CPU.load().weights(q, k, lse, spec, result)
    return result[:, 0] if average_heads else result


def weights_backward(
    d_weights: Tensor, q: Tensor, k: Tensor, lse: Tensor | None, spec: Spec
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, None for v, bias, alibi_slopes and sinks, from what arrives at the weights after dropout."""
    no_values = k[..., :0]
    o, of_forward = forward(q, k, no_values, spec) if lse is None else (q[..., :0], lse)
    wanted = (True, True, False, *(x is not None for x in (spec.bias, spec.alibi_slopes, spec.sinks)))
    return backward(None, None, q, k, no_values, o, of_forward, spec, wanted, d_weights)


def received(q: Tensor, k: Tensor, spec: Spec) -> Tensor:
    """The sum over the queries of the weights, [B, H, n_k] in fp32."""
    result = q.new_empty(*q.shape[:2], k.shape[2], dtype=torch.float32)
    build.CPU.load().received(q, k, spec, result)
    return result


def top_keys(q: Tensor, k: Tensor, spec: Spec, top_k: int) -> tuple[Tensor, Tensor]:
    """The largest weights of every query in fp32, and their keys in int64: [B, H, n_q, top_k]."""
    largest, keys = (q.new_empty(*q.shape[:3], top_k, dtype=dtype) for dtype in (torch.float32, torch.int64))
    build.CPU.load().top_keys(q, k, spec, largest, keys)
    return largest, keys


_TABLES_OF_SHARED_BIAS = 4
"""Heads that share a bias add to its gradient in turn, and so many at once: not by the number of threads, on which the
bits would depend."""


def _zero_tables(q: Tensor, k: Tensor, spec: Spec) -> Tensor:
    """fp32 [B or 1, tables, n_q, n_k], or by distance [B, H, 2, n_q + n_k - 1]: their sum is the bias's gradient."""
    if spec.bias_by_distance:
        return q.new_zeros(*q.shape[:2], 2, spec.bias.shape[-1], dtype=torch.float32)
    B, H = (1, 1, 1, 1, *spec.bias.shape)[-4:-2]
    tables = min(q.shape[1], _TABLES_OF_SHARED_BIAS) if H == 1 else H
    return q.new_zeros(B, tables, q.shape[2], k.shape[2], dtype=torch.float32)


def _zeros_of_keys(q: Tensor, k: Tensor, _: Spec) -> Tensor:
    return q.new_zeros(*q.shape[:2], k.shape[2], dtype=torch.float32)


def _zeros_of_queries(q: Tensor, _: Tensor, __: Spec) -> Tensor:
    return q.new_zeros(q.shape[:3], dtype=torch.float32)


_NO_SUMS = Sums(None, None, None, None)
_ZERO_SUMS = Sums(_zero_tables, _zeros_of_keys, _zeros_of_queries, _zeros_of_queries)


def _row_stats(
    do: Tensor | None,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    ds_of_queries: Tensor | None,
    rounded: bool,
    of_weights: Tensor | None,
) -> RowStats:
    seen, zero = lse != -math.inf, lse.new_zeros(())  # padding may have left NaN in do and dlse of the other queries
    dlse = torch.where(seen, zero if dlse is None else dlse, zero)
    delta = zero if do is None else torch.where(seen, (do.float() * o.float()).sum(-1), zero)
    delta = delta if of_weights is None else delta + of_weights
    most = torch.finfo(torch.float32).max  # for an infinite sink, whose difference to its lse would be NaN
    lse_log2 = torch.where(seen, lse.double().clamp(max=most) * LOG2E, math.inf)
    sinks = None if sinks is None else sinks.double().clamp(max=most)
    return RowStats(lse_log2, None, delta - dlse, dlse, sinks, ds_of_queries, rounded)
