"""The compiled modules of the backends cpu and cuda: what each is built from and how, and where its build is found.

At module level this file imports the standard library only: setup.py loads it by path, where neither torch nor fastattn
can be imported, and the compiling child process runs it as a script.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

try:
    import fcntl
except ImportError:  # Windows, where nothing here has been tried: without the lock two processes may both build
    fcntl = None

_PACKAGE_DIR = Path(__file__).resolve().parents[1]
_ON_WINDOWS = sys.platform == "win32"

# The C++ standard is left to torch, which adds the one its headers need. Instruction sets are chosen at run time.
_OPTIMISED = ("/O2",) if _ON_WINDOWS else ("-O3", "-g0")


def source_dir() -> Path:
    """The folder of the C++ sources: inside an installed package, beside the package in a clone."""
    installed = _PACKAGE_DIR / "_csrc"
    return installed if installed.is_dir() else _PACKAGE_DIR.parent / "csrc"


def cache_dir() -> Path:
    """The folder that keeps the modules built on first use."""
    if chosen := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen) / "fastattn"
    of_user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if of_user.startswith("~"):  # nobody knows the user's home: nothing is kept, instead of in a folder named "~"
        of_user = os.devnull
    return Path(of_user) / "fastattn"


@dataclass(frozen=True, eq=False)
class CompiledModule:
    """The compiled module of a backend: what it is built from, and what a machine must have to compile it.

    Args:
        backend: the name of the backend, and of the folder in `source_dir()` whose headers it includes, with those
            beside that folder.
        sources: as paths below `source_dir()`, with the seconds that a processor takes to compile each, about.
        flags: for each compiler, by torch's names of them.
        link_flags: for the linker.
        every_torch: whether one build serves every torch and every Python that the package does.
    """

    backend: str
    sources: dict[str, int]
    flags: dict[str, tuple[str, ...]]
    link_flags: tuple[str, ...]
    every_torch: bool = False

    def __str__(self) -> str:
        return f"the {self.backend} backend's module"

    @property
    def stem(self) -> str:
        """The beginning of its file's name."""
        return f"_{self.backend}"

    @property
    def name(self) -> str:
        """As it is imported."""
        return f"fastattn.{self.stem}"

    @property
    def any_file(self) -> str:
        """A pattern for every build of it, whatever it was built for."""
        return f"{self.stem}.*"

    def headers(self) -> list[Path]:
        """The headers that the sources may include, as paths below `source_dir()`."""
        patterns = ("*.h", f"{self.backend}/*.h", f"{self.backend}/*.cuh")
        found = (path for pattern in patterns for path in source_dir().glob(pattern))
        return sorted(path.relative_to(source_dir()) for path in found)

    def about_seconds(self) -> int:
        """About how long this machine takes to compile it: what its processors share, or the longest source."""
        seconds = self.sources.values()
        return max(*seconds, round(sum(seconds) / processors()))

    def for_this_machine(self) -> CompiledModule:
        """What the first use compiles: the module, or one with less in it that serves this machine as well."""
        return self

    def compile_flags(self) -> dict[str, list[str]]:
        """The flags for each compiler on this machine; the lists are the caller's."""
        return {compiler: list(flags) for compiler, flags in self.flags.items()}

    def linker_flags(self, folder: str) -> list[str]:
        """The flags for the linker on this machine, which may use that folder."""
        return list(self.link_flags)

    def file_name(self) -> str:
        """The file name of the module for these sources and flags, and this machine, torch and Python.

        A module of any other name is never imported: one built for another torch may crash the process as it is loaded,
        unless it is `every_torch`.
        """
        return "".join(self._parts_of_file_name())

    def built_in(self, folder: Path) -> Path | None:
        """The module in that folder that can be loaded here, if there is one."""
        path = folder / self.file_name()
        return path if _is_whole(path) else None

    def obstacle(self) -> str | None:
        """Why this machine cannot compile the module, in one sentence, or None where nothing is known to be missing."""
        chosen = os.environ.get("CXX", "c++")  # as torch.utils.cpp_extension chooses it
        try:
            compiler = next(iter(shlex.split(chosen)), "")
        except ValueError as error:
            return f"CXX must be a command, got {chosen!r} ({error})"
        if shutil.which(compiler) is None:
            return f"there is no C++ compiler: {compiler!r} is not on the PATH (install g++, or set CXX)"
        if self.every_torch and sysconfig.get_config_var("Py_GIL_DISABLED"):
            return "a Python without the GIL has no limited C interface, which the module is written in"
        if not sys.executable:
            return "the Python of this program, which would compile it, is not known: sys.executable is empty"
        if getattr(sys, "frozen", False) or not re.search("(?i)py|thon", os.path.basename(sys.executable)):
            # Started to compile, it would run once more.
            return f"sys.executable, which would compile it, is this program instead of a Python: {sys.executable}"
        include_dir = sysconfig.get_path("include")
        if not os.path.isfile(os.path.join(include_dir, "Python.h")):  # Path raises where a folder is closed to us
            return f"Python's own headers are missing: no Python.h in {include_dir} (install python3-dev)"
        for package in ("ninja", "setuptools"):
            if importlib.util.find_spec(package) is None:
                return f"the package {package}, which torch builds with, is not installed (pip install {package})"
        return None

    def environment(self) -> dict[str, str]:
        """Variables for the process that compiles."""
        return {}

    def load(self, whole: bool = False) -> ModuleType:
        """The module, compiled first if no build for this torch and these sources exists.

        Args:
            whole: with all that other machines may need too.

        Raises:
            RuntimeError: it cannot be had; the message is the sentence of `unavailable()`.
        """
        outcome = _module_or_reason(self, whole)
        if isinstance(outcome, str):
            raise RuntimeError(outcome)
        return outcome

    def unavailable(self, whole: bool = False) -> str | None:
        """Why the module cannot be had, in one sentence, or None. Compiles it, as `load` does, if it must."""
        outcome = _module_or_reason(self, whole)
        return outcome if isinstance(outcome, str) else None

    def missing(self) -> str | None:
        """Why the module cannot be had, in one sentence, as far as that is known without compiling it; else None."""
        found = _find(self, self.for_this_machine())
        if found is None:
            return self.obstacle()
        return found if isinstance(found, str) else None

    def state(self) -> str:
        """How the module stands, in one phrase; compiles nothing."""
        first_use = self.for_this_machine()
        found = _find(self, first_use)
        if isinstance(found, str):
            return found
        if found is not None:
            return f"{'built ahead of time' if found.parent == _PACKAGE_DIR else 'cached'}: {found}"
        if why := self.obstacle():
            return f"cannot be built: {why}"
        log = _log(cache_dir() / first_use.file_name())
        if os.path.isfile(log):
            return f"did not compile (messages in {log}): `fastattn build` or the next use tries again"
        here = "" if first_use is self else f", for this machine alone in about {first_use.about_seconds()} s"
        return f"not built yet: `fastattn build` (about {self.about_seconds()} s) or the first use{here} builds it"

    def _parts_of_file_name(self) -> tuple[str, str, str]:
        """What stands before the GPUs that it is for, these, and what stands after them."""
        if not self.every_torch:
            import torch
        of_torch = "" if self.every_torch else torch.version.cuda
        identity = hashlib.sha256(repr((self.flags, self.link_flags, of_torch)).encode())
        for path in (*map(Path, self.sources), *self.headers()):
            identity.update(path.as_posix().encode() + b"\0")
            identity.update((source_dir() / path).read_bytes())
        before = f"{self.stem}.{identity.hexdigest()[:12]}."
        if self.every_torch:
            # Not sysconfig.get_platform(), which on macOS tells what that Python was built for.
            return before, "", f"{sys.platform}-{platform.machine()}.{'pyd' if _ON_WINDOWS else 'abi3.so'}"
        abi_and_machine = sysconfig.get_config_var("EXT_SUFFIX")  # such as .cpython-311-x86_64-linux-gnu.so
        return before, "", f"torch-{torch.__version__}{abi_and_machine}"


class CpuModule(CompiledModule):
    """One with the CPU kernels for each instruction set, of which a machine runs one or two."""

    def for_this_machine(self) -> CompiledModule:
        """With what this machine runs, unless FASTATTN_CPU_CAPABILITY asks for another instruction set."""
        if os.environ.get("FASTATTN_CPU_CAPABILITY"):
            return self
        names = {"binding", *_instruction_sets()}
        fewer = {source: seconds for source, seconds in self.sources.items() if Path(source).stem in names}
        return replace(self, sources=fewer) if len(fewer) > 1 else self


def _instruction_sets() -> tuple[str, ...]:
    """The names of those that csrc/cpu/dispatch.h chooses from on this machine; none where that is not known."""
    import torch

    best = torch.backends.cpu.get_cpu_capability()
    if _ON_WINDOWS or best not in ("AVX2", "AVX512"):  # a linker of Windows needs all that dispatch.h names
        return ()
    if best == "AVX2":
        return ("avx2",)
    for_bf16 = (("amx", torch.cpu._is_amx_tile_supported), ("avx512_bf16", torch.cpu._is_avx512_bf16_supported))
    return ("avx512", *[name for name, runs_here in for_bf16 if runs_here()][:1])


class CudaModule(CompiledModule):
    """One with kernels for NVIDIA GPUs: those of this machine, or those in TORCH_CUDA_ARCH_LIST."""

    def about_seconds(self) -> int:
        """As long as that for each kind of GPU."""
        return super().about_seconds() * len(_archs())

    def compile_flags(self) -> dict[str, list[str]]:
        """With code for each GPU; torch, which adds none then, would raise IndexError where no GPU is visible."""
        flags = super().compile_flags()
        flags["nvcc"] += [flag for arch in _archs() for flag in _code_flags(arch)]
        return flags

    def linker_flags(self, folder: str) -> list[str]:
        """With that folder, where the runtime library gets the name that the linker looks for, if it lacks that."""
        cudart = _toolkit().cudart
        if not cudart.name.startswith("libcudart.so."):
            return super().linker_flags(folder)
        link = Path(folder, "libcudart.so")
        link.unlink(missing_ok=True)
        link.symlink_to(cudart)
        return [*super().linker_flags(folder), f"-L{folder}"]

    def built_in(self, folder: Path) -> Path | None:
        """As of any module; without TORCH_CUDA_ARCH_LIST one for more GPUs too, if it has code for those here."""
        import torch

        if torch.version.cuda is None:
            return None
        exact = super().built_in(folder)
        if exact or _chosen_archs():
            return exact
        before, _, after = self._parts_of_file_name()
        candidates = sorted(folder.glob(f"{glob.escape(before)}*.{glob.escape(after)}"))
        made_for_all = (path for path in candidates if all(_is_made_for(gpu, path) for gpu in _gpus()))
        return next(filter(_is_whole, made_for_all), None)

    def code_for(self, capability: tuple[int, int]) -> tuple[int, int]:
        """The capability that the code was written for which a GPU of that capability runs: its own, or an older one.

        Only TORCH_CUDA_ARCH_LIST may ask for code that leaves out what the GPU could do. Builds nothing.
        """
        known = [arch for arch in _chosen_archs() if re.fullmatch(_AN_ARCH, arch)]
        return _newest_code(capability, known) or capability

    def unavailable_on(self, capability: tuple[int, int]) -> str | None:
        """Why nothing can be computed on a GPU of that capability, in one sentence, or None."""
        if why := self.unavailable():
            return why
        path = Path(self.load().__file__)
        if _has_code_for(capability, path):
            return None
        return f"{path} has no code for compute capability {capability[0]}.{capability[1]}, as {_ARCH_LIST} had it"

    def obstacle(self) -> str | None:
        """Why this machine cannot compile the module, in one sentence, or None where nothing is known to be missing."""
        import torch

        if torch.version.cuda is None:
            kind = "is built for ROCm" if torch.version.hip else "is built without CUDA"
            return f"torch {torch.__version__} {kind} (pytorch.org says how to install it with CUDA)"
        return _obstacle_to_archs() or _obstacle_of_toolkit() or super().obstacle()

    def environment(self) -> dict[str, str]:
        """The toolkit, the GPUs, and how many files are compiled at once: nvcc may take 2 GB for each."""
        found = {"CUDA_HOME": str(_toolkit().home), _ARCH_LIST: ";".join(_archs())}
        if os.environ.get("MAX_JOBS") is None and hasattr(os, "sysconf"):
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            found["MAX_JOBS"] = str(max(1, min(os.cpu_count() or 1, memory // 2**31)))
        return found

    def _parts_of_file_name(self) -> tuple[str, str, str]:
        before, _, after = super()._parts_of_file_name()
        return before, f"{'-'.join(_archs())}.", after


# On a Zen 3, with GCC 12; those for Arm are a guess.
_OF_ARM = {"cpu/binding.cpp": 5, "cpu/neon_bf16.cpp": 8, "cpu/neon.cpp": 8}
_OF_X86 = {
    "cpu/binding.cpp": 5,
    "cpu/amx.cpp": 6,
    "cpu/avx512_bf16.cpp": 8,
    "cpu/avx512.cpp": 12,
    "cpu/avx2.cpp": 8,
    "cpu/portable.cpp": 7,
}
CPU = CpuModule(
    backend="cpu",
    sources=_OF_ARM if platform.machine() in ("aarch64", "arm64") else _OF_X86,
    flags={"cxx": (*_OPTIMISED, "-DPy_LIMITED_API=0x030a0000")},  # Python 3.10's
    link_flags=(),
    every_torch=True,
)
CUDA = CudaModule(
    backend="cuda",
    sources={"cuda/binding.cpp": 20, "cuda/bf16.cu": 33, "cuda/f16.cu": 33, "cuda/f32.cu": 33},  # with nvcc 13.0
    flags={"cxx": _OPTIMISED, "nvcc": ("-O3",)},
    link_flags=(),
)
MODULES = {module.backend: module for module in (CPU, CUDA)}


# GPUs. A capability is that of a GPU, such as (8, 6); an arch is what code is for, as TORCH_CUDA_ARCH_LIST has it.

_ARCH_LIST = "TORCH_CUDA_ARCH_LIST"
_AN_ARCH = r"\d+\.\d(\+PTX)?"
OLDEST_CAPABILITY = (7, 5)
FIRST_WITH_BF16 = (8, 0)  # in code for older ones the kernels of bf16 are empty


def _gpus() -> list[tuple[int, int]]:
    """The capabilities of the visible GPUs that the kernels can run on."""
    return [capability for capability in _visible_gpus() if capability >= OLDEST_CAPABILITY]


def _visible_gpus() -> list[tuple[int, int]]:
    import torch

    return sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})


def _chosen_archs() -> list[str]:
    """Those in TORCH_CUDA_ARCH_LIST; none where it is not set, or says that the GPUs of this machine decide."""
    chosen = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace("native", "")
    return sorted(set(filter(None, re.split(r"[;,\s]+", chosen))))


def _archs() -> list[str]:
    return _chosen_archs() or [f"{major}.{minor}" for major, minor in _gpus()]


def _number(arch: str) -> tuple[int, int]:
    major, minor = arch.removesuffix("+PTX").split(".")
    return int(major), int(minor)


def _code_flags(arch: str) -> list[str]:
    """What tells nvcc to make machine code for it, and with "+PTX" also what newer GPUs compile for themselves."""
    number = "".join(map(str, _number(arch)))
    kinds = ("sm", "compute") if arch.endswith("+PTX") else ("sm",)
    return [f"-gencode=arch=compute_{number},code={kind}_{number}" for kind in kinds]


def _runs_on(capability: tuple[int, int], arch: str) -> bool:
    """Whether that GPU runs code for `arch`: machine code within a major version, PTX ever after."""
    number = _number(arch)
    return number <= capability and (number[0] == capability[0] or arch.endswith("+PTX"))


def _newest_code(capability: tuple[int, int], archs: list[str]) -> tuple[int, int] | None:
    """What that GPU runs of the code for these archs, if anything."""
    return max((_number(arch) for arch in archs if _runs_on(capability, arch)), default=None)


def _archs_in(path: Path) -> list[str]:
    """What the CUDA module in that file is for, as its name says."""
    (archs,) = re.findall(r"\.[0-9a-f]{12}\.(.+)\.torch-", path.name)
    return archs.split("-")


def _has_code_for(capability: tuple[int, int], path: Path) -> bool:
    return _newest_code(capability, _archs_in(path)) is not None


def _is_made_for(capability: tuple[int, int], path: Path) -> bool:
    """Whether that GPU runs the module in that file, and with all that the kernels can do on it."""
    code = _newest_code(capability, _archs_in(path))
    return code is not None and (code >= FIRST_WITH_BF16 or capability < FIRST_WITH_BF16)


def _obstacle_to_archs() -> str | None:
    chosen = _chosen_archs()
    for arch in chosen:
        if not re.fullmatch(_AN_ARCH, arch):
            return f"{_ARCH_LIST} must list compute capabilities, such as '7.5;8.6+PTX', got {os.environ[_ARCH_LIST]!r}"
    gpus = [_number(arch) for arch in chosen] or _visible_gpus()
    if not gpus:
        return f"torch sees no GPU (to build for another machine's, set {_ARCH_LIST} to its capability, such as 7.5)"
    too_old = [f"{major}.{minor}" for major, minor in gpus if (major, minor) < OLDEST_CAPABILITY]
    if too_old and (chosen or len(too_old) == len(gpus)):
        oldest = ".".join(map(str, OLDEST_CAPABILITY))
        return f"the CUDA kernels need compute capability {oldest} (Turing) or later, got {', '.join(too_old)}"
    return None


@dataclass(frozen=True)
class _Toolkit:
    home: Path
    nvcc: Path
    cudart: Path  # the library, whose name may be one that the linker does not look for

    def says(self, *options: str) -> str:
        """What nvcc prints; nothing where it cannot be run."""
        try:
            return subprocess.run([self.nvcc, *options], capture_output=True, text=True).stdout
        except OSError:
            return ""

    def version(self) -> str:
        """Such as "13.0"; "unknown" where nvcc does not say."""
        found = re.search(r"release (\d+\.\d+)", self.says("--version"))
        return found[1] if found else "unknown"

    def is_for(self, torch_cuda: str) -> bool:
        """Whether torch builds with it: the major version must be its own."""
        return self.version().partition(".")[0] == torch_cuda.partition(".")[0]


def _toolkits() -> Iterator[_Toolkit]:
    """Each folder with nvcc and libcudart: CUDA_HOME alone where it is set, or else wherever they are installed.

    The folder above that of `nvcc` on the PATH may be none: it may be a script that starts the real one.
    """
    import torch

    if chosen := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        homes = [Path(chosen)]
    else:
        on_path = [Path(nvcc) for nvcc in [shutil.which("nvcc")] if nvcc]
        beside_torch = Path(torch.__file__).parents[1] / "nvidia" / f"cu{torch.version.cuda.partition('.')[0]}"
        homes = [nvcc.parents[1] for path in on_path for nvcc in (path, path.resolve())]
        homes += [Path("/usr/local/cuda"), beside_torch]  # the latter is where pip puts NVIDIA's own packages
    for home in homes:
        nvcc = shutil.which("nvcc", path=home / "bin")
        patterns = ("lib64/libcudart.so*", "lib/libcudart.so*", "lib/*/libcudart.so*", "lib/x64/cudart.lib")
        cudart = next((path for pattern in patterns for path in sorted(home.glob(pattern))), None)
        if nvcc and cudart:
            yield _Toolkit(home, Path(nvcc), cudart)


def _toolkit() -> _Toolkit | None:
    """The first that torch builds with; any other where there is none."""
    import torch

    found = list(_toolkits())
    return next((toolkit for toolkit in found if toolkit.is_for(torch.version.cuda)), next(iter(found), None))


def _obstacle_of_toolkit() -> str | None:
    import torch

    toolkit, major = _toolkit(), torch.version.cuda.partition(".")[0]
    if toolkit is None:
        chosen = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        where = f"in {chosen}, as CUDA_HOME has it" if chosen else "on the PATH or in /usr/local/cuda"
        return f"there is no CUDA toolkit {where}, with nvcc and libcudart (install CUDA {major}, or set CUDA_HOME)"
    if not toolkit.is_for(torch.version.cuda):
        return (
            f"the CUDA toolkit in {toolkit.home} is {toolkit.version()}, and torch {torch.__version__} takes CUDA "
            f"{major} only (install it, or set CUDA_HOME)"
        )
    known = toolkit.says("--list-gpu-code").split()
    unknown = [arch for arch in _archs() if "sm_{}{}".format(*_number(arch)) not in known]
    if unknown:
        return f"CUDA {toolkit.version()} in {toolkit.home} cannot compile for compute capability {', '.join(unknown)}"
    return None


# Building.


def _log(target: Path) -> Path:
    return target.with_name(f"{target.name}.log")


def _checksum_file(target: Path) -> Path:
    return target.with_name(f"{target.name}.sha256")


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_whole(path: Path) -> bool:
    """Whether the module in that file is what was compiled: to load another crashes the process.

    What a full disk or a power cut leaves has not the checksum beside it. pip answers for what is in the package.
    """
    try:
        return path.is_file() if path.parent == _PACKAGE_DIR else _checksum(path) == _checksum_file(path).read_text()
    except OSError:
        return False


def _find(*modules: CompiledModule) -> Path | str | None:
    """The file of the first of these modules that is built, or why none can be told from others or trusted, or None."""
    if not source_dir().is_dir():
        return f"the C++ sources, by which builds are told apart, were not packed with this program: no {source_dir()}"
    for module in modules:
        if path := module.built_in(_PACKAGE_DIR):
            return path
    for module in modules:
        if found := _distrust(module, cache_dir()) or module.built_in(cache_dir()):
            return found
    return None


def _distrust(module: CompiledModule, folder: Path) -> str | None:
    """Why no module in that folder is loaded, in one sentence: other users could have put theirs there. Else None."""
    for path in (folder, folder / module.file_name(), _checksum_file(folder / module.file_name())):
        try:
            status = path.stat()
        except OSError:
            continue
        if not _ON_WINDOWS and (status.st_mode & 0o022 or status.st_uid not in (os.getuid(), 0)):
            return (
                f"{module} is not loaded from {path}, which other users can write "
                "(make it yours alone, as by chmod go-w, or set TORCH_EXTENSIONS_DIR elsewhere)"
            )
    return None


@functools.cache  # a failure too: nobody waits twice for the same compile error
def _module_or_reason(module: CompiledModule, whole: bool = False) -> ModuleType | str:
    wanted = module if whole else module.for_this_machine()
    path = _find(module, wanted)
    if path is None:
        if why := _build_reluctance(wanted):
            return why
        path = cache_dir() / wanted.file_name()
        if why := _build(wanted, path):
            return why
    if isinstance(path, str):
        return path
    try:
        return _import(module, path)
    except ImportError as error:
        return f"{module} {path} cannot be loaded: {error}"


def _import(module: CompiledModule, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(module.name, path)
    imported = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(imported)
    return imported


def _build_reluctance(module: CompiledModule) -> str | None:
    from torch.utils.data import get_worker_info

    if get_worker_info() is not None:
        return f"{module} is not built yet, and a DataLoader worker builds nothing: run `fastattn build` first"
    return module.obstacle()


def _build(module: CompiledModule, target: Path) -> str | None:
    """Why `target` could not be built, in one sentence, or None when it is there."""
    try:
        target.parent.mkdir(0o755, parents=True, exist_ok=True)
        with only_holder_of(target):
            return None if _is_whole(target) else _compile(module, target)
    except OSError as error:
        return f"{module} cannot be kept in {target.parent} ({error}): set TORCH_EXTENSIONS_DIR elsewhere"


_one_thread = threading.RLock()


@contextmanager
def only_holder_of(target: Path) -> Iterator[None]:
    """Lets one thread of one process on at a time, which may ask for several files.

    The lock belongs to the process and vanishes with it, also by kill -9. (The lock file of torch's own JIT build stays
    behind then, and every later build waits for it for good.)
    """
    with _one_thread, target.with_name(f"{target.name}.lock").open("w") as lock_file:
        if fcntl is not None:
            fcntl.lockf(lock_file, fcntl.LOCK_EX)
        yield


def _compile(module: CompiledModule, target: Path) -> str | None:
    import torch

    stale = any(_PACKAGE_DIR.glob(module.any_file))
    unfit = "the installed one is for other sources, or another torch or machine"
    why = unfit if stale else "none was built ahead of time"
    say(
        f"compiling {module} for torch {torch.__version__} ({why}); "
        f"this takes about {module.about_seconds()} s, once, and is kept in {target.parent}"
    )
    for leftover in target.parent.glob(f"{target.name}.build-*"):  # its builder was killed: we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    _log(target).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.build-", dir=target.parent) as folder:
        command = [sys.executable, __file__, folder, module.backend, *module.sources]
        code, said = _run_showing_progress(command, _child_environment(module), module.sources)
        compiled = Path(folder, f"{module.stem}{target.suffix}")
        if code != 0 or not compiled.is_file():
            _log(target).write_bytes(said)
            return f"{module} did not compile (the compiler's messages are in {_log(target)})"
        compiled.chmod(0o755)  # whatever the umask
        checksum = Path(folder, "checksum")
        checksum.write_text(_checksum(compiled))
        checksum.chmod(0o644)
        checksum.replace(_checksum_file(target))
        compiled.replace(target)
    return None


def _child_environment(module: CompiledModule) -> dict[str, str]:
    import ninja

    environment = {**os.environ, **module.environment()}
    environment["PYTHONPATH"] = path_of_children()
    # A virtual environment that was not activated has its ninja on no PATH.
    environment["PATH"] = os.pathsep.join((ninja.BIN_DIR, environment.get("PATH", os.defpath)))
    return environment


def path_of_children() -> str:
    """PYTHONPATH of processes that are to find the torch that this one found; Python ignores what is no str."""
    return os.pathsep.join(path for path in sys.path if path and isinstance(path, str))


def _run_showing_progress(
    command: list[str], environment: dict[str, str], seconds: dict[str, int]
) -> tuple[int, bytes]:
    """The exit code and all that was said by a command in which ninja compiles sources that take so many seconds."""
    said = []
    with (
        progress_shown("the compilation", sum(seconds.values())) as show_more,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as child,
    ):  # fmt: skip
        for line in child.stdout:
            said.append(line)
            if re.match(rb"\[\d+/\d+\]", line):  # a step of ninja that is done, with its command
                show_more(sum(each for source, each in seconds.items() if f"/{source} ".encode() in line))
    return child.returncode, b"".join(said)


_SECONDS_BETWEEN_LINES = 20


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def say(sentence: str) -> None:
    """Prints a sentence on stderr, where there is one: programs without a console have none, and others close it."""
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(f"fastattn: {sentence}", file=sys.stderr, flush=True)


def has_terminal() -> bool:
    """Whether stderr is a terminal; what a program puts in its place may know nothing but `write`."""
    with suppress(AttributeError, OSError, ValueError):
        return sys.stderr.isatty()
    return False


@contextmanager
def progress_shown(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function to call with how much of `total` has been done since: a bar, or else a line now and then."""
    if has_terminal() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeElapsedColumn

        columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("", total=total)
            yield lambda more: progress.update(task, advance=more)
        return
    done, last_line = 0, time.monotonic()

    def show_more(more: int) -> None:
        nonlocal done, last_line
        done += more
        if time.monotonic() - last_line >= _SECONDS_BETWEEN_LINES:
            last_line = time.monotonic()
            say(f"{100 * done // total} % of {what} is done")

    yield show_more


def _end_with_parent() -> None:
    """Ends this process and the compilers it has started when its standard input ends, which the parent holds open."""
    os.read(sys.stdin.fileno(), 1)
    if _ON_WINDOWS:
        os._exit(1)
    os.killpg(os.getpgid(0), signal.SIGTERM)  # on which ninja ends its compilers, each in a group of its own


def _compile_in(module: CompiledModule, folder: str) -> None:
    """Leaves the compiled module in `folder`, having imported it once: what the child process does."""
    from torch.utils import cpp_extension

    flags = module.compile_flags()
    cpp_extension.load(
        module.stem,
        [str(source_dir() / source) for source in module.sources],
        extra_cflags=flags["cxx"],
        extra_cuda_cflags=flags.get("nvcc"),
        extra_ldflags=module.linker_flags(folder),
        build_directory=folder,
        verbose=True,  # the steps of ninja as they are done, which the parent counts
    )


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    chosen_folder, backend, *sources = sys.argv[1:]
    whole = MODULES[backend]
    _compile_in(replace(whole, sources={source: whole.sources[source] for source in sources}), chosen_folder)
