"""The CUDA part (csrc/cuda/): for GPUs that Triton does not compile for, and for machines without Triton."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...spec import FEATURES, Spec
from . import build

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST_HEAD_DIM = 256
_AMPERE = (8, 0)  # the first with bf16, and the first that Triton compiles for


def features() -> frozenset[str]:
    """Every feature."""
    return FEATURES


def lacks() -> frozenset[str]:
    """All that is about weights."""
    return frozenset({"weights", "received", "top_keys"})


def unsupported(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> list[str]:
    """Sentences about the GPU, the dtype and the head dims."""
    if torch.version.cuda is None:
        return [f"needs an NVIDIA GPU, and a torch for it, got torch {torch.__version__}"]
    found, capability = [], torch.cuda.get_device_capability(q.device)
    if capability < build.OLDEST_CAPABILITY:
        found.append(f"needs compute capability {_text(build.OLDEST_CAPABILITY)} or later, got {_text(capability)}")
    if q.dtype not in _DTYPES:
        found.append(f"q must be float32, bfloat16 or float16, got {q.dtype}")
    if q.dtype == torch.bfloat16 and capability < _AMPERE:
        found.append(f"needs compute capability {_text(_AMPERE)} or later for bfloat16, got {_text(capability)}")
    for name, dim in (("q and k", q.shape[3]), ("v", v.shape[3])):
        if dim > _LARGEST_HEAD_DIM:
            found.append(f"takes head dims up to {_LARGEST_HEAD_DIM}, got {dim} for {name}")
    return found


def unavailable(device: torch.device) -> str | None:
    """Why the CUDA module cannot be had for that GPU, or None; builds it if that has not been done."""
    return build.CUDA.unavailable_on(torch.cuda.get_device_capability(device))


def by_name_only(device: torch.device) -> str | None:
    """One sentence where the Triton backend runs."""
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < _AMPERE or not _triton_is_there():
        return None
    return f"serves by name where Triton runs: on compute capability {_text(_AMPERE)} and later"


@functools.cache
def _triton_is_there() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def _text(capability: tuple[int, int]) -> str:
    return "{}.{}".format(*capability)
