"""Compiling Triton kernels without running them: ahead of their first calls, on every core.

A kernel takes a second or so, and Triton compiles it when it is launched, one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import TYPE_CHECKING

from .build import processors, progress_shown

if TYPE_CHECKING:
    from triton import JITFunction


_compiling_alone: list[int | None] = []
"""The threads whose launches compile and run nothing; None is every thread."""


def launches_run() -> bool:
    """Whether launches of this thread run."""
    return not _compiling_alone or not (None in _compiling_alone or get_ident() in _compiling_alone)


@contextmanager
def compile_only(
    take: Callable[[str, object], None] = lambda name, kernel: None,
    is_wanted: Callable[[dict[str, object]], bool] = lambda options: True,
    of_every_thread: bool = True,
) -> Iterator[set[JITFunction]]:
    """In this block a launch compiles its kernel and ends there; what it should have written stays as allocated.

    Launches that are repeated without Triton have to ask `launches_run`: they would read that.

    Args:
        take: called with the name of each kernel and what Triton compiled.
        is_wanted: whether to compile a launch with these keyword arguments at all.
        of_every_thread: also those of autograd, and of whoever else is at work; others run, otherwise.

    Yields:
        The functions that have been launched so far.
    """
    from triton.runtime.jit import JITFunction

    launch, this_thread, launched = JITFunction.run, get_ident(), set()
    compiling_alone = None if of_every_thread else this_thread

    @functools.wraps(launch)
    def compile_it(self, *args, grid, warmup, **options):
        if not (of_every_thread or get_ident() == this_thread):
            return launch(self, *args, grid=grid, warmup=warmup, **options)
        launched.add(self)
        if is_wanted(options):
            take(self.__name__, launch(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_it
    _compiling_alone.append(compiling_alone)
    try:
        yield launched
    finally:
        _compiling_alone.remove(compiling_alone)
        JITFunction.run = launch


@contextmanager
def compiled_at_once() -> Iterator[None]:
    """In this block launches run nothing; at its end their kernels are compiled, side by side, with progress shown.

    They lie in Triton's cache on disk then, where launches find them, and beside them what hands their arguments to the
    driver, which Triton 3.6 has the C compiler compile. What cannot be compiled is left to its first launch, which says
    so.
    """
    from triton.runtime._async_compile import AsyncCompileMode

    with (
        ExitStack() as at_end,
        ThreadPoolExecutor(processors()) as pool,
        AsyncCompileMode(pool, ignore_errors=True) as mode,
    ):
        try:
            with compile_only(of_every_thread=False) as launched:
                at_end.callback(_forget_kernels, launched)
                yield
            with progress_shown("the compilation", len(mode.raw_futures)) as show_more:
                launchers = []
                for compiled in as_completed(mode.raw_futures):
                    launchers.append(pool.submit(_make_launcher, compiled))
                    show_more(1)
                wait(launchers)
        finally:  # where something is raised, such as KeyboardInterrupt, none is to begin any more
            pool.shutdown(wait=False, cancel_futures=True)


def _make_launcher(compiled: Future) -> None:
    from triton.runtime import driver

    kernel = compiled.result()
    driver.active.launcher_cls(kernel.src, kernel.metadata)


def _forget_kernels(functions: Iterable[JITFunction]) -> None:
    """Forgets what functions have in memory, where futures stand for kernels, of which some never came."""
    for function in functions:
        function.device_caches.clear()
