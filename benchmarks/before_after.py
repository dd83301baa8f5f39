"""Prints what a change costs the plain CPU calls: this checkout against another one, in turn, one process for each.

    git worktree add ../before COMMIT
    python benchmarks/before_after.py ../before [--rounds 15] [--filter "L512 fp32"]

Each sample is the CPU time of one thread, which other work on the machine disturbs little. malloc keeps its memory:
pages that it returns and gets again would cost one process or the other some milliseconds a call, as chance has it.
Both compile their kernels on first use.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import torch

import fastattn

SHAPES = {  # B, H, n_q, n_k, D
    "L128": (8, 12, 128, 128, 64),
    "L512": (4, 12, 512, 512, 64),
    "L2048": (1, 16, 2048, 2048, 64),
    "decode": (4, 12, 1, 4096, 64),
}
MASKS = ("none", "causal", "pad", "both")
DTYPES = ("fp32", "bf16")
PASSES = ("forward", "backward")

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}


class Worker:
    """A process that times calls of the fastattn in a checkout."""

    def __init__(self, checkout: Path):
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(checkout), "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(checkout)},
        )

    def seconds(self, case: str) -> float:
        """Of one call, the fastest of as many as take a few milliseconds."""
        print(case, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process of {self._process.args[-2]} died")
        return float(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="a checkout of the commit to compare with")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--filter", default="", metavar="WORDS", help="only cases with these words in their name")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.before)
    if not (args.before / "fastattn").is_dir():
        parser.error(f"before must be a checkout of fastattn, got {args.before}")
    before, after = Worker(args.before.resolve()), Worker(Path(__file__).resolve().parents[1])
    ratios = []
    print(f"{'case':27} {'before ms':>10} {'after ms':>10} {'after/before':>13}")
    for case in (" ".join(words) for words in product(SHAPES, MASKS, DTYPES, PASSES)):
        if not set(args.filter.split()) <= set(case.split()):
            continue
        samples = {before: [], after: []}
        for i in range(args.rounds):
            for worker in (before, after) if i % 2 else (after, before):
                samples[worker].append(worker.seconds(case))
        medians = [statistics.median(samples[worker]) for worker in (before, after)]
        ratios.append(medians[1] / medians[0])
        print(f"{case:27} {medians[0] * 1e3:10.2f} {medians[1] * 1e3:10.2f} {ratios[-1]:13.3f}", flush=True)
    if not ratios:
        parser.error(f"no case has all of the words {args.filter!r}")
    print(f"median {statistics.median(ratios):.3f}, largest {max(ratios):.3f}")


def work(checkout: Path) -> None:
    """Answers each case on standard input with its time."""
    if Path(fastattn.__file__).resolve().parents[1] != checkout:
        raise SystemExit(f"{fastattn.__file__} is not in {checkout}")
    torch.set_num_threads(1)
    calls = {}
    for case in map(str.strip, sys.stdin):
        if case not in calls:
            calls[case] = call_of(*case.split(" "))
            calls[case]()
        run, fastest, begin = calls[case], float("inf"), time.perf_counter()
        while fastest == float("inf") or time.perf_counter() - begin < 0.02:
            start = time.thread_time()
            run()
            fastest = min(fastest, time.thread_time() - start)
        print(fastest, flush=True)


def call_of(shape: str, mask: str, dtype: str, direction: str):
    """The call, with inputs of its own."""
    B, H, n_q, n_k, D = SHAPES[shape]
    torch.manual_seed(0)
    of_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    (q, do), (k, v) = (torch.randn(2, B, H, n, D).to(of_dtype) for n in (n_q, n_k))
    real_keys = None
    if mask in ("pad", "both"):
        lengths = torch.linspace(n_k / 4, n_k, B).long() if B > 1 else torch.tensor([n_k * 5 // 8])
        real_keys = torch.arange(n_k) < lengths[:, None]
    described = fastattn.Mask(causal=mask in ("causal", "both"), q_offset=n_k - n_q, real_keys=real_keys)
    if direction == "forward":
        return lambda: fastattn.attention(q, k, v, described, backend="fused")
    inputs = [x.requires_grad_() for x in (q.clone(), k.clone(), v.clone())]
    o = fastattn.attention(*inputs, described, backend="fused")
    return lambda: torch.autograd.grad(o, inputs, do, retain_graph=True)


if __name__ == "__main__":
    main()
