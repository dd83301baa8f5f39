"""Functions that run on every rank of a group; those import what takes long that need it."""

from __future__ import annotations

import copy
import functools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fastattn
import fastattn.nn
from fastattn.parallel import context_parallel
from fastattn.parallel import plan as make_plan
from fastattn.testing import Case, Inputs, make_inputs

LEARNED = ("bias", "alibi_slopes", "sinks")


@functools.cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh of this shape, which all four processes make once: its groups take a while."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


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


def inputs_of(case: Case, dtype: torch.dtype) -> Inputs:
    """The inputs of a case.

    In "dense-by-head" every second head sees what the others do not, and in "slopes-by-sample" samples have their own.
    """
    inputs = make_inputs(case, dtype)
    if case.name == "slopes-by-sample":
        slopes = inputs.options["alibi_slopes"].expand(case.B, -1)
        return replace(inputs, options=inputs.options | {"alibi_slopes": slopes})
    if case.name != "dense-by-head":
        return inputs
    dense = torch.cat([inputs.mask.dense ^ bool(head % 2) for head in range(case.H)], 1)
    return replace(inputs, mask=replace(inputs.mask, dense=dense))


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
    inputs = poisoned(inputs_of(case, dtype))
    n_q, n_k = inputs.q.shape[2], inputs.k.shape[2]
    together = how.pop("together", True) and n_q == n_k
    n = n_q if together else (n_q, n_k)
    mesh = mesh_of(how.pop("mesh")) if "mesh" in how else group
    plan = make_plan(inputs.mask, n, mesh, **how)
    leaves = {
        "q": plan.shard(inputs.q, 2),
        "k": plan.shard(inputs.k, 2, of="keys"),
        "v": plan.shard(inputs.v, 2, of="keys"),
    }
    leaves |= {name: inputs.options[name] for name in LEARNED if name in inputs.options}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    options = {name: plan.replicated(leaves[name]) if name in LEARNED else x for name, x in inputs.options.items()}
    if "generator" in options and dist.get_rank(group) > 0:  # the first rank's counts
        options["generator"] = torch.Generator().manual_seed(dist.get_rank(group))
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


def shard_and_unshard(group: dist.ProcessGroup, n: int, product: bool = False) -> dict[str, Tensor]:
    """A tensor as its shard and the whole again, and the gradients, which each rank weighs by a number of its own."""
    rank = dist.get_rank(group)
    how = {"mesh": group}
    if product:
        how = {"mesh": mesh_of((2, 2)), "algorithm": ("heads", "ring")}
    plan = make_plan(fastattn.Mask(True), n, **how, layout="longest first")
    x = torch.arange(2.0 * n * 3).view(2, n, 3).requires_grad_()
    mine = plan.shard(x, 1)
    assert torch.equal(mine, x[:, plan.positions()])
    leaf = mine.detach().requires_grad_()
    whole = plan.unshard(leaf, 1)
    weight = torch.arange(1.0, n + 1)[:, None] * (rank + 1)
    (of_leaf,) = torch.autograd.grad((whole * weight).sum(), leaf, create_graph=True)
    (of_x,) = torch.autograd.grad(mine.sum(), x)
    return {"whole": whole.detach(), "rows": plan.positions(), "of_leaf": of_leaf.detach(), "of_x": of_x}


def unshard_each_dtype(group: dist.ProcessGroup) -> list[str]:
    """The dtypes that do not come whole again, some of which gloo cannot send."""
    dtypes = [torch.bool, torch.int16, torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.bfloat16, torch.complex64]
    plan, x = make_plan(fastattn.Mask(True), 8, group, layout="zigzag"), torch.arange(16).view(2, 8)
    wholes = [(x.to(dtype), plan.unshard(plan.shard(x, 1).to(dtype), 1)) for dtype in dtypes]
    return [str(y.dtype) for expected, y in wholes if y.dtype != expected.dtype or (y != expected).any()]


def small_beside_large(group: dist.ProcessGroup) -> list[Tensor]:
    """Sums over the ranks of bf16 numbers that one after the other would add nothing to the first."""
    number = 256.0 if dist.get_rank(group) == 0 else 1.0
    plan = make_plan(None, 8, group)
    mine = torch.ones(1, len(plan.positions()), dtype=torch.bfloat16).requires_grad_()
    alike = torch.ones(3, dtype=torch.bfloat16).requires_grad_()
    loss = (plan.unshard(mine, 1) * number).sum() + (plan.replicated(alike) * number).sum()
    return list(torch.autograd.grad(loss, [mine, alike]))


def of_second_order() -> tuple[dict[str, Tensor], dict[str, object]]:
    """Leaves of a call in fp64, and its other arguments."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 4, 12, 4), "k": (2, 2, 12, 4), "v": (2, 2, 12, 4)}
    shapes |= {"bias": (4, 12, 12), "alibi_slopes": (4,), "sinks": (4,)}
    leaves = {name: torch.randn(s, generator=generator, dtype=torch.float64) for name, s in shapes.items()}
    options = {"mask": fastattn.Mask(True), "dropout_p": 0.2, "backend": "reference"}
    return leaves, options | {"generator": torch.Generator().manual_seed(0), "return_lse": True}


def second_order(loss: Tensor, leaves: list[Tensor], weights: tuple[float, ...] = 6 * (1.0,)) -> tuple[Tensor, ...]:
    """Gradients of the squares of gradients, and of the leaves themselves, which stand in for a loss without them."""
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    squares = sum(weight * g.square().sum() for weight, g in zip(weights, first, strict=True))
    return torch.autograd.grad(squares + sum(x.sum() for x in leaves[:3]), leaves)


def second_derivatives(group: dist.ProcessGroup, algorithm: str | tuple[str, str], linear: bool) -> dict[str, Tensor]:
    """Second derivatives as far as this rank has them, or why there are none; `linear`: what arrives has no graph.

    The losses of all ranks are one in sum, so each has its share of the gradients of terms, which are on every rank.
    """
    leaves, options = of_second_order()
    plan = make_plan(options["mask"], 12, group if isinstance(algorithm, str) else mesh_of((2, 2)), algorithm=algorithm)
    mine = {name: (plan.shard(x, 2) if name in "qkv" else x).requires_grad_() for name, x in leaves.items()}
    terms = {name: plan.replicated(x) for name, x in mine.items() if name not in "qkv"}
    outputs = fastattn.attention(*(mine[name] for name in "qkv"), **terms, **options, plan=plan)
    loss = sum(x.sum() if linear else x.square().sum() for x in outputs)
    try:
        second = second_order(loss, list(mine.values()), (1, 1, 1, *3 * (1 / plan.ranks,)))
    except NotImplementedError as error:
        return {"refused": str(error)}
    return {"rows": plan.positions()} | dict(zip(mine, second, strict=True))


def second_derivatives_of_dtensors(group: dist.ProcessGroup, shard: int | None, dim: int) -> list[Tensor]:
    """Whole second derivatives of DTensors; the mean along `dim` may place gradients in another way than tensors."""
    leaves, options = of_second_order()
    mesh = DeviceMesh.from_group(group, "cpu")
    placements = 3 * [Replicate() if shard is None else Shard(shard)] + [Replicate(), Shard(0), Replicate()]
    leaves = {
        name: distribute_tensor(x, mesh, [p]).detach().requires_grad_()
        for (name, x), p in zip(leaves.items(), placements, strict=True)
    }
    loss = sum(x.mean(dim).square().sum() for x in fastattn.attention(**leaves, **options))
    return [x.full_tensor() for x in second_order(loss, list(leaves.values()))]


def error_of(call: Callable[[], object]) -> str:
    """What a call is refused with, or "none"."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "none"


def attend_differently(group: dist.ProcessGroup, what: str, algorithm: str | tuple[str, str]) -> str:
    """The error of a call in which the last rank differs in something."""
    other = dist.get_rank(group) == dist.get_world_size(group) - 1
    n = 24
    masks = {
        "backend": fastattn.Mask(dense=torch.eye(n, dtype=torch.bool) & (torch.arange(n) < 2)),  # of no use to some
        "values of a mask": fastattn.Mask(real_keys=torch.arange(n)[None] < n - other),
        "a field of a mask": fastattn.Mask(True, real_keys=torch.ones(1, n, dtype=torch.bool) if other else None),
    }
    mask, mesh = masks.get(what, fastattn.Mask(True)), group if isinstance(algorithm, str) else mesh_of((2, 2))
    layout = "zigzag" if what == "layout" and other else "contiguous"
    plan = make_plan(mask, n, mesh, algorithm=algorithm, layout=layout)
    q, options = torch.ones(1, 6, n, 8), {"backend": "hopper"} if what == "backend" else {}
    if what == "first of a seed":
        options = {"dropout_p": 0.5, "generator": fastattn.DropoutSeed(3, first=(int(other), 0))}
    if other:
        q = {"heads": q[:, :3], "dtype": q.half()}.get(what, q)
        bias = fastattn.RelativeBias(torch.zeros(8), None)
        of_last = {"options": {"softcap": 1.0}, "an error": {"dropout_p": 1.5}, "a bias by distance": {"bias": bias}}
        options |= of_last.get(what, {})
    q = q.requires_grad_(what == "gradients" and not other)
    mine = plan.shard(q, 2)
    if what == "length" and other:
        mine = mine[:, :, 1:]
    message = error_of(lambda: fastattn.attention(mine, mine, mine, mask, plan=plan, **options))
    assert dist.get_world_size(group) == len(agreed(group))  # the group goes on
    return message


def malformed(group: dist.ProcessGroup, what: str) -> str:
    """The error of a call of a plan that is malformed on every rank."""
    plan = make_plan(None, 4 * dist.get_world_size(group), group)
    x = torch.ones(1, 2, 4, 8)
    calls = {
        "shard": lambda: plan.shard([1], 0),
        "of": lambda: plan.positions(of=torch.ones(2).numpy()),
        "dim": lambda: plan.shard(x, 4),
        "unshard": lambda: plan.unshard(5, 0),
        "dim of a part": lambda: plan.unshard(x, "2"),
        "replicated": lambda: plan.replicated(None),
        "sparse": lambda: fastattn.attention(x.to_sparse(), x, x, plan=plan),
        "transform": lambda: torch.func.grad(lambda q: fastattn.attention(q, x, x, plan=plan).sum())(x),
    }
    return error_of(calls[what])


def unshard_differently(group: dist.ProcessGroup, what: str) -> str:
    """The error of `unshard` of a tensor in which the last rank differs in something."""
    plan, other = make_plan(None, 24, group), dist.get_rank(group) == dist.get_world_size(group) - 1
    y = torch.ones(2, len(plan.positions()), 6)
    if other:
        y = {
            "sizes": y.view(3, -1, 4),
            "dtype": y.to(torch.int32),
            "length": y[:, 1:],
            "gradients": y.requires_grad_(),
        }[what]
    message = error_of(lambda: plan.unshard(y, 1))
    assert dist.get_world_size(group) == len(agreed(group))  # the group goes on
    return message


def agreed(group: dist.ProcessGroup) -> list[int]:
    """The ranks, as all of them know."""
    ranks: list[int] = [0] * dist.get_world_size(group)
    dist.all_gather_object(ranks, dist.get_rank(group), group=group)
    return ranks


def without_the_last(group: dist.ProcessGroup, how: str) -> str:
    """The error of a call that the last rank does not make: it is gone, or does something else."""
    if dist.get_rank(group) == dist.get_world_size(group) - 1:
        if how == "dies":
            os._exit(1)
        return ""
    plan = make_plan(fastattn.Mask(True), 24, group)
    x = torch.ones(1, 1, len(plan.positions()), 8)
    try:
        fastattn.attention(x, x, x, plan=plan)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def masks_of_layers(group: dist.ProcessGroup) -> list[float]:
    """Errors of calls with several masks on one plan, each called twice."""
    n, generator = 48, torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 8, generator=generator) for _ in "qkv")
    real = torch.arange(n) < torch.tensor([[n], [n // 2]])
    plan, errors = make_plan(fastattn.Mask(True), n, group, layout="longest first"), []
    dense = torch.rand(n, n, generator=generator) < 0.5
    local = [plan.shard(x, 2) for x in (q, k, v)]
    for mask in 2 * [
        None,
        fastattn.Mask(),
        fastattn.Mask(True, window=(5, 0)),
        fastattn.Mask(real_keys=real),
        fastattn.Mask(dense=dense),
    ]:
        exact = fastattn.attention(q, k, v, fastattn.Mask(True) if mask is None else mask)
        actual = fastattn.attention(*local, mask, plan=plan)
        errors.append((plan.unshard(actual, 2) - exact).abs().max().item())
    kept = len(plan._schedules)
    dense.logical_not_()  # a mask that was changed in place is another one
    actual = plan.unshard(fastattn.attention(*local, fastattn.Mask(dense=dense), plan=plan), 2)
    errors.append((actual - fastattn.attention(q, k, v, fastattn.Mask(dense=dense))).abs().max().item())
    assert (kept, len(plan._schedules)) == (5, 6)
    return errors


def _drawn() -> Tensor:
    return torch.randn(2, 4, 24, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


MASKS_OF_MODES = (
    fastattn.Mask(True, window=(7, None)) & fastattn.Mask.from_lengths([24, 15], 24, of="both"),
    fastattn.Mask(dense=torch.ones(24, 24, dtype=torch.bool).tril(3)),
)


def error_under_another_default_device(group: dist.ProcessGroup, algorithm: str) -> float:
    """The largest error of a gradient where new tensors are by default on another device than those of the call."""
    x, errors = _drawn(), []
    for mask in MASKS_OF_MODES:
        exact = _gradient(x, mask, None)
        with torch.device("meta"):
            plan = make_plan(mask, 24, group, algorithm=algorithm)
            actual = _gradient(plan.shard(x, 2), mask, plan)
        errors.append((actual - plan.shard(exact, 2)).abs().max().item())
    return max(errors)


def error_after_inference_mode(group: dist.ProcessGroup, algorithm: str) -> float:
    """The largest error of a gradient by a plan that has served in inference mode, as for a validation before."""
    x, errors = _drawn(), []
    for mask in MASKS_OF_MODES:
        with torch.inference_mode():
            plan = make_plan(mask, 24, group, algorithm=algorithm)
            mine = plan.shard(x, 2)
            fastattn.attention(mine, mine, mine, plan=plan)
        whole = x.clone().requires_grad_()
        (through_shard,) = torch.autograd.grad(plan.shard(whole, 2).sum(), whole)
        assert torch.equal(through_shard, torch.zeros_like(x).index_fill(2, plan.positions(), 1))
        actual = _gradient(plan.shard(x, 2), mask, plan)
        errors.append((actual - plan.shard(_gradient(x, mask, None), 2)).abs().max().item())
    return max(errors)


def error_of_a_mask_of_inference_mode(group: dist.ProcessGroup, algorithm: str) -> float:
    """The largest error with a mask whose tensor counts no changes, before and after one."""
    x, errors = _drawn(), []
    with torch.inference_mode():
        mask = fastattn.Mask(dense=torch.ones(24, 24, dtype=torch.bool).tril_())
        plan = make_plan(mask, 24, group, algorithm=algorithm)
        mine = plan.shard(x, 2)
        for _ in range(2):
            actual = plan.unshard(fastattn.attention(mine, mine, mine, mask, plan=plan), 2)
            errors.append((actual - fastattn.attention(x, x, x, mask)).abs().max().item())
            mask.dense.t_()
    return max(errors)


def _gradient(x: Tensor, mask: fastattn.Mask, plan: fastattn.parallel.Plan | None) -> Tensor:
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(fastattn.attention(x, x, x, mask, plan=plan).square().sum(), x)[0]


def attend_dtensors(
    group: dist.ProcessGroup, case: Case, mesh: tuple[int, ...], shards: tuple[int | None, ...], terms: bool
) -> dict[str, Tensor]:
    """The whole results of `fastattn.testing.run` for DTensors, of which each dimension of the mesh shards one.

    terms: bias, slopes and sinks are DTensors too, and replicated.
    """
    # One of two dimensions all processes have to make.
    device_mesh = DeviceMesh.from_group(group, "cpu") if len(mesh) == 1 else mesh_of(mesh)
    placements = [Replicate() if dim is None else Shard(dim) for dim in shards]
    inputs = inputs_of(case, torch.float32)

    def distributed(x: Tensor, placements: list) -> DTensor:
        return distribute_tensor(x, device_mesh, placements)

    leaves = {
        name: distributed(x, placements).detach().requires_grad_()
        for name, x in inputs.learned().items()
        if name in "qkv"
    }
    replicated = [Replicate()] * len(mesh)
    for name in LEARNED:
        if name in inputs.options:
            x = inputs.options[name]
            leaves[name] = (distributed(x, replicated) if terms else x).detach().requires_grad_()
    options = inputs.options | {name: x for name, x in leaves.items() if name in LEARNED}
    if case.dropout_p and dist.get_rank(group) > 0:  # the first rank's counts
        options["generator"] = torch.Generator().manual_seed(dist.get_rank(group))
    o, lse = fastattn.attention(*(leaves[name] for name in "qkv"), inputs.mask, **options, return_lse=True)
    if case.dropout_p:  # of which every rank has drawn one number
        other = torch.Generator().manual_seed(dist.get_rank(group))
        torch.randint(2**62, (), generator=other)
        assert torch.equal(options["generator"].get_state(), other.get_state())
    assert o.placements == lse.placements == tuple(placements)
    with torch.no_grad():  # the parts of the leaves are as they were
        assert all(leaves[name].to_local().grad_fn is None for name in "qkv")
    arriving = distributed(inputs.do, placements), distributed(inputs.dlse, placements)
    gradients = torch.autograd.grad((o, lse), list(leaves.values()), arriving)
    placed = [(x, g) for x, g in zip(leaves.values(), gradients, strict=True) if isinstance(x, DTensor)]
    assert all(x.placements == g.placements for x, g in placed)
    results = {"o": o, "lse": lse} | {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}
    if (
        not terms
    ):  # plain tensors have the gradients of what each rank computed: those of ranks that are alike count once
        alike = math.prod(n for n, dim in zip(mesh, shards, strict=True) if dim is None)
        for name in LEARNED:
            if name in leaves:
                dist.all_reduce(results[f"d{name}"], group=group)
                results[f"d{name}"] /= alike
    return {name: (x.full_tensor() if isinstance(x, DTensor) else x).detach() for name, x in results.items()}


def refused_dtensors(group: dist.ProcessGroup, what: str) -> str:
    """The error of a call with DTensors."""
    mesh, x, options = DeviceMesh.from_group(group, "cpu"), torch.ones(2, 6, 8, 4), {}
    q, k, v = (distribute_tensor(x, mesh, [Shard(1)]) for _ in "qkv")
    if what == "no DTensor":
        k = x
    if what == "placed otherwise":
        v = distribute_tensor(x, mesh, [Shard(0)])
    if what == "head dim":
        q, k, v = (distribute_tensor(x, mesh, [Shard(3)]) for _ in "qkv")
    if what == "heads":
        k = v = distribute_tensor(x[:, :1], mesh, [Shard(1)])
    if what == "dropout":
        options["dropout_p"] = 1.5
    if what == "generator":
        options |= {"dropout_p": 0.1, "generator": 5}
    if what in ("partial", "strided"):
        placement = Partial() if what == "partial" else _StridedShard(1, split_factor=2)
        q = k = v = DTensor.from_local(x, mesh, [placement], run_check=False)
    if what == "another mesh":
        q = k = v = distribute_tensor(x, mesh, [Shard(0)])
        options["sinks"] = distribute_tensor(torch.ones(6), mesh_of((2, 2)), [Replicate(), Replicate()])
    if what == "mask":
        options["mask"] = fastattn.Mask(real_keys=torch.ones(1, 8, dtype=torch.bool))
    if what in ("sinks", "alibi_slopes", "bias"):  # of more heads or samples than there are, beside a plan
        shape = {"sinks": (12,), "alibi_slopes": (3, 6), "bias": (7, 16, 16)}[what]
        options |= {what: torch.zeros(shape), "plan": make_plan(None, 16, group)}
    return error_of(lambda: fastattn.attention(q, k, v, **options))


def one_refuses_dtensors(group: dist.ProcessGroup, what: str, dropout_p: float) -> str:
    """The error of a call of DTensors, whose tokens are sharded, that the last rank alone refuses."""
    mesh, options = DeviceMesh.from_group(group, "cpu"), {"dropout_p": dropout_p}
    q, k = (distribute_tensor(torch.ones(2, 6, 8, 4), mesh, [Shard(2)]) for _ in "qk")
    if dist.get_rank(group) == dist.get_world_size(group) - 1:
        if what == "no DTensor":
            k = k.to_local()
        if what == "a term":
            options["sinks"] = torch.zeros(5)
        if what == "mask":
            options["mask"] = fastattn.Mask(real_keys=torch.ones(1, 8, dtype=torch.bool))
        if what == "bias":
            options["bias"] = fastattn.RelativeBias(torch.zeros(8), None)
    message = error_of(lambda: fastattn.attention(q, k, k, **options))
    assert dist.get_world_size(group) == len(agreed(group))  # the group goes on
    return message


def order_of_dtensors(group: dist.ProcessGroup) -> bool:
    """Whether an output lies in memory as q, so that merging its heads again needs no copy."""
    q = distribute_tensor(torch.randn(2, 8, 6, 4), DeviceMesh.from_group(group, "cpu"), [Shard(2)]).transpose(1, 2)
    o = fastattn.attention(q, q, q)
    merged = o.transpose(1, 2).flatten(2)
    return o.stride() == q.stride() and merged.to_local().data_ptr() == o.to_local().data_ptr()


class _Layer(nn.Module):
    """Attention with projections, sinks and a plan, as a layer of a model has them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 48), nn.Linear(16, 16)
        self.sinks = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor, mask: fastattn.Mask, plan: fastattn.parallel.Plan | None) -> Tensor:
        q, k, v = self.inner(x).unflatten(2, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        o = fastattn.attention(q, k, v, mask, sinks=self.sinks, plan=plan)
        return x + self.outer(o.transpose(1, 2).flatten(2))


def train(group: dist.ProcessGroup, how: str) -> dict[str, Tensor]:
    """The parameters of two layers after three steps on shared tokens, and those of one process on all of them."""
    torch.manual_seed(0)
    alone, batch = nn.ModuleList([_Layer(), _Layer()]), torch.randn(2, 30, 16)
    model, size = copy.deepcopy(alone), dist.get_world_size(group)
    mask = fastattn.Mask(True) & fastattn.Mask.from_lengths([30, 19], 30, of="both")
    plan = make_plan(mask, 30, group, layout="longest first")
    if how == "fully_shard":
        mesh = DeviceMesh.from_group(group, "cpu")
        layers = [fully_shard(layer, mesh=mesh) for layer in model]
    elif how == "DistributedDataParallel":
        layers = [DistributedDataParallel(layer, process_group=group) for layer in model]
    else:  # activation checkpointing, and the gradients summed by hand
        layers = [functools.partial(checkpoint, layer, use_reentrant=False) for layer in model]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    for _ in range(3):
        for x, run, of_run, n in ((batch, alone, None, 1), (plan.shard(batch, 1), layers, plan, size)):
            for layer in run:
                x = layer(x, mask, of_run)
            (x.square().sum() / batch.numel() * n).backward()  # of which the wrappers take the mean over the ranks
        if how == "checkpoint":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= size
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def whole(x: Tensor) -> Tensor:
        return (x.full_tensor() if isinstance(x, DTensor) else x).detach()

    expected = dict(alone.named_parameters())
    return {name: torch.stack([whole(x), whole(expected[name])]) for name, x in model.named_parameters()}


def compiled(group: dist.ProcessGroup, algorithm: str) -> list[bool]:
    """Whether one whole graph, compiled once, gives what the function gives, for the plans of two batches."""
    torch._dynamo.reset()
    bias, sinks, same = torch.randn(24, 24, requires_grad=True), torch.randn(4, requires_grad=True), []

    def function(x: Tensor, mask: fastattn.Mask, plan: fastattn.parallel.Plan) -> Tensor:
        q = x * 2
        o, lse = fastattn.attention(q, q, x, mask, bias=bias, sinks=sinks, softcap=2.0, plan=plan, return_lse=True)
        return (o * 3).square().sum() + lse.exp().sum()

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for length, recompiles in ((24, True), (13, False)):
        mask = fastattn.Mask(True) & fastattn.Mask.from_lengths([24, length], 24)
        plan = make_plan(mask, 24, group, algorithm=algorithm, layout="contiguous")
        leaves = [torch.randn(2, 4, len(plan.positions()), 8, requires_grad=True), bias, sinks]
        with torch._dynamo.config.patch(error_on_recompile=not recompiles):
            results = [torch.autograd.grad(f(leaves[0], mask, plan), leaves) for f in (function, compiled)]
        same.append(all(torch.equal(*pair) for pair in zip(*results, strict=True)))
    loss = compiled(leaves[0], mask, plan)
    del plan
    assert error_of(loss.backward).startswith("plan must live until the backward of a compiled graph")
    return same


def second_derivatives_of_a_graph(group: dist.ProcessGroup) -> str:
    """The error of a second derivative of a compiled function."""
    torch._dynamo.reset()
    plan = make_plan(fastattn.Mask(True), 24, group)
    x = torch.randn(2, 4, len(plan.positions()), 8, requires_grad=True)
    compiled = torch.compile(lambda x: fastattn.attention(x, x, x, plan=plan), backend="aot_eager", fullgraph=True)
    (first,) = torch.autograd.grad(compiled(x).square().sum(), x, create_graph=True)
    return error_of(lambda: torch.autograd.grad(first.square().sum(), x))


def compiled_block(group: dist.ProcessGroup) -> bool:
    """Whether one whole graph of a model in a block gives what the model gives."""
    torch._dynamo.reset()
    config = fastattn.nn.TransformerConfig(30, 16, 4, 1, dim_feedforward=24, dropout=0.0, padding_idx=0)
    model, ids = fastattn.nn.LanguageModel(config), torch.arange(48).view(2, 24) % 29 + 1
    ids[1, 15:] = 0
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    plan = make_plan(fastattn.Mask(True, real_keys=ids != 0, real_queries=ids != 0), 24, group)
    with context_parallel(plan):
        results = [
            torch.autograd.grad(each(plan.shard(ids, 1)).sin().sum(), list(model.parameters()))
            for each in (model, compiled)
        ]
    return all(torch.equal(*pair) for pair in zip(*results, strict=True))


def compiled_dtensors(group: dist.ProcessGroup, shard: int, dropout_p: float) -> bool:
    """Whether a compiled function of DTensors gives what it gives as it is; of samples and heads, in one graph."""
    torch._dynamo.reset()
    x = distribute_tensor(torch.randn(2, 4, 16, 8), DeviceMesh.from_group(group, "cpu"), [Shard(shard)])
    x = x.detach().requires_grad_()
    mask = fastattn.Mask(True) & fastattn.Mask.from_lengths([16, 9], 16)

    def function(x: Tensor) -> Tensor:
        return fastattn.attention(x * 2, x, x, mask, dropout_p=dropout_p)

    compiled, results = torch.compile(function, backend="aot_eager", fullgraph=shard != 2), []
    for f in (function, compiled):
        torch.manual_seed(dist.get_rank(group))
        results.append(torch.autograd.grad(f(x).square().sum(), x)[0])
    return torch.equal(*(g.full_tensor() for g in results))
