"""PyTorch's own fused kernels as a backend, called "torch": where they mean the same as the definition in spec.py.

They serve where no kernel of this package can be had, or is faster. A mask that is more than `causal` becomes a table
of numbers, in O(n_q n_k) memory for a sample, as in PyTorch's own function, and ALiBi one for each head. The reference
computes what its kernels do not on the CPU: gradients of a bias and of slopes, and scores and values so large that they
lose the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..spec import FEATURES, Spec, empty_output
from . import reference

NAME = "torch"
WHERE = "CPU and NVIDIA GPUs: PyTorch's own kernels"

_TERMS = frozenset({"softcap", "sinks", "dropout"})
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_16_BITS = (torch.float16, torch.bfloat16)
_LSE_ALIGNMENT = 32  # of the lengths that the memory-efficient kernel has in its lse
_FEW_QUERIES = 32
"""For so few, a copy of keys and values without their padding would take longer than all the rest. What stands in the
padding is 0 times something then, which shows in the output where that is no number."""
_LARGEST_LSE = 256.0
"""The kernels recompute weights as exp(score - lse), of which rounding takes eps * lse; from 1 / eps on, lse does not
tell how many keys share the largest score."""


def features(device: torch.device) -> frozenset[str]:
    """Every mask, biases and ALiBi on the CPU; no mask or a causal one on a GPU, where no table has been tried."""
    return FEATURES - _TERMS if device.type == "cpu" else frozenset({"causal"})


def lacks(device: torch.device) -> frozenset[str]:
    """The functions of the weights, which PyTorch's kernels never have in memory, and those of pages."""
    return frozenset({"weights", "received", "top_keys", "forward_paged", "forward_quantized"})


def unsupported(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> list[str]:
    """Sentences about the device, the dtype, the head dims, the bias and, on a GPU, the lengths."""
    if q.device.type not in ("cpu", "cuda"):
        return [f"q must be on the CPU or an NVIDIA GPU, got {q.device.type}"]
    (n_q, D), (n_k, d_v), result = q.shape[2:], v.shape[2:], []
    if spec.bias is not None and torch.promote_types(spec.bias.dtype, q.dtype) != q.dtype:
        result.append(f"bias must not be rounded, got {spec.bias.dtype} beside {q.dtype}")
    if spec.alibi_slopes is not None and q.dtype in _16_BITS:
        result.append(f"alibi_slopes must be beside float32 or float64, got {q.dtype}, to which distances would round")
    if q.device.type == "cpu":
        return [*result, "the head dim must be at least 1, got 0"] if D == 0 else result
    if q.dtype == torch.float64:
        result.append("q must be float32, bfloat16 or float16 on a GPU, got torch.float64")
    if d_v != D or D % 8 or not 8 <= D <= 256:
        result.append(f"the head dims must be equal, multiples of 8 and at most 256, got {D} and {d_v}")
    if spec.mask.causal and n_q != n_k:
        result.append(f"a causal mask must have as many queries as keys on a GPU, got {n_q} and {n_k}")
    if q.dtype == torch.bfloat16 and not _has_flash(q):
        result.append("bfloat16 needs compute capability 8.0 or later")
    return result


def unavailable(device: torch.device) -> str | None:
    """One sentence where this build of PyTorch has no fused kernels for GPUs."""
    if device.type == "cuda" and not torch.backends.cuda.is_flash_attention_available():
        return "this build of PyTorch has no flash kernels"
    return None


def by_name_only(device: torch.device) -> str | None:
    """Never: its kernels are those that users of PyTorch have already."""
    return None


class _Call(NamedTuple):
    """A call as the kernels take it: without NaN in padding, unless that is left `as_it_is`.

    table: float in the dtype of q, broadcastable to [B, H, n_q, n_k], added to the scores; or None.
    unseeing: bool, broadcastable to [B, H, n_q], True where a query sees no key; None where each sees one.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    table: Tensor | None
    unseeing: Tensor | None
    scale: float

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, spec: Spec, as_it_is: bool = False) -> _Call:
        mask, features = spec.mask, spec.features()
        queries, keys = mask.readable_queries(), mask.readable_keys()
        if not as_it_is:
            q, k, v = _readable(q, queries), _readable(k, keys), _readable(v, keys)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # which the kernels do not ask
        if features <= {"causal"}:
            return cls(q, k, v, mask.causal, None, None, spec.scale)
        of_keys = features == {"real_keys"}
        keep = keys[:, None, None] if of_keys else mask.keep(q.shape[2], k.shape[2], q.device)
        bias = 0.0 if spec.bias is None else spec.bias_rows(k.shape[2]).to(q.dtype)
        if spec.alibi_slopes is not None:
            position_q, position_k = mask.positions(q.shape[2], k.shape[2], q.device)
            distance = (position_q[:, None, :, None] - position_k[:, None, None]).abs().to(q.dtype)
            bias = bias - spec.alibi_slopes.to(q.dtype)[..., None, None] * distance
        table = torch.where(keep, bias, q.new_full((), -math.inf))
        unseeing = (~keep if spec.bias is None else table == -math.inf).all(-1)
        return cls(q, k, v, False, table, unseeing if unseeing.any() else None, spec.scale)

    def zero_where_nothing_is_seen(self, rows: Tensor) -> Tensor:
        """`rows` [B, H, n_q, D], but 0 where the query sees nothing: 0 times a NaN that others see is none."""
        return rows if self.unseeing is None else rows.masked_fill(self.unseeing[..., None], 0)

    def forward(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """o and lse for these values [B, H_kv, n_k, d_v]; lse is 0 where a query sees nothing."""
        D, d_v = self.q.shape[3], v.shape[3]
        q, k, v = (_widened(x, max(D, d_v)) for x in (self.q, self.k, v))
        if self.q.device.type == "cpu":
            o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, self.causal, attn_mask=self.table, scale=self.scale
            )
        elif _has_flash(q):
            o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, self.causal, False, scale=self.scale
            )
        else:
            k, v = (_for_each_head(x, q.shape[1]) for x in (k, v))
            o, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
                q, k, v, None, True, 0.0, self.causal, scale=self.scale
            )
        return o[..., :d_v], lse[..., : q.shape[2]]

    def backward(self, do: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and these values; `o` and `lse` are those of `forward`."""
        D, d_v, none = self.q.shape[3], v.shape[3], self.q.new_empty(0, dtype=torch.int64)
        do, q, k, v, o = (_widened(x, max(D, d_v)) for x in (do, self.q, self.k, v, o))
        if q.device.type == "cpu":
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                do, q, k, v, o, lse, 0.0, self.causal, attn_mask=self.table, scale=self.scale
            )
        elif _has_flash(q):
            lengths = (None, None, q.shape[2], k.shape[2])
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                do, q, k, v, o, lse, *lengths, 0.0, self.causal, none, none, scale=self.scale
            )
        else:
            H_kv = k.shape[1]
            k, v = (_for_each_head(x, q.shape[1]) for x in (k, v))
            lse = F.pad(lse, (0, -q.shape[2] % _LSE_ALIGNMENT), value=math.inf)
            dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
                do, q, k, v, None, o, lse, none, none, 0.0, [True, True, True, False], self.causal, scale=self.scale
            )
            dk, dv = (x.unflatten(1, (H_kv, -1)).sum(2) for x in (dk, dv))
        return dq[..., :D], dk[..., :D], dv[..., :d_v]


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """o [B, H, n_q, d_v] in the dtype of q, and lse [B, H, n_q]."""
    for as_it_is in (True, False) if q.shape[2] <= _FEW_QUERIES and v.shape[3] else (False,):
        call = _Call.of(q, k, v, spec, as_it_is)
        o, lse = call.forward(call.v)
        if q.device.type != "cpu" or math.isfinite(o.sum()):
            break
    else:
        return reference.forward(q, k, v, spec)  # sums of values may have overflowed before they were divided
    if call.unseeing is not None:
        lse = lse.masked_fill(call.unseeing, -math.inf)
    o, empty = call.zero_where_nothing_is_seen(o), empty_output(q, v.shape[3])
    return o if o.stride() == empty.stride() else empty.copy_(o), lse.contiguous()


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
    """Gradients of q, k and v, in their dtypes."""
    unseeing, queries = lse == -math.inf, spec.mask.readable_queries()
    lse = lse.masked_fill(unseeing, 0)
    if q.device.type == "cpu" and (output_mask[3] or output_mask[4] or not lse.abs().max() <= _LARGEST_LSE):
        return reference.backward(do, dlse, q, k, v, o, lse, spec, output_mask)
    call = _Call.of(q, k, v, spec)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v)) if do is None else (None, None, None)
    with _deterministic(q.device, spec.deterministic):
        if do is not None:
            dq, dk, dv = call.backward(_readable(do, queries), call.v, o, lse)
        if dlse is not None:
            # dS = P * dlse, which is P * dP of no kernel. Of the values K the output is P K, and the gradient that
            # arrives with scale * dlse * Q there leaves P^T (scale * dlse * Q) to the values.
            of_lse = (dlse.masked_fill(unseeing, 0) * spec.scale)[..., None]
            mean_key, _ = call.forward(call.k)
            dq = dq + (of_lse * mean_key).to(dq.dtype)
            dk = dk + call.backward((of_lse * call.q).to(q.dtype), call.k, mean_key, lse)[2]
    keys = spec.mask.readable_keys()
    if keys is not None and not math.isfinite(dk.sum() + dv.sum()):  # 0 times a NaN that queries see
        dk, dv = _readable(dk, keys), _readable(dv, keys)
    return call.zero_where_nothing_is_seen(dq), dk, dv, None, None, None


def _readable(x: Tensor, rows: Tensor | None) -> Tensor:
    """`x` with zeros in the rows that nobody may read: by its bits, in a fifth of the time of masked_fill."""
    if rows is None:
        return x
    bits = _INTEGERS[x.element_size()]
    return (x.view(bits) & -rows[:, None, :, None].to(bits)).view(x.dtype)


def _widened(x: Tensor, width: int) -> Tensor:
    """`x` [..., D] with zeros up to this width: PyTorch's kernels have one for queries, keys and values."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _for_each_head(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _has_flash(q: Tensor) -> bool:
    """Whether PyTorch's flash kernels take this on its GPU; the memory-efficient ones take the rest."""
    return q.dtype in _16_BITS and torch.cuda.get_device_capability(q.device) >= (8, 0)


@contextmanager
def _deterministic(device: torch.device, wanted: bool) -> Iterator[None]:
    """PyTorch's deterministic mode, in which its kernels for GPUs add up in a fixed order; on CPUs they always do."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if device.type == "cpu" or not wanted or before[0]:
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
