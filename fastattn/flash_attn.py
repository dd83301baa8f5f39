"""The functions of the package flash-attn, with its arguments and defaults, computed by `attention`: on CPUs too.

Layouts, arguments and meanings are those of flash-attn 2.8, which `flash_attn_func` says once for all; any head dim,
dtype and device will do that `attention` takes. Code that imports these functions of flash_attn runs unchanged after

    sys.modules["flash_attn"] = sys.modules["flash_attn.flash_attn_interface"] = fastattn.flash_attn
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from .api import attention, attention_varlen
from .nn.checks import check_bools, check_dense, check_ints, check_numbers, check_range, check_tensor
from .paged import attention_paged, prepared
from .spec import Mask, accumulation_dtype, as_int, as_number, can_be_read, is_dense
from .validation import LARGEST, check_boundaries, check_places, validated

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
]  # fmt: skip

_F = TypeVar("_F", bound=Callable[..., object])
_Result = Tensor | tuple[Tensor, Tensor, Tensor]


def _known_alone(function: _F) -> _F:
    """The function, whose refusal of an unknown keyword argument says which ones are known."""
    known = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        for name in kwargs:
            if name not in known:
                raise TypeError(
                    f"{function.__name__}() got an unexpected keyword argument {name!r}: it has those of flash-attn "
                    f"2.8, {', '.join(known)}"
                )
        return function(*args, **kwargs)

    return cast(_F, call)


@_known_alone
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> _Result:  # fmt: skip
    """flash_attn.flash_attn_func: attention in the layout [B, n, H, D], aligned at the bottom right.

    Query i stands at key i + n_k - n_q. A query that sees no key gives 0 and lse -inf, as in FlashAttention-3, where
    FlashAttention-2 writes +inf. The lse is differentiable, and includes the ALiBi bias as it is written below, of
    which FlashAttention-2 leaves out a constant of each query where `causal`.

    Args:
        q: [B, n_q, H, D]; k: [B, n_k, H_kv, D]; v: [B, n_k, H_kv, d_v]; H_kv divides H.
        dropout_p: probability to drop a weight. Which ones are dropped differs from flash-attn.
        softmax_scale: factor on q k^T; None is D ** -0.5.
        causal: a query sees the keys at its own position and before it.
        window_size: how many keys to the (left, right) of its position a query sees; -1 is no limit.
        softcap: bound on the scaled scores, softcap * tanh(score / softcap); 0 or less is none.
        alibi_slopes: [H] or [B, H]; adds -slope * |i + n_k - n_q - j| to the score of query i and key j.
        deterministic: the gradients have the same bits each time.
        return_attn_probs: also return the lse, and an empty tensor where flash-attn has S_dmask, which it fills for
            tests under dropout alone: that is refused.

    Returns:
        out [B, n_q, H, d_v]; or (out, softmax_lse [B, H, n_q], S_dmask [0]).

    Raises:
        TypeError, ValueError: an argument is not what is said here, or not known to flash-attn 2.8.
        NotImplementedError: return_attn_probs with dropout, or what no backend computes.

    Sources:
        The docstrings of github.com/Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py; Dao,
        FlashAttention-2 (2023).

    Example:
        >>> import torch, fastattn
        >>> q, k = torch.ones(1, 2, 1, 8), torch.ones(1, 5, 1, 8)
        >>> _, lse, _ = fastattn.flash_attn.flash_attn_func(q, k, k, 0.0, 0.0, True, return_attn_probs=True)
        >>> lse.exp().round()  # how many keys each query sees
        tensor([[[4., 5.]]])
    """
    _check("q", q, ("B", "n_q", "H", "D"))
    _check("k", k, (q.shape[0], "n_k", "H_kv", q.shape[3]))
    _check("v", v, (*k.shape[:3], "d_v"))
    window, terms = _terms(dropout_p, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs)
    mask = _mask(causal, window, alibi_slopes, k.shape[1] - q.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o, lse = attention(q, k, v, mask, alibi_slopes=alibi_slopes, return_lse=True, **terms)
    o = o.transpose(1, 2)
    return (o, lse, o.new_empty(0)) if return_attn_probs else o


@_known_alone
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> _Result:  # fmt: skip
    """`flash_attn_func` of kv [B, n_k, 2, H_kv, D], which holds k and v."""
    _check("q", q, ("B", "n_q", "H", "D"))
    k, v = _check("kv", kv, (q.shape[0], "n_k", 2, "H_kv", q.shape[3])).unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


@_known_alone
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> _Result:  # fmt: skip
    """`flash_attn_func` of qkv [B, n, 3, H, D], which holds q, k and v."""
    q, k, v = _check("qkv", qkv, ("B", "n", 3, "H", "D")).unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


@_known_alone
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> _Result:  # fmt: skip
    """flash_attn.flash_attn_varlen_func: attention inside each of several sequences that lie one after the other.

    Args:
        q: [total_q, H, D]; k: [total_k, H_kv, D]; v: [total_k, H_kv, d_v]; or, with a block_table, k: [pages,
            page_size, H_kv, D], v: [pages, page_size, H_kv, d_v].
        cu_seqlens_q, cu_seqlens_k: int32 or int64 [B + 1]: 0, and where each sequence ends; see `attention_varlen`.
        max_seqlen_q, max_seqlen_k: ints, which nothing here needs.
        alibi_slopes: [H]; [B, H] with a block_table only.
        block_table: int32 or int64 [B, pages of a sequence], the pages of each sequence in their order, which has at
            least as many keys as queries; see `attention_paged`. Without gradients and dropout, as in flash-attn.
        dropout_p, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs: see `flash_attn_func`;
            n_q and n_k are those of the sequence.

    Returns:
        out [total_q, H, d_v]; or (out, softmax_lse [H, total_q], S_dmask [0]).

    Raises:
        ValueError, NotImplementedError, TypeError: see `flash_attn_func`.
    """
    check_ints(0, max_seqlen_q=as_int(max_seqlen_q), max_seqlen_k=as_int(max_seqlen_k))
    window, terms = _terms(dropout_p, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs)
    if block_table is not None:
        pages = k, v, block_table
        return _varlen_of_pages(
            q, pages, cu_seqlens_q, cu_seqlens_k, causal, window, terms, alibi_slopes, return_attn_probs
        )
    if isinstance(alibi_slopes, Tensor) and is_dense(alibi_slopes) and alibi_slopes.dim() == 2:
        raise NotImplementedError(
            f"alibi_slopes must be [H], since slopes of each sequence are not computed, got {list(alibi_slopes.shape)}"
        )
    o, lse = attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal, align="end", window=window, alibi_slopes=alibi_slopes,
        return_lse=True, **terms,
    )  # fmt: skip
    return (o, lse, o.new_empty(0)) if return_attn_probs else o


def _varlen_of_pages(
    q: Tensor, pages: tuple[Tensor, Tensor, Tensor], cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, causal: bool,
    window: Any, terms: dict[str, Any], alibi_slopes: Tensor | None, return_attn_probs: bool,
) -> _Result:  # fmt: skip
    """`flash_attn_varlen_func` of `pages`, its k, v and block_table."""
    k, v, block_table = pages
    _check("q", q, ("total_q", "H", "D"))
    _check_index("block_table", block_table, ("B", "pages of a sequence"), q)
    _check("k", k, ("pages", "page_size", "H_kv", q.shape[2]), q)
    _check("v", v, (*k.shape[:3], "d_v"), q)
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_index(name, x, (block_table.shape[0] + 1,), q)
    if terms["dropout_p"]:
        raise NotImplementedError(f"dropout_p must be 0 with a block_table, got {terms['dropout_p']}")
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (q, k, v)):
        raise NotImplementedError("q, k and v must need no gradient with a block_table, of which there is none")
    lengths, room = cu_seqlens_k.diff(), block_table.shape[1] * k.shape[1]
    if can_be_read(cu_seqlens_q) and can_be_read(lengths):
        n_q = cu_seqlens_q.diff()
        if ((lengths < n_q) | (lengths > room)).any():
            raise ValueError(
                f"cu_seqlens_k must give each sequence at least as many keys as it has queries, {n_q.tolist()}, and at "
                f"most the {room} of its pages, got {lengths.tolist()}"
            )
        in_use = torch.arange(block_table.shape[1], device=q.device) * k.shape[1] < lengths[:, None]
        check_range("block_table", block_table.masked_fill(~in_use, 0), k.shape[0], "the {} pages of k")
    result = attention_paged(
        q, k, v, block_table, lengths, cu_seqlens_q, causal=causal, window=window, scale=terms["scale"],
        softcap=terms["softcap"], alibi_slopes=alibi_slopes, return_lse=return_attn_probs,
    )  # fmt: skip
    return (*result, q.new_empty(0)) if isinstance(result, tuple) else result


@_known_alone
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> _Result:  # fmt: skip
    """`flash_attn_varlen_func` of kv [total_k, 2, H_kv, D], which holds k and v."""
    _check("q", q, ("total_q", "H", "D"))
    k, v = _check("kv", kv, ("total_k", 2, "H_kv", q.shape[2])).unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@_known_alone
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> _Result:  # fmt: skip
    """`flash_attn_varlen_func` of qkv [total, 3, H, D], which holds q, k and v."""
    q, k, v = _check("qkv", qkv, ("total", 3, "H", "D")).unbind(1)
    check_boundaries("cu_seqlens", cu_seqlens, q, q.shape[0])
    check_ints(0, max_seqlen=as_int(max_seqlen))
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@_known_alone
@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """flash_attn.flash_attn_with_kvcache: attention over a cache, to which k and v are added first, in place.

    Sample b has the keys cache_leftpad[b], ..., cache_seqlens[b] + n_new - 1 in its row of the cache, and its last
    query stands at the last of them. The rest of the cache is never read. There are no gradients.

    Args:
        q: [B, n_q, H, D].
        k_cache: [B_cache, n_cache, H_kv, D], or [pages, page_size, H_kv, D] with a block_table; v_cache: the same with
            d_v. What cache_batch_idx or block_table chooses is copied for backends other than cpu, triton and cuda.
        k, v: [B, n_new, H_kv, D or d_v], written to the positions from cache_seqlens on, for which there must be room.
        rotary_cos, rotary_sin: [n, D_rotary / 2] in the dtype of q, for all positions that are used. They rotate the
            first D_rotary dimensions of k, at cache_seqlens and the positions after it, and of q: at the same ones
            where `causal` or window_size is given, and otherwise all of it at cache_seqlens.
        cache_seqlens: tokens in the cache before this call, an int, or int32 or int64 [B]; None is n_cache.
        cache_batch_idx: int32 or int64 [B], the row of the cache of each sample; None is 0, ..., B - 1.
        cache_leftpad: int32 or int64 [B], where the keys of each sample begin; None is 0.
        block_table: int32 or int64 [B, pages of a sample], the pages of each sample in their order.
        rotary_interleaved: dimensions 0 and 1, 2 and 3, ... are rotated together; else those D_rotary / 2 apart.
        num_splits: an int, which nothing here needs.
        return_softmax_lse: also return the lse.
        softmax_scale, causal, window_size, softcap, alibi_slopes: see `flash_attn_func`; n_k counts the keys of the
            sample.

    Returns:
        out [B, n_q, H, d_v]; or (out, softmax_lse [B, H, n_q]).

    Raises:
        ValueError, NotImplementedError, TypeError: see `flash_attn_func`. On a GPU the values of index tensors are not
            checked, since that would wait for the device.
    """
    window, terms = _terms(0.0, softmax_scale, causal, window_size, softcap, False, False)
    check_bools(rotary_interleaved=rotary_interleaved, return_softmax_lse=return_softmax_lse)
    check_ints(0, num_splits=as_int(num_splits))
    _check("q", q, ("B", "n_q", "H", "D"))
    (B, n_q), D, device = q.shape[:2], q.shape[3], q.device
    _check("k_cache", k_cache, ("B_cache", "n_cache", "H_kv", D), q)
    _check("v_cache", v_cache, (*k_cache.shape[:3], "d_v"), q)
    n_rows, n_cache, H_kv = k_cache.shape[:3]
    page_size, rows = n_cache, torch.arange(B, device=device)[:, None]  # of the cache, for each page of a sample
    if block_table is not None:
        _check_index("block_table", block_table, (B, "pages"), q)
        if cache_batch_idx is not None:
            raise ValueError(f"cache_batch_idx must be None with a block_table, got {type(cache_batch_idx).__name__}")
        n_cache *= block_table.shape[1]
    elif cache_batch_idx is not None:
        _check_index("cache_batch_idx", cache_batch_idx, (B,), q, n_rows)
        rows = cache_batch_idx.long()[:, None]
    elif n_rows < B:
        raise ValueError(f"k_cache must have the {B} rows of q without cache_batch_idx, got {list(k_cache.shape)}")

    n_new = 0
    if k is not None or v is not None:
        k = _check("k", k, (B, "n_new", H_kv, D), q)
        n_new = k.shape[1]
        v = _check("v", v, (B, n_new, H_kv, v_cache.shape[3]), q)
        if cache_seqlens is None:
            raise ValueError("cache_seqlens must be an int or [B] where k and v are given, got None")
    room = n_cache - n_new
    start: Any = n_cache if cache_seqlens is None else as_int(cache_seqlens)
    if isinstance(start, Tensor):
        _check_index("cache_seqlens", start, (B,), q, room + 1)
        last = int(start.max()) if B and can_be_read(start) else room
        start = start.long()[:, None]
    else:
        check_ints(0, cache_seqlens=start)
        last = start
    if last > room:
        raise ValueError(f"cache_seqlens must leave room for {n_new} in the {n_cache} of the cache, got {last}")
    if cache_leftpad is not None:
        _check_index("cache_leftpad", cache_leftpad, (B,), q, n_cache + 1)
    end, n_k = start + n_new, last + n_new

    if block_table is not None:
        pages = block_table[:, : -(-n_k // max(page_size, 1))]
        in_use = torch.arange(pages.shape[1], device=device) * page_size < end
        rows = pages.long().masked_fill(~in_use, 0)
        check_range("block_table", rows, n_rows, "the {} pages of k_cache")
    if rotary_cos is not None or rotary_sin is not None:
        if k is None:
            raise ValueError("k must be given where rotary_cos or rotary_sin is, got None")
        steps = n_q if causal or window != _NO_WINDOW else 1
        cos = _check("rotary_cos", rotary_cos, ("n", "D_rotary / 2"), q)
        sin = _check("rotary_sin", rotary_sin, tuple(cos.shape), q)
        if cos.shape[0] < last + max(n_new, steps) or 2 * cos.shape[1] > D:
            raise ValueError(
                f"rotary_cos must be [n, D_rotary / 2] with n at least {last + max(n_new, steps)} and D_rotary at most "
                f"{D}, got {list(cos.shape)}"
            )
        q = _rotated(q, start + torch.arange(steps, device=device)[None], cos, sin, rotary_interleaved)
        k = _rotated(k, start + torch.arange(n_new, device=device)[None], cos, sin, rotary_interleaved)
    by_table = block_table is not None or cache_batch_idx is not None
    if by_table:
        n_k = rows.shape[1] * page_size
    real_keys = None
    if isinstance(end, Tensor) or cache_leftpad is not None or by_table:
        key = torch.arange(n_k, device=device)[None]
        real_keys = (key < end) & (key >= (0 if cache_leftpad is None else cache_leftpad[:, None]))
        real_keys = real_keys.expand(B, n_k)
    mask = _mask(causal, window, alibi_slopes, end - n_q).with_padding(real_keys)
    q = q.transpose(1, 2)
    scale, softcap = terms["scale"], terms["softcap"]
    if by_table:
        call = prepared(q, k_cache, v_cache, rows, mask, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes)
    else:
        keys, values = (x[:B, :n_k].transpose(1, 2) for x in (k_cache, v_cache))
        call = functools.partial(attention, q, keys, values, mask, alibi_slopes=alibi_slopes, return_lse=True, **terms)
    if k is not None and v is not None:  # only now, when nothing more can be refused
        if not by_table:
            validated(q, keys, values, mask, scale, None, softcap, alibi_slopes, None, 0.0, None, True)
        check_places({"k_cache": k_cache, "v_cache": v_cache}, k=k, v=v)
        at = (start + torch.arange(n_new, device=device)).expand(B, n_new)
        places = rows.gather(1, at // page_size), at % page_size
        k_cache[places], v_cache[places] = k, v
    o, lse = call()
    return (o.transpose(1, 2), lse) if return_softmax_lse else o.transpose(1, 2)


_NO_WINDOW = (None, None)
_FP32 = f"a number that fp32 can hold, {LARGEST} at most"


def _fp32_can_hold(x: object) -> bool:
    return not isinstance(x, bool) and (x == 0 or torch.finfo(torch.float32).tiny <= abs(x) <= LARGEST)


def _terms(
    dropout_p: object, softmax_scale: object, causal: object, window_size: object, softcap: object,
    deterministic: object, return_attn_probs: object,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """The window of a `Mask`, and the keyword arguments of `attention` that these arguments mean."""
    check_bools(causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs)
    scale, cap, p = (cast(Any, as_number(x)) for x in (softmax_scale, softcap, dropout_p))
    numbers = {"softcap": cap, "dropout_p": p} | ({} if scale is None else {"softmax_scale": scale})
    check_numbers(_FP32, _fp32_can_hold, **numbers)
    if return_attn_probs and p:
        raise NotImplementedError(
            f"return_attn_probs must be False with dropout, whose S_dmask is not computed, got dropout_p={p}"
        )
    try:
        left, right = (as_int(width) for width in cast(Any, window_size))
        check_ints(-1, left=left, right=right)
    except (TypeError, ValueError) as error:
        raise ValueError(f"window_size must be two ints, -1 for no limit, got {window_size!r}") from error
    window = tuple(None if width == -1 else width for width in (left, right))
    return window, {
        "scale": scale, "softcap": cap if cap > 0 else None, "dropout_p": p, "deterministic": deterministic,
    }  # fmt: skip


def _mask(causal: bool, window: Any, alibi_slopes: Tensor | None, q_offset: int | Tensor) -> Mask:
    """The mask, without positions where nothing asks for them; q_offset is an int or [B, 1]."""
    if not causal and window == _NO_WINDOW and alibi_slopes is None:
        return Mask()
    q_offset = q_offset[:, 0] if isinstance(q_offset, Tensor) else q_offset
    return Mask(causal, window=window, q_offset=q_offset)


def _rotated(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [B, n, H, D], its first columns rotated by the angles of these positions [B or 1, n or 1] in the tables."""
    half, dtype = cos.shape[1], accumulation_dtype(x.dtype)
    cos, sin = (table[positions].unsqueeze(2).to(dtype) for table in (cos, sin))
    dim, shape = (-1, (half, 2)) if interleaved else (-2, (2, half))
    a, b = x[..., : 2 * half].to(dtype).reshape(*x.shape[:3], *shape).unbind(dim)
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim).flatten(-2)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], -1)


def _check(name: str, x: Any, shape: tuple[int | str, ...], q: Tensor | None = None) -> Tensor:
    """x, if it is a dense floating Tensor of this shape, in which a str stands for any length, and like q."""
    check_dense(name, x)
    if x.dim() != len(shape) or any(n != m for n, m in zip(x.shape, shape, strict=True) if not isinstance(m, str)):
        raise ValueError(f"{name} must be [{', '.join(map(str, shape))}], got {list(x.shape)}")
    if not x.is_floating_point() or x.itemsize < 2:
        raise ValueError(f"{name} must be float32, float64, float16 or bfloat16, got {x.dtype}")
    if q is not None and (x.dtype != q.dtype or x.device != q.device):
        raise ValueError(f"{name} must be {q.dtype} on {q.device} like q, got {x.dtype} on {x.device}")
    return cast(Tensor, x)


def _check_index(name: str, x: Any, shape: tuple[int | str, ...], q: Tensor, size: int | None = None) -> None:
    """Raises where x is no integer Tensor of this shape on the device of q, with values from 0 to size - 1."""
    check_tensor(name, x, "integer", shape)
    if x.device != q.device:
        raise ValueError(f"{name} must be on {q.device} like q, got {x.device}")
    if size is not None:
        check_range(name, x, size)
