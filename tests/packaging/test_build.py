"""Packaging and building: what is installed where, and that no build hangs, repeats or surprises.

The C++ here is a stand-in without torch's headers, so that a build takes seconds; every test of the cpu backend
compiles the real sources.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

import fresh_python
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD_FILE = Path("fastattn", "backends", "build.py")
PACKAGED = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "fastattn", "csrc")

STAND_IN = """
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cpu"};
PyMODINIT_FUNC PyInit__cpu() {
    PyObject* m = PyModule_Create(&module);
    PyModule_AddIntConstant(m, "answer", 1);
    return m;
}
"""
"""The sources listed in build.py are this one and empty files."""

LOAD_BUILD = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("build", "{BUILD_FILE.as_posix()}")
build = sys.modules["build"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
"""


def make_tree(folder: Path) -> Path:
    """A copy of what a wheel is made from, with the real C++; no test writes into the repository."""
    folder.mkdir()
    for name in PACKAGED:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(REPOSITORY / name, folder / name)
    return folder


def make_stand_in(tree: Path) -> Path:
    """The same with the stand-in for the C++."""
    for source in (tree / "csrc").rglob("*.cpp"):
        source.write_text("")
    (tree / "csrc" / "cpu" / "binding.cpp").write_text(STAND_IN)
    return tree


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "tree")


@pytest.fixture
def stand_in(tree: Path) -> Path:
    return make_stand_in(tree)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the module of the stand-in; not to be changed."""
    tree = make_stand_in(make_tree(tmp_path_factory.mktemp("built") / "tree"))
    run(tree, "build.CPU.load()")
    return tree.parent / "cache"


@pytest.fixture
def built(stand_in: Path, cache: Path) -> Path:
    """The stand-in, of which the module is in the cache; the module itself."""
    shutil.copytree(cache, stand_in.parent / "cache")
    (module,) = (stand_in.parent / "cache" / "fastattn").glob("*.so")
    return module


@pytest.fixture
def no_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which torch cannot be imported, as in pip's isolated builds."""
    hidden = tmp_path / "hidden" / "torch"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text('raise ImportError("no torch here")')
    return {"PYTHONPATH": str(hidden.parent)}


def environment_of(tree: Path, environment: dict[str, str]) -> dict[str, str]:
    """Variables of a process in `tree`, whose cache is beside it."""
    return {**os.environ, "TORCH_EXTENSIONS_DIR": str(tree.parent / "cache"), **environment}


def run(tree: Path, code: str, **environment: str) -> tuple[str, str]:
    """stdout and stderr, stripped, of a process that runs `code` in `tree`, with that tree's build.py as `build`."""
    done = fresh_python.run(LOAD_BUILD + code, cwd=tree, environment=environment_of(tree, environment))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.strip()


def start(tree: Path, code: str, **environment: str) -> subprocess.Popen:
    """A Python of its own that does the same, for tests of several processes at once."""
    return subprocess.Popen(
        [sys.executable, "-c", LOAD_BUILD + code],
        cwd=tree,
        env=environment_of(tree, environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pip_wheel(tree: Path, **environment: str) -> subprocess.CompletedProcess:
    """What pip says, as stdout, as it makes a wheel there without a network, in dist/."""
    options = ["-v", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", "dist"]
    return subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, "."],
        cwd=tree,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )


def backend_wheel(tree: Path, **environment: str) -> subprocess.CompletedProcess:
    """The same by what pip calls, without pip and its three imports of torch."""
    code = """
import setuptools.build_meta, sys
sys.path += [f"{setuptools.__path__[0]}/_vendor"]  # which its import adds, and a fork does not keep
setuptools.build_meta.build_wheel("dist")
"""
    made = fresh_python.run(code, cwd=tree, environment={**os.environ, **environment})
    made.stdout += made.stderr
    return made


def wheel_of(tree: Path, make: Callable = backend_wheel, **environment: str) -> tuple[zipfile.ZipFile, str]:
    """The wheel that is made there, and all that was said meanwhile."""
    made = make(tree, **environment)
    assert made.returncode == 0, made.stdout
    (wheel,) = (tree / "dist").glob("*.whl")
    return zipfile.ZipFile(wheel), made.stdout


def change_answer(tree: Path) -> None:
    (tree / "csrc" / "cpu" / "binding.cpp").write_text(STAND_IN.replace('"answer", 1', '"answer", 2'))


def compiled(wheel: zipfile.ZipFile) -> list[str]:
    return [name for name in wheel.namelist() if name.endswith((".so", ".pyd"))]


def test_wheel_without_torch_is_pure_quick_and_whole(tree, no_torch):
    for folder in ("benchmarks", "benchmarks/gpu", "tests"):  # of a checkout
        (tree / folder).mkdir()
        (tree / folder / "__init__.py").touch()
    started = time.monotonic()
    wheel, said = wheel_of(tree, pip_wheel, **no_torch)
    assert time.monotonic() - started < 20
    assert "no torch here" in said
    assert Path(wheel.filename).name.endswith("-py3-none-any.whl")
    assert compiled(wheel) == []
    packed = set(wheel.namelist())
    metadata = next(wheel.read(name).decode() for name in packed if name.endswith("/METADATA"))
    needed = {line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line}
    assert needed == {f"Requires-Dist: {package}" for package in ("torch>=2.10", "ninja", "setuptools")}
    files = [path for path in (tree / "csrc").rglob("*.*") if path.suffix != ".md"]
    sources = {path.relative_to(tree / "csrc").as_posix() for path in files}
    assert {"cpu/binding.cpp", "mask.h", "cuda/f16.cu", "cuda/forward.cuh"} <= sources
    assert {name.removeprefix("fastattn/_csrc/") for name in packed if name.startswith("fastattn/_csrc/")} == sources
    modules = {path.relative_to(tree).as_posix() for path in (tree / "fastattn").rglob("*.py")}
    assert modules | {"fastattn/py.typed"} <= packed
    assert {name.partition("/")[0].partition("-")[0] for name in packed} == {"fastattn"}


def test_sdist_can_be_built_again(tree, tmp_path, no_torch):
    sdist = [sys.executable, "setup.py", "-q", "sdist"]
    subprocess.run(sdist, cwd=tree, env={**os.environ, **no_torch}, check=True, capture_output=True)
    shutil.unpack_archive(next((tree / "dist").glob("*.tar.gz")), tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    from_sdist, _ = wheel_of(unpacked, pip_wheel, **no_torch)
    from_tree, _ = wheel_of(tree, pip_wheel, **no_torch)
    assert set(from_sdist.namelist()) == set(from_tree.namelist())


LACKING = {
    "torch": "torch cannot be imported here (no torch here)",
    "compiler": "there is no C++ compiler: '/nonexistent/c++' is not on the PATH",
    "valid source": "Error compiling objects for extension",
}


@pytest.mark.parametrize(("lacks", "required"), [*product(LACKING, [True]), *product([*LACKING][1:], [False])])
def test_a_wheel_without_the_module_is_pure_or_an_error(stand_in, no_torch, lacks, required):
    if lacks == "valid source":
        (stand_in / "csrc" / "cpu" / "binding.cpp").write_text("this is not C++")
    environment = {"torch": no_torch, "compiler": {"CXX": "/nonexistent/c++"}}.get(lacks, {})
    make = pip_wheel if lacks == "torch" else backend_wheel
    made = make(stand_in, FASTATTN_REQUIRE_COMPILED="1" if required else "", **environment)
    assert (made.returncode != 0) == required
    assert LACKING[lacks] in made.stdout
    before = "the cpu backend's module, which cannot be" if required else "installing without the cpu backend's module"
    assert before in made.stdout or lacks == "valid source"
    assert [compiled(zipfile.ZipFile(wheel)) for wheel in stand_in.glob("dist/*.whl")] == ([] if required else [[]])


def test_wheel_with_torch_carries_the_one_module_that_is_then_loaded(stand_in, tmp_path):
    wheel_of(stand_in)
    shutil.rmtree(stand_in / "dist")
    change_answer(stand_in)
    wheel, _ = wheel_of(stand_in, pip_wheel)
    assert "-cp310-abi3-" in Path(wheel.filename).name
    (module,) = compiled(wheel)
    wheel.extractall(tmp_path / "installed")
    code = "print(build.CPU.load().answer, build.CPU.load().__file__, build.CPU.state(), sep='\\n')"
    out, err = run(tmp_path / "installed", code, CXX="/nonexistent/c++")
    answer, file, state = out.splitlines()
    assert answer == "2"
    assert Path(file) == tmp_path / "installed" / module
    assert state == f"built ahead of time: {file}"
    assert "compiling" not in err


def test_first_use_compiles_once_and_the_next_process_finds_it(stand_in):
    code = """
cpu = build.CPU
print(cpu.state(), cpu.load().answer, cpu.load() is cpu.load(), cpu.unavailable(), sep="|")
"""
    first_out, first_err = run(stand_in, code)
    assert first_out.startswith("not built yet: `fastattn build`")
    assert first_out.endswith("|1|True|None")
    assert first_err.startswith("fastattn: compiling the cpu backend's module for torch")
    assert len(first_err.splitlines()) == 1
    next_out, next_err = run(stand_in, code, CXX="/nonexistent/c++")
    assert next_out.startswith(f"cached: {stand_in.parent / 'cache'}")
    assert next_out.endswith("|1|True|None")
    assert next_err == ""


def test_four_processes_at_once_compile_once(stand_in):
    all_of_them = [start(stand_in, "print(build.CPU.load().answer)") for _ in range(4)]
    results = [process.communicate(timeout=200) for process in all_of_them]
    assert [out for out, _ in results] == ["1\n"] * 4
    assert sum("compiling" in err for _, err in results) == 1
    assert not list(stand_in.parent.glob("cache/*/*.build-*"))


@pytest.mark.parametrize("fault", ["truncated", "empty", "changed", "no checksum"])
def test_a_module_that_is_not_what_was_compiled_is_compiled_again(stand_in, built, fault):
    whole = built.read_bytes()
    if fault == "no checksum":
        built.with_name(f"{built.name}.sha256").unlink()
    else:
        spoiled = {"truncated": whole[: len(whole) // 2], "empty": b"", "changed": whole + b"?"}[fault]
        built.write_bytes(spoiled)
    out, err = run(stand_in, "print(build.CPU.state()); print(build.CPU.load().answer, build.CPU.state())")
    before, after = out.splitlines()
    assert before.startswith("not built yet")
    assert after.startswith("1 cached: ")
    assert "compiling" in err


@pytest.mark.skipif(os.name != "posix", reason="file modes of POSIX")
@pytest.mark.parametrize("of", ["folder", "module", "checksum"])
def test_what_others_can_write_is_not_loaded(stand_in, built, of):
    path = {"folder": built.parent, "module": built, "checksum": built.with_name(f"{built.name}.sha256")}[of]
    path.chmod(path.stat().st_mode | 0o020)
    out, err = run(stand_in, "print(build.CPU.unavailable()); print(build.CPU.state())")
    why, state = out.splitlines()
    assert why.startswith(f"the cpu backend's module is not loaded from {path}, which other users can write (")
    assert state == why
    assert err == ""


def test_what_is_compiled_under_any_umask_is_loaded(stand_in):
    run(stand_in, "import os; os.umask(0); build.CPU.load()")
    assert run(stand_in, "print(build.CPU.load().answer)") == ("1", "")


COMPILES_FOR_EVER = """#!/bin/sh
case "$*" in *binding.cpp*) echo $$ >> "$PIDS"; exec sleep 600;; esac
exec c++ "$@"
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_compilers_end_with_who_waits_for_them(stand_in, tmp_path, number):
    compiler, pids = tmp_path / "c++", tmp_path / "pids"
    compiler.write_text(COMPILES_FOR_EVER)
    compiler.chmod(0o755)
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # as no job in the background
    waiting = start(stand_in, f"{heeds}build.CPU.load()", CXX=str(compiler), PIDS=str(pids))
    fresh_python.wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"), 60)
    waiting.send_signal(number)
    waiting.communicate(timeout=60)
    fresh_python.wait_until(lambda: not any(Path("/proc", pid).exists() for pid in pids.read_text().split()), 60)
    assert run(stand_in, "print(build.CPU.load().answer)")[0] == "1"
    assert not list(stand_in.parent.glob("cache/*/*.build-*"))


def test_a_full_disk_is_a_sentence(stand_in):
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); print(build.CPU.unavailable())"
    out, _ = run(stand_in, code)
    assert re.match("the cpu backend's module (cannot be kept|did not compile) ", out)
    assert run(stand_in, "print(build.CPU.load().answer)")[0] == "1"


def test_module_for_other_sources_is_never_loaded_and_that_of_the_cpu_serves_every_torch(stand_in, built):
    (stand_in / "fastattn" / "_cpu.000000000000.torch-1.0.so").write_bytes(b"would crash")
    assert run(stand_in, "print(build.CPU.load().answer)") == ("1", "")
    change_answer(stand_in)
    out, err = run(stand_in, "print(build.CPU.load().answer)")
    assert out == "2"
    assert "compiling" in err
    assert "the installed one is for other sources, or another torch or machine" in err
    code = "import torch; torch.__version__ += '.other'; print(build.CPU.state()); print(build.CUDA.file_name())"
    out, _ = run(stand_in, code)
    assert out.startswith("cached: ")
    assert ".other." in out.splitlines()[1]
    (stand_in / "csrc" / "new.h").write_text("")
    out, _ = run(stand_in, "print(build.CPU.state())")
    assert out.startswith("not built yet")


def test_compile_error_is_a_sentence_with_a_log_and_is_not_repeated(stand_in):
    (stand_in / "csrc" / "cpu" / "binding.cpp").write_text("this is not C++")
    code = "print(build.CPU.unavailable()); print(build.CPU.unavailable()); print(build.CPU.state())"
    out, err = run(stand_in, code)
    sentence, again, state = out.splitlines()
    assert sentence.startswith("the cpu backend's module did not compile (the compiler's messages are in ")
    assert again == sentence
    assert err.count("compiling") == 1
    (log,) = (stand_in.parent / "cache").rglob("*.log")
    assert str(log) in sentence
    assert "this is not C++" in log.read_text()
    assert state.startswith("did not compile")
    assert not list(log.parent.glob("*.so"))


def test_without_a_compiler_load_raises_the_sentence_of_unavailable(stand_in):
    code = """
try:
    build.CPU.load()
except RuntimeError as error:
    print(error, build.CPU.unavailable(), build.CPU.state(), sep="|")
"""
    out, err = run(stand_in, code, CXX="/nonexistent/c++")
    raised, sentence, state = out.split("|")
    assert (
        raised
        == sentence
        == "there is no C++ compiler: '/nonexistent/c++' is not on the PATH (install g++, or set CXX)"
    )
    assert state == f"cannot be built: {sentence}"
    assert err == ""


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TORCH_EXTENSIONS_DIR": "/x", "XDG_CACHE_HOME": "/y"}, "/x/fastattn"),
        ({"TORCH_EXTENSIONS_DIR": "", "XDG_CACHE_HOME": "/y"}, "/y/fastattn"),
        ({"TORCH_EXTENSIONS_DIR": "", "XDG_CACHE_HOME": "", "HOME": "/z"}, "/z/.cache/fastattn"),
    ],
)
def test_cache_is_where_the_environment_says(stand_in, environment, expected):
    assert run(stand_in, "print(build.cache_dir())", **environment)[0] == expected


def test_a_cache_in_a_closed_folder_is_a_sentence(stand_in):
    """As in a container of another user, whose HOME is still that of root."""
    code = """
import pathlib, sys
class Closed(pathlib.PosixPath):
    def stat(self, **_):
        raise PermissionError(13, "Permission denied", str(self))
    def mkdir(self, *_, **__):
        self.stat()
build.cache_dir = lambda: Closed("/closed/fastattn")
print(build.CPU.missing(), build.CPU.state(), build.CPU.unavailable(), sep="|")
"""
    missing, state, why = run(stand_in, code)[0].split("|")
    assert (missing, state[:14]) == ("None", "not built yet:")
    assert why.startswith("the cpu backend's module cannot be kept in /closed/fastattn (")


WITHOUT_A_PACKAGE = "import sys; from torch.utils import cpp_extension; sys.modules[{!r}] = None"
WITHOUT_A_HOME = "import os, pwd; pwd.getpwuid = lambda uid: {}[uid]; del os.environ['HOME']"
INSTEAD_OF_PYTHON = "sys.executable, which would compile it, is this program instead of a Python: "
NOT_KEPT = "the cpu backend's module cannot be kept in /dev/null/fastattn (*): set TORCH_EXTENSIONS_DIR elsewhere"
UNAVAILABLE = {  # what happens before, with which variables of the environment, and why there is no module then
    "no command": ("", {"CXX": '"x'}, "CXX must be a command, got '\"x' (No closing quotation)"),
    **{
        f"no {name}": (
            WITHOUT_A_PACKAGE.format(name), {},
            f"the package {name}, which torch builds with, is not installed (pip install {name})",
        )
        for name in ("ninja", "setuptools")
    },
    "no cache": ("", {"TORCH_EXTENSIONS_DIR": "/dev/null"}, NOT_KEPT),
    "no home": (WITHOUT_A_HOME, {"TORCH_EXTENSIONS_DIR": "", "XDG_CACHE_HOME": ""}, NOT_KEPT),
    "hidden Python": (
        "import sys; sys.executable = ''", {},
        "the Python of this program, which would compile it, is not known: sys.executable is empty",
    ),
    "embedded Python": ("import sys; sys.executable = '/bin/true'", {}, f"{INSTEAD_OF_PYTHON}/bin/true"),
    "frozen, as by PyInstaller": ("import sys; sys.frozen = True", {}, f"{INSTEAD_OF_PYTHON}{sys.executable}"),
    "a child that leaves no module": (
        "import os, sys; sys.executable = f'{os.getcwd()}/python'; os.symlink('/bin/true', sys.executable)", {},
        "the cpu backend's module did not compile (*)",
    ),
    "packed without data files": (
        "import shutil; shutil.rmtree('csrc')", {},
        "the C++ sources, by which builds are told apart, were not packed with this program: no */csrc",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNAVAILABLE)
def test_what_keeps_the_module_from_being_built_is_a_sentence(stand_in, name):
    code, environment, sentence = UNAVAILABLE[name]
    asked = "\nprint(build.CPU.unavailable(), build.CPU.missing(), build.CPU.state(), sep='|')"
    out, err = run(stand_in, code + asked, **environment)
    why, missing, state = out.split("|")
    assert fnmatchcase(why, sentence)
    if missing == why:  # which is known before
        assert state in (why, f"cannot be built: {why}")
    else:
        assert (missing, state.startswith(("not built yet: ", "did not compile "))) == ("None", True)
    assert ("compiling" in err) == ("did not compile" in why)
    assert not (stand_in / "~").exists()


def test_dataloader_worker_builds_nothing(stand_in):
    code = """
import torch
class Reasons(torch.utils.data.Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, i):
        return build.CPU.unavailable()
(reason,), = torch.utils.data.DataLoader(Reasons(), num_workers=1, multiprocessing_context="fork")
print(reason)
"""
    out, err = run(stand_in, code)
    assert out.startswith("the cpu backend's module is not built yet, and a DataLoader worker builds nothing: run ")
    assert err == ""
    assert not (stand_in.parent / "cache").exists()


def test_lock_keeps_others_out_and_dies_with_its_process(stand_in):
    take_lock = """
import os, time
from pathlib import Path
print("waits", flush=True)
with build.only_holder_of(Path("module.so")):
    print("holds", flush=True)
    os.fork()  # the child lives on, as a DataLoader worker may, and must not keep the lock
    time.sleep(60)
"""
    holder = start(stand_in, take_lock)
    assert [holder.stdout.readline() for _ in range(2)] == ["waits\n", "holds\n"]
    other = start(stand_in, take_lock.replace("os.fork()", "raise SystemExit"))
    assert other.stdout.readline() == "waits\n"
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(timeout=1)
    holder.kill()
    assert other.wait(timeout=20) == 0


def test_import_needs_neither_triton_nor_ninja_nor_the_module_and_compiles_nothing():
    code = """
import subprocess, sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"triton", "ninja"} or name in {"fastattn._cpu", "fastattn.parallel"}:
            raise ImportError(f"{name} is forbidden here")

sys.meta_path.insert(0, Forbidden())
subprocess.Popen = None
import torch
loaded_by_torch = set(sys.modules)
import fastattn
packages = {name.partition(".")[0] for name in set(sys.modules) - loaded_by_torch}
print(sorted(packages - {"torch", *sys.stdlib_module_names}))
print("torch._dynamo" in sys.modules)
"""
    imported = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert (imported.stdout, imported.returncode) == ("['fastattn']\nFalse\n", 0), imported.stderr


def fake_cuda(gpus: list[tuple[int, int]], cuda: str | None = "13.0", hip: str | None = None) -> str:
    """torch as it is where there is CUDA, for what is asked of it before anything is compiled."""
    return f"""
import torch
torch.version.cuda, torch.version.hip = {cuda!r}, {hip!r}
torch.cuda.device_count = lambda: {len(gpus)}
torch.cuda.get_device_capability = {gpus}.__getitem__
"""


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    """A CUDA toolkit that knows sm_75 and sm_90, says that it is 13.0, and compiles nothing."""
    home = tmp_path / "toolkit"
    (home / "bin").mkdir(parents=True)
    (home / "lib64").mkdir()
    (home / "lib64" / "libcudart.so").write_text("")
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(
        """#!/bin/sh
        case $1 in
          --version) echo "Cuda compilation tools, release 13.0, V13.0.88" ;;
          --list-gpu-code) echo sm_75; echo sm_90 ;;
          *) echo "this nvcc compiles nothing"; exit 1 ;;
        esac"""
    )
    nvcc.chmod(0o755)
    return home


def of_each_cuda(tree: Path, what: str, *machines: tuple[str, dict[str, str]]) -> list[str]:
    """What is printed for an expression, in which `cuda` is the CUDA module, on each of these machines.

    Each is what `fake_cuda` makes, and its environment. In one process: torch's import is what takes time.
    """
    code = ["import os", "cuda, own = build.CUDA, dict(os.environ)"]
    for cuda, environment in machines:
        code += ["os.environ.clear()", f"os.environ.update(own | {environment})", cuda, f"print({what})"]
    out, err = run(tree, "\n".join(code))
    assert err == ""
    answers = out.splitlines()
    assert len(answers) == len(machines), out
    return answers


NO_ARCHS = {"TORCH_CUDA_ARCH_LIST": ""}


def test_what_keeps_cuda_from_being_built_is_a_sentence(stand_in, toolkit):
    what_keeps = [
        (fake_cuda([], cuda=None), {}, "is built without CUDA"),
        (fake_cuda([(9, 0)], cuda=None, hip="6.2"), {}, "is built for ROCm"),
        (fake_cuda([]), {}, "torch sees no GPU"),
        (fake_cuda([(7, 0)]), {}, "need compute capability 7.5 (Turing) or later, got 7.0"),
        (fake_cuda([]), {"TORCH_CUDA_ARCH_LIST": "7.5 7.0"}, "need compute capability 7.5 (Turing) or later, got 7.0"),
        (fake_cuda([]), {"TORCH_CUDA_ARCH_LIST": "Turing"}, "such as '7.5;8.6+PTX', got 'Turing'"),
        (fake_cuda([(7, 5)]), {"CUDA_HOME": "/nonexistent"}, "no CUDA toolkit in /nonexistent, as CUDA_HOME has it"),
        (fake_cuda([(7, 5)], cuda="12.8"), {}, "toolkit is 13.0, and torch"),
        (fake_cuda([(7, 5), (12, 0)]), {}, "toolkit cannot compile for compute capability 12.0"),
        (fake_cuda([(7, 5)]), {"CXX": "/nonexistent/c++"}, "there is no C++ compiler"),
        *((fake_cuda(gpus), {}, "None") for gpus in ([(7, 5)], [(9, 0), (7, 5)], [(7, 0), (7, 5)])),
    ]
    usual = NO_ARCHS | {"CUDA_HOME": str(toolkit)}
    machines = [(cuda, usual | environment) for cuda, environment, _ in what_keeps]
    said = of_each_cuda(stand_in, "cuda.obstacle()", *machines)
    expected = [sentence for _, _, sentence in what_keeps]
    different = [(a, b) for a, b in zip(expected, said, strict=True) if (a != b if a == "None" else a not in b)]
    assert different == []


def test_toolkit_is_where_nvcc_really_is(stand_in, toolkit, tmp_path):
    elsewhere = tmp_path / "links" / "bin"
    elsewhere.mkdir(parents=True)
    (elsewhere / "nvcc").symlink_to(toolkit / "bin" / "nvcc")
    environment = {"CUDA_HOME": "", "CUDA_PATH": "", "PATH": f"{elsewhere}{os.pathsep}{os.environ['PATH']}"}
    what = "next(build._toolkits()).home"
    assert of_each_cuda(stand_in, what, (fake_cuda([(7, 5)]), environment)) == [str(toolkit)]


def test_cuda_is_compiled_for_the_gpus_of_the_machine_or_those_in_the_list(stand_in):
    gpus, what = fake_cuda([(8, 6), (7, 5), (8, 6), (6, 1)]), "cuda.compile_flags()['nvcc'][1:]"
    lists = [{"TORCH_CUDA_ARCH_LIST": chosen} for chosen in ("9.0 12.0+PTX", "12.0+PTX;9.0")]
    of_machine, *of_lists = of_each_cuda(stand_in, what, (gpus, NO_ARCHS), *((gpus, chosen) for chosen in lists))
    assert of_machine == str(["-gencode=arch=compute_75,code=sm_75", "-gencode=arch=compute_86,code=sm_86"])
    in_list = [
        "-gencode=arch=compute_120,code=sm_120",
        "-gencode=arch=compute_120,code=compute_120",
        "-gencode=arch=compute_90,code=sm_90",
    ]
    assert of_lists == [str(in_list)] * 2


def test_the_time_that_is_told_is_that_of_each_kind_of_gpu(stand_in):
    gpus = "import os; os.sched_getaffinity = lambda pid: {0, 1}" + fake_cuda([(7, 5), (7, 5)])
    machines = (gpus, NO_ARCHS), (gpus, {"TORCH_CUDA_ARCH_LIST": "7.5;8.0;9.0;12.0+PTX"})
    assert of_each_cuda(stand_in, "cuda.about_seconds()", *machines) == ["60", "240"]


def test_names_of_the_files_tell_apart_what_must_not_be_confused(stand_in):
    def names(*machines: tuple[str, dict[str, str]]) -> list[list[str]]:
        what = "build.CPU.file_name(), cuda.file_name(), sep='|'"
        return [answer.split("|") for answer in of_each_cuda(stand_in, what, *machines)]

    turing = (fake_cuda([(7, 5)]), NO_ARCHS)
    (cpu, cuda), again, *others = names(
        turing,
        turing,
        (fake_cuda([(7, 5), (8, 6)]), NO_ARCHS),
        (fake_cuda([(7, 5)]), {"TORCH_CUDA_ARCH_LIST": "7.5+PTX"}),
        (fake_cuda([(7, 5)], cuda="12.8"), NO_ARCHS),
    )
    assert ".7.5.torch-" in cuda
    assert again == [cpu, cuda]
    assert [name for name, _ in others[:2]] == [cpu, cpu]
    (stand_in / "csrc" / "cuda" / "new.cuh").write_text("")
    others += names(turing)
    assert others[-1][0] == cpu  # which does not include it
    assert len({cuda, *(name for _, name in others)}) == 5


def test_a_build_for_more_gpus_serves(stand_in, tmp_path):
    serves = [
        ("7.5-8.0-9.0", [(7, 5)], {}, True),
        ("7.5-8.0-9.0", [(9, 0), (8, 6)], {}, True),  # 8.6 runs what is for 8.0
        ("8.6", [(8, 0)], {}, False),
        ("7.5-8.0", [(8, 0), (9, 0)], {}, False),
        ("7.5-8.0+PTX", [(12, 0)], {}, True),
        ("7.5+PTX", [(9, 0)], {}, False),  # which would run, without bf16
        ("8.0+PTX", [(7, 5)], {}, False),
        ("7.5-9.0", [(9, 0)], {"TORCH_CUDA_ARCH_LIST": "7.5+PTX"}, False),  # asked for, to try PTX
        ("7.5+PTX", [(9, 0)], {"TORCH_CUDA_ARCH_LIST": "7.5+PTX"}, True),
    ]
    (name,) = of_each_cuda(stand_in, "cuda.file_name()", (fake_cuda([(7, 5)]), NO_ARCHS))
    machines, expected = [], []
    for i, (archs, gpus, environment, is_found) in enumerate(serves):
        built = tmp_path / str(i) / name.replace(".7.5.", f".{archs}.")
        built.parent.mkdir()
        built.write_text("")
        built.with_name(f"{built.name}.sha256").write_text(hashlib.sha256(b"").hexdigest())
        machines.append((f"{fake_cuda(gpus)}folder = {str(built.parent)!r}", NO_ARCHS | environment))
        expected.append(str(built) if is_found else "None")
    what = "cuda.built_in(build.Path(folder))"
    assert of_each_cuda(stand_in, what, *machines) == expected


def test_cuda_that_does_not_compile_is_a_sentence_and_the_cpu_module_is_untouched(stand_in, toolkit):
    asked = "build.CUDA.unavailable(), build.CUDA.unavailable_on((7, 5)), build.CPU.load().answer, sep='|'"
    out, err = run(stand_in, f"{fake_cuda([(7, 5)])}print({asked})", CUDA_HOME=str(toolkit), **NO_ARCHS)
    sentence, again, answer = out.split("|")
    assert sentence.startswith("the cuda backend's module did not compile (the compiler's messages are in ")
    assert again == sentence
    assert answer == "1"
    assert [line.split(" module")[0] for line in err.splitlines()] == [
        "fastattn: compiling the cuda backend's",
        "fastattn: compiling the cpu backend's",
    ]
    out, err = run(stand_in, fake_cuda([(7, 5)]) + "print(build.CPU.load().answer)", **NO_ARCHS)
    assert (out, err) == ("1", "")


def test_wheel_with_cuda_asked_for_says_why_it_has_none(stand_in):
    wheel, said = wheel_of(stand_in, FASTATTN_BUILD_CUDA="1")
    assert [name.split(".")[0] for name in compiled(wheel)] == ["fastattn/_cpu"]
    assert "installing without the cuda backend's module, which its first use compiles: torch" in said
    _, said = wheel_of(stand_in)
    assert "cuda backend" not in said


def test_a_long_compilation_tells_how_far_it_is(stand_in):
    code = """
import sys
steps = "print('[1/3] c++ /s/a.cpp -o a.o', '[2/3] c++ /s/b.cpp -o b.o', '[3/3] c++ a.o b.o', sep=chr(10)); sys.exit(3)"
build._SECONDS_BETWEEN_LINES = {seconds}
print(*build._run_showing_progress([sys.executable, "-c", "import sys; " + steps], {{}}, {{"a.cpp": 3, "b.cpp": 1}}))
"""
    out, err = run(stand_in, code.format(seconds=0))
    assert out.startswith("3 b'[1/3] c++ /s/a.cpp")
    assert err.splitlines() == [f"fastattn: {done} % of the compilation is done" for done in (75, 100, 100)]
    assert run(stand_in, code.format(seconds=20))[1] == ""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86")
@pytest.mark.parametrize(
    ("best", "bf16", "tiles", "expected"),
    [
        ("AVX2", False, False, {"avx2"}),
        ("AVX512", False, False, {"avx512"}),
        ("AVX512", True, False, {"avx512", "avx512_bf16"}),
        ("AVX512", True, True, {"avx512", "amx"}),  # Intel, whose bf16 is faster by fp32 without leave for tiles
        ("DEFAULT", False, False, {"amx", "avx512_bf16", "avx512", "avx2", "portable"}),
    ],
)
def test_first_use_compiles_what_this_machine_runs_and_build_the_rest(stand_in, best, bf16, tiles, expected):
    machine = f"""
import torch
torch.backends.cpu.get_cpu_capability = lambda: {best!r}
torch.cpu._is_avx512_bf16_supported, torch.cpu._is_amx_tile_supported = lambda: {bf16}, lambda: {tiles}
"""
    code = machine + "print(*build.CPU.for_this_machine().sources, sep='|')"
    assert run(stand_in, code)[0] == "|".join(
        source for source in ALL_SOURCES if Path(source).stem in expected | {"binding"}
    )
    assert run(stand_in, code, FASTATTN_CPU_CAPABILITY="portable")[0] == "|".join(ALL_SOURCES)


ALL_SOURCES = [f"cpu/{name}.cpp" for name in ("binding", "amx", "avx512_bf16", "avx512", "avx2", "portable")]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86")
def test_what_the_first_use_compiled_serves_until_all_is_built(stand_in):
    only_avx2 = "import torch; torch.backends.cpu.get_cpu_capability = lambda: 'AVX2'\n"
    code = only_avx2 + "print(build.CPU.load({whole}).__file__, build.CPU.state(), sep='|')"
    (first, first_state), (whole, whole_state) = (
        run(stand_in, code.format(whole=whole))[0].split("|") for whole in (False, True)
    )
    assert first_state == f"cached: {first}"
    assert whole_state == f"cached: {whole}"
    assert first != whole
    no_compiler = {"CXX": "/nonexistent/c++"}
    assert run(stand_in, code.format(whole=False), **no_compiler)[0] == f"{whole}|{whole_state}"
    Path(whole).unlink()
    assert run(stand_in, code.format(whole=False), **no_compiler)[0] == f"{first}|{first_state}"


TEE = "sys.stderr = type('Tee', (), {'write': lambda *_: None, 'flush': lambda _: None})()"


@pytest.mark.parametrize("without", ["sys.stderr = None", "sys.stderr.close()", TEE])
def test_progress_needs_no_stderr(stand_in, without):
    code = f"""
import pathlib, sys
{without}
sys.path.append(pathlib.Path("/of/no/effect"))  # Python ignores what is no str
assert "/of/no/effect" not in build._child_environment(build.CPU)["PYTHONPATH"]
build._SECONDS_BETWEEN_LINES = 0
with build.progress_shown("the work", 2) as show_more:
    show_more(1)
build.say("done")
print("right")
"""
    assert run(stand_in, code) == ("right", "")
