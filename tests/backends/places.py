"""Devices that each backend is tested on: the GPU if there is one that it is for, or the CPU."""

import platform
from types import ModuleType

import pytest
import torch

from fastattn.backends import BACKENDS, build, cpu, cuda, hopper

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
_ON_HOPPER = "cuda" in DEVICES and torch.cuda.get_device_capability()[0] == 9
_DEVICES_OF = {cpu: ("cpu",), cuda: DEVICES[1:], hopper: DEVICES[1:] if _ON_HOPPER else ()}
PLACES = [(backend, device) for backend in BACKENDS for device in _DEVICES_OF.get(backend, DEVICES[-1:])]

# PyTorch's kernels take no mask but a causal one on a GPU.
WITH_ANY_MASK = [place for place in PLACES if "real_keys" in place[0].features(torch.device(place[1]))]

# With one, the CPU kernels compute all gradients of a head together; with more than there are heads in any case, apart.
THREADS = (1, 64)

# The instruction sets of the CPU kernels, the best first.
CAPABILITIES = (
    ("neon_bf16", "neon")
    if platform.machine() in ("aarch64", "arm64")
    else ("amx", "avx512_bf16", "avx512", "avx2", "portable")
)

# A GPU of compute capability 7.5 multiplies no bf16, and TORCH_CUDA_ARCH_LIST may ask for code for one.
CUDA_TAKES_BF16 = "cuda" in DEVICES and build.CUDA.code_for(torch.cuda.get_device_capability()) >= (8, 0)


def place_id(x: object) -> str:
    """Of a backend its name; of a device, a dtype or a case what str() says."""
    return getattr(x, "NAME", str(x))


def most_precise_dtype(backend: ModuleType) -> torch.dtype:
    """Of those that a backend takes, but for fp64."""
    return torch.float16 if backend is hopper else torch.float32


in_each_place = pytest.mark.parametrize(("backend", "device"), PLACES, ids=place_id)
