"""Exchange of rows between the ranks of a group, with gradients, in a fixed order of all sums."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from ..spec import accumulation_dtype

REFUSALS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""What a rank may refuse its part of a call with, for which the others would wait: see `agree`."""

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name until torch 2.12


@dataclass(frozen=True, eq=False)
class Route:
    """Rows of a tensor [n_in, C] that each rank sends, and where they arrive in one [n_out, C], which is 0 elsewhere.

    sent: int64, the rows that go out: those to rank 0 first. to: how many go to each rank.
    placed: int64, the rows where others arrive: those from rank 0 first. by: how many come from each rank.
    summed: several rows arrive at one place.
    """

    sent: Tensor
    to: list[int]
    placed: Tensor
    by: list[int]
    n_in: int
    n_out: int
    summed: bool = False

    @classmethod
    def of(cls, sent: list[Tensor], placed: list[Tensor], n_in: int, n_out: int, device: torch.device) -> Route:
        """The route of the rows `sent[r]` to rank r, and of those from it to `placed[r]`."""
        lengths = ([len(x) for x in rows] for rows in (sent, placed))
        return cls(torch.cat(sent).to(device), next(lengths), torch.cat(placed).to(device), next(lengths), n_in, n_out)

    def back(self) -> Route:
        """The route of what arrived to where it came from; what comes from several ranks is summed."""
        return Route(self.placed, self.by, self.sent, self.to, self.n_out, self.n_in, not self.summed)


@dataclass
class Transfer:
    """Rows that are under way on a route: `wait` for them."""

    route: Route
    arrived: Tensor
    work: dist.Work | None
    _sent: Tensor = field(repr=False)  # which must not be freed before

    @classmethod
    def start(cls, rows: Tensor, route: Route, group: dist.ProcessGroup) -> Transfer:
        """A transfer of rows [n_in, C] that other work can be done beside. Every rank of the group has to start it."""
        sent = rows[route.sent]
        arrived = sent.new_empty(len(route.placed), rows.shape[1])
        work = dist.all_to_all_single(arrived, sent, route.by, route.to, group=group, async_op=True)
        return cls(route, arrived, work, sent)

    def wait(self) -> Tensor:
        """The rows that arrived, [n_out, C]. Sums are made in the order of the ranks, in fp32."""
        if self.work is not None:
            self.work.wait()
        route, arrived = self.route, self.arrived
        if not route.summed:
            return arrived.new_zeros(route.n_out, arrived.shape[1]).index_copy_(0, route.placed, arrived)
        dtype = accumulation_dtype(arrived.dtype)
        result = arrived.new_zeros(route.n_out, arrived.shape[1], dtype=dtype)
        for rows, places in zip(arrived.split(route.by), route.placed.split(route.by), strict=True):
            result.index_add_(0, places, rows.to(dtype))  # from one rank no place gets two rows: no order is left open
        return result.to(arrived.dtype)


class _Exchange(Function):
    @staticmethod
    def forward(ctx, rows, route, group):
        ctx.back, ctx.group = route.back(), group
        return Transfer.start(rows, route, group).wait()

    @staticmethod
    def backward(ctx, gradient):
        return _Exchange.apply(gradient, ctx.back, ctx.group), None, None


def exchange(rows: Tensor, route: Route, group: dist.ProcessGroup) -> Tensor:
    """The rows [n_out, C] that arrive on a route; differentiable to any order, the gradients going back."""
    return _Exchange.apply(rows, route, group)


class _Replicated(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return _Summed.apply(gradient, ctx.group), None


class _Summed(_Replicated):  # whose gradient is a sum too: each rank's loss counts
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return summed(x, group)


def replicated(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x`, whose gradient is the sum over the ranks of the gradients that each has; differentiable to any order."""
    return _Replicated.apply(x, group)


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of a tensor over the ranks in their order, in fp32, with the same bits on each: each sums one part."""
    ranks = dist.get_world_size(group)
    parts = pad(x.reshape(-1), (0, -x.numel() % ranks)).view(ranks, -1)
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=group)
    total = arrived[0].to(accumulation_dtype(x.dtype))
    for part in arrived[1:]:
        total = total + part
    whole = parts.new_empty(parts.numel())
    _all_gather(whole, total.to(x.dtype), group=group)
    return whole[: x.numel()].view(x.shape)


def digest(*values: object) -> int:
    """A number other than 0 for these values: the bytes of tensors on the CPU, and the `repr` of all else."""
    result = hashlib.blake2b(digest_size=8)
    for value in values:
        result.update(repr((value.dtype, value.shape) if isinstance(value, Tensor) else value).encode())
        if isinstance(value, Tensor) and value.numel():
            value = value.contiguous()
            result.update((ctypes.c_char * value.nbytes).from_address(value.data_ptr()))
    return int.from_bytes(result.digest(), "little", signed=True) or 1


def agree(
    mine: int,
    error: Exception | None,
    seed: Tensor | None,
    device: torch.device,
    groups: Sequence[dist.ProcessGroup],
    alike: str = "mask, plan, options, and the shapes and dtypes of q, k and v",
) -> Tensor:
    """The seed of the first rank, or an error on every rank where one has another call than others, or has refused it.

    Costs one all_gather of 16 bytes for each dimension of the ranks, and waiting for it.

    Args:
        mine: `digest` of what all ranks must have alike.
        error: why this rank refuses its call; it is raised here, after the others know.
        seed: int64 scalar, of dropout; None where the call has none, and the result is 0.
        groups: those of this rank, one for each dimension of the ranks.
        alike: what `mine` is of, in words.

    Raises:
        ValueError: other ranks have other calls, or have refused theirs; the message names them.
    """
    known = torch.tensor([0 if error else mine, 0], dtype=torch.int64, device=device)
    if seed is not None:
        known[1] = seed
    for group in reversed(groups):
        mine_and_others = known.new_empty(dist.get_world_size(group) * len(known))
        _all_gather(mine_and_others, known, group=group)
        known = mine_and_others
    numbers = known[::2].tolist()
    if error is not None:
        raise error
    if refusing := [rank for rank, number in enumerate(numbers) if number == 0]:
        raise ValueError(f"the call must be valid on every rank; {_named(refusing)} refused it and says why")
    common = max(numbers, key=numbers.count)  # the first of those that most ranks have
    if others := [rank for rank, number in enumerate(numbers) if number != common]:
        raise ValueError(
            f"{alike} must be the same on every rank, "
            f"got others on {_named(others)} than on rank {numbers.index(common)}"
        )
    return known[1]


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
