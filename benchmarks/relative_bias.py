"""Prints what a training step of a small T5's encoder takes with its bias as a table, written out, and by PyTorch.

    python benchmarks/relative_bias.py [--n 4096] [--steps 3]

The encoder has the sizes of T5-small (8 heads of 64, 6 layers), one sample of n tokens with 10 % padding, in fp32. Each
row is a process of its own: the median of the steps, and the largest resident memory beyond that before the first one.
"written out" is fastattn with the bias that T5 makes itself, [1, heads, n, n].
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time

import torch
import transformers

import fastattn
from fastattn.bench.writing import positive_int
from fastattn.integrations import transformers as integration

WAYS = {
    "table": "fastattn, a table",
    "written out": "fastattn, written out",
    "sdpa": "PyTorch's sdpa",
    "eager": "eager",
}


def measured(way: str, n: int, steps: int) -> tuple[float, float]:
    """Seconds of a step, and MiB."""
    torch.manual_seed(0)
    model = transformers.T5EncoderModel(transformers.T5Config(vocab_size=1000, dropout_rate=0.0)).train()
    if way in ("sdpa", "eager"):
        model.set_attn_implementation(way)
    else:
        if way == "written out":
            integration._WITH_RELATIVE_BIASES = ()
        fastattn.swap(model)
    batch = {"input_ids": torch.randint(2, 1000, (1, n)), "attention_mask": (torch.arange(n) < 0.9 * n)[None].long()}
    short = {name: x[:, :64] for name, x in batch.items()}
    seconds, before = [], 0
    for given in (short, *[batch] * steps):
        start = time.perf_counter()
        model(**given).last_hidden_state.square().mean().backward()
        seconds.append(time.perf_counter() - start)
        before = before or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return statistics.median(seconds[1:]), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    """Prints a row for each way, or the figures of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=positive_int, default=4096)
    parser.add_argument("--steps", type=positive_int, default=3)
    parser.add_argument("--way", choices=WAYS, help="this one alone, in this process")
    options = parser.parse_args()
    if options.way is not None:
        print(*measured(options.way, options.n, options.steps))
        return
    for way, name in WAYS.items():
        command = [sys.executable, __file__, "--way", way, "--n", str(options.n), "--steps", str(options.steps)]
        seconds, mib = map(float, subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split())
        print(f"{name:22} {seconds:6.2f} s {mib:7.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
