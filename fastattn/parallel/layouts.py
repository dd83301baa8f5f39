"""Layouts: which rank has which tokens, so that no rank computes or receives much more than another."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .masks import Visibility

BLOCK = 128
"""Tokens that stay together, as many as the tiles of kernels have."""

_ALIKE = 1.04  # layouts whose costs differ by less are told apart by what is received


@dataclass(frozen=True, eq=False)
class Layout:
    """The rank that has each query and each key, and what comes of it.

    name: "contiguous", or a key of `LAYOUTS`.
    owner_q, owner_k: int64 [n_q], [n_k]; in self-attention the same tensor.
    work: float64 [ranks], pairs of a query and a key that it sees, in all samples.
    received: int64 [ranks], keys that come from other ranks, in all samples.
    """

    name: str
    owner_q: Tensor
    owner_k: Tensor
    work: Tensor
    received: Tensor

    @classmethod
    def of(cls, name: str, visibility: Visibility, ranks: int, owner_q: Tensor, owner_k: Tensor) -> Layout:
        """The layout with what comes of it."""
        work = torch.zeros(ranks, dtype=torch.float64, device="cpu").index_add_(0, owner_q, visibility.pairs)
        return cls(name, owner_q, owner_k, work, visibility.received(owner_q, owner_k, ranks))


def choose(visibility: Visibility, ranks: int, together: bool, names: Sequence[str], key_cost: float) -> Layout:
    """The layout of the least cost, or nearly so, among those of these names, that receives least of such.

    The cost is the time of the busiest rank, max(pairs, key_cost * keys received): both can be under way at once.

    Args:
        together: query i and key i are of one token, which one rank has; else the keys lie as `contiguous` has them.
    """
    n_q, n_k = visibility.n_q, visibility.n_k
    block = min(BLOCK, 2 ** (max(1, n_q // (4 * ranks)).bit_length() - 1))  # of few tokens, some blocks for each rank
    work = pad(visibility.pairs, (0, -n_q % block)).view(-1, block).sum(1)

    def layout(name: str) -> Layout:
        if name == "contiguous":
            owner = contiguous(n_q, ranks)
        else:
            owner = LAYOUTS[name](work, ranks).repeat_interleave(block)[:n_q]
        return Layout.of(name, visibility, ranks, owner, owner if together else contiguous(n_k, ranks))

    def cost(layout: Layout) -> float:
        return torch.maximum(layout.work, layout.received * key_cost).max().item()

    layouts = [layout(name) for name in (names if ranks > 1 else names[:1])]
    good = [each for each in layouts if cost(each) <= _ALIKE * min(map(cost, layouts))]
    return min(good, key=lambda each: (each.received.max().item(), each.received.sum().item()))


def contiguous(n: int, ranks: int) -> Tensor:
    """int64 [n], ranks with runs of tokens, as long as in `torch.chunk` and in DTensor."""
    return torch.arange(n, device="cpu") // max(1, -(-n // ranks))


def zigzag(work: Tensor, ranks: int) -> Tensor:
    """int64 [blocks], ranks with a run of the first half and its mirror image: equal work under a causal mask."""
    run = torch.arange(len(work), device="cpu") * 2 * ranks // max(1, len(work))
    return torch.minimum(run, 2 * ranks - 1 - run)


def in_runs(work: Tensor, ranks: int) -> Tensor:
    """int64 [blocks], ranks with equal work in equal numbers of blocks, most of them next to each other.

    Where work falls from one block to the next, a document ends. From the documents with the largest blocks to those
    with the smallest, and in each from its last block to its first, blocks form a line: each rank takes some from its
    beginning, which are much work, and the others from its end. So few documents are on several ranks.
    """
    blocks = len(work)
    falls = pad(work[1:] < work[:-1], (1, 0))[: max(blocks - 1, 0)]  # a block with two documents belongs to the first
    document = pad(falls.long().cumsum(0), (1, 0))[:blocks]
    largest = torch.zeros(blocks, dtype=work.dtype, device="cpu").scatter_reduce_(0, document, work, "amax")
    line = torch.arange(blocks, device="cpu").flip(0)
    line = line[largest[document[line]].argsort(descending=True, stable=True)]
    done = pad(work[line].cumsum(0), (1, 0))
    first, stop, owner = 0, blocks, torch.zeros(blocks, dtype=torch.int64, device="cpu")
    for rank in range(ranks):
        share = -(-(stop - first) // (ranks - rank))
        heads = torch.arange(share + 1, device="cpu")  # so many from the beginning, and the others from the end
        taken = done[first + heads] - done[first] + done[stop] - done[stop - share + heads]
        head = int((taken - (done[stop] - done[first]) / (ranks - rank)).abs().argmin())
        owner[line[first : first + head]] = owner[line[stop - share + head : stop]] = rank
        first, stop = first + head, stop - share + head
    return owner


def longest_first(work: Tensor, ranks: int) -> Tensor:
    """int64 [blocks], ranks with equal work in equal numbers of blocks: each goes to the rank with the least yet."""
    most, owner = -(-len(work) // ranks), torch.zeros(len(work), dtype=torch.int64, device="cpu")
    loads = [(0.0, rank, 0) for rank in range(ranks)]
    for block in work.argsort(descending=True, stable=True).tolist():
        load, rank, blocks = heapq.heappop(loads)
        owner[block] = rank
        if blocks + 1 < most:
            heapq.heappush(loads, (load + work[block].item(), rank, blocks + 1))
    return owner


LAYOUTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "zigzag": zigzag,
    "in runs": in_runs,
    "longest first": longest_first,
}
"""How blocks of tokens are dealt to ranks by the work of each: `LAYOUTS[name](work, ranks)`."""
