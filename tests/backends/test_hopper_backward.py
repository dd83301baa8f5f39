"""The compiled backward of Hopper: several tiles and items, every configuration, edges, hidden rows.

On the machine for PTX; `make ptx` runs it. Each case in one dtype; test_conformance.py has both.
"""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch

from fastattn.backends import hopper, reference
from fastattn.backends.hopper import flash_backward
from fastattn.backends.hopper.configs import DkDvConfig, DqConfig
from fastattn.backends.triton.launches import Launches
from fastattn.spec import Mask, Spec
from fastattn.testing import Case, assert_right, make_inputs, run

pytestmark = pytest.mark.usefixtures("hopper_gpu")

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
CASES = [  # those with the usual head dim have kernels that test_conformance.py compiles, too
    Case("full", "no mask arithmetic, a tail of queries and of keys", n_q=201, n_k=333),
    Case("causal", "full tiles beside edges", n_q=330, causal=True),
    Case("cached", "fewer queries than keys", n_q=70, n_k=300, causal=True, q_offset=(230, 100)),
    Case("window", "edges on both sides", n_q=400, n_k=390, window=(100, 70)),
    Case("padded", "tiles of which some rows are hidden", n_q=200, keys="right", queries=True),
    Case("padded-left", "the first tiles are hidden", n_q=201, keys="left", queries=True, causal=True),
    Case("holes", "hidden rows anywhere", n_q=200, n_k=210, keys="holes", queries=True),
    Case("no-key", "items that see nothing", n_q=150, n_k=300, keys="none", causal=True),
    Case("documents", "ranges from a table, in both kernels", n_q=400, segment_ids=True, causal=True),
    Case("grouped", "a key tile goes through the queries of several heads", H=6, H_kv=2, n_q=200, causal=True),
    Case("narrow", "columns past the last one", n_q=150, D=40, d_v=24, causal=True),
    Case("wide-v", "other head dims for values", n_q=150, D=64, d_v=128),
    Case("wide-qk", "other head dims for keys", n_q=150, D=80, d_v=64, layout="sliced"),
    Case("128", "the tiles of this head dim", n_q=300, D=128, keys="right", queries=True, causal=True, layout="BNHD"),
    Case("256", "dK and dV by a launch each", H=1, n_q=200, D=256, keys="right", queries=True, causal=True),
]


@pytest.mark.parametrize(("case", "dtype"), [*zip(CASES, itertools.cycle(SIXTEEN_BITS), strict=False)], ids=str)
def test_gradients_are_right(case, dtype):
    inputs = make_inputs(case, dtype, "cpu")
    assert_right(inputs, run(inputs, "hopper"))


LOOPS = [  # of tiles, of heads that share keys, and of work items, of one program
    Case("3 tiles, 2 items", "", B=1, H=3, H_kv=1, n_q=180, n_k=180, D=64),
    Case("6 tiles, 4 items", "", B=2, H=3, H_kv=1, n_q=370, n_k=200, D=64),
    Case("1 tile", "", B=1, H=3, H_kv=1, n_q=60, n_k=60, D=64),
]


@pytest.mark.parametrize("padded", [False, True], ids=["TMA", "cp.async"])
@pytest.mark.parametrize("slots", [(1, 1), (2, 1), (2, 2)], ids=str)
def test_every_configuration(hopper_gpu, slots, padded):
    """The slots of K and V for dQ, and those of Q and dO for dK and dV."""
    hopper_gpu.multiprocessors = 1
    dq, dk_dv = DqConfig(64, *slots, 240, 24, 168, True), DkDvConfig(True, 64, *slots, 240, 24, 168, True)
    with (
        mock.patch.object(flash_backward, "dq_config", return_value=dq),
        mock.patch.object(flash_backward, "dk_dv_config", return_value=dk_dv),
    ):
        for case in LOOPS:
            terms = {"keys": "right", "queries": True} if padded else {}
            inputs = make_inputs(Case(**vars(case) | terms), torch.float16)
            assert_right(inputs, run(inputs, "hopper"))


def of_one_call(D: int, **mask: object) -> tuple:
    """Arguments of a backward but for `output_mask`, with 2 heads of 150 queries and keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 2, 150, D, generator=generator).half() for _ in range(4))
    spec = Spec(Mask(**mask), scale=D**-0.5)
    o, lse = reference.forward(q, k, v, spec)
    return do, torch.randn(lse.shape, generator=generator), q, k, v, o, lse, spec


@pytest.mark.parametrize("D", [64, 256])
def test_each_gradient_alone_has_the_same_bits(D):
    call = of_one_call(D, causal=True)
    together = hopper.backward(*call, (True,) * 3 + (False,) * 3)
    assert together[3:] == (None,) * 3
    for i in range(3):
        alone = hopper.backward(*call, tuple(i == j for j in range(6)))
        assert [x is None for x in alone] == [i != j for j in range(6)]
        assert torch.equal(alone[i], together[i])


def test_what_sees_nothing_has_gradients_of_zero():
    """Also where an item has no tile at all, and the memory of its gradient held something else."""
    do, dlse, q, k, v, o, lse, spec = of_one_call(64, causal=True, q_offset=-140)
    dq, dk, dv, *_ = hopper.backward(do, dlse, q, k, v, o, lse, spec, (True,) * 3 + (False,) * 3)
    assert (dq[:, :, :140] == 0).all()
    assert dq[:, :, 141:].any(-1).all()
    assert dv[:, :, :10].any(-1).all()
    for x in (dk, dv):
        assert (x[:, :, 10:] == 0).all()


def test_gradients_that_tma_cannot_read_are_copied():
    """A gradient expanded from one number, and rows of dO that begin anywhere."""
    do, *others = of_one_call(64, causal=True)
    wanted = (True,) * 3 + (False,) * 3
    ones = hopper.backward(torch.ones_like(do), *others, wanted)
    expanded = hopper.backward(do.new_ones(()).expand(do.shape), *others, wanted)
    plain = hopper.backward(do, *others, wanted)
    shifted = torch.cat((do, do), dim=-1)[..., 3:67].copy_(do)
    assert shifted.data_ptr() % 16
    for other, same in ((expanded, ones), (hopper.backward(shifted, *others, wanted), plain)):
        for x, y in zip(other[:3], same[:3], strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    "fields", [{}, {"causal": True}, {"keys": "holes", "queries": True}, {"segment_ids": True}], ids=str
)
def test_a_call_of_the_same_kind_repeats_its_launches_and_is_right(fields, deterministic):
    case = Case("", "", B=2, H=2, H_kv=1, n_q=150, D=64, **fields)
    for seed in (0, 1):
        inputs = make_inputs(case, torch.float16, "cpu", seed=seed)
        inputs.options["deterministic"] = deterministic
        with mock.patch.object(Launches, "launch", autospec=True, side_effect=Launches.launch) as by_triton:
            assert_right(inputs, run(inputs, "hopper"))
        assert by_triton.called == (seed == 0)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_scale_of_0_gives_queries_no_gradient(deterministic):
    """Not even where what it is multiplied by is beyond the floats."""
    q, do = torch.full((2, 1, 1, 20, 16), 100.0, dtype=torch.float16)
    k = v = 10 * torch.arange(-10.0, 10)[:, None].half().expand(1, 1, 20, 16)
    spec = Spec(Mask(), scale=0.0, deterministic=deterministic)
    o, lse = hopper.forward(q, k, v, spec)
    dq, *_ = hopper.backward(do, None, q, k, v, o, lse, spec, (True, True, True, False, False, False))
    assert dq.eq(0).all()
