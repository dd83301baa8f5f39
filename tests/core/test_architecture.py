"""Layers of the package: which module may import which, read from the source."""

import ast
import re
from pathlib import Path

import pytest

import fastattn

PACKAGE = Path(__file__).parents[2] / "fastattn"
MODULES = sorted(PACKAGE.rglob("*.py"))

MAY_IMPORT = {  # layer -> what it imports besides itself: whole layers, or single modules of another one
    "picture": set(),
    "blocks": {"parallel"},  # for type checkers
    "spec": {"picture"},
    "machine": {""},
    "backends.reference": {"spec"},
    "backends.aten": {
        "spec",
        "backends.blocked",
        "backends.kept_results",
        "backends.rectangles",
        "backends.reference",
    },
    "backends.rectangles": set(),
    "backends.blocked": {"spec", "backends.kept_results", "backends.reference"},
    "backends.kept_results": set(),
    "backends.diagonals": {"spec"},
    "backends.gradients": {"spec"},
    "backends.build": set(),
    "backends.record": {"machine", "backends.build"},
    "backends.choice": {"spec", "backends.record"},
    "backends.compiling": {"backends.build"},
    "backends.selfcheck": {
        "spec",
        "backends.build",
        "backends.compiling",
        "backends.cpu",
        "backends.record",
        "backends.reference",
    },
    "backends.cpu": {"spec", "backends.gradients", "backends.build"},
    "backends.cuda": {"spec", "backends.diagonals", "backends.gradients", "backends.build"},
    "backends.triton": {
        "spec",
        "backends.compiling",
        "backends.diagonals",
        "backends.gradients",
        "backends.kept_results",
        "backends.record",
    },
    "backends.hopper": {
        "spec",
        *(
            f"backends.triton.{module}"
            for module in (
                "configs",
                "flash_backward",
                "flash_decoding",
                "launches",
                "recompute",
                "rules",
                "scores",
                "tiles",
                "visibility",
            )
        ),
    },
    "backends": {
        "spec",
        *(
            f"backends.{module}"
            for module in (
                "aten",
                "build",
                "choice",
                "cpu",
                "cuda",
                "hopper",
                "record",
                "reference",
                "selfcheck",
                "triton",
            )
        ),
    },
    "derivatives": {"spec", "backends.reference"},
    "validation": {"spec"},
    "plan": {"spec", "validation", "backends", "backends.choice", "backends.record", "backends.selfcheck"},
    "ops": {"spec", "validation", "backends", "backends.record", "derivatives", "plan"},
    "decoding": {"spec"},
    "api": {
        "spec",
        "validation",
        "backends",
        "backends.selfcheck",
        "plan",
        "ops",
        "decoding",
        "blocks",
        "parallel",  # late
    },
    "parallel": {"spec", "validation", "backends", "plan", "ops", "blocks", "api", "nn"},
    "paged": {"spec", "validation", "backends", "plan", "ops", "blocks", "api"},
    "sdpa": {"spec", "api"},
    "nn": {"spec", "validation", "plan", "blocks", "api", "paged"},
    "flash_attn": {"spec", "api", "paged", "nn.checks", "validation"},
    "integrations": {"spec", "blocks", "api", "sdpa", "nn", "backends", "backends.record"},
    "swap": {"backends", "nn", "integrations"},
    "testing": {"spec", "plan", "api", "backends.reference"},
    "": {"spec", "api", "paged", "sdpa", "flash_attn", "backends", "nn", "swap", "integrations", "parallel"},
    "bench": {
        "",
        "machine",
        "spec",
        "testing",
        "backends",
        *(
            f"backends.{module}"
            for module in ("build", "choice", "compiling", "cpu", "record", "reference", "selfcheck")
        ),
        *(f"backends.triton{module}" for module in ("", ".configs", ".launches")),  # whose tiles are tried
    },
    "demo": {"", "bench"},
    "__main__": {
        "",
        "machine",
        "spec",
        "bench",
        "demo",
        "integrations",
        *(f"backends{module}" for module in ("", ".build", ".cpu", ".cuda", ".record")),
    },
}


def layer_of(parts: tuple[str, ...]) -> str:
    """The longest prefix of a dotted name that is a layer."""
    for length in range(len(parts), -1, -1):
        if (name := ".".join(parts[:length])) in MAY_IMPORT and (name or not parts):
            return name
    raise AssertionError(f"{'.'.join(parts)} belongs to no layer: add it to MAY_IMPORT")


def parts_of(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imported_modules(path: Path) -> set[tuple[str, ...]]:
    """The modules of the package that a module names in import statements, by the parts of their names."""
    package = parts_of(path) if path.name == "__init__.py" else parts_of(path)[:-1]
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = (*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else ()))
            elif node.module and node.module.split(".")[0] == "fastattn":
                base = tuple(node.module.split(".")[1:])
            else:
                continue
            for alias in node.names:
                whole = (*base, alias.name)
                target = PACKAGE.joinpath(*whole)
                is_module = target.is_dir() or target.with_suffix(".py").exists()
                modules.add(whole if is_module else base)
        elif isinstance(node, ast.Import):
            modules |= {tuple(a.name.split(".")[1:]) for a in node.names if a.name.split(".")[0] == "fastattn"}
    return modules


@pytest.mark.parametrize("path", MODULES, ids=lambda p: ".".join(parts_of(p)) or "fastattn")
def test_module_imports_only_what_its_layer_may(path):
    layer = layer_of(parts_of(path))
    allowed = MAY_IMPORT[layer] | {layer}
    imported = imported_modules(path)
    assert [".".join(parts) for parts in imported if not {layer_of(parts), ".".join(parts)} & allowed] == []


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_layer_imports_all_that_it_may(layer):
    """The table says what is so: what a layer no longer imports is taken from its line."""
    imported = set().union(*(imported_modules(path) for path in MODULES if layer_of(parts_of(path)) == layer))
    assert MAY_IMPORT[layer] <= {name for parts in imported for name in (layer_of(parts), ".".join(parts))}


def test_every_layer_exists():
    layers = {layer_of(parts_of(path)) for path in MODULES}
    assert layers == set(MAY_IMPORT)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: ".".join(parts_of(p)) or "fastattn")
def test_no_forbidden_names(path):
    """Block pointers are gone from Triton 3.9; a bare except hides bugs; a bool called mask hides its polarity."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            assert node.attr not in {"make_block_ptr", "advance"}
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None
            caught = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)}
            assert not caught & {"Exception", "BaseException"}


MAKING = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"}
MAKING |= {"as_tensor", "empty_strided", "normal", "randint", "randperm", "scalar_tensor"}
ON_THE_DEFAULT_DEVICE = {  # modules, and what makes tensors for the caller
    *("bench", "demo", "testing", "backends.hopper"),
    *("nn.positions", "spec"),
}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: ".".join(parts_of(p)) or "fastattn")
def test_tensors_are_made_on_a_device_that_is_named(path):
    """torch.set_default_device may have named another one than that of the arguments."""
    module = ".".join(parts_of(path))
    if any(f"{module}.".startswith(f"{name}.") for name in ON_THE_DEFAULT_DEVICE):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        made = isinstance(node, ast.Call) and re.fullmatch(r"torch\.(\w+)", ast.unparse(node.func))
        if made and made[1] in MAKING:
            assert "device" in {keyword.arg for keyword in node.keywords}, f"line {node.lineno}: {ast.unparse(node)}"


def test_no_catch_all_modules():
    assert not {"utils", "util", "common", "helpers", "misc"} & {path.stem for path in MODULES}


def test_dir_shows_what_users_call():
    assert set(dir(fastattn)) == {*fastattn.__all__, "flash_attn", "nn", "parallel", "__version__"}
