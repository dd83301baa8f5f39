"""Substitute for fastattn/backends/hopper/gluon.py: the same names, on the model."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from triton.experimental.gluon.language import _layouts as layouts

from . import language, values
from .barriers import arrive_named, block_barrier, fence_async_shared, mbarrier, sync_named
from .copies import (
    TensorDescriptor,
    copy_commit,
    copy_load,
    copy_wait,
    store_wait,
    tma_load,
    tma_reduce_add,
    tma_store,
)
from .launch import jit
from .machine import machine
from .products import warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait
from .shared import View, allocate_shared_memory


def warp_specialize(functions_and_args: object, worker_num_warps: object, worker_num_regs: object = None) -> object:
    """Runs each function as a partition of its own; what the first one returns."""
    if worker_num_regs is not None and len(worker_num_regs) != len(worker_num_warps):
        raise values.KernelError(f"{len(worker_num_warps)} workers, and registers for {len(worker_num_regs)}")
    return machine().specialize(functions_and_args, [int(n) for n in worker_num_warps])


def opaque(x: values.Value) -> values.Value:
    """`x`: nothing is computed ahead here."""
    return x


def reciprocal(x: values.Value) -> values.Value:
    """1 / x."""
    return 1.0 / x


def part_of(tile: View, i_part: object, rows: object) -> View:
    """Rows and 64 columns of a tile [rows, D]; the parts of the first 64 columns come first."""
    i_part, rows = int(values.value_of(i_part)), int(rows)
    i_columns, i_rows = divmod(i_part, int(tile.shape[0]) // rows)
    return tile.slice(i_rows * rows, rows).slice(i_columns * 64, 64, dim=1)


def constexpr_function(fn: Callable) -> Callable:
    """A function of constants."""
    return fn


def names_of_a_language() -> dict[str, object]:
    """What `tl` and `gl` have in common."""
    functions = {name: x for name, x in vars(language).items() if not name.startswith("_")}
    types = {name: x for name, x in vars(values).items() if isinstance(x, values.DType)}
    return functions | types | {"constexpr": values.constexpr, "dtype": values.DType, "tensor": values.Value}


gl = SimpleNamespace(
    **names_of_a_language(),
    **{name: x for name, x in vars(layouts).items() if name.endswith("Layout")},
    allocate_shared_memory=allocate_shared_memory,
    warp_specialize=warp_specialize,
    barrier=block_barrier,
)

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
