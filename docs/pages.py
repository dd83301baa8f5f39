"""Runs the Python code of a page or a notebook in one namespace, and finds its output, pictures and generated parts."""

from __future__ import annotations

import ast
import io
import json
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

FOLDER = Path(__file__).parent
PAGES = sorted(FOLDER.glob("*.md"))
NOTEBOOKS = sorted(FOLDER.glob("notebooks/*.ipynb"))
GUIDES = [*PAGES, FOLDER.parent / "README.md", FOLDER.parent / "CONTRIBUTING.md"]

_BLOCK = re.compile(r"^```(\w+).*\n((?:.*\n)*?)^```$", re.MULTILINE)
_PRINTED = re.compile(r"\s*^```text.*\n((?:.*\n)*?)^```$", re.MULTILINE)
_PICTURE = re.compile(r"\]\(pictures/(.+?\.svg)\)")
_GENERATED = re.compile(r"(?<=<!-- run: )(.+?)( -->\n)((?:.*\n)*?)(?=<!-- end -->)")


@dataclass(frozen=True)
class Block:
    """One ```python block.

    line: the line of the page where its code begins.
    printed: the output that the page shows, the ```text block right after it; "" without one.
    pictures: the names of the files in pictures/ that the page shows between this block and the next one.
    """

    code: str
    line: int
    printed: str
    pictures: tuple[str, ...]


def python_blocks(page: str) -> list[Block]:
    """The ```python blocks of a page, in order."""
    fences = [fence for fence in _BLOCK.finditer(page) if fence[1] == "python"]
    starts = [*(fence.start() for fence in fences), len(page)]
    blocks = []
    for fence, end in zip(fences, starts[1:], strict=True):
        printed = _PRINTED.match(page, fence.end())
        pictures = _PICTURE.findall(page, fence.end(), end)
        line = page.count("\n", 0, fence.start(2)) + 1
        blocks.append(Block(fence[2], line, printed[1] if printed else "", tuple(pictures)))
    return blocks


def shell_lines(page: str) -> list[str]:
    """Every command of the ```console blocks of a page, without prompts and comments."""
    blocks = (fence[2] for fence in _BLOCK.finditer(page) if fence[1] == "console")
    lines = (line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ "))
    return [line.partition(" #")[0].strip() for line in lines]


_AS_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
"""What `torchrun --nproc-per-node 1` would set, with a port that is free."""


def run(path: Path) -> Iterator[tuple[Block, str, dict[str, object]]]:
    """Yields each block of the page at `path` once it has run, with its output and the namespace of the page."""
    namespace: dict[str, object] = {"__name__": path.stem}
    for block in python_blocks(path.read_text()):
        code = compile("\n" * (block.line - 1) + block.code, str(path), "exec")  # tracebacks name the page's line
        with redirect_stdout(io.StringIO()) as printed, mock.patch.dict(os.environ, _AS_TORCHRUN):
            exec(code, namespace)
        yield block, printed.getvalue(), namespace


def run_notebook(path: Path) -> dict:
    """The notebook at `path` with the outputs of its code: what it prints, and the value of a last expression."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    namespace: dict[str, object] = {"__name__": path.stem}
    code_cells = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    for count, cell in enumerate(code_cells, start=1):
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(tree, f"{path}[{count}]", "exec"), namespace)
            value = last and eval(compile(ast.Expression(last.value), f"{path}[{count}]", "eval"), namespace)
        text = printed.getvalue().splitlines(keepends=True)
        cell["execution_count"] = count
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
        if value is not None:
            data = {"text/plain": repr(value).splitlines(keepends=True)}
            if hasattr(value, "_repr_svg_"):
                data["image/svg+xml"] = value._repr_svg_()  # one line of the file
            result = {"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"}
            cell["outputs"].append(result)
    return notebook


def generated_parts(page: str) -> list[tuple[str, str]]:
    """(command, text) of each part of a page between `<!-- run: command -->` and `<!-- end -->`."""
    return [(part[1], part[3]) for part in _GENERATED.finditer(page)]


def with_generated_parts(page: str, output_of: dict[str, str]) -> str:
    """The page with the output of each command in its place."""
    return _GENERATED.sub(lambda part: f"{part[1]}{part[2]}{output_of[part[1]]}", page)
