"""Keys that queries see, without a table of all pairs: how many, which ones, and the mask of a part of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from ..spec import Mask

_FAR = 2**62  # positions beyond are as good as there, and sums of two such numbers stay in int64
_PAIRS_AT_ONCE = 2**24  # of a dense mask


class Visibility:
    """The keys that each of n_q queries sees among n_k, under a mask whose tensors are on the CPU.

    Keys have an order of their own in each sample, documents one after the other, in which the keys that fields other
    than `real_keys` and `dense` show to a query are a run: from slot `first` on, before slot `stop`.
    """

    def __init__(self, mask: Mask, n_q: int, n_k: int) -> None:
        self.mask, self.n_q, self.n_k = mask, n_q, n_k
        position, _ = mask.positions(n_q, n_k, "cpu")
        position = position.clamp(-_FAR, _FAR)
        if mask.segment_ids is None:
            self.order = torch.arange(n_k, device="cpu")[None]
            begin, end = torch.zeros_like(position), torch.full_like(position, n_k)
        else:
            ids_q, ids_k = (ids.contiguous() for ids in mask.segment_ids)
            in_order, self.order = ids_k.sort(dim=-1, stable=True)
            begin, end = (
                torch.searchsorted(in_order, ids_q.to(in_order.dtype), right=right) for right in (False, True)
            )
            position = position + begin
        left, right = mask.window
        right = min(_FAR if right is None else right, 0 if mask.causal else _FAR)
        last = end if right == _FAR else torch.minimum(position + right + 1, end)
        first = begin if left is None else torch.maximum(position - min(left, _FAR), begin)
        first = torch.minimum(first, end)
        self.readable_q = real = mask.readable_queries()
        stop = torch.maximum(last if real is None else last.masked_fill(~real, 0), first)
        self.first, self.stop = torch.broadcast_tensors(first, stop)
        self.readable = mask.readable_keys()

    @cached_property
    def samples(self) -> int:
        """1 where all samples are alike, or else their number."""
        of_each = [self.stop, self.order, self.readable]
        if self.mask.dense is not None and self.mask.dense.dim() == 4:
            of_each.append(self.mask.dense)
        return max(len(x) for x in of_each if x is not None)

    @cached_property
    def pairs(self) -> Tensor:
        """float64 [n_q]: how many keys each query sees, summed over the samples (and averaged over heads)."""
        if self.mask.dense is not None:
            seen = [keep.double().mean(1).sum((0, 2)) for _, keep in self._dense_rows()]
            return torch.cat(seen) if seen else torch.zeros(0, dtype=torch.float64, device="cpu")
        if self.readable is None:
            return (self.stop - self.first).sum(0).double() * (self.samples // len(self.stop))
        before = torch.nn.functional.pad(self.readable.gather(1, self._order()).cumsum(1), (1, 0))
        first, stop = (x.expand(self.samples, -1) for x in (self.first, self.stop))
        return (before.gather(1, stop) - before.gather(1, first)).sum(0).double()

    def needed(self, group: Tensor, groups: int) -> Tensor:
        """bool [groups, samples, n_k]: the keys that some query of each group sees.

        Args:
            group: int64 [n_q], the group of each query; a negative one is of none.
        """
        if self.mask.dense is not None:
            need = torch.zeros(groups, self.samples, self.n_k, dtype=torch.bool, device="cpu")
            for rows, keep in self._dense_rows():
                seen = keep.any(1)
                for g in group[rows].clamp(min=0).unique().tolist():
                    need[g] |= seen[:, group[rows] == g].any(1)
            return need
        B, n_k = len(self.stop), self.n_k
        changes = torch.zeros(groups * B * (n_k + 1), dtype=torch.int32, device="cpu")
        place = (group * B + torch.arange(B, device="cpu")[:, None]) * (n_k + 1)
        seeing = (self.stop > self.first) & (group >= 0)
        for slot, sign in ((self.first, 1), (self.stop, -1)):
            at = (place + slot)[seeing]
            changes.index_add_(0, at, torch.full_like(at, sign, dtype=torch.int32))
        by_slot = changes.view(groups, B, n_k + 1).cumsum(2, dtype=torch.int32)[..., :n_k] > 0
        by_slot = by_slot.expand(-1, self.samples, -1)
        if self.mask.segment_ids is None:
            need = by_slot
        else:
            order = self._order().expand(groups, -1, -1)
            need = torch.zeros(by_slot.shape, dtype=torch.bool, device="cpu").scatter_(2, order, by_slot)
        return need if self.readable is None else need & self.readable

    def received(self, owner_q: Tensor, owner_k: Tensor, ranks: int) -> Tensor:
        """int64 [ranks], how many keys, in all samples, the queries of each rank see that another rank has.

        As `needed` tells, but in O(samples * (n_q + n_k)) memory for any number of ranks.
        """
        if self.mask.dense is not None:
            elsewhere = owner_k != torch.arange(ranks, device="cpu")[:, None]
            return (self.needed(owner_q, ranks) & elsewhere[:, None]).sum((1, 2))
        total, width = torch.zeros(ranks, dtype=torch.int64, device="cpu"), self.n_k + 1
        of_runs = [len(self.stop), len(self.order), 1 if self.readable is None else len(self.readable)]
        for sample in range(max(of_runs)):
            runs, order, readable = (sample % n for n in of_runs)
            real = self.order.new_ones(self.n_k) if self.readable is None else self.readable[readable].long()
            before = torch.nn.functional.pad(real[self.order[order]].cumsum(0), (1, 0))
            seeing = self.stop[runs] > self.first[runs]
            first, by = (owner_q[seeing] * width + self.first[runs, seeing]).sort()  # the slots of each rank in turn
            rank = owner_q[seeing][by]
            stop = rank * width + self.stop[runs, seeing][by]
            last = stop.cummax(0).values  # what the runs so far have reached
            new = torch.maximum(first, torch.nn.functional.pad(last[:-1], (1, 0))) if len(last) else first
            seen = before[torch.maximum(stop, new) - rank * width] - before[new - rank * width]
            total.index_add_(0, rank, seen)
            key = torch.arange(self.n_k, device="cpu")
            slot = owner_k[self.order[order]] * width + key  # where its own rank would see it
            run = torch.searchsorted(first, slot, right=True) - 1
            own = (run >= 0) & (slot < last[run.clamp(min=0)]) if len(last) else run >= 0
            total.index_add_(0, owner_k[self.order[order]], -(own * real[self.order[order]]))
        return total * (self.samples // max(of_runs))

    def _order(self) -> Tensor:
        return self.order.expand(self.samples, -1)

    def _dense_rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Some rows, and what the whole mask shows them: bool [samples, H or 1, rows, n_k]."""
        heads = self.mask.dense.shape[-3] if self.mask.dense.dim() > 2 else 1
        size = max(1, _PAIRS_AT_ONCE // max(1, self.samples * heads * self.n_k))
        for start in range(0, self.n_q, size):
            rows = slice(start, min(start + size, self.n_q))
            keep = self.mask.keep(self.n_q, self.n_k, "cpu", rows)
            yield rows, keep.expand(self.samples, -1, rows.stop - start, self.n_k)


def at(table: Tensor, dim: int, index: Tensor) -> Tensor:
    """Entries of a table that is broadcastable to [B, H, n_q, n_k], along a dimension of that, from -3 on."""
    return table if table.dim() < -dim or table.shape[dim] == 1 else table.index_select(dim, index)


def with_gaps_filled(keys: Tensor, mask: Mask, n_k: int) -> Tensor:
    """`keys` [m], ascending, and all keys between them, in each document: without a gap positions can be told."""
    chosen = torch.zeros(n_k, dtype=torch.bool, device="cpu").index_fill_(0, keys, True)
    if mask.segment_ids is None:
        chosen[keys.min() : keys.max() + 1] = True
        return chosen.nonzero()[:, 0]
    in_order, order = mask.segment_ids[1].sort(dim=-1, stable=True)
    document = torch.searchsorted(in_order, in_order)  # by the slot of its first key
    slot = torch.arange(n_k, device="cpu").expand_as(order)
    while True:
        taken = chosen[order]
        first = torch.full_like(slot, n_k).scatter_reduce_(1, document, slot.masked_fill(~taken, n_k), "amin")
        last = torch.full_like(slot, -1).scatter_reduce_(1, document, slot.masked_fill(~taken, -1), "amax")
        between = (slot >= first.gather(1, document)) & (slot <= last.gather(1, document)) & (in_order >= 0)
        filled = chosen | torch.zeros_like(between).scatter_(1, order, between).any(0)
        if torch.equal(filled, chosen):  # what one sample fills may leave a gap in another
            return chosen.nonzero()[:, 0]
        chosen = filled


def in_fours(keys: Tensor, n_k: int) -> Tensor:
    """`keys` [m], ascending, and all of each four neighbours 4j, ..., 4j + 3 of which one is there."""
    keys = ((keys // 4).unique_consecutive()[:, None] * 4 + torch.arange(4, device="cpu")).flatten()
    return keys[keys < n_k]


def runs_of(keys: Tensor) -> list[Tensor]:
    """Ascending indices, cut where so many are missing that filling the gap would take a quarter more memory."""
    wide = keys.diff() > max(1, len(keys) // 4)
    return [run for run in keys.tensor_split(wide.nonzero()[:, 0] + 1) if len(run)]


def part_of(mask: Mask, n_q: int, n_k: int, rows: Tensor, keys: Tensor, there: Tensor, positional: bool) -> Mask:
    """What `mask` shows to the queries `rows` [R] of the keys `keys` [K], both ascending.

    Args:
        there: bool [B, K], True for a key that may be read.
        positional: positions matter: between two keys of a document `keys` then has all others of it.
    """
    segment_ids, q_offset = mask.segment_ids, 0
    if segment_ids is not None:
        segment_ids = segment_ids[0][:, rows].contiguous(), segment_ids[1][:, keys].contiguous()
    if positional and len(rows) and len(keys):
        position_q, position_k = mask.positions(n_q, n_k, "cpu")
        local_q, local_k = Mask(segment_ids=segment_ids).positions(len(rows), len(keys), "cpu")
        before = position_k[:, keys] - local_k  # the keys of its document that come before all of `keys`
        if segment_ids is None:
            before = before[:, :1]
        else:
            in_order, order = segment_ids[1].sort(dim=-1)
            slot = torch.searchsorted(in_order, segment_ids[0].to(in_order.dtype)).clamp(max=len(keys) - 1)
            before = before.gather(1, order.gather(1, slot))  # of another document where it has no key: it sees none
        q_offset = _simplest(position_q[:, rows] - before - local_q, len(there))
    dense = None if mask.dense is None else at(at(mask.dense, -2, rows), -1, keys)
    real_queries = None if mask.real_queries is None else mask.real_queries[:, rows]
    real_keys = None if there.all() else there
    return replace(
        mask, q_offset=q_offset, real_keys=real_keys, real_queries=real_queries, segment_ids=segment_ids, dense=dense
    )


def _simplest(q_offset: Tensor, B: int) -> Tensor | int:
    """An offset [1 or B, R] as an int or as [B] where it is the same for all queries."""
    if (q_offset != q_offset[:, :1]).any():
        return q_offset.expand(B, -1).contiguous()
    return int(q_offset[0, 0]) if (q_offset == q_offset[0, 0]).all() else q_offset[:, 0].contiguous()


def is_positional(mask: Mask, alibi_slopes: Tensor | None) -> bool:
    """Whether what a query sees, and how, depends on where it stands."""
    return mask.causal or mask.window != (None, None) or alibi_slopes is not None


def on(mask: Mask, device: torch.device | str) -> Mask:
    """The same mask with its tensors on that device."""
    return with_tensors(mask, {name: x.to(device) for name, x in mask.tensors().items()})


def with_tensors(mask: Mask, tensors: dict[str, Tensor]) -> Mask:
    """The mask with others in place of its tensors, by the names that `Mask.tensors` gives them."""
    fields = {name: x for name, x in tensors.items() if not name.startswith("segment_ids")}
    ids = tuple(x for name, x in tensors.items() if name.startswith("segment_ids"))
    return replace(mask, **fields, segment_ids=ids or None)
