"""A small Gluon kernel for the model, right but for one fault that can be chosen: what the model must find."""

from __future__ import annotations

from typing import NamedTuple

from gluon_model.gluon import (
    arrive_named,
    copy_commit,
    copy_load,
    copy_wait,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    store_wait,
    sync_named,
    tma_load,
    tma_reduce_add,
    tma_store,
    warp_specialize,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS, SIZE = 64, 64


class Ring(NamedTuple):
    tiles: object
    full: object
    empty: object


@jit
def slot_of(n, ring, FAULT: gl.constexpr):
    SLOTS: gl.constexpr = ring.tiles.shape[0]
    phase = (n // SLOTS) & 1
    return n % SLOTS, phase ^ 1 if FAULT == "other phase" else phase


@jit
def produce(x, x_rows, ring, n_tiles, FAULT: gl.constexpr):
    """Loads every tile, the odd ones by cp.async."""
    size: gl.constexpr = ROWS * SIZE * 2
    for n in range(n_tiles):
        slot, phase = slot_of(n, ring, "other phase" if FAULT == "producer has the other phase" else FAULT)
        tile, full = ring.tiles.index(slot), ring.full.index(slot)
        if FAULT != "no wait for the release":
            mbarrier.wait(ring.empty.index(slot), phase ^ 1)
        if n % 2 == 0:
            bytes = {"too few bytes": size // 2, "too many bytes": 2 * size}.get(FAULT, size)
            mbarrier.expect(full, bytes)
            tma_load(x, [n * ROWS, 0], full, tile)
        else:
            layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
            o_row = n * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
            o_col = gl.arange(0, SIZE, layout=gl.SliceLayout(0, layout))
            p = x_rows + gl.expand_dims(o_row * SIZE, 1) + gl.expand_dims(o_col, 0)
            copy_load(tile, p, mask=gl.expand_dims(o_row < n_tiles * ROWS, 1))
            copy_commit()
            if FAULT != "copy not waited for":
                copy_wait(0)
            if FAULT != "no fence after the copy":
                fence_async_shared()
            mbarrier.arrive(full, count=1)
    if FAULT == "copy not waited for":
        copy_wait(0)
    if FAULT == "load that nobody waits for":
        mbarrier.wait(ring.empty.index(0), (n_tiles - 1) & 1)
        mbarrier.expect(ring.full.index(0), size)
        tma_load(x, [0, 0], ring.full.index(0), ring.tiles.index(0))
    if FAULT == "store at the end":
        ring.tiles.index(0).store(gl.zeros([ROWS, SIZE], gl.float16))


@jit
def consume(sums, total, ring, t_out, n_tiles, GROUP: gl.constexpr, FAULT: gl.constexpr):
    """Multiplies the sum of all tiles with ones; the outcome goes to `sums` [2, ROWS, SIZE] and is added to `total`."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    ones = gl.full([ROWS, ROWS], 1.0, gl.float32 if FAULT == "fp32 operand" else gl.float16, layout)
    b_sum = gl.zeros([ROWS, SIZE], gl.float32, layout=layout)
    for n in range(n_tiles):
        slot, phase = slot_of(n, ring, "other phase" if FAULT == "consumer has the other phase" else FAULT)
        tile = ring.tiles.index(slot)
        if FAULT != "no wait for the load":
            mbarrier.wait(ring.full.index(slot), phase)
        coming = warpgroup_mma(ones, tile, b_sum, is_async=True)
        if FAULT == "release before the wait":
            mbarrier.arrive(ring.empty.index(slot))
        if FAULT == "outcome used before the wait":
            coming = coming + 0.0
        b_sum = warpgroup_mma_wait(1 if FAULT == "wait for too few" else 0, deps=(coming,))
        if FAULT != "release before the wait" and FAULT != "no release":
            mbarrier.arrive(ring.empty.index(slot), count=3 if FAULT == "too many releases" else 1)
        if FAULT == "one wait more":
            mbarrier.wait(ring.full.index(slot), phase)
        if FAULT == "release that comes twice" and GROUP == 0:
            mbarrier.arrive(ring.empty.index(slot))
    mine = t_out.index(0 if FAULT == "both store to one place" else GROUP)
    mine.store(b_sum)
    if FAULT != "no fence":
        fence_async_shared()
    if GROUP == 0 or FAULT == "comes twice":
        sync_named(3 if FAULT == "named barrier of Triton" else 9, 256)
    if GROUP == 1:
        if FAULT != "never comes":
            arrive_named(9, 256)
        if FAULT == "comes twice":
            arrive_named(9, 256)
    if GROUP == 0:  # it has seen the other one come
        other = t_out.index(1)
        tma_store(sums, [0, 0, 0], t_out.index(0).reshape([1, ROWS, SIZE]))
        tma_store(sums, [1, 0, 0], other.reshape([1, ROWS, SIZE]))
        tma_reduce_add(total, [0, 0], other)
        if FAULT == "store while it is read":
            mine.store(b_sum)
        if FAULT != "no wait for the store":
            store_wait(1 if FAULT == "wait for too few stores" else 0)


@jit
def kernel(x, x_rows, sums, total, n_tiles, SLOTS: gl.constexpr, FAULT: gl.constexpr):
    t_out = gl.allocate_shared_memory(gl.float32, [2, ROWS, SIZE], sums.layout)
    tiles = gl.allocate_shared_memory(gl.float16, [SLOTS, ROWS, SIZE], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        if FAULT != "barrier without init":
            mbarrier.init(empty.index(i), count=3 if FAULT == "count too high" else 2)
    ring = Ring(tiles, full, empty)
    if FAULT == "read of nothing":
        tiles.index(0).load()
    warp_specialize(
        [
            (consume, (sums, total, ring, t_out, n_tiles, 0, FAULT)),
            (consume, (sums, total, ring, t_out, n_tiles, 1, FAULT)),
            (produce, (x, x_rows, ring, n_tiles, FAULT)),
        ],
        [4, 1],
        [240, 24],
    )
