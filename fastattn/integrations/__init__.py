"""Integration into models of other libraries, which need not know of fastattn."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def register_with_transformers() -> None:
    """Makes `attn_implementation="fastattn"` known to transformers and its server: now, or when they are imported."""
    for name, integration in _REGISTER_AFTER.items():
        if name in sys.modules:
            _register(integration)
        else:
            sys.meta_path.insert(0, _AtImport(name, integration))


_REGISTER_AFTER = {
    "transformers.modeling_utils": "transformers",  # without which transformers makes no model
    "transformers.cli.serving.model_manager": "serving",  # without which its server loads none
}


def _register(integration: str) -> None:
    with suppress(ImportError):  # a transformers before version 5 goes on without
        import_module(f".{integration}", __name__)  # which registers what it has


class _AtImport(MetaPathFinder):
    """Finds a module as others do, until it is executed, and registers when it has been."""

    def __init__(self, name: str, integration: str) -> None:
        self.name, self.integration = name, integration

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        others = (finder for finder in sys.meta_path if not isinstance(finder, _AtImport))
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                with suppress(ValueError):  # where it was imported once more
                    sys.meta_path.remove(self)
                execute(module)
                _register(self.integration)

            spec.loader.exec_module = execute_and_register
        return spec
