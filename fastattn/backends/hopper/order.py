"""Order of the work items: the heaviest first, and those that read the same keys at about the same time."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..triton.visibility import Visibility
from .gluon import gl, jit

L2_BYTES = 32 * 2**20
"""Bytes that the keys and values of an L2 group may take, as in FlashAttention-3: an H100 has 50 MB of L2."""


def programs_for(items: int, persistent: bool, device: torch.device) -> int:
    """Number of programs that share the items: one for each SM, or one for each item, as the hardware finds room."""
    return min(items, torch.cuda.get_device_properties(device).multi_processor_count) if persistent else items


def l2_group_of(n_heads: int, group: int, bytes_of_head: int, visible: Visibility) -> int:
    """Number of query heads of an L2 group: so many that what they read stays in the L2 cache.

    Args:
        n_heads: how many query heads there are, of all batch entries.
        group: how many of them read the same keys.
        bytes_of_head: what is read of one head of keys and values.
    """
    if visible.right is None or visible.left is not None:
        return 1  # all items weigh about the same: one head after the other
    fitting = max(L2_BYTES // bytes_of_head, 1)
    return min(group * 2 ** (fitting.bit_length() - 1), n_heads)


class Order(NamedTuple):
    """Arguments, in a kernel, from which a program knows the items it takes.

    All of it comes from the host: what the partitions of a kernel compute alike from its arguments, ptxas computes once
    before they part, and keeps in registers that are too few there.
    """

    n_items: int
    n_programs: int
    n_tiles: int  # of a head
    n_heads: int  # of all batch entries
    l2_group: int
    H: int


@jit
def item_at(i, order):
    """(tile, head, batch entry) of the i-th item: L2 group by L2 group, and in each the last tiles of all heads first.

    Under a causal mask the last tiles are the heaviest. Where heads do not fill the last L2 group, it is smaller.
    """
    first_head = i // order.n_tiles // order.l2_group * order.l2_group
    heads_here = gl.minimum(order.l2_group, order.n_heads - first_head)
    i_here = i - first_head * order.n_tiles
    i_bh = first_head + i_here % heads_here
    # 64 bits, since they are multiplied with strides; but not before the divisions, which would take a function each.
    i_h, i_b = (i_bh % order.H).to(gl.int64), (i_bh // order.H).to(gl.int64)
    return order.n_tiles - (1 + i_here // heads_here), i_h, i_b
