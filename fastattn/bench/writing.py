"""Arguments of commands: whole numbers, and files of results, which are replaced whole.

A file is refused before anything is measured where it cannot be written.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..machine import machine, versions


def positive_int(text: str) -> int:
    """The type of an argument of argparse: a whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text}")
    return int(text)


def file_to_write(text: str) -> Path:
    """The type of an argument of argparse: a path at which a file can be written, which is tried.

    Raises:
        argparse.ArgumentTypeError: it cannot.
    """
    path = Path(text)
    try:
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"must be in an existing folder, got {text}")
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"must be a file, got the folder {text}")
        part = _part(path)
        with part.open("ab"):  # which changes nothing in a file that is there
            pass
        if part != path:
            part.unlink()
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(f"{path.name} is read-only")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"must be a file that can be written, got {text} ({_why(error)})") from error
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write at; what stands there at the end takes the place of `path`, unless there was an exception."""
    part = _part(path)
    try:
        yield part
        if part != path:
            os.replace(part, path.resolve())  # a link stays one
    finally:
        if part != path:
            part.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    """Writes results, whole or not at all; where that fails they are printed, so that they are not lost.

    Raises:
        OSError: why it failed.
    """
    try:
        with replacing(path) as part:
            part.write_text(text)
    except OSError as error:
        print(text, flush=True)
        raise OSError(f"{path} could not be written, so the results are printed above ({_why(error)})") from error


def write_rows(path: Path | None, rows: list[dict[str, object]]) -> None:
    """Writes what was measured on the CPU of this machine, if there is a path."""
    if path is not None:
        write(path, json.dumps({"machine": machine("cpu"), "versions": versions(), "rows": rows}, indent=1) + "\n")


def _part(path: Path) -> Path:
    """A file beside `path`, with its suffix; `path` itself where it is no regular file, or a name of one in /dev."""
    if (path.exists() and not path.is_file()) or path.absolute().parts[1:2] in (("dev",), ("proc",)):
        return path
    path = path.resolve()
    return path.with_name(f".{path.stem}.part-{os.getpid()}{path.suffix}")


def _why(error: OSError) -> str:
    return error.strerror or str(error)
