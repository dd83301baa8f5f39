"""The public functions on tensors: attention, its weights, and merging."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn, TypedDict, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import blocks, decoding, ops
from .backends import objections, order_of, selfcheck
from .plan import after_autocast, derivatives_wanted, prepare
from .spec import (
    DropoutSeed,
    Mask,
    RelativeBias,
    accumulation_dtype,
    as_int,
    as_number,
    is_dense,
    is_jagged,
    refuse_unknown,
)
from .validation import (
    check_flags,
    check_in_one_process,
    check_jagged,
    check_merge,
    check_top_k,
    check_varlen,
    in_spec,
    validated,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .parallel import Plan


class _TermsOfSpec(TypedDict, total=False):
    scale: float | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    dropout_p: float
    generator: torch.Generator | DropoutSeed | None
    deterministic: bool


class _TermsOfAll(_TermsOfSpec, total=False):
    """Keyword arguments of `attention` and `attention_varlen`, for type checkers."""

    backend: str | None


class _TermsOfExplain(_TermsOfSpec, total=False):
    bias: Tensor | RelativeBias | None
    return_lse: bool


class Terms(_TermsOfAll, total=False):
    """Keyword arguments of `attention` alone, without the plan."""

    bias: Tensor | RelativeBias | None


class _TermsAndPlan(Terms, total=False):
    plan: Plan | None


class _TermsOfDocuments(_TermsOfAll, total=False):
    bias: RelativeBias | None
    causal: bool
    align: str
    window: tuple[int | None, int | None]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **terms: Unpack[_TermsAndPlan],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = ...,
    *,
    return_lse: Literal[True],
    **terms: Unpack[_TermsAndPlan],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = ..., *, return_lse: bool, **terms: Unpack[_TermsAndPlan]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    bias: Tensor | RelativeBias | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | DropoutSeed | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    backend: str | None = None,
    plan: Plan | None = None,
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + bias) v over the keys that the mask shows, as [B, H, n_q, d_v]; or (o, lse).

    score = softcap * tanh(scale * q k^T / softcap) + bias - alibi_slope * |position_q - position_k|, then the mask. A
    query that may see nothing gives exactly 0 (lse -inf, gradients 0), and what padding hides is never read.

    Nested tensors of layout torch.jagged, [B, H, j, D], are documents of these lengths: `attention_varlen` computes
    them with the `causal` and the `window` of the mask, and the output is nested like q.

    Args:
        q: queries [B, H, n_q, D]; fp32, fp16, bf16 or fp64.
        k: keys [B, H_kv, n_k, D], in the dtype and on the device of q; H_kv divides H, and query head h reads key head
            h // (H / H_kv).
        v: values [B, H_kv, n_k, d_v].
        mask: which keys each query may see; None is all of them.
        scale: factor on q k^T; None is 1 / sqrt(D).
        bias: float, broadcastable to [B, H, n_q, n_k], added to the scores; it gets a gradient. -inf hides a key. Or a
            `RelativeBias`, a table by distance, as in T5.
        softcap: bound on |scale * q k^T|.
        alibi_slopes: float [H] or [B, H].
        sinks: float [H], one more logit in each softmax, without a value.
        dropout_p: probability to drop a weight; the others are divided by 1 - dropout_p. Applied whenever it is above
            0, as in PyTorch's scaled_dot_product_attention.
        generator: where the dropout seed is drawn from; None is PyTorch's default generator. Or a `DropoutSeed`.
        deterministic: the same inputs give the same bits.
        return_lse: also return log(sum(exp(score))) over the visible keys (and the sink), in nats, fp32 (fp64 for
            fp64 q); it is differentiable and ignores dropout.
        backend: None for the first that takes the call, as `explain` says; with a `FallbackWarning` where that is
            slower for want of a kernel. "fused" for any kernel of this package, or a name from `fastattn info`; what
            is named is used or refused, never replaced.
        plan: made by `fastattn.parallel.plan` where the tokens of each sample are on several ranks. q, k and v are then
            those of this rank, and so are o and lse; `mask` (None for that of the plan) and the other tensors are those
            of all tokens, on every rank. Every rank makes the same call. Gradients of bias, alibi_slopes and sinks are
            to be summed over the ranks, like those of the parameters of a model, or by `plan.replicated`. Dropout
            is that of one process with the generator of the first rank.

    Returns:
        o [B, H, n_q, d_v] in the dtype of q, or (o, lse).

    Raises:
        ValueError: the call is malformed; with a plan, on every rank where it is on one, or where one has another.
        NotImplementedError: the call is well formed, but no (or not the named) backend computes it.
        TypeError: an argument is not known here; the message says what to write for it.

    Sources:
        Dao, FlashAttention-2 (2023); Rabe and Staats, Self-attention Does Not Need O(n^2) Memory (2021).

    Example:
        >>> import torch, fastattn
        >>> q = k = v = torch.ones(1, 1, 2, 4)
        >>> real_keys = torch.tensor([[True, False]])
        >>> fastattn.attention(q, k, v, fastattn.Mask(real_keys=real_keys)).shape
        torch.Size([1, 1, 2, 4])
    """
    if unknown:
        refuse_unknown(attention, unknown)
    if type(return_lse) is not bool:
        check_flags(return_lse=return_lse)
        return_lse = bool(return_lse)  # which `ops.short_way` takes alone
    result = None
    if plan is None and (blocks.ENTERED or (not is_compiling() and blocks.LEFT)):
        plan = blocks.of_call(q)
    of_dtensors = type(q) is not Tensor and type(q).__name__ == "DTensor"
    if of_dtensors or not (plan is None or blocks.is_here(plan)):
        terms: Terms = {
            "scale": as_number(scale), "bias": bias, "softcap": as_number(softcap), "alibi_slopes": alibi_slopes,
            "sinks": sinks, "dropout_p": as_number(dropout_p), "generator": generator, "deterministic": deterministic,
            "backend": backend,
        }  # fmt: skip
        if of_dtensors:
            from .parallel.dtensors import attention as over_ranks  # which calls this function in turn

            if is_compiling() and any(placement.is_shard(2) for placement in q.placements):
                over_ranks = torch.compiler.disable(over_ranks)  # a graph ends before it: it makes a plan
        elif is_compiling():
            from .parallel.compiled import attention as over_ranks
        else:
            from .parallel.attention import attention as over_ranks
        result = over_ranks(q, k, v, mask, plan, **terms)
    elif backend is generator is None and type(dropout_p) is float and dropout_p == 0.0 and type(deterministic) is bool:
        result = ops.short_way(q, k, v, mask, scale, bias, softcap, alibi_slopes, sinks, return_lse)
    if result is None and is_jagged(q):
        check_jagged(q, k, v, mask, bias)
        terms = {} if mask is None else {"causal": mask.causal, "window": mask.window}
        o, lse = attention_varlen(
            *(x.values().transpose(0, 1) for x in (q, k, v)), q.offsets(), k.offsets(), **terms, scale=scale,
            softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, dropout_p=dropout_p, generator=generator,
            deterministic=deterministic, return_lse=True, backend=backend,
        )  # fmt: skip
        nested = torch.nested.nested_tensor_from_jagged
        result = nested(o, q.offsets()).transpose(1, 2), nested(lse.T, q.offsets()).transpose(1, 2)
    elif result is None and is_compiling():
        result = ops.attention_in_graph(
            q, k, v, mask, as_number(scale), bias, as_number(softcap), alibi_slopes, sinks, as_number(dropout_p),
            generator, deterministic, backend, return_lse,
        )  # fmt: skip
    if result is None:
        result = ops.attention(
            *prepare(
                q, k, v, mask, scale, bias, softcap, alibi_slopes, sinks, dropout_p, generator, deterministic, backend,
                "forward" if return_lse else "output",
            )
        )  # fmt: skip
    return result if return_lse else result[0]


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **terms: Unpack[_TermsOfDocuments],
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    *,
    return_lse: Literal[True],
    **terms: Unpack[_TermsOfDocuments],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    *,
    return_lse: bool,
    **terms: Unpack[_TermsOfDocuments],
) -> Tensor | tuple[Tensor, Tensor]: ...
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
    bias: RelativeBias | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | DropoutSeed | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    backend: str | None = None,
    **unknown: object,
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
            `attention`.
        bias: a `RelativeBias`, by the distance in the document, where `cu_seqlens_k` is None. One for all pairs of
            tokens would be larger than all the rest.

    Returns:
        o [total_q, H, d_v] in the dtype of q, or (o, lse) with lse [H, total_q], in the order that FlashAttention's
        varlen functions return it in.

    Raises:
        ValueError, NotImplementedError: as in `attention`.

    Example:
        >>> import torch, fastattn
        >>> q = k = v = torch.ones(5, 2, 8)
        >>> _, lse = fastattn.attention_varlen(
        ...     q, k, v, torch.tensor([0, 3, 4]), causal=True, scale=0.0, return_lse=True)
        >>> lse[0].exp()  # how many keys each token sees
        tensor([1., 2., 3., 1., 0.])
    """
    if unknown:
        refuse_unknown(attention_varlen, unknown)
    check_flags(return_lse=return_lse)
    check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, align)
    if bias is not None and (cu_seqlens_k is not None or not isinstance(bias, RelativeBias)):
        how = "None where cu_seqlens_k is given" if isinstance(bias, RelativeBias) else "a RelativeBias or None"
        raise ValueError(f"bias must be {how}, got a {type(bias).__name__}")
    if isinstance(alibi_slopes, Tensor) and is_dense(alibi_slopes) and alibi_slopes.shape != q.shape[1:2]:
        raise ValueError(f"alibi_slopes must be [{q.shape[1]}], got {list(alibi_slopes.shape)}")
    documents_q = documents_k = _document_of_tokens(cu_seqlens_q, q.shape[0])[None]
    q_offset: int | Tensor = 0
    if cu_seqlens_k is not None:
        documents_k = _document_of_tokens(cu_seqlens_k, k.shape[0])[None]
        more_keys = cu_seqlens_k.diff() - cu_seqlens_q.diff()
        # What is no bool is for the mask to refuse.
        if align == "end" and (causal is not False or window != (None, None) or alibi_slopes is not None):
            q_offset = torch.nn.functional.pad(more_keys, (0, 1))[documents_q]  # padding, -1, takes the last one
    mask = Mask(causal, q_offset=q_offset, window=window, segment_ids=(documents_q, documents_k))
    attend = functools.partial(
        attention, scale=scale, bias=bias, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        dropout_p=dropout_p, generator=generator, deterministic=deterministic, return_lse=True, backend=backend,
    )  # fmt: skip
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    learned = (q, k, v, alibi_slopes, sinks)
    if cu_seqlens_k is not None and decoding.is_needed(learned, cu_seqlens_q, cu_seqlens_k, dropout_p):
        start = more_keys if align == "end" else torch.zeros_like(more_keys)
        o, lse = decoding.attention(attend, *after_autocast(q, k, v), mask, cu_seqlens_q, cu_seqlens_k, start)
    else:
        o, lse = attend(q, k, v, mask)
    return (o[0].transpose(0, 1), lse[0]) if return_lse else o[0].transpose(0, 1)


def _document_of_tokens(cu_seqlens: Tensor, total: int) -> Tensor:
    """int64 [total]: the number of the document of each token, -1 after the last one."""
    token = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens.contiguous(), token, right=True) - 1
    return document.masked_fill(document == cu_seqlens.shape[0] - 1, -1)


def attention_weights(
    q: Tensor,
    k: Tensor,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    bias: Tensor | RelativeBias | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | DropoutSeed | None = None,
    average_heads: bool = True,
    backend: str | None = None,
    **unknown: NoReturn,  # type checkers allow none
) -> Tensor:
    """Attention weights after dropout: [B, n_q, n_k] averaged over the heads, or [B, H, n_q, n_k].

    A weight is exp(score - lse), and 0 for a hidden key. A fused backend averages as it computes: [B, H, n_q, n_k] is
    never in memory unless asked for. Differentiable to any order: on a CPU the kernels compute the first derivatives,
    and plain PyTorch over blocks of queries all others.

    Args:
        q: queries [B, H, n_q, D].
        k: keys [B, H_kv, n_k, D].
        mask, scale, bias, softcap, alibi_slopes, sinks, dropout_p, generator, backend: see `attention`.
        average_heads: return the mean over the heads instead of the weights of each head.

    Returns:
        Weights [B, n_q, n_k], or [B, H, n_q, n_k] if not `average_heads`, in the dtype of q.

    Raises:
        ValueError: the call is malformed.
        NotImplementedError: the call is well formed, but no (or not the named) backend computes it.

    Example:
        >>> import torch, fastattn
        >>> q = k = torch.ones(1, 2, 3, 4)
        >>> fastattn.attention_weights(q, k, fastattn.Mask(causal=True))[0, 1]
        tensor([0.5000, 0.5000, 0.0000])
    """
    if unknown:
        refuse_unknown(attention_weights, unknown)
    blocks.refuse("attention weights")
    check_in_one_process(q=q, k=k)
    check_flags(average_heads=average_heads)
    q, k, _, spec, decided = prepare(
        q, k, _no_values(k), mask, scale, bias, softcap, alibi_slopes, sinks, dropout_p, generator, True, backend,
        "weights",
    )  # fmt: skip
    return ops.weights(q, k, None, spec, decided, average_heads=bool(average_heads))


def attention_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    bias: Tensor | RelativeBias | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | DropoutSeed | None = None,
    average_heads: bool = True,
    backend: str | None = None,
    **unknown: NoReturn,  # type checkers allow none
) -> tuple[Tensor, Tensor]:
    """Output and weights of attention under one dropout mask: (o, weights).

    o has the bits that `attention` gives alone; the weights are a second pass, from the lse of the first,
    or come out of the first on a CPU where there are few keys.

    Args:
        q: queries [B, H, n_q, D].
        k: keys [B, H_kv, n_k, D].
        v: values [B, H_kv, n_k, d_v].
        mask, scale, bias, softcap, alibi_slopes, sinks, dropout_p, generator, backend: see `attention`. A named backend
            must compute both the output and the weights.
        average_heads: see `attention_weights`.

    Returns:
        o [B, H, n_q, d_v], and weights [B, n_q, n_k] or, if not `average_heads`, [B, H, n_q, n_k]; both in the dtype
        of q.

    Raises:
        ValueError: the call is malformed.
        NotImplementedError: the call is well formed, but no (or not the named) backend computes it.

    Example:
        >>> import torch, fastattn
        >>> q = k = v = torch.ones(1, 2, 3, 4)
        >>> o, weights = fastattn.attention_with_weights(q, k, v)
        >>> o.shape, weights.shape
        (torch.Size([1, 2, 3, 4]), torch.Size([1, 3, 3]))
    """
    if unknown:
        refuse_unknown(attention_with_weights, unknown)
    blocks.refuse("attention weights")
    check_flags(average_heads=average_heads)
    average_heads = bool(average_heads)
    if backend is generator is None and type(dropout_p) is float and dropout_p == 0.0:
        result = ops.short_way(q, k, v, mask, scale, bias, softcap, alibi_slopes, sinks, False, average_heads)
        if result is not None:
            return result
    check_in_one_process(q=q, k=k, v=v)
    if is_compiling():
        result = ops.attention_in_graph(
            q, k, v, mask, as_number(scale), bias, as_number(softcap), alibi_slopes, sinks, as_number(dropout_p),
            generator, True, backend, False, average_heads,
        )  # fmt: skip
        if result is not None:
            return result
    q, k, v, spec, decided = prepare(
        q, k, v, mask, scale, bias, softcap, alibi_slopes, sinks, dropout_p, generator, True, backend, "with weights"
    )
    o, lse = ops.attention(q, k, v, spec, decided)
    return o, ops.weights(q, k, lse.detach(), spec, decided, average_heads=average_heads)


def attention_received(
    q: Tensor,
    k: Tensor,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    bias: Tensor | RelativeBias | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    backend: str | None = None,
    **unknown: NoReturn,  # type checkers allow none
) -> Tensor:
    """Sum of the attention weights of each key over the queries, [B, H, n_k], in O(n_q + n_k) memory.

    A weight is exp(score - lse), without dropout. Heat-maps show these sums, and caches choose by them which keys to
    keep. Differentiable like `attention_weights`.

    Args:
        q: queries [B, H, n_q, D].
        k: keys [B, H_kv, n_k, D].
        mask, scale, bias, softcap, alibi_slopes, sinks, backend: see `attention`.

    Returns:
        Sums [B, H, n_k], fp32 (fp64 for fp64 q); 0 for a key that no query sees.

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
    if unknown:
        refuse_unknown(attention_received, unknown)
    blocks.refuse("attention weights")
    check_in_one_process(q=q, k=k)
    q, k, _, spec, decided = prepare(
        q, k, _no_values(k), mask, scale, bias, softcap, alibi_slopes, sinks, 0.0, None, True, backend, "received"
    )
    return ops.received(q, k, spec, decided)


def top_keys(
    q: Tensor,
    k: Tensor,
    mask: Mask | None = None,
    *,
    top_k: int,
    scale: float | None = None,
    bias: Tensor | RelativeBias | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    backend: str | None = None,
    **unknown: NoReturn,  # type checkers allow none
) -> tuple[Tensor, Tensor]:
    """Largest attention weights of each query and the keys they belong to: (weights, indices), [B, H, n_q, top_k] each.

    A weight is exp(score - lse), without dropout. The weights are in fp32 whatever the dtype of q: rounded to bf16,
    many would be equal and have no order. They are differentiable like `attention_weights`; the choice of the keys is
    not. Memory is O(n_q * top_k + n_k).

    Args:
        q: queries [B, H, n_q, D].
        k: keys [B, H_kv, n_k, D].
        top_k: number of keys, at least 1; may exceed n_k.
        mask, scale, bias, softcap, alibi_slopes, sinks, backend: see `attention`.

    Returns:
        Weights, fp32 (fp64 for fp64 q), in descending order and equal ones in the order of their keys; and indices of
        keys, int64. A query that sees fewer than top_k keys has weight 0 and index -1 in the remaining places.

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
    if unknown:
        refuse_unknown(top_keys, unknown)
    blocks.refuse("attention weights")
    check_in_one_process(q=q, k=k)
    top_k = as_int(top_k)
    check_top_k(top_k)
    q, k, _, spec, decided = prepare(
        q, k, _no_values(k), mask, scale, bias, softcap, alibi_slopes, sinks, 0.0, None, True, backend, "top_keys"
    )
    return ops.top_keys(q, k, spec, top_k, decided)


def _no_values(k: Tensor) -> Tensor:
    """A v of width 0, for a call that has none; a k that is refused under its own name."""
    return k[..., :0] if isinstance(k, Tensor) and is_dense(k) and k.dim() else k


def merge(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor, *, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys together, (o, lse), from the results of attention over each of them.

    o = (exp(lse1) o1 + exp(lse2) o2) / exp(lse) with lse = log(exp(lse1) + exp(lse2)). The sets must have no key in
    common. A query that sees nothing in one set has the results of the other, and one that sees nothing in both has 0
    and -inf. Differentiable to any order, in at least fp32.

    Results of calls with `sinks` may not be merged: such a call gives -inf for a query that it shows no key, which says
    nothing of the sink. Leave them out of the calls, and give them to the last `merge` of several.

    Args:
        o1, o2: outputs [..., n_q, d_v] of one shape, dtype and device, as of `attention`.
        lse1, lse2: [..., n_q], floating, in nats. (Those of `attention_varlen` have the heads first: pass `lse.T`.)
        sinks: float [H] where lse1 is [..., H, n_q], one more logit in the softmax over both sets, without a value; or
            None.

    Returns:
        o [..., n_q, d_v] in the dtype of o1, and lse [..., n_q] in the wider dtype of lse1 and lse2, at least fp32.

    Raises:
        ValueError: an argument is no floating tensor, or shapes, dtypes or devices do not fit each other.

    Sources:
        Milakov and Gimelshein, Online normalizer calculation for softmax (2018).

    Example:
        >>> import torch, fastattn
        >>> q = k = v = torch.randn(1, 2, 6, 8)
        >>> halves = (
        ...     fastattn.attention(q, k[:, :, part], v[:, :, part], return_lse=True)
        ...     for part in (slice(0, 2), slice(2, 6)))
        >>> o, lse = fastattn.merge(*next(halves), *next(halves), sinks=torch.zeros(2))
        >>> torch.allclose(o, fastattn.attention(q, k, v, sinks=torch.zeros(2)), atol=1e-6)
        True
    """
    check_merge(o1, lse1, o2, lse2, sinks)
    dtype = accumulation_dtype(torch.promote_types(lse1.dtype, lse2.dtype))
    lse1, lse2 = lse1.to(dtype), lse2.to(dtype)
    lse, weight1, weight2 = _together(lse1, lse2)
    # What stands where a set shows nothing is not taken, NaN neither.
    of1, of2 = (o.masked_fill((lse == -math.inf)[..., None], 0).to(dtype) for o, lse in ((o1, lse1), (o2, lse2)))
    o = weight1[..., None] * of1 + weight2[..., None] * of2
    if sinks is not None:
        nothing = lse == -math.inf
        with_sinks, weight, _ = _together(lse, sinks.to(dtype)[:, None].expand_as(lse))
        o, lse = weight[..., None] * o, with_sinks.masked_fill(nothing, -math.inf)
    return o.to(o1.dtype), lse


def _together(lse1: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log(exp(lse1) + exp(lse2)), and the share of each in that sum; shares of 0 where both are -inf."""
    nothing1, nothing2 = lse1 == -math.inf, lse2 == -math.inf
    # Numbers stand in for -inf, so that no derivative of what is not taken is NaN. All is smooth where both are equal.
    more = lse1.masked_fill(nothing1, 0) - lse2.masked_fill(nothing2, 0)
    of1, of2 = (x - torch.nn.functional.logsigmoid(y) for x, y in ((lse1, more), (lse2, -more)))
    both = torch.where(more > 0, of1, of2)  # the smaller one minus a large number would have the rounding of both
    lse = torch.where(nothing1, lse2, torch.where(nothing2, lse1, both))
    weight1 = torch.sigmoid(more).masked_fill(nothing2, 1).masked_fill(nothing1, 0)
    weight2 = torch.sigmoid(-more).masked_fill(nothing1, 1).masked_fill(nothing2, 0)
    return lse, weight1, weight2


@dataclass(frozen=True)
class Explanation:
    """The backend that computes a call, and the reasons why others do not. `str()` of it is meant for people.

    backend: the name of the backend that an automatic choice takes; None if none does.
    objections: by name of backend, in order of preference, its sentences; an empty list means it takes the call.
    order: the reason for that order.
    """

    backend: str | None
    objections: dict[str, list[str]]
    order: str

    def __str__(self) -> str:
        lines = [f"backend: {self.backend or 'none'}", f"  order: {self.order}"]
        for name, why in self.objections.items():
            willing = "takes this call" if name == self.backend else "would take this call too"
            lines.append(f"  {name}: {'; '.join(why) or willing}")
        return "\n".join(lines)


def explain(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, **options: Unpack[_TermsOfExplain]
) -> Explanation:
    """Choice of a backend for a call of `attention`, with the objections of every other backend; computes nothing.

    Args:
        q, k, v, mask: see `attention`.
        options: `scale`, `bias`, `softcap`, `alibi_slopes`, `sinks`, `dropout_p`, `generator`, `deterministic` and
            `return_lse`; see `attention`.

    Returns:
        An `Explanation`: the name of the chosen backend, and the objections of each backend in sentences.

    Raises:
        ValueError: the call is malformed.
        TypeError: an option is unknown.

    Example:
        >>> import torch, fastattn
        >>> q = k = v = torch.ones(1, 1, 2, 4, dtype=torch.float64)
        >>> fastattn.explain(q, k, v).backend
        'torch'
    """
    defaults = dict.fromkeys(("scale", "bias", "softcap", "alibi_slopes", "sinks", "generator"))
    defaults |= {"dropout_p": 0.0, "deterministic": True}
    return_lse = options.pop("return_lse", False)
    check_flags(return_lse=return_lse)
    refuse_unknown(explain, sorted(options.keys() - defaults.keys()), options=(*defaults, "return_lse"))
    if is_jagged(q):  # which `attention` computes as packed documents
        check_jagged(q, k, v, mask, options.get("bias"))
        terms = {} if mask is None else {"causal": mask.causal, "window": mask.window}
        q, k, v, of_q, of_k = (*(x.values()[None] for x in (q, k, v)), q.offsets(), k.offsets())
        documents = (_document_of_tokens(ends, x.shape[2])[None] for ends, x in ((of_q, q), (of_k, k)))
        mask = Mask(**terms, segment_ids=tuple(documents))
    q, k, v = after_autocast(q, k, v)
    numbers = {name: as_number(options.get(name, defaults[name])) for name in ("scale", "softcap", "dropout_p")}
    bias, by_distance = in_spec(options.get("bias"), q, k, mask)
    spec = validated(q, k, v, mask, **(defaults | options | numbers | {"bias": bias}), bias_by_distance=by_distance)
    training = derivatives_wanted(q, k, v, spec.bias, spec.alibi_slopes, spec.sinks)
    candidates, order = order_of(q, k, v, spec, training)
    trusted = order.backends if order.trusted else ()
    about = {"function": "forward" if training or return_lse else "output", "training": training}
    refusals = {b.NAME: objections(b, q, k, v, spec, named=b.NAME in trusted, **about) for b in candidates}
    for backend in candidates:  # what is trusted may have failed its check since it was measured
        failed = selfcheck.objection(backend, q.device, q.dtype, training, may_check=False)
        if failed and not refusals[backend.NAME]:
            refusals[backend.NAME] = [failed]
    return Explanation(next((name for name, why in refusals.items() if not why), None), refusals, order.why)
