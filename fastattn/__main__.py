"""The command line: `fastattn info | bench | demo | serve | build | tune`.

Each command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastattn.backends import build

_DTYPES = ("fp32", "bf16", "fp16")  # the names in bench.cases.DTYPES, which parsing need not import
_MOST_THREADS = 4096  # torch aborts, or counts below 0, where there are far more
_A_NAME = "attention L512-pad fp32 backward"


class CommandError(Exception):
    """A command cannot do what was asked; the message is one sentence for stderr, and the exit code is 1."""


def main(argv: list[str] | None = None) -> int:
    """Runs a command, and returns the exit code: 0 done, 1 failed, 2 wrongly called (argparse exits with it).

    Args:
        argv: the arguments after the program's name; None takes them from sys.argv.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it is closed
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except OSError as error:  # of the output; commands make sentences of the others
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still flushes at its end
        if isinstance(error, BrokenPipeError):  # nobody reads it any more, as of `fastattn info | head -1`
            return 141  # 128 + SIGPIPE, as shells have it
        print(f"fastattn: {error}", file=sys.stderr)
        return 1
    except CommandError as failure:
        print(f"fastattn: {failure}", file=sys.stderr)
        return 1
    except ValueError as error:
        if not str(error).startswith("FASTATTN_"):  # a variable of the environment, which many calls look at
            raise
        print(f"fastattn: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as shells have it


def _parser() -> argparse.ArgumentParser:
    from fastattn import __version__
    from fastattn import demo as demo_module

    parser = argparse.ArgumentParser(
        prog="fastattn", description="Exact attention for PyTorch that skips padding and masks."
    )
    parser.add_argument("--version", action="version", version=f"fastattn {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    info = commands.add_parser(
        "info",
        help="which backends work here, and why others do not",
        description="Which backends work here, for which devices, dtypes and features, and why others do not. "
        "Builds nothing.",
    )
    info.add_argument(
        "--markdown", action="store_true", help="only the table of what each backend takes on any machine, in Markdown"
    )
    info.set_defaults(run=_info)

    build = commands.add_parser(
        "build",
        help="compile the backends cpu and cuda now instead of on first use",
        description="Compiles the backend cpu for every torch and machine of this kind, unless that has been done, "
        "and says where its module lies; and the backend cuda where it serves the GPUs of this machine, which takes "
        "minutes. Without this command the first call that needs one compiles what this machine needs of it.",
    )
    build.add_argument(
        "--cuda",
        action="store_true",
        help="cuda in any case: for the GPUs of this machine, or those in TORCH_CUDA_ARCH_LIST",
    )
    build.set_defaults(run=_build)

    tune = commands.add_parser(
        "tune",
        help="find the fastest right backend for each class of calls on this machine",
        description="Checks every backend that could serve here against the reference, times it by class of calls, "
        "and keeps what it finds for later processes, which then choose by it. Takes some minutes. What hangs, crashes "
        "or is wrong is reported, and not used.",
    )
    tune.add_argument("--quick", action="store_true", help="a few classes of calls only, in about a minute")
    tune.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    tune.add_argument(
        "--share", type=_file_to_write, metavar="FILE", help="also write what was found here, to send it in"
    )
    tune.set_defaults(run=_tune, usage_error=tune.error)

    demo = commands.add_parser(
        "demo",
        help="see it work inside a real model",
        description="Puts fastattn into a real encoder of transformers, checks its answers on real text, times both.",
    )
    demo_module.add_arguments(demo)
    demo.set_defaults(run=demo_module.run)

    serve = commands.add_parser(
        "serve",
        help="run `transformers serve` with attention by fastattn",
        add_help=False,
        prefix_chars="\0",  # everything after the command is for transformers, --help too
    )
    serve.add_argument("arguments", nargs="*")
    serve.set_defaults(run=_serve)

    bench = commands.add_parser(
        "bench",
        help="time every backend next to torch's own attention",
        description="Times fastattn's backends, torch's attention kernels and the naive formula in the same run, in "
        "turns. Each is first checked against fp64, and a wrong answer is shown as wrong instead of timed.",
        epilog="examples: `fastattn bench --quick`; `fastattn bench --dtype fp32 bf16 --filter 'L512 pad' --json "
        "out.json`. On a busy machine look at the p20-p80 column: where it is wide, the median says little.",
    )
    bench.add_argument(
        "--suite",
        choices=("standard", "limit"),
        default="standard",
        help="standard: every backend; limit: the CPU kernels beside their targets, in about ten minutes on two cores "
        "(default: standard)",
    )
    bench.add_argument("--quick", action="store_true", help="a few small cases, in under half a minute on two cores")
    bench.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one, cpu for limit")
    bench.add_argument("--dtype", nargs="+", choices=_DTYPES, help="default: fp32, and all for limit")
    bench.add_argument("--threads", type=_count, help="of the CPU; default: torch's own, and 2 for limit")
    bench.add_argument(
        "--filter",
        default="",
        metavar="TEXT",
        help=f"only what has every word of TEXT in its name, such as '{_A_NAME}'",
    )
    bench.add_argument(
        "--rivals",
        choices=("torch", "all"),
        default="torch",
        help="all: on the CPU also compiled FlexAttention, and OpenVINO, onnxruntime and zentorch where they are "
        "installed (default: torch)",
    )
    bench.add_argument("--json", type=_file_to_write, metavar="FILE", help="keep every figure and every sample here")
    bench.add_argument(
        "--plot",
        type=_picture_to_write,
        metavar="FILE.svg",
        help="draw bars beside those of the rivals, or for limit the ratios beside their targets",
    )
    bench.set_defaults(run=_bench, usage_error=bench.error)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    if int(text) > _MOST_THREADS:
        raise argparse.ArgumentTypeError(f"must be at most {_MOST_THREADS}, got {text}")
    return int(text)


def _file_to_write(text: str) -> Path:
    from fastattn.bench.writing import file_to_write

    return file_to_write(text)


def _picture_to_write(text: str) -> Path:
    if Path(text).suffix != ".svg":
        raise argparse.ArgumentTypeError(f"must end in .svg, got {text}")
    return _file_to_write(text)


def _info(args: argparse.Namespace) -> int:
    import torch

    from fastattn.backends import BACKENDS, build
    from fastattn.machine import machine, versions

    if args.markdown:
        print(_promises())
        return 0
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    print(", ".join(f"{name} {value}" for name, value in versions().items()))
    print(", ".join(f"{name} {value}" for name, value in machine(devices[-1]).items()))
    for backend in BACKENDS:
        if module := build.MODULES.get(backend.NAME):
            state = _module_state(module)
        else:
            state = backend.unavailable(torch.device(devices[-1])) or "ready"
        on = {device: _backend_on(backend, device) for device in devices}
        if state == "ready" and all(line.startswith("no: ") for line in on.values()):
            state = "not for this machine"
        print(f"\n{backend.NAME}: {state}")
        for device in devices:
            print(f"  {device}: {on[device]}")
            if told := _told_by_record(backend.NAME, device):
                print(f"  {device}: {told}")
    return 0


def _build(args: argparse.Namespace) -> int:
    import torch

    from fastattn.backends import build, cuda

    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    serves_gpus = any(cuda.by_name_only(gpu) is None for gpu in gpus)
    for module in build.MODULES.values() if args.cuda or serves_gpus else (build.CPU,):
        start = time.perf_counter()
        if why := module.unavailable(whole=True):
            if module is build.CPU or args.cuda:
                raise CommandError(why)
            print(f"{module.backend}: {why}")
        else:
            print(f"{module.backend}: {_module_state(module)} ({time.perf_counter() - start:.1f} s)")
    return 0


def _tune(args: argparse.Namespace) -> int:
    import torch

    from fastattn.backends import record
    from fastattn.bench import tune, writing

    if args.device == "cuda" and not torch.cuda.is_available():
        args.usage_error("--device must be cpu here, since torch sees no CUDA device, got cuda")
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not args.quick:
        times = tune.times_of_all_tiles(device)
        tune.keep_faster_tiles(device, times)
        print(*map(tune.tiles_as_text, times, times.values()), sep="\n", end="\n" if times else "")
    classes, said = tune.classes_of(device, args.quick), []
    try:
        findings, code = tune.tune(classes), 0  # in processes that read the record
    except tune.Interrupted as interruption:
        findings, code = interruption.findings, 130
        timed = findings.record.classes
        said, classes = [f"interrupted: {len(timed)} of {len(classes)} classes of calls have times"], [*timed]

    def with_findings(old: record.Record) -> record.Record:
        others = {call_class: ms for call_class, ms in old.classes.items() if call_class not in classes}
        new = findings.record
        return replace(old, families=old.families | new.families, classes=others | new.classes)

    found = record.update(device, with_findings)  # of classes that were not timed stays what was kept before
    print(*said, findings, sep="\n")  # now that nothing can be lost where nobody reads it
    path = record.path(device)
    if path.is_file() and path.read_text() == record.as_json(device, found):
        print(f"kept in {path}; remove it to choose by the default table again")
    else:
        print(f"not kept: {path} is not to be written, so other processes choose as before")
    if args.share:
        try:
            writing.write(args.share, record.as_json(device, found))
        except OSError as error:
            raise CommandError(str(error)) from error
    return code


def _serve(args: argparse.Namespace) -> int:
    try:
        from fastattn.integrations.serving import serve

        serve(args.arguments)
    except ImportError as error:
        raise CommandError(f"{error}; pip install 'fastattn[serve]' brings what the server needs") from error
    except OSError as error:  # there is no such model
        raise CommandError(str(error)) from error
    return 0


def _bench(args: argparse.Namespace) -> int:
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        args.usage_error("--device must be cpu here, since torch sees no CUDA device, got cuda")
    if args.json and args.plot and args.json.resolve() == args.plot.resolve():
        args.usage_error(f"--json and --plot must be two files, got {args.json} for both")
    is_limit = args.suite == "limit"
    device = args.device or ("cuda" if torch.cuda.is_available() and not is_limit else "cpu")
    if is_limit:
        _check_limit(args, device)

    from fastattn.bench import cases, limit, limit_report, report, run, writing

    if is_limit:
        jobs = limit.jobs(args.dtype, args.filter)
    else:
        jobs = cases.jobs(args.dtype or ["fp32"], args.quick, args.filter)
    if not jobs:
        args.usage_error(f"--filter must leave something to time, got {args.filter!r}; names look like '{_A_NAME}'")
    torch.set_num_threads(args.threads or (limit.THREADS if is_limit else torch.get_num_threads()))
    timed = limit.measure_all(jobs) if is_limit else run.measure_all(jobs, device, args.quick, args.rivals == "all")
    rows, suite_report = [], limit_report if is_limit else report
    try:
        rows.extend(timed)
        measured = report.Report.of(rows, device)
        try:  # before the table, for which there may be nobody
            if args.json:
                writing.write(args.json, suite_report.as_json(measured))
            if args.plot:
                writing.write(args.plot, suite_report.as_svg(measured))
        except (OSError, ValueError) as error:
            raise CommandError(str(error)) from error
    finally:  # after an interruption that of what was measured; files keep what they had
        suite_report.print_table(report.Report.of(rows, device))
    if wrong := [f"{row.contender} in {row.job} ({row.note})" for row in rows if row.failed]:
        raise CommandError(f"wrong answers, which were not timed: {'; '.join(wrong)}")
    return 0


def _check_limit(args: argparse.Namespace, device: str) -> None:
    """Raises where the limit suite cannot be run as asked."""
    import torch

    from fastattn.backends import cpu

    if device != "cpu":
        args.usage_error(f"--device must be cpu for --suite limit, got {device}")
    if args.quick:
        args.usage_error("--quick is for --suite standard; --filter shortens --suite limit")
    if args.rivals == "all":
        args.usage_error("--rivals all is for --suite standard")
    if why := cpu.unavailable(torch.device(device)):
        raise CommandError(f"--suite limit times the cpu backend, which cannot be had: {why}")


def _backend_on(backend: ModuleType, device: str) -> str:
    """One line on what a backend computes on a device, or why it computes nothing there; builds nothing."""
    import torch

    from fastattn import Mask
    from fastattn.spec import Spec

    refusals = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x = torch.zeros(1, 1, 1, 64, dtype=dtype, device=device)
        refusals[str(dtype).removeprefix("torch.")] = backend.unsupported(x, x, x, Spec(Mask(), scale=1.0))
    dtypes = [name for name, refusal in refusals.items() if not refusal]
    if not dtypes:
        return f"no: {'; '.join(_common(refusals.values()))}"
    features = ", ".join(sorted(backend.features(torch.device(device))))
    by_name_only = backend.by_name_only(torch.device(device))
    return f"{', '.join(dtypes)}; {features}" + (f"; only by name: {by_name_only}" if by_name_only else "")


def _told_by_record(name: str, device: str) -> str:
    """One line on what is known of a backend on this machine; "" where nothing is."""
    import torch

    from fastattn.backends import record

    found = record.of(torch.device(device))
    verdicts = {
        family.partition(" ")[2]: why for family, why in found.families.items() if family.startswith(f"{name} ")
    }
    told = []
    if right := [family for family, why in verdicts.items() if not why]:
        told.append(f"checked on this machine: {', '.join(right)}")
    told += [f"not used for {family}: {why}" for family, why in verdicts.items() if why]
    if timed := sum(name in ms for ms in found.classes.values()):
        told.append(f"timed in {timed} classes of calls")
    return "; ".join(told)


def _promises() -> str:
    """A table of what each backend takes wherever it runs, the same on every machine."""
    import torch

    from fastattn import Mask
    from fastattn.backends import BACKENDS
    from fastattn.spec import FEATURES, Spec

    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
    device, many = torch.device("cpu"), 1025

    def objections(backend: ModuleType, dtype: torch.dtype, head_dim: int) -> list[str]:
        x = torch.empty(1, 1, 1, head_dim, dtype=dtype, device=device)
        return backend.unsupported(x, x, x, Spec(Mask(), scale=1.0))

    lines = ["| backend | where | features | dtypes | head dims |", "|---|---|---|---|---|"]
    for backend in BACKENDS:
        always = _common(objections(backend, dtype, 64) for dtype in dtypes.values())  # to this machine
        features = backend.features(device)
        taken = [name for name, dtype in dtypes.items() if objections(backend, dtype, 64) == always]
        head_dims = [dim for dim in range(1, many) if objections(backend, dtypes[taken[0]], dim) == always]
        cells = (
            f"`{backend.NAME}`",
            backend.WHERE,
            "all" if features == FEATURES else ", ".join(sorted(features)),
            "all" if len(taken) == len(dtypes) else ", ".join(taken),
            _multiples(head_dims, many),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"All features: {', '.join(sorted(FEATURES))}."])


def _common(lists: Iterable[list[str]]) -> list[str]:
    """The sentences that are in all of the lists."""
    first, *others = lists
    return [sentence for sentence in first if all(sentence in other for other in others)]


def _multiples(taken: list[int], many: int) -> str:
    """A description of numbers below `many` that are the multiples of the first of them."""
    step, last = taken[0], taken[-1]
    if taken != list(range(step, last + 1, step)):
        raise RuntimeError(f"head dims must be multiples of the first, got {taken}")
    if step == 1:
        return "all" if last == many - 1 else f"1-{last}"
    return f"multiples of {step} up to {last}"


def _module_state(module: build.CompiledModule) -> str:
    from fastattn.backends import build, cpu

    state = module.state()
    is_built = state.startswith(("built", "cached"))
    return f"{state}; instruction set {cpu.capability()}" if is_built and module is build.CPU else state


if __name__ == "__main__":
    sys.exit(main())
