"""Measurement of every backend on this machine, for the choice among them: what `fastattn tune` runs.

A backend is first checked against the reference, then timed by class of calls, in turns with the others. All of it runs
in a child process, by the clock of this one: a hang, a crash or a wrong number costs one candidate, and is reported.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from types import ModuleType

import torch

from fastattn.backends import BACKENDS, build, choice, record, reference, triton
from fastattn.backends.choice import HEAD_DIMS, MASKS, CallClass, ranked
from fastattn.backends.record import Record
from fastattn.backends.selfcheck import OF_TRITON, family
from fastattn.spec import Mask, Spec

from .run import progress
from .tune_child import SHAPES

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SHAPES_OF_TILES = {"cuda": (4, 16, 4096, 4096), "cpu": (1, 1, 20, 20)}
"""B, H, n_q and n_k of the calls that tiles are timed in: many programs for a GPU, few for Triton's interpreter."""
_SAMPLE_S, _CLASS_S = 0.02, 2.0
_MOST_ROUNDS = 5
_END_S = 10.0  # until a child that gives no more answers has ended
_EXCEPTION = re.compile(r"[\w.]+(Error|Exception)\b")
_HOPELESS = 1.5
"""A candidate whose first call takes so many times as long as that of the fastest is not called again."""


@dataclass(frozen=True)
class Limits:
    """Seconds that the child may take: to check a family, which may have to compile it, and for anything else."""

    check: float = 600.0
    other: float = 120.0


@dataclass(frozen=True)
class Findings:
    """The record of the machine, and the backends and problems that it does not have, with the reason."""

    record: Record
    missing: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{name} cannot be had here: {why}" for name, why in self.missing.items()]
        lines += [f"{name}: {f'NOT USED: {why}' if why else 'right'}" for name, why in self.record.families.items()]
        others = {x: ms for x, ms in self.record.classes.items() if ranked(ms)[0] != next(iter(ms))}
        timed = len(self.record.classes)
        lines.append(f"{timed} classes of calls were timed; the default choice is best in {timed - len(others)}")
        for call_class, ms in others.items():
            lines.append(f"  {CallClass(*call_class)}: " + ", ".join(f"{x} {ms[x]:.3g} ms" for x in ranked(ms)))
        return "\n".join(lines)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; `findings` has what was found until then."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings


class FaultError(Exception):
    """What the child was doing did not end well; the message is a sentence."""


class _FullError(FaultError):
    """The memory of the device is full, which says nothing about the candidate that wanted more."""


class _Child:
    """A child process, which is started again after each fault."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.process = limits, None

    def ask(self, request: str, limit: float | None = None, **arguments: object) -> dict:
        """The answer to a request.

        Raises:
            FaultError: it did not come in time, or the process ended, or its memory is full.
        """
        if self.process is None:
            self._start()
        with suppress(BrokenPipeError):  # it has ended since its last answer, as the next line says
            self.process.stdin.write(json.dumps([request, arguments]) + "\n")
            self.process.stdin.flush()
        limit = limit or self.limits.other
        try:
            line = self.answers.get(timeout=limit)
        except queue.Empty:
            self.close()
            raise FaultError(f"hangs: no answer in {limit:.0f} s") from None
        if not line:
            raise FaultError(f"ends its process: {self._last_words()}")
        answer = json.loads(line)
        if "full" in answer:
            self.close()
            raise _FullError(answer["full"])
        if answer.get("fault"):  # as of an illegal access to a GPU's memory, after which nothing there is right
            self.close()
        return answer

    def close(self) -> None:
        """Ends the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _start(self) -> None:
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  read when the process has ended
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.tune_child"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.stderr, text=True,
            env=os.environ | {"PYTHONPATH": build.path_of_children()},
        )  # fmt: skip
        self.answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_forward, args=(self.process.stdout, self.answers), daemon=True).start()

    def _last_words(self) -> str:
        lingers = False
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:  # a thread holds it, or a driver
            lingers = True
            self.process.kill()
        code = self.process.wait()
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process = None
        self.stderr.seek(0)
        lines = self.stderr.read().strip().splitlines() or [""]
        said = next((line for line in reversed(lines) if _EXCEPTION.match(line)), lines[-1])  # torch adds advice
        if code < 0 and not lingers:
            return signal.Signals(-code).name
        return ("it lingers" if lingers else f"exit code {code}") + (f", {said}" if said else "")


def _forward(lines: Iterator[str], answers: queue.Queue[str]) -> None:
    for line in lines:
        answers.put(line)
    answers.put("")


def tiles_to_try(device: torch.device) -> dict[str, tuple[str, ...]]:
    """The tiles of each Triton kernel of 16 bits of which several might be the fastest on a GPU, the default first."""
    if triton.unavailable(device) or triton.unsupported(
        *[torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device=device)] * 3, Spec(Mask(), 1.0)
    ):
        return {}
    from fastattn.backends.triton import configs

    return configs.tiles_to_try(torch.empty(0, dtype=torch.bfloat16, device=device))


def time_tiles(device: torch.device, kernel: str, tiles: Sequence[str]) -> dict[str, float | str]:
    """Milliseconds of a causal call in bf16 with each tile of a kernel, or what is wrong with it, in a sentence."""
    name, _, head_dim = kernel.partition(" ")
    problem = CallClass(device.type, "bfloat16", int(head_dim), 0, "causal", name != "forward")
    wrong: dict[str, str] = {}
    with closing(_Child(Limits())) as child:
        while True:
            runs = {tile: {"module": triton.__name__, "tile": (kernel, tile)} for tile in tiles if tile not in wrong}
            try:
                child.ask("problem", **problem._asdict(), shape=_SHAPES_OF_TILES[device.type])
                ms = _times(child, runs)
                break
            except _CandidateError as error:
                wrong[error.name] = str(error)
            except FaultError as fault:  # of the problem, for which there may be no memory
                return dict.fromkeys(tiles, str(fault))
    return {tile: wrong.get(tile) or ms[tile] for tile in tiles}


def times_of_all_tiles(device: torch.device) -> dict[str, dict[str, float | str]]:
    """`time_tiles` of all `tiles_to_try`."""
    kernels, times = tiles_to_try(device), {}
    with progress(len(kernels)) as show:
        for done, (kernel, tiles) in enumerate(kernels.items()):
            show(done, f"tiles of {kernel}")
            times[kernel] = time_tiles(device, kernel, tiles)
    return times


def faster_tiles(times: dict[str, dict[str, float | str]]) -> dict[str, str]:
    """By the name of a kernel the tile that `time_tiles` found to be faster than the default one, where one is."""
    faster = {}
    for kernel, of_tiles in times.items():
        default = next(iter(of_tiles))
        right = {tile: ms for tile, ms in of_tiles.items() if not isinstance(ms, str)}
        if default in right and (best := ranked(right)[0]) != default:
            faster[kernel] = best
    return faster


def keep_faster_tiles(device: torch.device, times: dict[str, dict[str, float | str]]) -> None:
    """Has each kernel of `times` use the fastest right tile on this machine, which its record says from now on."""

    def change(old: Record) -> Record:
        others = {kernel: tile for kernel, tile in old.tiles.items() if kernel not in times}
        return replace(old, tiles=others | faster_tiles(times))

    record.update(device, change)


def tiles_as_text(kernel: str, times: dict[str, float | str]) -> str:
    """What `time_tiles` found, in a line."""
    shown = [f"{x} NOT USED: {ms}" if isinstance(ms, str) else f"{x} {ms:.3g} ms" for x, ms in times.items()]
    return f"tiles of {kernel}: " + ", ".join(shown)


def tune(
    classes: Sequence[CallClass], backends: tuple[ModuleType, ...] = BACKENDS, limits: Limits = Limits()
) -> Findings:
    """Checks these backends, and times them in these classes of calls, which are of one device.

    Raises:
        Interrupted: by Ctrl-C.
    """
    candidates = {backend.NAME: backend for backend in backends if backend is not reference}
    found = Findings(Record())
    try:
        with closing(_Child(limits)) as child:  # which may hang, deaf to Ctrl-C
            _find(child, classes, candidates, limits, found)
    except KeyboardInterrupt:
        raise Interrupted(_of_right_ones(found)) from None
    return _of_right_ones(found)


def _of_right_ones(found: Findings) -> Findings:
    """The findings without the times of backends that a later call found to be wrong."""
    families, classes = found.record.families, {}
    for call_class, ms in found.record.classes.items():
        right = {name: x for name, x in ms.items() if not families[_family_in(name, call_class)]}
        if len(right) > 1:
            classes[call_class] = right
    return Findings(Record(families, classes), found.missing)


def _find(
    child: _Child, classes: Sequence[CallClass], candidates: dict[str, ModuleType], limits: Limits, found: Findings
) -> None:
    """Adds to what was found."""
    device, missing = torch.device(classes[0].device), found.missing
    kinds = list(dict.fromkeys((getattr(torch, x.dtype), x.training) for x in classes))
    families, measured = found.record.families, found.record.classes
    with progress(len(kinds) + len(classes)) as show:
        for done, (dtype, training) in enumerate(kinds):
            for name, backend in candidates.items():
                x = torch.empty(1, 1, 1, 64, dtype=dtype, device=device)
                if name in missing or backend.unsupported(x, x, x, Spec(Mask(), 1.0)):
                    continue
                show(done, f"check {family(name, dtype, training)}")
                about = {"device": str(device), "dtype": _name(dtype), "training": training}
                try:
                    answer = child.ask("check", limits.check, module=backend.__name__, **about)
                except _FullError as full:
                    answer = {"missing": str(full)}
                except FaultError as fault:
                    answer = {"fault": str(fault)}
                if "missing" in answer:
                    missing[name] = answer["missing"]
                else:
                    families[family(name, dtype, training)] = answer["fault"] or ""
        of_triton = [backend.__name__ for name, backend in candidates.items() if name in OF_TRITON - {*missing}]
        if device.type == "cuda" and of_triton:
            show(len(kinds), "compile")
            with suppress(FaultError):  # which the first calls of its class show again
                child.ask("compile", limits.check, modules=of_triton, problems=[x._asdict() for x in classes])
        for done, call_class in enumerate(classes, len(kinds)):
            show(done, str(call_class))
            while True:
                right = [x for x in candidates if families.get(_family_in(x, call_class)) == ""]
                try:
                    measured[call_class] = _times_of_backends(child, call_class, right, candidates)
                    break
                except _CandidateError as error:
                    families[_family_in(error.name, call_class)] = f"in {call_class}: {error}"
                except FaultError as fault:  # of the problem, for which there may be no memory
                    missing[str(call_class)] = str(fault)
                    break


class _CandidateError(FaultError):
    """A fault of one candidate, by name."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(why)
        self.name = name


def _times_of_backends(
    child: _Child, call_class: CallClass, names: list[str], backends: dict[str, ModuleType]
) -> dict[str, float]:
    """Milliseconds of each of these backends that takes such calls and is not hopeless, the default one first.

    Raises:
        _CandidateError: one of them failed.
    """
    capability = choice.capability_of(torch.device(call_class.device))
    first = choice.default_order(call_class.device, call_class, capability).backends
    names = sorted(names, key=lambda name: first.index(name) if name in first else len(first))  # which is stable
    if len(names) < 2:
        return {}
    child.ask("problem", **call_class._asdict())
    runs = {name: {"module": backends[name].__name__} for name in names}
    runs = {name: run for name, run in runs.items() if _ask(child, name, "takes", **run)["takes"]}
    return _times(child, runs) if len(runs) > 1 else {}


def _ask(child: _Child, name: str, request: str, **arguments: object) -> dict:
    """The answer about a candidate.

    Raises:
        _CandidateError: there is none.
        FaultError: for want of memory.
    """
    try:
        return child.ask(request, **arguments)
    except _FullError:
        raise
    except FaultError as fault:
        raise _CandidateError(name, str(fault)) from None


def _times(child: _Child, runs: dict[str, dict[str, object]]) -> dict[str, float]:
    """Milliseconds of the problem by each candidate, whose arguments of `run` these are.

    Raises:
        _CandidateError: one of them failed.
    """

    def seconds(name: str, times: int) -> float:
        start = time.perf_counter()
        _ask(child, name, "run", times=times, **runs[name])
        return (time.perf_counter() - start) / times

    if not runs:
        return {}
    for name in runs:
        seconds(name, 1)  # which may compile
    rounds = [{name: seconds(name, 1) for name in runs} for _ in range(2)]  # a GPU begins at a fifth of its clock
    once = {name: min(taken[name] for taken in rounds) for name in runs}
    near = [name for name in runs if once[name] <= _HOPELESS * min(once.values())]
    times = {name: max(1, round(_SAMPLE_S / once[name])) for name in near}
    round_s = sum(once[name] * times[name] for name in near)
    samples: dict[str, list[float]] = {name: [] for name in near}
    for _ in range(0 if len(near) == 1 else min(_MOST_ROUNDS, max(2, int(_CLASS_S / round_s)))):
        for name in near:
            samples[name].append(seconds(name, times[name]))
        near.reverse()
    for name in runs:
        seconds(name, 1)
        if fault := _ask(child, name, "compare")["fault"]:
            raise _CandidateError(name, fault)
    return {name: 1e3 * statistics.median(samples.get(name) or [once[name]]) for name in runs}


def classes_of(device: torch.device, quick: bool) -> list[CallClass]:
    """The classes of calls that `fastattn tune` times: some minutes, and a few of them, a minute."""
    return [
        CallClass(device.type, _name(dtype), head_dim, length, mask, training)
        for dtype in (_DTYPES[:2] if quick else _DTYPES)
        for head_dim in (HEAD_DIMS[:1] if quick else HEAD_DIMS)
        for length in ((128, 1024) if quick else SHAPES[device.type])
        for mask in (MASKS[:3] if quick else MASKS)
        for training in (False, True)
        if length > 1 or not (training or mask == "causal")  # decoding
    ]


def _family_in(name: str, call_class: CallClass) -> str:
    return family(name, getattr(torch, call_class.dtype), call_class.training)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
