"""Fills in what the pages do not say themselves: the output of commands, and the pictures: python -m docs.render."""

from __future__ import annotations

import io
import runpy
import shlex
import sys
from contextlib import redirect_stdout
from unittest import mock

from docs import pages, pictures


def output_of(command: str) -> str:
    """What `fastattn ...` or `python -m MODULE ...` prints."""
    words = shlex.split(command)
    module, *args = ["fastattn", *words[1:]] if words[0] == "fastattn" else words[2:]
    with redirect_stdout(io.StringIO()) as printed, mock.patch.object(sys, "argv", [module, *args]):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"{command} ended with {end.code}") from end
    return printed.getvalue()


def main() -> None:
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
