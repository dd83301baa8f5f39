"""Copies of the modules of the Triton and Hopper backends, imported over the model."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import fastattn
import fastattn.backends.gradients
import fastattn.spec

from . import gluon, launch

_COPY = "fastattn_on_the_model"  # the package that holds the copies, under the names they have in fastattn


def modelled(name: str) -> ModuleType:
    """The copy of fastattn.backends.`name`, such as "hopper.forward"."""
    _import_all()
    return sys.modules[f"{_COPY}.backends.{name}"]


@functools.cache
def _import_all() -> None:
    """All at once: functions that import when they are called find the copies, too."""
    root, backends = _package(_COPY, fastattn), _package(f"{_COPY}.backends", fastattn.backends)
    root.backends, root.spec, backends.gradients = backends, fastattn.spec, fastattn.backends.gradients
    sys.modules[f"{_COPY}.spec"] = fastattn.spec
    sys.modules[f"{_COPY}.backends.gradients"] = fastattn.backends.gradients
    sys.modules[f"{_COPY}.backends.hopper.gluon"] = gluon
    with instead_of_triton():
        for folder in ("triton", "hopper"):
            package = importlib.import_module(f"{_COPY}.backends.{folder}")
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{package.__name__}.{module.name}")


def _package(name: str, original: ModuleType) -> ModuleType:
    """An empty package that finds its modules where the original does."""
    package = sys.modules[name] = ModuleType(name)
    package.__path__ = original.__path__
    return package


@contextmanager
def instead_of_triton() -> Iterator[None]:
    """`import triton` gives what the Triton backend uses of it, on the model."""
    language, triton = ModuleType("triton.language"), ModuleType("triton")
    vars(language).update(gluon.names_of_a_language())
    triton.language, triton.jit, triton.JITFunction = language, launch.jit, launch.JITFunction
    triton.cdiv = lambda x, y: -(-x // y)
    triton.next_power_of_2 = lambda n: 1 << max(n - 1, 0).bit_length()
    triton.knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=True))  # its own kernels take the smallest tiles
    names = ("triton", "triton.language")
    before = [sys.modules.get(name) for name in names]
    sys.modules.update(zip(names, (triton, language), strict=True))
    try:
        yield
    finally:
        for name, module in zip(names, before, strict=True):
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
