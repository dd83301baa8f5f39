"""Processes of a gloo group, in which functions of jobs.py and model_jobs.py run."""

from __future__ import annotations

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


class FailedError(AssertionError):
    """What a rank raised."""


class Ranks:
    """Four processes, the first of which can form smaller groups."""

    def __init__(self, folder: Path, most: int = MOST, timeout: timedelta = TIMEOUT) -> None:
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(most)]
        self.connections = [here for here, _ in pairs]
        self.processes = [
            context.Process(target=_serve, args=(there, str(folder / "store"), rank, most, timeout), daemon=True)
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
        answers = [_receive(connection) for connection in self.connections[:size]]
        if errors := [f"rank {rank}: {error}" for rank, (error, _) in enumerate(answers) if error]:
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
        try:
            module, _, name = job.rpartition(".")
            answer = None, getattr(importlib.import_module(module or "jobs"), name)(groups[size], **arguments)
        except Exception:
            answer = traceback.format_exc(), None
        _send(connection, answer)
