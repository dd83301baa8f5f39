"""The portable Triton backend: FlashAttention-2 for every NVIDIA GPU since Ampere, and for Triton's interpreter.

A `Spec` reaches the kernels as one argument, `rules.Rules`, of which everything that a call does not use is None and
compiled away: `preparation` and `visibility` say which pairs and tiles are seen, `scores` what their scores are,
`dropout` which weights stay. `launches` repeats the launches of calls of a kind that is known.

Only the functions that compute import Triton, so that importing fastattn needs torch alone.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType

import torch
from torch import Tensor

from ...spec import FEATURES, Spec

NAME = "triton"
WHERE = "NVIDIA GPUs of compute capability 8.0 and newer"

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LARGEST_HEAD_DIM = 256
FAR = 2**29
"""Further than any sequence is long: a position and a limit twice as far, added to a length, are still below 2^31."""


def features(device: torch.device) -> frozenset[str]:
    """Every feature, on every device."""
    return FEATURES


def unsupported(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> list[str]:
    """Sentences about the device, the dtype and the head dims."""
    objections = _device_objections(q.device)
    if q.dtype not in _DTYPES:
        objections.append(f"needs float32, float16 or bfloat16, got {str(q.dtype).removeprefix('torch.')}")
    for name, dim in (("q and k", q.shape[3]), ("v", v.shape[3])):
        if dim > _LARGEST_HEAD_DIM:
            objections.append(f"takes head dims up to {_LARGEST_HEAD_DIM}, got {dim} for {name}")
    if q.shape[3] == 0:  # for Hopper Triton 3.7 leaves out a fence between the copy of the values and their product
        objections.append("takes head dims of q and k from 1, got 0")
    q_offset = spec.mask.q_offset
    if spec.alibi_slopes is not None and not isinstance(q_offset, Tensor) and abs(q_offset) > FAR:
        objections.append(f"counts ALiBi distances from a q_offset of at most 2^29, got {q_offset}")
    return objections


def lacks(device: torch.device) -> frozenset[str]:
    """None, on every device."""
    return frozenset()


def unavailable(device: torch.device) -> str | None:
    """One sentence where Triton is not installed."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"needs the package triton, which cannot be imported: {error}"
    return None


def by_name_only(device: torch.device) -> str | None:
    """One sentence on the CPU, where kernels are interpreted."""
    return "interprets its kernels on the CPU, which is for tests" if device.type == "cpu" else None


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """o [B, H, n_q, d_v] in the dtype of q, and lse [B, H, n_q] in fp32."""
    return _module_for(q).forward(q, k, v, spec)


def forward_paged(q: Tensor, k: Tensor, v: Tensor, table: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """As `forward`, for keys and values in pages [pages, H_kv, page_size, D or d_v].

    Args:
        table: int32 or int64 [B, pages of a sample], whose keys are those of its pages one after the other. No load
            leaves the pages, whatever it says.
    """
    return _module_for(q).forward(q, k, v, spec, table)


def forward_quantized(
    q: Tensor, k: Tensor, v: Tensor, k_scales: Tensor, v_scales: Tensor, table: Tensor, spec: Spec
) -> tuple[Tensor, Tensor]:
    """As `forward_paged`, for keys and values of int8 or float8_e4m3fn, each row times its scale.

    Args:
        k_scales, v_scales: fp32 [pages, H_kv, page_size].
    """
    from .configs import stored_as

    scales, bits = (k_scales[..., None], v_scales[..., None]), (k.view(torch.int8), v.view(torch.int8))
    return _module_for(q).forward(q, *bits, spec, table, scales, stored_as(k.dtype, q))


def _module_for(q: Tensor) -> ModuleType:
    flash_forward, flash_decoding, _ = _modules()
    return flash_decoding if q.shape[2] <= flash_decoding.FEW_QUERIES.value else flash_forward


@functools.cache  # an import in each call would take as long as a launch
def _modules() -> tuple[ModuleType, ModuleType, ModuleType]:
    from . import flash_backward, flash_decoding, flash_forward

    return flash_forward, flash_decoding, flash_backward


def backward(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    spec: Spec,
    output_mask: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The six gradients, each where `output_mask` asks for it."""
    return _modules()[2].backward(do, dlse, q, k, v, o, lse, spec, output_mask)


def weights(q: Tensor, k: Tensor, lse: Tensor | None, spec: Spec, average_heads: bool) -> Tensor:
    """The weights after dropout in the dtype of q, [B, n_q, n_k] or [B, H, n_q, n_k]."""
    from .flash_weights import weights

    return weights(q, k, lse, spec, average_heads)


def received(q: Tensor, k: Tensor, spec: Spec) -> Tensor:
    """The sum over the queries of the weights, [B, H, n_k] in fp32."""
    from .flash_weights import received

    return received(q, k, spec)


def top_keys(q: Tensor, k: Tensor, spec: Spec, top_k: int) -> tuple[Tensor, Tensor]:
    """The largest weights of every query in fp32, and their keys in int64: [B, H, n_q, top_k]."""
    from .flash_weights import top_keys

    return top_keys(q, k, spec, top_k)


def _device_objections(device: torch.device) -> list[str]:
    if device.type == "cpu":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return [] if interpreted else ["runs on the CPU only in Triton's interpreter, with TRITON_INTERPRET=1"]
    if device.type != "cuda" or torch.version.cuda is None:
        return [f"needs an NVIDIA GPU, got {device.type}"]
    major, minor = torch.cuda.get_device_capability(device)
    return [] if major >= 8 else [f"needs compute capability 8.0 (Ampere) or later, got {major}.{minor}"]
