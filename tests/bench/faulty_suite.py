"""Tests that crash, hang and fail, which tests/bench/test_gpu_stages.py runs in processes of their own."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(os.environ["FASTATTN_FAULTY_SUITE"])
TRACES = FOLDER / "begun"
lost = []


def ones(n, device):
    """Of a torch whose GPU answers until it is lost."""
    if lost:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return SimpleNamespace(sum=lambda: SimpleNamespace(item=lambda: n))


sys.modules["torch"] = SimpleNamespace(ones=ones)


@pytest.fixture(autouse=True)
def _trace(request):
    with TRACES.open("a") as file:
        file.write(f"{request.node.name.removeprefix('test_')} {os.getpid()}\n")


def test_right(record_property):
    record_property("row", {"verdict": "right", "family": "fastattn", "note": ""})
    record_property("row", {"verdict": "wrong", "family": "torch", "note": "they differ"})


def test_killed():
    print("out of ink", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_wrong():
    raise AssertionError("they differ")


def test_exits():
    os._exit(0)


def test_hang():
    """As a call of a kernel may: deaf to signals, and with the interpreter's lock."""
    if not (FOLDER / "kernels_end").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ctypes.PyDLL(None).sleep(600)


@pytest.mark.parametrize("rows", [0, 1])
def test_spoils(rows, record_property):
    for _ in range(rows):
        record_property("row", {"verdict": "right", "family": "fastattn", "note": ""})
    lost.append("all memory")


def test_skipped():
    pytest.skip("no time")


@pytest.mark.parametrize("n", [0, 1])
def test_meet(n, record_property):
    """Ends when four processes have begun it."""
    while len(TRACES.read_text().splitlines()) < 4:
        time.sleep(0.05)
    record_property("archs", os.environ["TORCH_CUDA_ARCH_LIST"])


def test_compiled():
    from triton.runtime.jit import JITFunction

    assert hasattr(JITFunction.run, "__wrapped__")
