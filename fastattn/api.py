"""What users call on tensors. Every call is validated here, once, and becomes a `Spec`; nothing below checks again."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import ops
from .backends import BACKENDS, objections, select
from .spec import Mask, Spec, accumulation_dtype


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + bias) v over the keys that the mask shows, as [B, H, n_q, d_v]; or (o, lse).

    score = softcap * tanh(scale * q k^T / softcap) + bias - alibi_slope * |position_q - position_k|, then the mask. A
    query that may see nothing gives exactly 0 (lse -inf, gradients 0), and what padding hides is never read.

    Args:
        q: queries [B, H, n_q, D]; fp32, fp16, bf16 or fp64.
        k: keys [B, H_kv, n_k, D], in the dtype and on the device of q; H_kv divides H, and query head h reads key head
            h // (H / H_kv).
        v: values [B, H_kv, n_k, d_v].
        mask: which keys each query may see; None is all of them.
        scale: factor on q k^T; None is 1 / sqrt(D).
        bias: float, broadcastable to [B, H, n_q, n_k], added to the scores; it gets a gradient. -inf hides a key.
        softcap: bound on |scale * q k^T|.
        alibi_slopes: float [H] or [B, H].
        sinks: float [H], one more logit in each softmax, without a value.
        dropout_p: probability to drop a weight; the others are divided by 1 - dropout_p. Applied whenever it is above
            0, as in PyTorch's scaled_dot_product_attention.
        generator: where the dropout seed is drawn from; None is PyTorch's default generator.
        deterministic: the same inputs give the same bits.
        return_lse: also return log(sum(exp(score))) over the visible keys (and the sink), in nats, fp32 (fp64 for
            fp64 q); it is differentiable and ignores dropout.
        backend: None for the first that takes the call (the reference with a `FallbackWarning`), "fused" for the first
            fused one, or a name from `fastattn info`; what is named is used or refused, never replaced.

    Returns:
        o [B, H, n_q, d_v] in the dtype of q, or (o, lse).

    Raises:
        ValueError: the call is malformed.
        NotImplementedError: the call is well formed, but no (or not the named) backend computes it.

    Sources:
        Dao, FlashAttention-2 (2023); Rabe and Staats, Self-attention Does Not Need O(n^2) Memory (2021).

    Example:
        >>> import torch, fastattn
        >>> q = k = v = torch.ones(1, 1, 2, 4)
        >>> real_keys = torch.tensor([[True, False]])
        >>> fastattn.attention(q, k, v, fastattn.Mask(real_keys=real_keys), backend="reference").shape
        torch.Size([1, 1, 2, 4])
    """
    found = None
    if bias is softcap is alibi_slopes is sinks is generator is backend is None:
        found = _at_once(q, k, v, mask, scale, dropout_p)
    if found is None:
        q, k, v, spec = _validated(
            q, k, v, mask, scale, bias, softcap, alibi_slopes, sinks, dropout_p, generator, deterministic
        )
        found = ops.attention(q, k, v, spec, select(q, k, v, spec, backend))
    return found if return_lse else found[0]


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    align: str = "start",
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention inside each of several documents that lie one after the other, as [total_q, H, d_v]; or (o, lse).

    Document i has the queries cu_seqlens_q[i], ..., cu_seqlens_q[i + 1] - 1 and the keys that cu_seqlens_k says; either
    may be none. Tokens after the last boundary are padding: never read, their output 0. Nothing waits for the device,
    and the longest length need not be known.

    Args:
        q: queries [total_q, H, D]; k: keys [total_k, H_kv, D]; v: values [total_k, H_kv, d_v].
        cu_seqlens_q: int32 or int64 [documents + 1] on the device of q: 0, and then where each document ends. That it
            begins at 0, never falls and ends within q is checked on the CPU only, and not while compiling: elsewhere
            the check would have to wait for the device.
        cu_seqlens_k: the same for k and v; None where they are those of the queries.
        causal, window: as in `Mask`; positions count in the document.
        align: where the queries of a document stand if it has another number of keys: at "start", its first query at
            its first key; or at "end", its last query at its last key (as in FlashAttention).
        scale, softcap, alibi_slopes ([H]), sinks, dropout_p, generator, deterministic, return_lse, backend: as in
            `attention`. There is no bias: one over all pairs of tokens would be larger than all the rest.

    Returns:
        o [total_q, H, d_v] in the dtype of q, or (o, lse) with lse [H, total_q], in the order that FlashAttention's
        varlen functions return it in.

    Raises:
        ValueError, NotImplementedError: as in `attention`.

    Example:
        >>> import torch, fastattn
        >>> q = k = v = torch.ones(5, 2, 8)
        >>> _, lse = fastattn.attention_varlen(
        ...     q, k, v, torch.tensor([0, 3, 4]), causal=True, scale=0.0, return_lse=True, backend="reference")
        >>> lse[0].exp()  # how many keys each token sees
        tensor([1., 2., 3., 1., 0.])
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 3:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be [tokens, heads, head_dim], got {got}")
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k must be [total_k, H_kv, {q.shape[2]}] like q, got {list(k.shape)}")
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(f"v must be [{k.shape[0]}, {k.shape[1]}, d_v] like k, got {list(v.shape)}")
    if align not in ("start", "end"):
        raise ValueError(f"align must be 'start' or 'end', got {align!r}")
    _check_boundaries("cu_seqlens_q", cu_seqlens_q, q)
    documents_q = documents_k = _document_of_tokens(cu_seqlens_q, len(q))
    q_start: int | Tensor = 0
    if cu_seqlens_k is None:
        if len(k) != len(q):
            raise ValueError(f"cu_seqlens_k must be given where k has another length than q, got {len(k)} and {len(q)}")
    else:
        _check_boundaries("cu_seqlens_k", cu_seqlens_k, k)
        if len(cu_seqlens_k) != len(cu_seqlens_q):
            raise ValueError(
                f"cu_seqlens_k must be [{len(cu_seqlens_q)}] like cu_seqlens_q, got {list(cu_seqlens_k.shape)}"
            )
        documents_k = _document_of_tokens(cu_seqlens_k, len(k))
        if align == "end" and (causal or window != (None, None) or alibi_slopes is not None):
            more_keys = cu_seqlens_k.diff() - cu_seqlens_q.diff()
            q_start = torch.nn.functional.pad(more_keys, (0, 1))[documents_q][None]  # padding, -1, takes the last one
    mask = Mask(causal, q_start, window, segments=(documents_q[None], documents_k[None]))
    found = attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), mask, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes,
        sinks=sinks, dropout_p=dropout_p, generator=generator, deterministic=deterministic, return_lse=return_lse,
        backend=backend,
    )  # fmt: skip
    if return_lse:
        return found[0][0].transpose(0, 1), found[1][0]
    return found[0].transpose(0, 1)


def _document_of_tokens(cu_seqlens: Tensor, total: int) -> Tensor:
    """int64 [total]: the number of the document of each token, -1 after the last one."""
    token = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens.contiguous(), token, right=True) - 1
    return document.masked_fill(document == len(cu_seqlens) - 1, -1)


def attention_weights(
    q: Tensor,
    k: Tensor,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    average_heads: bool = True,
    backend: str | None = None,
) -> Tensor:
    """The weights each query gives the keys, after dropout: [B, n_q, n_k] averaged over the heads, or [B, H, n_q, n_k].

    exp(score - lse) in the dtype of q, 0 for hidden keys. A fused backend averages as it computes: [B, H, n_q, n_k] is
    never in memory unless asked for. It is differentiable to any order, at the cost of plain PyTorch over blocks of
    queries. Arguments as in `attention`.

    Raises:
        ValueError: the call is malformed.
        NotImplementedError: the call is well formed, but no (or not the named) backend computes it.

    Example:
        >>> import torch, fastattn
        >>> q = k = torch.ones(1, 2, 3, 4)
        >>> fastattn.attention_weights(q, k, fastattn.Mask(causal=True))[0, 1]
        tensor([0.5000, 0.5000, 0.0000])
    """
    q, k, no_v, spec = _validated(
        q, k, _no_values(k), mask, scale, bias, softcap, alibi_slopes, sinks, dropout_p, generator, True
    )
    chosen = select(q, k, no_v, spec, backend, function="weights")
    return ops.weights(q, k, None, spec, chosen, average_heads=bool(average_heads))


def attention_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    average_heads: bool = True,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The results of `attention` and of `attention_weights` under one dropout: (o, weights). Arguments as there.

    o has the bits that `attention` gives alone; the weights are a second pass, from the lse of the first.

    Example:
        >>> import torch, fastattn
        >>> q = k = v = torch.ones(1, 2, 3, 4)
        >>> o, weights = fastattn.attention_with_weights(q, k, v, backend="reference")
        >>> o.shape, weights.shape
        (torch.Size([1, 2, 3, 4]), torch.Size([1, 3, 3]))
    """
    q, k, v, spec = _validated(q, k, v, mask, scale, bias, softcap, alibi_slopes, sinks, dropout_p, generator, True)
    chosen = select(q, k, _no_values(k), spec, backend, function="weights")
    o, lse = ops.attention(q, k, v, spec, select(q, k, v, spec, backend))
    return o, ops.weights(q, k, lse.detach(), spec, chosen, average_heads=bool(average_heads))


def attention_received(
    q: Tensor,
    k: Tensor,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The weight each key receives from all queries together, [B, H, n_k], in O(n_q + n_k) memory.

    The sum over the queries of exp(score - lse), without dropout: what heat-maps of evidence show, and what decides
    which keys a cache keeps. In fp32 (fp64 for fp64 q), 0 for keys that nobody sees, differentiable like
    `attention_weights`. Arguments as in `attention`.

    Raises:
        ValueError: the call is malformed.
        NotImplementedError: the call is well formed, but no (or not the named) backend computes it.

    Sources:
        Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models (2023).

    Example:
        >>> import torch, fastattn
        >>> q = k = torch.ones(1, 1, 2, 4)
        >>> fastattn.attention_received(q, k, fastattn.Mask(causal=True))
        tensor([[[1.5000, 0.5000]]])
    """
    q, k, no_v, spec = _validated(q, k, _no_values(k), mask, scale, bias, softcap, alibi_slopes, sinks, 0.0, None, True)
    return ops.received(q, k, spec, select(q, k, no_v, spec, backend, function="received"))


def top_keys(
    q: Tensor,
    k: Tensor,
    mask: Mask | None = None,
    *,
    top_k: int,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(weights, indices) of the top_k keys that each query gives the most weight, each [B, H, n_q, top_k].

    The weights exp(score - lse), without dropout, descend; equal ones stand in the order of their keys. A query that
    sees fewer than top_k keys has the weight 0 and the index -1 in the places that are left. Memory is
    O(n_q * top_k + n_k).

    The weights are fp32 (fp64 for fp64 q) whatever the dtype of q: rounded to bf16, which has 8 bits, many would be
    equal, and an order among them could not be told. They are differentiable like `attention_weights`; which keys they
    belong to is not.

    Args:
        top_k: how many keys, at least 1. The others as in `attention`.

    Raises:
        ValueError: the call is malformed.
        NotImplementedError: the call is well formed, but no (or not the named) backend computes it.

    Example:
        >>> import torch, fastattn
        >>> q = k = torch.ones(1, 1, 2, 4)
        >>> weights, indices = fastattn.top_keys(q, k, fastattn.Mask(causal=True), top_k=2)
        >>> weights[0, 0], indices[0, 0]
        (tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]]), tensor([[ 0, -1],
                [ 0,  1]]))
    """
    if not _is_int(top_k) or top_k < 1:
        raise ValueError(f"top_k must be an int of at least 1, got {top_k!r}")
    q, k, no_v, spec = _validated(q, k, _no_values(k), mask, scale, bias, softcap, alibi_slopes, sinks, 0.0, None, True)
    return ops.top_keys(q, k, spec, top_k, select(q, k, no_v, spec, backend, function="top_keys"))


def _no_values(k: Tensor) -> Tensor:
    """A v of width 0, for a call that has none."""
    return k[..., :0] if isinstance(k, Tensor) and k.dim() else k


def merge(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """(o, lse) of attention over two sets of keys together, from the results of attention over each of them.

    o = (exp(lse1) o1 + exp(lse2) o2) / exp(lse) with lse = log(exp(lse1) + exp(lse2)). The sets must have no key in
    common; sinks belong to one of the two calls only. A query that sees nothing in one set has the results of the
    other, and one that sees nothing in both has 0 and -inf. Differentiable to any order, in at least fp32.

    Args:
        o1, o2: outputs [..., n_q, d_v] of one dtype, as of `attention`.
        lse1, lse2: [..., n_q], fp32 or fp64, in nats. (Those of `attention_varlen` have the heads first: pass `lse.T`.)

    Returns:
        o in the dtype of o1, and lse.

    Sources:
        Milakov and Gimelshein, Online normalizer calculation for softmax (2018).

    Example:
        >>> import torch, fastattn
        >>> q = k = v = torch.randn(1, 2, 6, 8)
        >>> halves = (
        ...     fastattn.attention(q, k[:, :, part], v[:, :, part], return_lse=True, backend="reference")
        ...     for part in (slice(0, 2), slice(2, 6)))
        >>> o, lse = fastattn.merge(*next(halves), *next(halves))
        >>> torch.allclose(o, fastattn.attention(q, k, v, backend="reference"), atol=1e-6)
        True
    """
    for name, x in (("o1", o1), ("lse1", lse1), ("o2", o2), ("lse2", lse2)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a floating Tensor, got {got}")
        if x.device != o1.device:
            raise ValueError(f"{name} must be on {o1.device} like o1, got {x.device}")
    if o1.dim() == 0 or o2.shape != o1.shape or o2.dtype != o1.dtype:
        raise ValueError(
            f"o2 must be {list(o1.shape)} of {o1.dtype} like o1, [..., n_q, d_v], got {list(o2.shape)} of {o2.dtype}"
        )
    for name, x in (("lse1", lse1), ("lse2", lse2)):
        if x.shape != o1.shape[:-1]:
            raise ValueError(f"{name} must be {list(o1.shape[:-1])} like o1, got {list(x.shape)}")
    dtype = accumulation_dtype(torch.promote_types(lse1.dtype, lse2.dtype))
    lse1, lse2 = lse1.to(dtype), lse2.to(dtype)
    nothing1, nothing2 = lse1 == -math.inf, lse2 == -math.inf
    # Numbers stand in for -inf, so that no derivative of what is not taken is NaN. All is smooth where both are equal.
    more = lse1.masked_fill(nothing1, 0) - lse2.masked_fill(nothing2, 0)
    both = lse1 - torch.nn.functional.logsigmoid(more)
    lse = torch.where(nothing1, lse2, torch.where(nothing2, lse1, both))
    weight1 = torch.sigmoid(more).masked_fill(nothing2, 1).masked_fill(nothing1, 0)
    weight2 = torch.sigmoid(-more).masked_fill(nothing1, 1).masked_fill(nothing2, 0)
    o = weight1[..., None] * o1.to(dtype) + weight2[..., None] * o2.to(dtype)
    return o.to(o1.dtype), lse


@dataclass(frozen=True)
class Explanation:
    """Which backend computes a call, and why the others do not. `str()` of it is meant for people.

    backend: the name of the backend that an automatic choice takes; None if none does.
    objections: by name of backend, in order of preference, its sentences; an empty list means it takes the call.
    """

    backend: str | None
    objections: dict[str, list[str]]

    def __str__(self) -> str:
        lines = [f"backend: {self.backend or 'none'}"]
        for name, why in self.objections.items():
            willing = "takes this call" if name == self.backend else "would take this call too"
            lines.append(f"  {name}: {'; '.join(why) or willing}")
        return "\n".join(lines)


def explain(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, **options: object) -> Explanation:
    """Which backend `attention` with these arguments would choose, and every other backend's objections in sentences.

    Args:
        options: `scale`, `bias`, `softcap`, `alibi_slopes`, `sinks`, `dropout_p`, `generator` and `deterministic`, as
            in `attention`.

    Example:
        >>> import torch, fastattn
        >>> q = k = v = torch.ones(1, 1, 2, 4, dtype=torch.float64)
        >>> fastattn.explain(q, k, v).backend
        'reference'
    """
    defaults = dict.fromkeys(("scale", "bias", "softcap", "alibi_slopes", "sinks", "generator"))
    defaults |= {"dropout_p": 0.0, "deterministic": True}
    if unknown := options.keys() - defaults.keys():
        raise TypeError(f"explain() got unknown options: {', '.join(sorted(unknown))}")
    q, k, v, spec = _validated(q, k, v, mask, **(defaults | options))
    refusals = {b.NAME: objections(b, q, k, v, spec, named=False) for b in BACKENDS}
    return Explanation(next((name for name, why in refusals.items() if not why), None), refusals)


def _at_once(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float | None, dropout_p: float
) -> tuple[Tensor, Tensor] | None:
    """(o, lse) of a call that is seen to be right without a look at every argument in turn; None for any other.

    Where a call is short, as for the next token, that look takes longer than what is computed.
    """
    if (
        type(dropout_p) is float
        and dropout_p == 0
        and (scale is None or type(scale) is float)
        and (mask is None or isinstance(mask, Mask))
    ):
        mask = _EVERYTHING if mask is None else mask
        if (
            mask.dense is None
            and (mask.segments is None or (type(mask.segments) is tuple and len(mask.segments) == 2))
            and type(mask.q_start) is int
            and type(mask.window) is tuple
            and len(mask.window) == 2
            and all(width is None or (type(width) is int and width >= 0) for width in mask.window)
        ):
            return ops.at_once(q, k, v, mask, scale)
    return None


_EVERYTHING = Mask()


def _validated(
    q, k, v, mask, scale, bias, softcap, alibi_slopes, sinks, dropout_p, generator, deterministic
) -> tuple[Tensor, Tensor, Tensor, Spec]:
    """q, k and v after autocast, and the Spec; ValueError names the argument, what it must be and what it was."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a Tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{name} must be [batch, heads, length, head_dim], got {list(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(f"{name} must be of a floating dtype, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on {q.device} like q, got {x.device}")
    q, k, v = _autocast(q, k, v)
    B, H, n_q, D = q.shape
    H_kv, n_k = k.shape[1:3]
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"k and v must be of dtype {q.dtype} like q, got {k.dtype} and {v.dtype}")
    if k.shape[0] != B or k.shape[3] != D:
        raise ValueError(f"k must be [{B}, H_kv, n_k, {D}] like q, got {list(k.shape)}")
    if H_kv == 0 or H % H_kv != 0:
        raise ValueError(f"the heads of k must divide the {H} heads of q, got {H_kv}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v must be [{B}, {H_kv}, {n_k}, d_v] like k, got {list(v.shape)}")
    if scale is None:
        scale = D**-0.5 if D else 1.0
    elif not (_is_number(scale) and -math.inf < scale < math.inf):
        raise ValueError(f"scale must be a finite number, got {scale}")
    if softcap is not None and not (_is_number(softcap) and 0 < softcap < math.inf):
        raise ValueError(f"softcap must be a positive finite number or None, got {softcap}")
    if not _is_number(dropout_p) or not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p must be between 0 and 1, got {dropout_p}")
    mask = Mask() if mask is None else mask
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a fastattn.Mask or None, got {type(mask).__name__}")
    _check_mask(mask, q.device, B, H, n_q, n_k)
    _check_learned("bias", bias, q.device, [(B, H, n_q, n_k)], broadcast=True)
    _check_learned("alibi_slopes", alibi_slopes, q.device, [(H,), (B, H)])
    _check_learned("sinks", sinks, q.device, [(H,)])
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
    seed = draw_seed(q.device, generator) if dropout_p > 0 else None
    return (
        q,
        k,
        v,
        Spec(mask, float(scale), bias, softcap, alibi_slopes, sinks, float(dropout_p), seed, bool(deterministic)),
    )


def draw_seed(device: torch.device, generator: torch.Generator | None) -> Tensor:
    """The seed of one call's dropout, an int64 scalar on `device`: drawing it there needs no synchronisation."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device, generator=generator)


def _check_mask(mask: Mask, device: torch.device, B: int, H: int, n_q: int, n_k: int) -> None:
    for name, x in mask.tensors().items():
        if not isinstance(x, Tensor):
            raise ValueError(f"mask.{name} must be a Tensor, got {type(x).__name__}")
        if x.device != device:
            raise ValueError(f"mask.{name} must be on {device} like q, got {x.device}")
    if isinstance(mask.q_start, Tensor):
        _check_table("q_start", mask.q_start, (B,), (B, n_q), integer=True)
    elif not _is_int(mask.q_start):
        raise ValueError(f"mask.q_start must be an int or an integer tensor {[B]} or {[B, n_q]}, got {mask.q_start!r}")
    if not isinstance(mask.window, tuple) or len(mask.window) != 2:
        raise ValueError(f"mask.window must be a pair (left, right), got {mask.window!r}")
    for side, width in zip(("left", "right"), mask.window, strict=True):
        if width is not None and not (_is_int(width) and width >= 0):
            raise ValueError(f"mask.window's {side} must be None or an int of at least 0, got {width!r}")
    if mask.real_keys is not None:
        _check_table("real_keys", mask.real_keys, (B, n_k))
    if mask.real_queries is not None:
        _check_table("real_queries", mask.real_queries, (B, n_q))
    if mask.segments is not None:
        _check_table("segments[0]", mask.segments[0], (B, n_q), integer=True)
        _check_table("segments[1]", mask.segments[1], (B, n_k), integer=True)
    if mask.dense is not None:
        if mask.dense.dtype != torch.bool:
            raise ValueError(f"mask.dense must be bool (True may see; a float mask is a bias), got {mask.dense.dtype}")
        if not _broadcasts(mask.dense.shape, (B, H, n_q, n_k)):
            raise ValueError(f"mask.dense must be broadcastable to {[B, H, n_q, n_k]}, got {list(mask.dense.shape)}")


def _check_boundaries(name: str, x: Tensor, tokens: Tensor) -> None:
    """That `x` can be the cu_seqlens of `tokens`; what it holds is looked at where that needs no synchronisation."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be an int32 or int64 Tensor, got {got}")
    if x.device != tokens.device:
        raise ValueError(f"{name} must be on {tokens.device} like q, got {x.device}")
    if x.dim() != 1 or len(x) == 0:
        raise ValueError(f"{name} must be [documents + 1], got {list(x.shape)}")
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        total = len(tokens)
        if x[0] != 0 or (x.diff() < 0).any() or x[-1] > total:
            raise ValueError(f"{name} must begin at 0, never fall, and end at {total} at most, got {x.tolist()}")


def _check_table(name: str, x: Tensor, *shapes: tuple[int, ...], integer: bool = False) -> None:
    if integer and x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"mask.{name} must be int32 or int64, got {x.dtype}")
    if not integer and x.dtype != torch.bool:
        raise ValueError(f"mask.{name} must be bool (True is real), got {x.dtype}")
    if tuple(x.shape) not in shapes:
        raise ValueError(f"mask.{name} must be {_either(shapes)}, got {list(x.shape)}")


def _check_learned(
    name: str, x: Tensor | None, device: torch.device, shapes: list[tuple[int, ...]], broadcast: bool = False
) -> None:
    if x is None:
        return
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be a floating Tensor, got {kind}")
    if x.device != device:
        raise ValueError(f"{name} must be on {device} like q, got {x.device}")
    if not (_broadcasts(x.shape, shapes[0]) if broadcast else tuple(x.shape) in shapes):
        how = "broadcastable to " if broadcast else ""
        raise ValueError(f"{name} must be {how}{_either(shapes)}, got {list(x.shape)}")


def _either(shapes: Iterable[tuple[int, ...]]) -> str:
    return " or ".join(str(list(shape)) for shape in shapes)


def _broadcasts(shape: torch.Size, target: tuple[int, ...]) -> bool:
    """Whether `shape` broadcasts to exactly `target`."""
    return len(shape) <= len(target) and all(
        n == 1 or n == wanted  # not `in`: torch.compile does not find a symbolic length in a tuple
        for n, wanted in zip(reversed(shape), reversed(target), strict=False)
    )


def _is_int(x: object) -> bool:
    return isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool)


def _is_number(x: object) -> bool:
    return _is_int(x) or isinstance(x, (float, torch.SymFloat))


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast does to the arguments of scaled_dot_product_attention: all but fp64 in the autocast dtype."""
    if not torch._C._is_any_autocast_enabled():  # quicker than the rest, and mostly the end
        return tensors
    device = tensors[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)
