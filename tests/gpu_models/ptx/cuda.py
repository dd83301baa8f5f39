"""The CUDA backend on the machine: its kernels and its own launches, as nvcc compiles both.

In the place of CUDA's runtime library stands cuda_runtime.cpp.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from fastattn.backends import build, cuda

from . import gpu
from .machine import BUILDS, Program, PtxError

_FOLDER = Path(__file__).parent
ARCHS = (75, 80)
"""Without bf16 and asynchronous copies, and the first with both."""


def nvcc() -> Path | None:
    """That of the variable NVCC, of the Makefile's folder for it, or of the PATH."""
    found = (os.environ.get("NVCC"), Path(sys.prefix, "cuda/nvidia/cu13/bin/nvcc"), shutil.which("nvcc"))
    return next((Path(path).resolve() for path in found if path and Path(path).is_file()), None)


def _headers(tool: Path) -> Path:
    """The folder of CUDA's headers, by what nvcc says of itself: the file may be a script that calls another one."""
    done = subprocess.run([tool, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True, check=True)
    return Path(re.search(r"^#\$ TOP=(.*)$", done.stderr, re.MULTILINE)[1], "include")


class Gpu(gpu.Gpu):
    """A GPU on which the CUDA backend runs."""

    def __init__(self, arch: int, counting: bool = False) -> None:
        super().__init__(arch, counting)
        self._given: list[Tensor] = []  # the tensors of a call
        self._fault: Exception | None = None

    @contextlib.contextmanager
    def computes_for_the_cpu(self) -> Iterator[None]:
        """Calls of the CUDA backend on CPU tensors are computed on this GPU; memory that they allocate is NaN."""
        module, texts = _compiled()
        on_launch = _ON_LAUNCH(functools.partial(self._launch, texts[self.arch]))
        ctypes.CDLL(module.__file__).fastattn_set_gpu(on_launch, gpu.SHARED_BYTES[self.arch])
        with (
            mock.patch.object(cuda, "_device_objections", side_effect=lambda device: []),  # a new list each time
            mock.patch.object(build.CudaModule, "load", return_value=_Module(self, module)),
            mock.patch.object(build.CudaModule, "unavailable_on", return_value=None),
            mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(self.arch, 10)),
            gpu.memory_full_of_nan(),
        ):
            yield

    def call(self, function: object, arguments: tuple, named: dict[str, object]) -> object:
        """Of the module; the launches of one that computes may use the tensors that it and those before it got."""
        self._given += [x for x in (*arguments, *named.values()) if isinstance(x, Tensor)]
        if isinstance(function, type):  # it describes a part of a call
            return function(*arguments, **named)
        try:
            return function(*arguments, **named)
        except RuntimeError:
            if self._fault is not None:
                raise self._fault from None
            raise
        finally:
            self._given, self._fault = [], None

    def _launch(
        self, texts: dict[tuple[int, str], str], module: int, name: bytes, grid: object, block: object, shared: int,
        arguments: object, allocated: object, n_allocated: int,
    ) -> bool:  # fmt: skip
        def values_of(program: Program) -> list[bytes]:
            return [ctypes.string_at(arguments[i], size) for i, size in enumerate(program.sizes)]

        try:
            of_binding = np.array(allocated[:n_allocated], np.uint64).reshape(-1, 2)
            ranges = np.concatenate([of_binding, *map(gpu.ranges_of, self._given)])
            text = texts[module, name.decode()]
            self.runs(_readable(name.decode()), text, grid[:3], block[0], shared, values_of, ranges)
        except Exception as error:  # which no C++ may be thrown through
            self._fault = error
            return False
        return True


_ON_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_bool, ctypes.c_int, ctypes.c_char_p, *[ctypes.POINTER(ctypes.c_uint32)] * 2, ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t,
)  # fmt: skip


class _Module:
    """The module of the backend for a GPU."""

    def __init__(self, of: Gpu, module: ModuleType) -> None:
        self._gpu, self._module = of, module

    def __getattr__(self, name: str) -> object:
        function = getattr(self._module, name)
        return lambda *arguments, **named: self._gpu.call(function, arguments, named)


_OF_BACKWARD = {"Lb1ELNS0_6WantedE1": "dq", "Lb0ELNS0_6WantedE3": "dk_dv"}
_OF_BACKWARD |= {"Lb0ELNS0_6WantedE1": "dk", "Lb0ELNS0_6WantedE2": "dv"}


def _readable(symbol: str) -> str:
    """The name of a kernel as of those of the other backends, for any dtype and head dim."""
    name = re.match(r"_ZN8fastattn4cuda\d+([a-z_]+)", symbol)[1]
    return next((f"{x}_kernel" for arguments, x in _OF_BACKWARD.items() if arguments in symbol), name)


def kernels_in(text: str) -> dict[str, str]:
    """Modules of one kernel each with the functions that it names, by their names: of a module with several."""
    head, *parts = re.split(r"^(?=\.(?:visible|entry|func|extern))", text[text.index(".version") :], flags=re.MULTILINE)
    named = [(m[2], part, m[1]) for part in parts if (m := _DECLARED.match(part))]
    others = "".join(part for part in (head, *parts) if not _DECLARED.match(part))
    return {
        name: others + "".join(x for of, x, kind in named if kind == ".func" and of in kernel) + kernel
        for name, kernel, kind in named
        if kind == ".entry"
    }


_DECLARED = re.compile(r"(?:\.visible )?(\.entry|\.func) *(?:\(.*?\))? *(\w+)")


@functools.cache
def _compiled() -> tuple[ModuleType, dict[int, dict[tuple[int, str], str]]]:
    """The module for the host, and the kernels for each architecture, by the number of their module and their name."""
    from torch.utils import cpp_extension

    sources = [build.source_dir() / source for source in build.CUDA.sources]
    headers = [build.source_dir() / header for header in build.CUDA.headers()]
    flags = ["-std=c++20", *cpp_extension.COMMON_NVCC_FLAGS, *build.CUDA.flags["nvcc"], "-Xcompiler=-fPIC"]
    tool = nvcc()
    if tool is None:
        raise PtxError("there is no nvcc")
    codes = [f"-gencode=arch=compute_{arch},code=compute_{arch}" for arch in ARCHS]
    version = subprocess.run([tool, "--version"], check=True, capture_output=True).stdout
    contents = [path.read_bytes() for path in sorted([*sources, *headers])]
    digest = hashlib.sha256(b"".join([version, repr((flags, codes)).encode(), *contents])).hexdigest()[:16]
    folder = BUILDS / f"cuda-{digest}"
    name = f"ptx_cuda_torch_{re.sub('[^0-9]', '_', torch.__version__)}"
    (folder / name).mkdir(parents=True, exist_ok=True)
    with_kernels = [source for source in sources if source.suffix == ".cu"]
    objects = [folder / f"{source.stem}.o" for source in with_kernels]
    with build.only_holder_of(folder / name), mock.patch.dict(os.environ, PATH=_path_with_ninja()):
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            command = [tool, *flags, *codes, "--keep", "--keep-dir", folder]
            list(pool.map(functools.partial(_compile, command), with_kernels, objects))
        (folder / name / "lock").unlink(missing_ok=True)  # torch's own, of a process that was killed
        module = cpp_extension.load(
            name,
            [str(source) for source in (*sources, _FOLDER / "cuda_runtime.cpp") if source.suffix == ".cpp"],
            extra_include_paths=[str(_FOLDER), str(_headers(tool))],
            # Hidden, so that another library of CUDA's runtime in this process is not taken for this one.
            extra_cflags=["-std=c++20", "-O1", "-g0", "-fvisibility=hidden"],
            extra_ldflags=[str(path) for path in objects],
            build_directory=str(folder / name),
        )
    return module, {arch: _by_module(module, folder, arch, with_kernels) for arch in ARCHS}


def _compile(command: list[object], source: Path, target: Path) -> None:
    """Compiles a source, and leaves its PTX beside the target."""
    if not target.is_file():
        unfinished = target.with_suffix(".unfinished.o")
        subprocess.run([*command, "-c", source, "-o", unfinished], check=True)
        unfinished.replace(target)


def _by_module(module: ModuleType, folder: Path, arch: int, sources: list[Path]) -> dict[tuple[int, str], str]:
    """The kernels of the host's modules, which are numbered as they were registered, and known by their kernels."""
    library, number, names = ctypes.CDLL(module.__file__), ctypes.c_int(), {}
    library.fastattn_kernel.restype = ctypes.c_char_p
    library.fastattn_kernel.argtypes = (ctypes.c_size_t, ctypes.c_void_p)
    i = 0
    while (name := library.fastattn_kernel(i, ctypes.byref(number))) is not None:
        names.setdefault(number.value, set()).add(name.decode())
        i += 1
    modules = [kernels_in((folder / f"{source.stem}.compute_{arch}.ptx").read_text()) for source in sources]
    found = {number: [m for m in modules if m.keys() == of_host] for number, of_host in names.items()}
    if not all(len(same) == 1 for same in found.values()) or len(found) != len(modules):
        raise PtxError("the host and the GPU have other kernels")
    return {(number, name): text for number, (same,) in found.items() for name, text in same.items()}


def _path_with_ninja() -> str:
    import ninja

    return os.pathsep.join((ninja.BIN_DIR, os.environ.get("PATH", os.defpath)))
