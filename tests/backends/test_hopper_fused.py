"""The compiled backward of Hopper for `deterministic=False`: in any order of steps, and every configuration.

On the machine for PTX; `make ptx` runs it. The cases that every backend is held to stand in test_conformance.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from test_hopper_backward import CASES as CASES_OF_BACKWARD
from test_hopper_backward import LOOPS
from test_hopper_forward import SEVERAL_ITEMS, SIXTEEN_BITS, around_borders

from fastattn import Mask
from fastattn.backends import hopper, reference
from fastattn.backends.hopper import fused_backward
from fastattn.backends.hopper.configs import FusedConfig
from fastattn.backends.triton.launches import Launches, forget
from fastattn.spec import Spec
from fastattn.testing import Case, Inputs, assert_right, make_inputs, run

pytestmark = pytest.mark.usefixtures("hopper_gpu")

ALL = (True,) * 3 + (False,) * 3


WIDEST_CAUSAL = fused_backward.WIDEST_CAUSAL


@pytest.fixture(autouse=True)
def _also_of_wide_causal_calls(monkeypatch) -> None:
    monkeypatch.setattr(fused_backward, "WIDEST_CAUSAL", 128)


@contextmanager
def launches() -> Iterator[list[str]]:
    """The names of the kernels of a backward that are launched in this block by Triton, but for that of the rows."""
    names, launch = [], Launches.launch

    def launch_it(self, kernel, *args, **options):
        if kernel.__name__ in {*FUSED, *APART}:
            names.append(kernel.__name__)
        launch(self, kernel, *args, **options)

    with mock.patch.object(Launches, "launch", launch_it):
        yield names


def in_any_order(case: Case, dtype: torch.dtype) -> Inputs:
    inputs = make_inputs(case, dtype)
    inputs.options["deterministic"] = False
    return inputs


def computed(inputs: Inputs) -> dict[str, torch.Tensor]:
    """What the fused kernel gives."""
    forget()
    with launches() as names:
        outputs = run(inputs, "hopper")
    assert names == ["fused_kernel", "scaled_kernel"]
    return outputs


FITTING = [case for case in CASES_OF_BACKWARD if max(case.D, case.d_v or 0) <= 128]


@pytest.mark.parametrize(("case", "dtype"), [*zip(FITTING, itertools.cycle(SIXTEEN_BITS[::-1]))], ids=str)
def test_gradients_are_right(case, dtype):
    inputs = in_any_order(case, dtype)
    assert_right(inputs, computed(inputs))


@pytest.mark.parametrize(("case", "dtype"), around_borders(128), ids=str)
def test_around_the_borders_of_tiles(case, dtype):
    inputs = in_any_order(case, dtype)
    assert_right(inputs, computed(inputs))


@pytest.mark.parametrize("D", [64, 128])
def test_right_in_any_order(hopper_gpu, D):
    """Whatever waits longest, item after item on one program: all bits but those of dQ are the same."""
    inputs = in_any_order(Case(**vars(SEVERAL_ITEMS) | {"D": D}), torch.bfloat16)
    first = computed(inputs)
    hopper_gpu.multiprocessors = 1
    for hopper_gpu.seed in (10, 20, 30, 40):
        outputs = computed(inputs)
        assert_right(inputs, outputs)
        assert all(torch.equal(first[name], outputs[name]) for name in first if name != "dq")


def test_dq_is_summed_in_fp32_as_items_come(hopper_gpu):
    """Programs that run in another order give other sums, which are as close to each other as fp32 is."""
    inputs, sums = in_any_order(Case("many items", "", B=1, H=1, n_q=70, n_k=1300, D=64), torch.float16), []
    before = Launches.launch

    def launch(self, kernel, programs, *args, **options):
        before(self, kernel, programs, *args, **options)
        if kernel.__name__ == "scaled_kernel":
            sums.append(args[0].data.clone())

    with mock.patch.object(Launches, "launch", launch):
        for hopper_gpu.seed in (10, 20, 30):
            forget()
            outputs = run(inputs, "hopper")
            assert_right(inputs, outputs)
            assert torch.equal(outputs["dq"], (sums[-1] * 64**-0.5).half())
    first, *others = sums
    assert first.dtype == torch.float32
    assert not all(torch.equal(first, other) for other in others)
    for other in others:
        torch.testing.assert_close(first, other, rtol=0, atol=1e-5 * float(first.abs().max()))


def call_of(D: int, n_k: int = 150, **mask: object) -> tuple:
    """Arguments of a backward but for `output_mask`, with 2 heads of 150 queries."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 2, n, D, generator=generator).half() for n in (150, n_k, n_k, 150))
    spec = Spec(Mask(**mask), scale=D**-0.5, deterministic=False)
    o, lse = reference.forward(q, k, v, spec)
    return do, torch.randn(lse.shape, generator=generator), q, k, v, o, lse, spec


FUSED, APART = ["fused_kernel", "scaled_kernel"], ["dk_dv_kernel", "dq_kernel"]


@pytest.mark.parametrize(
    ("D", "wanted", "expected"),
    [
        (64, (True, True, True), FUSED),
        (128, (True, True, True), FUSED),
        (128, (True, True, False), FUSED),
        (128, (True, False, True), FUSED),
        (128, (True, False, False), ["dq_kernel"]),
        (128, (False, True, True), ["dk_dv_kernel"]),
        (136, (True, True, True), ["dk_dv_kernel", "dk_dv_kernel", "dq_kernel"]),
    ],
)
def test_which_kernels_serve(D, wanted, expected):
    """And what is not asked for is None."""
    do, dlse, q, k, v, o, lse, spec = call_of(D)
    every = reference.backward(do, dlse, q, k, v, o, lse, spec, ALL)
    with launches() as names:
        gradients = hopper.backward(do, dlse, q, k, v, o, lse, spec, wanted + (False,) * 3)
    assert names == expected
    assert [x is not None for x in gradients] == [*wanted, False, False, False]
    for x, right in zip(gradients, every, strict=True):
        if x is not None:
            torch.testing.assert_close(x.float(), right.float(), rtol=0, atol=4e-3 * float(right.abs().max()))


@pytest.mark.parametrize(("D", "expected"), [(64, FUSED), (128, APART)])
def test_wide_causal_calls_take_the_faster_kernels(D, expected, monkeypatch):
    monkeypatch.setattr(fused_backward, "WIDEST_CAUSAL", WIDEST_CAUSAL)
    with launches() as names:
        hopper.backward(*call_of(D, causal=True), ALL)
    assert names == expected


def test_whoever_needs_the_same_bits_gets_the_kernels_that_give_them():
    *call, spec = call_of(64)
    with launches() as names:
        hopper.backward(*call, Spec(spec.mask, spec.scale), ALL)
    assert names == APART


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("keys", ["tail", "padded", "both"])
def test_keys_whose_weight_would_be_infinite_add_nothing(D, keys):
    """With scores around -300 a key of zeros, as those past the last one and the hidden ones are, would weigh e^300."""
    n_k = 150 if keys == "tail" else 128 if keys == "padded" else 230
    real = torch.ones(1, n_k, dtype=torch.bool)
    real[:, -30:] = keys == "tail"
    do, dlse, q, k, v, _, _, spec = call_of(D, n_k, real_keys=None if keys == "tail" else real)
    q, k = q * 0.1 + 300 / D**0.5, k * 0.1 - 1
    k[~real[:, None].expand(k.shape[:3])] = v[~real[:, None].expand(k.shape[:3])] = torch.nan
    o, lse = reference.forward(q, k, v, spec)
    assert (lse < -200).all()
    gradients = hopper.backward(do, dlse, q, k, v, o, lse, spec, ALL)
    right = reference.backward(do, dlse, q, k, v, o, lse, spec, ALL)
    for x, y in zip(gradients[:3], right[:3], strict=True):
        torch.testing.assert_close(x.float(), y.float(), rtol=0, atol=1e-2 * float(y.abs().max()))


def test_hidden_queries_have_gradients_of_zero_beside_a_key_of_nan():
    real = torch.arange(150)[None] < 100
    do, dlse, q, k, *rest = call_of(64, real_queries=real)
    k[0, 0, 3] = torch.nan
    dq = hopper.backward(do, dlse, q, k, *rest, ALL)[0]
    assert dq[0, 0, :100].isnan().all()
    assert (dq[:, :, 100:] == 0).all()


def test_what_sees_nothing_has_gradients_of_zero():
    """Also where an item has no tile at all, and the memory of its gradient held something else."""
    dq, dk, dv, *_ = hopper.backward(*call_of(64, causal=True, q_offset=-140), ALL)
    assert (dq[:, :, :140] == 0).all()
    assert dq[:, :, 141:].any(-1).all()
    assert dv[:, :, :10].any(-1).all()
    for x in (dk, dv):
        assert (x[:, :, 10:] == 0).all()


CONFIGURATIONS = [  # head dim, slots of Q and of dO, and which tokens padding hides: those tiles come by another way
    *((D, slots, None) for D in (64, 128) for slots in ((1, 1), (2, 1), (2, 2))),
    *((128, slots, hidden) for slots in ((1, 1), (2, 2)) for hidden in ("queries", "keys")),
    (64, (2, 2), "keys"),
]


@pytest.mark.parametrize(("D", "slots", "hidden"), CONFIGURATIONS, ids=str)
def test_every_configuration(hopper_gpu, D, slots, hidden):
    hopper_gpu.multiprocessors = 1
    config = FusedConfig(64 if D == 128 else 128, *slots, 240, 24, 168, True)
    terms = {None: {}, "queries": {"queries": True}, "keys": {"keys": "right"}}[hidden]
    with mock.patch.object(fused_backward, "fused_config", return_value=config):
        for case in LOOPS:
            inputs = in_any_order(Case(**vars(case) | {"D": D} | terms), torch.float16)
            assert_right(inputs, computed(inputs))
