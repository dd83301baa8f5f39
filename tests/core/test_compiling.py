"""Kernels compiled ahead of their launches, without a GPU."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastattn.backends import selfcheck

REPOSITORY = Path(__file__).parents[2]
PROGRAM = """
import threading
from concurrent.futures import ThreadPoolExecutor

import torch, triton
import triton.language as tl
from triton.runtime import driver

from benchmarks.gpu.compiling import NoGPU
from fastattn.backends.compiling import compile_only, compiled_at_once


@triton.jit
def good_kernel(x, N: tl.constexpr):
    tl.store(x, N)


@triton.jit
def bad_kernel(x):
    tl.static_assert(False)


compiled, launched, run = [], [], triton.JITFunction.run
triton.knobs.compilation.listener = lambda **_: compiled.append(threading.get_ident())
triton.JITFunction.run = lambda kernel, *args, warmup, **options: (
    run(kernel, *args, warmup=True, **options) if warmup else launched.append(kernel.__name__)
)
made = []
NoGPU.launcher_cls = lambda self, src, metadata: made.append((src.fn.__name__, threading.get_ident()))
driver.set_active(NoGPU(80))
x = torch.zeros(1)
with ThreadPoolExecutor(1) as another, compiled_at_once():
    for n in range(4):
        good_kernel[(1,)](x, n)
    bad_kernel[(1,)](x)
    assert threading.get_ident() not in compiled, "this thread goes on"
    another.submit(lambda: bad_kernel[(1,)](x)).result()
assert len(compiled) == 4
assert [name for name, _ in made] == ["good_kernel"] * 4
assert threading.get_ident() not in [thread for _, thread in made]
try:
    with compiled_at_once():
        good_kernel[(1,)](x, 4)
        raise KeyboardInterrupt
except KeyboardInterrupt:
    pass
assert launched == ["bad_kernel"], "what another thread launches has to run"
triton.knobs.compilation.listener = lambda cache_hit, **_: cache_hit or compiled.append("again")
for n in range(4):
    run(good_kernel, x, n, grid=(1,), warmup=True)
assert "again" not in compiled
with compile_only():
    good_kernel[(1,)](x, 4)
    try:
        bad_kernel[(1,)](x)
    except triton.CompilationError:
        print("says so")
assert isinstance(run(good_kernel, x, 4, grid=(1,), warmup=True), triton.compiler.CompiledKernel)
good_kernel[(1,)](x, 0)
assert launched[1:] == ["good_kernel"]
"""


def test_kernels_are_compiled_side_by_side_and_not_run(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)  # Triton reads the source of a kernel in its file
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "program.py"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "says so\n"


@pytest.mark.parametrize(("name", "ahead"), [("triton", True), ("hopper", True), ("torch", False)])
def test_check_on_a_gpu_compiles_before_it_launches(name, ahead, monkeypatch):
    done = []

    @contextmanager
    def compiled_at_once():
        done.append("compiles")
        yield
        done.append("has compiled")

    def results(*_):
        done.append("call")
        return []

    of_products = torch.backends.cuda.matmul
    problem = SimpleNamespace(results=results, exactly=lambda: problem)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append(of_products.fp32_precision))
    torch.set_float32_matmul_precision("high")
    monkeypatch.setattr(selfcheck, "compiled_at_once", compiled_at_once)
    monkeypatch.setattr(selfcheck, "_problems", lambda *_: [problem])
    try:
        family = SimpleNamespace(NAME=name), torch.device("cuda"), torch.float16
        assert selfcheck.find_fault(*family, training=True) is None
        assert of_products.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert done == ["compiles", "call", "has compiled"] * ahead + ["call", "call", "ieee", "call"]
