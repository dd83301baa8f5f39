"""Processes of a gloo group, in which functions of jobs.py and model_jobs.py run."""

from __future__ import annotations

import faulthandler
import importlib
import io
import multiprocessing
import os
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

MOST = 4
TIMEOUT = timedelta(seconds=60)  # of a collective
HANGS = 600  # seconds after which a job is at an end, with a traceback of all threads


class FailedError(AssertionError):
    """What a rank raised."""


class Ranks:
    """Four processes, the first of which can form smaller groups.

    After a failure there are new ones: the groups of the old ones may be broken, and each test would wait for them.
    """

    def __init__(self, folder: Path, most: int = MOST, timeout: timedelta = TIMEOUT) -> None:
        self.folder, self.most, self.timeout, self.starts = folder, most, timeout, 0
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(self.most)]
        store, self.starts = str(self.folder / f"store-{self.starts}"), self.starts + 1
        self.connections = [here for here, _ in pairs]
        self.processes = [
            context.Process(target=_serve, args=(there, store, rank, self.most, self.timeout), daemon=True)
            for rank, (_, there) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()

    def run(self, job: str, size: int, **arguments: object) -> list:
        """What a function returns on each of the first `size` ranks, called with their group.

        Args:
            job: its name, with that of its module where that is not jobs.py.

        Raises:
            FailedError: a rank raised something.
        """
        for connection in self.connections[:size]:
            _send(connection, (job, size, arguments))
        answers = [_answer(connection) for connection in self.connections[:size]]
        if errors := [f"rank {rank}: {error}" for rank, (error, _) in enumerate(answers) if error]:
            self.stop()
            self.start()
            raise FailedError("\n".join(errors))
        return [answer for _, answer in answers]

    def stop(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(10)
            process.kill()


def _send(connection: Connection, message: object) -> None:
    buffer = io.BytesIO()
    torch.save(message, buffer)
    connection.send_bytes(buffer.getvalue())


def _receive(connection: Connection) -> object:
    return torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False)


def _answer(connection: Connection) -> tuple[str | None, object]:
    try:
        return _receive(connection)
    except EOFError:
        return "the process has ended", None


def _serve(connection: Connection, store: str, rank: int, most: int, timeout: timedelta) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["FASTATTN_RECORD"] = "0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=most, timeout=timeout)
    groups = {size: dist.new_group(range(size), timeout=timeout) for size in range(1, most + 1)}
    while True:
        try:
            job, size, arguments = _receive(connection)
        except EOFError:
            return
        faulthandler.dump_traceback_later(HANGS, exit=True)
        try:
            module, _, name = job.rpartition(".")
            answer = None, getattr(importlib.import_module(module or "jobs"), name)(groups[size], **arguments)
        except Exception:
            answer = traceback.format_exc(), None
        faulthandler.cancel_dump_traceback_later()
        _send(connection, answer)
