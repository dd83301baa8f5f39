"""Attention over keys and values in pages, as servers keep them: new ones are added, and all read where they lie."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from . import blocks, ops, plan
from .api import merge
from .backends import NoBackendError, made_by, warn_of_copies
from .spec import Mask, accumulation_dtype, as_int, can_be_read, is_dense, refuse_unknown
from .validation import QUANTIZED, check_flags, check_numbers, check_paged, check_pages, check_places

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class _Terms(TypedDict, total=False):
        """Keyword arguments of `attention_paged`, for type checkers."""

        k: Tensor | None
        v: Tensor | None
        causal: bool
        window: tuple[int | None, int | None]
        tree: Tensor | None
        prefix: int
        scale: float | None
        softcap: float | None
        alibi_slopes: Tensor | None
        sinks: Tensor | None
        backend: str | None
        k_scales: Tensor | None
        v_scales: Tensor | None


@overload
def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    cu_seqlens_q: Tensor | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **terms: Unpack[_Terms],
) -> Tensor: ...
@overload
def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    cu_seqlens_q: Tensor | None = ...,
    *,
    return_lse: Literal[True],
    **terms: Unpack[_Terms],
) -> tuple[Tensor, Tensor]: ...
def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] = (None, None),
    tree: Tensor | None = None,
    prefix: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the newest tokens of requests to all of theirs, in pages, as [total_q, H, d_v]; or (o, lse).

    Request i has lengths[i] tokens, of which token j lies in page block_table[i, j // page_size], in row j % page_size.
    Its queries are the last of them. Requests may share pages. What pages hold beyond the lengths, and entries of the
    table beyond them, are never read. There are no gradients.

    The backends cpu, triton and cuda read pages where they lie, in fp32, fp16 and bf16; rows of a page that are side by
    side for each head are read fastest, which k_pages has as the transpose of [pages, H_kv, page_size, D]. Others copy
    the pages of each request first; where none was named, a `FallbackWarning` tells of it.

    Args:
        q: queries [total_q, H, D], those of a request one after the other.
        k_pages: keys [pages, page_size, H_kv, D]; v_pages: values [pages, page_size, H_kv, d_v]; of any strides.
        block_table: int32 or int64 [B, most pages of a request].
        lengths: int32 or int64 [B], the tokens of each request, the new ones included.
        cu_seqlens_q: int32 or int64 [B + 1]: 0, and then where the queries of each request end; None where each has
            one. Tokens after the last boundary are padding, whose output is 0. On the CPU it costs no wait for a GPU.
        k, v: keys and values of the tokens of q, [total_q, H_kv, D or d_v], which are written to their places in
            the pages first; or None where they are there.
        causal: a query sees the tokens of its request up to itself, and no later ones.
        window: how many keys to the (left, right) of itself a query sees, as in `Mask`.
        tree: bool [n, n] or [B, n, n], in the place of `causal` where every request has n queries: which of these n
            tokens each of them sees, as in speculative decoding with a tree of drafts. All see those before.
        prefix: how many tokens at their beginning all requests with queries have in the same pages, whole ones, and no
            queries among them: a prompt that they share. Their keys are read once for all, and not once for each.
        scale, softcap, alibi_slopes ([H] or [B, H]), sinks, return_lse, backend: as in `attention`.
        k_scales, v_scales: fp32 [pages, page_size, H_kv] where k_pages and v_pages are of int8 or float8_e4m3fn: what
            each row is to be multiplied by. Rows of k and v are written rounded to nearest, with the scale that gives
            the largest of them 127 in int8 or 448 in float8_e4m3fn. The backends cpu, triton and cuda read such pages
            where they lie; no GPU has run those of cuda on them yet. With k and v no row may be both a key and a value.

    Returns:
        o [total_q, H, d_v] in the dtype of q, or (o, lse) with lse [H, total_q].

    Raises:
        ValueError: the call is malformed; nothing has been written then. Values of block_table and lengths are checked
            on the CPU only.
        RuntimeError: k or v lies in the pages that it is to be written to; nothing has been written then.
        NotImplementedError: the call is well formed, but no (or not the named) backend computes it.
        TypeError: an argument is not known here.

    Sources:
        Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention (2023); Ye et al.,
        Cascade Inference (2024), for `prefix`.

    Example:
        >>> import torch, fastattn
        >>> k_pages, v_pages = torch.zeros(4, 2, 1, 8), torch.zeros(4, 2, 1, 8)
        >>> table, lengths = torch.tensor([[3, 0], [2, 1]]), torch.tensor([3, 1])
        >>> q = k = v = torch.ones(2, 1, 8)
        >>> o = fastattn.attention_paged(q, k_pages, v_pages, table, lengths, k=k, v=v, scale=0.0)
        >>> o[:, 0, 0], v_pages[:, :, 0, 0]
        (tensor([0.3333, 1.0000]), tensor([[1., 0.],
                [0., 0.],
                [1., 0.],
                [0., 0.]]))
    """
    if unknown:
        refuse_unknown(attention_paged, unknown)
    blocks.refuse("attention to pages")
    prefix = as_int(prefix)
    terms = (scale, softcap, alibi_slopes, sinks)
    if plan.is_traced():
        of_step = (block_table, lengths, cu_seqlens_q, tree, causal, window, prefix)
        result = _in_graph(q, k_pages, v_pages, k_scales, v_scales, k, v, of_step, terms, backend, return_lse)
        if result is not None:
            return result
    return _computed(
        q, k_pages, v_pages, block_table, lengths, cu_seqlens_q, k, v, causal, window, tree, prefix, terms, return_lse,
        backend, k_scales, v_scales,
    )  # fmt: skip


def _computed(
    q, k_pages, v_pages, block_table, lengths, cu_seqlens_q, k, v, causal, window, tree, prefix, terms, return_lse,
    backend, k_scales, v_scales,
):  # fmt: skip
    if return_lse is False and tree is None and backend is None and type(prefix) is int and prefix == 0:
        of_step = block_table, lengths, cu_seqlens_q
        o = _short_way(q, k_pages, v_pages, of_step, k, v, causal, window, terms, (k_scales, v_scales))
        if o is not None:
            return o
    with torch.no_grad():
        return _attention_paged(
            q, k_pages, v_pages, block_table, lengths, cu_seqlens_q, k, v, causal, window, tree, prefix, terms,
            return_lse, backend, k_scales, v_scales,
        )  # fmt: skip


_OF_STEP = (
    "Tensor block_table, Tensor lengths, Tensor? cu_seqlens_q, Tensor? tree, bool causal, SymInt? window_left, "
    "SymInt? window_right, SymInt prefix, float? scale, float? softcap, Tensor? alibi_slopes, Tensor? sinks, "
    "str? backend, bool return_lse, str made_by) -> (Tensor o, Tensor lse)"
)
torch.library.define(
    "fastattn::attention_paged",
    f"(Tensor q, Tensor k_pages, Tensor v_pages, Tensor? k_scales, Tensor? v_scales, {_OF_STEP}",
)
torch.library.define(
    "fastattn::attention_paged_",
    "(Tensor q, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor(c!)? k_scales, Tensor(d!)? v_scales, Tensor k, "
    f"Tensor v, {_OF_STEP}",
)


def _in_graph(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    of_step: tuple,
    terms: tuple,
    backend: str | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor] | None:
    """The result of a call that is traced, as one op, which is checked and computed where it runs.

    None for a malformed call, whose checks are traced.
    """
    block_table, lengths, cu_seqlens_q, tree, causal, window, prefix = of_step
    scale, softcap, alibi_slopes, sinks = terms
    well_formed = (
        all(isinstance(x, Tensor) for x in (q, k_pages, v_pages, block_table, lengths))
        and all(x is None or isinstance(x, Tensor) for x in (k_scales, v_scales, k, v, cu_seqlens_q, tree))
        and all(x is None or isinstance(x, Tensor) for x in (alibi_slopes, sinks))
        and q.dim() == 3
        and v_pages.dim() == 4
        and (k is None) is (v is None)
        and isinstance(causal, bool)
        and isinstance(window, tuple)
        and len(window) == 2
        and isinstance(return_lse, bool)
        and (backend is None or isinstance(backend, str))
    )
    if not well_formed:
        return None
    check_numbers(scale, softcap, 0.0)  # here, where Dynamo ends its graph before numbers that it does not know
    of_call = *terms, backend, return_lse, made_by(q.device)
    others = (block_table, lengths, cu_seqlens_q, tree, causal, *window, prefix, *of_call)
    pages = (q, k_pages, v_pages, k_scales, v_scales)
    if k is None:
        o, lse = torch.ops.fastattn.attention_paged(*pages, *others)
    else:
        o, lse = torch.ops.fastattn.attention_paged_(*pages, k, v, *others)
    return (o, lse) if return_lse else o


def _op(*arguments):
    return _op_with_new(*arguments[:5], None, None, *arguments[5:])


def _op_with_new(
    q, k_pages, v_pages, k_scales, v_scales, k, v, block_table, lengths, cu_seqlens_q, tree, causal, left, right,
    prefix, scale, softcap, alibi_slopes, sinks, backend, return_lse, _,
):  # fmt: skip
    terms = (scale, softcap, alibi_slopes, sinks)
    result = _computed(
        q, k_pages, v_pages, block_table, lengths, cu_seqlens_q, k, v, causal, (left, right), tree, prefix, terms,
        return_lse, backend, k_scales, v_scales,
    )  # fmt: skip
    o, lse = result if return_lse else (result, q.new_empty(0))
    return o.contiguous(), lse.contiguous()


def _fake_op(q, k_pages, v_pages, *others):
    (total, H, _), return_lse = q.shape, others[-2]
    lse = q.new_empty((H, total), dtype=accumulation_dtype(q.dtype)) if return_lse else q.new_empty(0)
    return q.new_empty(total, H, v_pages.shape[3]), lse


_LIBRARY = torch.library.Library("fastattn", "FRAGMENT")  # which takes its kernels back where it is forgotten
for _name, _kernel in (("attention_paged", _op), ("attention_paged_", _op_with_new)):
    torch.library.impl(f"fastattn::{_name}", "CompositeExplicitAutograd", _kernel)
    torch.library.register_fake(f"fastattn::{_name}", _fake_op)
    _default = getattr(torch.ops.fastattn, _name).default
    _of_autograd = functools.partial(ops.without_derivative, _default, _kernel)
    _LIBRARY.impl(_name, _of_autograd, "Autograd", with_keyset=True)


def _short_way(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    of_step: tuple[Tensor, Tensor, Tensor | None],
    k: Tensor | None,
    v: Tensor | None,
    causal: bool,
    window: tuple[int | None, int | None],
    terms: tuple,
    scales: tuple[Tensor | None, Tensor | None],
) -> Tensor | None:
    """o of a call on the CPU in the step of the one before, with as many queries of each request; None for any other.

    For a few keys the general road takes longer than the kernel, in every layer. So one function in C++ judges and
    computes such a call, as in `short_way` of fastattn/ops.py.
    """
    step, known = _last_step, ops.short_functions()
    if step is None or known is None or not step.is_of(of_step):
        return None
    if len(step.groups) != 1 or not isinstance(step.groups[0].requests, slice):  # of which some have no queries
        return None
    if step.prefix or causal is not step.causal or repr(window) != step.window:
        return None
    (group,), (scale, softcap, alibi_slopes, sinks), (_, _, attend_paged, _) = step.groups, terms, known
    writes = k is not None
    if writes and not _are_places(k_pages, v_pages, scales[0]):
        return None
    at = group.at if writes else (None, None)
    o = attend_paged(
        q, k_pages, v_pages, group.mask, scale, None, softcap, alibi_slopes, sinks, group.int_table, *scales, k, v, *at,
        group.n,
    )  # fmt: skip
    if writes and o is not None:
        increment_version([x for x in (k_pages, v_pages, *scales) if x is not None])
    return o


def _are_places(k_pages: object, v_pages: object, k_scales: object) -> bool:
    """Whether new tokens can be written to these pages, as far as the kernel does not look; see `check_places`."""
    if not all(isinstance(x, Tensor) and is_dense(x) for x in (k_pages, v_pages)):
        return False
    if k_scales is not None and torch._C._is_alias_of(k_pages, v_pages):
        return False
    return 0 not in k_pages.stride() and 0 not in v_pages.stride()


def _attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    cu_seqlens_q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    causal: bool,
    window: tuple[int | None, int | None],
    tree: Tensor | None,
    prefix: int,
    terms: tuple,
    return_lse: bool,
    backend: str | None,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    scale, softcap, alibi_slopes, sinks = terms
    check_flags(return_lse=return_lse)
    check_paged(
        q, k_pages, v_pages, block_table, lengths, cu_seqlens_q, k, v, tree, alibi_slopes, sinks, prefix, k_scales,
        v_scales,
    )  # fmt: skip
    groups = _groups(block_table, lengths, cu_seqlens_q, tree, (*k_pages.shape[:2], prefix, causal, window, q.device))
    options = {"scale": scale, "softcap": softcap, "sinks": None if prefix else sinks, "backend": backend}
    scales = None if k_scales is None or v_scales is None else (k_scales, v_scales)
    slopes_of_all = alibi_slopes if isinstance(alibi_slopes, Tensor) and alibi_slopes.dim() == 2 else None

    def prepare(queries: Tensor, table: Tensor, mask: Mask, slopes: Tensor | None) -> Callable:
        q = queries.transpose(1, 2)
        return prepared(q, k_pages, v_pages, table, mask, alibi_slopes=slopes, scales=scales, **options)

    calls = []
    for group in groups:
        slopes = alibi_slopes if slopes_of_all is None else slopes_of_all[group.requests]
        calls.append(prepare(q[group.tokens].unflatten(0, (-1, group.n)), group.table, group.mask, slopes))
    if prefix and groups:
        every = torch.cat([torch.arange(len(q), device=q.device)[group.tokens] for group in groups])[None]
        shared = 1 if alibi_slopes is not None else q.shape[1] // k_pages.shape[2]  # heads as more queries of one
        positions = prefix + torch.cat([group.places.flatten() for group in groups]).repeat_interleave(shared)
        mask = Mask(q_offset=(positions - torch.arange(len(positions), device=q.device))[None], window=window)
        queries = q[every].unflatten(2, (-1, shared)).transpose(2, 3).flatten(1, 2)
        table = block_table[groups[0].requests]  # of requests with queries: what others have is not checked
        of_prefix = prepare(queries, table[:1, : prefix // k_pages.shape[1]], mask, alibi_slopes)
    if k is not None and v is not None:  # only now, when nothing more can be refused
        check_places({"k_pages": k_pages, "v_pages": v_pages}, k=k, v=v)
        for group in groups:
            at, (of_k, of_v) = group.at, (x[group.tokens] for x in (k, v))
            if scales is None:
                k_pages[at], v_pages[at] = of_k, of_v
            else:
                k_pages[at], k_scales[at] = quantized(of_k, k_pages.dtype)
                v_pages[at], v_scales[at] = quantized(of_v, v_pages.dtype)
    all_alike = len(groups) == 1 and isinstance(groups[0].requests, slice)
    if all_alike and groups[0].n * len(lengths) == len(q) and not prefix:  # nothing to gather, as mostly
        o, lse = (x.transpose(1, 2).flatten(0, 1) for x in calls[0]())
        return (o, lse.T) if return_lse else o
    o = q.new_zeros(*q.shape[:2], v_pages.shape[3])
    lse = q.new_full((len(q), q.shape[1]), -math.inf, dtype=accumulation_dtype(q.dtype))
    if prefix and groups:
        of_queries = (x.transpose(1, 2).unflatten(1, (-1, shared)).transpose(2, 3).flatten(2, 3) for x in of_prefix())
        o[every], lse[every] = of_queries
    for group, call in zip(groups, calls, strict=True):
        of_tokens = call()
        if prefix:
            before = (x[group.tokens].unflatten(0, (-1, group.n)).transpose(1, 2) for x in (o, lse))
            of_tokens = merge(*before, *of_tokens, sinks=sinks)
        o[group.tokens], lse[group.tokens] = (x.transpose(1, 2).flatten(0, 1) for x in of_tokens)
    return (o, lse.T) if return_lse else o


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [..., D] as int8 or float8_e4m3fn [..., D] and the fp32 scales [...] that give them back, nearly.

    The largest element of a row becomes the largest number of the dtype, so that no conversion overflows.
    """
    scales = (x.abs().amax(-1) if x.shape[-1] else x.sum(-1)).float() / QUANTIZED[dtype]
    x = x / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    return (x if dtype.is_floating_point else x.round()).to(dtype), scales


@dataclass
class _Group:
    """Requests with as many queries each.

    n: queries of a request. requests: [b], which of all; tokens: [b * n], their queries among all. Slices stand for all
        of them, which is the most frequent case: nothing is gathered for it.
    table: [b, pages], without those of the prefix. page_size: of these.
    places: int64 [b, n], of the queries among the tokens of their request after the prefix.
    mask: of the queries and the keys in the table.
    """

    n: int
    requests: Tensor | slice
    tokens: Tensor | slice
    table: Tensor
    page_size: int
    places: Tensor
    mask: Mask
    _at: tuple[Tensor, Tensor] | None = None

    @property
    def at(self) -> tuple[Tensor, Tensor]:
        """int64 [b * n] each: the pages of the tokens, and their rows there."""
        if self._at is None:  # no cached_property, which takes a lock before Python 3.12, and Dynamo takes none
            pages = self.table.gather(1, self.places // self.page_size)
            self._at = pages.flatten().long(), (self.places % self.page_size).flatten()
        return self._at

    @cached_property
    def int_table(self) -> Tensor:
        """The table in int32, contiguous."""
        return self.table.int().contiguous()


@dataclass(frozen=True)
class _Step:
    """What the calls of a step of generation have in common, one for each layer of a model.

    given: copies of block_table, lengths and cu_seqlens_q: nothing that is kept follows the tensors given.
    options, window: of `_groups`, written out, where True is not 1 and what is changed in place is another.
    """

    given: tuple[Tensor, Tensor, Tensor | None]
    options: str
    prefix: int
    causal: bool
    window: str
    groups: list[_Group]

    def is_of(self, given: tuple[Tensor, Tensor, Tensor | None]) -> bool:
        """Whether these have the same values."""
        return all(map(_are_equal, given, self.given))


_Options = tuple[int, int, int, bool, tuple[int | None, int | None], torch.device]
_last_step: _Step | None = None


def _groups(
    block_table: Tensor, lengths: Tensor, cu_seqlens_q: Tensor | None, tree: Tensor | None, options: _Options
) -> list[_Group]:
    """The requests of a step of generation, which are checked.

    Every layer of a model asks for the same ones, so those of the last step are kept, and known by what its tensors
    hold: where that is to be read, on the CPU.

    Args:
        options: pages, page_size, prefix, causal, window, and the device.
    """
    global _last_step
    if options[-1].type != "cpu" or tree is not None or is_compiling() or ops.is_watched():
        return _grouped(block_table, lengths, cu_seqlens_q, tree, options)
    given, written = (block_table, lengths, cu_seqlens_q), repr(options)
    step = _last_step
    if step is None or step.options != written or not step.is_of(given):
        copies = tuple(None if x is None else x.clone() for x in given)
        prefix, causal, window = options[2:5]
        step = _last_step = _Step(copies, written, prefix, causal, repr(window), _grouped(*copies, tree, options))
    return step.groups


def _are_equal(x: Tensor | None, known: Tensor | None) -> bool:
    if type(x) is not Tensor or known is None:
        return x is known
    like = x.dtype == known.dtype and x.device == known.device and x.layout == known.layout
    return like and torch.equal(x, known)


def _grouped(
    block_table: Tensor, lengths: Tensor, cu_seqlens_q: Tensor | None, tree: Tensor | None, options: _Options
) -> list[_Group]:
    pages, page_size, prefix, causal, window, device = options
    if cu_seqlens_q is None:
        parts = [(1, slice(None), slice(None))] if len(lengths) else []
    else:
        begin = cu_seqlens_q.long().cpu()
        counts, parts = begin.diff(), []
        for n in counts.unique().tolist():
            of_n = (counts == n).nonzero()[:, 0]
            if n and len(of_n) == len(lengths):
                parts.append((n, slice(None), slice(0, n * len(lengths))))
            elif n:
                parts.append(
                    (n, of_n.to(device), (begin[of_n, None] + torch.arange(n, device="cpu")).flatten().to(device))
                )
    if tree is not None and any(n != tree.shape[-1] for n, _, _ in parts):
        got = sorted({n for n, _, _ in parts})
        raise ValueError(f"tree must be of the {got} queries of a request, got {list(tree.shape)}")
    causal = Mask(causal, window=window).causal and tree is None  # a Mask says what is wrong with either
    groups = []
    for n, requests, tokens in parts:
        first = block_table[parts[0][1]][:1]
        check_pages(block_table[requests], lengths[requests], n, pages, page_size, prefix, first)
        table, after = block_table[requests, prefix // page_size :], lengths[requests] - prefix
        if can_be_read(after):
            table = table[:, : -(-int(after.max()) // page_size)]
        from_end = torch.arange(table.shape[1] * page_size, device=device) - after[:, None]
        dense = None if tree is None else _seen(tree.expand(len(lengths), n, n)[requests], from_end + n)
        mask = Mask(causal, q_offset=after - n, window=window, real_keys=from_end < 0, dense=dense)
        places = after[:, None].long() - n + torch.arange(n, device=device)
        groups.append(_Group(n, requests, tokens, table, page_size, places, mask))
    return groups


def _seen(tree: Tensor, place: Tensor) -> Tensor:
    """bool [b, 1, n, n_k]: the keys before a tree, at places below 0, and what bool [b, n, n] shows of those in it."""
    n = tree.shape[1]
    inside = tree.gather(2, place.clamp(0, n - 1)[:, None].expand(-1, n, -1).long())
    return ((place < 0)[:, None] | inside)[:, None]


def prepared(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    mask: Mask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    backend: str | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Callable[[], tuple[Tensor, Tensor]]:
    """A call of `attention` without gradients, as (o, lse), where sample b has its keys in the pages table[b].

    Args:
        q: [B, H, n_q, D].
        k_pages, v_pages: [pages, page_size, H_kv, D or d_v].
        table: int32 or int64 [B, pages of a sample].
        mask: of these queries and the page_size * (pages of a sample) keys.
        scale, softcap, alibi_slopes, sinks, backend: as in `attention`.
        scales: of the rows of k_pages and v_pages where those are quantized, fp32 [pages, page_size, H_kv].

    Raises:
        ValueError, NotImplementedError: as in `attention`. The call itself raises neither.
    """
    (_, page_size, H_kv, _), (B, pages) = k_pages.shape, table.shape
    k, v = (q.new_empty(()).expand(B, H_kv, pages * page_size, x.shape[3]) for x in (k_pages, v_pages))
    arguments = (mask, scale, None, softcap, alibi_slopes, sinks, 0.0, None, True, backend)
    k_pages, v_pages = k_pages.transpose(1, 2), v_pages.transpose(1, 2)
    of_rows = () if scales is None else tuple(x.transpose(1, 2) for x in scales)
    function = "forward_quantized" if of_rows else "forward_paged"
    with _without_autocast(q.device):  # which would have the pages in another dtype
        try:
            q, _, _, spec, decided = plan.prepare(q, k, v, *arguments, function)
            if decided.plain and all(map(plan.is_plain, (k_pages, v_pages, *of_rows))):
                return lambda: getattr(decided.backend, function)(q, k_pages, v_pages, *of_rows, table, spec)
            why = "these tensors are of a subclass or a transform, for which none reads pages where they lie"
        except NoBackendError:
            _, _, _, _, decided = plan.prepare(q, k, v, *arguments)
            why = "none that reads pages where they lie takes it"
    if backend is None:
        warn_of_copies(decided.backend.NAME, why)

    def of_copies() -> tuple[Tensor, Tensor]:
        in_use = table.long()
        if mask.real_keys is not None:  # what else the table has need be no page
            in_use = in_use.masked_fill(~mask.real_keys.unflatten(1, (pages, page_size)).any(-1), 0)
        k, v = (x[in_use] for x in (k_pages, v_pages))
        if of_rows:
            factors = (x[in_use, ..., None].to(accumulation_dtype(q.dtype)) for x in of_rows)
            k, v = ((x.to(factor.dtype) * factor).to(q.dtype) for x, factor in zip((k, v), factors, strict=True))
        k, v = (x.transpose(1, 2).flatten(2, 3) for x in (k, v))
        with _without_autocast(q.device):
            return ops.attention(*plan.prepare(q, k, v, *arguments))

    return of_copies


def _without_autocast(device: torch.device) -> AbstractContextManager:
    is_on = plan.autocast_dtype(device.type) is not None
    return torch.autocast(device.type, enabled=False) if is_on else nullcontext()
