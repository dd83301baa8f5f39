"""The command `python -m fastattn.bench.gpu`: runs a stage on this machine's GPU, or renders what stages found."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from . import render
from .results import FOLDER, Results
from .stages import STAGES, Stage, StageError


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0 all done and right, 1 not, 2 wrongly called."""
    parser = argparse.ArgumentParser(
        prog="python -m fastattn.bench.gpu",
        description="Checks and times fastattn on this machine's GPU. Needs torch, triton and pytest, and no network. "
        "A stage that is run again goes on where it stopped, as long as the sources are the same.",
        epilog="stages: truth (every backend against the reference, and compute-sanitizer), bench (against its "
        "rivals), hopper (both, for that backend alone), cuda (both, for native's CUDA module, which it builds first)",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="STAGE|render|markdown")
    for name in STAGES:
        stage = commands.add_parser(name, help=f"run the stage {name}")
        stage.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run in a small size")
        stage.add_argument("--out", type=Path, help=f"folder of the results file; default: {FOLDER.name} in benchmarks")
        stage.add_argument("--seconds", type=float, default=510.0, help="how long it may take; default: 510")
        stage.add_argument("--commit", default="", help="to note in the results, where this is no git checkout")
        stage.add_argument("--again", action="store_true", help="also the tasks that were not right or did not end")
    drawing = commands.add_parser("render", help="write Markdown and pictures beside each results file")
    drawing.add_argument("files", type=Path, nargs="*", help="default: all in benchmarks/results")
    commands.add_parser("markdown", help="print the part of README.md about GPUs")
    args = parser.parse_args(argv)

    if args.command == "markdown":
        print(render.for_readme(FOLDER))
        return 0
    if args.command == "render":
        for path in args.files or render.results_files(FOLDER):
            for written in render.render(path):
                print(written)
        return 0
    if args.device == "cpu" and args.out is None:
        parser.error("--out must be given with --device cpu, whose figures are none to keep")
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device here; --device cpu is a dry run", file=sys.stderr)
        return 1
    results = Results(args.out or FOLDER, args.device, args.commit)
    if args.again:
        results.forget_failures(args.command)
    try:
        Stage(args.command, results, args.device, args.seconds).run()
    except StageError as error:
        print(f"{args.command}: {error}", file=sys.stderr)
        return 1
    finally:
        if results.path.is_file():
            print(render.summary(results.document, args.command))
            print("\n".join(f"written: {path}" for path in [results.path, *render.render(results.path)]))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # there are as many workers as cores
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that workers end, and what is done is saved
    sys.exit(main())
