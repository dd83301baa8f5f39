"""Tile sizes and launch parameters: every number that depends on the hardware."""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor


class Config(NamedTuple):
    """M queries by N keys a tile, and how a program is compiled; the names are those the kernels and Triton use."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


_INTERPRETED = Config(32, 32, num_warps=4, num_stages=1)


def config_for(kernel: str, q: Tensor, head_dim: int) -> Config:
    """The line of the table for a kernel, the GPU and dtype of q, and a padded head dim."""
    if triton.knobs.runtime.interpret:
        return _INTERPRETED
    return Config(64, 64, 4, 2)
