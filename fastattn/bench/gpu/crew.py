"""Crews of worker processes: a worker that dies or hangs costs one task, and another one takes its place.

A fault on the GPU spoils every later call of its process, and a kernel may never end. Neither can be caught inside the
process, so each crew does its tasks in processes of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

Rows = list[dict[str, object]]
Serve = Callable[..., None]

START_LIMIT_S = 150.0  # to import torch, on a machine whose every core does the same
_LOG_TAIL = 1500  # characters
_ASKS, _LEAVES = "asks for a task", "leaves"


class CrewError(Exception):
    """A worker died before it asked for a task: the message says what it wrote."""


@dataclass(frozen=True)
class Task:
    """Something to do, by a name that its crew understands; after `limit_s` it counts as hung."""

    name: str
    limit_s: float = 60.0


@dataclass(frozen=True)
class Crew:
    """Workers of one kind and their tasks, in the order they are begun.

    serve: what a worker runs, `serve(names, answer, **options)`: it takes names from the iterator, calls answer(rows)
        any number of times for each, and returns early when its process is of no use any more.
    """

    serve: Serve
    tasks: list[Task]
    workers: int = 1
    options: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What came of a task.

    rows: what it handed over, also where it failed later.
    failure: "" or what became of the worker, "died: ..." or "hung: ...".
    """

    task: Task
    rows: Rows
    seconds: float
    failure: str = ""


def answers(crews: list[Crew], deadline: float) -> Iterator[Answer]:
    """The answer to each task as it comes; at the deadline (of time.monotonic) everything stops where it is.

    Raises:
        CrewError: a worker cannot start.
    """
    waiting = [(crew, deque(crew.tasks)) for crew in crews]
    workers: list[_Worker] = []
    try:
        while time.monotonic() < deadline:
            for crew, tasks in waiting:
                for worker in [w for w in workers if w.crew is crew and w.asks]:
                    if tasks:
                        worker.begin(tasks.popleft())
                    else:
                        worker.end()
                        workers.remove(worker)
                starting = sum(w.crew is crew and w.task is None for w in workers)
                busy = sum(w.crew is crew for w in workers)
                for _ in range(min(crew.workers - busy, len(tasks) - starting)):
                    workers.append(_Worker(crew))
            if not workers:
                return
            first_limit = min([deadline, *(w.until for w in workers)])
            ready = wait([w.connection for w in workers], max(0.0, first_limit - time.monotonic()))
            for worker in list(workers):
                answer = worker.listen() if worker.connection in ready else worker.overdue()
                if answer:
                    yield answer
                if worker.gone:
                    workers.remove(worker)
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A process of a crew, seen from the process that gives it tasks."""

    def __init__(self, crew: Crew) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
        self.connection, theirs = context.Pipe()
        self.log = tempfile.NamedTemporaryFile()  # noqa: SIM115
        self.crew, self.task, self.asks, self.gone = crew, None, False, False
        self.rows: Rows = []
        self.begun = time.monotonic()
        self.until = self.begun + START_LIMIT_S
        self.process = context.Process(target=_work, args=(theirs, self.log.name, crew.serve, crew.options))
        self.process.start()
        theirs.close()

    def begin(self, task: Task) -> None:
        self.task, self.rows, self.asks = task, [], False
        self.begun = time.monotonic()
        self.until = self.begun + task.limit_s
        self.connection.send(task.name)

    def listen(self) -> Answer | None:
        """Takes one message; the answer to its task if that is complete."""
        try:
            message = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return self._fail(f"died: exit code {self.process.exitcode}; {self._last_words()}")
        if message not in (_ASKS, _LEAVES):
            self.rows += message
            return None
        answer = self.task and Answer(self.task, self.rows, time.monotonic() - self.begun)
        self.task, self.asks = None, message == _ASKS
        if message == _LEAVES:
            self.end()
        return answer

    def overdue(self) -> Answer | None:
        """The failure of its task, if that has had its time."""
        if time.monotonic() < self.until or self.asks:
            return None
        return self._fail(f"hung: no answer in {self.until - self.begun:.0f} s; {self._last_words()}")

    def end(self) -> None:
        if self.gone:
            return
        with suppress(ProcessLookupError):  # it is no leader before it works, and none after it died
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.log.close()
        self.gone = True

    def _fail(self, failure: str) -> Answer:
        self.end()
        if self.task is None:
            raise CrewError(f"a worker {failure}")
        return Answer(self.task, self.rows, time.monotonic() - self.begun, failure)

    def _last_words(self) -> str:
        end = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, end - _LOG_TAIL))
        return self.log.read().decode(errors="replace").strip() or "it wrote nothing"


def _work(connection: Connection, log: str, serve: Serve, options: dict[str, object]) -> None:
    """What a worker's process runs; what it prints is kept for the case that it dies."""
    os.setpgid(0, 0)  # so that its own children end with it
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)

    def names() -> Iterator[str]:
        while True:
            connection.send(_ASKS)
            yield connection.recv()

    serve(names(), connection.send, **options)
    connection.send(_LEAVES)
