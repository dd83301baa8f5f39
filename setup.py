"""Adds to pyproject.toml what it cannot say: the native CPU module, built where torch and a C++ compiler are at hand.

Everywhere else the installation is pure Python, and the first use of the native backend compiles the module.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from setuptools import find_packages, setup
from setuptools.errors import CompileError

HERE = Path(__file__).resolve().parent


def load_by_path(path: Path) -> ModuleType:
    """The module in that file; importing it the usual way would import fastattn, and so torch."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


native = load_by_path(HERE / "fastattn" / "backends" / "native" / "build.py")


def native_module() -> dict:
    """The arguments of setup() that build the native module; none, and a sentence on stderr, where that cannot be."""
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except (ImportError, OSError) as error:  # OSError: a torch whose shared libraries are missing
        return without_native_module(f"torch cannot be imported here ({error})")
    if why := native.obstacle():
        return without_native_module(why)

    class BuildNative(BuildExtension):
        def get_ext_filename(self, fullname: str) -> str:
            return os.path.join(*fullname.split(".")[:-1], native.file_name())

        def build_extension(self, ext: CppExtension) -> None:
            target = Path(self.get_ext_fullpath(ext.name))
            for other in set(target.parent.glob(native.ANY_FILE)) - {target}:
                other.unlink()  # left in build/ by another torch or older sources, it would travel in the wheel
            try:
                super().build_extension(ext)
            except RuntimeError as error:  # what torch makes of a compile error; `optional` knows only this one:
                raise CompileError(str(error)) from error

    sources = native.source_dir().relative_to(HERE)
    extension = CppExtension(
        native.MODULE,
        [str(sources / source) for source in native.SOURCES],
        depends=[str(sources / header) for header in native.headers()],
        extra_compile_args=native.COMPILE_FLAGS,
        extra_link_args=native.LINK_FLAGS,
        optional=True,  # a failed compile leaves a pure installation
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildNative}}


def without_native_module(why: str) -> dict:
    print(f"fastattn: installing without the native CPU module, which its first use compiles: {why}", file=sys.stderr)
    return {}


setup(packages=[*find_packages(include=["fastattn", "fastattn.*"]), "fastattn._csrc"], **native_module())
