"""Attention over the ranks of a plan by each of its algorithms, all of it in calls of `fastattn.attention`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .. import api
from ..plan import after_autocast
from ..spec import Mask, Spec, accumulation_dtype, as_output
from ..validation import validated
from .exchange import Route, Transfer, agree, digest, exchange
from .masks import Visibility, at, is_positional, on, part_of, runs_of, with_gaps_filled
from .plans import Plan


class _Options(TypedDict):
    """Arguments of `fastattn.attention` that every call of an algorithm has alike."""

    scale: float
    softcap: float | None
    deterministic: bool
    backend: str | None


class _Learned(NamedTuple):
    """What has a gradient besides q, k and v: that of all tokens, on every rank."""

    bias: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    plan: Plan,
    *,
    scale: float | None,
    bias: Tensor | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    dropout_p: float,
    generator: torch.Generator | None,
    deterministic: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """`fastattn.attention` with `plan`: (o, lse) of the queries of this rank."""
    if not isinstance(plan, Plan):
        raise ValueError(f"plan must be made by fastattn.parallel.plan, got {type(plan).__name__}")
    group, error, number, schedule = plan._known_group(), None, 0, None
    learned = _Learned(bias, alibi_slopes, sinks)
    try:
        q, k, v = after_autocast(q, k, v)
        mask = plan.mask if mask is None else mask
        spec = _validated(q, k, v, mask, plan, scale, softcap, learned, dropout_p, generator, deterministic)
        options = _Options(scale=spec.scale, softcap=spec.softcap, deterministic=spec.deterministic, backend=backend)
        algorithm, positional = _ALGORITHMS[plan.algorithm], is_positional(mask, alibi_slopes)
        (B, H), H_kv = q.shape[:2], k.shape[1]
        heads = (H, H_kv) if plan.algorithm == "heads" else ()
        more = (B, *heads, positional, q.device)
        number, schedule = plan._schedule(
            mask, more, lambda visibility: algorithm.schedule(plan, visibility, B, *heads, positional, q.device)
        )
        alike = [(x.shape[:2], x.shape[3], x.dtype, x.requires_grad) for x in (q, k, v)]
        of_terms = [None if x is None else (x.shape, x.dtype, x.requires_grad) for x in learned]
        number = digest(number, *alike, *of_terms, *options.values(), torch.is_grad_enabled())
    except (ValueError, TypeError, NotImplementedError) as refusal:
        error = refusal
    agree(number, error, q.device if isinstance(q, Tensor) else torch.device("cpu"), group)
    return algorithm.attend(q, k, v, schedule, learned, options, group)


def _validated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    plan: Plan,
    scale: float | None,
    softcap: float | None,
    learned: _Learned,
    dropout_p: float,
    generator: torch.Generator | None,
    deterministic: bool,
) -> Spec:
    """The spec of a call of all tokens with the tensors of this rank; ValueError where there can be none."""
    lengths = {"q": len(plan._rows("queries")), "k": len(plan._rows("keys")), "v": len(plan._rows("keys"))}
    whole = []
    for (name, mine), x, n in zip(lengths.items(), (q, k, v), (plan.n_q, plan.n_k, plan.n_k), strict=True):
        if isinstance(x, Tensor) and not x.is_nested and x.dim() == 4:
            if x.shape[2] != mine:
                raise ValueError(f"{name} must have the {mine} tokens of rank {plan.rank}, got {list(x.shape)}")
            x = x.new_empty((*x.shape[:2], 1, x.shape[3])).expand(-1, -1, n, -1)
        whole.append(x)
    if dropout_p != 0:
        raise ValueError(f"dropout_p must be 0 where a plan is given, got {dropout_p!r}")
    return validated(*whole, mask, scale, learned.bias, softcap, *learned[1:], 0.0, generator, deterministic)


class _Algorithm(NamedTuple):
    """schedule: what a mask makes of a plan, on the CPU and then on the device. attend: (o, lse) by that."""

    schedule: Callable
    attend: Callable


def _places(plan: Plan) -> Tensor:
    """int64 [n_k], the place of each key among those of its rank."""
    place = torch.empty(plan.n_k, dtype=torch.int64)
    for keys in plan._rows_of_all("keys"):
        place[keys] = torch.arange(len(keys))
    return place


def _as_rows(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values [B, H_kv, n, D] and [B, H_kv, n, d_v] as rows [B * n, H_kv * (D + d_v)]."""
    return torch.cat([k, v], -1).transpose(1, 2).flatten(2).flatten(0, 1)


def _as_keys(rows: Tensor, B: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of such rows; of k and v the shape counts."""
    both = rows.view(B, len(rows) // max(B, 1), k.shape[1], k.shape[3] + v.shape[3]).transpose(1, 2)
    return both[..., : k.shape[3]], both[..., k.shape[3] :]


class _Part(NamedTuple):
    """Some keys, as a call sees them: the first step of a ring, or all that a rank gathers.

    mask: of the local queries and these keys. rows, keys: their indices among all tokens.
    """

    mask: Mask
    rows: Tensor
    keys: Tensor

    @classmethod
    def of(
        cls, visibility: Visibility, rows: Tensor, keys: Tensor, need: Tensor, positional: bool, device: torch.device
    ) -> _Part:
        """The part of the keys `keys`, of which those are there that `need` [B, n_k] has."""
        mask = part_of(visibility.mask, visibility.n_q, visibility.n_k, rows, keys, need[:, keys], positional)
        return cls(on(mask, device), rows.to(device), keys.to(device))

    def bias(self, bias: Tensor | None) -> Tensor | None:
        """What of a bias for all pairs these have."""
        return None if bias is None else at(at(bias, -2, self.rows), -1, self.keys)


class _Gathering(NamedTuple):
    route: Route
    part: _Part


def _gathering(plan: Plan, visibility: Visibility, B: int, positional: bool, device: torch.device) -> _Gathering:
    owner, place, me = plan._layout.owner_k, _places(plan), plan.rank
    need = visibility.needed(plan._layout.owner_q, plan.ranks).expand(-1, B, -1)
    rows, mine = plan._rows("queries"), plan._rows("keys")
    keys = need[me].any(0).nonzero()[:, 0]
    if positional and len(keys):
        keys = with_gaps_filled(keys, visibility.mask, plan.n_k)
    slot = torch.zeros(plan.n_k, dtype=torch.int64).index_copy_(0, keys, torch.arange(len(keys)))
    sent, placed = [], []
    for rank in range(plan.ranks):
        sample, key = (need[rank] & (owner == me)).nonzero().unbind(1)
        sent.append(sample * len(mine) + place[key])
        sample, key = (need[me] & (owner == rank)).nonzero().unbind(1)
        placed.append(sample * len(keys) + slot[key])
    route = Route.of(sent, placed, B * len(mine), B * len(keys), device)
    return _Gathering(route, _Part.of(visibility, rows, keys, need[me], positional, device))


def _gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: _Gathering,
    learned: _Learned,
    options: _Options,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    k, v = _as_keys(exchange(_as_rows(k, v), schedule.route, group), len(q), k, v)
    part = schedule.part
    terms = learned._replace(bias=part.bias(learned.bias))._asdict()
    return api.attention(q, k, v, part.mask, **terms, **options, return_lse=True)


class _Block(NamedTuple):
    """A part of the keys that a step has: the rows `source` of these are the rows `target` of the part."""

    part: _Part
    source: Tensor
    target: Tensor

    def keys(self, rows: Tensor, B: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Its keys and values, of the rows that the step has."""
        block = rows.new_zeros(B * len(self.part.keys), rows.shape[1])
        return _as_keys(block.index_copy_(0, self.target, rows[self.source]), B, k, v)


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


def _ring(plan: Plan, visibility: Visibility, B: int, positional: bool, device: torch.device) -> list[_Step]:
    owner, me, ranks = plan._layout.owner_k, plan.rank, plan.ranks
    need = visibility.needed(plan._layout.owner_q, ranks).expand(-1, B, -1)
    rows, nobody, n_mine = plan._rows("queries"), torch.empty(0, dtype=torch.int64), B * len(plan._rows("keys"))

    def travelling(rank: int, step: int) -> Tensor:
        """The keys of a rank, as sample * n_k + key, ascending, that are somewhere needed in this step or later."""
        later = [(rank + further) % ranks for further in range(step, ranks)]
        kept = need[later].any(0) if step else torch.ones(B, plan.n_k, dtype=torch.bool)
        return (kept & (owner == rank)).flatten().nonzero()[:, 0]

    def to(**rows: Tensor) -> list[Tensor]:
        return [rows.get(f"rank{rank}", nobody) for rank in range(ranks)]

    steps, after, before = [], f"rank{(me + 1) % ranks}", f"rank{(me - 1) % ranks}"
    for step in range(ranks):
        of = (me - step) % ranks
        here, passed, coming = travelling(of, step), travelling(of, step + 1), travelling((of - 1) % ranks, step + 1)
        mine = need[me] & (owner == of)
        keys, blocks = mine.any(0).nonzero()[:, 0], []
        if len(keys) == 0:
            runs = []
        else:
            runs = [torch.arange(int(run[0]), int(run[-1]) + 1) for run in runs_of(keys)] if positional else [keys]
        for run in runs:
            sample, slot = mine[:, run].nonzero().unbind(1)
            source = torch.searchsorted(here, sample * plan.n_k + run[slot])
            part = _Part.of(visibility, rows, run, mine, positional, device)
            blocks.append(_Block(part, source.to(device), (sample * len(run) + slot).to(device)))
        onward = gradients = None
        if step + 1 < ranks:
            sent = torch.searchsorted(here, passed)
            onward = Route.of(
                to(**{after: sent}), to(**{before: torch.arange(len(coming))}), len(here), len(coming), device
            )
        if step:
            done = torch.isin(here, passed, invert=True).nonzero()[:, 0]
            of_mine, still = travelling(me, step), travelling(me, step + 1)
            home = of_mine[torch.isin(of_mine, still, invert=True)]
            home = len(coming) + torch.searchsorted(travelling(me, 0), home)
            # In the last step both are the same rank, and nothing goes on.
            sent = {after: torch.searchsorted(here, passed)} | {f"rank{of}": done}
            placed = {before: torch.arange(len(coming))} | {f"rank{(me + step) % ranks}": home}
            gradients = Route.of(to(**sent), to(**placed), len(here), len(coming) + n_mine, device)
        steps.append(_Step(blocks, onward, gradients))
    return steps


def _around(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: list[_Step],
    learned: _Learned,
    options: _Options,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    return _Ring.apply(q, k, v, *learned, schedule, options, group)


class _Ring(Function):
    """Attention by a ring: o and lse are merged from those of the blocks, and so are the gradients.

    A block is one call of `attention`, with an lse of its own: the one of all keys would not do, from which a backend
    may not compute the weights of few keys. So the backward begins with the forward of each block.
    """

    @staticmethod
    def forward(ctx, q, k, v, bias, alibi_slopes, sinks, steps, options, group):
        dtype = accumulation_dtype(q.dtype)
        o = q.new_zeros(*q.shape[:3], v.shape[3], dtype=dtype)
        lse_of_keys = q.new_full(q.shape[:3], -math.inf, dtype=dtype)
        for step, rows in _travel(steps, _as_rows(k, v), group):
            for block in step.blocks:
                terms = {"bias": block.part.bias(bias), "alibi_slopes": alibi_slopes}
                keys = block.keys(rows, len(q), k, v)
                o_b, lse_b = api.attention(q, *keys, block.part.mask, **terms, **options, return_lse=True)
                o, lse_of_keys = api.merge(o, lse_of_keys, o_b.to(dtype), lse_b)
        lse = lse_of_keys
        if sinks is not None:
            o, lse = api.merge(o, lse, torch.zeros_like(o), torch.full_like(lse, -math.inf), sinks=sinks)
        ctx.save_for_backward(q, k, v, bias, alibi_slopes, sinks, o, lse_of_keys)
        ctx.constants = steps, options, group
        ctx.set_materialize_grads(False)
        return as_output(o.to(q.dtype), q), lse

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dlse):
        q, k, v, bias, alibi_slopes, sinks, o, lse_of_keys = ctx.saved_tensors
        (steps, options, group), wanted = ctx.constants, ctx.needs_input_grad[:6]
        sees = lse_of_keys != -math.inf
        do = torch.zeros_like(o) if do is None else do.to(o.dtype).masked_fill(~sees[..., None], 0)
        delta = (do * o).sum(-1) - (0 if dlse is None else dlse.masked_fill(~sees, 0))
        over_sinks = torch.full_like(delta, math.inf) if sinks is None else lse_of_keys - sinks[:, None]
        kept = (q, bias if wanted[3] else None, alibi_slopes if wanted[4] else None)
        totals = [None if x is None else torch.zeros_like(x, dtype=o.dtype) for x in kept]
        mine, under_way = _as_rows(k, v), None
        home = torch.zeros_like(mine, dtype=o.dtype)
        for step, rows in _travel(steps, mine, group):
            gradient = torch.zeros_like(rows, dtype=o.dtype)
            for block in step.blocks:
                leaves = [q, *block.keys(rows, len(q), k, v), *kept[1:]]
                leaves = [None if x is None else x.detach().requires_grad_() for x in leaves]
                with torch.enable_grad():
                    terms = {
                        "bias": block.part.bias(bias if leaves[3] is None else leaves[3]),
                        "alibi_slopes": alibi_slopes if leaves[4] is None else leaves[4],
                    }
                    of_block = api.attention(*leaves[:3], block.part.mask, **terms, **options, return_lse=True)
                o_b, lse_b = (x.detach().to(o.dtype) for x in of_block)
                share = torch.sigmoid(over_sinks) * torch.exp(lse_b - lse_of_keys.masked_fill(~sees, 0))
                arriving = (share[..., None] * do).to(q.dtype), share * ((do * o_b).sum(-1) - delta)
                found = iter(torch.autograd.grad(of_block, [x for x in leaves if x is not None], arriving))
                dq, dk, dv, *of_terms = (None if x is None else next(found) for x in leaves)
                gradient[block.source] = _as_rows(dk, dv).to(o.dtype)[block.target]
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
        dk, dv = _as_keys(home, len(q), k, v)
        dsinks = (
            None if sinks is None else -(torch.sigmoid(-over_sinks) * sees * delta).sum((0, 2), dtype=torch.float64)
        )
        pairs = zip((q, k, v, bias, alibi_slopes, sinks), (totals[0], dk, dv, *totals[1:], dsinks), wanted, strict=True)
        return *(g.to(x.dtype) if w else None for x, g, w in pairs), None, None, None


def _travel(steps: list[_Step], rows: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[_Step, Tensor]]:
    """Each step with the keys and values that this rank has then, while those of the next are under way."""
    for step in steps:
        coming = None if step.onward is None else Transfer.start(rows, step.onward, group)
        yield step, rows
        if coming is not None:
            rows = coming.wait()


class _Heads(NamedTuple):
    """Which heads and tokens this rank computes with.

    of_q, of_k: routes of rows (sample, head, token) of q and of k. heads: the first of its query heads, and the next
    rank's. of_each: for each of them the place of its key head among those that arrive, or None where they are shared
    evenly.
    unread: bool [B or 1, 1, n], True for a query of this rank that is padding.
    """

    of_q: Route
    of_k: Route
    n_q: int
    n_k: int
    heads: tuple[int, int]
    heads_k: int
    of_each: Tensor | None
    mask: Mask
    unread: Tensor


def _by_heads(
    plan: Plan, visibility: Visibility, B: int, H: int, H_kv: int, positional: bool, device: torch.device
) -> _Heads:
    if plan.ranks > H:
        raise ValueError(f"plan must have another algorithm than 'heads' on {plan.ranks} ranks, got {H} heads of q")
    shared = H // H_kv
    heads = [range(r * H // plan.ranks, (r + 1) * H // plan.ranks) for r in range(plan.ranks)]
    heads_k = [range(h.start // shared, -(-h.stop // shared)) for h in heads]
    real = torch.ones(1, plan.n_q, dtype=torch.bool) if visibility.readable_q is None else visibility.readable_q
    need = visibility.needed(torch.zeros(plan.n_q, dtype=torch.int64), 1)[0]
    mine = heads[plan.rank]
    of_q = _to_heads(plan, "queries", real.expand(B, -1), H, heads, device)
    of_k = _to_heads(plan, "keys", need.expand(B, -1), H_kv, heads_k, device)
    of_each = torch.tensor([h // shared - heads_k[plan.rank].start for h in mine], device=device)
    even = len(heads_k[plan.rank]) == 1 or (mine.start % shared == 0 and mine.stop % shared == 0)
    mask = visibility.mask
    dense = None if mask.dense is None else at(mask.dense, -3, torch.tensor(list(mine)))
    there = need.expand(B, -1)
    mask = on(replace(mask, dense=dense, real_keys=None if there.all() else there), device)
    unread = ~real[:, plan._rows("queries")].to(device)
    return _Heads(
        of_q,
        of_k,
        plan.n_q,
        plan.n_k,
        (mine.start, mine.stop),
        len(heads_k[plan.rank]),
        None if even else of_each,
        mask,
        unread,
    )


def _to_heads(plan: Plan, of: str, real: Tensor, H: int, heads: list[range], device: torch.device) -> Route:
    """The route of rows (sample, head, token), all heads of some tokens, to ranks with all tokens of some heads."""
    rows, me, n = plan._rows_of_all(of), plan.rank, plan._length(of)
    mine = len(heads[me])

    def index(tokens: Tensor, of_heads: Tensor, H: int, places: Tensor, n: int) -> Tensor:
        sample, token = real[:, tokens].nonzero().unbind(1)
        return ((sample[:, None] * H + of_heads) * n + places[token][:, None]).flatten()

    here = torch.arange(len(rows[me]))
    sent = [index(rows[me], torch.arange(h.start, h.stop), H, here, len(here)) for h in heads]
    placed = [index(tokens, torch.arange(mine), mine, tokens, n) for tokens in rows]
    return Route.of(sent, placed, len(real) * H * len(here), len(real) * mine * n, device)


def _some_heads(
    q: Tensor, k: Tensor, v: Tensor, schedule: _Heads, learned: _Learned, options: _Options, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    B, (first, stop), bias, D = len(q), schedule.heads, learned.bias, k.shape[3]
    some_q = exchange(q.flatten(0, 2), schedule.of_q, group).view(B, stop - first, schedule.n_q, q.shape[3])
    both = exchange(torch.cat([k, v], -1).flatten(0, 2), schedule.of_k, group)
    both = both.view(B, schedule.heads_k, schedule.n_k, both.shape[1])
    if schedule.of_each is not None:
        both = both[:, schedule.of_each]
    terms = _Learned(
        None if bias is None else at(bias, -3, torch.arange(first, stop, device=q.device)),
        *(None if x is None else x[..., first:stop] for x in learned[1:]),
    )
    o, lse = api.attention(
        some_q, both[..., :D], both[..., D:], schedule.mask, **terms._asdict(), **options, return_lse=True
    )
    back = schedule.of_q.back()
    o = exchange(o.flatten(0, 2), back, group).view(*q.shape[:3], v.shape[3])
    lse = exchange(lse.flatten()[:, None], back, group).view(q.shape[:3])
    return as_output(o, q), lse.masked_fill(schedule.unread[:, None], -math.inf)


_ALGORITHMS = {
    "gather": _Algorithm(_gathering, _gathered),
    "ring": _Algorithm(_ring, _around),
    "heads": _Algorithm(_by_heads, _some_heads),
}
