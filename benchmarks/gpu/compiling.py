"""Compiling Triton kernels without running them: ahead of a stage, on every core, into Triton's cache on disk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget


class NoGPU:
    """A driver of Triton that knows which GPU to compile for, and its default stream."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@contextmanager
def compile_only(
    take: Callable[[str, object], None] = lambda name, kernel: None,
    is_wanted: Callable[[dict[str, object]], bool] = lambda options: True,
) -> Iterator[None]:
    """In this block a launch compiles its kernel and ends there; what it should have written stays as allocated.

    Args:
        take: called with the name of each kernel and what Triton compiled.
        is_wanted: whether to compile a launch with these keyword arguments at all.
    """
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    @functools.wraps(launch)
    def compile_it(self, *args, grid, warmup, **options):
        if is_wanted(options):
            take(self.__name__, launch(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_it
    try:
        yield
    finally:
        JITFunction.run = launch
