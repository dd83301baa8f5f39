"""Packaging and the native module's build: what is installed where, and that no build hangs, repeats or surprises.

The C++ here is a stand-in without torch's headers, so that a build takes seconds; every test of the native backend
compiles the real sources.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
BUILD_FILE = Path("fastattn", "backends", "native", "build.py")
PACKAGED = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "fastattn", "csrc")

STAND_IN = """
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native_cpu"};
PyMODINIT_FUNC PyInit__native_cpu() {
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


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what a wheel is made from, with the real C++; no test writes into the repository."""
    copy = tmp_path / "tree"
    copy.mkdir()
    for name in PACKAGED:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(REPOSITORY / name, copy / name)
    return copy


@pytest.fixture
def stand_in(tree: Path) -> Path:
    """The same with the stand-in for the C++."""
    for source in (tree / "csrc").rglob("*.cpp"):
        source.write_text("")
    (tree / "csrc" / "binding.cpp").write_text(STAND_IN)
    return tree


@pytest.fixture
def no_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which torch cannot be imported, as in pip's isolated builds."""
    hidden = tmp_path / "hidden" / "torch"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text('raise ImportError("no torch here")')
    return {"PYTHONPATH": str(hidden.parent)}


def start(tree: Path, code: str, **environment: str) -> subprocess.Popen:
    """A Python that runs `code` in `tree`, with that tree's build.py as `build` and a cache beside the tree."""
    return subprocess.Popen(
        [sys.executable, "-c", LOAD_BUILD + code],
        cwd=tree,
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(tree.parent / "cache"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> tuple[str, str]:
    """stdout and stderr, stripped, of a process that must succeed."""
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return out.strip(), err.strip()


def wheel_of(tree: Path, **environment: str) -> tuple[zipfile.ZipFile, str]:
    """The wheel that pip makes there without a network, and all that was said meanwhile."""
    options = ["-v", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", "dist"]
    made = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, "."],
        cwd=tree,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert made.returncode == 0, made.stdout
    (wheel,) = (tree / "dist").glob("*.whl")
    return zipfile.ZipFile(wheel), made.stdout


def change_answer(tree: Path) -> None:
    (tree / "csrc" / "binding.cpp").write_text(STAND_IN.replace('"answer", 1', '"answer", 2'))


def compiled(wheel: zipfile.ZipFile) -> list[str]:
    return [name for name in wheel.namelist() if name.endswith((".so", ".pyd"))]


def test_wheel_without_torch_is_pure_quick_and_whole(tree, no_torch):
    started = time.monotonic()
    wheel, said = wheel_of(tree, **no_torch)
    assert time.monotonic() - started < 20
    assert "no torch here" in said
    assert Path(wheel.filename).name.endswith("-py3-none-any.whl")
    assert compiled(wheel) == []
    packed = set(wheel.namelist())
    sources = {path.relative_to(tree / "csrc").as_posix() for path in (tree / "csrc").rglob("*.*")}
    assert {"binding.cpp", "mask.h"} <= sources
    assert {name.removeprefix("fastattn/_csrc/") for name in packed if name.startswith("fastattn/_csrc/")} == sources
    modules = {path.relative_to(tree).as_posix() for path in (tree / "fastattn").rglob("*.py")}
    assert modules <= packed


def test_sdist_can_be_built_again(tree, tmp_path, no_torch):
    sdist = [sys.executable, "setup.py", "-q", "sdist"]
    subprocess.run(sdist, cwd=tree, env={**os.environ, **no_torch}, check=True, capture_output=True)
    shutil.unpack_archive(next((tree / "dist").glob("*.tar.gz")), tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    from_sdist, _ = wheel_of(unpacked, **no_torch)
    from_tree, _ = wheel_of(tree, **no_torch)
    assert set(from_sdist.namelist()) == set(from_tree.namelist())


def test_wheel_without_a_compiler_is_pure_and_says_so(stand_in):
    wheel, said = wheel_of(stand_in, CXX="/nonexistent/c++")
    assert compiled(wheel) == []
    assert "installing without the native CPU module" in said
    assert "no C++ compiler: '/nonexistent/c++' is not on the PATH" in said


def test_wheel_survives_a_compile_error(stand_in):
    (stand_in / "csrc" / "binding.cpp").write_text("this is not C++")
    wheel, _ = wheel_of(stand_in)
    assert compiled(wheel) == []


def test_wheel_with_torch_carries_the_one_module_that_is_then_loaded(stand_in, tmp_path):
    wheel_of(stand_in)
    shutil.rmtree(stand_in / "dist")
    change_answer(stand_in)
    wheel, _ = wheel_of(stand_in)
    (module,) = compiled(wheel)
    wheel.extractall(tmp_path / "installed")
    code = "print(build.CPU.load().answer, build.CPU.load().__file__, build.CPU.state(), sep='\\n')"
    out, err = finish(start(tmp_path / "installed", code, CXX="/nonexistent/c++"))
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
    first_out, first_err = finish(start(stand_in, code))
    assert first_out.startswith("not built yet: `fastattn build`")
    assert first_out.endswith("|1|True|None")
    assert first_err.startswith("fastattn: compiling the native CPU module for torch")
    assert len(first_err.splitlines()) == 1
    next_out, next_err = finish(start(stand_in, code, CXX="/nonexistent/c++"))
    assert next_out.startswith(f"cached: {stand_in.parent / 'cache'}")
    assert next_out.endswith("|1|True|None")
    assert next_err == ""


def test_two_processes_at_once_compile_once(stand_in):
    both = [start(stand_in, "print(build.CPU.load().answer)") for _ in range(2)]
    results = [finish(process) for process in both]
    assert [out for out, _ in results] == ["1", "1"]
    assert sum("compiling" in err for _, err in results) == 1
    assert not list(stand_in.parent.glob("cache/*/*.build-*"))


def test_module_for_other_sources_or_another_torch_is_never_loaded(stand_in):
    (stand_in / "fastattn" / "_native_cpu.000000000000.torch-1.0.so").write_bytes(b"would crash")
    out, err = finish(start(stand_in, "print(build.CPU.load().answer)"))
    assert out == "1"
    assert "the installed one is for another torch or other sources" in err
    change_answer(stand_in)
    out, err = finish(start(stand_in, "print(build.CPU.load().answer)"))
    assert out == "2"
    assert "compiling" in err
    out, _ = finish(start(stand_in, "import torch; torch.__version__ += '.other'; print(build.CPU.state())"))
    assert out.startswith("not built yet")
    (stand_in / "csrc" / "new.h").write_text("")
    out, _ = finish(start(stand_in, "print(build.CPU.state())"))
    assert out.startswith("not built yet")


def test_compile_error_is_a_sentence_with_a_log_and_is_not_repeated(stand_in):
    (stand_in / "csrc" / "binding.cpp").write_text("this is not C++")
    code = "print(build.CPU.unavailable()); print(build.CPU.unavailable()); print(build.CPU.state())"
    out, err = finish(start(stand_in, code))
    sentence, again, state = out.splitlines()
    assert sentence.startswith("the native CPU module did not compile (the compiler's messages are in ")
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
    out, err = finish(start(stand_in, code, CXX="/nonexistent/c++"))
    raised, sentence, state = out.split("|")
    assert (
        raised
        == sentence
        == "there is no C++ compiler: '/nonexistent/c++' is not on the PATH (install g++, or set CXX)"
    )
    assert state == f"cannot be built: {sentence}"
    assert err == ""


def test_missing_ninja_is_a_sentence(stand_in):
    out, err = finish(start(stand_in, "import sys; sys.modules['ninja'] = None; print(build.CPU.unavailable())"))
    assert out == "the package ninja, which torch builds with, is not installed (pip install ninja)"
    assert err == ""


def test_cache_that_cannot_be_written_is_a_sentence(stand_in, tmp_path):
    (tmp_path / "file").write_text("")
    out, err = finish(start(stand_in, "print(build.CPU.unavailable())", TORCH_EXTENSIONS_DIR=str(tmp_path / "file")))
    assert out.startswith(f"the native CPU module cannot be kept in {tmp_path / 'file' / 'fastattn'}")
    assert out.endswith("set TORCH_EXTENSIONS_DIR elsewhere")
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
    assert finish(start(stand_in, "print(build.cache_dir())", **environment))[0] == expected


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
    out, err = finish(start(stand_in, code))
    assert (
        out
        == "the native CPU module is not built yet, and a DataLoader worker builds nothing: run `fastattn build` first"
    )
    assert err == ""
    assert not (stand_in.parent / "cache").exists()


def test_lock_keeps_others_out_and_dies_with_its_process(stand_in):
    take_lock = """
import os, time
from pathlib import Path
print("waits", flush=True)
with build._only_builder_of(Path("module.so")):
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
        if name.partition(".")[0] in {"triton", "ninja"} or name == "fastattn._native_cpu":
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
