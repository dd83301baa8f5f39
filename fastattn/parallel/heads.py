"""Attention by heads: a rank gets all tokens, or a part of them for another algorithm, and computes some heads."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ..spec import Mask, as_output
from . import gather, ring
from .exchange import Route, exchange
from .masks import Visibility, at, on
from .parts import Call, Learned, Options, attention_here
from .plans import Plan


class _Heads(NamedTuple):
    """Which heads and tokens this rank computes with.

    of_q, of_k: routes of rows (sample, head, token) of q and of k. n_q, n_k: the tokens that arrive.
    heads: the first of its query heads, and the next rank's. of_each: for each of them the place of its key head among
    those that arrive, or None where they are shared evenly.
    places: as `Spec` has them.
    mask: of these heads. across: in place of that, the algorithm among other ranks and its schedule.
    unread: bool [B or 1, 1, n], True for a query of this rank that is padding.
    """

    of_q: Route
    of_k: Route
    n_q: int
    n_k: int
    heads: tuple[int, int]
    heads_k: int
    of_each: Tensor | None
    places: Tensor | None
    mask: Mask
    across: tuple[ModuleType, object] | None
    unread: Tensor


def schedule(plan: Plan, visibility: Visibility, call: Call) -> _Heads:
    """What `attend` does under a mask."""
    B, H, H_kv, _, device, first = call
    (part_q, places_q), (part_k, places_k) = plan._part("queries"), plan._part("keys")
    ranks, me = len(places_q), plan.rank if plan.across is None else plan.rank // plan.across.ranks
    if ranks > H:
        raise ValueError(f"plan must have another algorithm than 'heads' on {ranks} ranks, got {H} heads of q")
    shared = H // H_kv
    heads = [range(r * H // ranks, (r + 1) * H // ranks) for r in range(ranks)]
    heads_k = [range(h.start // shared, -(-h.stop // shared)) for h in heads]
    real = visibility.readable_q
    if real is None:
        real = torch.ones(1, plan.n_q, dtype=torch.bool, device="cpu")
    need = visibility.needed(torch.zeros(plan.n_q, dtype=torch.int64, device="cpu"), 1)[0]
    mine = heads[me]
    even = len(heads_k[me]) == 1 or (mine.start % shared == 0 and mine.stop % shared == 0)
    of_each = None if even else torch.tensor([h // shared - heads_k[me].start for h in mine], device=device)
    mask = visibility.mask
    if mask.dense is not None:
        mask = replace(mask, dense=at(mask.dense, -3, torch.tensor(list(mine), device="cpu")))
    across, call = None, call._replace(first=None if first is None else (first[0], first[1] + mine.start))
    if plan.across is None:
        there = need.expand(B, -1)
        mask = on(replace(mask, real_keys=None if there.all() else there), device)
    else:
        algorithm = {"gather": gather, "ring": ring}[plan.across.algorithm]
        of_heads = call._replace(H=len(mine), H_kv=len(heads_k[me]) if even else len(mine))
        across = algorithm, algorithm.schedule(plan.across, Visibility(mask, plan.n_q, plan.n_k), of_heads)
    return _Heads(
        of_q=_to_heads(real[:, part_q].expand(B, -1), H, heads, places_q, me, device),
        of_k=_to_heads(need[:, part_k].expand(B, -1), H_kv, heads_k, places_k, me, device),
        n_q=len(part_q),
        n_k=len(part_k),
        heads=(mine.start, mine.stop),
        heads_k=len(heads_k[me]),
        of_each=of_each,
        places=call.places(torch.arange(plan.n_q, device="cpu"), torch.arange(plan.n_k, device="cpu")),
        mask=mask,
        across=across,
        unread=~real[:, plan._rows("queries")].to(device),
    )


def _to_heads(real: Tensor, H: int, heads: list[range], places: list[Tensor], me: int, device: torch.device) -> Route:
    """The route of rows (sample, head, token), all heads of some tokens, to ranks with all tokens of some heads.

    Args:
        real: bool [B, n], the tokens that are sent. heads: those of each rank. places: the tokens of each rank.
    """
    mine, n, here = len(heads[me]), real.shape[1], torch.arange(len(places[me]), device="cpu")

    def index(tokens: Tensor, of_heads: Tensor, H: int, places: Tensor, n: int) -> Tensor:
        sample, token = real[:, tokens].nonzero().unbind(1)
        return ((sample[:, None] * H + of_heads) * n + places[token][:, None]).flatten()

    sent = [index(places[me], torch.arange(h.start, h.stop, device="cpu"), H, here, len(here)) for h in heads]
    placed = [index(tokens, torch.arange(mine, device="cpu"), mine, tokens, n) for tokens in places]
    return Route.of(sent, placed, len(real) * H * len(here), len(real) * mine * n, device)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: _Heads,
    learned: Learned,
    options: Options,
    plan: Plan,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(o, lse) of the queries of this rank."""
    B, (first, stop), bias, D, group = len(q), schedule.heads, learned.bias, k.shape[3], plan.group
    some_q = exchange(q.flatten(0, 2), schedule.of_q, group).view(B, stop - first, schedule.n_q, q.shape[3])
    both = exchange(torch.cat([k, v], -1).flatten(0, 2), schedule.of_k, group)
    both = both.view(B, schedule.heads_k, schedule.n_k, both.shape[1])
    if schedule.of_each is not None:
        both = both[:, schedule.of_each]
    terms = Learned(
        None if bias is None else at(bias, -3, torch.arange(first, stop, device=q.device)),
        *(None if x is None else x[..., first:stop] for x in learned[1:]),
    )
    some = some_q, both[..., :D], both[..., D:]
    if schedule.across is None:
        o, lse = attention_here(*some, schedule.mask, seed, schedule.places, **terms._asdict(), **options)
    else:
        algorithm, of_algorithm = schedule.across
        o, lse = algorithm.attend(*some, of_algorithm, terms, options, plan.across, seed)
    back = schedule.of_q.back()
    o = exchange(o.flatten(0, 2), back, group).view(*q.shape[:3], v.shape[3])
    lse = exchange(lse.flatten()[:, None], back, group).view(q.shape[:3])
    return as_output(o, q), lse.masked_fill(schedule.unread[:, None], -math.inf)
