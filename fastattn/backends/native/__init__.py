"""Attention in C++ (csrc/), in parts: one for the CPU, and one in CUDA. Neither is built for a call on the other."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from ...spec import Spec
from . import cpu, cuda

NAME = "native"
WHERE = "CPU, C++: AMX, AVX-512, AVX2, or whatever there is; NVIDIA GPUs of compute capability 7.5 and newer, CUDA"

_PARTS: dict[str, ModuleType] = {"cpu": cpu, "cuda": cuda}  # by the type of the device


def features(device: torch.device) -> frozenset[str]:
    """Those of the part for that device; nothing where there is none."""
    part = _PARTS.get(device.type)
    return part.features() if part else frozenset()


def lacks(device: torch.device) -> frozenset[str]:
    """The functions that the part for that device does not have."""
    part = _PARTS.get(device.type)
    return part.lacks() if part else frozenset()


def unsupported(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> list[str]:
    """Sentences about the device, or about what its part does not take."""
    part = _PARTS.get(q.device.type)
    return part.unsupported(q, k, v, spec) if part else [f"q must be on the CPU or an NVIDIA GPU, got {q.device}"]


def unavailable(device: torch.device) -> str | None:
    """Why the C++ module for that device cannot be had, or None; builds it if that has not been done, and no other."""
    return _PARTS[device.type].unavailable(device)


def by_name_only(device: torch.device) -> str | None:
    """One sentence on GPUs that the Triton backend serves."""
    part = _PARTS.get(device.type)
    return part.by_name_only(device) if part else None


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """o [B, H, n_q, d_v] in the dtype of q, and lse [B, H, n_q] in fp32."""
    return _PARTS[q.device.type].forward(q, k, v, spec)


def short_way(device: torch.device) -> Callable | None:
    """The C++ function behind `short_way` of fastattn/plan.py, where the part for that device has one."""
    part = _PARTS[device.type]
    return part.short_way() if hasattr(part, "short_way") else None


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
    """Gradients of q, k, v, bias, alibi_slopes and sinks, in their dtypes; dk and dv come together."""
    return _PARTS[q.device.type].backward(do, dlse, q, k, v, o, lse, spec, output_mask)


def weights(q: Tensor, k: Tensor, lse: Tensor | None, spec: Spec, average_heads: bool) -> Tensor:
    """The weights after dropout in the dtype of q, [B, n_q, n_k] or [B, H, n_q, n_k]."""
    return _PARTS[q.device.type].weights(q, k, lse, spec, average_heads)


def received(q: Tensor, k: Tensor, spec: Spec) -> Tensor:
    """The sum over the queries of the weights, [B, H, n_k] in fp32."""
    return _PARTS[q.device.type].received(q, k, spec)


def top_keys(q: Tensor, k: Tensor, spec: Spec, top_k: int) -> tuple[Tensor, Tensor]:
    """The largest weights of every query in fp32, and their keys in int64: [B, H, n_q, top_k]."""
    return _PARTS[q.device.type].top_keys(q, k, spec, top_k)
