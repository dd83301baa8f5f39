"""Prints what the recipes of docs/recipes.md cost beside the naive way, on the CPU: the page's own functions, in turns.

Each answer is first held to that of the naive function in fp64: at most twice as far off as the naive one in fp32, plus
4 eps. Memory is what torch's allocator hands out above the inputs.

    python -m benchmarks.recipes [--json FILE] [--filter alibi]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from docs import pages
from fastattn.bench.timing import Call, interleave, peak_bytes
from fastattn.bench.writing import file_to_write, write_rows
from fastattn.testing import compare

SECONDS = 6.0  # for each recipe
SEED = 0


def heads(*lengths: int, B: int = 1, H: int = 8, D: int = 64) -> list[Tensor]:
    """Random q, k, v, ... of these lengths."""
    return [torch.randn(B, H, n, D) for n in lengths]


def block_layout(blocks: int) -> Tensor:
    """Neighbours, a first block that sees all and is seen by all, and three blocks at random."""
    block = torch.arange(blocks)
    layout = (block[:, None] - block).abs() <= 1
    layout[0] = layout[:, 0] = True
    return layout.scatter(1, torch.randint(0, blocks, (blocks, 3)), True)


RECIPES: dict[str, tuple[str, Callable[[], list]]] = {  # the function on the page: the shape in words, its arguments
    "prefix_lm": (
        "2 samples, 8 heads of 64, 2048 tokens, prefixes of 256 and 1024",
        lambda: [*heads(2048, 2048, 2048, B=2), torch.tensor([256, 1024])],
    ),
    "alibi": ("8 heads of 64, 2048 tokens", lambda: [*heads(2048, 2048, 2048), 2.0 ** -torch.arange(1.0, 9.0)]),
    "t5": ("4 samples, 8 heads of 64, 512 tokens", lambda: [*heads(512, 512, 512, B=4), torch.randn(1, 8, 512, 512)]),
    "window_and_first": (
        "8 heads of 64, 4096 tokens, a window of 256 and the first 4",
        lambda: [*heads(4096, 4096, 4096), 256, 4],
    ),
    "documents": (
        "8 heads of 64, 16 documents of 64 to 448 tokens, 4096 in all",
        lambda: [
            *(torch.randn(4096, 8, 64) for _ in range(3)),
            torch.nn.functional.pad(torch.tensor([64, 448, 128, 384, 192, 320, 256, 256] * 2).cumsum(0), (1, 0)),
        ],
    ),
    "block_sparse": (
        "8 heads of 64, 4096 tokens in blocks of 64, of which most see 7",
        lambda: [*heads(4096, 4096, 4096), block_layout(64)],
    ),
    "tree": (
        "8 heads of 64, 4096 cached keys, a binary tree of 31 nodes",
        lambda: [*heads(31, 4127, 4127), [(node - 1) // 2 for node in range(31)]],
    ),
    "cross": (
        "8 samples, 8 heads of 64, 512 queries and 1024 keys, lengths spread evenly from a quarter on",
        lambda: [
            *heads(512, 1024, 1024, B=8),
            *(torch.linspace(n / 4, n, 8).long().roll(shift) for n, shift in ((512, 0), (1024, 3))),
        ],
    ),
    "attention_map": ("8 heads of 64, 2048 tokens", lambda: heads(2048, 2048, 2048)),
    "evidence": ("8 heads of 64, 2048 tokens", lambda: heads(2048, 2048)),
    "kept_keys": ("8 heads of 64, the last 256 of 8192 tokens, 1024 kept", lambda: [*heads(256, 8192), 1024]),
    "differential": (
        "8 heads of 64 and 128, 2048 tokens",
        lambda: [*heads(2048, 2048, 2048, 2048), *heads(2048, D=128), torch.tensor(0.8)],
    ),
    "long_context": ("2 heads of 64, 8192 tokens", lambda: heads(8192, 8192, 8192, H=2)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="keep every sample here")
    parser.add_argument("--filter", default="", help="only recipes with this in their name")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each recipe (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(2)
    *_, (_, _, page) = pages.run(pages.FOLDER / "recipes.md")
    rows = []
    for name in (name for name in RECIPES if args.filter in name):
        row = measured(name, page, args.seconds)
        rows.append(row)
        medians = {who: sorted(taken)[len(taken) // 2] for who, taken in row["seconds"].items()}
        memory = {who: f"{peak / 2**20:.1f} MiB" for who, peak in row["peak_bytes"].items()}
        times = ", ".join(f"{who} {1e3 * medians[who]:.2f} ms {memory[who]}" for who in medians)
        print(f"{name}: {times}, {medians['naive'] / medians['fastattn']:.2f}", flush=True)
    write_rows(args.json, rows)


def measured(name: str, page: dict[str, object], seconds: float) -> dict[str, object]:
    """The samples of a recipe and of its naive way.

    Raises:
        SystemExit: the answer is not right.
    """
    torch.manual_seed(SEED)
    shape, arguments = RECIPES[name]
    ours, naive, args = page[name], page[f"{name}_naive"], arguments()
    call = with_gradients if name == "t5" else without_gradients
    exact = call(naive, [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args])
    for actual, other, truth in zip(call(ours, args), call(naive, args), exact, strict=True):
        if not actual.is_floating_point():  # indices, of which rounding exchanges some
            right = (actual == truth).double().mean() > 0.99
        else:
            right = compare(name, actual, other, truth).right
        if not right:
            raise SystemExit(f"{name} is wrong")
    calls = {"naive": Call(partial(call, naive, args)), "fastattn": Call(partial(call, ours, args))}
    timings = interleave(calls, seconds, "cpu")
    return {
        "what": name,
        "shape": shape,
        "seconds": {who: timing.seconds for who, timing in timings.items()},
        "peak_bytes": {who: peak_bytes(call, "cpu") for who, call in calls.items()},
    }


@torch.no_grad()
def without_gradients(function: Callable, args: list) -> list[Tensor]:
    return pytree.tree_leaves(function(*args))


def with_gradients(function: Callable, args: list) -> list[Tensor]:
    """The output, and the gradients of all arguments."""
    args = [x.detach().requires_grad_() for x in args]
    o = function(*args)
    return [o.detach(), *torch.autograd.grad(o, args, torch.ones_like(o))]


if __name__ == "__main__":
    main()
