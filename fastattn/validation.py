"""Validation of the inputs of a call: an error names the argument, what it must be and what it was.

A `Mask` checks its own fields when it is made. Here they are compared with the tensors that come with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .spec import (
    DropoutSeed,
    Mask,
    RelativeBias,
    Spec,
    accumulation_dtype,
    as_int,
    can_be_read,
    is_dense,
    is_int,
    is_jagged,
)

EVERYTHING = Mask()
"""The mask of a call without one."""

QUANTIZED = {torch.int8: 127, torch.float8_e4m3fn: 448}
"""Dtypes of pages whose rows have scales, and the largest number of each."""


def validated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    scale: float | None,
    bias: Tensor | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    dropout_p: float,
    generator: torch.Generator | DropoutSeed | None,
    deterministic: bool,
    bias_by_distance: bool = False,
) -> Spec:
    """The spec of these arguments of `attention`, without a seed; of a bias, what `in_spec` makes of it.

    Raises:
        ValueError: the call is malformed. The message names the argument, what it must be and what it was.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a Tensor, got {type(x).__name__}")
        if not is_dense(x):
            raise ValueError(f"{name} must be a dense Tensor, got {_kind(x)} (attention_varlen takes packed documents)")
        if x.dim() != 4:
            raise ValueError(f"{name} must be [batch, heads, length, head_dim], got {list(x.shape)}")
        if x.dtype not in _DTYPES:
            raise ValueError(f"{name} must be float32, float64, float16 or bfloat16, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on {q.device} like q, got {x.device}")
    B, H, _, D = q.shape
    H_kv, n_k = k.shape[1:3]
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"k and v must be of dtype {q.dtype} like q, got {k.dtype} and {v.dtype}")
    if k.shape[0] != B or k.shape[3] != D:
        raise ValueError(f"k must be [{B}, H_kv, n_k, {D}] like q, got {list(k.shape)}")
    if H_kv == 0 or H % H_kv != 0:
        raise ValueError(f"the heads of k must divide the {H} heads of q, got {H_kv}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v must be [{B}, {H_kv}, {n_k}, d_v] like k, got {list(v.shape)}")
    check_numbers(scale, softcap, dropout_p)
    if scale is None:
        scale = D**-0.5 if D else 1.0
    mask = EVERYTHING if mask is None else mask
    if not isinstance(mask, Mask):
        how = "; write Mask(dense=...) for [..., n_q, n_k], Mask(real_keys=...) for [B, n_k], bias=... for a float one"
        raise ValueError(
            f"mask must be a fastattn.Mask or None, got {type(mask).__name__}{how * isinstance(mask, Tensor)}"
        )
    check_tensors(q, k, mask, bias, alibi_slopes, sinks, bias_by_distance)
    if type(q).__name__ != "DTensor":
        of_mask = {f"mask.{name}": x for name, x in mask.tensors().items()}
        check_in_one_process(k=k, v=v, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks, **of_mask)
    if generator is not None and not isinstance(generator, (torch.Generator, DropoutSeed)):
        raise ValueError(f"generator must be a torch.Generator, a DropoutSeed or None, got {type(generator).__name__}")
    if dropout_p > 0 and isinstance(generator, DropoutSeed):
        check_seed(generator, q.device)
    check_flags(deterministic=deterministic)
    softcap = None if softcap is None else float(softcap)
    terms = bias, softcap, alibi_slopes, sinks, float(dropout_p), None, bool(deterministic)
    return Spec(mask, float(scale), *terms, bias_by_distance=bias_by_distance)


def check_tensors(
    q: Tensor,
    k: Tensor,
    mask: Mask,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    bias_by_distance: bool,
) -> None:
    """Raises ValueError where one of the tensors of a `Spec` does not fit q and k."""
    (B, H, n_q, _), n_k = q.shape, k.shape[2]
    check_mask(mask, q.device, B, H, n_q, n_k)
    shape = (1, H, 1, max(n_q + n_k - 1, 0)) if bias_by_distance else (B, H, n_q, n_k)
    _check_learned("bias", bias, q.device, [shape], broadcast=True)
    _check_learned("alibi_slopes", alibi_slopes, q.device, [(H,), (B, H)])
    _check_learned("sinks", sinks, q.device, [(H,)])


def check_numbers(scale: float | None, softcap: float | None, dropout_p: float) -> None:
    """Raises ValueError where a number of a call is none that it takes."""
    if scale is not None and not (_is_number(scale) and (scale == 0 or _SMALLEST_FP32 <= abs(scale) <= LARGEST)):
        raise ValueError(f"scale must be a finite number that fp32 can hold, {LARGEST} at most, got {scale!r}")
    if softcap is not None and not (_is_number(softcap) and _SMALLEST_FP32 <= softcap <= LARGEST):
        must = f"softcap must be a positive number that fp32 can hold, {LARGEST} at most, or None"
        raise ValueError(f"{must}, got {softcap!r}")
    if not _is_number(dropout_p) or not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p must be between 0 and 1, got {dropout_p!r}")


def in_spec(bias: Tensor | RelativeBias | None, q: Tensor, k: Tensor, mask: Mask | None) -> tuple[Tensor | None, bool]:
    """(bias, bias_by_distance) of a spec, for q and k that `validated` has still to see.

    Raises:
        ValueError: a relative bias does not fit the other arguments.
    """
    if not isinstance(bias, RelativeBias):
        return bias, False
    table, mask = bias.table, EVERYTHING if mask is None else mask
    well_formed = all(isinstance(x, Tensor) and is_dense(x) and x.dim() == 4 for x in (q, k))
    if not (well_formed and isinstance(mask, Mask)):
        return table, True  # `validated` says what is wrong
    if table.device != q.device:
        raise ValueError(f"bias.table must be on {q.device} like q, got {table.device}")
    if table.dim() == 2 and not (table.shape[0] == 1 or table.shape[0] == q.shape[1]):
        raise ValueError(f"bias.table must be [buckets] or [{q.shape[1]} or 1, buckets], got {list(table.shape)}")
    if bias.bucket is not None and not is_int(mask.q_offset):
        raise ValueError("mask.q_offset must be an int beside a RelativeBias with a bucket, got a Tensor")
    if mask.segment_ids is not None and mask.segment_ids[0] is not mask.segment_ids[1]:
        raise ValueError("mask.segment_ids must be one Tensor for queries and keys beside a RelativeBias, got two")
    return bias.by_distance(q.shape[2], k.shape[2], mask.q_offset if bias.bucket is not None else 0), True


def check_fit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor | None = None,
    lse: Tensor | None = None,
    do: Tensor | None = None,
    dlse: Tensor | None = None,
) -> None:
    """Raises ValueError where the arguments of an op, which anyone may call, do not fit each other.

    In size, dtype or device: kernels take them for what q says, and would read beyond their ends.

    Args:
        o, do: [B, H, n_q, d_v], of the dtype of q. lse, dlse: [B, H, n_q], of its `accumulation_dtype`.
    """
    (B, H, n_q, D), (_, H_kv, n_k, _), d_v = _sizes("q", q), _sizes("k", k), _sizes("v", v)[3]
    if H_kv == 0 or H % H_kv:
        raise ValueError(f"the heads of k must divide the {H} heads of q, got {H_kv}")
    of_lse, of_o, of_lse_dtype = (B, H, n_q), (B, H, n_q, d_v), accumulation_dtype(q.dtype)
    for name, x, size, dtype in (
        ("k", k, (B, H_kv, n_k, D), q.dtype), ("v", v, (B, H_kv, n_k, d_v), q.dtype), ("o", o, of_o, q.dtype),
        ("lse", lse, of_lse, of_lse_dtype), ("do", do, of_o, q.dtype), ("dlse", dlse, of_lse, of_lse_dtype),
    ):  # fmt: skip
        if x is not None and (x.shape != size or x.dtype != dtype or x.device != q.device):
            raise ValueError(
                f"{name} must be {list(size)} of {dtype} on {q.device}, got {list(x.shape)} of {x.dtype} on {x.device}"
            )


def _sizes(name: str, x: Tensor) -> torch.Size:
    if x.dim() != 4:
        raise ValueError(f"{name} must be [batch, heads, length, head_dim], got {list(x.shape)}")
    return x.shape


def check_flags(**flags: bool) -> None:
    """Raises ValueError where one of these is neither a bool nor an int, which counts as one."""
    for name, flag in flags.items():
        if not isinstance(flag, int):
            raise ValueError(f"{name} must be a bool, got {flag!r}")


def check_in_one_process(**tensors: Tensor) -> None:
    """Raises NotImplementedError where one of these is a DTensor, which not every function takes."""
    for name, x in tensors.items():
        if type(x).__name__ == "DTensor":
            raise NotImplementedError(f"{name} must lie in one process, as its to_local() does, got a DTensor")


def check_top_k(top_k: int) -> None:
    """Raises ValueError where `top_k` is not an int of at least 1."""
    if not is_int(top_k) or not 1 <= top_k < 2**63:
        raise ValueError(f"top_k must be an int from 1 to 2**63 - 1, got {top_k!r}")


def check_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, align: str
) -> None:
    """Raises ValueError where these arguments of `attention_varlen` do not fit each other."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.is_nested or x.dim() != 3:
            got = type(x).__name__ if not isinstance(x, Tensor) else "a nested one" if x.is_nested else list(x.shape)
            raise ValueError(f"{name} must be a Tensor [tokens, heads, head_dim], got {got}")
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k must be [total_k, H_kv, {q.shape[2]}] like q, got {list(k.shape)}")
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(f"v must be [{k.shape[0]}, {k.shape[1]}, d_v] like k, got {list(v.shape)}")
    if not isinstance(align, str) or align not in ("start", "end"):
        raise ValueError(f"align must be 'start' or 'end', got {align!r}")
    check_boundaries("cu_seqlens_q", cu_seqlens_q, q, q.shape[0])
    if cu_seqlens_k is None:
        if k.shape[0] != q.shape[0]:
            raise ValueError(f"cu_seqlens_k must be given where k has another length than q, got {len(k)} and {len(q)}")
        return
    check_boundaries("cu_seqlens_k", cu_seqlens_k, k, k.shape[0])
    if cu_seqlens_k.shape[0] != cu_seqlens_q.shape[0]:
        raise ValueError(
            f"cu_seqlens_k must be [{len(cu_seqlens_q)}] like cu_seqlens_q, got {list(cu_seqlens_k.shape)}"
        )


def check_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    cu_seqlens_q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    tree: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    prefix: int,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
) -> None:
    """Raises ValueError where these arguments of `attention_paged` do not fit each other in type or shape."""
    _check_shape("q", q, _DTYPES, ("total_q", "H", "D"))
    D = q.shape[2]
    _check_shape("k_pages", k_pages, (q.dtype, *QUANTIZED), ("pages", "page_size", "H_kv", D), q)
    pages, page_size, H_kv, _ = k_pages.shape
    _check_shape("v_pages", v_pages, (k_pages.dtype,), (pages, page_size, H_kv, "d_v"), q)
    for name, x in (("k_scales", k_scales), ("v_scales", v_scales)):
        if k_pages.dtype in QUANTIZED:
            _check_shape(name, x, (torch.float32,), (pages, page_size, H_kv), q)
        elif x is not None:
            raise ValueError(f"{name} must be None where k_pages is of {k_pages.dtype}, got {_kind(x)}")
    if page_size == 0:
        raise ValueError(f"k_pages must have pages of at least one token, got {list(k_pages.shape)}")
    _check_shape("lengths", lengths, _INDICES, ("B",), q)
    B = lengths.shape[0]
    _check_shape("block_table", block_table, _INDICES, (B, "most pages"), q)
    if pages == 0 and block_table.numel() > 0:  # of which none could be read without leaving the pages
        raise ValueError(f"k_pages must have a page where block_table has entries, got {list(k_pages.shape)}")
    if cu_seqlens_q is None:
        if q.shape[0] != B:
            raise ValueError(f"cu_seqlens_q must be given where there are not {B} queries, got {list(q.shape)}")
    else:
        check_boundaries("cu_seqlens_q", cu_seqlens_q, cu_seqlens_q, q.shape[0])
        if cu_seqlens_q.shape[0] != B + 1:
            raise ValueError(f"cu_seqlens_q must be [{B + 1}] like lengths, got {list(cu_seqlens_q.shape)}")
        if cu_seqlens_q.device.type not in ("cpu", q.device.type) or cu_seqlens_q.is_meta:  # whose values are read
            raise ValueError(f"cu_seqlens_q must be on the CPU or on the device of q, got {cu_seqlens_q.device}")
    if (k is None) != (v is None):
        raise ValueError(f"k and v must both be given or neither, got {type(k).__name__} and {type(v).__name__}")
    if k is not None:
        _check_shape("k", k, (q.dtype,), (q.shape[0], H_kv, D), q)
        _check_shape("v", v, (q.dtype,), (q.shape[0], H_kv, v_pages.shape[3]), q)
        if k_pages.dtype in QUANTIZED and _overlap(k_pages[:1, :1, :1], v_pages[:1, :1, :1]):  # one row has two scales
            raise ValueError(
                f"v_pages must have rows of its own to be quantized to {k_pages.dtype}, got those of k_pages"
            )
    if tree is not None:
        dims = tree.dim() if isinstance(tree, Tensor) and is_dense(tree) else 0
        n = tree.shape[-1] if dims else "n"
        shape = (B, n, n) if dims == 3 else (n, n)
        _check_shape("tree", tree, (torch.bool,), shape, q)
    _check_learned("alibi_slopes", alibi_slopes, q.device, [(q.shape[1],), (B, q.shape[1])])
    _check_learned("sinks", sinks, q.device, [(q.shape[1],)])
    if not is_int(prefix) or prefix < 0 or prefix % page_size or prefix > block_table.shape[1] * page_size:
        raise ValueError(
            f"prefix must be an int from 0 to the {block_table.shape[1] * page_size} tokens of a row of block_table, "
            f"and a multiple of the {page_size} of a page, got {prefix!r}"
        )
    if prefix and alibi_slopes is not None and alibi_slopes.dim() == 2:
        raise ValueError(f"alibi_slopes must be [{q.shape[1]}] with a prefix, got {list(alibi_slopes.shape)}")


def check_places(places: dict[str, Tensor], **read: Tensor) -> None:
    """Raises where new tokens cannot be written to `places`, by name, without a change of what else is read."""
    for name, place in places.items():
        if any(n > 1 and step == 0 for n, step in zip(place.shape, place.stride(), strict=True)):
            raise ValueError(f"{name} must not be expanded where new tokens are written to it, got {place.stride()}")
        for other, x in read.items():
            if _overlap(x, place):
                raise RuntimeError(
                    f"{other} must not lie in {name}, to which new tokens are written, got tensors with elements in a "
                    "single memory location: clone() it"
                )


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether the bytes from the first to the last one of x are some of those of y; in a graph they have no places."""
    if is_compiling() or not torch._C._is_alias_of(x, y) or not x.numel() or not y.numel():
        return False
    (first, last), (first_of_y, last_of_y) = map(_bytes, (x, y))
    return first <= last_of_y and first_of_y <= last


def _bytes(x: Tensor) -> tuple[int, int]:
    """Where the first and the last element of x begin in its storage."""
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.storage_offset() * x.itemsize, (x.storage_offset() + last) * x.itemsize


def check_seed(given: DropoutSeed, device: torch.device) -> None:
    """Raises ValueError where a seed for the dropout of a call on this device is none."""
    seed, places, first = given
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.dim() != 0 or seed.device != device:
            got = f"{list(seed.shape)} of {seed.dtype} on {seed.device}"
            raise ValueError(f"generator.seed must be an int64 scalar on {device} like q, got {got}")
    elif not is_int(as_int(seed)) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"generator.seed must be an int from -2^63 to 2^63 - 1, or a Tensor, got {seed!r}")
    if places is not None and not isinstance(places, Tensor):
        raise ValueError(f"generator.places must be a Tensor or None, got {places!r}; write first=...")
    if not isinstance(first, tuple) or len(first) != 2 or not all(is_int(as_int(i)) and 0 <= i < 2**31 for i in first):
        raise ValueError(f"generator.first must be a pair (sample, head) of ints from 0, got {first!r}")


def check_pages(
    block_table: Tensor, lengths: Tensor, n: int, pages: int, page_size: int, prefix: int, first: Tensor
) -> None:
    """Raises ValueError where requests with n queries have too few or too many tokens, or no pages for them.

    Only on the CPU, where nobody has to wait for the device, and never in a graph, which reads no values. `first`
    [1, pages of a request] begins with the pages of the prefix.
    """
    if not (can_be_read(lengths) and can_be_read(block_table)):
        return
    most = block_table.shape[1] * page_size
    if (lengths < prefix + n).any() or (lengths > most).any():
        raise ValueError(
            f"lengths must be from {prefix + n}, the queries of these requests{' after the prefix' * bool(prefix)}, to "
            f"{most}, the tokens of a row of block_table, got {lengths.tolist()}"
        )
    if (block_table[:, : prefix // page_size] != first[:, : prefix // page_size]).any():
        raise ValueError(f"block_table must begin with the same {prefix // page_size} pages in each row with a prefix")
    in_use = torch.arange(block_table.shape[1], device="cpu") * page_size < lengths[:, None]
    wrong = block_table[in_use & ((block_table < 0) | (block_table >= pages))]
    if len(wrong):
        raise ValueError(f"block_table must have numbers of the {pages} pages of k_pages, got {int(wrong[0])}")


def _check_shape(
    name: str, x: object, dtypes: tuple[torch.dtype, ...], shape: tuple[int | str, ...], like: Tensor | None = None
) -> None:
    """Checks that `x` is a dense Tensor of one of these dtypes and this shape, where a str is any length."""
    if not isinstance(x, Tensor) or not is_dense(x) or x.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} must be a Tensor of {allowed}, got {_kind(x)}")
    fits = [n == m or type(m) is str for n, m in zip(x.shape, shape, strict=False)]
    if x.dim() != len(shape) or not all(fits):
        raise ValueError(f"{name} must be [{', '.join(map(str, shape))}], got {list(x.shape)}")
    if like is not None and x.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like q, got {x.device}")


def check_jagged(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, bias: Tensor | None) -> None:
    """Raises ValueError where these arguments of `attention`, of which q is a jagged nested tensor, do not fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not is_jagged(x) or x.dim() != 4 or x._ragged_idx != 2 or x.lengths() is not None:
            got = (
                _kind(x) if not is_jagged(x) else f"{list(x.shape)}, with holes" if x.lengths() is not None else x.shape
            )
            raise ValueError(
                f"{name} must be nested, [batch, heads, j, head_dim] of layout torch.jagged, where q is, got {got}"
            )
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k must have {q.shape[0]} documents like q, got {k.shape[0]}")
    if v.shape[2] != k.shape[2] and not torch.equal(v.offsets(), k.offsets()):  # each table of lengths has its own j
        raise ValueError(f"v must be nested with the lengths of k, {k.shape[2]}, got {v.shape[2]}")
    if mask is not None and (not isinstance(mask, Mask) or mask.features() - {"causal", "window"}):
        got = sorted(mask.features()) if isinstance(mask, Mask) else type(mask).__name__
        raise ValueError(f"mask must be a fastattn.Mask of causal and window, or None, where q is nested, got {got}")
    if bias is not None:
        raise ValueError(f"bias must be None where q is nested, got {type(bias).__name__}")


def check_merge(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor, sinks: Tensor | None) -> None:
    """Raises ValueError where these arguments of `merge` do not fit each other."""
    given = {"o1": o1, "lse1": lse1, "o2": o2, "lse2": lse2} | ({} if sinks is None else {"sinks": sinks})
    for name, x in given.items():
        if not isinstance(x, Tensor) or not is_dense(x) or x.dtype not in _DTYPES:
            raise ValueError(f"{name} must be a floating Tensor, got {_kind(x)}")
        if x.device != o1.device:
            raise ValueError(f"{name} must be on {o1.device} like o1, got {x.device}")
    if o1.dim() == 0:
        raise ValueError("o1 must be [..., n_q, d_v], got []")
    if o2.shape != o1.shape or o2.dtype != o1.dtype:
        raise ValueError(
            f"o2 must be {list(o1.shape)} of {o1.dtype} like o1, [..., n_q, d_v], got {list(o2.shape)} of {o2.dtype}"
        )
    for name, x in (("lse1", lse1), ("lse2", lse2)):
        if x.shape != o1.shape[:-1]:
            raise ValueError(f"{name} must be {list(o1.shape[:-1])} like o1, got {list(x.shape)}")
    if sinks is not None and lse1.dim() < 2:
        raise ValueError(f"sinks must be None where lse1 is {list(lse1.shape)}, without heads, got {list(sinks.shape)}")
    if sinks is not None and sinks.shape != lse1.shape[-2:-1]:
        raise ValueError(f"sinks must be [{lse1.shape[-2]}], one for each head of lse1, got {list(sinks.shape)}")


def check_mask(mask: Mask, device: torch.device, B: int, H: int, n_q: int, n_k: int) -> None:
    """Raises ValueError where a mask is not of scores [B, H, n_q, n_k] on this device."""
    shapes = {
        "q_offset": ((B,), (B, n_q)),
        "real_keys": ((B, n_k),),
        "real_queries": ((B, n_q),),
        "segment_ids[0]": ((B, n_q),),
        "segment_ids[1]": ((B, n_k),),
    }
    mask.__post_init__()  # which transforms, such as tree_map, leave out
    for name, x in mask.tensors().items():
        if x.device != device:
            raise ValueError(f"mask.{name} must be on {device} like q, got {x.device}")
        if name != "dense" and not _is_among(x.shape, shapes[name]):
            raise ValueError(f"mask.{name} must be {_either(shapes[name])}, got {list(x.shape)}")
    if mask.dense is not None and not broadcasts(mask.dense.shape, (B, H, n_q, n_k)):
        raise ValueError(f"mask.dense must be broadcastable to {[B, H, n_q, n_k]}, got {list(mask.dense.shape)}")


def check_boundaries(name: str, x: Tensor, like: Tensor, total: int) -> None:
    """Checks that `x` can be the cu_seqlens of so many tokens; its values only where that needs no synchronisation."""
    if not isinstance(x, Tensor) or not is_dense(x) or x.dtype not in _INDICES:
        raise ValueError(f"{name} must be an int32 or int64 Tensor, got {_kind(x)}")
    if x.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like q, got {x.device}")
    if x.dim() != 1 or x.shape[0] == 0:
        raise ValueError(f"{name} must be [documents + 1], got {list(x.shape)}")
    if can_be_read(x) and (x[0] != 0 or (x[1:] < x[:-1]).any() or x[-1] > total):
        raise ValueError(f"{name} must begin at 0, never fall, and end at {total} at most, got {x.tolist()}")


def _check_learned(
    name: str, x: Tensor | None, device: torch.device, shapes: list[tuple[int, ...]], broadcast: bool = False
) -> None:
    if x is None:
        return
    if not isinstance(x, Tensor) or not is_dense(x) or x.dtype not in _DTYPES:
        raise ValueError(f"{name} must be a floating Tensor, got {_kind(x)}")
    if x.device != device:
        raise ValueError(f"{name} must be on {device} like q, got {x.device}")
    if not (broadcasts(x.shape, shapes[0]) if broadcast else _is_among(x.shape, shapes)):
        how = "broadcastable to " if broadcast else ""
        raise ValueError(f"{name} must be {how}{_either(shapes)}, got {list(x.shape)}")


def _either(shapes: Iterable[tuple[int, ...]]) -> str:
    return " or ".join(str(list(shape)) for shape in shapes)


def broadcasts(shape: torch.Size, target: tuple[int, ...]) -> bool:
    """Whether `shape` broadcasts to exactly `target`."""
    return len(shape) <= len(target) and all(
        n == 1 or n == wanted  # not `in`: torch.compile does not find a symbolic length in a tuple
        for n, wanted in zip(reversed(shape), reversed(target), strict=False)
    )


def _is_among(shape: torch.Size, shapes: Iterable[tuple[int, ...]]) -> bool:
    """Whether `shape` is one of these."""
    return any(len(shape) == len(other) and all(n == m for n, m in zip(shape, other, strict=True)) for other in shapes)


_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INDICES = (torch.int32, torch.int64)
_SMALLEST_FP32 = math.nextafter(2.0**-150, 1)  # what is smaller is rounded to 0
LARGEST = 2.35e38  # which fp32 can hold times log2(e), too: kernels compute in base 2


def _kind(x: object) -> object:
    """The type of what is no tensor, what makes a tensor not dense, or else its dtype."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    return x.dtype if is_dense(x) else "a nested tensor" if x.is_nested else x.layout


def _is_number(x: object) -> bool:
    return is_int(x) or isinstance(x, (float, torch.SymFloat))
