"""The command line: python -m tests.gpu_models.ptx count | mutate, each with --help."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_CACHE_DIR", str(Path(__file__).parents[3] / "build" / "ptx_machine" / "triton"))

import torch

from fastattn.backends.triton import configs
from fastattn.testing import CASES, Inputs, run

from . import count, cuda, launch, mutate
from .gpu import Gpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    counting = commands.add_parser(
        "count", help="what the kernels of one head of a case execute, and the least they need"
    )
    counting.add_argument("--case", nargs="+", default=[case.name for case in count.LONG])
    counting.add_argument(
        "--tile", type=int, nargs=2, metavar=("M", "N"), help="queries and keys, for --backend triton"
    )
    counting.add_argument("--tutorial", type=Path, help="06-fused-attention.py of Triton's, for --backend tutorial")
    mutating = commands.add_parser("mutate", help="how many faults put into compiled kernels are found, by kind")
    mutating.add_argument("--case", nargs="+", default=["pad-queries-causal"])
    mutating.add_argument("--most", type=int, default=4, help="edits of a kind in a kernel, drawn at random")
    mutating.add_argument("--kind", nargs="+", choices=mutate.KINDS, default=list(mutate.KINDS))
    for command in (counting, mutating):
        command.add_argument("--arch", type=int, choices=(75, 80, 90), default=80)
        rivals = ("flex", "tutorial") if command is counting else ()
        command.add_argument("--backend", choices=("triton", "hopper", "cuda", *rivals), default="triton")
        command.add_argument("--dtype", default="bfloat16")
        command.add_argument("--in-any-order", action="store_true", help="the gradients of Hopper's fused kernel")
    options = parser.parse_args()
    if options.backend == "tutorial":
        if options.tutorial is None or not options.tutorial.is_file():
            parser.error(f"--tutorial must be a file with --backend tutorial, got {options.tutorial}")
        if options.dtype != "float16":
            parser.error(f"--dtype must be float16 with --backend tutorial, got {options.dtype}")
    if options.command == "count" and options.tile:
        tiles = dict(zip(("BLOCK_M", "BLOCK_N"), options.tile, strict=True))
        for table in (configs._TABLE, configs._HEAVY, configs._HEAVIEST):
            of_one_kernel = {key: config for key, config in table.items() if isinstance(config, configs.Config)}
            table.update({key: config._replace(**tiles) for key, config in of_one_kernel.items()})
    torch.set_num_threads(1)
    cases = [next(case for case in (*CASES, *count.LONG) if case.name == name) for name in options.case]
    dtype = getattr(torch, options.dtype)
    gpu = (cuda if options.backend == "cuda" else launch).Gpu(options.arch, counting=options.command == "count")
    with gpu.computes_for_the_cpu():
        if options.command == "count":
            print_counts(gpu, cases, dtype, options)
        else:
            calls = [mutate.Mutations(gpu, case.name, dtype, options.backend) for case in cases]
            print_mutations(
                mutate.table(calls, options.kind, options.most, lambda line: print("   ", line, flush=True))
            )


def print_counts(gpu: Gpu, cases: list, dtype: torch.dtype, options: argparse.Namespace) -> None:
    names = ("global_bytes", "sectors", "fewest_sectors", "wavefronts", "fewest_wavefronts")
    print(
        f"{'case':22} {'kernel':44} {'matrix':>10} {'needed':>10} {'ratio':>6} " + " ".join(f"{x:>17}" for x in names)
    )

    def computes(gpu: Gpu, inputs: Inputs) -> object:
        if options.backend in ("flex", "tutorial"):
            from . import rivals  # which imports Inductor

            return rivals.flex(gpu, inputs) if options.backend == "flex" else rivals.tutorial(options.tutorial, inputs)
        inputs.options["deterministic"] = not options.in_any_order
        return run(inputs, options.backend)

    lanes, seconds = 0, gpu.seconds
    for case in cases:
        for kernel in count.counted(gpu, case, dtype, computes):
            ratio = f"{kernel.macs / kernel.needed:.3f}" if kernel.needed else ""
            lanes += kernel.counts.lanes
            print(
                f"{case.name:22} {kernel.name:44} {kernel.macs:10} {kernel.needed:10} {ratio:>6} "
                + " ".join(f"{getattr(kernel.counts, name):17}" for name in names),
                *(f"{name} {n}" for name, n in kernel.by_class.items()),
                flush=True,
            )
    print(f"{lanes / 1e6:.0f} million instructions of lanes in {gpu.seconds - seconds:.1f} s", file=sys.stderr)


def print_mutations(found: dict) -> None:
    print(f"{'edit':40}" + "".join(f"{outcome:>14}" for outcome in mutate.OUTCOMES))
    for kind, outcomes in found.items():
        if outcomes:
            print(f"{kind:40}" + "".join(f"{outcomes[outcome]:14}" for outcome in mutate.OUTCOMES))


if __name__ == "__main__":
    main()
