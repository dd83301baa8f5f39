"""Shared memory: its contents, who may touch it when, and the views of it that kernels use.

Every access is kept, with the part of an allocation it touches, until a later one that is ordered after it takes its
place. A new access must be ordered after all of them that it conflicts with.
"""

from __future__ import annotations

import functools
import linecache
import math
import re
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import _HERE, KernelError, source_line
from .machine import Machine, Partition, machine
from .protocol import Begin
from .values import DType, Value, dtype_of, value_of

CAPACITY = 232448  # bytes that one program can have on sm_90

Region = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, offset, in elements


@dataclass
class Access:
    """One read or write. generic: through the generic proxy (loads and stores of threads), not by TMA or wgmma."""

    allocation: Allocation
    region: Region
    writes: bool
    generic: bool
    event: int
    words: str

    def conflicts_with(self, other: Access) -> bool:
        """Whether the order of the two matters: they touch the same elements, and one of them writes."""
        return (
            (self.writes or other.writes)
            and self.allocation is other.allocation
            and _relation(self.region, other.region)[0]
        )


@functools.cache
def _elements(region: Region) -> Tensor:
    """bool: which elements of an allocation are in the region, up to the last one."""
    shape, strides, offset = region
    elements = torch.zeros(1 + offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)), dtype=torch.bool)
    elements.as_strided(*region).fill_(True)
    return elements


@functools.cache
def _relation(x: Region, y: Region) -> tuple[bool, bool]:
    """Of two regions of one allocation: (whether they have elements in common, whether `x` has all that `y` has)."""
    if x == y:
        return True, True
    of_x, of_y = _elements(x), _elements(y)
    n = min(len(of_x), len(of_y))
    covered = len(of_x) >= len(of_y) and not bool((of_y & ~of_x[:n]).any())
    return bool((of_x[:n] & of_y[:n]).any()), covered


class Allocation:
    """One piece of shared memory, with nothing written to it yet."""

    def __init__(self, dtype: DType, shape: list[int], name: str) -> None:
        self.name, self.shape = name, shape
        size = math.prod(shape)
        nothing = float("nan") if dtype.kind == 2 else 0
        self.data = torch.full((size,), nothing, dtype=dtype.torch)
        self.written = torch.zeros(size, dtype=torch.bool)
        self.accesses: list[Access] = []
        self.barriers: dict[int, object] = {}

    @property
    def bytes(self) -> int:
        return self.data.numel() * self.data.itemsize

    def access(self, view: View, writes: bool, generic: bool, what: str) -> Access:
        """Checks and keeps an access of the running partition that begins now; nobody knows yet that it is over."""
        m = machine()
        partition = m.current
        words = f"{what} of {view} by {partition.name} at {source_line()}"
        new = Access(self, view.region, writes, generic, m.new_event(), words)
        for other in self.accesses if not m.how.unordered else ():
            if other.conflicts_with(new):
                self._must_be_ordered(other, new, view, partition)
        if not writes and not bool(self.written.as_strided(*view.region).all()):
            raise KernelError(f"{view} is read before anything was written to it\n  {words}")
        self.accesses = [other for other in self.accesses if not self._replaced(other, new, partition)]
        self.accesses.append(new)
        return new

    @staticmethod
    def _must_be_ordered(other: Access, new: Access, view: View, partition: Partition) -> None:
        if not other.event & partition.known:
            problem = {
                (True, False): "written while it may still be read: nothing orders",
                (True, True): "written twice at a time: nothing orders",
                (False, True): "read before it is filled: nothing orders",
            }[new.writes, other.writes]
            raise KernelError(f"{view} is {problem}\n  {new.words}\n  after the {other.words}")
        if not new.generic and other.generic and other.writes and not other.event & partition.fenced:
            raise KernelError(f"no fence_async_shared between the {other.words}\n  and the {new.words}")

    def _replaced(self, other: Access, new: Access, partition: Partition) -> bool:
        """Whether what is ordered after `new` is after `other`, too, and conflicts with `new` if with `other`."""
        if other.writes and not new.writes:
            return False
        return bool(other.event & partition.known) and _relation(new.region, other.region)[1]

    def check_at_the_end(self) -> None:
        for barrier in self.barriers.values():
            barrier.check_at_the_end()


class View:
    """A shared_memory_descriptor: a part of an allocation in some shape."""

    def __init__(self, allocation: Allocation, data: Tensor, layout: object, name: str) -> None:
        self.allocation, self.data, self.layout, self.name = allocation, data, layout, name

    def __str__(self) -> str:
        return self.name

    @property
    def region(self) -> Region:
        return tuple(self.data.shape), self.data.stride(), self.data.storage_offset()

    @property
    def dtype(self) -> DType:
        return dtype_of(self.data)

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def rank(self) -> int:
        return self.data.dim()

    @property
    def numel(self) -> int:
        return self.data.numel()

    @property
    def bytes(self) -> int:
        return self.data.numel() * self.data.itemsize

    @property
    def type(self) -> View:
        return self

    def _part(self, data: Tensor, name: str) -> View:
        return View(self.allocation, data, self.layout, name)

    def index(self, i: object) -> View:
        i = int(value_of(i))
        if not 0 <= i < self.data.shape[0]:
            return _Outside(f"{self}[{i}] is outside of its {self.data.shape[0]} entries, at {source_line()}")
        return self._part(self.data[i], f"{self.name}[{i}]")

    def slice(self, start: object, length: object, dim: int = 0) -> View:
        start, length = int(value_of(start)), int(value_of(length))
        if start < 0 or start + length > self.data.shape[dim]:
            raise KernelError(
                f"{self} {self.shape} has no [{start}, {start + length}) in dim {dim}, at {source_line()}"
            )
        return self._part(self.data.narrow(dim, start, length), f"{self.name}[{start}:{start + length}, dim {dim}]")

    def permute(self, order: object) -> View:
        return self._part(self.data.permute(tuple(int(i) for i in order)), self.name)

    def reshape(self, shape: object) -> View:
        return self._part(self.data.view([int(n) for n in shape]), self.name)

    def load(self, layout: object = None) -> Value:
        m = machine()
        m.pause()
        access = self.allocation.access(self, False, True, "load")
        m.record(Begin, access)
        m.over(access)
        return Value(self.data.clone(), self.dtype)

    def store(self, value: Value) -> None:
        m = machine()
        m.pause()
        value = value_of(value)
        if value.shape != self.shape or value.dtype != self.dtype:
            raise KernelError(
                f"{value.dtype} {value.shape} stored to {self}, which is {self.dtype} {self.shape}, at {source_line()}"
            )
        access = self.allocation.access(self, True, True, "store")
        m.record(Begin, access)
        m.over(access)
        self.fill(value.data)

    def fill(self, data: Tensor | float) -> None:
        """Writes, without any check."""
        self.data.copy_(data) if isinstance(data, Tensor) else self.data.fill_(data)
        self.allocation.written.as_strided(*self.region).fill_(True)


class _Outside:
    """An address that may be computed, but not used."""

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def __getattr__(self, name: str) -> object:
        raise KernelError(self._problem)


def allocate_shared_memory(element_ty: DType, shape: object, layout: object, value: object = None) -> View:
    """A new piece of shared memory, called what it is assigned to in the kernel."""
    m = machine()
    shape = [int(n) for n in shape]
    name = _assigned_name() or f"shared memory {len(m.allocations)}"
    names = [a.name for a in m.allocations]
    allocation = Allocation(element_ty, shape, name if name not in names else f"{name} ({names.count(name) + 1})")
    m.allocations.append(allocation)
    if (used := sum(a.bytes for a in m.allocations)) > CAPACITY:
        raise KernelError(
            f"{allocation.name} needs {allocation.bytes} bytes of shared memory, in all {used} > {CAPACITY}"
        )
    view = View(allocation, allocation.data.view(shape), layout, allocation.name)
    if value is not None:
        view.store(value)
    return view


def _assigned_name() -> str:
    """Made of the lines of the kernel, from the outermost in, that call this and assign the outcome to something."""
    names, frame = [], sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_HERE):
            line = linecache.getline(file, frame.f_lineno)
            if match := re.match(r"\s*([A-Za-z_]\w*)\s*(?::[^=]+)?=[^=]", line):
                names.append(match[1])
        elif frame.f_code is Machine.run.__code__:
            break
        frame = frame.f_back
    return ".".join(reversed(names))
