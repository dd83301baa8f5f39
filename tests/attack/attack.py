"""The attack on fastattn: random calls, valid and hostile, until the time is over: `make attack SECONDS=600 SEED=...`.

Every draw is a function of one seed: the first is SEED, the next SEED + 1. A child process computes them; when it dies
or hangs, that is a finding, and another child goes on with the next seed.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median

PATIENCE = 120  # seconds for one draw
AGAIN = range(1, 16)  # other numbers for a call whose error is outside its budget
MEMORY = 16 * 2**30  # bytes of a child
START, TO_START = "start", 900  # seconds, in which the kernels may be compiled
BETWEEN = "between draws"
forks = multiprocessing.get_context("forkserver")  # which tests/fresh_python.py gives torch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--seed", type=int, default=None, help="the seed of the first draw; a random one")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--draws", type=int, default=None, help="how many at most, the same on every machine")
    parser.add_argument("--target", help="only this one; a seed then draws something else than without")
    options = parser.parse_args()
    from targets import TARGETS

    if options.target not in (None, *TARGETS):
        parser.error(f"--target must be one of {', '.join(TARGETS)}, got {options.target!r}")
    seed = random.randrange(10**9) if options.seed is None else options.seed
    print(f"attack: SEED={seed}", flush=True)
    return 1 if attack(seed, options.seconds, options.draws, only=options.target) else 0


def attack(
    seed: int,
    seconds: float,
    most: int | None = None,
    *,
    only: str | None = None,
    patience: float = PATIENCE,
    prepare: Callable | None = None,
) -> list[str]:
    """Findings of the draws with the seeds from `seed` on; at least one draw is made.

    Args:
        most: how many draws are made at most, or None.
        only: the only target.
        patience: seconds after which a draw hangs.
        prepare: called in each child before its draws.
    """
    findings, draws, refused = [], Counter(), Counter()
    folder = tempfile.TemporaryDirectory()  # for what hostile calls write
    begin = said = time.monotonic()

    def found(what: str) -> None:
        line = f"{target}: {what}\n  make attack SEED={seed} DRAWS=1" + (f" TARGET={only}" if only else "")
        findings.append(line)
        print(f"FINDING {line}", flush=True)

    def left() -> float:
        return 0.0 if draws.total() == most else max(0.0, seconds - (time.monotonic() - begin))

    while not draws or (left() and START not in draws):
        child, connection = started_child(seed, only, folder.name, prepare)
        target, since = START, time.monotonic()
        while True:
            if time.monotonic() - said > 10:
                said = time.monotonic()
                print(f"{draws.total()} draws, {len(findings)} findings, {left():.0f} s left", flush=True)
            if not connection.poll(1):
                if time.monotonic() - since < (TO_START if target == START else patience):
                    continue
                found(f"hangs: no answer in {time.monotonic() - since:.0f} s")
                break
            try:
                kind, value = connection.recv()
            except EOFError:
                child.join()
                code = child.exitcode
                found(f"the process died: {signal.Signals(-code).name if code < 0 else f'exit status {code}'}")
                break
            since = time.monotonic()
            if kind == "begins":
                begin = begin if draws else since  # what the first child has to compile does not count
                target = value
                continue
            if kind == "finding":
                found(value)
            draws[target] += 1
            refused[target] += kind == "refused"
            seed += 1
            target = BETWEEN
            if not left():
                break
        child.kill()
        child.join()
        if target != BETWEEN:
            draws[target] += 1
            seed += 1
    print(f"{draws.total()} draws, {len(findings)} findings in {time.monotonic() - begin:.0f} s; draws (refused):")
    print(", ".join(f"{name} {n} ({refused[name]})" for name, n in sorted(draws.items())), flush=True)
    return findings


def started_child(*arguments: object) -> tuple[BaseProcess, Connection]:
    """A child process that does `work` with these arguments, and the connection to it."""
    ours, theirs = forks.Pipe()
    child = forks.Process(target=work, args=(theirs, *arguments), daemon=True)
    child.start()
    theirs.close()  # so that ours ends with the child
    return child, ours


def work(connection: Connection, seed: int, only: str | None, folder: str, prepare: Callable | None) -> None:
    """Draws from `seed` on, until it is killed; says before each what it is, and after it how it was."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.chdir(folder)
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
    import quick_interpreter
    import torchvision_import  # noqa: F401  before transformers
    from draws import Draw
    from targets import TARGETS

    quick_interpreter.install()
    warnings.simplefilter("ignore")
    next(TARGETS["attention"][1](Draw(0)))  # compiles the kernels, where they are not yet
    if prepare:
        prepare()
    while True:
        of_target = random.Random(f"target {seed}")  # not the numbers that the draw begins with
        name = only or of_target.choices(list(TARGETS), [weight for weight, _ in TARGETS.values()])[0]
        connection.send(("begins", name))
        connection.send(outcome(TARGETS[name][1], seed))
        seed += 1


def outcome(target: Callable, seed: int) -> tuple[str, str]:
    """Whether the draw of this seed is "right", "refused" or a "finding", and which.

    Where few numbers are compared, the error of the naive formula may be nearly 0 by chance. A call outside its budget
    is computed with other numbers too: then the median of the errors has to be within that of the budgets, and the
    largest within twice the largest.
    """
    from draws import Draw, environment

    def errors(attempt: int) -> list:
        draw = Draw(seed, attempt)
        with environment(draw):
            return list(target(draw))

    try:
        first = errors(0)
        wrong = [e for e in first if not e.largest <= e.budget]
        if wrong and all(math.isfinite(e.largest) for e in first):
            several = [{e.output: e for e in each} for each in (first, *map(errors, AGAIN))]
            wrong = [e for e in wrong if not is_chance([each[e.output] for each in several if e.output in each])]
    except NotImplementedError as refusal:
        return "refused", str(refusal)
    except Exception:
        return "finding", traceback.format_exc(limit=-6)
    return ("finding", "; ".join(map(str, wrong))) if wrong else ("right", "")


def is_chance(errors: list) -> bool:
    """Whether these errors of one output, with other numbers each, are within their budgets taken together."""
    largest, budgets = [e.largest for e in errors], [e.budget for e in errors]
    return median(largest) <= median(budgets) and max(largest) <= 2 * max(budgets)


if __name__ == "__main__":
    tests = Path(__file__).parents[1]
    sys.path[:0] = map(str, (tests.parent, tests, tests / "integrations"))  # fastattn, and two modules of its tests
    os.environ["PYTHONWARNINGS"] = "ignore"  # of what a child leaves that is killed
    sys.exit(main())
