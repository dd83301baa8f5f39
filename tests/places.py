"""Where each backend is tested: on the GPU if there is one, and what has a part for each device on every one."""

import pytest
import torch

from fastattn.backends import BACKENDS, native
from fastattn.backends.native import build

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
PLACES = [(backend, device) for backend in BACKENDS for device in (DEVICES if backend is native else DEVICES[-1:])]

# A GPU of compute capability 7.5 multiplies no bf16, and TORCH_CUDA_ARCH_LIST may ask for code for one.
CUDA_TAKES_BF16 = "cuda" in DEVICES and build.CUDA.code_for(torch.cuda.get_device_capability()) >= (8, 0)


def place_id(x: object) -> str:
    """Of a backend its name; of a device, a dtype or a case what str() says."""
    return getattr(x, "NAME", str(x))


in_each_place = pytest.mark.parametrize(("backend", "device"), PLACES, ids=place_id)
