"""A GPU on paper: what launches by Triton and by CUDA's runtime have in common on the machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
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
        seed: of the last launch; each next one has one more.
    """

    def __init__(self, arch: int, counting: bool = False) -> None:
        self.arch, self.counting, self.seed = arch, counting, SEED
        self.edit: Callable[[str, str], str] = lambda name, text: text
        self.programs: dict[str, list[Program]] = {}
        self.seconds = 0.0

    def runs(
        self, name: str, text: str, grid: Sequence[int], threads: int, shared: int,
        values_of: Callable[[Program], Sequence[bytes]], ranges: np.ndarray,
    ) -> None:  # fmt: skip
        """Executes a kernel; the values of its parameters are asked for when it is known."""
        runs = program(self.edit(name, text))
        if runs not in self.programs.setdefault(name, []):
            self.programs[name].append(runs)
        self.seed += 1
        values, began = values_of(runs), time.process_time()
        runs.launch(grid, threads, shared, values, ranges, self.seed, self.counting)
        self.seconds += time.process_time() - began


NOWHERE = np.empty((0, 2), np.uint64)


def ranges_of(x: Tensor) -> np.ndarray:
    """Where the elements of a tensor begin and end, uint64 [pieces, 2]."""
    if x.numel() == 0:
        return NOWHERE
    return pieces(x.data_ptr(), x.shape, [stride * x.element_size() for stride in x.stride()], x.element_size())


def pieces(address: int, shape: Sequence[int], strides: list[int], size: int) -> np.ndarray:
    """The same of elements of that size: strides count bytes, and elements that lie side by side are one piece."""
    begins = np.array([address], np.uint64)
    for stride, n in sorted(zip(strides, shape, strict=True)):
        if stride == size:
            size *= n
        elif stride and n > 1:
            begins = np.add.outer(np.arange(n, dtype=np.uint64) * np.uint64(stride), begins).ravel()
    return np.stack([begins, begins + np.uint64(size)], axis=1)


@contextlib.contextmanager
def memory_full_of_nan() -> Iterator[None]:
    """What is allocated is full of NaN."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
