"""Adds to pyproject.toml what it cannot say: the compiled modules, built where torch and their compilers are at hand.

The module of the cpu backend is built wherever it can be, that of cuda where FASTATTN_BUILD_CUDA=1 asks for it, since
it takes minutes: for the GPUs in TORCH_CUDA_ARCH_LIST, or else of this machine. Everywhere else the installation is
pure Python, and the first use of a module compiles it; FASTATTN_REQUIRE_COMPILED=1 makes that an error, for wheels that
are to be published.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, find_packages, setup
from setuptools.errors import CompileError

HERE = Path(__file__).resolve().parent
REQUIRE_COMPILED = os.environ.get("FASTATTN_REQUIRE_COMPILED") == "1"


def load_by_path(path: Path) -> ModuleType:
    """The module in that file; importing it the usual way would import fastattn, and so torch."""
    spec = importlib.util.spec_from_file_location(f"fastattn_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where its dataclasses look for it
    spec.loader.exec_module(module)
    return module


build = load_by_path(HERE / "fastattn" / "backends" / "build.py")


def compiled_modules() -> dict:
    """The arguments of setup() that build the compiled modules; a sentence on stderr tells of each that cannot be."""
    wanted = build.MODULES.values() if os.environ.get("FASTATTN_BUILD_CUDA") == "1" else (build.CPU,)
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: a torch whose shared libraries are missing
        for module in wanted:
            say_without(module, f"torch cannot be imported here ({error})")
        return {}
    buildable = []
    for module in wanted:
        if why := module.obstacle():
            say_without(module, why)
        else:
            os.environ |= module.environment()  # which cpp_extension reads when it is imported
            buildable.append(module)
    return built(buildable) if buildable else {}


def built(modules: list) -> dict:
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    def module_of(name: str) -> object:
        return next(module for module in modules if module.stem == name.rpartition(".")[2])

    class Build(BuildExtension):
        def get_ext_filename(self, fullname: str) -> str:
            return os.path.join(*fullname.split(".")[:-1], module_of(fullname).file_name())

        def build_extension(self, ext: Extension) -> None:
            module, target = module_of(ext.name), Path(self.get_ext_fullpath(ext.name))
            for other in set(target.parent.glob(module.any_file)) - {target}:
                other.unlink()  # left in build/ by another torch or older sources, it would travel in the wheel
            os.makedirs(self.build_temp, exist_ok=True)
            ext.extra_link_args += module.linker_flags(self.build_temp)
            try:
                super().build_extension(ext)
            except RuntimeError as error:  # what torch makes of a compile error; `optional` knows only this one:
                raise CompileError(str(error)) from error

    sources = build.source_dir().relative_to(HERE)
    extensions = [
        (CUDAExtension if "nvcc" in module.flags else CppExtension)(
            module.name,
            [str(sources / source) for source in module.sources],
            depends=[str(sources / header) for header in module.headers()],
            extra_compile_args=module.compile_flags(),
            py_limited_api=module.every_torch,
            optional=not REQUIRE_COMPILED,  # a failed compile leaves a pure installation
        )
        for module in modules
    ]
    arguments = {"ext_modules": extensions, "cmdclass": {"build_ext": Build}}
    if all(module.every_torch for module in modules):  # then the wheel is for every Python too
        arguments["options"] = {"bdist_wheel": {"py_limited_api": "cp310"}}
    return arguments


def say_without(module: object, why: str) -> None:
    if REQUIRE_COMPILED:
        sys.exit(f"fastattn: FASTATTN_REQUIRE_COMPILED=1 asks for {module}, which cannot be compiled: {why}")
    print(f"fastattn: installing without {module}, which its first use compiles: {why}", file=sys.stderr)


def long_description() -> str:
    """README.md for package indexes, which have no files beside it: links and pictures lead to this version's tag."""
    readme, project, package = (
        (HERE / path).read_text(encoding="utf-8") for path in ("README.md", "pyproject.toml", "fastattn/__init__.py")
    )
    source = re.search(r'^Source = "(.+)"$', project, re.MULTILINE)[1]
    version = re.search(r'^__version__ = "(.+)"$', package, re.MULTILINE)[1]
    return re.sub(
        r"(!\[[^\]]*)?\]\((?!\w+:|#)",
        lambda link: f"{link[1] or ''}]({source}/{'raw' if link[1] else 'blob'}/v{version}/",
        readme,
    )


setup(
    packages=[*find_packages(include=["fastattn", "fastattn.*"]), "fastattn._csrc"],
    long_description=long_description(),
    long_description_content_type="text/markdown",
    **compiled_modules(),
)
