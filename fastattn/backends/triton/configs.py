"""Tile sizes and launch parameters: every number that depends on the hardware.

None was measured on a GPU yet. All were chosen by compiling: the comments say how many registers a thread takes with no
mask and with the worst one (causal, padded keys and queries), when Triton 3.7.1 compiles for that GPU; tests print the
same with `python tests/compile_gates/triton_compile.py 90`. No line of 16 bits spills with it, and none with any one
feature more; those of fp32 spill at most 32 bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor


class Config(NamedTuple):
    """M queries by N keys a tile, and how a program is compiled; the names are those the kernels and Triton use."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


_HOPPER, _AMPERE, _FP32 = "sm_90", "sm_80 and everything but Hopper", "fp32 on every GPU"

_TABLE = {
    # Hopper: wgmma wants 64 rows a warp group; up to 227 KB of shared memory.
    ("forward", _HOPPER, 64): Config(64, 128, 4, 2),  # untuned; 216, 227 registers: two programs an SM overlap
    ("forward", _HOPPER, 128): Config(128, 64, 8, 3),  # untuned; 210, 236 registers
    ("forward", _HOPPER, 256): Config(64, 64, 8, 2),  # untuned; 211, 237 registers
    ("rows", _HOPPER, 256): Config(32, 64, 4, 1),  # untuned; reads O and dO once
    ("dk_dv", _HOPPER, 64): Config(64, 128, 8, 2),  # untuned; 233, 254 registers
    ("dk_dv", _HOPPER, 128): Config(64, 64, 8, 3),  # untuned; 255, 255 registers; 64 x 128 spills
    ("dk_dv", _HOPPER, 256): Config(64, 32, 8, 1),  # untuned; 224, 186 registers; mma.sync, 64 keys spill
    ("dq", _HOPPER, 64): Config(128, 64, 8, 2),  # untuned; 128, 181 registers
    ("dq", _HOPPER, 128): Config(128, 64, 8, 2),  # untuned; 192, 240 registers
    ("dq", _HOPPER, 256): Config(64, 64, 8, 2),  # untuned; 230, 246 registers
    ("dbias", _HOPPER, 64): Config(64, 64, 8, 1),  # untuned; 159 registers
    ("dbias", _HOPPER, 128): Config(64, 64, 8, 1),  # untuned; 178 registers
    ("dbias", _HOPPER, 256): Config(64, 32, 8, 1),  # untuned; 252 registers
    # At most 99 KB of shared memory, which is all that sm_86, sm_89 and sm_120 have.
    ("forward", _AMPERE, 64): Config(64, 64, 4, 3),  # untuned; 184, 231 registers
    ("forward", _AMPERE, 128): Config(128, 64, 8, 2),  # untuned; 255, 255 registers
    ("forward", _AMPERE, 256): Config(64, 32, 8, 2),  # untuned; 183, 214 registers
    ("rows", _AMPERE, 256): Config(32, 64, 4, 1),  # untuned; reads O and dO once
    ("dk_dv", _AMPERE, 64): Config(64, 32, 4, 2),  # untuned; 135, 228 registers; 64 x 64 spills with a mask
    ("dk_dv", _AMPERE, 128): Config(64, 64, 8, 2),  # untuned; 181, 255 registers
    ("dk_dv", _AMPERE, 256): Config(32, 32, 8, 1),  # untuned; 182, 201 registers
    ("dq", _AMPERE, 64): Config(64, 32, 4, 2),  # untuned; 212, 203 registers
    ("dq", _AMPERE, 128): Config(64, 64, 8, 2),  # untuned; 184, 196 registers
    ("dq", _AMPERE, 256): Config(64, 32, 8, 1),  # untuned; 242, 251 registers
    ("dbias", _AMPERE, 64): Config(64, 32, 4, 1),  # untuned; 242 registers
    ("dbias", _AMPERE, 128): Config(64, 32, 8, 1),  # untuned; 250 registers
    ("dbias", _AMPERE, 256): Config(16, 32, 4, 1),  # untuned; 255 registers
    # Exact fp32 products hold whole rows of their operands in registers, so tiles are small.
    ("forward", _FP32, 64): Config(32, 32, 4, 1),  # untuned; 147 registers with a mask, on sm_80
    ("forward", _FP32, 128): Config(32, 16, 4, 1),  # untuned; 143 registers with a mask, on sm_80
    ("rows", _FP32, 64): Config(32, 32, 4, 1),  # untuned; 96 registers with a mask, on sm_80
    ("dk_dv", _FP32, 64): Config(32, 32, 4, 1),  # untuned; 142 registers with a mask, on sm_80
    ("dq", _FP32, 64): Config(32, 32, 4, 1),  # untuned; 146 registers with a mask, on sm_80
    ("dbias", _FP32, 64): Config(32, 32, 4, 1),  # untuned; 194 registers, on sm_80
    ("rows", _FP32, 128): Config(32, 32, 8, 1),  # untuned; 80 registers with a mask, on sm_80; 4 warps spill on sm_90
    ("dk_dv", _FP32, 128): Config(32, 32, 8, 1),  # untuned; 128 registers with a mask, on sm_80; 4 warps spill
    ("dq", _FP32, 128): Config(32, 32, 8, 1),  # untuned; 111 registers with a mask, on sm_80; 4 warps spill on sm_90
    ("dbias", _FP32, 128): Config(32, 32, 8, 1),  # untuned; 144 registers, on sm_80
    ("forward", _FP32, 256): Config(16, 16, 4, 1),  # untuned; 138 registers with a mask, on sm_80
    ("rows", _FP32, 256): Config(16, 16, 4, 1),  # untuned; 90 registers with a mask, on sm_80
    ("dk_dv", _FP32, 256): Config(16, 16, 4, 1),  # untuned; 184 registers with a mask, on sm_80
    ("dq", _FP32, 256): Config(16, 16, 4, 1),  # untuned; 144 registers with a mask, on sm_80
    ("dbias", _FP32, 256): Config(16, 16, 4, 1),  # untuned; 176 registers, on sm_80
    # As few queries as `tl.dot` takes: each keeps top_k candidates in registers.
    ("top_keys", _HOPPER, 128): Config(16, 32, 8, 2),  # untuned; 64 keys spill with documents
    ("top_keys", _HOPPER, 256): Config(16, 32, 8, 2),  # untuned
    ("top_keys", _AMPERE, 64): Config(16, 32, 4, 2),  # untuned
    ("top_keys", _AMPERE, 128): Config(16, 64, 8, 2),  # untuned; 32 keys spill with padded ones
    ("top_keys", _AMPERE, 256): Config(16, 32, 8, 1),  # untuned
    ("top_keys", _FP32, 128): Config(16, 32, 4, 1),  # untuned
    ("top_keys", _FP32, 256): Config(16, 16, 4, 1),  # untuned
}

_HEAVY = {  # instead of those, where a tile holds more than scores and weights: see Rules.heavy_terms
    ("forward", _HOPPER, 64): Config(64, 64, 4, 3),  # untuned; 237 registers with documents, 200 with a bias
    ("dk_dv", _HOPPER, 128): Config(32, 64, 8, 2),  # untuned; 237 registers with a dense mask, 226 with dropout
    ("dk_dv", _HOPPER, 256): Config(32, 32, 8, 1),  # untuned; 184 registers with documents
    ("dq", _HOPPER, 256): Config(64, 32, 8, 2),  # untuned; 231 registers with dropout
    ("forward", _AMPERE, 128): Config(64, 64, 8, 2),  # untuned; 194 registers with a bias
    ("dk_dv", _AMPERE, 128): Config(64, 32, 8, 2),  # untuned; 175 registers with a bias
    ("forward", _AMPERE, 256): Config(64, 32, 8, 1),  # untuned; 234 registers with a bias; two stages would not fit
    ("dq", _AMPERE, 256): Config(32, 32, 8, 1),  # untuned; 163 registers with a bias; 64 queries would not fit
}
_HEAVIEST = {  # instead of those, where a tile holds several such things
    ("dq", _HOPPER, 64): Config(128, 32, 8, 2),  # untuned; 233 registers with everything
    ("dk_dv", _HOPPER, 64): Config(32, 128, 8, 2),  # untuned; 251 registers with three, 96 bytes spill with everything
    ("forward", _HOPPER, 128): Config(64, 64, 8, 2),  # untuned; 207 registers with everything
    ("dk_dv", _HOPPER, 128): Config(32, 32, 8, 2),  # untuned; 202 registers with everything
    ("dq", _HOPPER, 128): Config(128, 32, 8, 2),  # untuned; 243 registers with three, 40 bytes spill with everything
    ("dbias", _HOPPER, 128): Config(64, 32, 8, 1),  # untuned; 255 registers with everything
    ("forward", _HOPPER, 256): Config(64, 32, 8, 2),  # untuned; 247 registers with everything
    ("dq", _HOPPER, 256): Config(32, 32, 8, 2),  # untuned; 24 bytes spill with everything
    ("forward", _AMPERE, 64): Config(64, 32, 4, 3),  # untuned; 255 registers with everything
    ("dk_dv", _AMPERE, 64): Config(64, 32, 8, 2),  # untuned; 255 registers with everything
    ("dq", _AMPERE, 64): Config(64, 32, 8, 2),  # untuned; 255 registers with everything
    ("dbias", _AMPERE, 64): Config(64, 32, 8, 1),  # untuned; 249 registers with everything
    ("dk_dv", _AMPERE, 128): Config(32, 32, 8, 2),  # untuned; 212 registers with everything
    ("dq", _AMPERE, 128): Config(32, 32, 8, 2),  # untuned; 213 registers with everything
    ("dbias", _AMPERE, 128): Config(64, 16, 8, 1),  # untuned; 255 registers with everything
    ("forward", _FP32, 64): Config(16, 16, 8, 1),  # untuned; 160 registers with everything, on sm_90
    ("rows", _FP32, 64): Config(16, 16, 8, 1),  # untuned; 124 registers with everything, on sm_90
    ("dq", _FP32, 64): Config(32, 16, 8, 1),  # untuned; 128 registers with everything, on sm_90
    ("forward", _FP32, 128): Config(16, 16, 8, 1),  # untuned; 208 registers with everything, on sm_90
    ("rows", _FP32, 128): Config(16, 16, 8, 1),  # untuned; 196 registers with everything, on sm_90
    ("dq", _FP32, 128): Config(32, 16, 8, 1),  # untuned; 138 registers with everything, on sm_90
}

_INTERPRETED = Config(32, 32, num_warps=4, num_stages=1)  # small, so that short test cases have several tiles


def config_for(kernel: str, q: Tensor, padded_head_dim: int, heavy_terms: int) -> Config:
    """The parameters of a kernel (the first word of a line of the table) on the GPU and for the dtype of q.

    Args:
        heavy_terms: see `Rules.heavy_terms`.
    """
    if triton.knobs.runtime.interpret:
        return _INTERPRETED
    family = _FP32 if q.dtype == torch.float32 else _HOPPER if _is_hopper(q) else _AMPERE
    fitting = (dim for name, of, dim in _TABLE if (name, of) == (kernel, family) and dim >= padded_head_dim)
    key = (kernel, family, min(fitting))
    tables = (_TABLE, _HEAVY, _HEAVIEST)[: heavy_terms + 1]
    return next(table[key] for table in reversed(tables) if key in table)


def padded_head_dim(dim: int, q: Tensor) -> int:
    """The power of two that a head dim is padded to: at least 16, which `tl.dot` wants, and 64 on Hopper.

    A wgmma of 32 columns reads beyond its shared memory with Triton 3.7 (triton#11366).
    """
    smallest = 64 if not triton.knobs.runtime.interpret and _is_hopper(q) else 16
    return max(smallest, triton.next_power_of_2(dim))


def _is_hopper(q: Tensor) -> bool:
    return torch.cuda.get_device_capability(q.device)[0] == 9
