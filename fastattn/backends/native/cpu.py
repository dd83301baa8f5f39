"""The CPU part (csrc/cpu/): fused forward and backward over the keys and queries that a mask leaves."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ...spec import FEATURES, Mask, Spec, empty_output, shared_along, summed_like
from ..row_facts import RowFacts
from . import build

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Heads that share a bias add to the gradient in turn, and so many at once. It must not depend on the number of threads,
# or the bits would.
_TABLES_OF_SHARED_BIAS = 4
_MOST_KEYS = 2**31 - 1  # keys are numbered by 32-bit integers inside the kernels


def features() -> frozenset[str]:
    """Every feature."""
    return FEATURES


def lacks() -> frozenset[str]:
    """Nothing."""
    return frozenset()


def unsupported(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> list[str]:
    """Sentences about what it does not take."""
    found = []
    if q.dtype not in _DTYPES:
        found.append(f"q must be float32, bfloat16 or float16, got {q.dtype}")
    if max(q.shape[2], k.shape[2]) > _MOST_KEYS:
        found.append(f"n_q and n_k must be at most {_MOST_KEYS}, got {q.shape[2]} and {k.shape[2]}")
    return found


def unavailable(device: torch.device) -> str | None:
    """Why the C++ module cannot be had, or None; builds it if that has not been done."""
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
    o = empty_output(q, v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    build.CPU.load().forward(*map(_rows, (q, k, v)), o, lse, *_described(q, k, spec))
    return o, lse


def at_once(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None
) -> tuple[Tensor, Tensor, object | None] | None:
    """What `forward` returns, and what takes its gradients, if C++ sees that PyTorch has nothing else to do."""
    if q.dtype not in _DTYPES or unavailable(q.device):  # another dtype builds nothing
        return None
    tables = mask.real_queries, mask.real_keys, *(mask.segments or (None, None))
    return build.CPU.load().at_once(q, k, v, *tables, mask.causal, mask.q_start, *mask.window, scale)


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
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    wants_dq, wants_dkv = output_mask[0], output_mask[1] or output_mask[2]
    wants_dbias, wants_dalibi, wants_dsinks = output_mask[3:]
    # dq is summed over the keys in memory, so in fp32; dk and dv are summed in the kernel's own.
    sums = (
        _writable(dq, torch.float32) if wants_dq else None,
        *(_writable(x) if wants_dkv else None for x in (dk, dv)),
    )
    # Sums of dS: over what shares an entry of the bias, over the queries, over the keys, and over the keys by distance.
    bias_along = shared_along(spec.bias) if wants_dbias else None
    wants_ds_along_keys = bias_along == "keys" and spec.sinks is not None
    d_bias = d_column = d_row = d_slope = None
    if bias_along == "neither":
        B_bias, H_bias = (1, 1, *spec.bias.shape)[-4:-2]
        tables = min(q.shape[1], _TABLES_OF_SHARED_BIAS) if H_bias == 1 else H_bias
        d_bias = torch.zeros((B_bias, tables, *spec.bias.shape[-2:]), dtype=torch.float32)
    elif bias_along == "queries":
        d_column = lse.new_zeros(*lse.shape[:2], k.shape[2])
    if wants_ds_along_keys or (wants_dsinks and o.dtype != torch.float32):
        d_row = torch.zeros_like(lse)
    if wants_dalibi:
        d_slope = torch.zeros_like(lse)
    build.CPU.load().backward(
        None if do is None else _rows(do),
        _contiguous(dlse),
        *map(_rows, (q, k, v, o)),
        lse.contiguous(),
        *sums,
        d_bias,
        d_column,
        d_row,
        d_slope,
        *_described(q, k, spec),
    )
    for gradient, written in zip((dq, dk, dv), sums, strict=True):
        if written is not None and written is not gradient:
            gradient.copy_(written)

    if bias_along == "keys" or wants_dsinks:
        rows = _row_facts(do, dlse, o, lse, spec.sinks, d_row)
    if bias_along == "queries":
        d_bias = d_column[:, :, None]
    elif bias_along == "keys":
        d_bias = rows.ds_of_keys()[..., None]
    if wants_dsinks and o.dtype == torch.float32:  # which takes less from delta than the rounding of d_row would add
        rows = replace(rows, ds_of_queries=None)
    return (
        dq if wants_dq else None,
        dk if wants_dkv else None,
        dv if wants_dkv else None,
        summed_like(spec.bias, d_bias) if wants_dbias else None,
        summed_like(spec.alibi_slopes, d_slope.sum(-1)) if wants_dalibi else None,
        rows.ds_of_sinks().sum((0, 2)).to(spec.sinks.dtype) if wants_dsinks else None,
    )


def weights(q: Tensor, k: Tensor, lse: Tensor | None, spec: Spec, average_heads: bool) -> Tensor:
    """The weights after dropout in the dtype of q, [B, n_q, n_k] or [B, H, n_q, n_k]."""
    (B, H, n_q, _), n_k = q.shape, k.shape[2]
    found = q.new_empty(B, 1 if average_heads else H, n_q, n_k)
    build.CPU.load().weights(_rows(q), _rows(k), _contiguous(lse), found, *_described(q, k, spec))
    return found[:, 0] if average_heads else found


def received(q: Tensor, k: Tensor, spec: Spec) -> Tensor:
    """The sum over the queries of the weights, [B, H, n_k] in fp32."""
    found = q.new_empty(*q.shape[:2], k.shape[2], dtype=torch.float32)
    build.CPU.load().received(_rows(q), _rows(k), found, *_described(q, k, spec))
    return found


def top_keys(q: Tensor, k: Tensor, spec: Spec, top_k: int) -> tuple[Tensor, Tensor]:
    """The largest weights of every query in fp32, and their keys in int64: [B, H, n_q, top_k]."""
    found = q.new_empty(*q.shape[:3], top_k, dtype=torch.float32)
    keys = torch.empty_like(found, dtype=torch.int64)
    build.CPU.load().top_keys(_rows(q), _rows(k), found, keys, *_described(q, k, spec))
    return found, keys


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _row_facts(
    do: Tensor | None, dlse: Tensor | None, o: Tensor, lse: Tensor, sinks: Tensor | None, d_row: Tensor | None
) -> RowFacts:
    seen, zero = lse != -math.inf, lse.new_zeros(())  # padding may have left NaN in do and dlse of the other queries
    dlse = torch.where(seen, zero if dlse is None else dlse, zero)
    delta = zero if do is None else torch.where(seen, (do.float() * o.float()).sum(-1), zero)
    lse_log2 = torch.where(seen, lse.double() / math.log(2), math.inf)
    return RowFacts(lse_log2, None, delta - dlse, dlse, sinks, d_row)


def _described(q: Tensor, k: Tensor, spec: Spec) -> tuple[object, ...]:
    """The arguments that tell the C++ module what to compute."""
    bias, slopes, sinks = spec.bias, spec.alibi_slopes, spec.sinks
    if bias is not None:
        bias = _table(bias if bias.dtype in _DTYPES else bias.float(), q, k)
    if slopes is not None:
        slopes = slopes.float().expand(q.shape[:2]).contiguous()
    if sinks is not None:
        sinks = sinks.float().contiguous()
    seed = 0 if spec.seed is None else spec.seed.item()
    return native_mask(spec.mask, q, k), spec.scale, spec.softcap, bias, slopes, sinks, spec.dropout_p, seed


def _rows(x: Tensor) -> Tensor:
    """`x` with the elements of a row side by side, copied if they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _writable(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`x` itself if a kernel can write it in that dtype, else a new tensor of its shape."""
    if dtype in (None, x.dtype) and _rows(x) is x:
        return x
    return torch.empty(x.shape, dtype=dtype or x.dtype)


def _table(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """`x` expanded to [B, H, n_q, n_k], with the entries of a row side by side or one for all keys."""
    x = _rows(torch.atleast_1d(x))
    return x.expand(*q.shape[:3], k.shape[2])


def native_mask(mask: Mask, q: Tensor, k: Tensor) -> object:
    """The mask as the C++ module takes it, for the sizes of q and k."""
    B, H, n_q, _ = q.shape
    left, right = mask.window
    ids_q, ids_k = mask.segments or (None, None)
    return build.CPU.load().Mask(
        B=B,
        H=H,
        n_q=n_q,
        n_k=k.shape[2],
        causal=mask.causal,
        left=left,
        right=right,
        q_start=mask.q_start,
        real_queries=mask.real_queries,
        real_keys=mask.real_keys,
        ids_q=ids_q,
        ids_k=ids_k,
        dense=None if mask.dense is None else _table(mask.dense, q, k),
    )
