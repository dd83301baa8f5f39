"""Attention over ranks as one op, for graphs of torch.compile: what a rank sends follows values that no graph has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import ops
from ..backends import made_by
from ..blocks import Within
from ..plan import after_autocast, drawn
from ..spec import DropoutSeed, Mask
from ..validation import EVERYTHING
from .attention import attention as over_ranks
from .parts import refuse_by_distance
from .plans import Plan, plan_of_key

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..api import Terms

_ARGUMENTS = (
    f"Tensor q, Tensor k, Tensor v, {ops._LEARNED}, Tensor plan, {ops._MASK}, SymInt[] first, bool masked, "
    "bool within, str? objection, float? scale, float? softcap, float dropout_p, bool deterministic, str? backend, "
    "str made_by"
)
torch.library.define("fastattn::over_ranks", f"({_ARGUMENTS}) -> (Tensor o, Tensor lse)")
torch.library.define(
    "fastattn::over_ranks_backward",
    f"(Tensor? do, Tensor? dlse, bool[] wanted, {_ARGUMENTS}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dalibi, Tensor dsinks)",
)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, plan: Plan | Within, **terms: Unpack[Terms]
) -> tuple[Tensor, Tensor]:
    """`attention.attention` while it is compiled; in graphs it has a first derivative only.

    Its backward computes the forward again, so it keeps no keys of other ranks. The plan has to live until then.
    """
    refuse_by_distance(terms["bias"])
    q, k, v = after_autocast(q, k, v)
    within = plan if isinstance(plan, Within) else Within(plan)
    seed, _, first = drawn(q.device, terms["generator"]) if terms["dropout_p"] else (None, None, ())
    arguments = (
        q, k, v, terms["bias"], terms["alibi_slopes"], terms["sinks"], within.plan._key,
        *ops._flat_mask(EVERYTHING if mask is None else mask, seed, None), first, mask is not None, plan is within,
        within.objection, terms["scale"], terms["softcap"], terms["dropout_p"], terms["deterministic"],
        terms["backend"], made_by(q.device),
    )  # fmt: skip
    return torch.ops.fastattn.over_ranks(*arguments)


def _save(ctx, inputs, output) -> None:
    tensors, ctx.constants = ops._split(inputs)
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _gradients(ctx, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    arguments, wanted = ops._join(ctx.saved_tensors, ctx.constants), list(ctx.needs_input_grad[:6])
    found = torch.ops.fastattn.over_ranks_backward(do, dlse, wanted, *arguments)
    found = [g if w else None for g, w in zip(found, wanted, strict=True)]
    return *found, *(None for _ in arguments[6:])


torch.library.register_autograd("fastattn::over_ranks", _gradients, setup_context=_save)


def _call(q, k, v, bias, alibi_slopes, sinks, key, *rest) -> tuple[Tensor, Tensor]:
    """The call that the arguments of the op describe."""
    mask, seed, _ = ops._mask_of(rest[:12])
    first, masked, within, objection, scale, softcap, dropout_p, deterministic, backend, _ = rest[12:]
    plan, drawn = plan_of_key(key), None if seed is None else DropoutSeed(seed, first=tuple(first))
    return over_ranks(
        q, k, v, mask if masked else None, Within(plan, objection) if within else plan, scale=scale, bias=bias,
        softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, dropout_p=dropout_p, generator=drawn,
        deterministic=deterministic, backend=backend,
    )  # fmt: skip


@torch.library.impl("fastattn::over_ranks", "CompositeExplicitAutograd")
def _forward(*arguments):
    o, lse = _call(*arguments)
    return o, lse.contiguous()


torch.library.register_fake("fastattn::over_ranks", ops._fake_forward)


@torch.library.impl("fastattn::over_ranks_backward", "CompositeExplicitAutograd")
def _backward(do, dlse, wanted, *arguments):
    leaves = [None if x is None else x.detach().requires_grad_(w) for x, w in zip(arguments[:6], wanted, strict=True)]
    with torch.enable_grad():
        outputs = _call(*leaves, *arguments[6:])
    arriving = [torch.zeros_like(x) if g is None else g for x, g in zip(outputs, (do, dlse), strict=True)]
    found = iter(torch.autograd.grad(outputs, [x for x, w in zip(leaves, wanted, strict=True) if w], arriving))
    return tuple(
        torch.empty_like(x).copy_(next(found)) if w else arguments[0].new_empty(0)
        for x, w in zip(leaves, wanted, strict=True)
    )


@torch.library.register_fake("fastattn::over_ranks_backward")
def _fake_backward(do, dlse, wanted, *arguments):
    q = arguments[0]
    return tuple(torch.empty_like(x) if w else q.new_empty(0) for x, w in zip(arguments[:6], wanted, strict=True))
