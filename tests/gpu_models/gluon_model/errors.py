"""Errors that the model raises where a kernel does what a GPU does not define."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_HERE = str(Path(__file__).parent)


class KernelError(AssertionError):
    """A kernel did something wrong; the message names who, what and where."""


class DeadlockError(KernelError):
    """Every partition waits, and nothing is under way that could end it."""


def source_line() -> str:
    """file:line of the innermost code that is not the model's."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return "?" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
