"""What forward and backward share: rings of tiles in shared memory, how they are filled, and the layouts of registers.

A producer warp fills the slots of a ring in turn, consumers wait for a tile, read it and release its slot. Both count
the tiles that went through the ring since the kernel began: tile n lies in slot n % SLOTS, and each time round flips the
phase that its barriers are waited for with.
"""

from __future__ import annotations

from typing import NamedTuple

from .gluon import constexpr_function, gl, jit, mbarrier, tma_load


class Ring(NamedTuple):
    """In a kernel: `tiles` [SLOTS, 1, 1, rows, D] in shared memory, and two barriers for each slot."""

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
def release(n, ring):
    """Says that tile n was read: no wgmma that reads it may be under way."""
    mbarrier.arrive(ring.empty.index(slot_of(n, ring)[0]), count=1)


@jit
def load(n, ring, desc, i_b, i_h, row):
    """Has the rows of a head from `row` on loaded as tile n; past the last row and the last column there are zeros."""
    ROWS: gl.constexpr = desc.block_shape[2]
    D: gl.constexpr = desc.block_shape[3]
    wait_empty(n, ring)
    slot = slot_of(n, ring)[0]
    mbarrier.expect(ring.full.index(slot), ROWS * D * (desc.dtype.primitive_bitwidth // 8))
    tma_load(desc, [i_b, i_h, row, 0], ring.full.index(slot), ring.tiles.index(slot))


@constexpr_function
def accumulator(columns):
    """The layout of a wgmma's result [64, columns] in the registers of a warp group."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@constexpr_function
def left_operand(columns):
    """The layout of a left operand from registers, for a wgmma whose result has that many columns."""
    return gl.DotOperandLayout(operand_index=0, parent=accumulator(columns), k_width=2)
