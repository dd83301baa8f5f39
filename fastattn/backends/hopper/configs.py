"""Tile sizes and launch parameters of the Hopper kernels.

An H100 has timed those of head dim 128 (docs/hopper.md), no GPU the others. All were chosen by compiling ahead of time
for sm_90a.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton

ROWS_OF_GROUP = 64
"""Rows that a warp group multiplies at a time, those of a wgmma."""


class ForwardConfig(NamedTuple):
    """Compilation and launch parameters of the forward; capitals are the kernel's names."""

    GROUPS: int  # warp groups that compute, of 64 queries each
    BLOCK_N: int  # keys of a tile
    SLOTS: int  # tiles of K, and as many of V, in shared memory
    Q_SLOTS: int  # tiles of queries in shared memory; with two, the next is loaded before the last is done
    PING_PONG: bool  # whether two warp groups take turns at issuing matrix products
    REGISTERS: int  # of a thread of a warp group
    PRODUCER_REGISTERS: int  # of a thread that loads
    maxnreg: int  # of a thread at the start, and what all of them share: 65536 in all
    persistent: bool  # as many programs as SMs, instead of one for each item

    @property
    def block_m(self) -> int:
        """Queries of a tile."""
        return self.GROUPS * ROWS_OF_GROUP

    def options(self) -> dict[str, int]:
        """The keyword arguments of a launch."""
        return {name: value for name, value in self._asdict().items() if name != "persistent"} | {"num_warps": 4}


# What each of these kernels takes is printed by `python tests/compile_gates/hopper_record.py`.
_FORWARD = {  # larger head dim -> configuration
    64: ForwardConfig(3, 128, 3, 2, False, 160, 32, 128, True),  # two take a fifth longer, by cycles.py
    128: ForwardConfig(2, 128, 2, 2, False, 240, 24, 168, True),  # untuned
    256: ForwardConfig(2, 64, 2, 1, False, 240, 24, 168, True),  # untuned
}
_FORWARD_PADDED = {  # with padding or documents three groups would spill
    64: ForwardConfig(2, 128, 3, 2, False, 232, 40, 168, True),  # untuned
}
FORWARD_ALTERNATIVES = {  # to be measured against those
    64: (_FORWARD_PADDED[64],),
    128: (ForwardConfig(2, 128, 2, 2, True, 240, 24, 168, True),),
}


def forward_config(padded_head_dim: int, padding: bool = False) -> ForwardConfig:
    """The parameters of the forward for head dims of which the larger is padded to this; padding: or documents."""
    config = _FORWARD[padded_head_dim]
    return _FORWARD_PADDED.get(padded_head_dim, config) if padding else config


class DkDvConfig(NamedTuple):
    """Compilation and launch parameters of the kernel of dK and dV: two warp groups, of 64 keys each."""

    BOTH: bool  # whether one launch computes both, which takes registers for both
    BLOCK_M: int  # queries of a tile
    Q_SLOTS: int  # tiles of Q in shared memory
    DO_SLOTS: int  # tiles of dO
    REGISTERS: int
    PRODUCER_REGISTERS: int
    maxnreg: int
    persistent: bool

    @property
    def block_n(self) -> int:
        """Keys of a tile."""
        return 2 * ROWS_OF_GROUP

    def options(self) -> dict[str, int]:
        """The keyword arguments of a launch."""
        return _options(self, "BOTH", "persistent")


class DqConfig(NamedTuple):
    """Compilation and launch parameters of the kernel of dQ: two warp groups, of 64 queries each."""

    BLOCK_N: int  # keys of a tile
    K_SLOTS: int  # tiles of K in shared memory
    V_SLOTS: int  # tiles of V
    REGISTERS: int
    PRODUCER_REGISTERS: int
    maxnreg: int
    persistent: bool

    @property
    def block_m(self) -> int:
        """Queries of a tile."""
        return 2 * ROWS_OF_GROUP

    def options(self) -> dict[str, int]:
        """The keyword arguments of a launch."""
        return _options(self, "persistent")


def _options(config: NamedTuple, *not_of_the_kernel: str) -> dict[str, int]:
    names = [name for name in config._fields if name not in not_of_the_kernel]
    return {name: getattr(config, name) for name in names} | {"num_warps": 4}


_DK_DV = {  # larger head dim -> configuration
    64: DkDvConfig(True, 64, 2, 2, 224, 56, 168, True),
    128: DkDvConfig(True, 64, 2, 2, 240, 24, 168, True),
    256: DkDvConfig(False, 64, 2, 1, 232, 40, 168, True),
}
_DQ = {
    64: DqConfig(128, 2, 2, 224, 56, 168, True),
    128: DqConfig(128, 2, 2, 240, 24, 168, True),
    256: DqConfig(64, 2, 1, 240, 24, 168, True),
}


def dk_dv_config(padded_head_dim: int) -> DkDvConfig:
    """The parameters of the kernel of dK and dV, as `forward_config` has those of the forward."""
    return _DK_DV[padded_head_dim]


def dq_config(padded_head_dim: int) -> DqConfig:
    """The parameters of the kernel of dQ, as `forward_config` has those of the forward."""
    return _DQ[padded_head_dim]


@functools.cache  # Triton's function takes as long as a small tensor's allocation
def padded_head_dim(dim: int) -> int:
    """The power of two that a head dim is padded to: at least the 128 bytes of a row of swizzled shared memory."""
    return max(64, triton.next_power_of_2(dim))


class FusedConfig(NamedTuple):
    """Compilation and launch parameters of the kernel of all three gradients: two warp groups, of 64 keys each."""

    BLOCK_M: int  # queries of a tile
    Q_SLOTS: int  # tiles of Q in shared memory
    DO_SLOTS: int  # tiles of dO
    REGISTERS: int
    PRODUCER_REGISTERS: int
    maxnreg: int
    persistent: bool

    @property
    def block_n(self) -> int:
        """Keys of a tile."""
        return 2 * ROWS_OF_GROUP

    def options(self) -> dict[str, int]:
        """The keyword arguments of a launch."""
        return _options(self, "persistent")


_FUSED = {  # larger head dim -> configuration; BLOCK_M times the head dim is what two warp groups compute of dQ
    64: FusedConfig(128, 2, 2, 224, 56, 168, True),
    128: FusedConfig(64, 2, 2, 240, 24, 168, True),
}
_FUSED_PADDED = {  # a warp that copies the real rows itself needs more registers
    128: FusedConfig(64, 2, 2, 232, 40, 168, True),
}


def fused_config(padded_head_dim: int, padding: bool = False) -> FusedConfig | None:
    """The parameters of the kernel of all three gradients; None where it cannot serve such head dims."""
    config = _FUSED.get(padded_head_dim)
    return _FUSED_PADDED.get(padded_head_dim, config) if padding else config
