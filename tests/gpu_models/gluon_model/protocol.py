"""Interaction of the partitions of one program, recorded from a run, and all the orders in which it may happen.

What a partition does is the same in every order: no branch depends on what another one does. So one run tells the steps
of each, and `explore` takes them in every order that barriers leave open, with TMA loads that arrive at any time. It
proves that no order deadlocks, that no wait passes in another phase than in the run, and that of two accesses of which
one writes, the earlier one of the run is over in every order before the later one begins. Then no slot is filled before
all who read it have released it, none is read before it is filled, and every order computes the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from .errors import DeadlockError, KernelError


@dataclass
class Step:
    """Something that a partition does. at: the line of the kernel."""

    at: str = field(kw_only=True)


@dataclass
class Arrive(Step):
    """Some arrivals at an mbarrier, which from then on expects some bytes more."""

    barrier: object
    count: int
    bytes: int = 0

    def __str__(self) -> str:
        return f"arrives at {self.barrier}, for {self.bytes} bytes" if self.bytes else f"arrives at {self.barrier}"


@dataclass
class Wait(Step):
    """A wait for a phase of an mbarrier, which the hardware knows by its parity."""

    barrier: object
    phase: int

    def __str__(self) -> str:
        return f"waits for phase {self.phase} of {self.barrier}"


@dataclass
class Come(Step):
    """Some threads come to a named barrier that has opened so many times."""

    barrier: object
    threads: int
    opened: int

    def __str__(self) -> str:
        return f"comes to {self.barrier}"


@dataclass
class Await(Step):
    """A wait until a named barrier has opened so many times."""

    barrier: object
    opened: int

    def __str__(self) -> str:
        return f"waits at {self.barrier}"


@dataclass
class Begin(Step):
    """An access begins. Of a TMA load, `barrier` hears when it is over, whenever that is."""

    access: object
    barrier: object = None
    bytes: int = 0

    def __str__(self) -> str:
        return f"begins the {self.access.words}"


@dataclass
class End(Step):
    """An access that the same partition began is over."""

    access: object

    def __str__(self) -> str:
        return f"ends the {self.access.words}"


class Recording:
    """The steps of each partition of one program."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.steps: list[list[Step]] = []

    def begin(self, names: list[str]) -> None:
        if self.names:
            raise KernelError("a recording takes one program, with one warp_specialize")
        self.names, self.steps = names, [[] for _ in names]

    def add(self, partition: int, step: Step) -> None:
        self.steps[partition].append(step)

    def of(self, kind: type) -> Iterator[tuple[int, int, Step]]:
        """(partition, position, step) of every step of that kind."""
        for p, steps in enumerate(self.steps):
            for i, step in enumerate(steps):
                if isinstance(step, kind):
                    yield p, i, step


State = tuple[int, ...]  # position of each partition; loads under way, as bits; three numbers of each barrier


class _Protocol:
    """The steps of a recording, to be taken in any order."""

    def __init__(self, recording: Recording) -> None:
        self.names, self.steps = recording.names, recording.steps
        kinds = (Arrive, Wait, Come, Await)
        barriers = {id(step.barrier): step.barrier for _, _, step in recording.of(kinds)}
        barriers |= {id(step.barrier): step.barrier for _, _, step in recording.of(Begin) if step.barrier is not None}
        self.barriers = list(barriers.values())
        self.at = {barrier: len(self.names) + 1 + 3 * i for i, barrier in enumerate(barriers)}  # in a state
        self.loads = [step for _, _, step in recording.of(Begin) if step.barrier is not None]
        self.bit = {id(step.access): 1 << i for i, step in enumerate(self.loads)}
        # Where an access is over: past that step of that partition, for a load when it has arrived, too.
        self.over = {id(step.access): (p, i) for p, i, step in recording.of(Begin)}
        self.over |= {id(step.access): (p, i) for p, i, step in recording.of(End)}
        self.before = self._conflicts(recording)

    @staticmethod
    def _conflicts(recording: Recording) -> dict[int, list]:
        """Of each access, the earlier ones of the run that must be over when it begins."""
        conflicts, begun = {}, []
        for p, _, step in sorted(recording.of(Begin), key=lambda x: x[2].access.event):
            new, latest = step.access, {}
            for partition, other in begun:
                if other.conflicts_with(new):
                    latest[partition, other.region, other.writes] = other
            conflicts[id(new)] = list(latest.values())
            begun.append((p, new))
        return conflicts

    def first(self) -> State:
        numbers = [0] * (len(self.names) + 1)
        for barrier in self.barriers:
            numbers += [0, getattr(barrier, "count", 0), 0]
        return tuple(numbers)

    def next(self, state: State) -> Iterator[tuple[State, str]]:
        """Every state that one partition, or the arrival of one load, makes of this one; with words for it."""
        for p, name in enumerate(self.names):
            if state[p] < len(self.steps[p]) and (following := self._after(state, p)) is not None:
                yield following, (name, self.steps[p][state[p] : following[p]])
        under_way = state[len(self.names)]
        for load in self.loads if under_way else ():
            if under_way & self.bit[id(load.access)]:
                numbers = list(state)
                numbers[len(self.names)] -= self.bit[id(load.access)]
                at = self.at[id(load.barrier)]
                numbers[at + 2] -= load.bytes
                self._complete(numbers, at, load.barrier)
                yield tuple(numbers), ("arrived", [load])

    def _after(self, state: State, p: int) -> State | None:
        """Partition p goes on until it waits again or an access of its own is over; None where it has to wait.

        What it does in between can only let others go on earlier than they could.
        """
        numbers, steps = list(state), self.steps[p]
        while True:
            if not self._taken(numbers, p, steps[numbers[p]]):
                return None
            numbers[p] += 1
            if numbers[p] == len(steps) or isinstance(steps[numbers[p]], (Wait, Await, End)):
                return tuple(numbers)

    def _taken(self, numbers: list[int], p: int, step: Step) -> bool:
        """Whether the step can be taken; then it has been."""
        if isinstance(step, End):
            return True
        if isinstance(step, Begin):
            for other in self.before[id(step.access)]:
                if not self._is_over(numbers, other):
                    raise KernelError(f"{self.names[p]} {step}, and not over is the {other.words}")
            if step.barrier is not None:
                numbers[len(self.names)] |= self.bit[id(step.access)]
            return True
        at = self.at[id(step.barrier)]
        if isinstance(step, Wait):
            if numbers[at] % 2 == step.phase % 2:
                return False
            if numbers[at] != step.phase + 1:
                raise KernelError(f"{self.names[p]} {step} at {step.at} and passes in phase {numbers[at]}")
        elif isinstance(step, Arrive):
            if step.count > numbers[at + 1]:
                raise KernelError(f"{self.names[p]} {step} at {step.at}, where {numbers[at + 1]} are to come")
            numbers[at + 1] -= step.count
            numbers[at + 2] += step.bytes
            self._complete(numbers, at, step.barrier)
        elif isinstance(step, Await):
            return numbers[at] >= step.opened
        else:
            if numbers[at] != step.opened:
                raise KernelError(
                    f"{self.names[p]} {step} at {step.at} as it opened {numbers[at]} times, not {step.opened}"
                )
            numbers[at + 1] += step.threads
            if numbers[at + 1] == step.barrier.threads:
                numbers[at], numbers[at + 1] = numbers[at] + 1, 0
        return True

    def _is_over(self, numbers: list[int], access: object) -> bool:
        p, i = self.over[id(access)]
        return numbers[p] > i and not numbers[len(self.names)] & self.bit.get(id(access), 0)

    @staticmethod
    def _complete(numbers: list[int], at: int, barrier: object) -> None:
        if numbers[at + 1] == 0 and numbers[at + 2] == 0:
            numbers[at], numbers[at + 1] = numbers[at] + 1, barrier.count

    def finished(self, state: State) -> bool:
        return state[len(self.names)] == 0 and all(i == len(s) for i, s in zip(state, self.steps, strict=False))

    def waiting(self, state: State) -> str:
        steps = ((name, i, s) for name, i, s in zip(self.names, state, self.steps, strict=False) if i < len(s))
        return "\n".join(f"  {name} {s[i]} at {s[i].at}" for name, i, s in steps)


def explore(recording: Recording, at_most: int = 2_000_000) -> int:
    """How many states there are in all orders of the steps.

    Raises:
        KernelError: in some order something goes wrong; the message tells the shortest one.
    """
    protocol = _Protocol(recording)
    came_from: dict[State, tuple[State, tuple] | None] = {protocol.first(): None}
    to_do = deque(came_from)
    while to_do:
        state = to_do.popleft()
        try:
            dead = not protocol.finished(state)
            for following, how in protocol.next(state):
                dead = False
                if following not in came_from:
                    came_from[following] = state, how
                    to_do.append(following)
            if dead:
                raise DeadlockError(f"deadlock:\n{protocol.waiting(state)}")
        except KernelError as error:
            raise type(error)(f"{error}\nafter this order of steps:\n{_story(came_from, state)}") from None
        if len(came_from) > at_most:
            raise ValueError(f"more than {at_most} states")
    return len(came_from)


def _story(came_from: dict, state: State) -> str:
    lines = []
    while (step := came_from[state]) is not None:
        state, (who, steps) = step
        lines.append(f"  {who}: {'; '.join(map(str, steps))}")
    return "\n".join(reversed(lines))
