"""Gluon as the kernels use it: the one module that imports it, and the one that knows how Triton 3.6 to 3.9 differ.

The names are those of the newest version. Everything here may be called in a kernel, except `TensorDescriptor`.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental.gluon import constexpr_function, jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "TensorDescriptor",
    "arrive_named",
    "block_barrier",
    "constexpr_function",
    "copy_commit",
    "copy_load",
    "copy_wait",
    "fence_async_shared",
    "gl",
    "jit",
    "mbarrier",
    "opaque",
    "part_of",
    "reciprocal",
    "store_wait",
    "sync_named",
    "tma_load",
    "tma_reduce_add",
    "tma_store",
    "warp_specialize",
    "warpgroup_mma",
    "warpgroup_mma_init",
    "warpgroup_mma_wait",
]

# In 3.9 the older names are still there, but raise.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
store_wait = tma.store_wait
copy_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
copy_commit, copy_wait = async_copy.commit_group, async_copy.wait_group
warp_specialize = gl.warp_specialize
block_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@builtin
def _reduce_add(tensor_desc, coord, src, _semantic=None):
    """`tma.async_atomic_add` of Triton 3.8: its operation has been there before."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


tma_reduce_add = getattr(tma, "async_atomic_add", None) or _reduce_add


@jit
def sync_named(ID: gl.constexpr, THREADS: gl.constexpr):
    """Waits at the hardware's barrier `ID` (9 to 15: Triton's own come before) until THREADS threads have come."""
    threads: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    o = gl.arange(0, 32 * gl.num_warps(), layout=threads)
    gl.inline_asm_elementwise(
        f"bar.sync {ID}, {THREADS}; mov.u32 $0, $1;", "=r,r", [o], gl.int32, is_pure=False, pack=1
    )


@jit
def arrive_named(ID: gl.constexpr, THREADS: gl.constexpr):
    """Comes to the barrier of `sync_named` without waiting."""
    threads: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    o = gl.arange(0, 32 * gl.num_warps(), layout=threads)
    gl.inline_asm_elementwise(
        f"bar.arrive {ID}, {THREADS}; mov.u32 $0, $1;", "=r,r", [o], gl.int32, is_pure=False, pack=1
    )


@jit
def opaque(x):
    """The integers `x`, of which the compiler does not know that they are `x`.

    What is computed from them is computed anew, instead of being kept in registers over a loop that needs them all.
    """
    return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [x], gl.int32, is_pure=False, pack=1)


@jit
def reciprocal(x):
    """1 / x for floats, to a few units in the last place, in one instruction; inf for 0."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], gl.float32, is_pure=True, pack=1)


_IS_3_9: gl.constexpr = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@jit
def part_of(tile, i_part, PART: gl.constexpr):
    """PART rows (a multiple of 8) and 64 columns of a tile [rows, D] of 16 bits, which may be computed at run time.

    The parts of the first 64 columns come first. So they lie in memory: 64 columns are what a swizzled row holds.
    """
    PARTS: gl.constexpr = tile.shape[0] * tile.shape[1] // (PART * 64)
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    if _IS_3_9:
        return tile.reinterpret(tile.dtype, [PARTS, PART, 64], layout).index(i_part)
    else:
        return tile._reinterpret(tile.dtype, [PARTS, PART, 64], layout).index(i_part)
