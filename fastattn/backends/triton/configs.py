"""Tile sizes and launch parameters: every number that depends on the hardware.

An H100 has timed those of bf16 up to a head dim of 128 (docs/performance.md), no GPU the others yet. They were chosen
by what the compiler makes of them, with Triton 3.7.1 and no GPU: for Hopper up to a head dim of 128, and where tensor
cores multiply fp32, by the time that a model of a multiprocessor predicts (`python tests/compile_gates/rank_tiles.py`
ranks tiles), the others by the clock cycles that its parts need at least (`python tests/compile_gates/triton_record.py`
prints both). Those of other fp32 were chosen to fit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import record


class Config(NamedTuple):
    """M queries by N keys a tile, and how a program is compiled; the names are those the kernels and Triton use."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


class Apart(NamedTuple):
    """Parameters of two kernels that compute dK and dV, where the sums of both would not fit in registers."""

    dk: Config
    dv: Config


_HOPPER, _AMPERE, _ADA, _FP32 = "sm_90", "sm_80, and others with 16 bits", "sm_86, sm_89, sm_120", "fp32 on every GPU"
"""Those of _ADA have 99 KB of shared memory and half of the A100's matrix units: where it has no entry, _AMPERE's."""
_FP32_HOPPER, _FP32_A100 = "fp32 on sm_90", "fp32 on sm_80"
"""Where tensor cores multiply fp32: see tiles.dot_precision. Where they have no entry, _FP32's."""
_INTERPRETER = "Triton's interpreter"

_TABLE: dict[tuple[str, str, int], Config | Apart] = {
    # Hopper: wgmma wants 64 rows a warp group, and 64 columns at least (see padded_head_dim). With two stages the loads
    # of a step would be issued at the end of the one before, and waited for.
    ("forward", _HOPPER, 64): Config(64, 64, 4, 4),
    ("forward", _HOPPER, 128): Config(128, 128, 8, 3),
    ("forward", _HOPPER, 256): Config(128, 64, 8, 2),
    ("rows", _HOPPER, 64): Config(32, 64, 4, 1),
    ("rows", _HOPPER, 128): Config(32, 64, 4, 1),
    ("rows", _HOPPER, 256): Config(32, 64, 4, 1),  # reads O and dO once
    ("dk_dv", _HOPPER, 64): Config(64, 64, 4, 3),  # and dq's: as an H100 timed them
    ("dk_dv", _HOPPER, 128): Config(64, 128, 8, 3),  # with spills; 64 keys take twice the products
    ("dk_dv", _HOPPER, 256): Apart(Config(64, 64, 4, 2), Config(64, 128, 8, 1)),
    ("dq", _HOPPER, 64): Config(64, 64, 4, 4),
    ("dq", _HOPPER, 128): Config(128, 64, 8, 3),
    ("dq", _HOPPER, 256): Config(128, 64, 8, 1),
    ("dbias", _HOPPER, 64): Config(64, 64, 4, 1),
    ("dbias", _HOPPER, 128): Config(64, 64, 4, 1),
    ("dbias", _HOPPER, 256): Config(128, 64, 8, 1),
    # At most 99 KB of shared memory, which is all that others but the A100 have.
    ("forward", _AMPERE, 64): Config(128, 64, 4, 3),
    ("forward", _AMPERE, 128): Config(128, 32, 4, 2),
    ("forward", _AMPERE, 256): Config(64, 32, 8, 2),
    ("rows", _AMPERE, 64): Config(32, 64, 4, 1),
    ("rows", _AMPERE, 128): Config(32, 64, 4, 1),
    ("rows", _AMPERE, 256): Config(32, 64, 4, 1),  # reads O and dO once
    ("dk_dv", _AMPERE, 64): Config(32, 128, 4, 3),
    ("dk_dv", _AMPERE, 128): Apart(Config(32, 128, 4, 2), Config(32, 128, 4, 2)),
    ("dk_dv", _AMPERE, 256): Config(32, 32, 8, 1),
    ("dq", _AMPERE, 64): Config(128, 32, 4, 2),
    ("dq", _AMPERE, 128): Config(128, 16, 4, 2),
    ("dq", _AMPERE, 256): Config(64, 32, 8, 1),
    ("dbias", _AMPERE, 64): Config(64, 32, 4, 1),
    ("dbias", _AMPERE, 128): Config(64, 32, 8, 1),
    ("dbias", _AMPERE, 256): Config(16, 32, 4, 1),
    ("dk_dv", _ADA, 64): Config(32, 128, 4, 2),  # two programs at once
    ("dk_dv", _ADA, 128): Config(32, 128, 8, 2),
    ("dq", _ADA, 128): Config(128, 32, 8, 2),
    ("forward", _FP32_HOPPER, 64): Config(128, 64, 8, 1),
    ("forward", _FP32_HOPPER, 128): Config(128, 64, 8, 1),
    ("rows", _FP32_HOPPER, 128): Config(32, 32, 4, 1),
    ("dk_dv", _FP32_HOPPER, 64): Config(64, 128, 8, 1),
    ("dk_dv", _FP32_HOPPER, 128): Config(64, 64, 4, 1),
    ("dq", _FP32_HOPPER, 64): Config(128, 64, 8, 1),
    ("dq", _FP32_HOPPER, 128): Config(64, 64, 4, 1),
    ("forward", _FP32_A100, 64): Config(128, 16, 4, 2),
    ("forward", _FP32_A100, 128): Config(32, 32, 4, 1),
    ("rows", _FP32_A100, 128): Config(32, 32, 4, 1),
    ("dk_dv", _FP32_A100, 128): Config(32, 32, 4, 1),
    ("dq", _FP32_A100, 128): Config(32, 32, 4, 1),
    # Products on other than tensor cores hold whole rows of their operands in registers, so tiles are small.
    ("forward", _FP32, 64): Config(32, 32, 4, 1),
    ("forward", _FP32, 128): Config(32, 16, 4, 1),
    ("rows", _FP32, 64): Config(32, 32, 4, 1),
    ("dk_dv", _FP32, 64): Config(32, 32, 4, 1),
    ("dq", _FP32, 64): Config(32, 32, 4, 1),
    ("dbias", _FP32, 64): Config(32, 32, 4, 1),
    ("rows", _FP32, 128): Config(32, 32, 8, 1),
    ("dk_dv", _FP32, 128): Config(32, 32, 8, 1),
    ("dq", _FP32, 128): Config(32, 32, 8, 1),
    ("dbias", _FP32, 128): Config(32, 32, 8, 1),
    ("forward", _FP32, 256): Config(16, 16, 4, 1),
    ("rows", _FP32, 256): Config(16, 16, 4, 1),
    ("dk_dv", _FP32, 256): Config(16, 16, 4, 1),
    ("dq", _FP32, 256): Config(16, 16, 4, 1),
    ("dbias", _FP32, 256): Config(16, 16, 4, 1),
    # At most so many rows, which are queries of all heads that share the keys.
    ("decoding", _HOPPER, 64): Config(32, 64, 4, 3),
    ("decoding", _HOPPER, 128): Config(32, 64, 4, 2),
    ("decoding", _HOPPER, 256): Config(32, 32, 4, 2),
    ("decoding", _AMPERE, 64): Config(32, 64, 4, 3),
    ("decoding", _AMPERE, 128): Config(32, 64, 4, 2),
    ("decoding", _AMPERE, 256): Config(32, 32, 4, 2),
    ("decoding", _FP32, 64): Config(16, 32, 4, 1),
    ("decoding", _FP32, 128): Config(16, 32, 4, 1),
    ("decoding", _FP32, 256): Config(16, 16, 4, 1),
    # As few queries as `tl.dot` takes: each keeps top_k candidates in registers.
    ("top_keys", _HOPPER, 64): Config(16, 64, 8, 2),  # 32 keys spill
    ("top_keys", _HOPPER, 128): Config(16, 32, 8, 2),
    ("top_keys", _HOPPER, 256): Config(16, 32, 8, 2),  # 64 keys spill with documents
    ("top_keys", _AMPERE, 64): Config(16, 32, 4, 2),
    ("top_keys", _AMPERE, 128): Config(16, 32, 8, 2),  # 64 keys spill
    ("top_keys", _AMPERE, 256): Config(16, 32, 8, 1),
    ("top_keys", _FP32, 64): Config(16, 32, 4, 1),
    ("top_keys", _FP32, 128): Config(16, 32, 4, 1),
    ("top_keys", _FP32, 256): Config(16, 16, 4, 1),
}

# Instead of those, where a tile holds more than scores and weights: see Rules.heavy_terms.
_HEAVY: dict[tuple[str, str, int], Config | Apart] = {
    ("forward", _HOPPER, 64): Config(64, 64, 4, 3),
    ("forward", _HOPPER, 128): Config(128, 64, 8, 3),
    ("dk_dv", _HOPPER, 128): Apart(Config(64, 128, 8, 3), Config(64, 128, 8, 3)),
    ("forward", _AMPERE, 64): Config(128, 32, 4, 2),
    ("forward", _AMPERE, 128): Config(128, 16, 4, 2),
    ("forward", _AMPERE, 256): Config(64, 32, 8, 1),  # two stages would not fit with a bias
    ("dk_dv", _AMPERE, 64): Config(16, 128, 4, 2),
    ("dk_dv", _AMPERE, 128): Apart(Config(16, 128, 4, 1), Config(16, 128, 4, 2)),  # more stages spill
    ("dq", _AMPERE, 64): Config(128, 16, 4, 2),
    ("dq", _AMPERE, 128): Config(128, 16, 8, 2),
    ("dq", _AMPERE, 256): Config(32, 32, 8, 1),  # 64 queries would not fit with a bias
    ("top_keys", _AMPERE, 128): Config(16, 16, 4, 2),  # 32 keys spill with a bias of keys
}
# Instead of those, where a tile holds several such things.
_HEAVIEST: dict[tuple[str, str, int], Config | Apart] = {
    ("forward", _HOPPER, 128): Config(128, 64, 8, 2),
    ("forward", _AMPERE, 64): Config(64, 32, 4, 3),
    ("dk_dv", _AMPERE, 64): Config(64, 32, 8, 2),
    ("dq", _AMPERE, 64): Config(64, 32, 8, 2),
    ("dbias", _AMPERE, 64): Config(64, 32, 8, 1),
    ("dk_dv", _AMPERE, 128): Config(32, 32, 8, 2),
    ("dq", _AMPERE, 128): Config(32, 32, 8, 2),
    ("dbias", _AMPERE, 128): Config(64, 16, 8, 1),
    ("forward", _FP32_HOPPER, 64): Config(64, 64, 4, 1),
    ("rows", _FP32_HOPPER, 64): Config(32, 32, 4, 1),
    ("dq", _FP32_HOPPER, 64): Config(128, 64, 8, 1),
    ("forward", _FP32_HOPPER, 128): Config(64, 64, 4, 1),
    ("rows", _FP32_HOPPER, 128): Config(32, 32, 4, 1),
    ("dq", _FP32_HOPPER, 128): Config(64, 64, 4, 1),
    ("forward", _FP32_A100, 64): Config(128, 16, 4, 1),
    ("rows", _FP32_A100, 64): Config(32, 32, 4, 1),
    ("dq", _FP32_A100, 64): Config(32, 32, 4, 1),
    ("forward", _FP32_A100, 128): Config(32, 32, 4, 1),
    ("rows", _FP32_A100, 128): Config(32, 32, 4, 1),
    ("dq", _FP32_A100, 128): Config(32, 32, 4, 1),
    ("forward", _FP32, 64): Config(16, 16, 8, 1),
    ("rows", _FP32, 64): Config(16, 16, 8, 1),
    ("dq", _FP32, 64): Config(32, 16, 8, 1),
    ("forward", _FP32, 128): Config(16, 16, 8, 1),
    ("rows", _FP32, 128): Config(16, 16, 8, 1),
    ("dq", _FP32, 128): Config(32, 16, 8, 1),
}

# What `fastattn tune` times beside those of _TABLE: the next best by the model of rank_tiles.py, or better ones that
# break a gate of triton_record.py, by spilling or by what they read from shared memory.
_TO_TRY: dict[tuple[str, str, int], tuple[Config | Apart, ...]] = {
    ("forward", _HOPPER, 64): (Config(128, 64, 8, 2), Config(64, 128, 4, 3)),
    ("forward", _HOPPER, 128): (Config(128, 64, 8, 4), Config(64, 64, 4, 3)),
    ("dk_dv", _HOPPER, 64): (Config(64, 128, 8, 3), Config(64, 128, 8, 4)),
    ("dk_dv", _HOPPER, 128): (Config(64, 128, 8, 4), Config(64, 64, 4, 2)),
    ("dq", _HOPPER, 64): (Config(128, 64, 8, 3), Config(128, 128, 8, 3)),
    ("dq", _HOPPER, 128): (Config(128, 64, 8, 4), Config(64, 64, 4, 2)),
    ("forward", _AMPERE, 64): (Config(128, 128, 8, 3), Config(64, 128, 4, 3)),
    ("forward", _AMPERE, 128): (Config(128, 32, 4, 3), Config(128, 64, 8, 3)),
    ("dk_dv", _AMPERE, 64): (Config(64, 64, 4, 3), Config(64, 128, 8, 3)),
    ("dk_dv", _AMPERE, 128): (Config(32, 128, 8, 3), Config(64, 64, 4, 2)),
    ("dq", _AMPERE, 64): (Config(128, 32, 4, 3), Config(128, 128, 8, 3)),
    ("dq", _AMPERE, 128): (Config(128, 32, 4, 2), Config(128, 64, 8, 3)),
    ("forward", _INTERPRETER, 64): (Config(16, 32, 4, 1), Config(32, 16, 4, 1)),
    ("dk_dv", _INTERPRETER, 64): (Config(16, 32, 4, 1), Apart(Config(16, 32, 4, 1), Config(32, 32, 4, 1))),
}

FEW_QUERIES: tl.constexpr = tl.constexpr(16)
"""Of up to so many the forward is that of flash_decoding.py."""

_INTERPRETED = Config(32, 32, num_warps=4, num_stages=1)  # small, so that short test cases have several tiles

in_place_of: dict[str, str] = {}
"""Tiles that this process uses, by the names of `tiles_to_try`, whatever the record of the machine says."""


def config_for(kernel: str, q: Tensor, padded_head_dim: int, heavy_terms: int) -> Config | Apart:
    """The parameters of a kernel (the first word of a line of the table) on the GPU and for the dtype of q.

    Args:
        heavy_terms: see `Rules.heavy_terms`.
    """
    default, others = _entry(kernel, q, padded_head_dim, heavy_terms)
    if not others:
        return default
    name = _name(kernel, padded_head_dim)
    wanted = in_place_of.get(name) or record.of(q.device).tiles.get(name)
    return next((other for other in others if str(other) == wanted), default)


def tiles_to_try(q: Tensor) -> dict[str, tuple[str, ...]]:
    """The tiles of each kernel that has several for the GPU and the dtype of q, those of the table first."""
    entries = {
        _name(kernel, dim): _entry(kernel, q, dim, 0) for kernel in ("forward", "dk_dv", "dq") for dim in (64, 128)
    }
    return {name: tuple(map(str, (default, *others))) for name, (default, others) in entries.items() if others}


def stored_as(dtype: torch.dtype, q: Tensor) -> str:
    """What pages of a quantized dtype hold on the GPU of q: "int8", or "float8", as bits where no GPU converts it."""
    if dtype == torch.int8:
        return "int8"
    converts = not triton.knobs.runtime.interpret and torch.cuda.get_device_capability(q.device) >= (8, 9)
    return "float8" if converts else "float8 as bits"


def _name(kernel: str, padded_head_dim: int) -> str:
    return f"{kernel} {max(padded_head_dim, 64)}"


def _entry(
    kernel: str, q: Tensor, padded_head_dim: int, heavy_terms: int
) -> tuple[Config | Apart, tuple[Config | Apart, ...]]:
    """The tile of the tables, and those that can be tried instead of it."""
    dim, tables = max(padded_head_dim, 64), (_TABLE, _HEAVY, _HEAVIEST)[: heavy_terms + 1]
    if triton.knobs.runtime.interpret:
        default, key = _INTERPRETED, (kernel, _INTERPRETER, dim)
    else:
        keys = [(kernel, family, dim) for family in _families(q)]
        default, key = next((table[key], key) for table in reversed(tables) for key in keys if key in table)
    return default, () if heavy_terms else _TO_TRY.get(key, ())


def padded_head_dim(dim: int, q: Tensor) -> int:
    """The power of two that a head dim is padded to: at least 16, which `tl.dot` wants, and 64 on Hopper.

    A wgmma of 32 columns reads beyond its shared memory with Triton 3.7 (triton#11366).
    """
    is_wide = not triton.knobs.runtime.interpret and (_HOPPER in _families(q) or _FP32 in _families(q))
    smallest = 64 if is_wide else 16
    return max(smallest, triton.next_power_of_2(dim))


def _families(q: Tensor) -> tuple[str, ...]:
    """Whose entries count for the GPU and the dtype of q, the first ones first."""
    capability = torch.cuda.get_device_capability(q.device)
    if q.dtype == torch.float32:
        return {(8, 0): (_FP32_A100, _FP32), (9, 0): (_FP32_HOPPER, _FP32)}.get(capability, (_FP32,))
    if capability[0] == 9:
        return (_HOPPER,)
    return (_ADA, _AMPERE) if capability in ((8, 6), (8, 9)) or capability[0] == 12 else (_AMPERE,)
