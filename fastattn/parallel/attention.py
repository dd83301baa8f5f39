"""Attention over the ranks of a plan, which all of them check before the first tensor is sent."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import backends
from ..blocks import Within
from ..plan import after_autocast, derivatives_wanted, drawn
from ..spec import Mask, Spec, is_dense
from ..validation import EVERYTHING, validated
from . import gather, heads, ring
from .context import combined
from .exchange import REFUSALS, agree, digest
from .masks import is_positional
from .parts import Call, Learned, Options, refuse_by_distance
from .plans import Plan

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..api import Terms

_ALGORITHMS = {"gather": gather, "ring": ring, "heads": heads}


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, plan: Plan | Within, **terms: Unpack[Terms]
) -> tuple[Tensor, Tensor]:
    """`fastattn.attention` with `plan`: (o, lse) of the queries of this rank."""
    within = plan if isinstance(plan, Within) else None
    plan = plan if within is None else within.plan
    if not isinstance(plan, Plan):
        raise ValueError(f"plan must be made by fastattn.parallel.plan, got {type(plan).__name__}")
    groups, error, number, schedule, seed, first = plan._groups(), None, 0, None, None, None
    learned = Learned(terms["bias"], terms["alibi_slopes"], terms["sinks"])
    algorithm = _ALGORITHMS[plan.algorithm if plan.across is None else "heads"]
    try:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise NotImplementedError("plan must be None in a transform of torch.func, got one")
        if within is not None:
            mask = combined(within, mask)
        refuse_by_distance(terms["bias"])
        q, k, v = after_autocast(q, k, v)
        mask = plan.mask if mask is None else mask
        spec = _validated(q, k, v, mask, plan, terms)
        options = Options(
            scale=spec.scale, softcap=spec.softcap, dropout_p=spec.dropout_p, deterministic=spec.deterministic,
            backend=terms["backend"],
        )  # fmt: skip
        if spec.dropout_p > 0:
            seed, _, first = drawn(q.device, terms["generator"])
        call = Call(*q.shape[:2], k.shape[1], is_positional(mask, spec.alibi_slopes), q.device, first)
        number, schedule = plan._schedule(mask, call, lambda visibility: algorithm.schedule(plan, visibility, call))
        alike = [(x.shape[:2], x.shape[3], x.dtype, x.requires_grad) for x in (q, k, v)]
        of_terms = [None if x is None else (x.shape, x.dtype, x.requires_grad) for x in learned]
        number = digest(number, *alike, *of_terms, *options.values(), first, torch.is_grad_enabled())
    except REFUSALS as refusal:
        error = refusal
    agreed = agree(number, error, seed, q.device if isinstance(q, Tensor) else torch.device("cpu"), groups)
    return algorithm.attend(q, k, v, schedule, learned, options, plan, None if seed is None else agreed)


def _validated(q: Tensor, k: Tensor, v: Tensor, mask: Mask, plan: Plan, terms: Terms) -> Spec:
    """The spec of a call of all tokens with the tensors of this rank; ValueError where there can be none."""
    lengths = {"q": len(plan._rows("queries")), "k": len(plan._rows("keys")), "v": len(plan._rows("keys"))}
    whole = []
    for (name, mine), x, n in zip(lengths.items(), (q, k, v), (plan.n_q, plan.n_k, plan.n_k), strict=True):
        if isinstance(x, Tensor) and is_dense(x) and x.dim() == 4:
            if x.shape[2] != mine:
                raise ValueError(f"{name} must have the {mine} tokens of rank {plan.rank}, got {list(x.shape)}")
            x = x.new_empty((*x.shape[:2], 1, x.shape[3])).expand(-1, -1, n, -1)
        whole.append(x)
    spec = validated(*whole, mask, **{name: x for name, x in terms.items() if name != "backend"})
    if terms["backend"] is not None:
        # Whatever the parts of the mask are: a rank that computes none would wait for those that refuse theirs. A ring
        # adds the sinks itself.
        training = derivatives_wanted(q, k, v, *spec.tensors())
        backends.select(*whole, replace(spec, mask=EVERYTHING, sinks=None), terms["backend"], training=training)
    return spec
