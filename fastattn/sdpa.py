"""Attention with the arguments of torch's scaled_dot_product_attention, and their translation to `attention`."""

from __future__ import annotations

import math
import sys
from typing import NamedTuple, NoReturn

import torch
from torch import SymFloat, SymInt, Tensor

from .api import attention, explain
from .spec import Mask, is_jagged, refuse_unknown

_ADDED = "attn_mask=..., float, which is added to the scores"
_INSTEAD = {
    "causal": "is_causal=True",
    "mask": "attn_mask=..., bool, True where a query may see a key",
    "key_padding_mask": "attn_mask=~key_padding_mask[:, None, None], where True is padding",
    "attention_mask": "attn_mask=attention_mask[:, None, None].bool(), where 1 is a real token",
    **dict.fromkeys(("bias", "attn_bias", "position_bias"), _ADDED),
    **dict.fromkeys(
        ("window", "window_size", "sliding_window", "softcap", "alibi_slopes", "sinks", "generator", "return_lse"),
        "fastattn.attention(...), which can do it",
    ),
}


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    backend: str | None = None,
    **unknown: NoReturn,  # type checkers allow none
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, computed by the fused backends: [N, ..., H, L, E_v].

    Arguments, broadcasting and refusals are torch's, with one difference: where torch multiplies padding by zero, a
    bool mask that is the same for every query ([N, 1, 1, S]) is skipped work here. Nested tensors of layout
    torch.jagged are taken without an attn_mask.

    Args:
        query: [N, ..., H, L, E]; key: [N, ..., H_kv, S, E]; value: [N, ..., H_kv, S, E_v].
        attn_mask: bool (True may see) or float (added), broadcastable to [N, ..., H, L, S]; or what
            torch.nn.attention.bias.causal_upper_left or causal_lower_right returns, of which no [L, S] tensor is made.
        dropout_p: as in torch, applied whenever it is above 0.
        is_causal: key j is seen by query i where j <= i. With attn_mask both apply (torch does so in its CPU kernel
            and refuses elsewhere).
        scale: factor on query key^T; None is 1 / sqrt(E).
        enable_gqa: H may be a multiple of H_kv.
        backend: see `attention`; torch has no such argument.

    Returns:
        Output [N, ..., H, L, E_v] in the dtype of query; a query that may see no key gives 0.

    Raises:
        RuntimeError, IndexError, TypeError, ValueError: torch's class for what torch refuses.
        NotImplementedError: the named backend does not compute the call.

    Example:
        >>> import torch, fastattn
        >>> x = torch.ones(1, 2, 3, 8)
        >>> fastattn.scaled_dot_product_attention(x, x, x, is_causal=True).shape
        torch.Size([1, 2, 3, 8])
    """
    if unknown:
        refuse_unknown(scaled_dot_product_attention, unknown, _INSTEAD)
    arguments = (query, key, value, attn_mask, dropout_p, is_causal)
    try:
        return computed(parsed(*arguments, scale=scale, enable_gqa=enable_gqa), backend)
    except RefusedError as refusal:
        raise refusal.args[0] from None


class Call(NamedTuple):
    """One call in the terms of `attention`, and the shape of torch's output."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    bias: Tensor | None
    scale: float | None
    dropout_p: float
    shape: tuple[int, ...]


class RefusedError(Exception):
    """A call was refused, before anything was computed, by its argument: an exception of torch's class.

    It is raised without `from`, which torch 2.10 traces for Python's own classes alone.
    """


def parsed(*args: object, **kwargs: object) -> Call:
    """The call that the arguments of torch's function describe.

    Raises:
        RefusedError: they are malformed.
    """
    try:
        return _parsed(*args, **kwargs)
    except (TypeError, ValueError, RuntimeError, IndexError, OverflowError) as error:
        raise RefusedError(error)  # noqa: B904


def computed(call: Call, backend: str | None) -> Tensor:
    """The output of the call.

    Raises:
        RefusedError: the call is malformed.
        NoBackendError: no (or not the named) backend computes it.
    """
    q, k, v, mask, bias, scale, dropout_p, shape = call
    try:
        o = attention(q, k, v, mask, scale=scale, bias=bias, dropout_p=dropout_p, backend=backend)
    except ValueError as error:
        try:  # a kernel may raise one too; this runs none
            explain(q, k, v, mask, scale=scale, bias=bias, dropout_p=dropout_p)
        except ValueError:
            raise RefusedError(RuntimeError(*error.args))  # noqa: B904
        raise
    return o if o.shape == shape else o.reshape(shape)


def causal_bias() -> tuple[type, ...]:
    """torch's class CausalBias, whose memory means nothing, if there can be an instance."""
    return _imported("torch.nn.attention.bias", "CausalBias")


def _imported(module: str, *names: str) -> tuple[type, ...]:
    """Classes of a module that takes long to import; none of them while it is not."""
    loaded = sys.modules.get(module)
    return tuple(getattr(loaded, name) for name in names if hasattr(loaded, name))


def _parsed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call:
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool, got {flag!r}")
    if is_jagged(query) and is_jagged(key) and is_jagged(value):
        if attn_mask is not None:
            raise ValueError(f"attn_mask must be None where query is nested, got {type(attn_mask).__name__}")
        if not enable_gqa and query.shape[1] != key.shape[1]:
            raise RuntimeError(f"key must have the {query.shape[1]} heads of query, got {key.shape[1]}")
        shape = (*query.shape[:-1], value.shape[-1])
        return Call(query, key, value, Mask(causal=is_causal), None, scale, dropout_p, shape)
    for name, x in (("query", query), ("key", key), ("value", value)):
        _check_tensor(name, x, query)
        if not x.is_floating_point():
            raise RuntimeError(f"{name} must be of a floating dtype, got {x.dtype}")
        if x.dtype != query.dtype and not torch._C._is_any_autocast_enabled():
            raise RuntimeError(f"{name} must be of dtype {query.dtype} like query, got {x.dtype}")
        if x.dim() < 2:
            raise RuntimeError(f"{name} must have at least 2 dimensions, got {x.dim()}")
        if enable_gqa and x.dim() < 3:
            raise IndexError(f"{name} must have at least 3 dimensions with enable_gqa=True, got {x.dim()}")
    dropout_p = _number("dropout_p", dropout_p)
    scale = None if scale is None else _number("scale", scale)

    (L, E), (S, E_v) = query.shape[-2:], value.shape[-2:]
    if key.shape[-1] != E:
        raise RuntimeError(f"key must be [..., S, {E}] like query, got {list(key.shape)}")
    if key.shape[-2] != S:
        raise RuntimeError(f"value must be [..., {key.shape[-2]}, E_v] like key, got {list(value.shape)}")
    leading = [x.shape[:-2] for x in (query, key, value)]
    if enable_gqa:
        key, value = _repeated_where_heads_differ(query, key, value)
        leading[1:] = [(*x.shape[:-3], query.shape[-3]) for x in (key, value)]
    try:
        of_scores = _broadcast(leading[0], leading[1])
        of_output = _broadcast(of_scores, leading[2])
    except RuntimeError as error:
        raise RuntimeError(
            f"query, key and value must agree in all but their last two dimensions, got {list(query.shape)}, "
            f"{list(key.shape)} and {list(value.shape)} with enable_gqa={enable_gqa}"
        ) from error
    shape = (*of_output, L, E_v)
    *batch, H = of_output or (1,)

    in_terms_of_mask = attn_mask is None or isinstance(attn_mask, causal_bias())
    if not in_terms_of_mask:
        _check_attn_mask(attn_mask, query, (*of_scores, L, S))
        if attn_mask.dim() < 2 and query.dim() == key.dim() == value.dim() == 4:  # for which torch has other kernels
            raise IndexError(f"attn_mask must have at least 2 dimensions, got {attn_mask.dim()}")
    if H == 0:  # `attention` wants a head, and takes a batch of none
        if not in_terms_of_mask and attn_mask.dim() > 2:
            attn_mask = attn_mask.unsqueeze(-3)
        tensors = (x.unsqueeze(-3) for x in (query, key, value))
        return _parsed(*tensors, attn_mask, dropout_p, is_causal, scale=scale)._replace(shape=shape)

    if attn_mask is None:
        mask, bias = Mask(causal=is_causal), None
    elif in_terms_of_mask:
        mask, bias = _from_causal_bias(attn_mask, L, S, is_causal), None
    else:
        mask, bias = _from_attn_mask(attn_mask, batch, S, is_causal)
    H_kv = key.shape[-3] if enable_gqa else H
    q, k, v = (_folded(x, (*batch, heads)) for x, heads in ((query, H), (key, H_kv), (value, H_kv)))
    return Call(q, k, v, mask, bias, scale, dropout_p, shape)


_parsed.__qualname__ = "scaled_dot_product_attention"  # in Python's message of a call that lacks an argument


def _check_tensor(name: str, x: object, query: Tensor) -> None:
    if not isinstance(x, Tensor):
        how = "; fastattn.attention takes one as its mask" if isinstance(x, Mask) else ""
        raise TypeError(f"{name} must be a Tensor, got {type(x).__name__}{how}")
    if type(x) is not Tensor:
        if isinstance(x, causal_bias()):
            raise TypeError(f"{name} must have numbers, got a CausalBias")
        if isinstance(x, _imported("torch.distributed.tensor", "DTensor")):
            raise RuntimeError(f"{name} must lie in one process, as its to_local() does, got a DTensor")
    if x.is_nested or x.layout != torch.strided:
        raise RuntimeError(f"{name} must be dense, got {'a nested Tensor' if x.is_nested else x.layout}")
    if x.device != query.device:
        raise RuntimeError(f"{name} must be on {query.device} like query, got {x.device}")


def _check_attn_mask(attn_mask: object, query: Tensor, scores: tuple[int, ...]) -> None:
    _check_tensor("attn_mask", attn_mask, query)
    cast = torch._C._is_any_autocast_enabled() and attn_mask.is_floating_point() and attn_mask.dtype != torch.float64
    if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype) and not cast:
        how = "" if attn_mask.is_floating_point() else "; .bool() makes it so where 1 is seen"
        raise RuntimeError(f"attn_mask must be bool, float32 or {query.dtype} like query, got {attn_mask.dtype}{how}")
    try:
        fits = torch.broadcast_shapes(attn_mask.shape, scores) == scores
    except RuntimeError:
        fits = False
    if not fits:
        raise RuntimeError(f"attn_mask must be broadcastable to {list(scores)}, got {list(attn_mask.shape)}")


def _number(name: str, x: object) -> float:
    """Converts anything that torch takes for a number to a float."""
    if type(x) is float or isinstance(x, (SymFloat, SymInt)):
        return x
    if isinstance(x, Tensor):
        is_one = x.dim() == 0 and not x.requires_grad
    else:
        is_one = isinstance(x, (int, float, *_imported("numpy", "number", "bool_")))
    if not is_one:
        raise TypeError(f"{name} must be a number, got {x!r}")
    return float(x)


def _repeated_where_heads_differ(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value with one number of heads: theirs, where they have the same, or that of the query."""
    H, H_k, H_v = (x.shape[-3] for x in (query, key, value))
    if H == H_k == H_v:
        return key, value
    if not (H_k and H_v and H % H_k == 0 and H % H_v == 0):
        raise RuntimeError(f"the heads of key and value must divide the {H} of query, got {H_k} and {H_v}")
    if H and H_k == H_v:
        return key, value
    return key.repeat_interleave(H // H_k, -3), value.repeat_interleave(H // H_v, -3)


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return a if a == b else torch.broadcast_shapes(a, b)  # which takes longer


def _folded(x: Tensor, leading: tuple[int, ...]) -> Tensor:
    """The tensor as [B, H, N, D], after it was broadcast to these dimensions and its last two."""
    if x.shape[:-2] != leading:
        x = x.expand(*leading, *x.shape[-2:])
    return x.flatten(0, -4) if x.dim() > 3 else x[None]


def _from_causal_bias(bias: Tensor, L: int, S: int, is_causal: bool) -> Mask:
    """The mask of a CausalBias, whose lengths torch looks at only where they matter."""
    if is_causal:
        raise ValueError("is_causal must be False where attn_mask is a CausalBias, got True")
    lengths = (bias.seq_len_q, bias.seq_len_kv)
    if bias.variant.name == "UPPER_LEFT" or lengths[0] == lengths[1]:
        return Mask(causal=True)
    if lengths != (L, S):
        raise RuntimeError(f"attn_mask must be causal_lower_right({L}, {S}), got causal_lower_right{lengths}")
    return Mask(causal=True, q_offset=S - L)


def _from_attn_mask(attn_mask: Tensor, batch: list[int], S: int, is_causal: bool) -> tuple[Mask, Tensor | None]:
    """The mask and the bias of torch's attn_mask, whose dimensions of the batch are folded into one."""
    attn_mask = attn_mask[(None,) * (3 - attn_mask.dim())]
    if attn_mask.dim() > 3:
        attn_mask = attn_mask.expand(*batch, *attn_mask.shape[-3:]).flatten(0, -4)
    if attn_mask.dtype != torch.bool:
        return Mask(causal=is_causal), attn_mask
    if attn_mask.shape[-3] == attn_mask.shape[-2] == 1:  # the same for all queries
        return Mask(causal=is_causal, real_keys=attn_mask[..., 0, 0, :].expand(math.prod(batch), S)), None
    return Mask(causal=is_causal, dense=attn_mask), None
