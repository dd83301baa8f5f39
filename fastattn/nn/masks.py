"""Translation of masks of torch.nn, in which True hides a key, into a `Mask` and a bias, as no other module does."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.weak import WeakTensorKeyDictionary

from ..plan import autocast_dtype
from ..spec import Mask
from ..validation import check_mask


def canonical_mask(
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | Mask | None,
    shape: tuple[int, int, int, int],
    queries: Tensor,
    *,
    batched: bool = True,
    is_causal: bool = False,
    need_weights: bool = False,
    appended: int = 0,
) -> tuple[Mask, Tensor | None]:
    """The mask, and the bias or None, of a call of a torch.nn module; `attn_mask` may be a `Mask` already.

    `is_causal` is torch's hint that `attn_mask` is the causal mask. It is trusted where torch trusts it, which is
    without weights and without a `key_padding_mask`; everywhere else the values of `attn_mask` decide.
    A `Mask` says itself whether it is causal.

    Args:
        key_padding_mask: [B, S], or [S] if not `batched`; bool (True hides) or float (added).
        attn_mask: [L, S] or [B * H, L, S], bool or float; or a `Mask`, whose True means seen.
        shape: [B, H, L, S] of the scores.
        queries: the tensor whose dtype and device the masks must have.
        appended: number of keys that the module appends to the S, which every query sees.

    Raises:
        AssertionError, RuntimeError: whichever of them torch raises for the same call.
        ValueError: a `Mask` does not fit the rest.
    """
    B, H, L, S = shape
    if isinstance(attn_mask, Mask):
        check_hint(attn_mask, is_causal)
        _check_padding(key_padding_mask, (B, S) if batched else (S,), queries)
        if appended and attn_mask.features():
            check_mask(attn_mask, queries.device, *shape)
            keep = _extended(attn_mask.keep(L, S, queries.device), S + appended, True)
            attn_mask = Mask(dense=keep, real_queries=attn_mask.real_queries)
        if key_padding_mask is None:
            return attn_mask, None
        padding, bias = from_torch(key_padding_mask.view(B, S), None, (B, H, L, S + appended))
        return attn_mask.with_padding(padding.real_keys), bias
    hint_decides = is_causal and key_padding_mask is None and not need_weights
    _check_padding(key_padding_mask, (B, S) if batched else (S,), queries)
    _check_attn_mask(attn_mask, shape, queries, batched=batched, is_causal=is_causal, hint_decides=hint_decides)
    if hint_decides:
        return Mask(causal=True), None
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask.view(B, S)
    return from_torch(key_padding_mask, attn_mask, (B, H, L, S + appended))


def from_torch(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, shape: tuple[int, int, int, int]
) -> tuple[Mask, Tensor | None]:
    """The mask, and the bias or None, with the meaning of the two masks of torch.nn.MultiheadAttention.

    In torch, True in a bool mask means *hidden*, and a float mask is added to the scores. A float mask of only 0 and
    -inf hides, so it becomes part of the mask, and an `attn_mask` that hides exactly what lies above the diagonal
    becomes `causal`. To find out, the values are read: on CUDA that is one synchronisation, whose result is kept while
    the version counter of the tensor stays the same. Where they cannot be read (under torch.compile, torch.jit.trace or
    vmap, while a CUDA graph is captured), and where the mask is differentiated, a float mask stays a bias and a bool
    one `dense`.

    Args:
        key_padding_mask: [B, S], bool or float.
        attn_mask: [L, S] or [B * H, L, S], bool or float.
        shape: [B, H, L, n_k] of the scores; keys beyond S, which the module has appended, are seen by every query.

    Example:
        >>> import torch
        >>> padding = torch.tensor([[False, False, True]])
        >>> mask, bias = from_torch(padding, torch.ones(3, 3).triu(1).bool(), (1, 8, 3, 3))
        >>> mask.causal, mask.real_keys, bias
        (True, tensor([[ True,  True, False]]), None)
    """
    B, H, _, n_k = shape
    real_keys, dense, causal, bias = None, None, False, None
    if key_padding_mask is not None:
        if key_padding_mask.dtype == torch.bool or _contents(key_padding_mask).only_hides:
            real_keys = _extended(~_hidden_by(key_padding_mask), n_k, True)
        else:
            bias = _extended(key_padding_mask[:, None, None], n_k, 0.0)
    if attn_mask is not None:
        contents = _contents(attn_mask)
        if attn_mask.dim() == 3:
            attn_mask = attn_mask.unflatten(0, (B, H))
        if not contents.only_hides:
            added = _extended(attn_mask, n_k, 0.0)
            bias = added if bias is None else bias + added
        elif contents.causal and attn_mask.shape[-1] == n_k:
            causal = True
        else:
            dense = _extended(~_hidden_by(attn_mask), n_k, True)
    return Mask(causal=causal, real_keys=real_keys, dense=dense), bias


def real_tokens(mask: Mask, key_padding_mask: Tensor | None) -> Tensor | None:
    """bool [B, S], False at padding, or None: `mask.real_keys`, and those of a float mask that stayed a bias unread."""
    if key_padding_mask is None or key_padding_mask.dtype == torch.bool or can_look_at(key_padding_mask):
        return mask.real_keys
    hidden = _hidden_by(torch.atleast_2d(key_padding_mask))
    real = ~(hidden & (hidden | (key_padding_mask == 0)).all())
    return real if mask.real_keys is None else real & mask.real_keys


class _Contents(NamedTuple):
    """Properties of the values of a mask in torch's polarity; False where they cannot be read."""

    only_hides: bool  # a bool mask, or a float one of 0 and -inf
    causal: bool  # hides exactly what lies above the diagonal


_SEEN = WeakTensorKeyDictionary()  # mask -> (its version, its _Contents)


def _contents(mask: Tensor) -> _Contents:
    """The properties of a mask in torch's polarity, from its values where they can be read."""
    if not can_look_at(mask):
        return _Contents(only_hides=mask.dtype == torch.bool, causal=False)
    if not _remembered(mask):
        return _look_at(mask)
    version, contents = _SEEN.get(mask, (None, None))
    if version != mask._version:
        contents = _look_at(mask)
        _SEEN[mask] = mask._version, contents
    return contents


def _look_at(mask: Tensor) -> _Contents:
    hidden = _hidden_by(mask)
    only_hides = (hidden | (mask == 0)).all()
    causal = (hidden == hidden.new_ones(hidden.shape[-2:]).triu(1)).all()
    return _Contents(*torch.stack([only_hides, causal]).tolist())


def _remembered(mask: Tensor) -> bool:
    """Whether properties are kept: reading values waits for a device, and a version counter tells when they change."""
    return not mask.is_cpu and not mask.is_inference()


def can_look_at(mask: Tensor) -> bool:
    """Whether the values can be read now, and no derivative with respect to them is taken."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or mask.is_meta or type(mask) is not Tensor:
        return False
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:  # of make_fx
        return False
    if mask.requires_grad or forward_ad.unpack_dual(mask).tangent is not None:
        return False
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return torch.func.debug_unwrap(mask) is mask  # not inside vmap or another transform


def _hidden_by(mask: Tensor) -> Tensor:
    """bool, True where a mask in torch's polarity hides the key, which a float mask does by -inf."""
    return mask if mask.dtype == torch.bool else mask == -math.inf


def _extended(table: Tensor, n_k: int, value: float) -> Tensor:
    """A table [..., S] continued with `value` to [..., n_k]."""
    appended = n_k - table.shape[-1]
    return F.pad(table, (0, appended), value=value) if appended else table


def _check_padding(mask: Tensor | None, wanted: tuple[int, ...], queries: Tensor) -> None:
    """Refuses the key_padding_mask that torch refuses, with the same class of exception."""
    _check_kind("key_padding_mask", mask, queries)
    if mask is not None and mask.shape != wanted:
        raise AssertionError(f"key_padding_mask must be {list(wanted)}, got {list(mask.shape)}")


def _check_attn_mask(
    mask: Tensor | None,
    shape: tuple[int, int, int, int],
    queries: Tensor,
    *,
    batched: bool,
    is_causal: bool,
    hint_decides: bool,
) -> None:
    """Refuses the attn_mask that torch refuses, with the same class of exception; with `hint_decides`, of any shape."""
    _check_kind("attn_mask", mask, queries)
    check_hint(mask, is_causal)
    if mask is None:
        return
    B, H, L, S = shape
    wanted = (L, S) if mask.dim() == 2 else (B * H, L, S)
    if mask.dim() not in (2, 3) or (not batched and mask.dim() == 3 and mask.shape != wanted):
        raise AssertionError(f"attn_mask must be {[L, S]} or {[B * H, L, S]}, got {list(mask.shape)}")
    if not hint_decides and mask.shape != wanted:
        raise RuntimeError(f"attn_mask must be {list(wanted)}, got {list(mask.shape)}")


def check_hint(mask: Tensor | Mask | None, is_causal: bool) -> None:
    """Refuses the hint that a mask is causal where there is none, and where it is a `Mask` that is not."""
    if is_causal and mask is None:
        raise RuntimeError("attn_mask must be given with is_causal, which is a hint about it, got None")
    if is_causal and isinstance(mask, Mask) and not mask.causal:
        raise ValueError("is_causal must be False beside a Mask without causal, got True; write Mask(causal=True, ...)")


def _check_kind(name: str, mask: Tensor | None, queries: Tensor) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        how = "; attn_mask takes one" if isinstance(mask, Mask) else ""
        raise TypeError(f"{name} must be a Tensor or None, got {type(mask).__name__}{how}")
    if mask.device != queries.device:
        raise RuntimeError(f"{name} must be on {queries.device} like the queries, got {mask.device}")
    if mask.dtype == torch.bool:
        return
    if not mask.is_floating_point():
        raise AssertionError(
            f"{name} must be bool or of a floating dtype, got {mask.dtype}; True hides, so `== 0` makes it of a mask "
            "in which 1 is seen, as transformers' attention_mask"
        )
    dtypes = {torch.float32: "", queries.dtype: " like the queries"}
    if (of_autocast := autocast_dtype(queries.device.type)) is not None:
        dtypes.setdefault(of_autocast, " of autocast")
    if mask.dtype not in dtypes:
        allowed = " or ".join(f"{dtype}{why}" for dtype, why in dtypes.items())
        raise RuntimeError(f"{name} must be bool or {allowed}, got {mask.dtype}")
