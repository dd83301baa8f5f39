"""A GPU on paper: what launches by Triton and by CUDA's runtime have in common on the machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .machine import Program, program

SEED = int(os.environ.get("FASTATTN_PTX_SEED", "1"))
"""Of the first launch of a process; each later one counts one more."""

SHARED_BYTES = {75: 65_536, 80: 166_912, 90: 232_448}
"""Most that a block may have: CUDA C++ Programming Guide, technical specifications per compute capability."""


class Gpu:
    """A GPU whose kernels the machine executes.

    Attributes:
        edit: what becomes of the text of a kernel before it runs, from its name and text.
        programs: those that were launched, by their name.
        seconds: of a processor that they ran.
    """

    def __init__(self, arch: int, counting: bool = False) -> None:
        self.arch, self.counting, self.seed = arch, counting, SEED
        self.edit: Callable[[str, str], str] = lambda name, text: text
        self.programs: dict[str, list[Program]] = {}
        self.seconds = 0.0

    def runs(
        self, name: str, text: str, grid: Sequence[int], threads: int, shared: int,
        values_of: Callable[[Program], Sequence[bytes]], ranges: Sequence[tuple[int, int]],
    ) -> None:  # fmt: skip
        """Executes a kernel; the values of its parameters are asked for when it is known."""
        runs = program(self.edit(name, text))
        if runs not in self.programs.setdefault(name, []):
            self.programs[name].append(runs)
        self.seed += 1
        values, began = values_of(runs), time.process_time()
        runs.launch(grid, threads, shared, values, ranges, self.seed, self.counting)
        self.seconds += time.process_time() - began


def range_of(x: Tensor) -> tuple[int, int] | None:
    """The addresses of the first byte of a tensor and of that after its last element."""
    if x.numel() == 0:
        return None
    last = sum(stride * (n - 1) for stride, n in zip(x.stride(), x.shape, strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


@contextlib.contextmanager
def memory_full_of_nan() -> Iterator[None]:
    """What is allocated is full of NaN."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
