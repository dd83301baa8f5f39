"""Attention over the ranks of a plan by each of its algorithms, all of it in calls of `fastattn.attention`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .. import api
from ..plan import after_autocast
from ..spec import Mask, accumulation_dtype
from ..validation import check_flags, validated
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
    """`fastattn.attention` with `plan`, without the choice of what is returned: (o, lse) of the queries of this rank."""
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


def _validated(q, k, v, mask, plan, scale, softcap, learned, dropout_p, generator, deterministic):
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
    both = rows.view(B, -1, k.shape[1], k.shape[3] + v.shape[3]).transpose(1, 2)
    return both[..., : k.shape[3]], both[..., k.shape[3] :]


class _Part(NamedTuple):
    """Some keys, as a call sees them: the first step of a ring, or all that a rank gathers.

    mask: of the local queries and these keys. rows, keys: their indices among all tokens.
    """

    mask: Mask
    rows: Tensor
    keys: Tensor

    @classmethod
    def of(cls, visibility, rows: Tensor, keys: Tensor, need: Tensor, positional: bool, device: torch.device) -> _Part:
        """The part of the keys `keys`, of which those are there that `need` [B, n_k] has."""
        mask = part_of(visibility.mask, visibility.n_q, visibility.n_k, rows, keys, need[:, keys], positional)
        return cls(on(mask, device), rows.to(device), keys.to(device))

    def bias(self, bias: Tensor | None) -> Tensor | None:
        """What of a bias for all pairs these have."""
        return None if bias is None else at(at(bias, -2, self.rows), -1, self.keys)


class _Gathering(NamedTuple):
    route: Route
    part: _Part


def _gathering(
    plan: Plan, visibility: Visibility, B: int, positional: bool, device: torch.device
) -> _Gathering:
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


def _gathered(q, k, v, schedule: _Gathering, learned: _Learned, options: _Options, group) -> tuple[Tensor, Tensor]:
    k, v = _as_keys(exchange(_as_rows(k, v), schedule.route, group), len(q), k, v)
    part = schedule.part
    terms = learned._replace(bias=part.bias(learned.bias))._asdict()
    return api.attention(q, k, v, part.mask, **terms, **options, return_lse=True)


_ALGORITHMS = {"gather": _Algorithm(_gathering, _gathered)}
