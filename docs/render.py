"""Writes the generated parts of pages, which are output of commands, pictures and notebooks: python -m docs.render."""

from __future__ import annotations

import io
import json
import runpy
import shlex
import sys
import warnings
from contextlib import redirect_stdout
from functools import partial
from unittest import mock

from docs import measured, pages, pictures


def output_of(command: str) -> str:
    """The output of `fastattn ...`, `python -m MODULE ...` or `python FILE ...`; RuntimeError if the command fails."""
    path = sys.path
    match shlex.split(command):
        case ["fastattn" as program, *args] | ["python", "-m", program, *args]:
            run = partial(runpy.run_module, program, alter_sys=True)
        case ["python", program, *args]:
            file = pages.FOLDER.parent / program
            run, path = partial(runpy.run_path, str(file)), [str(file.parent), *sys.path]
        case _:
            raise RuntimeError(f"command must be fastattn or python, got {command}")
    with (
        redirect_stdout(io.StringIO()) as printed,
        mock.patch.object(sys, "argv", [program, *args]),
        mock.patch.object(sys, "path", path),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)  # it runs a second time here
        try:
            run(run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"{command} ended with {end.code}") from end
    return printed.getvalue()


def main() -> None:
    for name, draw in measured.CHARTS.items():
        (pages.FOLDER / "pictures" / name).write_text(draw())
    for path in pages.NOTEBOOKS:
        path.write_text(json.dumps(pages.run_notebook(path), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for path in pages.GUIDES:
        page = path.read_text()
        outputs = {command: output_of(command) for command, _ in pages.generated_parts(page)}
        path.write_text(pages.with_generated_parts(page, outputs))
        if any(block.pictures for block in pages.python_blocks(page)):  # else there is no need to run it
            for block, _, namespace in pages.run(path):
                for name in block.pictures:
                    (pages.FOLDER / "pictures" / name).write_text(pictures.draw(name, namespace))


if __name__ == "__main__":
    main()
