"""Triton's interpreter in little more than half the time, most of which it spends on looking for what it has replaced.

For each call of a function in a kernel it goes through all names of triton.language, in order, for the builtins that it
puts its own in the place of. Which names those are does not change.
"""

from __future__ import annotations

import functools
import inspect

from triton.language.core import is_builtin
from triton.runtime import interpreter


@functools.cache
def _names_of_builtins(package: object) -> list[str]:
    """Asked for first before anything in that package is replaced."""
    return [name for name, member in inspect.getmembers(package) if is_builtin(member)]


def _patch_builtin(package: object, *context: object) -> None:
    for name in _names_of_builtins(package):
        member = getattr(package, name)
        if is_builtin(member):  # else it has been replaced
            interpreter._patch_attr(package, name, member, *context)


def install() -> None:
    """Does so in this process."""
    interpreter._patch_builtin = _patch_builtin
