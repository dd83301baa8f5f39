"""The command `python -m benchmarks.gpu`: runs a stage on this machine's GPU, or renders the results of stages."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from pathlib import Path

from fastattn.machine import machine, versions

from . import render
from .record import REPOSITORY, file_name, forget, is_failure, load
from .stages import STAGES, StageError, run_stage
from .supervisor import StartError

FOLDER = REPOSITORY / "benchmarks" / "results"


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0 all done and right, 1 not, 2 wrongly called."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Checks and times fastattn on this machine's GPU. Needs torch, triton and pytest, and no network. "
        "A stage that is run again goes on where it stopped, as long as the sources are the same.",
        epilog="stages: truth (every backend against the reference, and compute-sanitizer), bench (against its "
        "rivals), hopper (both, for that backend alone), cuda (the same, whose module it builds first)",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="STAGE|render|markdown")
    for name in STAGES:
        stage = commands.add_parser(name, help=f"run the stage {name}")
        stage.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run in a small size")
        stage.add_argument("--out", type=Path, help=f"folder of the results; default: {FOLDER.name} in benchmarks")
        stage.add_argument("--seconds", type=float, default=510.0, help="how long it may take; default: 510")
        stage.add_argument("--commit", default="", help="to note in the results, where this is no git checkout")
        stage.add_argument("--again", action="store_true", help="also the tests that were not right or did not end")
    drawing = commands.add_parser("render", help="write Markdown and pictures beside each results file")
    drawing.add_argument("files", type=Path, nargs="*", help="default: all in benchmarks/results")
    commands.add_parser("markdown", help="print the part of docs/performance.md about GPUs")
    args = parser.parse_args(argv)

    if args.command == "markdown":
        print(render.for_docs(FOLDER))
    elif args.command == "render":
        for path in args.files or render.results_files(FOLDER):
            print(*render.render(path), sep="\n")
    elif args.device == "cpu" and args.out is None:
        parser.error("--out must be given with --device cpu, whose figures are none to keep")
    else:
        return _run(args)
    return 0


def _run(args: argparse.Namespace) -> int:
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device here; --device cpu is a dry run", file=sys.stderr)
        return 1
    about, gpu, out = versions(), str(machine(args.device).get("gpu", "cpu")), args.out or FOLDER
    if args.commit:
        about["fastattn"] = f"{about['fastattn'].partition(' ')[0]} ({args.commit})"
    path = out / file_name(gpu, about["torch"], about["triton"])
    out.mkdir(parents=True, exist_ok=True)
    if not path.exists() and (FOLDER / path.name).exists():
        shutil.copy(FOLDER / path.name, path)
    if args.again and path.exists():
        forget(path, args.command, lambda test, rows: not rows or any(map(is_failure, rows)))
    try:
        run_stage(args.command, args.device, path, about, args.seconds)
    except (StageError, StartError) as error:
        print(f"{args.command}: {error}", file=sys.stderr)
        return 1
    finally:
        if path.exists():
            print(render.summary(load(path), args.command))
            print(*(f"written: {written}" for written in [path, *render.render(path)]), sep="\n")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # there are as many workers as cores
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that workers end with it
    sys.exit(main())
