"""What each stage does, from the first sign of life to the last row, within its time and going on where it stopped."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import torch

from fastattn.backends import BACKENDS, backend_by_name
from fastattn.backends.native import build
from fastattn.testing import CASES, make_inputs

from . import speed, tries, truth
from .crew import Answer, Crew, CrewError, Task, answers
from .results import REPOSITORY, Results, is_failure

STAGES = ("truth", "bench", "hopper", "cuda")
_ONLY = {"hopper": "hopper", "cuda": "native"}  # the backend that a stage is about; other stages are about all
_OLDER = "7.5+PTX"  # the code for GPUs without bf16, which newer ones compile for themselves
_COMPILING_SHARE = 0.6  # of the time of a stage, at most
_TRIES_SHARE = 0.4  # until then, in a stage that begins with first calls
_TRUTH_SHARE = 0.7  # until then, in a stage that goes on with times
_BUILD_LIMIT_S = 240.0
_OLDER_LIMIT_S = 240.0  # of one test: the first ones wait until the driver has compiled the code
_LOG_TAIL = 3000  # characters
_FIRST_LIMIT_S = 180.0
_COMPILE_LIMIT_S = 150.0
_TELL_EVERY_S = 2.0
_DRY_LIMIT_S = 400.0  # a CPU has other work too


class StageError(Exception):
    """A stage cannot be run as asked, or what it ran is wrong; the message is one sentence."""


@dataclass
class Stage:
    """One run of a stage.

    name: one of STAGES.
    device: "cuda"; or "cpu" for a dry run, which does all of it on a few small cases.
    seconds: how long it may take.
    """

    name: str
    results: Results
    device: str
    seconds: float

    def __post_init__(self) -> None:
        self.begun = time.monotonic()
        self.deadline = self.begun + self.seconds
        self.dry = self.device == "cpu"
        self.only = _ONLY.get(self.name)

    def run(self) -> None:
        """Runs what is left to do.

        Raises:
            StageError: there is no such backend yet, something is wrong, or time did not suffice.
        """
        if self.only and self.only not in truth.backend_names():
            known = ", ".join(truth.backend_names())
            raise StageError(f"stage {self.name} needs a backend of that name, and there are only {known}")
        if self.only and not self.dry and (why := _refusal(self.only, self.device)):
            raise StageError(f"{self.only} {why}")
        if self.name != "bench" and not (REPOSITORY / "tests").is_dir():
            raise StageError("the tests are not installed with the package: run it in a checkout")
        self.results.begin_run(self.name)
        self.left = 0
        try:
            archs = self._build() if self.name == "cuda" else [""]
            if self.name == "hopper":
                self._try()
            if self.name != "bench":
                self._truth(archs)
            if self.name != "truth":
                self._bench()
        except CrewError as error:
            raise StageError(str(error)) from error
        finally:
            rows = [row for row in self.results.rows(self.name) if row["sources"] == self.results.sources]
            self.results.end_run(len({row["task"] for row in rows}), self.left)
        if failed := [row for row in rows if is_failure(row)]:
            first = "\n".join(f"  {row['task']}: {row['verdict']}: {row['note']}" for row in failed[:20])
            raise StageError(f"{len(failed)} of {len(rows)} rows are failures:\n{first}")
        if self.left:
            raise StageError(f"{self.left} tasks are left; the same command goes on with them")

    def _build(self) -> list[str]:
        """Compiles the native module for this GPU and for older ones, at once; for which code there is a module.

        Raises:
            StageError: there is none for this GPU; the message has the end of what the compiler said.
        """
        os.environ.pop(truth.ARCH_LIST, None)  # containers come with one, for many GPUs
        command = [sys.executable, "-m", "fastattn", "build", *([] if self.dry else ["--cuda"])]
        start, until = time.monotonic(), min(self.deadline, time.monotonic() + _BUILD_LIMIT_S)
        builds = {
            archs: subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=os.environ | ({truth.ARCH_LIST: archs} if archs else {}),
                start_new_session=True,  # so that the compilers end with it
            )
            for archs in ("", _OLDER)
        }
        try:
            failures = {archs: _failure_of(process, until) for archs, process in builds.items()}
        finally:
            for process in builds.values():
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        for archs, failure in failures.items():
            row = {"verdict": "wrong" if failure else "right", "note": failure}
            self.results.add(self.name, truth.named("build", archs), [row])
            self._say(f"{truth.named('build', archs)}: {failure or 'done'} ({time.monotonic() - start:.0f} s)")
        if failures[""]:
            raise StageError(f"the native module was not built: {failures['']}")
        return [archs for archs, failure in failures.items() if not failure]

    def _try(self) -> None:
        """The first calls of kernels that may hang; what hangs costs the others nothing."""
        options = {"device": self.device, "only": self.only}
        tasks = self._unfinished(tries.tasks(self.dry))
        if not self.dry:
            to_compile = [Task(task.name, _COMPILE_LIMIT_S) for task in tasks]
            self._compile(Crew(tries.serve, to_compile, _cores(), options | {"compiling": True}))
        self._measure([Crew(tries.serve, tasks, options=options)], self.begun + _TRIES_SHARE * self.seconds)

    def _truth(self, archs: list[str]) -> None:
        first = next(answers([self._tests([Task(truth.FIRST, _FIRST_LIMIT_S)])], self.deadline), None)
        if first is None:
            raise StageError(f"{truth.FIRST}: took longer than the {self.seconds:.0f} s there are")
        self.results.add(self.name, truth.FIRST, _rows(first) if first.failure else [])
        if first.failure:
            raise StageError(f"{truth.FIRST}: {first.failure}")
        ids, first_rows = first.rows[0]["ids"], first.rows[1:]
        for row in first_rows:
            self.results.add(self.name, row["test"], [row])
            self._say(f"{row['verdict']}: {row['test']} {row['note']}")
        if wrong := [row for row in first_rows if row["verdict"] == "wrong"]:
            raise StageError(f"{truth.FIRST}: {wrong[0]['test']}: {wrong[0]['note']}")
        ids = [id_ for id_ in ids if not self.dry or truth.in_dry_run(id_)]
        fused = [self.only] if self.only else self._fused()
        crews = [self._tests(self._unfinished([Task(id_) for id_ in ids]), workers=2 if self.only else 1)]
        if not self.dry and self.only != "native":  # which is compiled already
            to_compile = [Task(t.name, _COMPILE_LIMIT_S) for t in crews[0].tasks if truth.compiles(t.name, fused)]
            self._compile(Crew(truth.serve, to_compile, _cores(), {"device": self.device, "compiling": True}))
        if _OLDER in archs:
            older = [Task(truth.named(id_, _OLDER), _OLDER_LIMIT_S) for id_ in ids]
            crews.append(self._tests(self._unfinished(older), workers=2, archs=_OLDER))
        sanitized = self._unfinished([] if self.dry else truth.sanitizer_tasks(fused))
        crews.append(Crew(truth.serve_sanitizer, sanitized, workers=len(truth.SANITIZER_TOOLS)))
        self._measure(crews, self.begun + _TRUTH_SHARE * self.seconds if self.only else self.deadline)

    def _fused(self) -> list[str]:
        """The backends of a stage that is about all."""
        device = torch.device(self.device)
        return [b.NAME for b in BACKENDS[:-1] if b.features(device) and not b.by_name_only(device)]

    def _tests(self, tasks: list[Task], workers: int = 1, archs: str = "") -> Crew:
        return Crew(truth.serve, tasks, workers, {"device": self.device, "only": self.only, "archs": archs})

    def _bench(self) -> None:
        options = {"device": self.device, "dry": self.dry, "only": self.only}
        tasks = self._unfinished(speed.tasks(self.device, self.dry, self.only))
        if not self.dry and self.only != "native":
            to_compile = [Task(task.name, _COMPILE_LIMIT_S) for task in speed.to_compile(tasks, self.dry)]
            self._compile(Crew(speed.serve_compiling, to_compile, _cores(), options))
        self._measure([Crew(speed.serve, tasks, options=options)], self.deadline)

    def _unfinished(self, tasks: list[Task]) -> list[Task]:
        finished = self.results.finished(self.name)
        left = [task for task in tasks if task.name not in finished]
        if self.dry:
            left = [Task(task.name, _DRY_LIMIT_S) for task in left]
        self._say(f"{len(left)} of {len(tasks)} tasks to do")
        return left

    def _compile(self, crew: Crew) -> None:
        """Fills the caches of compilers on every core; what fails here fails again where it is measured."""
        start = time.monotonic()
        until = min(self.deadline, start + _COMPILING_SHARE * self.seconds)
        done = list(answers([crew], until))
        failed = [answer for answer in done if answer.failure]
        self._say(f"compiled for {len(done)} of {len(crew.tasks)} tasks in {time.monotonic() - start:.0f} s")
        for answer in failed:
            self._say(f"compiling {answer.task.name}: {answer.failure}")

    def _measure(self, crews: list[Crew], deadline: float) -> None:
        total = sum(len(crew.tasks) for crew in crews)
        done, told = 0, 0.0
        for done, answer in enumerate(answers(crews, deadline), 1):
            rows = [row | {"seconds": round(answer.seconds, 2)} for row in _rows(answer)]
            self.results.add(self.name, answer.task.name, rows)
            bad = [row for row in rows if row["verdict"] not in ("right", "n/a")]
            said = "; ".join(f"{row.get('contender', '')} {row['verdict']}: {row['note']}" for row in bad)
            if bad or time.monotonic() > told + _TELL_EVERY_S:
                self._say(f"[{done}/{total}] {answer.task.name} {answer.seconds:.1f} s {said}".rstrip())
                told = time.monotonic()
        self.left += total - done

    def _say(self, text: str) -> None:
        left = math.ceil(self.deadline - time.monotonic())
        print(f"{self.name} ({left} s left): {text}", file=sys.stderr, flush=True)


def _rows(answer: Answer) -> list[dict[str, object]]:
    """The rows of an answer, with one more where its worker failed."""
    if not answer.failure:
        return answer.rows
    verdict, _, note = answer.failure.partition(": ")
    return [*answer.rows, {"verdict": verdict, "note": note}]


def _failure_of(process: subprocess.Popen, until: float) -> str:
    """What became of a build if it did not end well by then, with the end of the newest log of a compiler."""
    try:
        code = process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return "it took too long"
    if code == 0:
        return ""
    logs = sorted(build.cache_dir().glob("*.log"), key=lambda path: path.stat().st_mtime)
    return f"exit code {code}; " + "".join(path.read_text(errors="replace")[-_LOG_TAIL:] for path in logs[-1:])


def _refusal(name: str, device: str) -> str:
    """What a backend has against the plainest call on a device; "" where it takes it."""
    inputs = make_inputs(CASES[0], torch.float16, device)
    return "; ".join(backend_by_name(name).unsupported(inputs.q, inputs.k, inputs.v, inputs.spec()))


def _cores() -> int:
    return len(os.sched_getaffinity(0))
