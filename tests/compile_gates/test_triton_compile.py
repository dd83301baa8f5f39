"""The Triton kernels, compiled with the installed Triton; and the record of what they take on every GPU."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import hopper_record
import pytest
import rank_tiles
import test_hopper_compile
import triton_record
from sass import Instruction
from triton_compile import CALLS, COMPILED, FEW, HOT, Call, compiled_with, predicted, programs_at_once
from triton_record import CHOSEN, TRAINING, TRITONS, Compiled, Step

STEP = Step(
    instructions=393,
    matrix=64,
    exponentials=34,
    fragments=30,
    stores=0,
    barriers=2,
    local=0,
    narrow=0,
    clocks=(2048, 1560, 1088, 1430),
)
RIGHT = Compiled(
    CHOSEN, 80, "forward_kernel", 64, "bfloat16", "causal", registers=255, stack=0, shared=49152,
    tile=(128, 64, 4), programs=2, matrix="mma.sync", columns=0, spread=False, full=STEP,
    partial=dataclasses.replace(STEP, instructions=609),
)  # fmt: skip
ON_HOPPER = dataclasses.replace(RIGHT, arch=90, matrix="wgmma.mma_async", columns=64)


IS_RECORDED = triton_record.is_current() and importlib.metadata.version("triton") == CHOSEN


def complaints(kernels: list[Compiled]) -> list[str]:
    return [f"{kernel}: {complaint}" for kernel in kernels for complaint in kernel.complaints()]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("arch", "calls"), [(90, HOT[:1])] if IS_RECORDED else [(80, FEW), (90, FEW)])
def test_kernels_are_compiled_as_they_should_be(arch, calls):
    """What is recorded was: one call, to see that the record is what compiling says."""
    kernels = compiled_with(None, arch, calls)
    assert not IS_RECORDED or set(kernels) <= set(triton_record.recorded()[1])
    for call in calls:
        names = {kernel.kernel for kernel in kernels if (kernel.D, kernel.call) == (call.D, call.name)}
        assert {*TRAINING, "rows_kernel"} <= names
        assert ("dbias_kernel" in names) == (call.name == "everything")
        assert (names >= {"weights_kernel", "received_kernel", "top_keys_kernel"}) == (call in HOT)
    assert complaints(kernels) == []


def test_the_record_is_of_these_kernels():
    """What CI goes by to compile them for every GPU and with every Triton."""
    assert triton_record.is_current(), "the kernels have changed: run make triton, then python -m docs.render"
    kernels = triton_record.recorded()[1]
    hot = {(triton, arch, *call) for triton in TRITONS for arch in (80, 90) for call in HOT}
    every = {(CHOSEN, arch, *call) for arch, calls in COMPILED.items() for call in calls}
    for name in TRAINING:
        needed = {x for x in hot | every if name == "forward_kernel" or "pages" not in x[-1]}  # which have no gradients
        assert {(x.triton, x.arch, x.D, x.dtype, x.call) for x in kernels if x.kernel == name} >= needed
    assert complaints(kernels) == []


@pytest.mark.parametrize(
    "kernel",
    [
        RIGHT,
        ON_HOPPER,
        dataclasses.replace(RIGHT, kernel="weights_kernel", stack=8, full=None),
        dataclasses.replace(RIGHT, kernel="spans_kernel", matrix="", full=None),
        dataclasses.replace(RIGHT, dtype="float32"),
        dataclasses.replace(RIGHT, arch=86, dtype="float32", matrix="", full=None),
        dataclasses.replace(RIGHT, call="everything", stack=96),
        dataclasses.replace(ON_HOPPER, kernel="dk_dv_kernel", D=128, full=dataclasses.replace(STEP, local=70)),
    ],
    ids=lambda kernel: f"{kernel.kernel} {kernel.dtype} {kernel.call} {kernel.arch}",
)
def test_a_kernel_as_it_should_be(kernel):
    assert list(kernel.complaints()) == []


@pytest.mark.parametrize(
    ("kernel", "changes", "complaint"),
    [
        (RIGHT, {"shared": 168000}, "takes 168000 bytes of shared memory, of 166912"),
        (RIGHT, {"arch": 86, "shared": 102400}, "takes 102400 bytes of shared memory, of 101376"),
        (RIGHT, {"arch": 86, "dtype": "float32"}, "has matrix instructions"),
        (RIGHT, {"dtype": "float32", "matrix": ""}, "has no matrix instructions"),
        (RIGHT, {"kernel": "weights_kernel", "matrix": ""}, "has no matrix instructions"),
        (RIGHT, {"full": None}, "has no loop with matrix instructions"),
        (RIGHT, {"matrix": "wgmma.mma_async"}, "multiplies by wgmma.mma_async instead of mma.sync"),
        (RIGHT, {"cramped": True}, "multiplies tiles that are narrower than their layout, which Triton gets wrong"),
        (RIGHT, {"spread": True}, "spreads the scores of a row over several warps"),
        (RIGHT, {"kernel": "weights_kernel", "stack": 24}, "spills 24 bytes"),
        (ON_HOPPER, {"columns": 32}, "has a wgmma of 32 columns, which Triton 3.7 gets wrong (triton#11366)"),
        (ON_HOPPER, {"warnings": ("wgmma is serialized",)}, "wgmma is serialized"),
    ],
)
def test_what_is_wrong_is_a_sentence(kernel, changes, complaint):
    assert list(dataclasses.replace(kernel, **changes).complaints()) == [complaint]


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("barriers", 9, "has 9 barriers in a step"),
        ("narrow", 1, "has 1 loads of one or two bytes in a step"),
        ("local", 1, "spills in a step, with 1 instructions"),
        ("fragments", 33, "loads 33 matrices from shared memory for 64 products"),
    ],
)
def test_what_is_wrong_with_a_step_over_a_full_tile(name, value, complaint):
    wrong = dataclasses.replace(RIGHT, full=dataclasses.replace(STEP, **{name: value}))
    assert list(wrong.complaints()) == [complaint]
    elsewhere = dataclasses.replace(RIGHT, partial=dataclasses.replace(STEP, **{name: value}))
    assert list(elsewhere.complaints()) == []


def test_a_step_over_a_partial_tile_may_spill_a_little():
    (complaint,) = dataclasses.replace(RIGHT, partial=dataclasses.replace(STEP, local=31)).complaints()
    assert complaint == "spills in a step over a partial tile, with 31 instructions"


def test_other_tritons_may_spill_half_as_much_again():
    some = dataclasses.replace(RIGHT, kernel="dk_dv_kernel", full=dataclasses.replace(STEP, local=24, barriers=4))
    assert len(list(some.complaints())) == 2
    assert list(dataclasses.replace(some, triton="3.9.0").complaints()) == []
    more = dataclasses.replace(some, triton="3.9.0", full=dataclasses.replace(STEP, local=25))
    assert list(more.complaints()) == ["spills in a step, with 25 instructions"]


def test_passes_add_up_what_is_predicted_for_their_kernels():
    """A backward is counted with five products, in whatever kernels it is computed."""
    kernels = [dataclasses.replace(RIGHT, predicted=2560)]
    kernels += [
        dataclasses.replace(RIGHT, kernel=name, predicted=n)
        for name, n in (("dk_dv_kernel", 3840), ("dq_kernel", 2560))
    ]
    kernels.append(dataclasses.replace(RIGHT, call="dense"))
    *_, line = triton_record.speeds(kernels).splitlines()
    forward = 128 * 128 * 4 * 64 / 2560 * 108 * 1.25 / 1000
    assert line == f"| sm_80 | 64 | causal | {round(forward)} | {round(forward)} |"


def test_time_is_predicted_for_gpus_of_the_model_alone():
    loop = [Instruction("MUFU.EX2 R4, R5")] * 64 + [Instruction("BAR.SYNC.DEFER_BLOCKING 0x0")]
    assert predicted(loop, 80, (64, 64), warps=4, programs=1) == pytest.approx(16 * 64 * 8 / 4, rel=0.1)
    assert predicted(loop, 80, (64, 128), warps=4, programs=1) == pytest.approx(8 * 64 * 8 / 4, rel=0.1)
    assert predicted(loop, 120, (64, 64), warps=4, programs=1) is None
    assert predicted(loop, 80, (64, 64), warps=4, programs=0) is None  # it does not fit


def test_tiles_are_compiled_and_ranked():
    tiles = ["--tile", "128", "64", "8", "2", "--tile", "128", "64", "8", "3"]
    command = [sys.executable, rank_tiles.__file__, "90", "forward", "64-bfloat16-alibi", *tiles]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    *_, first, second = printed.stdout.splitlines()
    assert "| 128 x 64, 8, 3 |" in first  # loads of a second stage alone are waited for
    assert "| 128 x 64, 8, 2 |" in second
    assert printed.stderr.startswith("1 of 2: Config(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2)")


def test_the_chosen_triton_is_that_of_the_constraints():
    assert f"triton=={CHOSEN}" in (Path(__file__).parents[2] / "constraints.txt").read_text().split()


def test_programs_share_registers_shared_memory_and_warps():
    assert programs_at_once(80, registers=255, shared=0, warps=4) == 2
    assert programs_at_once(80, registers=168, shared=0, warps=4) == 3
    assert programs_at_once(80, registers=128, shared=82000, warps=4) == 2
    assert programs_at_once(86, registers=128, shared=82000, warps=4) == 1
    assert programs_at_once(86, registers=32, shared=0, warps=8) == 6


@pytest.mark.parametrize(("gate", "right"), [(triton_record, RIGHT), (hopper_record, test_hopper_compile.RIGHT)])
def test_a_record_that_lacks_a_triton_is_not_current(gate, right, monkeypatch, tmp_path):
    monkeypatch.setattr(gate, "FILE", tmp_path / "record.json")
    assert not gate.is_current()
    for versions, current in ((TRITONS[1:], False), (TRITONS, True)):
        kernels = [dataclasses.replace(right, triton=version) for version in versions]
        gate.record(kernels)
        assert gate.is_current() is current
        assert gate.recorded()[1] == kernels
    monkeypatch.setattr(gate, "digest", lambda: "of others")
    assert not gate.is_current()


def test_calls_are_read_as_they_are_written():
    for name in CALLS:
        call = Call(64, "bfloat16", name)
        assert Call.of(str(call)) == call
