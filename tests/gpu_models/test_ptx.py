"""The machine for PTX: what it refuses, and Triton's kernels as they are compiled for GPUs."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ptx.machine import Program, PtxError

ROOT = Path(__file__).parents[2]
CONFORMANCE = ROOT / "tests" / "backends" / "test_conformance.py"

# Each thread of 64 reads one of x [64] in fp32, and one of y [64] is written.
KERNEL = """
.version 8.7
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 memory[];
.visible .entry kernel(.param .u64 kernel_x, .param .u64 kernel_y)
.reqntid 64
{{
  .reg .pred %p<4>;
  .reg .b32 %r<9>;
  .reg .b64 %rd<9>;
  ld.param.b64 %rd1, [kernel_x];
  ld.param.b64 %rd2, [kernel_y];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd3, %r1, 4;
  add.s64 %rd4, %rd1, %rd3;
  add.s64 %rd5, %rd2, %rd3;
  shl.b32 %r2, %r1, 2;
  mov.b32 %r3, memory;
  add.s32 %r4, %r3, %r2;
  xor.b32 %r5, %r4, 128;  // of the same lane of the other warp
  setp.lt.s32 %p1, %r1, 32;
  mov.u32 %r8, %laneid;
  setp.lt.s32 %p2, %r8, 16;
  {body}
  ret;
}}
"""
EXCHANGED = """ld.global.b32 %r6, [%rd4]; st.shared.b32 [%r4], %r6; bar.sync 0;
  ld.shared.b32 %r7, [%r5]; st.global.b32 [%rd5], %r7;"""
COPIED = """cp.async.ca.shared.global [%r4], [%rd4], 4; cp.async.commit_group;
  cp.async.wait_group 0; bar.sync 0; ld.shared.b32 %r7, [%r5]; st.global.b32 [%rd5], %r7;"""


def run(body: str, blocks: int = 1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """x and y after the kernel with that body."""
    x, y = torch.randn(64), torch.zeros(64)
    ranges = [(tensor.data_ptr(), tensor.data_ptr() + 256) for tensor in (x, y)]
    values = [struct.pack("Q", begin) for begin, _ in ranges]
    Program(KERNEL.format(body=body)).launch((blocks, 1, 1), 64, 256, values, ranges, seed)
    return x, y


@pytest.mark.parametrize("body", [EXCHANGED, COPIED])
def test_warps_exchange_what_they_read(body):
    for seed in range(10):
        x, y = run(body, seed=seed)
        assert torch.equal(y, x.roll(32))


@pytest.mark.parametrize(
    ("body", "change", "fault"),
    [
        (EXCHANGED, ("bar.sync 0;", ""), "race|read before it is written"),
        (EXCHANGED, ("bar.sync 0;", "@%p1 bar.sync 0;"), "deadlock|race|read before it is written"),
        (
            EXCHANGED,
            ("bar.sync 0;", "@%p1 bar.sync 1; @!%p1 bar.sync 2;"),
            r"deadlock: all wait\n +warp 0 at .*\n +warp 1 at",
        ),
        (EXCHANGED, ("bar.sync 0;", "@%p2 bar.sync 0;"), "by a part of the warp"),
        (EXCHANGED, ("bar.sync 0;", "bar.sync 0, 96;"), "a barrier for 96 threads"),
        (EXCHANGED, ("[%rd4]", "[%rd4+4]"), "outside of every tensor"),
        (EXCHANGED, ("[%rd4]", "[%rd4+2]"), "no multiple of 4"),
        (EXCHANGED, ("[%r5]", "[%r5+4]"), "outside of the 256 bytes|race|read before"),
        (EXCHANGED, ("st.shared", "@%p1 st.shared"), "read before it is written"),
        (EXCHANGED, ("ld.global", "@%p2 ld.global"), "%r6 is undefined"),
        (EXCHANGED, ("ld.global", "@%p3 ld.global"), "%p3 is undefined"),
        (EXCHANGED, ("[%rd5]", "[%rd2]"), "race: writes global byte"),
        (COPIED, ("cp.async.wait_group 0;", ""), "an asynchronous copy that nobody waited for"),
        (COPIED, ("wait_group 0", "wait_group 1"), "an asynchronous copy that nobody waited for"),
        (COPIED, ("cp.async.commit_group;", ""), "an asynchronous copy that nobody waited for"),
        (COPIED, ("bar.sync 0;", ""), "race|read before|nobody waited for"),
        (EXCHANGED, ("st.global.b32", "st.global.L1::no_allocate.b32"), "unknown instruction"),
        (EXCHANGED, ("%r7;", "%rd7;"), "%rd7 is undefined"),
        (EXCHANGED, ("bar.sync 0;", "bar.sync 0; add.s32 %rd7, %r1, 1;"), "has 64 bits"),
        (EXCHANGED, ("bar.sync 0;", "bar.sync 0; add.s32 %r7, %r1, %r1, 1;"), "another number of operands"),
        (EXCHANGED, ("bar.sync 0;", "bar.sync 0; .local .b32 x;"), "unknown directive"),
        (EXCHANGED, ("bar.sync 0;", "bar.sync 0; bra nowhere;"), "unknown label"),
    ],
)
def test_what_is_wrong_is_a_fault(body, change, fault):
    assert change[0] in body
    for seed in range(3):
        with pytest.raises(PtxError, match=fault):
            run(body.replace(*change), seed=seed)


def test_blocks_that_write_the_same_bytes_race():
    with pytest.raises(PtxError, match="which another block wrote"):
        run(EXCHANGED, blocks=2)


def compiled(*command: str) -> str:
    """What a command of Python prints where Triton compiles its kernels, which are kept in build/."""
    pytest.importorskip("triton", reason="there is no triton for this platform")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["TRITON_INTERPRET"] = "0"
    environment.setdefault("TRITON_CACHE_DIR", str(ROOT / "build" / "ptx_machine" / "triton"))
    done = subprocess.run([sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10000:] + done.stderr[-10000:]
    return done.stdout


@pytest.mark.parametrize(
    "chosen",
    [
        # Those whose kernels others use, too, so that few are compiled.
        "triton_sm_80 and (float32 or bfloat16) and (plain or one-query or tail-above or pad-queries-causal)",
        "triton_sm_80 and torch.float16 and (everything or scattered-segments-alibi)",
        "triton_sm_90 and bfloat16 and (plain or tail-above or pad-queries-causal)",
        "hopper_sm_90 and float16 and (plain or multi-query or pad-queries-causal or segments-causal)",
    ],
)
def test_compiled_kernels_are_right(chosen):
    printed = compiled("-m", "pytest", "-q", str(CONFORMANCE), "-k", f"test_case_is_right and {chosen}")
    assert " passed" in printed


FOUND = {  # kinds of edits of which each that was drawn is found, or all but one
    ("triton", 80): ["bar.sync removed", "cp.async.wait_group removed", "predicate of a global access dropped"],
    ("hopper", 90): ["fence.proxy.async removed", "arrival at an mbarrier removed", "expected bytes changed"],
}


@pytest.mark.parametrize(("backend", "arch"), FOUND)
def test_faults_put_into_compiled_kernels_are_found(backend, arch):
    arguments = ("--backend", backend, "--arch", str(arch), "--case", "pad-queries-causal", "--most", "1")
    table = compiled("-m", "tests.gpu_models.ptx", "mutate", *arguments, "--kind", *FOUND[backend, arch])
    rows = [line for line in table.splitlines() if line.startswith(tuple(FOUND[backend, arch]))]
    counts = [[int(n) for n in row[40:].split()] for row in rows]
    assert len(rows) == 3
    assert all(found > missed for found, _, missed, _ in counts), table
    assert all(row[3] == 0 for row in counts), table
