"""Attention of DTensors: samples and heads where they are, and the tokens of a sample by a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from .. import api
from ..blocks import Within
from ..plan import after_autocast, drawn, places_from
from ..spec import DropoutSeed, Mask
from ..validation import EVERYTHING, validated
from .exchange import REFUSALS, agree
from .masks import with_tensors
from .parts import refuse_by_distance
from .plans import Plan, plan

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..api import Terms


def attention(
    q: DTensor, k: DTensor, v: DTensor, mask: Mask | None, of_tokens: Plan | Within | None, **terms: Unpack[Terms]
) -> tuple[DTensor, DTensor]:
    """`fastattn.attention` of DTensors: (o, lse), which are placed like q.

    Each dimension of the mesh may have samples, heads or tokens sharded, tokens at most one of them. A plain tensor
    among the other arguments is that of the whole call, and gets the gradient of what this rank computes. With a plan
    of the tokens, which the DTensors then have some of, heads alone may be sharded. Dropout is that of one process with
    the generator of the first rank.
    """
    given = of_tokens.plan if isinstance(of_tokens, Within) else of_tokens
    mesh, placements = q.device_mesh, q.placements
    shards = [i for i, placement in enumerate(placements) if given is None and placement.is_shard(2)]
    if mask is None and isinstance(of_tokens, Plan):
        mask = of_tokens.mask
    try:
        local, mask, terms = _of_rank(q, k, v, mask, given, terms)
    except REFUSALS as refusal:  # of one rank perhaps, for which those with other tokens wait
        groups = given._groups() if isinstance(given, Plan) else [mesh.get_group(i) for i in shards]
        agree(0, refusal, None, q.device, groups)
    if shards:
        of_tokens = plan(mask, (q.shape[2], k.shape[2]), mesh.get_group(shards[0]), layout="contiguous")
    if terms["dropout_p"]:
        seed = _of_first_rank(terms["generator"].seed, mesh, shards)
        terms["generator"] = terms["generator"]._replace(seed=seed)
    results = api.attention(*local, mask, **terms, return_lse=True, plan=of_tokens)
    shapes = torch.Size([*q.shape[:3], v.shape[3]]), q.shape[:3]
    return tuple(Whole.apply(x, mesh, placements, shape) for x, shape in zip(results, shapes, strict=True))


def _of_rank(
    q: DTensor, k: DTensor, v: DTensor, mask: Mask | None, given: Plan | None, terms: Terms
) -> tuple[list[Tensor], Mask | None, Terms]:
    """q, k and v, the mask and the terms as this rank has them, with a seed of its own for dropout."""
    refuse_by_distance(terms["bias"])
    _check_placements(q, k, v, (0, 1, 2) if given is None else (1,))
    mesh, placements = q.device_mesh, q.placements
    learned = {name: terms[name] for name in ("bias", "alibi_slopes", "sinks")}
    partial = tuple(Replicate() if p.is_replicate() else Partial() for p in placements)
    for name, x in learned.items():
        if isinstance(x, DTensor):
            if x.device_mesh != mesh:
                raise ValueError(f"{name} must be a Tensor, or a DTensor on {mesh} like q, got one on {x.device_mesh}")
            learned[name] = Local.apply(_Placed.apply(x, (Replicate(),) * mesh.ndim), partial)
    terms = terms | learned
    samples, heads = (_part(q, dim) for dim in (0, 1))
    sizes = [x.shape for x in (q, k, v)]
    if given is None:
        mask = EVERYTHING if mask is None else mask
        if isinstance(mask, Mask):  # else it is refused by name
            whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in mask.tensors().items()}
            mask = with_tensors(mask, whole)
    elif isinstance(given, Plan):
        lengths = given.n_q, given.n_k, given.n_k
        sizes = [(*size[:2], n, *size[3:]) for size, n in zip(sizes, lengths, strict=True)]
    whole = (x.to_local().new_empty(1).expand(size) for x, size in zip((q, k, v), sizes, strict=True))
    of_spec = {name: x for name, x in terms.items() if name != "backend"}
    of_all = mask
    if given is not None:  # padding and documents are those of the local tokens, in a block
        of_all = Mask(dense=mask.dense) if isinstance(mask, Mask) else EVERYTHING
    validated(*after_autocast(*whole), of_all, **of_spec)
    if given is None:
        mask = _some(mask, samples, heads)
    elif of_all.dense is not None:
        mask = replace(mask, dense=_cut(mask.dense, -3, heads))
    if terms["bias"] is not None:
        terms["bias"] = _cut(_cut(terms["bias"], -4, samples), -3, heads)
    if terms["alibi_slopes"] is not None:
        slopes = terms["alibi_slopes"][..., heads]
        terms["alibi_slopes"] = slopes[samples] if slopes.dim() == 2 else slopes  # never one row for all samples
    if terms["sinks"] is not None:
        terms["sinks"] = terms["sinks"][heads]
    local = [Local.apply(x, placements) for x in (q, k, v)]
    if terms["dropout_p"]:
        seed, _, first = drawn(local[0].device, terms["generator"])
        first = first[0] + samples.start, first[1] + heads.start
        places = places_from(first, q.shape[2], k.shape[2], seed.device)
        terms["generator"] = DropoutSeed(seed, places, first)
    return local, mask, terms


# PyTorch has all three, but loses second derivatives there: in 2.10 always, later where a gradient is placed otherwise
# than its tensor.


def placed(x: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """A DTensor placed in this way; its gradient is placed as it was, if it was in another way."""
    return x if x.placements == placements else _Placed.apply(x, placements)


class _Placed(Function):
    @staticmethod
    def forward(ctx, x, placements):
        ctx.placements = _of_gradient(x.placements)
        return x.redistribute(x.device_mesh, placements)

    @staticmethod
    def backward(ctx, gradient):
        return placed(gradient, ctx.placements), None


class Local(Function):
    """The part of a DTensor here, whose gradient is a DTensor with the given placements."""

    @staticmethod
    def forward(ctx, x, placements):
        ctx.whole = x.device_mesh, placements, x.shape
        local = x.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx, gradient):
        return Whole.apply(gradient, *ctx.whole), None


class Whole(Function):
    """The DTensor of the parts of all ranks."""

    @staticmethod
    def forward(ctx, x, mesh, placements, shape):
        ctx.placements = placements
        x = x.view_as(x) if x.stride() == _dense_strides(x, x.shape) else x.contiguous()
        stride = _dense_strides(x, shape)
        return DTensor.from_local(x, mesh, placements, run_check=False, shape=shape, stride=stride)

    @staticmethod
    def backward(ctx, gradient):
        return Local.apply(placed(gradient, _of_gradient(ctx.placements)), ctx.placements), None, None, None


def _of_gradient(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """How the gradient is placed of a DTensor that is placed so: that of a sum is the same for every part."""
    return tuple(Replicate() if p.is_partial() else p for p in placements)


def _dense_strides(x: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor of that shape without gaps, whose dimensions lie in memory in the order of those of x."""
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    return torch.empty_permuted(shape, order, device="meta").stride()


def _check_placements(q: DTensor, k: Tensor, v: Tensor, dims: tuple[int, ...]) -> None:
    """Raises ValueError where q, k and v are not placed in a way that attention is computed in."""
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, DTensor) or x.device_mesh != q.device_mesh or x.placements != q.placements:
            got = f"{x.placements} on {x.device_mesh}" if isinstance(x, DTensor) else type(x).__name__
            raise ValueError(f"{name} must be a DTensor, {q.placements} on {q.device_mesh} like q, got {got}")
    for i, placement in enumerate(q.placements):
        ranks = q.device_mesh.size(i)
        if not (placement.is_replicate() or any(map(placement.is_shard, dims))):
            which = "1 where there is a plan" if dims == (1,) else "0, 1 or 2"
            raise ValueError(f"q must be replicated, or sharded along dim {which}, got {q.placements}")
        if placement.is_shard(1) and k.dim() == 4 and (k.shape[1] % ranks or q.shape[1] % ranks):
            got = f"{q.shape[1]} and {k.shape[1]}"
            raise ValueError(f"the heads of q and k must be multiples of the {ranks} ranks that share them, got {got}")
    for dim, what in ((1, "heads"), (2, "tokens")):
        if sum(placement.is_shard(dim) for placement in q.placements) > 1:
            raise ValueError(f"q must have its {what} on one dimension of the mesh, got {q.placements}")


def _of_first_rank(seed: Tensor, mesh: DeviceMesh, shards: list[int]) -> Tensor:
    """The seed that the first rank of the mesh has drawn; every rank draws one, so that generators stay in step.

    shards: the dimensions along which a call with a plan takes that of the first rank anyway.
    """
    for dim in [dim for dim in range(mesh.ndim) if dim not in shards]:
        seed = collectives.wait_tensor(collectives.broadcast(seed, 0, (mesh, dim)))
    return seed


def _part(x: DTensor, dim: int) -> slice:
    """The entries along `dim` that this rank has: of several dimensions of the mesh each shards what is left."""
    first, n = 0, x.shape[dim]
    for i, placement in enumerate(x.placements):
        if placement.is_shard(dim):
            size = -(-n // x.device_mesh.size(i))
            start = min(size * x.device_mesh.get_local_rank(i), n)
            first, n = first + start, min(size, n - start)
    return slice(first, first + n)


def _cut(x: Tensor, dim: int, part: slice) -> Tensor:
    """Some entries along a dimension that may be missing, or 1 for all."""
    return x if x.dim() < -dim or x.shape[dim] == 1 else x.narrow(dim, part.start, part.stop - part.start)


def _some(mask: Mask, samples: slice, heads: slice) -> Mask:
    """The mask of some samples and heads."""
    if samples.start == samples.stop:  # of which a plan knows no mask
        return EVERYTHING
    part = {name: x[samples] for name, x in mask.tensors().items() if name != "dense"}
    if mask.dense is not None:
        part["dense"] = _cut(_cut(mask.dense, -4, samples), -3, heads)
    return with_tensors(mask, part)
