"""Backends of GPUs on tensors in the CPU's memory: the CUDA backend by cuda_model/, Triton's kernels by ptx/."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch

from fastattn.backends import build, cuda, hopper, triton

if TYPE_CHECKING:
    from ptx.launch import Gpu  # which imports triton, and this file is imported where there is none too

_ORDERS = ("ascending", "descending", "random")  # as in tests/gpu_models/cuda_model/settings.h

_MODEL = Path(__file__).parent / "cuda_model"
_BUILDS = Path(__file__).parents[2] / "build" / "cuda_model"


class CudaModel:
    """Stands among the backends that tests are parametrized with, for the fixture `backend` to find."""

    NAME = "cuda_model"


class PtxMachine:
    """Stands there for a backend on a GPU of that architecture, whose compiled kernels the machine in ptx/ executes."""

    def __init__(self, backend: ModuleType, arch: int) -> None:
        self.backend, self.arch, self.NAME = backend, arch, f"ptx_{backend.NAME}_sm_{arch}"


PTX_MACHINES: list[PtxMachine] = []
"""None but where Triton is told not to interpret its kernels."""
if os.environ.get("TRITON_INTERPRET") == "0":
    PTX_MACHINES += [PtxMachine(triton, 80), PtxMachine(triton, 90), PtxMachine(hopper, 90)]


class ModelledGpu:
    """A GPU of that compute capability, and the CUDA module for it."""

    def __init__(self, capability: tuple[int, int], module: ModuleType) -> None:
        self.capability, self._module = capability, module

    @contextmanager
    def computes_for_the_cpu(self) -> Iterator[None]:
        """Calls of the CUDA backend on CPU tensors are computed by its kernels, on this GPU."""
        with (
            mock.patch.object(cuda, "_device_objections", side_effect=lambda device: []),  # a new list each time
            mock.patch.object(build.CudaModule, "load", return_value=self._module),
            mock.patch.object(build.CudaModule, "unavailable_on", return_value=None),
            mock.patch.object(torch.cuda, "get_device_capability", return_value=self.capability),
        ):
            yield

    @contextmanager
    def runs_in(self, order: str, seed: int = 1) -> Iterator[None]:
        """Threads, warps and blocks that do not wait for each other run in that order; the seed is of a random one."""
        run_in = ctypes.CDLL(self._module.__file__).fastattn_model_run_in
        run_in.argtypes = (ctypes.c_int, ctypes.c_uint64)
        run_in(_ORDERS.index(order), seed)
        try:
            yield
        finally:
            run_in(_ORDERS.index("ascending"), 1)


@functools.cache
def modelled_gpu(major: int, minor: int) -> ModelledGpu:
    """The GPU of that capability; its module is compiled where that has not been done, by one process at a time."""
    import ninja
    from torch.utils import cpp_extension

    name = f"cuda_model_{major}{minor}"
    folder = _BUILDS / f"torch-{torch.__version__}-{sys.implementation.cache_tag}" / name
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join((ninja.BIN_DIR, os.environ.get("PATH", os.defpath)))
    with build.only_holder_of(folder / name), mock.patch.dict(os.environ, PATH=path):
        (folder / "lock").unlink(missing_ok=True)  # torch's own, of a process that was killed
        module = cpp_extension.load(  # compiles what has changed
            name,
            [*_sources(folder), str(_MODEL / "settings_from_python.cpp")],
            extra_include_paths=[str(_MODEL), str(build.source_dir() / "cuda")],
            # The optimisation with which compiling and running take the least. What is hidden is not shared with the
            # model of another GPU in this process. The model needs C++20; torch 2.11 asks for C++17.
            extra_cflags=[
                "-std=c++20",
                "-O1",
                "-g0",
                "-fvisibility=hidden",
                f"-DFASTATTN_MODEL_CAPABILITY={major}{minor}",
            ],
            build_directory=str(folder),
        )
    return ModelledGpu((major, minor), module)


def _sources(folder: Path) -> Iterator[str]:
    """The sources of the CUDA module, each as one that torch gives to the C++ compiler."""
    for source in map(Path, build.CUDA.sources):
        as_cpp = folder / f"{source.stem}.cpp"
        text = f'#include "{build.source_dir() / source}"\n'
        if not as_cpp.is_file() or as_cpp.read_text() != text:
            as_cpp.write_text(text)
        yield str(as_cpp)


@pytest.fixture
def gpu_model() -> Iterator[ModelledGpu]:
    """A modelled GPU with all that the kernels use; the CUDA backend computes on it what is on the CPU."""
    gpu = modelled_gpu(8, 0)
    with gpu.computes_for_the_cpu():
        yield gpu


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
    """The backend that a test is parametrized with (indirectly); for a model it is that which computes on it."""
    if isinstance(request.param, PtxMachine):
        from ptx.launch import Gpu  # which imports triton

        with Gpu(request.param.arch).computes_for_the_cpu():
            yield request.param.backend
        return
    if request.param is CudaModel:
        request.getfixturevalue("gpu_model")
        yield cuda
        return
    yield request.param
