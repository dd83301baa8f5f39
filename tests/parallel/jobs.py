"""Functions that run on every rank of a group."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

import fastattn
from fastattn.parallel import plan as make_plan
from fastattn.testing import Case, Inputs, make_inputs

LEARNED = ("bias", "alibi_slopes", "sinks")


@contextmanager
def watched(sent: list[int], group: dist.ProcessGroup) -> Iterator[None]:
    """The bytes of each exchange with other ranks, appended to `sent`; NaN in one is an error."""
    original, me = dist.all_to_all_single, dist.get_rank(group)

    def exchange(arrived, rows, by=None, to=None, **options):
        if to is not None:
            assert not (rows.is_floating_point() and rows.isnan().any()), "what nobody sees was sent"
            sent.append(sum(n for rank, n in enumerate(to) if rank != me) * rows[:1].nbytes if len(rows) else 0)
        return original(arrived, rows, by, to, **options)

    dist.all_to_all_single = exchange
    try:
        yield
    finally:
        dist.all_to_all_single = original


def poisoned(inputs: Inputs) -> Inputs:
    """The same with NaN in the keys and values that no query sees."""
    n_q, n_k = inputs.q.shape[2], inputs.k.shape[2]
    unseen = ~inputs.mask.keep(n_q, n_k).any(1).any(1)[:, None, :, None]
    k, v = (x.masked_fill(unseen, math.nan) for x in (inputs.k, inputs.v))
    return replace(inputs, k=k, v=v)


def attend(
    group: dist.ProcessGroup, case: Case, dtype: torch.dtype, backend: str | None = None, **how: object
) -> dict[str, Tensor]:
    """The results of `fastattn.testing.run`, as far as this rank has them, and what was sent.

    how: arguments of `plan`.
    """
    inputs = poisoned(make_inputs(case, dtype))
    n_q, n_k = inputs.q.shape[2], inputs.k.shape[2]
    n = n_q if n_q == n_k and how.pop("together", True) else (n_q, n_k)
    plan = make_plan(inputs.mask, n, group, **how)
    leaves = {
        "q": plan.shard(inputs.q, 2),
        "k": plan.shard(inputs.k, 2, of="keys"),
        "v": plan.shard(inputs.v, 2, of="keys"),
    }
    leaves |= {name: inputs.options[name] for name in LEARNED if name in inputs.options}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    options = {name: plan.replicated(leaves[name]) if name in LEARNED else x for name, x in inputs.options.items()}
    sent: list[int] = []
    with watched(sent, group):
        o, lse = fastattn.attention(
            *(leaves[name] for name in "qkv"), inputs.mask, **options, return_lse=True, backend=backend, plan=plan
        )
        forward = sum(sent)
        arriving = plan.shard(inputs.do, 2), plan.shard(inputs.dlse, 2).to(lse.dtype)
        gradients = torch.autograd.grad((o, lse), list(leaves.values()), arriving)
    result = {"o": o.detach(), "lse": lse.detach()}
    result |= {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {
        "rows": plan.positions(), "keys": plan.positions(of="keys"), "result": result, "sent": forward,
        "received": plan.received, "layout": plan.layout,
    }  # fmt: skip
