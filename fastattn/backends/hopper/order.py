"""Which work item comes when: the heaviest first, and those that read the same keys at about the same time."""

from __future__ import annotations

from .gluon import gl, jit

L2_BYTES = 32 * 2**20
"""What the heads of a section may take: an H100 has 50 MB of L2. FlashAttention-3's scheduler counts with the same."""


def section_of(heads: int, group: int, bytes_of_head: int, heavy_first: bool) -> int:
    """How many query heads are worked on at the same time, so that what they read stays in the L2 cache.

    Args:
        heads: how many query heads there are, of all batch entries.
        group: how many of them read the same keys.
        bytes_of_head: what is read of one head of keys.
        heavy_first: False where all items are alike; then one head after the other is best.
    """
    if not heavy_first:
        return 1
    fitting = max(L2_BYTES // bytes_of_head, 1)
    return min(group * 2 ** (fitting.bit_length() - 1), heads)


@jit
def item_at(i, n_tiles, n_heads, section, H):
    """(tile, head, batch entry) of the i-th item: section by section, and in each the last tiles of all heads first.

    Under a causal mask the last tiles are the heaviest. Where the heads do not fill the last section, it is smaller.
    """
    i_section = i // (section * n_tiles)
    first = i_section * section
    heads_here = gl.minimum(section, n_heads - first)
    i_in_section = i - first * n_tiles
    i_bh = first + i_in_section % heads_here
    return n_tiles - 1 - i_in_section // heads_here, i_bh % H, i_bh // H
