"""Other attention kernels for GPUs: FlexAttention, and the packages flash-attn and xformers where installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import fastattn
from fastattn import Mask
from fastattn.backends import BACKENDS, backend_by_name, objections
from fastattn.bench.cases import Problem
from fastattn.bench.rivals import Contender, contenders, leaves_of, without_nan
from fastattn.spec import Spec
from fastattn.testing import Inputs

from .targets import IN_ANY_ORDER

_WITH_TABLES = ("SDPA math", "naive")
_LARGEST_TABLE_BYTES = 10 * 2**30  # a backward pass holds several, and both of them theirs at the same time
_RIVALS_OF_CUDA = ("SDPA flash", "SDPA efficient")  # which its targets are about, so that it takes no longer
_TOLD_TO_FLEX = {"causal", "real_keys", "real_queries"}


def serving(device: str, only: str | None = None) -> list[str]:
    """The names of the fused backends that serve on a device without being named, or else of the only one."""
    if only:
        return [only]
    x = torch.empty(1, 1, 1, 64, dtype=torch.float16, device=device)
    return [b.NAME for b in BACKENDS[:-1] if not objections(b, x, x, x, Spec(Mask(), 1.0), named=False)]


def gpu_contenders(problem: Problem, only: str | None = None) -> list[Contender]:
    """Those of the standard suite that are fused and for this device, and at the attention level those of this file.

    Args:
        only: the one backend of fastattn, asked for by its name; None for those that serve there without being named.
    """
    chosen = serving(problem.inputs.q.device.type, only)
    left_out = {f"fastattn {b.NAME}" for b in BACKENDS if b.NAME not in chosen}
    standard = [_if_it_fits(c, problem.inputs) for c in contenders(problem) if c.name not in left_out]
    if problem.job.level != "attention":
        return standard
    if only:
        standard = [_by_name(c, only, problem.inputs) if c.name == f"fastattn {only}" else c for c in standard]
    if only == "hopper" and problem.job.timed != "forward":
        standard += [_in_any_order(c, only, problem.inputs) for c in standard if c.name == f"fastattn {only}"]
    if only in ("cuda", "cpu"):
        return [c for c in standard if c.family == "fastattn" or c.name in _RIVALS_OF_CUDA]
    inputs = without_nan(problem.inputs)
    return standard + [_flex(inputs)] + [add(inputs) for package, add in _PACKAGES.items() if _installed(package)]


def _by_name(contender: Contender, backend: str, inputs: Inputs) -> Contender:
    """The contender with the objections of a backend that was asked for by name: the standard suite does not ask so."""
    refusals = objections(backend_by_name(backend), inputs.q, inputs.k, inputs.v, inputs.spec())
    return replace(contender, refusal="; ".join(refusals) or None)


def _in_any_order(contender: Contender, backend: str, inputs: Inputs) -> Contender:
    """The contender with gradients that are summed in any order."""
    leaves = leaves_of(**inputs.learned())
    options = {"mask": inputs.mask, "backend": backend, "deterministic": False}
    return replace(
        contender,
        name=f"{contender.name}{IN_ANY_ORDER}",
        compute=lambda: fastattn.attention(**leaves, **options),
        tensors=leaves,
    )


def _if_it_fits(contender: Contender, inputs: Inputs) -> Contender:
    """The contender, or its refusal where it would fill the GPU with tables."""
    (B, H, n_q, _), n_k = inputs.q.shape, inputs.k.shape[2]
    table_bytes = B * H * n_q * n_k * inputs.q.element_size()
    if contender.name not in _WITH_TABLES or table_bytes <= _LARGEST_TABLE_BYTES:
        return contender
    return replace(contender, refusal=f"makes tables of [n_q, n_k], which take {table_bytes / 2**30:.0f} GiB each")


def _flex(inputs: Inputs) -> Contender:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    leaves, (B, H, n_q, _), n_k = leaves_of(**inputs.learned()), inputs.q.shape, inputs.k.shape[2]
    mask, refusal = inputs.mask, None
    if "dropout_p" in inputs.options:
        refusal = "has no dropout"
    elif unknown := mask.features() - _TOLD_TO_FLEX:
        refusal = f"its mask_mod here knows nothing of {', '.join(sorted(unknown))}"
    attention: Callable[..., Tensor] = flex_attention
    if inputs.q.is_cuda:
        torch.compiler.reset()  # else dynamo stops compiling at the eighth shape, and runs the plain formula
        torch._functorch.config.donated_buffer = False  # else its backward, which is timed, can be called once
        attention = torch.compile(flex_attention, dynamic=False)
    options: dict[str, object] = {"enable_gqa": leaves["k"].shape[1] != H}
    if mask.features() and not refusal:
        of_sample = B if mask.readable_keys() is not None or mask.readable_queries() is not None else None
        options["block_mask"] = create_block_mask(_mask_mod(mask), of_sample, None, n_q, n_k, inputs.q.device)
    if "bias" in leaves:
        bias = leaves["bias"]
        options["score_mod"] = lambda score, b, h, i, j: score + bias[h, i, j]

    def compute() -> Tensor:
        return attention(leaves["q"], leaves["k"], leaves["v"], **options)

    return Contender("FlexAttention", "torch", compute, leaves, inputs.do, refusal=refusal)


def _mask_mod(mask: Mask) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """`Mask.keep` for one pair."""
    causal, real_keys, real_queries = mask.causal, mask.real_keys, mask.real_queries

    def keep(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = i >= j if causal else j >= 0
        if real_keys is not None:
            seen = seen & real_keys[b, j]
        if real_queries is not None:
            seen = seen & real_queries[b, i]
        return seen

    return keep


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _packaged(name: str, inputs: Inputs, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Contender:
    """A function of q, k and v laid out as [B, N, H, D], without a mask or causal."""
    leaves = leaves_of(q=inputs.q, k=inputs.k, v=inputs.v)
    unknown = inputs.mask.features() - {"causal"} | set(inputs.options) - {"scale"}
    others = ", ".join(sorted(unknown - {"generator"}))
    refusal = f"timed for causal and full attention, not {others}" if unknown else None

    def compute() -> Tensor:
        return attention(*(leaves[name].transpose(1, 2) for name in "qkv")).transpose(1, 2)

    return Contender(name, "package", compute, leaves, inputs.do, refusal=refusal)


def _flash_attn(inputs: Inputs) -> Contender:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from flash_attn import flash_attn_func

        return flash_attn_func(q, k, v, causal=inputs.mask.causal)

    return _packaged("flash-attn", inputs, attention)


def _flash_attn_4(inputs: Inputs) -> Contender:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from flash_attn.cute import flash_attn_func

        o = flash_attn_func(q, k, v, causal=inputs.mask.causal)
        return o[0] if isinstance(o, tuple) else o

    return _packaged("flash-attn-4", inputs, attention)


def _xformers(inputs: Inputs) -> Contender:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from xformers.ops import LowerTriangularMask, memory_efficient_attention

        if q.shape[2] != k.shape[2]:
            k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        return memory_efficient_attention(q, k, v, attn_bias=LowerTriangularMask() if inputs.mask.causal else None)

    return _packaged("xformers", inputs, attention)


_PACKAGES = {"flash_attn": _flash_attn, "flash_attn.cute": _flash_attn_4, "xformers": _xformers}
