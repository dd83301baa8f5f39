"""Every case on the modelled GPU, with memory that nobody may touch right after each tensor that the kernels read.

A program of its own: a kernel that reads further ends it. Prints each case before it is computed.
"""

import ctypes
import itertools
import mmap
from types import ModuleType
from unittest import mock

import torch
from modelled_gpu import modelled_gpu
from torch import Tensor

from fastattn.backends import build
from fastattn.testing import CASES, DTYPES, make_inputs, run

LIBC = ctypes.CDLL(None, use_errno=True)


def fenced(x: Tensor | None) -> Tensor | None:
    """A copy with the same strides whose last element is the last before a page that nobody may touch."""
    if x is None:
        return None
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    size = -(-span * x.element_size() // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    fence = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)) + size)
    if LIBC.mprotect(fence, ctypes.c_size_t(mmap.PAGESIZE), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    flat = torch.frombuffer(memory, dtype=x.dtype, count=span, offset=size - span * x.element_size())
    return flat.copy_(x.as_strided((span,), (1,))).as_strided(x.shape, x.stride())


class Fenced:
    """The CUDA module, with fences after what it is given to read."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self.Gradients = module, module.Gradients

    def _described(self, name: str, options: dict[str, object]) -> object:
        of_tensors = {n: fenced(x) if isinstance(x, Tensor) else x for n, x in options.items()}
        return getattr(self._module, name)(**of_tensors)

    def Side(self, **options: object) -> object:  # noqa: N802
        return self._described("Side", options)

    def Mask(self, **options: object) -> object:  # noqa: N802
        return self._described("Mask", options)

    def Scores(self, **options: object) -> object:  # noqa: N802
        return self._described("Scores", options)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> None:
        self._module.forward(fenced(q), fenced(k), fenced(v), *rest)

    def backward(self, *arguments: object) -> Tensor:
        return self._module.backward(*(fenced(x) for x in arguments[:7]), *arguments[7:])


def main() -> None:
    gpu = modelled_gpu(8, 0)
    dtypes = itertools.cycle(DTYPES)
    with gpu.computes_for_the_cpu():
        module = Fenced(build.CUDA.load())
        for case in CASES:
            if not case.timed and case.D > 0 and max(case.D, case.d_v or 0) <= 256:
                inputs = make_inputs(case, next(dtypes))
                print(case.name, flush=True)
                expected = run(inputs, "cuda")
                with mock.patch.object(build.CudaModule, "load", return_value=module):
                    actual = run(inputs, "cuda")
                for name, value in expected.items():
                    torch.testing.assert_close(actual[name], value, rtol=0, atol=0, equal_nan=True)
    print("done")


if __name__ == "__main__":
    main()
