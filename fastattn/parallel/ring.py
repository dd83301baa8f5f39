"""Attention by a ring: keys go from rank to rank, and partial results are merged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from .. import api
from ..spec import accumulation_dtype, as_output
from .exchange import Route, Transfer
from .masks import Visibility, in_fours, runs_of
from .parts import Call, Learned, Options, Part, as_keys, as_rows, attention_here
from .plans import Plan


class _Block(NamedTuple):
    """A part of the keys that a step has: the rows `source` of these are the rows `target` of the part."""

    part: Part
    source: Tensor
    target: Tensor

    def keys(self, rows: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Its keys and values, of the rows that the step has."""
        n = len(self.part.keys)
        block = rows.new_zeros(len(k) * n, rows.shape[1])
        return as_keys(block.index_copy_(0, self.target, rows[self.source]), n, k, v)


class _Step(NamedTuple):
    """What a rank does with the keys of one rank, which are those of itself at first, and then of those before it.

    blocks: the parts that its queries see. onward: the route of the keys that later steps need, to the next rank, and
    of those of the next step, from the rank before; None for the last.
    gradients: the route of the gradients of this step: on to the next rank, or home where that needs none, and in the
    same way of those that arrive, of which the last `B * n` are of its own keys. None for the first.
    """

    blocks: list[_Block]
    onward: Route | None
    gradients: Route | None


def schedule(plan: Plan, visibility: Visibility, call: Call) -> list[_Step]:
    """What `attend` does under a mask, step by step."""
    B, positional, device = call.B, call.positional, call.device
    owner, me, ranks = plan._layout.owner_k, plan.rank, plan.ranks
    need = visibility.needed(plan._layout.owner_q, ranks).expand(-1, B, -1)
    rows, n_mine = plan._rows("queries"), B * len(plan._rows("keys"))
    nobody = torch.empty(0, dtype=torch.int64, device="cpu")

    def travelling(rank: int, step: int) -> Tensor:
        """The keys of a rank, as sample * n_k + key, ascending, that are somewhere needed in this step or later."""
        later = [(rank + further) % ranks for further in range(step, ranks)]
        kept = need[later].any(0) if step else torch.ones(B, plan.n_k, dtype=torch.bool, device="cpu")
        return (kept & (owner == rank)).flatten().nonzero()[:, 0]

    def by_rank(rows: dict[int, Tensor]) -> list[Tensor]:
        return [rows.get(rank, nobody) for rank in range(ranks)]

    steps, after, before = [], (me + 1) % ranks, (me - 1) % ranks
    for step in range(ranks):
        of = (me - step) % ranks
        here, passed, coming = travelling(of, step), travelling(of, step + 1), travelling((of - 1) % ranks, step + 1)
        mine, arriving = need[me] & (owner == of), torch.arange(len(coming), device="cpu")
        keys, blocks = mine.any(0).nonzero()[:, 0], []
        if call.first is not None:
            keys = in_fours(keys, plan.n_k)
        runs = [keys] if len(keys) else []
        if positional and runs:
            runs = [torch.arange(int(run[0]), int(run[-1]) + 1, device="cpu") for run in runs_of(keys)]
        for run in runs:
            sample, slot = mine[:, run].nonzero().unbind(1)
            source = torch.searchsorted(here, sample * plan.n_k + run[slot])
            part = Part.of(visibility, rows, run, mine, call)
            blocks.append(_Block(part, source.to(device), (sample * len(run) + slot).to(device)))
        onward = gradients = None
        if step + 1 < ranks:
            sent = torch.searchsorted(here, passed)
            onward = Route.of(by_rank({after: sent}), by_rank({before: arriving}), len(here), len(coming), device)
        if step:
            done = torch.isin(here, passed, invert=True).nonzero()[:, 0]
            of_mine, still = travelling(me, step), travelling(me, step + 1)
            home = of_mine[torch.isin(of_mine, still, invert=True)]
            home = len(coming) + torch.searchsorted(travelling(me, 0), home)
            # In the last step both are the same rank, and nothing goes on: the second one counts.
            sent = {after: torch.searchsorted(here, passed), of: done}
            placed = {before: arriving, (me + step) % ranks: home}
            gradients = Route.of(by_rank(sent), by_rank(placed), len(here), len(coming) + n_mine, device)
        steps.append(_Step(blocks, onward, gradients))
    return steps


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: list[_Step],
    learned: Learned,
    options: Options,
    plan: Plan,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(o, lse) of the queries of this rank; with first derivatives only."""
    return _Ring.apply(q, k, v, *learned, seed, schedule, options, plan.group)


class _Ring(Function):
    """Attention by a ring: o and lse are merged from those of the blocks, and so are the gradients.

    A block is one call of `attention`, with an lse of its own: the one of all keys would not do, from which a backend
    may not compute the weights of few keys. So the backward begins with the forward of each block.
    """

    @staticmethod
    def forward(ctx, q, k, v, bias, alibi_slopes, sinks, seed, steps, options, group):
        dtype = accumulation_dtype(q.dtype)
        o = q.new_zeros(*q.shape[:3], v.shape[3], dtype=dtype)
        lse_of_keys = q.new_full(q.shape[:3], -math.inf, dtype=dtype)
        for step, rows in _travel(steps, as_rows(k, v), group):
            for block in step.blocks:
                terms = {"bias": block.part.bias(bias), "alibi_slopes": alibi_slopes}
                keys = block.keys(rows, k, v)
                o_b, lse_b = attention_here(q, *keys, block.part.mask, seed, block.part.places, **terms, **options)
                o, lse_of_keys = api.merge(o, lse_of_keys, o_b.to(dtype), lse_b)
        lse = lse_of_keys
        if sinks is not None:
            o, lse = api.merge(o, lse, torch.zeros_like(o), torch.full_like(lse, -math.inf), sinks=sinks)
        ctx.save_for_backward(q, k, v, bias, alibi_slopes, sinks, seed, o, lse_of_keys)
        ctx.constants = steps, options, group
        ctx.set_materialize_grads(False)
        return as_output(o.to(q.dtype), q), lse

    @staticmethod
    def backward(ctx, do, dlse):
        saved = ctx.saved_tensors
        with torch.no_grad():
            gradients = _Ring.gradients(do, dlse, saved, ctx.constants, ctx.needs_input_grad[:6])
        return *_First.apply(gradients, do, dlse, *saved), None, None, None, None

    @staticmethod
    def gradients(do, dlse, saved, constants, wanted):
        """The gradients of the first six inputs, None where one is not wanted."""
        q, k, v, bias, alibi_slopes, sinks, seed, o, lse_of_keys = saved
        steps, options, group = constants
        sees = lse_of_keys != -math.inf
        do = torch.zeros_like(o) if do is None else do.to(o.dtype).masked_fill(~sees[..., None], 0)
        delta = (do * o).sum(-1) - (0 if dlse is None else dlse.masked_fill(~sees, 0))
        over_sinks = torch.full_like(delta, math.inf) if sinks is None else lse_of_keys - sinks[:, None]
        kept = (q, bias if wanted[3] else None, alibi_slopes if wanted[4] else None)
        totals = [None if x is None else torch.zeros_like(x, dtype=o.dtype) for x in kept]
        mine, under_way = as_rows(k, v), None
        home = torch.zeros_like(mine, dtype=o.dtype)
        for step, rows in _travel(steps, mine, group):
            gradient = torch.zeros_like(rows, dtype=o.dtype)
            for block in step.blocks:
                leaves = [q, *block.keys(rows, k, v), *kept[1:]]
                leaves = [None if x is None else x.detach().requires_grad_() for x in leaves]
                with torch.enable_grad():
                    terms = {
                        "bias": block.part.bias(bias if leaves[3] is None else leaves[3]),
                        "alibi_slopes": alibi_slopes if leaves[4] is None else leaves[4],
                    }
                    of_block = attention_here(*leaves[:3], block.part.mask, seed, block.part.places, **terms, **options)
                o_b, lse_b = (x.detach().to(o.dtype) for x in of_block)
                share = torch.sigmoid(over_sinks) * torch.exp(lse_b - lse_of_keys.masked_fill(~sees, 0))
                arriving = (share[..., None] * do).to(q.dtype), share * ((do * o_b).sum(-1) - delta)
                found = iter(torch.autograd.grad(of_block, [x for x in leaves if x is not None], arriving))
                dq, dk, dv, *of_terms = (None if x is None else next(found) for x in leaves)
                gradient[block.source] = as_rows(dk, dv).to(o.dtype)[block.target]
                for total, x in zip(totals, (dq, *of_terms), strict=True):
                    if total is not None:
                        total += x
            if under_way is not None:  # of the keys of this step, from the ranks that had them before, and of its own
                before, homecoming = under_way.wait().split([len(rows), len(home)])
                gradient, home = before + gradient, home + homecoming
            if step.gradients is None:
                home = home + gradient
            else:
                under_way = Transfer.start(gradient, step.gradients, group)
        if under_way is not None:
            home = home + under_way.wait()  # nothing goes on from the last step
        dk, dv = as_keys(home, k.shape[2], k, v)
        dsinks = (
            None if sinks is None else -(torch.sigmoid(-over_sinks) * sees * delta).sum((0, 2), dtype=torch.float64)
        )
        pairs = zip((q, k, v, bias, alibi_slopes, sinks), (totals[0], dk, dv, *totals[1:], dsinks), wanted, strict=True)
        return tuple(g.to(x.dtype) if w else None for x, g, w in pairs)


class _First(Function):
    """Gradients that are functions of the inputs, and whose own gradients are refused.

    With `once_differentiable` they would be constants wherever torch.autograd.grad looks for derivatives by the inputs.
    """

    @staticmethod
    def forward(ctx, gradients, *inputs):
        return gradients

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(
            "a ring has first derivatives only: make the plan with algorithm='gather' or 'heads' for second ones"
        )


def _travel(steps: list[_Step], rows: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[_Step, Tensor]]:
    """Each step with the keys and values that this rank has then, while those of the next are under way."""
    for step in steps:
        coming = None if step.onward is None else Transfer.start(rows, step.onward, group)
        yield step, rows
        if coming is not None:
            rows = coming.wait()
