"""The native CPU module: what it is built from and how, and where the build for this torch, Python and source is found.

At module level this file imports the standard library only: setup.py loads it by path, where neither torch nor fastattn
can be imported, and the compiling child process runs it as a script.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

try:
    import fcntl
except ImportError:  # Windows, where nothing here has been tried: without the lock two processes may both build
    fcntl = None

MODULE = "fastattn._native_cpu"
_LEVELS = ("amx", "avx512_bf16", "avx512", "avx2", "portable")  # one translation unit per instruction set
SOURCES = ("binding.cpp", *(f"cpu/{level}.cpp" for level in _LEVELS))
_STEM = MODULE.rpartition(".")[2]
ANY_FILE = f"{_STEM}.*"  # matches every build of the module, whatever it was built for
BUILD_SECONDS = 40  # about: GCC 12, 2 cores

# at::parallel_for is inline code of torch's headers: compiled without OpenMP it silently runs on one thread.
OPENMP_FLAGS = ["-fopenmp"] if sys.platform == "linux" else []
# The C++ standard is left to torch, which adds the one its headers need. Instruction sets are chosen at run time.
COMPILE_FLAGS = ["-O3", "-g0", *OPENMP_FLAGS]
LINK_FLAGS = OPENMP_FLAGS

_PACKAGE_DIR = Path(__file__).resolve().parents[2]


def source_dir() -> Path:
    """The folder of the C++ sources: inside an installed package, beside the package in a clone."""
    installed = _PACKAGE_DIR / "_csrc"
    return installed if installed.is_dir() else _PACKAGE_DIR.parent / "csrc"


def headers() -> list[Path]:
    """The headers that the sources include, as paths below `source_dir()`."""
    return sorted(path.relative_to(source_dir()) for path in source_dir().rglob("*.h"))


def file_name() -> str:
    """The file name of the module for these sources and flags, this torch, this Python and this machine.

    A module of any other name is never imported: one built for another torch may crash the process as it is loaded.
    """
    import torch

    identity = hashlib.sha256(repr((COMPILE_FLAGS, LINK_FLAGS)).encode())
    for path in (*map(Path, SOURCES), *headers()):
        identity.update(path.as_posix().encode() + b"\0")
        identity.update((source_dir() / path).read_bytes())
    abi_and_machine = sysconfig.get_config_var("EXT_SUFFIX")  # such as .cpython-311-x86_64-linux-gnu.so
    return f"{_STEM}.{identity.hexdigest()[:12]}.torch-{torch.__version__}{abi_and_machine}"


def cache_dir() -> Path:
    """The folder that keeps the modules built on first use."""
    if chosen := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen) / "fastattn"
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "fastattn"


def obstacle() -> str | None:
    """Why this machine cannot compile the module, in one sentence, or None where nothing is known to be missing."""
    compiler = next(iter(shlex.split(os.environ.get("CXX", "c++"))), "")  # as torch.utils.cpp_extension chooses it
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler: {compiler!r} is not on the PATH (install g++, or set CXX)"
    include_dir = sysconfig.get_path("include")
    if not Path(include_dir, "Python.h").is_file():
        return f"Python's own headers are missing: no Python.h in {include_dir} (install python3-dev)"
    if importlib.util.find_spec("ninja") is None:
        return "the package ninja, which torch builds with, is not installed (pip install ninja)"
    return None


def load() -> ModuleType:
    """The native module, compiled first if no build for this torch and these sources exists.

    Raises:
        RuntimeError: it cannot be had; the message is the sentence of `unavailable()`.
    """
    outcome = _module_or_reason()
    if isinstance(outcome, str):
        raise RuntimeError(outcome)
    return outcome


def unavailable() -> str | None:
    """Why the native module cannot be had, in one sentence, or None. Compiles it where that has not been done."""
    outcome = _module_or_reason()
    return outcome if isinstance(outcome, str) else None


def state() -> str:
    """How the native module stands, in one phrase; compiles nothing."""
    if _built_ahead().is_file():
        return f"built ahead of time: {_built_ahead()}"
    if _cached().is_file():
        return f"cached: {_cached()}"
    if why := obstacle():
        return f"cannot be built: {why}"
    if _log(_cached()).is_file():
        return f"did not compile (messages in {_log(_cached())}): `fastattn build` or the next use tries again"
    return f"not built yet: `fastattn build` (about {BUILD_SECONDS} s) or the first use builds it"


def _built_ahead() -> Path:
    return _PACKAGE_DIR / file_name()


def _cached() -> Path:
    return cache_dir() / file_name()


def _log(target: Path) -> Path:
    return target.with_name(f"{target.name}.log")


@functools.cache  # a failure too: nobody waits twice for the same compile error
def _module_or_reason() -> ModuleType | str:
    path = next((path for path in (_built_ahead(), _cached()) if path.is_file()), None)
    if path is None:
        path = _cached()
        if why := _build_reluctance() or _build(path):
            return why
    try:
        return _import(path)
    except ImportError as error:
        return f"the native module {path} cannot be loaded: {error}"


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build_reluctance() -> str | None:
    from torch.utils.data import get_worker_info

    if get_worker_info() is not None:
        return "the native module is not built yet, and a DataLoader worker builds nothing: run `fastattn build` first"
    return obstacle()


def _build(target: Path) -> str | None:
    """Why `target` could not be built, in one sentence, or None when it is there."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_builder_of(target):
            return None if target.is_file() else _compile(target)
    except OSError as error:
        return f"the native module cannot be kept in {target.parent} ({error}): set TORCH_EXTENSIONS_DIR elsewhere"


_one_thread = threading.Lock()


@contextmanager
def _only_builder_of(target: Path) -> Iterator[None]:
    """Lets one thread of one process on at a time.

    The lock belongs to the process and vanishes with it, also by kill -9. (The lock file of torch's own JIT build stays
    behind then, and every later build waits for it for good.)
    """
    with _one_thread, target.with_name(f"{target.name}.lock").open("w") as lock_file:
        if fcntl is not None:
            fcntl.lockf(lock_file, fcntl.LOCK_EX)
        yield


def _compile(target: Path) -> str | None:
    import torch

    stale = any(_PACKAGE_DIR.glob(ANY_FILE))
    why = "the installed one is for another torch or other sources" if stale else "none was built ahead of time"
    print(
        f"fastattn: compiling the native CPU module for torch {torch.__version__} ({why}); "
        f"this takes about {BUILD_SECONDS} s, once, and is kept in {target.parent}",
        file=sys.stderr,
        flush=True,
    )
    for leftover in target.parent.glob(f"{target.name}.build-*"):  # its builder was killed: we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    _log(target).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.build-", dir=target.parent) as folder:
        child = subprocess.run(
            [sys.executable, __file__, folder],
            env=_child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if child.returncode != 0:
            _log(target).write_bytes(child.stdout)
            return f"the native module did not compile (the compiler's messages are in {_log(target)})"
        Path(folder, f"{_STEM}{target.suffix}").replace(target)
    return None


def _child_environment() -> dict[str, str]:
    import ninja

    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # the torch that this process found
    # A virtual environment that was not activated has its ninja on no PATH.
    environment["PATH"] = os.pathsep.join((ninja.BIN_DIR, environment.get("PATH", os.defpath)))
    return environment


def _compile_in(folder: str) -> None:
    """Leaves the compiled module in `folder`, having imported it once: what the child process does."""
    from torch.utils import cpp_extension

    cpp_extension.load(
        _STEM,
        [str(source_dir() / source) for source in SOURCES],
        extra_cflags=COMPILE_FLAGS,
        extra_ldflags=LINK_FLAGS,
        build_directory=folder,
    )


if __name__ == "__main__":
    _compile_in(sys.argv[1])
