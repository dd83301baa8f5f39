"""The Hopper kernels, compiled with the installed Triton; and the record of what they took with every Triton."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools

import hopper_record
import pytest
import records
from hopper_compile import CALLS, HEAD_DIMS, _exposed, compiled_with
from hopper_record import TRITONS, Compiled, kernels_of

RIGHT = Compiled(
    "3.7.1", "forward_kernel", 128, "full", registers=168, spilled=0, local=0, shared=164200, hgmma=96, tma=8,
    setmaxreg=12, loop=454, loop_hgmma=16, loop_exposed=0, loop_local=0,
)  # fmt: skip


FEW = [(64, "padded"), (128, "causal"), (256, "full")]
"""Which are compiled where the record is of other kernels or another Triton, and of which else the first is."""
IS_RECORDED = hopper_record.is_current() and importlib.metadata.version("triton") in TRITONS


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("head_dim", "call"), FEW[:1] if IS_RECORDED else FEW)
def test_every_hot_kernel_compiles_and_is_as_it_should_be(head_dim, call):
    kernels = compiled_with(None, head_dim, call)
    assert not IS_RECORDED or set(kernels) <= set(hopper_record.recorded()[1])
    expected = set(itertools.product(kernels_of(head_dim, call), (head_dim,), (call,)))
    assert {(kernel.kernel.partition(",")[0], kernel.D, kernel.call) for kernel in kernels} == expected
    assert [f"{kernel} {complaint}" for kernel in kernels for complaint in kernel.complaints()] == []


def test_the_record_is_of_these_kernels():
    """What CI goes by to compile them with every Triton."""
    assert hopper_record.is_current(), "the kernels have changed: run make hopper, then python -m docs.render"
    kernels = hopper_record.recorded()[1]
    actual = {(kernel.triton, kernel.kernel.partition(",")[0], kernel.D, kernel.call) for kernel in kernels}
    every = (itertools.product(TRITONS, kernels_of(D, call), (D,), (call,)) for D in HEAD_DIMS for call in CALLS)
    assert actual == set(itertools.chain.from_iterable(every))
    assert [f"{kernel} {complaint}" for kernel in kernels for complaint in kernel.complaints()] == []


def test_a_kernel_as_it_should_be():
    assert list(RIGHT.complaints()) == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"spilled": 8}, "spills 8 bytes, with 0 instructions"),
        ({"local": 3}, "spills 0 bytes, with 3 instructions"),
        ({"shared": 232449}, "takes 232449 bytes of shared memory, of 232448"),
        ({"tma": 0}, "has no tma"),
        ({"setmaxreg": 0}, "has no setmaxreg"),
        ({"loop_hgmma": 8}, "has 8 matrix instructions in its loop instead of 16"),
        ({"kernel": "dq_kernel", "loop_hgmma": 24, "spilled": 8}, "spills 8 bytes, with 0 instructions"),
        ({"kernel": "fused_kernel", "loop_hgmma": 16}, "has 16 matrix instructions in its loop instead of 32"),
        ({"loop_exposed": 64}, "computes 64 exponentials of its loop with no matrix product under way"),
        (
            {"kernel": "dq_kernel", "loop_hgmma": 24, "loop_exposed": 17},
            "computes 17 exponentials of its loop with no matrix product under way",
        ),
        ({"warnings": ("wgmma is serialized",)}, "wgmma is serialized"),
    ],
)
def test_what_is_wrong_is_a_sentence(changes, complaint):
    assert list(dataclasses.replace(RIGHT, **changes).complaints()) == [complaint]


def test_some_tritons_may_spill_outside_a_step():
    on_another = dataclasses.replace(RIGHT, triton="3.9.0", spilled=8, local=3)
    assert list(on_another.complaints()) == []
    (complaint,) = dataclasses.replace(on_another, loop_local=2).complaints()
    assert complaint == "spills 8 bytes, with 2 instructions of a step"
    assert list(dataclasses.replace(on_another, loop_local=2, call="documents").complaints()) == []


def test_the_fused_kernel_need_not_overlap_where_there_is_padding():
    fused = dataclasses.replace(RIGHT, kernel="fused_kernel", loop_hgmma=32, loop_exposed=32)
    assert len(list(fused.complaints())) == 1
    assert list(dataclasses.replace(fused, call="padded").complaints()) == []


def test_a_forward_of_wide_heads_may_spill_outside_a_step():
    wide = dataclasses.replace(RIGHT, D=256, loop_hgmma=20, spilled=8, local=3)
    assert list(wide.complaints()) == []
    (complaint,) = dataclasses.replace(wide, loop_local=1).complaints()
    assert complaint == "spills 8 bytes, with 1 instructions of a step"


@pytest.mark.parametrize("changes", [{"call": "documents"}, {"D": 256, "loop_hgmma": 36}])
def test_a_backward_that_few_calls_take_may_spill(changes):
    changes = {"kernel": "dq_kernel", "loop_hgmma": 24, "spilled": 8, "local": 2} | changes
    assert list(dataclasses.replace(RIGHT, **changes).complaints()) == []


def test_the_record_is_of_code_and_not_of_comments():
    source = '"""Says."""\n\nX = 1  # one\n\n\ndef f():\n    """Does."""\n    return "# 2"\n'
    assert records.code_of(source) == 'X = 1\ndef f():\n    return "# 2"'
    assert records.code_of(source.replace("one", "1").replace("Does", "It does")) == records.code_of(source)
    assert records.code_of(source.replace("# 2", "# 3")) != records.code_of(source)


def test_the_record_is_of_all_that_the_kernels_are_made_of():
    names = {f"{path.parent.name}/{path.name}" for path in records.sources("hopper")}
    assert {"hopper/gluon.py", "hopper/flash_forward.py", "triton/visibility.py", "triton/tiles.py"} <= names
    assert not {"triton/flash_weights.py", "backends/build.py", "cuda.py", "backends/__init__.py"} & names


def test_exponentials_that_wait_for_products_are_exposed():
    product, other, wait = (
        "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0",
        "MUFU.EX2 R1, R2",
        "WARPGROUP.DEPBAR.LE gsb0, ",
    )
    assert _exposed([f"{wait}0x0", product, product, f"{wait}0x1", other, other]) == 0
    assert _exposed([product, product, f"{wait}0x1", other, f"{wait}0x0", other]) == 1
    assert _exposed([other, product, f"{wait}0x0"]) == 1
