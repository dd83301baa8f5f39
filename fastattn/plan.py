"""The plan of a kind of call: whether it is well formed, and which backend computes it.

All of that depends on metadata alone: on shapes, dtypes and devices, on which arguments are given, on numbers. So it is
decided once for each kind of call, and remembered; a call of a known kind costs one look-up. What depends on values of
tensors is checked in each call, by whoever reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from . import backends
from .backends.choice import default_is_best
from .backends.record import is_traced, while_tracing
from .backends.selfcheck import serves_whole
from .spec import DropoutSeed, Mask, RelativeBias, Spec, as_int, as_number
from .validation import EVERYTHING, check_seed, in_spec, validated

MOST_PLANS = 4096
"""How many kinds are remembered; the next one forgets them all. A model has a few for each length of its batches."""


class Plan(NamedTuple):
    """The decision about one kind of call.

    spec: of its calls, as far as it is no tensors; the mask only where all of it is none.
    backend: the backend that computes it. by_weights: the one that computes its weights.
    plain: every tensor is nothing but its memory, so that PyTorch has nothing to do with the call but autograd.
    pairs: there are queries and keys.
    training: autograd will ask for a gradient.
    lse_wanted: something is made of the lse.
    output_only: the backend has no lse and no backward, but an `output`.
    """

    spec: Spec
    backend: ModuleType
    by_weights: ModuleType
    plain: bool
    pairs: bool
    training: bool
    lse_wanted: bool
    output_only: bool


_plans: dict[tuple, Plan] = {}
short_ways: dict[tuple[ModuleType, ...], tuple[Callable, Callable, Callable, ModuleType]] = {}
"""What `short_way` of a backend gives, and the backend, by the backends there were."""


def forget_plans() -> None:
    """Forgets every decision, as after a change of what a backend supports."""
    _plans.clear()
    short_ways.clear()


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    scale: float | None,
    bias: Tensor | RelativeBias | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    dropout_p: float,
    generator: torch.Generator | DropoutSeed | None,
    deterministic: bool,
    backend: str | None,
    function: str = "forward",
) -> tuple[Tensor, Tensor, Tensor, Spec, Plan]:
    """q, k and v after autocast, the spec and the plan of a call with these arguments of `attention`.

    Args:
        function: of the protocol of backends, which the call needs, as `backends.objections` has it; or "with weights"
            for forward and weights.

    Raises:
        ValueError: the call is malformed.
        NotImplementedError: no backend, or not the named one, computes it.
    """
    if _any_autocast():
        q, k, v = after_autocast(q, k, v)
    scale, softcap, dropout_p = as_number(scale), as_number(softcap), as_number(dropout_p)
    bias, by_distance = in_spec(bias, q, k, mask)
    kind, training = None, derivatives_wanted(q, k, v, bias, alibi_slopes, sinks)
    lse_wanted = function != "output"
    if not lse_wanted and (training or forward_ad._current_level >= 0):  # PyTorch has no public way to ask
        function = "forward"
    if not is_traced():
        try:
            kind = (
                _metadata(q), _metadata(k), _metadata(v), None if mask is None else _kind_of_mask(mask),
                type(scale), scale, None if bias is None else _metadata(bias), by_distance, type(softcap), softcap,
                None if alibi_slopes is None else _metadata(alibi_slopes), None if sinks is None else _metadata(sinks),
                type(dropout_p), dropout_p, type(generator), type(deterministic), deterministic, backend, function,
                training, lse_wanted, backends.BACKENDS,
            )  # fmt: skip
            plan = _plans.get(kind)
        except (AttributeError, TypeError, RuntimeError):
            kind = plan = None  # the call is malformed, which `validated` finds, or has symbolic lengths
    if kind is None or plan is None:
        if backend is not None and not isinstance(backend, str):
            raise ValueError(f"backend must be a str or None, got {type(backend).__name__}")
        spec = validated(
            q, k, v, mask, scale, bias, softcap, alibi_slopes, sinks, dropout_p, generator, deterministic, by_distance
        )  # fmt: skip
        two = function == "with weights"
        of_values = "forward" if two else function
        chosen = by_weights = backends.select(q, k, v, spec, backend, function=of_values, training=training)
        if two:
            by_weights = backends.select(q, k, v[..., :0], spec, backend, function="weights")
        plain = kind is not None and all(is_plain(x) for x in (q, k, v, *spec.tensors()))
        pairs = kind is not None and not nothing_to_see(q, k)
        if spec.tensors() or spec.dropout_p > 0:
            spec = replace(spec, mask=EVERYTHING, bias=None, alibi_slopes=None, sinks=None)
        elif kind is not None:
            spec.kind = spec
        output_only = "forward" in chosen.lacks(q.device)
        plan = Plan(spec, chosen, by_weights, plain, pairs, training, lse_wanted, output_only)
        if kind is not None and not (backend is None and backends.reference in (chosen, by_weights)):  # it warns
            if len(_plans) >= MOST_PLANS:
                _plans.clear()
            _plans[kind] = plan
            may_be_short = backend is None and hasattr(chosen, "short_way")
            if may_be_short and default_is_best(q.device) and serves_whole(chosen, q.device):
                short_ways[backends.BACKENDS] = *chosen.short_way(), chosen
    of_kind = plan.spec
    if of_kind.kind is of_kind:
        return q, k, v, of_kind, plan
    seed = places = None
    if of_kind.dropout_p > 0:
        seed, places, first = drawn(q.device, generator)
        if places is None and first != (0, 0):
            places = places_from(first, q.shape[2], k.shape[2], q.device)
    spec = Spec(
        EVERYTHING if mask is None else mask, of_kind.scale, bias, of_kind.softcap, alibi_slopes, sinks,
        of_kind.dropout_p, seed, of_kind.deterministic, places, by_distance,
    )  # fmt: skip
    if kind is not None and places is None:  # of which the kind knows nothing
        spec.kind = of_kind
    return q, k, v, spec, plan


def drawn(device: torch.device, generator: torch.Generator | DropoutSeed | None) -> DropoutSeed:
    """What the dropout of one call is drawn by, with a seed from the generator: on `device`, which needs no waiting."""
    if isinstance(generator, DropoutSeed):
        check_seed(generator, device)
        seed = generator.seed
        if not isinstance(seed, Tensor):  # of which Dynamo would compile a graph for each number
            seed = torch.full((), as_int(seed), dtype=torch.int64, device=device)
        return DropoutSeed(seed, generator.places, tuple(map(as_int, generator.first)))
    return DropoutSeed(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device, generator=generator))


def places_from(first: tuple[int, int], n_q: int, n_k: int, device: torch.device) -> Tensor:
    """`Spec.places` of all queries and keys of some samples and heads, of which these are the first."""
    rows, fours = (torch.arange(n, dtype=torch.int32, device=device) for n in (n_q, -(-n_k // 4)))
    return torch.cat([*(rows.new_full((1,), i) for i in first), rows, fours])


def derivatives_wanted(*tensors: Tensor | None) -> bool:
    """Whether autograd will ask for a gradient of one of these; what is no tensor has none."""
    return torch.is_grad_enabled() and any([getattr(x, "requires_grad", False) for x in tensors])  # noqa: C419


def _metadata(x: Tensor) -> tuple:
    """All of a tensor that a plan depends on."""
    return type(x), x.shape, x.dtype, x.get_device(), _keys_of(x).raw_repr()


def _kind_of_mask(mask: Mask) -> tuple:
    """All of a mask that a plan depends on."""
    q_offset, segment_ids = mask.q_offset, mask.segment_ids
    return (
        mask.causal,
        q_offset if type(q_offset) is int else _metadata(q_offset),
        mask.window,
        None if mask.real_keys is None else _metadata(mask.real_keys),
        None if mask.real_queries is None else _metadata(mask.real_queries),
        None if segment_ids is None else (_metadata(segment_ids[0]), _metadata(segment_ids[1])),
        None if mask.dense is None else _metadata(mask.dense),
    )


def nothing_to_see(q: Tensor, k: Tensor) -> bool:
    """Whether there is no pair of query and key: no backend is asked. In a graph the op asks, not a guard."""
    B, H, n_q, _ = q.shape
    return B == 0 or H == 0 or n_q == 0 or k.shape[2] == 0


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is nothing but its memory: of no subclass, not wrapped by a transform, not lazily negated.

    Each of these sets a dispatch key that a plain tensor does not have, but for a subclass that lives by
    __torch_function__ alone.
    """
    return type(x) in _PLAIN_TYPES and not _keys_of(x).raw_repr() & ~_keys_of_plain_tensors(x.device.type)


_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_keys_of, _any_autocast = torch._C._dispatch_keys, torch._C._is_any_autocast_enabled


@functools.cache
def _keys_of_plain_tensors(device_type: str) -> int:
    with _disable_current_modes(), torch.inference_mode(False):
        return _keys_of(torch.empty(0, device=device_type)).raw_repr()


@while_tracing  # which torch 2.10 cannot trace
def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of autocast on a kind of device, where it is on."""
    if not _has_autocast(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def after_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast does to the arguments of scaled_dot_product_attention: all but fp64 in the autocast dtype."""
    if not all(isinstance(x, Tensor) and x.is_floating_point() for x in tensors):
        return tensors
    dtype = autocast_dtype(tensors[0].device.type)
    if dtype is None:
        return tensors
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)
