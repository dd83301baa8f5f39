"""Time and memory of calls: all contenders are timed in turn, round by round, so that noise affects them alike."""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from fastattn.backends import build
from fastattn.backends.selfcheck import failures

MIN_ROUNDS, MAX_ROUNDS = 3, 50
CEILING_STEPS = 3_000_000  # about 10 ms, beside which starting the threads is nothing
SAMPLE_S = 0.01  # a sample repeats a shorter call until it takes about this long
_SCRATCH_BYTES = 2**28  # several times the L2 cache of any GPU
_MOST_OVERWRITES = 50


@dataclass(frozen=True)
class Call:
    """Something to time: `run`, inside a `context` that is entered outside the clock."""

    run: Callable[[], object]
    context: Callable[[], AbstractContextManager] = nullcontext


class CallError(RuntimeError):
    """A call failed, by its name, that may have run before: memory may be full by now."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        self.name = name


@dataclass(frozen=True)
class Timing:
    """The samples of one call, in the order they were taken: seconds per call, each the mean of `repetitions`."""

    seconds: tuple[float, ...]
    repetitions: int

    @property
    def median(self) -> float:
        """Seconds per call."""
        return statistics.median(self.seconds)

    def percentile(self, percent: int) -> float:
        """The seconds below which that percentage of the samples lies (linear between samples)."""
        return statistics.quantiles(self.seconds, n=100, method="inclusive")[percent - 1]


def interleave(calls: dict[str, Call], budget_s: float, device: str, by_host: bool = False) -> dict[str, Timing]:
    """The timing of each call, in rounds that give every call one sample.

    Every other round runs backwards, so that no call always follows the same neighbour.

    Args:
        budget_s: about how long all rounds together may take; MIN_ROUNDS are run in any case.
        device: "cpu", by the clock of the host; or "cuda", by the GPU's own, from a cold L2 cache to the end of the
            last kernel, without the time that the host takes to launch.
        by_host: use the clock of the host for "cuda" too: the time of a call when calls follow each other.

    Raises:
        CallError: one of the calls failed.
    """
    watch = _GPUWatch() if device == "cuda" and not by_host else _HostWatch(device)
    settings, round_s = {}, 0.0
    for name, call in calls.items():
        with _named(name):
            settings[name], sample_s = watch.settle(call)
        round_s += sample_s
    rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, int(budget_s / max(round_s, 1e-6))))

    seconds: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(rounds):
        for name in order:
            with _named(name):
                seconds[name].append(watch.sample(calls[name], settings[name]))
        order.reverse()
    return {name: Timing(tuple(taken), watch.repetitions(settings[name])) for name, taken in seconds.items()}


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except failures() as error:
        raise CallError(name, error) from error


class _HostWatch:
    """Samples by the host's clock, which waits for the device at both ends; the setting is the number of calls."""

    def __init__(self, device: str) -> None:
        self.wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def settle(self, call: Call) -> tuple[int, float]:
        """The setting for a call, and about how long a sample will take."""
        once = self.sample(call, 1)
        if once < SAMPLE_S:  # short enough for a first call to mislead
            once = self.sample(call, 1)
        repetitions = max(1, math.ceil(SAMPLE_S / max(once, 1e-6)))
        return repetitions, once * repetitions

    def sample(self, call: Call, repetitions: int) -> float:
        """Seconds per call."""
        with call.context():
            self.wait()
            start = time.perf_counter()
            for _ in range(repetitions):
                call.run()
            self.wait()
            return (time.perf_counter() - start) / repetitions

    def repetitions(self, setting: int) -> int:
        """The number of calls of which a sample is the mean."""
        return setting


class _GPUWatch:
    """Samples of one call each, between two events on the GPU.

    The setting is the number of times that the L2 cache is overwritten before a call: the GPU is busy with that until
    the host has queued the whole call.
    """

    def __init__(self) -> None:
        self.scratch = torch.empty(_SCRATCH_BYTES, dtype=torch.int8, device="cuda")
        overwrite = Call(self.scratch.zero_)
        self.overwrite_s = min(self.sample(overwrite, 1) for _ in range(3))

    def settle(self, call: Call) -> tuple[int, float]:
        self.sample(call, 1)  # a first call may compile
        with call.context():
            torch.cuda.synchronize()
            start = time.perf_counter()
            call.run()
            queued_s = time.perf_counter() - start
        overwrites = min(_MOST_OVERWRITES, 1 + math.ceil(1.5 * queued_s / self.overwrite_s))
        return overwrites, self.sample(call, overwrites) + overwrites * self.overwrite_s

    def sample(self, call: Call, overwrites: int) -> float:
        """Seconds of a call; again where the GPU has waited for the host, which is slower after some calls."""
        while True:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with call.context():
                torch.cuda.synchronize()
                for _ in range(overwrites):
                    self.scratch.zero_()
                start.record()
                call.run()
                end.record()
                has_waited = start.query()
            torch.cuda.synchronize()
            if not has_waited or overwrites == _MOST_OVERWRITES:
                return start.elapsed_time(end) / 1e3
            overwrites = min(2 * overwrites, _MOST_OVERWRITES)

    def repetitions(self, setting: int) -> int:
        return 1


def matmul(dtype: torch.dtype, device: str) -> tuple[str, Call, float]:
    """The machine's yardstick, torch.matmul on square matrices: its name, the call, and its operations."""

    def product(n: int) -> Call:
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        return Call(lambda: a @ b)

    n = 8192 if device == "cuda" else 1024  # reaches the machine's rate, and is short enough to run in each round
    if device == "cpu" and min(_HostWatch(device).sample(product(256), 1) for _ in range(2)) > SAMPLE_S:
        n = 256  # 1024 take seconds, as of a 16-bit dtype on a processor without instructions for it
    return f"torch.matmul {n}x{n}", product(n), 2.0 * n**3


def fma_ceiling() -> tuple[str, Call, float]:
    """The CPU's own yardstick, multiply-adds on registers in every thread: its name, the call, and its operations.

    In fp32, in the instruction set that the cpu backend uses at the moment.
    """
    run = functools.partial(build.CPU.load().fma_ceiling, CEILING_STEPS)
    return "FMA ceiling", Call(run), run()


def peak_bytes(call: Call, device: str) -> int:
    """The most memory that torch's allocator had handed out during one call, above what it had before.

    Memory that an extension takes from elsewhere (malloc) is not seen.
    """
    with call.context():
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call.run()
            return torch.cuda.max_memory_allocated() - before
        return _peak_bytes_on_cpu(call.run)


def _peak_bytes_on_cpu(run: Callable[[], object]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes two lines to stderr each time it is used
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    # The public events() leaves out the memory events that happen inside an operator.
    events = profile.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak
