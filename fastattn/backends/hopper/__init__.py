"""The Hopper backend: FlashAttention-3 in Gluon, which ships with Triton.

It takes calls that have a mask, which may not be dense, and no other term. It is built over the Triton backend, whose
`visibility` says here too which pairs and tiles are seen.

The modules with kernels are imported inside functions, so that importing fastattn needs torch alone. None of them is
called `forward` or `backward`: Python would put the module in the place of the function.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from ...spec import LOG2E, Mask, Spec

NAME = "hopper"
WHERE = "NVIDIA GPUs of compute capability 9.0 (H100, H200)"

_FEATURES = frozenset(field.name for field in fields(Mask)) - {"dense"}
_DTYPES = (torch.float16, torch.bfloat16)
_LARGEST_HEAD_DIM = 256
_HEAD_DIM_STEP = 8  # rows that TMA copies are multiples of 16 bytes


def features(device: torch.device) -> frozenset[str]:
    """Names of all fields of a mask but `dense`, on every device."""
    return _FEATURES


def unsupported(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> list[str]:
    """Sentences about the device, the dtype and the head dims."""
    objections = _device_objections(q.device)
    if q.dtype not in _DTYPES:
        objections.append(f"needs float16 or bfloat16, got {str(q.dtype).removeprefix('torch.')}")
    for name, dim in (("q and k", q.shape[3]), ("v", v.shape[3])):
        if not (_HEAD_DIM_STEP <= dim <= _LARGEST_HEAD_DIM and dim % _HEAD_DIM_STEP == 0):
            of = f"multiples of {_HEAD_DIM_STEP} from {_HEAD_DIM_STEP} to {_LARGEST_HEAD_DIM}"
            objections.append(f"takes head dims that are {of}, got {dim} for {name}")
    return objections


def lacks(device: torch.device) -> frozenset[str]:
    """Names of all optional functions, on every device."""
    return frozenset({"weights", "received", "top_keys", "forward_paged", "forward_quantized"})


def unavailable(device: torch.device) -> str | None:
    """One sentence where the installed Triton has no Gluon, or one that lacks what the kernels use."""
    try:
        from . import gluon  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"needs Triton 3.6 or newer with Gluon: {error}"
    return None


def by_name_only(device: torch.device) -> str | None:
    """None, on every device."""
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """o [B, H, n_q, d_v] in the dtype of q, and lse [B, H, n_q] in fp32."""
    from ..triton import flash_decoding
    from ..triton.configs import FEW_QUERIES
    from .flash_forward import forward

    if q.shape[2] <= FEW_QUERIES.value:  # which would fill a part of a tile of wgmma, and occupy few multiprocessors
        return flash_decoding.forward(q, k, v, spec)
    sign, spec = _sign_of_scale(spec)
    return forward(q if sign == 1 else q * sign, k, v, spec)


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
    """Gradients of q, k and v where `output_mask` asks for them, and three None: it takes no bias, slopes or sinks."""
    from . import flash_backward, fused_backward

    which = flash_backward if spec.deterministic else fused_backward
    sign, spec = _sign_of_scale(spec)
    if sign == 1:
        return which.backward(do, dlse, q, k, v, o, lse, spec, output_mask)
    dq, *others = which.backward(do, dlse, q * sign, k, v, o, lse, spec, output_mask)
    if dq is not None:  # of a scale of 0, what stands there may be beyond the floats
        dq = dq * sign if sign else torch.zeros_like(dq)
    return dq, *others


def _sign_of_scale(spec: Spec) -> tuple[int, Spec]:
    """1, -1 or 0, to be multiplied by the queries; and `spec` with a positive scale, which the kernels need.

    Of one that fp32 rounds to 0 in base 2 the sign is 0.
    """
    scale = abs(spec.scale)
    if scale * LOG2E < torch.finfo(torch.float32).tiny:
        return 0, replace(spec, scale=1.0)
    return (1, spec) if spec.scale > 0 else (-1, replace(spec, scale=scale))


def _device_objections(device: torch.device) -> list[str]:
    if device.type != "cuda" or torch.version.cuda is None:
        return [f"needs an NVIDIA GPU, got {device.type}"]
    major, minor = torch.cuda.get_device_capability(device)
    return [] if major == 9 else [f"needs compute capability 9.0 (Hopper), got {major}.{minor}"]
