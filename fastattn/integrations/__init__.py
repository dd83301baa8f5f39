"""Integration into models of other libraries, which need not know of fastattn."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_MODULE = "transformers.modeling_utils"  # without which transformers makes no model


def register_with_transformers() -> None:
    """Makes `attn_implementation="fastattn"` known to transformers: now, or as soon as it is imported."""
    if _MODULE in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AtImport())


def _register() -> None:
    with suppress(ImportError):  # a transformers before version 5 goes on without
        from .transformers import register

        register()


class _AtImport(MetaPathFinder):
    """Finds the module as others do, once, and registers when it has been executed."""

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register()

            spec.loader.exec_module = execute_and_register
        return spec
