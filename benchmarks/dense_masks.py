"""Prints what a bool mask of blocks costs on the CPU, in units of the visible share of the unmasked call's time.

    python -m benchmarks.dense_masks [--rounds 100] [--visible 0.26] [--filter "n 512"]

1.0 would be a call in which everything takes time by the visible pairs. Each sample is the CPU time of one thread, both
calls take turns, and a row has the median over the rounds. An answer is compared with PyTorch's before it is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

import fastattn
from benchmarks.short_calls import in_turns, positive
from fastattn import Mask
from fastattn.bench.cases import has_words

B, H, D, BLOCK = 1, 8, 64, 64
LENGTHS = (512, 1024, 2048)
LIMIT = 1.2


def block_mask(n: int, share: float) -> Tensor:
    """bool [n, n]: each block of queries sees its own keys, and others at random up to this share of all blocks."""
    blocks = n // BLOCK
    layout = torch.eye(blocks, dtype=torch.bool).flatten()
    others = (~layout).nonzero()[:, 0]
    layout[others[torch.randperm(len(others))[: max(round(share * blocks**2) - blocks, 0)]]] = True
    return layout.view(blocks, blocks).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


def call(mask: Mask | None, backward: bool, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Callable[[], object]:
    """One pass of attention under this mask."""
    if not backward:
        return lambda: fastattn.attention(q.detach(), k.detach(), v.detach(), mask)
    o = fastattn.attention(q, k, v, mask)
    return lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)


def main() -> None:
    """Prints a row for each length and pass: both times in microseconds, the visible share, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=100)
    parser.add_argument("--visible", type=float, default=0.26, metavar="SHARE", help="of the blocks")
    parser.add_argument("--filter", default="", metavar="WORDS", help="only rows with these words in their name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'call':24} {'masked':>9} {'unmasked':>9} {'visible':>8} {'ratio':>6} {'limit':>6}")
    for n, backward in product(LENGTHS, (False, True)):
        name = f"n {n}, {'backward' if backward else 'forward'}"
        if not has_words(name, options.filter):
            continue
        torch.manual_seed(0)
        inputs = [torch.randn(B, H, n, D, requires_grad=i < 3) for i in range(4)]
        dense = block_mask(n, options.visible)
        exact = F.scaled_dot_product_attention(*inputs[:3], dense)
        torch.testing.assert_close(fastattn.attention(*inputs[:3], Mask(dense=dense)), exact, rtol=1e-4, atol=1e-5)
        share = dense.double().mean().item()
        calls = [call(mask, backward, *inputs) for mask in (Mask(dense=dense), None)]
        masked, unmasked, ratio = in_turns(*calls, options.rounds, max(1, 2**20 // n**2))
        times = f"{masked * 1e6:8.1f}u {unmasked * 1e6:8.1f}u"
        print(f"{name:24} {times} {share:8.3f} {ratio / share:6.2f} {LIMIT:6.1f}", flush=True)


if __name__ == "__main__":
    main()
