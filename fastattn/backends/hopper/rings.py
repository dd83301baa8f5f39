"""Parts that forward and backward share: rings of tiles in shared memory, their filling, and the layouts of registers.

A producer warp fills the slots of a ring in turn, consumers wait for a tile, read it and release its slot. Both count
the tiles that went through the ring since the kernel began: tile n lies in slot n % SLOTS, and each time round flips
the phase that its barriers are waited for with.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..triton.launches import Launches
from ..triton.tiles import Heads
from ..triton.visibility import real_tokens
from .gluon import (
    TensorDescriptor,
    block_barrier,
    constexpr_function,
    copy_commit,
    copy_load,
    copy_wait,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    opaque,
    part_of,
    tma_load,
)

BYTES_OF_CHUNK = 16
"""Bytes that TMA and asynchronous copies count in: addresses and strides are multiples of it."""

_GL_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


def loadable(x: Tensor) -> Tensor:
    """`x` [B, H, N, D], copied where TMA cannot read it: D a multiple of 16 bytes is asked for in any case."""
    outer = [stride for n, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if n > 1]
    fits = all(stride > 0 and stride * x.element_size() % BYTES_OF_CHUNK == 0 for stride in outer)
    return (
        x
        if fits and x.stride(3) == 1 and x.data_ptr() % BYTES_OF_CHUNK == 0
        else x.clone(memory_format=torch.contiguous_format)
    )


def strides_of(x: Tensor) -> tuple[int, ...]:
    """The strides of a `loadable` tensor; along an axis of one entry any will do."""
    outer = (stride if n > 1 else x.shape[3] for n, stride in zip(x.shape[:3], x.stride()[:3], strict=True))
    return (*outer, 1)


def descriptor(launches: Launches, x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A `loadable` tensor [B, H, N, D] as TMA reads it: `rows` of a head at a time, padded with 0 to `columns`."""
    return launches.made(described, (x,), _form(x.shape, strides_of(x), x.dtype, rows, columns))


def described(x: Tensor, form: TensorDescriptor) -> TensorDescriptor:
    """The descriptor of a tensor of that form, which was checked as it was made."""
    result = object.__new__(TensorDescriptor)
    result.__dict__ = form.__dict__ | {"base": x}
    return result


@functools.lru_cache(maxsize=4096)  # making it takes twice as long as the launch of a kernel of three
def _form(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, rows: int, columns: int) -> TensorDescriptor:
    """The descriptor of a tensor without memory."""
    block = [1, 1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, _GL_DTYPES[dtype])
    return TensorDescriptor(torch.empty(0, dtype=dtype), list(shape), list(strides), block, layout)


def in_chunks(x: Tensor) -> Heads:
    """A `loadable` tensor for `load_real_rows`: its strides count 16 bytes, which says that all rows begin at such."""
    of_chunk = BYTES_OF_CHUNK // x.element_size()
    return Heads(x, (*(stride // of_chunk for stride in strides_of(x)[:3]), 1))


class Ring(NamedTuple):
    """Ring of tiles, in a kernel: `tiles` [SLOTS, 1, 1, rows, D] in shared memory, and two barriers for each slot."""

    tiles: object
    full: object
    empty: object


@jit
def new_ring(desc, SLOTS: gl.constexpr, RELEASES: gl.constexpr):
    """A ring for tiles of that descriptor; a slot is empty again after RELEASES releases."""
    ROWS: gl.constexpr = desc.block_shape[2]
    D: gl.constexpr = desc.block_shape[3]
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    tiles = gl.allocate_shared_memory(desc.dtype, [SLOTS, 1, 1, ROWS, D], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barriers)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=RELEASES)
    return Ring(tiles, full, empty)


@jit
def rings_are_ready():
    """Waits until all threads have made their rings, and what loads asynchronously sees their barriers as well."""
    fence_async_shared()
    block_barrier()


@jit
def slot_of(n, ring):
    """(slot, phase) of tile n: it is full when `full` has passed that phase, and may be filled one phase before."""
    SLOTS: gl.constexpr = ring.tiles.shape[0]
    return n % SLOTS, (n // SLOTS) & 1


@jit
def tile_in(n, ring):
    """Tile n, [rows, D] in shared memory."""
    ROWS: gl.constexpr = ring.tiles.shape[3]
    D: gl.constexpr = ring.tiles.shape[4]
    return ring.tiles.index(slot_of(n, ring)[0]).reshape([ROWS, D])


@jit
def wait_full(n, ring):
    """Waits until tile n is there."""
    slot, phase = slot_of(n, ring)
    mbarrier.wait(ring.full.index(slot), phase)


@jit
def wait_empty(n, ring):
    """Waits until the slot of tile n has been released by all who read what lay there before."""
    slot, phase = slot_of(n, ring)
    mbarrier.wait(ring.empty.index(slot), phase ^ 1)


@jit
def release(n, ring, pred=True):
    """Says that tile n was read, if there was one: no wgmma that reads it may be under way."""
    mbarrier.arrive(ring.empty.index(slot_of(n, ring)[0]), count=1, pred=pred)


@jit
def load(n, ring, desc, i_b, i_h, row):
    """Loads the rows of a head from `row` on as tile n, asynchronously; zeros past the last row and the last column."""
    ROWS: gl.constexpr = desc.block_shape[2]
    D: gl.constexpr = desc.block_shape[3]
    wait_empty(n, ring)
    slot = slot_of(n, ring)[0]
    mbarrier.expect(ring.full.index(slot), ROWS * D * (desc.dtype.primitive_bitwidth // 8))
    tma_load(desc, [i_b.to(gl.int32), i_h.to(gl.int32), row, 0], ring.full.index(slot), ring.tiles.index(slot))


@jit
def load_real_rows(n, ring, x: Heads, i_b, i_h, row, n_rows, real, D: gl.constexpr):
    """Loads what `load` does, but zeros instead of the rows that padding hides; `x` is `in_chunks`. Waits for it."""
    ROWS: gl.constexpr = ring.tiles.shape[3]
    COLUMNS: gl.constexpr = ring.tiles.shape[4]
    PART: gl.constexpr = 8  # rows at a time, since a thread that loads has few registers
    OF_CHUNK: gl.constexpr = 128 // ring.tiles.dtype.primitive_bitwidth
    threads: gl.constexpr = chunks_of_rows(OF_CHUNK)
    wait_empty(n, ring)
    t_x = tile_in(n, ring)
    p_head = x.data + (i_b * x.s[0] + i_h * x.s[1]) * OF_CHUNK
    for i_part in range(opaque(ROWS * COLUMNS // (PART * 64))):
        o_row = row + i_part % (ROWS // PART) * PART + gl.arange(0, PART, layout=gl.SliceLayout(1, threads))
        o_col = i_part // (ROWS // PART) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, threads))
        m_row = real_tokens(o_row, n_rows, real, i_b)
        p_rows = p_head + gl.expand_dims(o_row.to(gl.int64) * x.s[2] * OF_CHUNK, 1) + gl.expand_dims(o_col, 0)
        m = gl.expand_dims(m_row, 1) & gl.expand_dims(o_col < D, 0)
        copy_load(part_of(t_x, i_part, PART), p_rows, mask=m)
    copy_commit()
    copy_wait(0)
    fence_async_shared()
    mbarrier.arrive(ring.full.index(slot_of(n, ring)[0]), count=1)


@constexpr_function
def chunks_of_rows(of_chunk):
    """The layout of rows of 64 columns in the registers of a warp whose threads take a chunk each."""
    across = 64 // of_chunk
    return gl.BlockedLayout([1, of_chunk], [32 // across, across], [1, 1], [1, 0])


@constexpr_function
def accumulator(columns):
    """The layout of a wgmma's result [64, columns] in the registers of a warp group."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@constexpr_function
def left_operand(columns):
    """The layout of a left operand from registers, for a wgmma whose result has that many columns."""
    return gl.DotOperandLayout(operand_index=0, parent=accumulator(columns), k_width=2)
