"""PyTorch's own fused kernels as a backend, called "torch": where they mean the same as the definition in spec.py.

They serve where no kernel of this package can be had, or is faster. On a GPU the forward is cuDNN's where PyTorch's own
function would take that, and else FlashAttention's or the memory-efficient one; gradients are never cuDNN's: on an H200
with PyTorch 2.11 dq of 320 rows with an lse near -120 was NaN (PyTorch issue 196678). On the CPU, padding and documents
are left out where that is quicker, by a call of the kernel for each of the `rectangles` of what is seen. Any other mask
that is more than `causal` becomes a table of numbers, in O(n_q n_k) memory for a sample, as in PyTorch's own function,
and ALiBi one for each head. `blocked` computes softcap and dropout, which its kernels lack, and the reference gradients
of a bias and of slopes, those in fp32 on GPUs that would round them, and scores and values so large that they lose the
answer.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from torch.utils import deterministic

from ..spec import FEATURES, Mask, Spec, accumulation_dtype, as_output, empty_output
from . import blocked, rectangles, reference
from .kept_results import kept
from .rectangles import Rectangle

NAME = "torch"
WHERE = "every device: PyTorch's own kernels"

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_16_BITS = (torch.float16, torch.bfloat16)
_LSE_ALIGNMENT = 32  # of the lengths that the memory-efficient kernel has in its lse
_LARGEST_LSE = 256.0
"""The kernels recompute weights as exp(score - lse), of which rounding takes eps * lse; from 1 / eps on, lse does not
tell how many keys share the largest score."""
_CUDNN_QUERIES = 128
"""Of fewer queries cuDNN has kernels for decoding, of which versions were wrong: PyTorch issue 193893, cudnn-frontend
issue 1072."""
_LARGEST_KEPT = 2**22
"""Pairs of a table that is kept for other layers and the backward: making it takes a few percent of a short call, and
of a long one too little to keep so much memory for."""
_OF_DOCUMENTS = frozenset({"causal", "q_offset", "segment_ids"})
_OF_REAL_TOKENS = frozenset({"causal", "q_offset", "real_keys", "real_queries"})
_OF_A_CALL = 2**21
"""Multiply-adds of a thread in the time that it takes to call a kernel once more."""
_ROWS = 32
"""Queries that a thread of PyTorch's kernel for CPUs takes at once, of short calls."""


def features(device: torch.device) -> frozenset[str]:
    """Everything on the CPU; no mask or a causal one elsewhere, where no table has been tried."""
    return FEATURES if device.type == "cpu" else frozenset({"causal"})


def lacks(device: torch.device) -> frozenset[str]:
    """The functions of the weights, which PyTorch's kernels never have in memory, those of pages, and, where no kernel
    is known that returns it, the lse."""
    of_all = frozenset({"weights", "received", "top_keys", "forward_paged", "forward_quantized"})
    return of_all if device.type in ("cpu", "cuda") else of_all | {"forward"}


def unsupported(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> list[str]:
    """Sentences about the dtype, the head dims, the bias and, on a GPU, the lengths."""
    (n_q, D), (n_k, d_v), result = q.shape[2:], v.shape[2:], []
    if spec.bias is not None and torch.promote_types(spec.bias.dtype, q.dtype) != q.dtype:
        result.append(f"bias must not be rounded, got {spec.bias.dtype} beside {q.dtype}")
    if spec.alibi_slopes is not None and q.dtype in _16_BITS:
        result.append(f"alibi_slopes must be beside float32 or float64, got {q.dtype}, to which distances would round")
    if q.device.type == "cpu":
        return [*result, "the head dim must be at least 1, got 0"] if D == 0 else result
    if not spec.scale > 0:
        result.append(f"scale must be above 0 on {q.device.type}, got {spec.scale:g}")
    if spec.mask.causal and n_q != n_k:
        result.append(f"a causal mask must have as many queries as keys on {q.device.type}, got {n_q} and {n_k}")
    if q.device.type != "cuda":
        empty = [f"{name} must have elements, got {list(x.shape)}" for name, x in (("q", q), ("v", v)) if not x.numel()]
        return [*result, *empty]
    if q.dtype == torch.float64:
        result.append("q must be float32, bfloat16 or float16 on a GPU, got torch.float64")
    if d_v != D or D % 8 or not 8 <= D <= 256:
        result.append(f"the head dims must be equal, multiples of 8 and at most 256, got {D} and {d_v}")
    if q.dtype == torch.bfloat16 and torch.cuda.is_available() and not _has_flash(q):  # fake tensors need no GPU
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
    """A call as the kernels take it.

    table: float in the dtype of q, broadcastable to [B, H, n_q, n_k], added to the scores; or None.
    unseeing: bool, broadcastable to [B, H, n_q], True where a query sees no key or is padding; None
        where each sees one, or there are parts.
    causal: whether the kernels hide what comes later, without a table.
    parts: the rectangles that are computed one by one; None where all is computed at once.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    spec: Spec
    table: Tensor | None = None
    unseeing: Tensor | None = None
    causal: bool = False
    parts: list[Rectangle] | None = None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> _Call:
        call = cls(_as_kernels_read(q), _as_kernels_read(k), _as_kernels_read(v), spec, causal=spec.mask.causal)
        if q.device.type != "cpu":  # where nothing else is taken
            return call
        q, k, v = call[:3]
        masked = spec.features() - {"sinks", "softcap", "dropout"}
        # What is hidden has -inf before it is scaled, in these kernels.
        hides_later = spec.scale > 0 and not call.is_blocked()
        if not masked or (masked == {"causal"} and hides_later):
            return call
        call = call._replace(causal=False)
        mask, slopes, (B, H, n_q, _), n_k = spec.mask, spec.alibi_slopes, q.shape, k.shape[2]
        offsets, q_offset = (mask.q_offset, 0) if isinstance(mask.q_offset, Tensor) else (None, mask.q_offset)
        documents = mask.segment_ids or (None, None)
        tensors = (mask.real_queries, mask.real_keys, *documents, offsets)
        in_rectangles = masked <= _OF_REAL_TOKENS or masked <= _OF_DOCUMENTS
        if q.device.type == "cpu" and in_rectangles and hides_later:
            (parts,) = _kept(_rectangles, tensors, mask.causal, q_offset, B, n_q, n_k)
            if parts is not None and [x[:3] for x in parts] == [(slice(0, B), slice(0, n_q), slice(0, n_k))]:
                return call._replace(causal=parts[0].causal)
            if parts is not None and _is_quicker(parts, q, n_k):
                return call._replace(parts=parts)
        tensors = (*tensors, mask.dense, slopes, spec.bias_rows(n_k))
        constants = (mask.causal, q_offset, mask.window, n_q, n_k, q.dtype, q.device)
        is_kept = spec.bias is None and B * (1 if slopes is None else H) * n_q * n_k <= _LARGEST_KEPT
        table, unseeing = _kept(_table, tensors, *constants) if is_kept else _table(*tensors, *constants)
        return call._replace(table=table, unseeing=unseeing)

    def is_blocked(self) -> bool:
        """Whether PyTorch's kernels lack something of the call."""
        return self.spec.softcap is not None or self.spec.dropout_p > 0

    def part(self, part: Rectangle) -> tuple[_Call, tuple[slice, ...], tuple[slice, ...]]:
        """The call of a rectangle, and where its queries and its keys lie in [B, H, n, ...]."""
        queries, keys = (part.samples, slice(None), part.queries), (part.samples, slice(None), part.keys)
        call = self._replace(q=self.q[queries], k=self.k[keys], v=self.v[keys], causal=part.causal, parts=None)
        return call, queries, keys

    def looks_readable(self) -> bool:
        """Whether the first head has numbers, also in its padding: others usually have them too, then.

        In parts no padding is read.
        """
        keys = self.spec.mask.readable_keys() if self.table is not None else None
        return keys is None or _is_finite(self.k[:, 0], self.v[:, 0])

    def may_hide_nan(self) -> bool:
        """Whether 0 is what PyTorch's kernel for CPUs gives, and its lse, where all scores of a query are NaN.

        Its maximum of fewer keys than a vector has lanes passes over NaN.
        """
        keys = [part.keys for part in self.parts] if self.parts else [slice(0, self.k.shape[2])]
        return self.q.device.type == "cpu" and min(x.stop - x.start for x in keys) < 16

    def readable(self) -> _Call:
        """This call with zeros in all that nobody may read."""
        queries, keys = self.spec.mask.readable_queries(), self.spec.mask.readable_keys()
        q, k, v = _readable(self.q, queries), _readable(self.k, keys), _readable(self.v, keys)
        return self._replace(q=q, k=k, v=v)

    def zero_where_nothing_is_seen(self, rows: Tensor) -> Tensor:
        """`rows` [B, H, n_q, ...], with 0 written where the query sees nothing: 0 times a NaN is none."""
        return rows if self.unseeing is None else _zeroed_(rows, ~self.unseeing)

    def forward(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """o and lse for these values [B, H_kv, n_k, d_v], without sinks; anything where a query sees nothing."""
        if self.is_blocked():
            k, v = (_for_each_head(x, self.q.shape[1]) for x in (self.k, v))
            return blocked.forward(self.q, k, v, self.table, self.spec)
        if self.parts is not None:
            all_seen = _size(self.parts, "queries") == len(self.q) * self.q.shape[2]
            o = empty_output(self.q, v.shape[3]) if all_seen else empty_output(self.q, v.shape[3]).zero_()
            lse = o.new_full(self.q.shape[:3], -math.inf, dtype=accumulation_dtype(o.dtype))
            for part in self.parts:
                call, queries, keys = self.part(part)
                o[queries], lse[queries] = call.forward(v[keys])
            return o, lse
        D, d_v, causal, scale = self.q.shape[3], v.shape[3], self.causal, self.spec.scale
        q, k = self.q, self.k
        if d_v != D:
            q, k, v = (_widened(x, max(D, d_v)) for x in (q, k, v))
        if q.device.type == "cpu":
            folded = self._folded(q, k, v)
            o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *(folded or (q, k, v)), 0.0, causal, attn_mask=self.table, scale=scale
            )
            if folded:
                o, lse = o.view(*q.shape[:3], -1), lse.view(q.shape[:3])
        elif _has_cudnn(q, k, v, causal, scale):
            o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, causal, False, scale=scale
            )
            lse = lse.reshape(q.shape[:3])  # of 3 or 4 dims, by PyTorch's version
        elif _has_flash(q):
            o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        else:
            k, v = (_for_each_head(x, q.shape[1]) for x in (k, v))
            o, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
                q, k, v, None, True, 0.0, causal, scale=scale
            )
            lse = lse[..., : q.shape[2]]
        return o if o.shape[3] == d_v else o[..., :d_v].clone(), lse  # a view would be an output with a base

    def attend(self) -> tuple[Tensor, Tensor]:
        """o and lse as `forward` has them, but 0 where a query sees nothing."""
        o, lse = self.forward(self.v)
        return self.zero_where_nothing_is_seen(o), self.zero_where_nothing_is_seen(lse)

    def backward(
        self, do: Tensor, v: Tensor, o: Tensor, lse: Tensor, delta: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and these values.

        Args:
            o, lse: those of `forward`, with sinks; lse is inf where a query sees nothing.
            delta: rowsum(do * o) without what arrives at the lse, for calls in blocks.
        """
        H_kv = self.k.shape[1]
        if self.is_blocked():
            k, v = (_for_each_head(x, self.q.shape[1]) for x in (self.k, v))
            dq, dk, dv = blocked.backward(do, delta, self.q, k, v, lse, self.table, self.spec)
            return dq, *_sum_of_groups(dk, dv, H_kv=H_kv)
        if self.parts is not None:
            dq, dk, dv = torch.zeros_like(self.q), torch.zeros_like(self.k), torch.zeros_like(v)
            for part in self.parts:
                call, queries, keys = self.part(part)
                results = do[queries], v[keys], o[queries], lse[queries]
                dq[queries], dk[keys], dv[keys] = call.backward(*results)
            return dq, dk, dv
        D, d_v, none = self.q.shape[3], v.shape[3], self.q.new_empty(0, dtype=torch.int64)
        causal, scale = self.causal, self.spec.scale
        do, q, k, v, o = (_widened(x, max(D, d_v)) for x in (_as_kernels_read(do), self.q, self.k, v, o))
        if q.device.type == "cpu":
            folded = self._folded(do, q, k, v, o, lse)
            gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(folded or (do, q, k, v, o, lse)), 0.0, causal, attn_mask=self.table, scale=scale
            )
            dq, dk, dv = (g.view(x.shape) for g, x in zip(gradients, (q, k, v), strict=True)) if folded else gradients
        elif _has_flash(q):
            lengths = (None, None, q.shape[2], k.shape[2])
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                do, q, k, v, o, lse, *lengths, 0.0, causal, none, none, scale=scale
            )
        else:
            k, v = (_for_each_head(x, q.shape[1]) for x in (k, v))
            lse = F.pad(lse, (0, -q.shape[2] % _LSE_ALIGNMENT), value=math.inf)
            dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
                do, q, k, v, None, o, lse, none, none, 0.0, [True, True, True, False], causal, scale=scale
            )
            dk, dv = _sum_of_groups(dk, dv, H_kv=H_kv)
        return dq[..., :D], dk[..., :D], dv[..., :d_v]

    def _folded(self, *tensors: Tensor) -> list[Tensor] | None:
        """These tensors [B, H, n, ...] as [B * H, 1, n, ...]; None where those would be copies, or would have to be.

        PyTorch's kernel for CPUs writes the heads of a token side by side, which is to be copied where those of q are
        not; and its gradients begin with a copy of do into that order.
        """
        B, H = self.q.shape[:2]
        if self.table is not None or self.k.shape[1] != H or self.q.stride(1) < self.q.stride(2):
            return None
        if B > 1 and any([x.stride(0) != H * x.stride(1) for x in tensors]):  # noqa: C419  a generator takes longer
            return None
        return [x.view(B * H, 1, *x.shape[2:]) for x in tensors]


def output(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> Tensor:
    """o [B, H, n_q, d_v] on a device where PyTorch's own function chooses the kernel."""
    k, v = (_for_each_head(x, q.shape[1]) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=spec.mask.causal, scale=spec.scale)


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """o [B, H, n_q, d_v] in the dtype of q, and lse [B, H, n_q]."""
    call = _Call.of(q, k, v, spec)
    if not call.looks_readable():
        call = call.readable()
    o, lse = call.attend()
    if q.device.type == "cpu" and not _is_finite(o, *([] if call.table is None else [lse])):
        # What stands in padding took part as 0 times something, and that was no number.
        o, lse = call.readable().attend()
        if not _is_finite(o, lse):  # sums of values may have overflowed before they were divided
            return reference.forward(q, k, v, spec)
    if call.may_hide_nan() and (lse == 0).any() and not _is_finite(call.q, call.k):
        return reference.forward(q, k, v, spec)
    unseeing = call.unseeing if call.parts is None or spec.sinks is None else lse == -math.inf
    if spec.sinks is not None:
        with_sinks = torch.logaddexp(lse, spec.sinks.to(lse.dtype)[:, None])
        o, lse = o.mul_(torch.exp(lse - with_sinks)[..., None]), with_sinks
    if unseeing is not None:
        lse = lse.masked_fill(unseeing, -math.inf)
    return as_output(o, q), lse.contiguous()


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
    """Gradients of q, k, v and sinks, in their dtypes."""
    unseeing = lse == -math.inf
    too_large = q.device.type == "cpu" and not lse.masked_fill(unseeing, 0).abs().max() <= _LARGEST_LSE
    if too_large or _rounds_fp32(q) or output_mask[3] or output_mask[4] or spec.dropout_p == 1:
        return reference.backward(do, dlse, q, k, v, o, lse, spec, output_mask)
    call, lse = _Call.of(q, k, v, spec), lse.masked_fill(unseeing, math.inf)
    do = torch.zeros_like(o) if do is None else do
    dlse = None if dlse is None else dlse.masked_fill(unseeing, 0)
    all_see, keys = call.unseeing is None, spec.mask.readable_keys()
    if call.table is not None and not (call.looks_readable() and (all_see or _is_finite(do[:, 0]))):
        call, do = call.readable(), _zeroed_(do.clone(), ~unseeing)
    gradients = _gradients(call, do, dlse, o, lse, output_mask[5])
    if call.table is not None and not ((all_see and keys is None) or _is_finite(*gradients[:3])):
        call = call.readable()
        dq, dk, dv, *others = _gradients(call, _zeroed_(do.clone(), ~unseeing), dlse, o, lse, output_mask[5])
        gradients = dq, _readable(dk, keys), _readable(dv, keys), *others  # 0 times a NaN that queries see
    if q.dtype == torch.float16 and q.device.type == "cpu" and not _is_finite(*gradients[:3]):
        # PyTorch's kernel rounds the gradients of the scores to fp16, in which they overflow.
        return reference.backward(do, dlse, q, k, v, o, lse.masked_fill(unseeing, -math.inf), spec, output_mask)
    return call.zero_where_nothing_is_seen(gradients[0]), *gradients[1:]


def _gradients(
    call: _Call, do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, sinks_wanted: bool
) -> tuple[Tensor | None, ...]:
    """What `backward` returns; lse is inf and dlse 0 where a query sees nothing."""
    q, spec, delta, dsinks = call.q, call.spec, None, None
    if call.is_blocked() or sinks_wanted:
        delta = (do.to(lse.dtype) * o).sum(-1)
        delta = delta if call.parts is None else delta.masked_fill(lse == math.inf, 0)  # do may be NaN there
        delta = delta if dlse is None else delta - dlse
    with _deterministic(q.device, spec.deterministic):
        dq, dk, dv = call.backward(do, call.v, o, lse, delta)
        if dlse is not None and not call.is_blocked():
            # dS = P * dlse, which is P * dP of no kernel. Of the values K the output is P K, and the gradient that
            # arrives with scale * dlse * Q there leaves P^T (scale * dlse * Q) to the values.
            of_lse = (dlse * spec.scale)[..., None]
            mean_key, lse_of_keys = call.forward(call.k)
            mean_key = (mean_key * torch.exp(lse_of_keys - lse)[..., None]).to(q.dtype)  # sinks have a part of P
            dq = dq + (of_lse * mean_key).to(dq.dtype)
            dk = dk + call.backward((of_lse * q).to(q.dtype), call.k, mean_key, lse)[2]
    if sinks_wanted:
        dsinks = -(torch.exp(spec.sinks.to(lse.dtype)[:, None] - lse) * delta).sum((0, 2)).to(spec.sinks.dtype)
    return dq, dk, dv, None, None, dsinks


def _kept(function: Callable, tensors: tuple[Tensor | None, ...], *constants: object) -> tuple:
    """`kept`, but for tensors that NumPy or `x.data` has changed since, which their versions do not tell."""
    values, result = kept(_with_copies(function, len(tensors)), tensors, *constants)
    same = all(x is None or _are_equal(x, y) for x, y in zip(tensors, values, strict=True))
    return result if same else function(*tensors, *constants)


def _are_equal(x: Tensor, y: Tensor) -> bool:
    """Whether a tensor is like its copy."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    if x.dtype == torch.bool and x.is_contiguous() and x.numel() % 8 == 0 == x.storage_offset() % 8:
        x, y = (z.flatten().view(torch.int64) for z in (x, y))  # which PyTorch compares faster than bools
    return torch.equal(x, y)


@functools.cache
def _with_copies(function: Callable, n: int) -> Callable:
    """`function` with copies of its first n arguments."""
    return lambda *arguments: ([x if x is None else x.clone() for x in arguments[:n]], function(*arguments))


def _table(
    real_queries: Tensor | None,
    real_keys: Tensor | None,
    documents_q: Tensor | None,
    documents_k: Tensor | None,
    offsets: Tensor | None,
    dense: Tensor | None,
    slopes: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    q_offset: int,
    window: tuple[int | None, int | None],
    n_q: int,
    n_k: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor | None]:
    """`table` and `unseeing` of a call."""
    documents = None if documents_q is None else (documents_q, documents_k)
    mask = Mask(
        causal, q_offset=q_offset if offsets is None else offsets, window=window, real_keys=real_keys,
        segment_ids=documents, dense=dense,
    )  # fmt: skip
    keep = real_keys[:, None, None] if mask.features() == {"real_keys"} else mask.keep(n_q, n_k, device)
    added = torch.zeros((), dtype=dtype, device=device) if bias is None else bias.to(dtype)
    if slopes is not None:
        position_q, position_k = mask.positions(n_q, n_k, device)
        distance = (position_q[:, None, :, None] - position_k[:, None, None]).abs().to(dtype)
        added = added - slopes.to(dtype)[..., None, None] * distance
    added = added[(None,) * (4 - added.dim())]
    is_table = not mask.features() and (added.shape[-1:], added.stride()[-1:]) == ((n_k,), (1,))  # as kernels read it
    table = added if is_table else torch.where(keep, added, added.new_full((), -math.inf))
    unseeing = ~keep.any(-1) if bias is None else table.amax(-1) == -math.inf
    if real_queries is not None:
        unseeing = unseeing | ~real_queries[:, None]
    return table, unseeing if unseeing.any() else None


def _rectangles(*of_mask: object) -> tuple[list[Rectangle] | None]:
    """What `rectangles.of_mask` returns, as something that is kept also where it is None."""
    return (rectangles.of_mask(*of_mask),)


def _is_quicker(parts: list[Rectangle], q: Tensor, n_k: int) -> bool:
    """Whether to call the kernel for each rectangle is quicker than to call it once with a table of the mask.

    The bits of a call depend on the number of threads by this: to call a kernel takes many as long as one, and of what
    is saved each has its share.
    """
    B, H, n_q, D = q.shape
    threads, of_parts = torch.get_num_threads(), 0
    for samples, queries, keys, causal in parts:
        tasks = H * (samples.stop - samples.start) * -(-(queries.stop - queries.start) // _ROWS)
        of_parts += -(-tasks // threads) * _ROWS * (keys.stop - keys.start) // (2 if causal else 1) * D + _OF_A_CALL
    return of_parts <= B * H * n_q * n_k * D // threads + _OF_A_CALL


def _size(parts: list[Rectangle], name: str) -> int:
    """How many queries or keys there are in all rectangles."""
    return sum((x.samples.stop - x.samples.start) * (getattr(x, name).stop - getattr(x, name).start) for x in parts)


def _is_finite(*tensors: Tensor) -> bool:
    """Whether all are numbers; False as well where a sum of them overflows, which those of fp16 would soon."""
    of_each = (x.aminmax() if x.dtype == torch.float16 and x.numel() else (x.sum(),) for x in tensors)
    return all(math.isfinite(number) for numbers in of_each for number in numbers)


def _readable(x: Tensor, rows: Tensor | None) -> Tensor:
    """`x` with zeros in the rows that nobody may read."""
    return x if rows is None else _zeroed_(x.clone(), rows[:, None])


def _zeroed_(x: Tensor, rows: Tensor) -> Tensor:
    """`x` [B, H, n, ...] with 0 written where `rows` is False: by its bits, in a fifth of the time of masked_fill."""
    bits, rows = _INTEGERS[x.element_size()], rows.view(*rows.shape, *(1,) * (x.dim() - 3))
    x.view(bits).bitwise_and_(-rows.to(bits))
    return x


def _as_kernels_read(x: Tensor) -> Tensor:
    """`x`, or a copy where a row of it lies in a way that the kernels take without asking, and read wrongly."""
    is_read = x.stride(-1) == 1 and (x.device.type == "cpu" or _rows_are_aligned(x))
    return x if is_read else x.clone(memory_format=torch.contiguous_format)


def _rows_are_aligned(x: Tensor) -> bool:
    """Whether each row begins at a multiple of 16 bytes, which kernels for GPUs load at once."""
    if x.data_ptr() % 16:
        return False
    return x.is_contiguous() or not any([x.element_size() * step % 16 for step in x.stride()[:-1]])  # noqa: C419


def _widened(x: Tensor, width: int) -> Tensor:
    """`x` [..., D] with zeros up to this width: PyTorch's kernels have one for queries, keys and values."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _for_each_head(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _sum_of_groups(*gradients: Tensor, H_kv: int) -> tuple[Tensor, ...]:
    return tuple(x if x.shape[1] == H_kv else x.unflatten(1, (H_kv, -1)).sum(2) for x in gradients)


def _has_flash(q: Tensor) -> bool:
    """Whether PyTorch's flash kernels take this on its GPU; the memory-efficient ones take the rest."""
    return q.dtype in _16_BITS and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _rounds_fp32(q: Tensor) -> bool:
    """Whether the memory-efficient kernel multiplies this in three products of TF32.

    On an H100 gradients were 2 to 4 times as far off as they may be; the outputs were not.
    """
    return q.dtype == torch.float32 and q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _has_cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> bool:
    """Whether PyTorch's own function would take cuDNN's kernel, as versions, GPUs and its users' settings have it."""
    if q.shape[2] < _CUDNN_QUERIES:
        return False
    taken = torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=k.shape[1] != q.shape[1])
    return taken == SDPBackend.CUDNN_ATTENTION.value


_one_at_a_time = threading.RLock()


@contextmanager
def _deterministic(device: torch.device, wanted: bool) -> Iterator[None]:
    """PyTorch's deterministic mode, in which its kernels for GPUs add up in a fixed order; on CPUs they always do.

    The strict one: with `warn_only` those of attention add up in any order. The mode is one of the whole process, so
    that of two threads that compute gradients each waits until the other has launched its kernels.
    """
    if device.type == "cpu" or not wanted:
        yield
        return
    with _one_at_a_time:
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        fills = deterministic.fill_uninitialized_memory
        # Not torch.use_deterministic_algorithms, which imports the compiler, and changes its mode as well.
        torch._C._set_deterministic_algorithms(True, warn_only=False)
        deterministic.fill_uninitialized_memory = False  # which would write all gradients twice
        try:
            yield
        finally:
            torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])
            deterministic.fill_uninitialized_memory = fills
