"""Prints what each rank computes and receives by plans of fastattn.parallel, and models the time on many ranks.

    python -m benchmarks.parallel [--tokens 65536] [--ranks 8] [--mask "window"]
    python -m benchmarks.parallel --scale [--rate 400e12] [--bandwidth 50e9]
    torchrun --nproc-per-node 2 -m benchmarks.parallel --measure [--tokens 16384]

The first table is of counts alone: pairs of a query and a key that the busiest rank computes, over the mean, and keys
that a rank receives, over all keys, for each layout; the one that a plan chooses is marked. --scale has a model of one
call of forward and backward in place of these, with as many tokens for each rank: the longer of what the busiest rank
computes and receives, at the rates that are given, and the share of its time in which it computes as much as the mean.
--measure times such calls of this machine's processes; with --nproc-per-node 1 and OMP_NUM_THREADS=2 those of one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

import fastattn
from fastattn import Mask
from fastattn.parallel import plan
from fastattn.parallel.plans import ALGORITHMS

HEADS, KEY_HEADS, HEAD_DIM, BYTES = 32, 8, 128, 2  # of the model, in bf16
BACKWARD = 2.5  # times the operations of a forward; it receives the keys again, and sends gradients of as many


def documents(n: int, longest: int) -> torch.Tensor:
    """Ids [1, n] of documents whose lengths are log-normal, 2000 tokens in the middle: 23 of them in 65,536 tokens."""
    generator, lengths = torch.Generator().manual_seed(0), []
    while sum(lengths) < n:
        length = torch.randn((), generator=generator).mul(1.2).add(7.6).exp().item()
        lengths.append(int(min(max(length, 64), longest)))
    lengths[-1] -= sum(lengths) - n
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


def masks(n: int) -> Iterator[tuple[str, Mask]]:
    """The masks of the tables, by name."""
    part, index, ids = [int(0.6 * n)], torch.arange(n), documents(n, 16384)
    first = int(0.3 * n)
    yield "causal", Mask(True)
    yield "causal, right-padded to 60 %", Mask(True) & Mask.from_lengths(part, n, of="both")
    yield "causal, left-padded to 60 %", Mask(True) & Mask.from_lengths(part, n, padding_side="left", of="both")
    yield f"{int(ids.max()) + 1} causal documents", Mask(True, segment_ids=(ids, ids))
    yield "prefix-LM, 30 % seen by all", Mask(True, q_offset=torch.where(index < first, first - 1 - index, 0)[None])
    yield "causal window of 4096", Mask(True, window=(4095, None))


def counts(n: int, ranks: int, only: str) -> Iterator[str]:
    """The lines of the first table."""
    layouts = ALGORITHMS["gather"]
    yield f"| {n} tokens, {ranks} ranks | " + " | ".join(layouts) + " |"
    yield "|---" + "|--:" * len(layouts) + "|"
    for name, mask in masks(n):
        if only not in name:
            continue
        chosen, cells = plan(mask, n, ranks).layout, []
        for layout in layouts:
            this = plan(mask, n, ranks, layout=layout)
            cell = f"{this.work.max() / this.work.mean():.2f}, {this.received.max() / n:.2f}"
            cells.append(f"**{cell}**" if layout == chosen else cell)
        yield f"| {name} | " + " | ".join(cells) + " |"


def scale(tokens: int, rate: float, bandwidth: float, only: str) -> Iterator[str]:
    """The lines of the model, of `tokens` for each rank."""
    all_ranks = (8, 32, 128, 512, 1024)
    key_bytes = 2 * KEY_HEADS * HEAD_DIM * BYTES
    pair_operations = 4 * HEADS * HEAD_DIM
    key_cost = key_bytes / bandwidth * rate / pair_operations
    yield f"| {tokens} tokens a rank | " + " | ".join(f"{ranks} ranks" for ranks in all_ranks) + " |"
    yield "|---" + "|--:" * len(all_ranks) + "|"
    rows: dict[str, list[str]] = {}
    for ranks in all_ranks:
        for name, mask in masks(tokens * ranks):
            kind = "causal documents" if name.endswith("documents") else name
            if only not in kind:
                continue
            this = plan(mask, tokens * ranks, ranks, key_cost=key_cost)
            computing = this.work * pair_operations * (1 + BACKWARD) / rate
            receiving = this.received * key_bytes * 3 / bandwidth
            share = computing.mean() / torch.maximum(computing, receiving).max()
            rows.setdefault(kind, []).append(f"{100 * share:.0f} %")
    for name, cells in rows.items():
        yield f"| {name} | " + " | ".join(cells) + " |"


def measure(n: int) -> Iterator[str]:
    """Lines with the times of calls of all processes, each the least of three."""
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, heads, n, 64, generator=generator) for heads in (4, 4, 4)]
    mask = Mask(True) & Mask.from_lengths([int(0.9 * n)], n, of="both")
    this = plan(mask, n, dist.group.WORLD)
    q, k, v = (this.shard(x, 2).requires_grad_() for x in whole)
    alone = dist.get_world_size() == 1
    times: dict[str, list[float]] = {"forward": [], "forward and backward": []}
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        o = fastattn.attention(q, k, v, mask, plan=None if alone else this)
        dist.barrier()
        times["forward"].append(time.perf_counter() - start)
        o.sum().backward()
        dist.barrier()
        times["forward and backward"].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        processes = f"{dist.get_world_size()} processes of {torch.get_num_threads()} threads"
        for name, each in times.items():
            yield f"{name}: {min(each[1:]):.2f} s, {processes}, {n} tokens, causal with padding, {this.layout}"
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel", description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, help="65536 in all; 4096 a rank of --scale; 16384 of --measure")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--mask", default="", help="only masks with these words in their names")
    parser.add_argument("--scale", action="store_true", help="model the time on 8 to 1024 ranks")
    parser.add_argument("--rate", type=float, default=400e12, help="operations a second that a rank reaches")
    parser.add_argument("--bandwidth", type=float, default=50e9, help="bytes a second that a rank receives")
    parser.add_argument("--measure", action="store_true", help="time calls, under torchrun")
    given = parser.parse_args()
    if given.measure:
        lines = measure(given.tokens or 16384)
    elif given.scale:
        lines = scale(given.tokens or 4096, given.rate, given.bandwidth, given.mask)
    else:
        lines = counts(given.tokens or 65536, given.ranks, given.mask)
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
