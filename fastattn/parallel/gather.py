"""Attention by gathered keys: a rank gets those that its queries see, and computes in one call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .exchange import Route, exchange
from .masks import Visibility, in_fours, with_gaps_filled
from .parts import Call, Learned, Options, Part, as_keys, as_rows, attention_here
from .plans import Plan


class Gathering(NamedTuple):
    """How the keys get here, and what of all there is the call sees."""

    route: Route
    part: Part


def schedule(plan: Plan, visibility: Visibility, call: Call) -> Gathering:
    """What `attend` does under a mask."""
    owner, me = plan._layout.owner_k, plan.rank
    place = torch.empty(plan.n_k, dtype=torch.int64, device="cpu")  # of each key among those of its rank
    for of_rank in plan._rows_of_all("keys"):
        place[of_rank] = torch.arange(len(of_rank), device="cpu")
    need = visibility.needed(plan._layout.owner_q, plan.ranks).expand(-1, call.B, -1)
    rows, mine = plan._rows("queries"), plan._rows("keys")
    keys = need[me].any(0).nonzero()[:, 0]
    given = -1
    while len(keys) > max(given, 0):  # either may undo the other
        given = len(keys)
        if call.positional:
            keys = with_gaps_filled(keys, visibility.mask, plan.n_k)
        if call.first is not None:
            keys = in_fours(keys, plan.n_k)
    slot = torch.zeros(plan.n_k, dtype=torch.int64, device="cpu")
    slot[keys] = torch.arange(len(keys), device="cpu")
    sent, placed = [], []
    for rank in range(plan.ranks):
        sample, key = (need[rank] & (owner == me)).nonzero().unbind(1)
        sent.append(sample * len(mine) + place[key])
        sample, key = (need[me] & (owner == rank)).nonzero().unbind(1)
        placed.append(sample * len(keys) + slot[key])
    route = Route.of(sent, placed, call.B * len(mine), call.B * len(keys), call.device)
    return Gathering(route, Part.of(visibility, rows, keys, need[me], call))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Gathering,
    learned: Learned,
    options: Options,
    plan: Plan,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(o, lse) of the queries of this rank."""
    part = schedule.part
    k, v = as_keys(exchange(as_rows(k, v), schedule.route, plan.group), len(part.keys), k, v)
    terms = learned._replace(bias=part.bias(learned.bias))._asdict()
    return attention_here(q, k, v, part.mask, seed, part.places, **terms, **options)
