"""The Hopper backend without its kernels: refusals, which backend is asked first, L2 groups, and what TMA may read."""

from __future__ import annotations

import fresh_python
import pytest
import torch

import fastattn
from fastattn.backends import choice, hopper, select
from fastattn.backends import objections as objections_to_call
from fastattn.spec import Mask, Spec


def call(shape=(1, 1, 4, 64), d_v=64, dtype=torch.float16, mask=None, **terms):
    q = torch.empty(shape, dtype=dtype)
    return q, q, q.new_empty(*shape[:3], d_v), Spec(Mask() if mask is None else mask, 1.0, **terms)


@pytest.fixture
def on_hopper(monkeypatch):
    """CPU tensors count as those of a GPU of compute capability 9.0."""
    monkeypatch.setattr(hopper, "_device_objections", lambda device: [])


def test_refusals_are_sentences(on_hopper):
    assert hopper.unsupported(*call()) == []
    assert hopper.unsupported(*call(dtype=torch.float32)) == ["needs float16 or bfloat16, got float32"]
    for dim in (0, 4, 36, 264):
        of = "takes head dims that are multiples of 8 from 8 to 256, got"
        assert hopper.unsupported(*call((1, 1, 4, dim))) == [f"{of} {dim} for q and k"]
        assert hopper.unsupported(*call(d_v=dim)) == [f"{of} {dim} for v"]
    dense = call(mask=Mask(dense=torch.ones(4, 4, dtype=torch.bool)), softcap=1.0)
    assert objections_to_call(hopper, *dense) == ["does not support dense on cpu", "does not support softcap on cpu"]


def test_only_hopper_is_taken(monkeypatch):
    assert hopper._device_objections(torch.device("cpu")) == ["needs an NVIDIA GPU, got cpu"]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for capability, got in (((9, 0), None), ((8, 0), "8.0"), ((10, 0), "10.0"), ((12, 0), "12.0")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, value=capability: value)
        expected = [f"needs compute capability 9.0 (Hopper), got {got}"] if got else []
        assert hopper._device_objections(torch.device("cuda")) == expected


def test_it_serves_without_being_named(on_hopper):
    assert objections_to_call(hopper, *call(), named=False) == []
    q, k, v, _ = call()
    assert fastattn.explain(q, k, v).objections["hopper"] == []
    assert select(*call(), "hopper") is hopper


def test_it_is_asked_first_where_it_serves(on_hopper, monkeypatch):
    usual = choice.CallClass("cuda", "float16", 128, 0, "padding", training=False)
    assert choice.default_order("cuda", usual, (9, 0)).backends == ("hopper", "triton")
    monkeypatch.setattr(choice, "DEFAULT", [entry._replace(device="cpu") for entry in choice.DEFAULT[1:]])
    assert select(*call(mask=Mask(causal=True, q_offset=1))) is hopper
    assert select(*call(dtype=torch.float32, mask=Mask(causal=True, q_offset=1))).NAME == "cpu"


def test_without_gluon_there_is_a_sentence():
    """In a process of its own, where nothing has imported it; a Triton that is too old lacks names, or the package."""
    program = (
        "import sys, torch, triton.experimental.gluon.language.nvidia.hopper as there\n"
        "from fastattn.backends import hopper\n"
        "{}\n"
        "print(hopper.unavailable(torch.device('cuda')))"
    )
    lacking = {
        "pass": "None",
        "sys.modules['triton.experimental.gluon'] = None": "needs Triton 3.6 or newer with Gluon: import of",
        "del there.warpgroup_mma": "needs Triton 3.6 or newer with Gluon: cannot import name 'warpgroup_mma'",
    }
    for line, said in lacking.items():
        done = fresh_python.run(program.format(line))
        assert done.stdout.startswith(said), done.stdout


def test_l2_groups_fit_into_the_cache():
    from fastattn.backends.hopper.order import l2_group_of
    from fastattn.backends.triton.preparation import visibility

    causal, window, full = (
        visibility(mask, 64, 64) for mask in (Mask(causal=True), Mask(causal=True, window=(9, 0)), Mask())
    )
    mib = 2**20
    assert [l2_group_of(64, 1, size * mib, causal) for size in (64, 32, 9, 8, 1)] == [1, 1, 2, 4, 32]
    assert l2_group_of(64, 4, 16 * mib, causal) == 8
    assert l2_group_of(6, 1, 1, causal) == 6
    assert l2_group_of(64, 1, 1, window) == l2_group_of(64, 1, 1, full) == 1


def test_what_tma_reads_is_not_copied():
    from fastattn.backends.hopper import rings

    x = torch.randn(2, 3, 40, 64).half()
    for readable in (
        x,
        x.transpose(1, 2).contiguous().transpose(1, 2),
        torch.randn(2, 3, 40, 136).half()[..., 8:72],
        torch.randn(1, 40 * 64 + 3).half()[:, : 40 * 64].view(1, 1, 40, 64),  # one head, of odd stride
    ):
        assert rings.loadable(readable) is readable
        assert all(stride % 8 == 0 for stride in rings.strides_of(readable)[:3])


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(torch.randn(2, 3, 64, 40).half().mT, id="columns apart"),
        pytest.param(torch.randn(2, 1, 40, 64).half().expand(2, 3, 40, 64), id="heads shared"),
        pytest.param(torch.randn(2 * 3 * 40 * 64 + 1).half()[1:].view(2, 3, 40, 64), id="base not on 16 bytes"),
        pytest.param(torch.randn(2, 3, 40, 68).half()[..., :64], id="rows not on 16 bytes"),
    ],
)
def test_what_tma_does_not_read_is_copied(x):
    from fastattn.backends.hopper import rings

    copy = rings.loadable(x)
    assert copy.is_contiguous()
    assert torch.equal(copy, x)
