"""Tensor parallel: the heads of an attention, and the inner width of a feed-forward network, shared out to ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from ..nn import MultiHeadAttention, TransformerDecoderLayer, TransformerEncoderLayer, swiglu
from .dtensors import Local, Whole, placed


class HeadwiseParallel(ParallelStyle):
    """Style of `torch.distributed.tensor.parallel.parallelize_module` that shares out the heads of an attention.

    It is for a `MultiHeadAttention`, or a torch.nn.MultiheadAttention that `fastattn.swap` has changed. Its
    `in_proj_weight`, in which the rows of a head are in three places, becomes `q_proj_weight`, `k_proj_weight` and
    `v_proj_weight`, the names that torch.nn has for them where they differ in width. They are DTensors sharded by
    heads, as the weight of a Linear under ColwiseParallel, and that of `out_proj` is one as under RowwiseParallel. Load
    a state_dict before.

    Inputs and output are those of all ranks, and so are masks. Each call costs one all-reduce in the forward, and one
    in the backward. The weights that dropout removes are those of one process with the generator of the first rank.

    Raises:
        ValueError: from `parallelize_module`, the module is no such attention, appends keys, or its heads are no
            multiple of the ranks. From a call: it asks for weights, or has a cache.

    Example:
        >>> import torch, fastattn, torch.distributed as dist
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun needs no store
        >>> mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        >>> layer = fastattn.MultiHeadAttention(8, 2, batch_first=True)
        >>> layer = parallelize_module(layer, mesh, fastattn.parallel.HeadwiseParallel())
        >>> x = torch.ones(1, 3, 8)
        >>> layer(x, x, x, need_weights=False)[0].shape
        torch.Size([1, 3, 8])
        >>> dist.destroy_process_group()
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks = device_mesh.size()
        if not isinstance(module, MultiHeadAttention):
            raise ValueError(f"module must be a MultiHeadAttention of fastattn, got {type(module).__name__}")
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError("module must have neither add_bias_kv nor add_zero_attn, got one of them")
        heads = module.num_heads, module.num_kv_heads
        if any(n % ranks for n in heads):
            raise ValueError(f"num_heads and num_kv_heads must be multiples of the {ranks} ranks, got {heads}")
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        if (packed := module.in_proj_weight) is not None:
            rows = [n * module.head_dim for n in (module.num_heads, module.num_kv_heads, module.num_kv_heads)]
            for name, weight in zip(names, packed.detach().split(rows), strict=True):
                module.register_parameter(name, nn.Parameter(weight, packed.requires_grad))
            module.register_parameter("in_proj_weight", None)
            module._qkv_same_embed_dim = False
        for name in names:
            _distribute(module, name, device_mesh, Shard(0))
        _distribute(module.out_proj, "weight", device_mesh, Shard(1))
        for part, name in ((module, "in_proj_bias"), (module.out_proj, "bias")):
            _distribute(part, name, device_mesh, Replicate())

        def as_dtensors(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            if kwargs.get("need_weights", len(args) < 5 or args[4]) or kwargs.get("cache") is not None:
                raise ValueError("need_weights must be False, and cache None, where heads are on several ranks")
            done: dict[int, DTensor] = {}  # query, key and value are often one tensor, which the call asks about

            def of_all(x: object) -> Any:
                if not isinstance(x, Tensor) or isinstance(x, DTensor):
                    return x
                if id(x) not in done:
                    done[id(x)] = Whole.apply(x, device_mesh, (Replicate(),), x.shape)
                return done[id(x)]

            kwargs = {name: of_all(x) if name in ("query", "key", "value") else x for name, x in kwargs.items()}
            if (rotation := kwargs.get("rotation")) is not None:
                kwargs["rotation"] = type(rotation)(*map(of_all, rotation))
            return (*map(of_all, args[:3]), *args[3:]), kwargs

        def of_rank(_: nn.Module, args: tuple, output: tuple) -> tuple:
            return Local.apply(placed(output[0], (Replicate(),)), (Replicate(),)), output[1]

        module.register_forward_pre_hook(as_dtensors, with_kwargs=True, prepend=True)
        module.register_forward_hook(of_rank)
        return module


def tensor_parallel_plan(module: nn.Module) -> dict[str, ParallelStyle]:
    """Plan for `torch.distributed.tensor.parallel.parallelize_module` of all layers of fastattn in a module.

    The heads of every attention are shared out, and the inner width of the feed-forward networks. With "swiglu", whose
    gates and values lie side by side in `linear1`, the inner activations are gathered once more.

    Args:
        module: any module, such as `Transformer`, `LanguageModel`, or one of torch.nn that `fastattn.swap` has changed.

    Returns:
        A style for each part, by name.

    Raises:
        ValueError: there is no such layer.

    Example:
        >>> import fastattn
        >>> layer = fastattn.nn.TransformerEncoderLayer(8, 2)
        >>> sorted(fastattn.parallel.tensor_parallel_plan(layer))
        ['linear1', 'linear2', 'self_attn']
    """
    styles: dict[str, ParallelStyle] = {}
    for name, part in module.named_modules() if isinstance(module, nn.Module) else ():
        inside = f"{name}." if name else ""
        if isinstance(part, MultiHeadAttention):
            styles[name] = HeadwiseParallel()
        elif isinstance(part, (TransformerEncoderLayer, TransformerDecoderLayer)):
            gated = part.activation is swiglu
            styles[f"{inside}linear1"] = ColwiseParallel(output_layouts=Replicate() if gated else Shard(-1))
            styles[f"{inside}linear2"] = RowwiseParallel(input_layouts=Replicate() if gated else Shard(-1))
    if not styles:
        raise ValueError(
            f"module must have an attention or a Transformer layer of fastattn, got {type(module).__name__}"
        )
    return styles


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Shard | Replicate) -> None:
    """Makes a parameter, where there is one, a DTensor of the ranks."""
    if (x := getattr(module, name)) is not None:
        x = nn.Parameter(distribute_tensor(x.detach(), mesh, [placement]), x.requires_grad)
        module.register_parameter(name, x)
