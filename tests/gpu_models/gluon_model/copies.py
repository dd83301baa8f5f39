"""Copies between global and shared memory: TMA with its descriptors, and cp.async."""

from __future__ import annotations

import torch
from torch import Tensor

from .barriers import _barrier
from .errors import KernelError, source_line
from .machine import machine
from .protocol import Begin
from .shared import View
from .values import DType, Pointer, Value, dtype_of, int1, raw, value_of


class TensorDescriptor:
    """What TMA needs of a tensor, checked as the driver and Triton do."""

    def __init__(
        self,
        base: Tensor,
        shape: object,
        strides: object,
        block_shape: object,
        layout: object,
        padding: str = "zero",
        round_f32_to_tf32: bool = False,
    ) -> None:
        self.base, self.layout = base.detach(), layout
        self.shape, self.strides, self.block_shape = (
            [int(n) for n in numbers] for numbers in (shape, strides, block_shape)
        )
        self._check()
        if padding != "zero":
            raise KernelError(f"padding of a tensor descriptor must be 'zero' here, was {padding!r}")
        self.view = self.base.as_strided(self.shape, self.strides)

    @staticmethod
    def from_tensor(tensor: Tensor, block_shape: object, layout: object, padding: str = "zero") -> TensorDescriptor:
        return TensorDescriptor(tensor, tensor.shape, tensor.stride(), block_shape, layout, padding)

    @property
    def dtype(self) -> DType:
        return dtype_of(self.base)

    @property
    def nbytes_per_cta(self) -> int:
        return torch.Size(self.block_shape).numel() * self.base.itemsize

    block_type = property(lambda self: self)

    @property
    def nbytes(self) -> int:
        return self.nbytes_per_cta

    def _check(self) -> None:
        size = self.base.itemsize
        rules = (
            (1 <= len(self.shape) <= 5, f"rank must be 1 to 5, was {len(self.shape)}"),
            (len(self.strides) == len(self.block_shape) == len(self.shape), "shape, strides and block must agree"),
            (self.base.data_ptr() % 16 == 0, f"base must be aligned to 16 bytes, was {self.base.data_ptr():#x}"),
            (all(n > 0 for n in self.shape), "no dimension may be 0"),
            (self.strides[-1] == 1, "the last stride must be 1"),
            (all(s * size % 16 == 0 for s in self.strides[:-1]), "strides must be multiples of 16 bytes"),
            (all(0 <= s * size < 2**40 for s in self.strides), "strides must be below 2^40 bytes"),
            (all(1 <= n <= 256 for n in self.block_shape), "a block must have 1 to 256 entries in each dimension"),
            (all(n & (n - 1) == 0 for n in self.block_shape), "a block must have a power of two in each dimension"),
            (self.block_shape[-1] * size >= 16, "a block must have 16 bytes in its last dimension"),
        )
        for right, rule in rules:
            if not right:
                raise KernelError(
                    f"tensor descriptor: {rule}; shape {self.shape}, strides {self.strides} of {self.base.dtype}, "
                    f"block {self.block_shape}, at {source_line()}"
                )
        storage = self.base.untyped_storage().nbytes() // size - self.base.storage_offset()
        if 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) > storage:
            raise KernelError(
                f"tensor descriptor: shape {self.shape} with strides {self.strides} ends beyond its tensor"
            )

    def parts(self, coord: object) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """(where the block at `coord` lies in the tensor, which part of it that is); None where nothing of it does."""
        begins = [int(value_of(c)) for c in coord]
        if len(begins) != len(self.shape):
            raise KernelError(f"a coordinate of {len(begins)} numbers for {self.shape}, at {source_line()}")
        inside, part = [], []
        for begin, n, block in zip(begins, self.shape, self.block_shape, strict=True):
            first, end = max(begin, 0), min(begin + block, n)
            if first >= end:
                return None
            inside.append(slice(first, end))
            part.append(slice(first - begin, end - begin))
        return tuple(inside), tuple(part)


def _shape_must_agree(descriptor: TensorDescriptor, smem: View) -> None:
    if smem.shape != descriptor.block_shape or smem.dtype != descriptor.dtype:
        raise KernelError(
            f"a block {descriptor.block_shape} of {descriptor.dtype} and {smem}, {smem.shape} of {smem.dtype}, "
            f"at {source_line()}"
        )


def tma_load(
    descriptor: TensorDescriptor,
    coord: object,
    bar: View,
    smem: View,
    pred: object = True,
    multicast: bool = False,
) -> None:
    """Copies a block, 0 outside of the tensor; all bytes of the block count at `bar`."""
    m = machine()
    m.pause()
    if not value_of(pred):
        return
    _shape_must_agree(descriptor, smem)
    parts, barrier = descriptor.parts(coord), _barrier(bar)
    access = smem.allocation.access(smem, True, False, "TMA load")
    m.record(Begin, access, barrier, smem.bytes)
    m.loads.append((access.event, access.words))

    def arrive() -> None:
        block = torch.zeros(descriptor.block_shape, dtype=descriptor.dtype.torch)
        if parts is not None:
            block[parts[1]] = descriptor.view[parts[0]]
        smem.fill(block)
        barrier.complete(smem.bytes, access.event)

    m.start(arrive)


class _Store:
    """A block on its way from shared to global memory."""

    def __init__(self, descriptor: TensorDescriptor, coord: object, smem: View, add: bool) -> None:
        m = machine()
        _shape_must_agree(descriptor, smem)
        if add and not descriptor.dtype.is_floating():
            raise KernelError(f"reduce-add of {descriptor.dtype}, at {source_line()}")
        self.parts, self.descriptor, self.smem, self.add = descriptor.parts(coord), descriptor, smem, add
        self.access = smem.allocation.access(smem, False, False, "TMA reduce-add" if add else "TMA store")
        m.record(Begin, self.access)
        self.block = smem.data.clone() if m.early() else None

    def __str__(self) -> str:
        return f"the {self.access.words}"

    def complete(self) -> None:
        """Writes the block."""
        block = self.smem.data if self.block is None else self.block
        if self.parts is not None:
            target = self.descriptor.view[self.parts[0]]
            target.add_(block[self.parts[1]]) if self.add else target.copy_(block[self.parts[1]])
        machine().over(self.access)


def _store(descriptor: TensorDescriptor, coord: object, smem: View, add: bool) -> None:
    m = machine()
    m.pause()
    m.current.stores.append(_Store(descriptor, coord, smem, add))


def tma_store(descriptor: TensorDescriptor, coord: object, smem: View) -> None:
    """Copies what of a block lies inside of the tensor."""
    _store(descriptor, coord, smem, add=False)


def tma_reduce_add(descriptor: TensorDescriptor, coord: object, smem: View) -> None:
    """Adds what of a block lies inside of the tensor."""
    _store(descriptor, coord, smem, add=True)


def store_wait(pendings: int) -> None:
    """Until at most so many stores of this partition still read."""
    m = machine()
    m.pause()
    me = m.current
    while len(me.stores) > int(pendings):
        me.stores.pop(0).complete()


class _Copy:
    """A cp.async on its way."""

    def __init__(self, smem: View, data: Tensor) -> None:
        m = machine()
        self.smem, self.data = smem, data
        self.access = smem.allocation.access(smem, True, True, "cp.async")
        m.record(Begin, self.access)
        self.done = False
        if m.early():
            self._write()

    def __str__(self) -> str:
        return f"the {self.access.words}"

    def _write(self) -> None:
        if not self.done:
            self.smem.fill(self.data)
            self.done = True

    def complete(self) -> None:
        self._write()
        machine().over(self.access)


def copy_load(smem: View, pointer: Pointer, mask: object = None) -> None:
    """Copies what the pointers show; 0 where the mask is False, and nothing is read there."""
    m = machine()
    m.pause()
    if smem.shape != pointer.shape or smem.dtype != pointer.into.dtype:
        raise KernelError(
            f"cp.async from {pointer.shape} of {pointer.into.dtype} to {smem}, {smem.shape} of {smem.dtype}, "
            f"at {source_line()}"
        )
    m.current.copies.append(_Copy(smem, gathered(pointer, mask, 0).data))


def copy_commit() -> None:
    """The copies so far make a group."""
    me = machine().current
    me.copy_groups.append(me.copies)
    me.copies = []


def copy_wait(num_outstanding: int = 0) -> None:
    """Until at most so many groups are under way."""
    m = machine()
    m.pause()
    me = m.current
    while len(me.copy_groups) > int(num_outstanding):
        for copy in me.copy_groups.pop(0):
            copy.complete()


def gathered(pointer: Pointer, mask: object, other: object) -> Value:
    """What the pointers show, `other` where the mask is False."""
    into, offsets = pointer.into, torch.as_tensor(pointer.offsets)
    if mask is None:
        into.check(offsets, "load")
        result = into.flat[offsets]
    else:
        allowed = torch.as_tensor(raw(mask, int1))
        offsets, allowed = torch.broadcast_tensors(offsets, allowed)
        into.check(offsets[allowed], "load")
        if into.extent == 0:
            result = torch.zeros(offsets.shape, dtype=into.dtype.torch)
        else:
            result = into.flat[offsets.where(allowed, 0)]
        instead = torch.as_tensor(raw(0 if other is None else other)).to(into.dtype.torch)
        if other is None and into.dtype.is_floating():
            instead = torch.tensor(float("nan"), dtype=into.dtype.torch)  # undefined
        result = result.where(allowed, instead)
    return Value(result if result.dim() else result.item(), into.dtype)


def scattered(pointer: Pointer, value: object, mask: object, add: bool = False) -> None:
    """Writes or adds to what the pointers show, where the mask is True."""
    into, offsets = pointer.into, torch.as_tensor(pointer.offsets)
    data = torch.as_tensor(raw(value)).to(into.dtype.torch)
    allowed = torch.as_tensor(True if mask is None else raw(mask, int1))
    offsets, allowed, data = torch.broadcast_tensors(offsets, allowed, data)
    offsets, data = offsets[allowed], data[allowed]
    into.check(offsets, "store")
    if into.extent:
        into.flat.index_put_((offsets,), data, accumulate=add)
