"""Backends of GPUs on tensors in the CPU's memory, whose compiled kernels the machine in ptx/ executes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import ModuleType

import ptx.cuda
import pytest
from modelled_hopper import GluonModel

from fastattn.backends import cuda, hopper, triton


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


_MODELS = {GluonModel: ("gluon_model", hopper)}


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The backend that a test is parametrized with (indirectly); for a model it is that which computes on it."""
    if isinstance(request.param, PtxMachine):
        with request.param.computes_for_the_cpu():
            yield request.param.backend
        return
    fixture, result = _MODELS.get(request.param, (None, request.param))
    if fixture is not None:
        request.getfixturevalue(fixture)
    yield result
