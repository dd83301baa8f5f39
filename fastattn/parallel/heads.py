"""Attention by heads: a rank gets all tokens, and computes some of the heads."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..spec import Mask, as_output
from .exchange import Route, exchange
from .masks import Visibility, at, on
from .parts import Call, Learned, Options, attention_here
from .plans import Plan


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


def schedule(plan: Plan, visibility: Visibility, call: Call) -> _Heads:
    """What `attend` does under a mask."""
    B, H, H_kv, _, device = call
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


def attend(
    q: Tensor, k: Tensor, v: Tensor, schedule: _Heads, learned: Learned, options: Options, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """(o, lse) of the queries of this rank."""
    B, (first, stop), bias, D = len(q), schedule.heads, learned.bias, k.shape[3]
    some_q = exchange(q.flatten(0, 2), schedule.of_q, group).view(B, stop - first, schedule.n_q, q.shape[3])
    both = exchange(torch.cat([k, v], -1).flatten(0, 2), schedule.of_k, group)
    both = both.view(B, schedule.heads_k, schedule.n_k, both.shape[1])
    if schedule.of_each is not None:
        both = both[:, schedule.of_each]
    terms = Learned(
        None if bias is None else at(bias, -3, torch.arange(first, stop, device=q.device)),
        *(None if x is None else x[..., first:stop] for x in learned[1:]),
    )
    o, lse = attention_here(some_q, both[..., :D], both[..., D:], schedule.mask, **terms._asdict(), **options)
    back = schedule.of_q.back()
    o = exchange(o.flatten(0, 2), back, group).view(*q.shape[:3], v.shape[3])
    lse = exchange(lse.flatten()[:, None], back, group).view(q.shape[:3])
    return as_output(o, q), lse.masked_fill(schedule.unread[:, None], -math.inf)
