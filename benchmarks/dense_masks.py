"""Prints what a bool mask of 64 x 64 blocks costs on the CPU, in units of the visible share of the unmasked call's time.

    python benchmarks/dense_masks.py [--rounds 100] [--visible 0.26] [--filter "n 512"]

1.0 would be a call whose every cost goes with the pairs that are visible. Each sample is the CPU time of one thread, the
calls take turns, and a row has the median over the rounds. Before it is timed, an answer is compared with PyTorch's.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from short_calls import in_turns, positive
from torch import Tensor

import fastattn
from fastattn import Mask

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


def main() -> None:
    """Prints a row for each length and pass: both times in microseconds, the share, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=100)
    parser.add_argument("--visible", type=float, default=0.26, metavar="SHARE", help="of the blocks")
    parser.add_argument("--filter", default="", metavar="WORDS", help="only rows with these words in their name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'call':24} {'masked':>9} {'unmasked':>9} {'visible':>8} {'ratio':>6} {'limit':>6}")
    for n in LENGTHS:
        torch.manual_seed(0)
        q, k, v, do = (torch.randn(B, H, n, D, requires_grad=i < 3) for i in range(4))
        dense = block_mask(n, options.visible)
        share = dense.double().mean().item()
        masks = (Mask(dense=dense), None)
        torch.testing.assert_close(
            fastattn.attention(q, k, v, masks[0]), F.scaled_dot_product_attention(q, k, v, dense), rtol=1e-4, atol=1e-5
        )
        for name in ("forward", "backward"):
            row = f"n {n}, {name}"
            if options.filter not in row:
                continue
            calls = []
            for mask in masks:
                if name == "forward":
                    inputs = [x.detach() for x in (q, k, v)]
                    calls.append(lambda inputs=inputs, mask=mask: fastattn.attention(*inputs, mask))
                else:
                    o = fastattn.attention(q, k, v, mask)
                    calls.append(lambda o=o: torch.autograd.grad(o, (q, k, v), do, retain_graph=True))
            masked, unmasked, ratio = in_turns(*calls, options.rounds, max(1, 2**20 // n**2))
            print(
                f"{row:24} {masked * 1e6:8.1f}u {unmasked * 1e6:8.1f}u {share:8.3f} {ratio / share:6.2f} {LIMIT:6.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
