"""Functions that run on every rank of a group, with models whose heads and inner widths are on several ranks."""

from __future__ import annotations

import copy
import tempfile

import torch
import torch.distributed as dist
from jobs import error_of, mesh_of
from model_jobs import _hugging_face, _weighted
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

import fastattn
import fastattn.nn
from fastattn import Mask
from fastattn.parallel import HeadwiseParallel, context_parallel, tensor_parallel_plan
from fastattn.parallel import plan as make_plan

N = 12


def _model(kind: str) -> tuple[nn.Module, dict]:
    """A model, and the keyword arguments of a call."""
    mask = Mask(True) & Mask.from_lengths([N, 7], N, of="both")
    x, sizes = torch.randn(2, N, 16), {"dim_feedforward": 24, "dropout": 0.0, "batch_first": True}
    if kind == "attention":
        return _Attention(None), {"x": x, "attn_mask": mask}
    if kind == "grouped heads":
        return _Attention(2), {"x": x, "attn_mask": mask}
    if kind == "mask of each head":
        return _Attention(None), {"x": x, "attn_mask": torch.randn(8, N, N)}
    if kind == "dense of each head":
        dense = torch.rand(4, N, N) < 0.7
        return _Attention(None), {"x": x, "attn_mask": mask & Mask(dense=dense | torch.eye(N, dtype=torch.bool))}
    if kind in ("torch", "dropout"):
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, **sizes), 1)
        fastattn.swap(model)
        model.layers[0].self_attn.dropout = 0.5 if kind == "dropout" else 0.0
        if kind == "dropout":  # without padding, which one process packs: other weights are dropped then
            return model, {"src": x}
        return model, {"src": x, "src_key_padding_mask": ~mask.real_keys}
    if kind == "decoder":
        model = fastattn.Transformer(16, 4, 1, 1, **sizes, rotary=fastattn.nn.RotaryPositions(4))
        return model, {"src": torch.randn(2, 9, 16), "tgt": x, "tgt_mask": mask}
    config = fastattn.nn.TransformerConfig(
        30, 16, 4, 2, dim_feedforward=24, dropout=0.0, padding_idx=0, positions="rotary", activation="swiglu",
        num_kv_heads=2,
    )  # fmt: skip
    return fastattn.nn.LanguageModel(config), {"input_ids": torch.randint(1, 30, (2, N)) * mask.real_keys}


class _Attention(nn.Module):
    def __init__(self, num_kv_heads: int | None) -> None:
        super().__init__()
        self.attention = fastattn.MultiHeadAttention(16, 4, batch_first=True, num_kv_heads=num_kv_heads)

    def forward(self, x: Tensor, attn_mask: Mask | Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False, attn_mask=attn_mask)[0]


def _separate(model: nn.Module, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients under the names that they have where projections are not packed."""
    result = {}
    for name, x in gradients.items():
        if not name.endswith("in_proj_weight"):
            result[name] = x
            continue
        prefix = name.removesuffix("in_proj_weight")
        part = model.get_submodule(prefix.removesuffix("."))
        rows = [n * part.head_dim for n in (part.num_heads, part.num_kv_heads, part.num_kv_heads)]
        result |= {f"{prefix}{of}_proj_weight": rows for of, rows in zip("qkv", x.split(rows), strict=True)}
    return result


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x.clone()


def _pairs(model: nn.Module, alone: nn.Module, losses: list[Tensor], summed: list) -> dict[str, Tensor]:
    """By name, what the ranks have and what one process has; `summed` are the groups whose ranks have parts of sums."""
    expected = _separate(alone, {name: x.grad for name, x in alone.named_parameters()}) | {"loss": losses[1]}
    result = {name: _whole(x.grad) for name, x in model.named_parameters()} | {"loss": losses[0]}
    assert result.keys() == expected.keys()
    for group in summed:
        for x in result.values():
            dist.all_reduce(x, group=group)
    return {name: torch.stack([x, expected[name]]).detach() for name, x in result.items()}


def heads(group: dist.ProcessGroup, kind: str, context: bool) -> dict[str, Tensor]:
    """A model of fastattn; with `context` tokens are shared by two pairs of ranks too."""
    torch.manual_seed(0)
    alone, batch = _model(kind)
    mesh = mesh_of((2, 2)) if context else DeviceMesh.from_group(group, "cpu")
    model = copy.deepcopy(alone)
    of_heads = DeviceMesh.from_group(mesh.get_group(1), "cpu") if context else mesh
    styles = {"attention": HeadwiseParallel()} if kind == "grouped heads" else tensor_parallel_plan(model)
    parallelize_module(model, of_heads, styles)
    for name, x in model.named_parameters():
        if name.endswith("proj_weight") or name.endswith("out_proj.weight"):
            assert x.placements == (Shard(1 if "out" in name else 0),)
    torch.manual_seed(0)
    expected = _weighted(alone(**batch))
    torch.manual_seed(dist.get_rank())  # the first rank's counts
    if not context:
        loss = _weighted(model(**batch))
        summed = []
    else:
        mask = Mask(kind != "torch") & Mask.from_lengths([N, 7], N, of="both")
        mask = Mask() if kind == "dropout" else mask
        how = {"algorithm": "heads"} if kind == "dropout" else {"layout": "zigzag"}
        plan = make_plan(mask, N, mesh.get_group(0), **how)
        local = {name: plan.shard(x, 1) for name, x in batch.items() if isinstance(x, Tensor)}
        if "attn_mask" in batch:
            local["attn_mask"] = Mask(True, dense=batch["attn_mask"].dense)
        with context_parallel(plan):
            loss = _weighted(model(**local))
        summed = [mesh.get_group(0)]
    expected.backward()
    loss.backward()
    return _pairs(model, alone, [loss.detach().clone(), expected], summed)


def hugging_face(group: dist.ProcessGroup, kind: str, context: bool) -> dict[str, Tensor]:
    """A model of transformers with the plan of its config."""
    alone = _hugging_face(kind)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0, group=group)
    if dist.get_rank() == 0:
        alone.save_pretrained(folder[0])
    dist.barrier(group)
    if context:
        whole = mesh_of((2, 2), ("cp", "tp"))
        mesh = whole["tp"]
    else:
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    model = type(alone).from_pretrained(folder[0], tp_plan="auto", device_mesh=mesh, attn_implementation="fastattn")
    ids = torch.randint(1, 40, (2, N), generator=torch.Generator().manual_seed(0))
    mask = Mask(True) & Mask.from_lengths([N, 7], N, of="both")
    batch = {"input_ids": ids, "attention_mask": mask.real_keys, "position_ids": torch.arange(N).expand(2, -1)}
    expected = _weighted(alone(**batch).logits * mask.real_keys[..., None])
    if context:
        plan = make_plan(mask, N, whole["cp"])
        with context_parallel(plan):
            logits = model(**{name: plan.shard(x, 1) for name, x in batch.items()}).logits
        loss = _weighted(logits * plan.shard(mask.real_keys, 1)[..., None])
    else:
        loss = _weighted(model(**batch).logits * mask.real_keys[..., None])
    expected.backward()
    loss.backward()
    return _pairs(model, alone, [loss.detach().clone(), expected], [whole["cp"].get_group()] if context else [])


def refused(group: dist.ProcessGroup, what: str) -> str:
    """The error of a module that has no heads to share, or of a call."""
    mesh, x = DeviceMesh.from_group(group, "cpu"), torch.randn(2, N, 16)
    options = {"zero": {"add_zero_attn": True}, "heads": {"num_kv_heads": 1}}.get(what, {})
    module = nn.Linear(2, 2) if what == "linear" else fastattn.MultiHeadAttention(16, 4, batch_first=True, **options)
    if what == "nothing":
        return error_of(lambda: tensor_parallel_plan(nn.Linear(2, 2)))
    call = {"need_weights": what == "weights"}
    return error_of(lambda: parallelize_module(module, mesh, HeadwiseParallel())(x, x, x, **call))


def second_derivatives(group: dist.ProcessGroup) -> Tensor:
    """Second derivatives by the inputs of an attention whose heads are shared, and those of one process."""
    torch.manual_seed(0)
    alone, x = _Attention(2).double(), torch.randn(2, N, 16, dtype=torch.float64)
    model = copy.deepcopy(alone)
    parallelize_module(model, DeviceMesh.from_group(group, "cpu"), {"attention": HeadwiseParallel()})
    results = []
    for each in (model, alone):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(each(leaf, Mask(True)).square().sum(), leaf, create_graph=True)
        results += torch.autograd.grad(first.square().sum() + leaf.sum(), leaf)
    return torch.stack(results)


def compiled(group: dist.ProcessGroup, kind: str, context: bool) -> Tensor:
    """The output of a layer whose heads are shared, in one graph, and on one process; `context` as in `heads`."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    alone, batch = _model(kind)
    mesh, x = mesh_of((2, 2)) if context else DeviceMesh.from_group(group, "cpu"), batch["src"]
    of_heads = DeviceMesh.from_group(mesh.get_group(1), "cpu") if context else mesh
    model = parallelize_module(copy.deepcopy(alone), of_heads, tensor_parallel_plan(alone))
    of_graph = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.manual_seed(0)
    expected = alone(x)
    torch.manual_seed(dist.get_rank())
    if not context:
        return torch.stack([of_graph(x), expected]).detach()
    plan = make_plan(None, N, mesh.get_group(0))
    with context_parallel(plan):
        return torch.stack([plan.unshard(of_graph(plan.shard(x, 1)), 1), expected]).detach()
