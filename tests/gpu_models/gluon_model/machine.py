"""One program while it runs: its partitions, which take turns, and what is under way beside them.

Partitions are threads of which one runs at a time. What one of them knows to have happened is a set of events, kept as
the bits of a whole number: accesses of its own, and what it heard of at barriers. Two accesses of which one writes must
be ordered by that, whatever the order in which the model happens to run them.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import torch

from .errors import DeadlockError, KernelError, source_line
from .protocol import End, Recording, Step

ORDERS = ("round robin", "consumers first", "producer first", "random")
TIMINGS = ("early", "late", "random")


@dataclass(frozen=True)
class Settings:
    """How the model runs what a GPU may run in many ways.

    order: which partition goes on where several could.
    timing: of what is asynchronous: "early", as soon as it is started; "late", when something waits for it and nothing
        else can go on; or a random moment.
    seed: of what is random.
    recording: gets the steps of the only program that is launched, see protocol.py.
    unordered: accesses that nothing orders are no error, for a recording in which they are to be found.
    programs: the order of the programs of a launch, given their numbers; it may leave some out.
    """

    order: str = "round robin"
    timing: str = "random"
    seed: int = 0
    recording: Recording | None = None
    unordered: bool = False
    programs: Callable[[Sequence[int]], Sequence[int]] = tuple

    def __post_init__(self) -> None:
        if self.order not in ORDERS or self.timing not in TIMINGS:
            raise ValueError(f"order must be one of {ORDERS} and timing one of {TIMINGS}, got {self}")


_settings = Settings()
_running: Machine | None = None


@contextmanager
def running_with(**changes: object) -> Iterator[None]:
    """Kernels launched inside run with these fields of `Settings`."""
    global _settings
    before, _settings = _settings, replace(_settings, **changes)
    try:
        yield
    finally:
        _settings = before


def settings() -> Settings:
    return _settings


def machine() -> Machine:
    """The program that runs."""
    if _running is None:
        raise KernelError(f"only a kernel may do this, at {source_line()}")
    return _running


def in_kernel() -> bool:
    return _running is not None


class _AbandonedError(BaseException):
    """Ends the partitions that wait, once another one has failed."""


class Partition:
    """Some warps of a program, with what they know.

    known: the events that have happened before what they do next.
    fenced: those of `known` that the asynchronous proxy sees, too.
    products, copies, copy_groups, stores: what they started and have not waited for, in order.
    """

    def __init__(self, name: str, warps: int, known: int = 0, fenced: int = 0) -> None:
        self.name, self.warps = name, warps
        self.known, self.fenced = known, fenced
        self.products: list = []
        self.copies: list = []
        self.copy_groups: list[list] = []
        self.stores: list = []
        self.waits_until: Callable[[], bool] | None = None
        self.waits_for: Callable[[], str] = str
        self.waits_at = ""
        self.phases: dict = {}  # of each mbarrier, the last phase that was waited for
        self.ended = False
        self.turn = threading.Semaphore(0)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def runnable(self) -> bool:
        return not self.ended and (self.waits_until is None or self.waits_until())

    def learn(self, known: int, fenced: int) -> None:
        self.known |= known
        self.fenced |= fenced


class Machine:
    """One program of a launch, from its first line to its last."""

    def __init__(self, program: int, programs: int, warps: int, how: Settings) -> None:
        self.program, self.programs, self.how = program, programs, how
        self.random = random.Random(f"{how.seed} {program}")
        self.main = Partition("the program", warps)
        self.current = self.main
        self.partitions = [self.main]
        self.under_way: list[Callable[[], None]] = []  # TMA loads that have not arrived
        self.allocations: list = []
        self.named_barriers: dict[int, object] = {}
        self.events = 0
        self.loads: list = []  # every one: (its event, words for it)
        self.failure: BaseException | None = None
        self._main_turn = threading.Semaphore(0)

    # What happens

    def new_event(self) -> int:
        """A bit of its own."""
        event = 1 << self.events
        self.events += 1
        return event

    def record(self, step: Callable[..., Step], *arguments: object) -> None:
        """The running partition takes a step."""
        if self.how.recording is not None and self.current is not self.main:
            self.how.recording.add(self.partitions.index(self.current), step(*arguments, at=source_line()))

    def over(self, access: object) -> None:
        """The running partition knows from now on that an access of its own is over."""
        self.record(End, access)
        self.current.known |= access.event

    def early(self) -> bool:
        """Whether an asynchronous read or write that starts now is done at once."""
        return self.how.timing == "early" or (self.how.timing == "random" and self.random.random() < 0.5)

    def start(self, arrive: Callable[[], None]) -> None:
        """Something that ends by itself, at any time from now on."""
        if self.how.timing == "early":
            arrive()
        else:
            self.under_way.append(arrive)

    # Who runs

    def pause(self) -> None:
        """Where another partition may go on before this one does."""
        if self.how.timing == "random" and self.under_way and self.random.random() < 0.3:
            self.under_way.pop(self.random.randrange(len(self.under_way)))()
        if len(self.partitions) > 1:
            self._go_on()

    def wait_until(self, condition: Callable[[], bool], words: Callable[[], str]) -> None:
        """Others run until `condition`; `words` say what is waited for, should it never come."""
        self.pause()
        if condition():
            return
        me = self.current
        me.waits_until, me.waits_for, me.waits_at = condition, words, source_line()
        self._go_on()
        me.waits_until = None

    def _go_on(self) -> None:
        me, chosen = self.current, self._chosen()
        if chosen is me:
            return
        self.current = chosen
        chosen.turn.release()
        if not me.ended:
            me.turn.acquire()
            if self.failure is not None:
                raise _AbandonedError

    def _chosen(self) -> Partition:
        while not (able := [p for p in self.partitions if p.runnable()]):
            if not self.under_way:
                raise DeadlockError(self._who_waits())
            at_random = self.how.timing == "random"
            self.under_way.pop(self.random.randrange(len(self.under_way)) if at_random else 0)()
        order = self.how.order
        if order == "random":
            return self.random.choice(able)
        if order == "consumers first":
            return able[0]
        if order == "producer first":
            return able[-1]
        if self.current in able and self.current.waits_until is None:
            return self.current
        after = self.partitions.index(self.current) + 1
        return next(p for p in self.partitions[after:] + self.partitions[:after] if p in able)

    def _who_waits(self) -> str:
        waiting = (f"  {p.name} at {p.waits_at} {p.waits_for()}" for p in self.partitions if not p.ended)
        return "deadlock:\n" + "\n".join(waiting)

    def specialize(self, functions: Sequence[tuple[Callable, tuple]], warps: Sequence[int]) -> object:
        """Runs each function as a partition, the first with the warps of the program; what the first returns."""
        if self.current is not self.main:
            raise KernelError("warp_specialize inside of a partition")
        if len(warps) != len(functions) - 1:
            raise KernelError(f"warp_specialize got {len(functions) - 1} workers and warps {list(warps)}")
        names = [getattr(function, "__name__", "partition") for function, _ in functions]
        names = [f"{name} {i}" if names.count(name) > 1 else name for i, name in enumerate(names)]
        main, results = self.main, [None] * len(functions)
        self.partitions = [
            Partition(name, n, main.known, main.fenced) for name, n in zip(names, (main.warps, *warps), strict=True)
        ]
        if self.how.recording is not None:
            self.how.recording.begin(names)

        def body(i: int) -> None:
            partition = self.partitions[i]
            partition.turn.acquire()
            try:
                if self.failure is None:
                    with torch.no_grad():
                        function, arguments = functions[i]
                        results[i] = function(*arguments)
                        self.check_nothing_is_left(partition)
            except _AbandonedError:
                pass
            except BaseException as error:  # every kind ends the program, in the thread that launched it
                self._fail(error, partition)
            partition.ended = True
            try:
                if self.failure is None and not all(p.ended for p in self.partitions):
                    self._go_on()
                    return
            except BaseException as error:
                self._fail(error, partition)
            self._main_turn.release()

        threads = [threading.Thread(target=body, args=(i,), daemon=True) for i in range(len(functions))]
        for thread in threads:
            thread.start()
        first = self.partitions[-1 if self.how.order == "producer first" else 0]
        self.current = first
        first.turn.release()
        self._main_turn.acquire()
        if self.failure is not None:
            for partition in self.partitions:
                partition.turn.release()
        for thread in threads:
            thread.join()
        for partition in self.partitions:
            main.learn(partition.known, partition.fenced)
        self.partitions, self.current = [main], main
        if self.failure is not None:
            raise self.failure
        return results[0]

    def _fail(self, error: BaseException, partition: Partition) -> None:
        if self.failure is None:
            self.failure = error
            error.__notes__ = [*getattr(error, "__notes__", []), f"in partition {partition.name}"]

    def check_nothing_is_left(self, partition: Partition) -> None:
        """An error where a partition ends with something that it started and never waited for."""
        left = [*partition.products, *partition.copies, *chain.from_iterable(partition.copy_groups), *partition.stores]
        if left:
            raise KernelError(f"{partition.name} ends without waiting for {left[0]}")

    def run(self, function: Callable, *arguments: object, **options: object) -> None:
        """The whole program."""
        global _running
        if _running is not None:
            raise KernelError("a kernel cannot launch a kernel")
        _running = self
        try:
            with torch.no_grad():
                function(*arguments, **options)
                self.check_nothing_is_left(self.main)
                while self.under_way:
                    self.under_way.pop()()
                for event, words in self.loads:
                    if not event & self.main.known:
                        raise KernelError(f"the program ends without waiting for {words}")
                for allocation in self.allocations:
                    allocation.check_at_the_end()
        finally:
            _running = None
