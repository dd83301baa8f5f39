"""The blocks of `parallel.context_parallel` that the process is in, for modules that import no torch.distributed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

if TYPE_CHECKING:
    from .parallel import Plan


class Within(NamedTuple):
    """A plan whose mask is combined with that of the call; with an `objection`, every rank refuses the call for it."""

    plan: Plan | None
    objection: str | None = None


HERE = Within(None)
"""In place of a plan: the call is one of this process alone, in a block as outside of it."""


def is_here(plan: object) -> bool:
    """Whether this is `HERE`, also while torch 2.10 compiles, which compares no two named tuples by `is`."""
    return isinstance(plan, Within) and plan.plan is None


@dataclass(eq=False)
class Block:
    """The plans of a block.

    own: that of its tokens. source: that of the tokens of the encoder, if there is one. cross: that of the attention
    of the former to the latter.
    objection: why the next call cannot be right, as far as is known before it.
    begin, end: what autograd numbers the nodes by that it makes in the block; None as long as it lasts.
    inner: those of its source, which are over.
    """

    own: Plan
    source: Plan | None = None
    cross: Plan | None = None
    objection: str | None = None
    begin: int = 0
    end: int | None = None
    inner: list[Block] = field(default_factory=list)

    def has(self, number: int) -> bool:
        """Whether autograd made the node of this number in the block."""
        return self.begin <= number and (self.end is None or number < self.end)

    def within(self, *, cross: bool = False, objection: str | None = None) -> Within:
        """What a call of this block is given in place of a plan."""
        if cross and self.cross is None:
            objection = objection or "attention to other tokens needs context_parallel(..., source=their plan)"
        objection, self.objection = objection or self.objection, None
        return Within(self.cross if cross and self.cross is not None else self.own, objection)

    def objection_to_positions(self, positions: Tensor) -> str | None:
        """What is wrong with positions of tokens that a model made by itself, 0, 1, 2, ... on every rank."""
        if is_compiling():  # a graph reads no values
            return None
        here = self.own.positions(device=positions.device)
        default = torch.arange(len(here), device=positions.device)
        if positions.dim() != 2 or positions.shape[1] != len(here) or not (positions == default).all():
            return None
        mask, n = self.own.mask, self.own.n_k
        real = mask.readable_keys()
        token = torch.arange(n, device=positions.device)
        # In all tokens, in the document, among real ones.
        counted = [token[None], mask.positions(n, n, positions.device)[1]]
        counted += [] if real is None else [(real.cumsum(1) - 1).clamp(min=0)]
        if any((x.to(positions.device)[:, here] == default).all() for x in counted):
            return None
        return "position_ids must be given in a context_parallel block, as plan.positions()[None], got 0, 1, 2, ..."

    def objection_to_documents(self, ids: Tensor) -> str | None:
        """What is wrong with documents [B, n] that a model read from positions that are not consecutive."""
        if is_compiling():
            return None
        mask = self.own.mask
        here = self.own.positions(device=ids.device)
        between = here.diff()[None] != 1  # tokens of other ranks lie there
        if mask.segment_ids is not None:
            between = between | (mask.segment_ids[1].to(ids.device)[:, here].diff() != 0)
        if (real := mask.readable_keys()) is not None:
            real = real.to(ids.device)[:, here]
            between = between | ~(real[:, 1:] & real[:, :-1])
        if not ((ids.diff() != 0) & ~between).any():
            return None
        return "documents must be in the plan's mask as segment_ids, got position_ids that begin again within one"


ENTERED: list[Block] = []
"""The blocks, the innermost last: those of the process, whose backward passes may run in other threads."""


class Left(NamedTuple):
    """A block that is over, of which a backward after it may compute calls again.

    tokens: those that this rank had. begin, end: what autograd numbered the nodes by that it made in the block.
    """

    tokens: set[int]
    begin: int
    end: int


LEFT: deque[Left] = deque(maxlen=64)
"""The last blocks that are over."""


def of_call(q: Tensor) -> Within | None:
    """What a call without a plan is given in place of one.

    Raises:
        RuntimeError: it is one of a block, which activation checkpointing computes again in a backward after the block.
    """
    block, number = current(), number_of_node()
    if number is not None and isinstance(q, Tensor) and q.dim() == 4:
        since = -1 if block is None else block.begin
        if any(q.shape[2] in left.tokens and since < left.begin <= number < left.end for left in LEFT):
            raise RuntimeError(
                "the backward of a context_parallel block with activation checkpointing must be called in the block, "
                "got one after it"
            )
    return None if block is None else block.within()


def beginning() -> int:
    """The `begin` of a block that is entered now, perhaps where a backward computes its forward again."""
    number = number_of_node()
    return torch.autograd._get_sequence_nr() if number is None else number


def number_of_node() -> int | None:
    """Autograd's number of the node whose backward runs, perhaps of a checkpoint that computes its forward again."""
    node = None if is_compiling() else torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def current() -> Block | None:
    """The innermost block, or None; in a backward that computes a forward again, that which the forward was in."""
    if not ENTERED or (number := number_of_node()) is None:
        return ENTERED[-1] if ENTERED else None
    known = [block for entered in ENTERED for block in (entered, *entered.inner) if block.has(number)]
    return max(known, key=lambda block: block.begin, default=None)


@contextmanager
def of_source(block: Block | None) -> Iterator[None]:
    """A block of the source of this one, where that has one."""
    if block is None or block.source is None:
        yield
        return
    inner = Block(block.source, begin=0 if is_compiling() else beginning())
    ENTERED.append(inner)
    try:
        yield
    finally:
        ENTERED.remove(inner)
        if not is_compiling() and number_of_node() is None:  # else it was in the forward before
            inner.end = torch.autograd._get_sequence_nr()
            block.inner.append(inner)


def positions(n: int, device: torch.device) -> Tensor:
    """int64 [n], positions of tokens: 0, 1, 2, ... or, in a block, those of this rank."""
    block = current()
    return torch.arange(n, device=device) if block is None else block.own.positions(device=device)


def refuse(what: str) -> None:
    """Raises NotImplementedError in a block."""
    if current() is not None:
        raise NotImplementedError(f"{what} cannot be computed in a context_parallel block")
