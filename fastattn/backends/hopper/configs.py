"""Tile sizes and launch parameters of the Hopper kernels.

None was measured on a GPU yet. All were chosen by compiling ahead of time for sm_90a.
"""

from __future__ import annotations

from typing import NamedTuple

import triton

ROWS_OF_GROUP = 64
"""What a warp group works on at a time: the rows of a wgmma."""


class ForwardConfig(NamedTuple):
    """How the forward is compiled and launched; capitals are the kernel's names."""

    GROUPS: int  # warp groups that compute, of 64 queries each
    BLOCK_N: int  # keys of a tile
    SLOTS: int  # tiles of K, and as many of V, that shared memory holds
    PING_PONG: bool  # whether the two warp groups take turns at the tensor cores
    REGISTERS: tuple[int, int]  # of a thread that computes, of one that loads
    maxnreg: int  # registers of a thread at the start: all threads together have 65536
    persistent: bool  # one program for each SM, instead of one for each tile of queries

    @property
    def block_m(self) -> int:
        """Queries of a tile."""
        return self.GROUPS * ROWS_OF_GROUP


_FORWARD = {  # by the larger head dim
    64: ForwardConfig(2, 128, 3, False, (240, 24), 168, True),
    128: ForwardConfig(2, 128, 2, False, (240, 24), 168, True),
    256: ForwardConfig(2, 64, 2, False, (240, 24), 168, True),
}
ALTERNATIVES = {  # to be measured against those
    64: (ForwardConfig(3, 128, 3, False, (160, 32), 128, True),),
    128: (ForwardConfig(2, 128, 2, True, (240, 24), 168, True),),
}


def forward_config(padded_head_dim: int) -> ForwardConfig:
    """The parameters of the forward for head dims that are padded to this one."""
    return _FORWARD[padded_head_dim]


def padded_head_dim(dim: int) -> int:
    """The power of two that a head dim is padded to: at least 64, the columns of a swizzled row of shared memory."""
    return max(64, triton.next_power_of_2(dim))
