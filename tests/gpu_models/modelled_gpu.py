"""Backends of GPUs on tensors in the CPU's memory, whose compiled kernels the machine in ptx/ executes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING

import ptx.cuda
import pytest

from fastattn.backends import cuda, hopper, triton

if TYPE_CHECKING:
    from ptx.launch import Gpu  # which imports triton, and this file is imported where there is none too


class PtxMachine:
    """Stands among the backends that tests are parametrized with, for one on a GPU of that architecture."""

    def __init__(self, backend: ModuleType, arch: int) -> None:
        self.backend, self.arch, self.NAME = backend, arch, f"ptx_{backend.NAME}_sm_{arch}"

    def computes_for_the_cpu(self) -> AbstractContextManager[None]:
        """Calls of the backend on CPU tensors are computed on that GPU."""
        if self.backend is cuda:
            from ptx.cuda import Gpu
        else:
            from ptx.launch import Gpu  # which imports triton
        return Gpu(self.arch).computes_for_the_cpu()


PTX_MACHINES: list[PtxMachine] = []
"""None but where Triton is told not to interpret its kernels."""
if os.environ.get("TRITON_INTERPRET") == "0":
    PTX_MACHINES += [PtxMachine(triton, 80), PtxMachine(triton, 90), PtxMachine(hopper, 90)]
    PTX_MACHINES += [PtxMachine(cuda, arch) for arch in ptx.cuda.ARCHS if ptx.cuda.nvcc()]
CUDA_MACHINES = [machine for machine in PTX_MACHINES if machine.backend is cuda]


@pytest.fixture
def hopper_gpu() -> Iterator[Gpu]:
    """A Hopper GPU on paper; the Hopper backend computes on it what is on the CPU, by its compiled kernels."""
    if not PTX_MACHINES:
        pytest.skip("the compiled kernels run where TRITON_INTERPRET is 0: see `make ptx`")
    from ptx.launch import Gpu

    gpu = Gpu(90)
    with gpu.computes_for_the_cpu():
        yield gpu


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The backend that a test is parametrized with (indirectly); for a machine it is that which computes on it."""
    if isinstance(request.param, PtxMachine):
        with request.param.computes_for_the_cpu():
            yield request.param.backend
        return
    yield request.param
