"""Ranges of the keys that each query of a packed document can see, computed on the device from ids in any order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiles import launch


def key_ranges(
    documents: tuple[Tensor, Tensor],
    real: tuple[Tensor, Tensor],
    positions_q: Tensor,
    left: int | None,
    right: int | None,
) -> Tensor:
    """int32 [B, n_q, 4]: (first, full_first, full_end, end) of the keys that each query sees; nothing synchronises.

    It sees none outside [first, end), and every one in [full_first, full_end), its first run of neighbours. A query
    that is not real excludes no tile from anything: (n_k, 0, n_k, 0). One that sees nothing makes no tile full.

    Args:
        documents: ids [B, n_q] and [B, n_k].
        real: bool, which of them may be read, [B, n_q] and [B, n_k].
        positions_q: where the queries stand in their documents, [B, n_q].
        left, right: how far a query sees from there, or None.
    """
    ids_q, ids_k = (ids.long() for ids in documents)
    real_q, real_k = real
    n_k = ids_k.shape[1]
    # Sorted by document, the keys of one are neighbours, and the one at position p is the p-th of them.
    sorted_ids, order = ids_k.sort(dim=-1, stable=True)
    start, stop = torch.searchsorted(sorted_ids, ids_q), torch.searchsorted(sorted_ids, ids_q, right=True)
    slot_first = start if left is None else torch.minimum(start + (positions_q - left).clamp(min=0), stop)
    slot_end = stop if right is None else torch.minimum(start + (positions_q + right + 1).clamp(min=0), stop)

    real_k = real_k.gather(1, order)
    follows = torch.zeros_like(real_k)  # whether a slot holds the key right after that of the slot before
    follows[:, 1:] = real_k[:, 1:] & (order.diff(dim=-1) == 1)
    slot_first = _next_true(real_k).gather(1, slot_first)
    last = n_k - 1 - _next_true(real_k.flip(1)).gather(1, n_k - slot_end)
    run_end = torch.minimum(_next_true(~follows).gather(1, (slot_first + 1).clamp(max=n_k)), slot_end)

    def key_at(slot: Tensor) -> Tensor:
        return order.gather(1, slot.clamp(0, n_k - 1))

    sees = real_q & (slot_first < slot_end)
    first, end = torch.where(sees, key_at(slot_first), n_k), torch.where(sees, key_at(last) + 1, 0)
    full_first, full_end = torch.where(real_q, first, 0), torch.where(sees, key_at(run_end - 1) + 1, 0)
    return torch.stack((first, full_first, torch.where(real_q, full_end, n_k), end), dim=-1).int()


def _next_true(x: Tensor) -> Tensor:
    """int64 [B, n + 1]: the first index from each one on where `x` [B, n] is True, n if there is none."""
    n = x.shape[1]
    index = torch.arange(n, device=x.device)
    result = torch.where(x, index, n).flip(1).cummin(1).values.flip(1)
    return torch.nn.functional.pad(result, (0, 1), value=n)


def tile_ranges(ranges: Tensor, block_m: int) -> Tensor:
    """int32 [B, query tiles, 5] of `key_ranges`: what some row of a tile of `block_m` queries sees, and what all do.

    The fifth is 1 where some row is not a real query, else 0.
    """
    B, n_q, _ = ranges.shape
    tiles = triton.cdiv(n_q, block_m)
    result = ranges.new_empty(B, tiles, 5)
    lanes = triton.next_power_of_2(block_m)
    launch(tile_ranges_kernel, B * tiles, ranges, result, n_q, BLOCK_M=block_m, LANES=lanes, num_warps=1)
    return result


@triton.jit(do_not_specialize=["n_q"])
def tile_ranges_kernel(ranges, result, n_q, BLOCK_M: tl.constexpr, LANES: tl.constexpr):
    """One tile's row of `tile_ranges`."""
    i_program = tl.program_id(0).to(tl.int64)
    n_tiles = tl.cdiv(n_q, BLOCK_M)
    o_lane = tl.arange(0, LANES)
    i_b, o_q = i_program // n_tiles, i_program % n_tiles * BLOCK_M + o_lane
    p_row, m_row = ranges + (i_b * n_q + o_q) * 4, (o_q < n_q) & (o_lane < BLOCK_M)
    far = 2**31 - 1
    b_full_end, b_end = tl.load(p_row + 2, mask=m_row, other=far), tl.load(p_row + 3, mask=m_row, other=0)
    p_result = result + i_program * 5
    tl.store(p_result, tl.min(tl.load(p_row, mask=m_row, other=far), 0))
    tl.store(p_result + 1, tl.max(tl.load(p_row + 1, mask=m_row, other=0), 0))
    tl.store(p_result + 2, tl.min(b_full_end, 0))
    tl.store(p_result + 3, tl.max(b_end, 0))
    m_unreal = (o_lane < BLOCK_M) & (b_end < b_full_end)  # as in no row of a real query
    tl.store(p_result + 4, tl.max(m_unreal.to(tl.int32), 0))
