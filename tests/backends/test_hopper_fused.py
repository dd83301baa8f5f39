"""The Hopper backward for `deterministic=False`, on the model of Gluon: in any order of steps, and its protocol in all.

The cases that every backend is held to stand in tests/backends/test_conformance.py.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from gluon_model import ORDERS, TIMINGS, KernelError, modelled, running_with
from gluon_model.protocol import Recording, explore
from modelled_hopper import hopper_computes_for_the_cpu
from test_hopper_backward import CASES as CASES_OF_BACKWARD
from test_hopper_on_model import HEAD_DIMS, KEYS, LENGTHS, SEVERAL_ITEMS, SIXTEEN_BITS, VARIANTS

from fastattn import Mask
from fastattn.backends import hopper, reference
from fastattn.backends.hopper.configs import FusedConfig
from fastattn.spec import Spec
from fastattn.testing import Case, Inputs, assert_right, make_inputs, run

flash_backward, fused_backward = modelled("hopper.flash_backward"), modelled("hopper.fused_backward")

ALL = (True,) * 3 + (False,) * 3
UP_TO_128 = [D for D in HEAD_DIMS if D <= 128]


@contextmanager
def launches() -> Iterator[list[str]]:
    """The names of the kernels that a backward launches in this block, but for those that prepare rows and masks."""
    names = []

    def noted(launch):
        def launch_it(kernel, *args, **options):
            names.append(kernel.__name__)
            launch(kernel, *args, **options)

        return launch_it

    with (
        mock.patch.object(flash_backward, "launch", noted(flash_backward.launch)),
        mock.patch.object(fused_backward, "launch", noted(fused_backward.launch)),
    ):
        yield names


def in_any_order(case: Case, dtype: torch.dtype) -> Inputs:
    inputs = make_inputs(case, dtype)
    inputs.options["deterministic"] = False
    return inputs


def computed(inputs: Inputs) -> dict[str, torch.Tensor]:
    """What the fused kernel gives."""
    with launches() as names:
        outputs = run(inputs, "hopper")
    assert names == ["fused_kernel", "scaled_kernel"]
    return outputs


FITTING = [case for case in CASES_OF_BACKWARD if max(case.D, case.d_v or 0) <= 128]


@pytest.mark.parametrize(("case", "dtype"), zip(FITTING, itertools.cycle(SIXTEEN_BITS[::-1]), strict=False), ids=str)
def test_gradients_are_right(gluon_model, case, dtype):
    inputs = in_any_order(case, dtype)
    assert_right(inputs, computed(inputs))


def around_borders() -> list[tuple[Case, torch.dtype]]:
    """Every length of keys with every head dim; the rest by turns."""
    drawn = []
    for turn, (n_k, D) in enumerate(itertools.product(KEYS, UP_TO_128)):
        n_q, d_v = LENGTHS[(3 * turn + turn // 8) % len(LENGTHS)], UP_TO_128[(3 * turn + turn // 4) % len(UP_TO_128)]
        variant = turn % len(VARIANTS)
        case = Case(f"{n_q}x{n_k}-D{D}-{d_v}-{variant}", "", n_q=n_q, n_k=n_k, D=D, d_v=d_v, **VARIANTS[variant])
        drawn.append((case, SIXTEEN_BITS[turn // 2 % 2]))
    return drawn


@pytest.mark.parametrize(("case", "dtype"), around_borders(), ids=str)
def test_around_the_borders_of_tiles(gluon_model, case, dtype):
    inputs = in_any_order(case, dtype)
    assert_right(inputs, computed(inputs))


def sums_of_dq(inputs: Inputs, **how: object) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The outputs, and the sums that dQ is made of."""
    kept = []

    def launch(kernel, programs, *args, **options):
        before(kernel, programs, *args, **options)
        if kernel.__name__ == "scaled_kernel":
            kept.append(args[0].data.clone())

    before = fused_backward.launch
    with mock.patch.object(fused_backward, "launch", launch), running_with(**how):
        outputs = run(inputs, "hopper")
    (sums,) = kept
    return outputs, sums


@functools.cache
def several_items(D: int) -> tuple[Inputs, dict[str, torch.Tensor]]:
    """With what comes of them on one program after the other."""
    inputs = in_any_order(Case(**vars(SEVERAL_ITEMS) | {"D": D}), torch.bfloat16)
    with hopper_computes_for_the_cpu():
        return inputs, computed(inputs)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("timing", TIMINGS)
def test_right_in_any_order(D, order, timing):
    """Whatever waits longest, item after item on one program: all bits but those of dQ are the same."""
    inputs, first = several_items(D)
    with hopper_computes_for_the_cpu(multiprocessors=1), running_with(order=order, timing=timing, seed=1):
        outputs = computed(inputs)
    assert_right(inputs, outputs)
    assert all(torch.equal(first[name], outputs[name]) for name in first if name != "dq")


def test_dq_is_summed_in_fp32_as_items_come(gluon_model):
    """Programs that run in another order give other sums, which are as close to each other as fp32 is."""
    inputs = in_any_order(Case("many items", "", B=1, H=1, n_q=70, n_k=1300, D=64), torch.float16)
    (outputs, first), (_, other) = (sums_of_dq(inputs, programs=order) for order in (tuple, lambda n: tuple(n)[::-1]))
    assert_right(inputs, outputs)
    assert first.dtype == other.dtype == torch.float32
    assert not torch.equal(first, other)
    torch.testing.assert_close(first, other, rtol=0, atol=1e-5 * float(first.abs().max()))
    assert torch.equal(outputs["dq"], (first * 64**-0.5).half())


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
def test_which_kernels_serve(gluon_model, D, wanted, expected):
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


def test_whoever_needs_the_same_bits_gets_the_kernels_that_give_them(gluon_model):
    *call, spec = call_of(64)
    with launches() as names:
        hopper.backward(*call, Spec(spec.mask, spec.scale), ALL)
    assert names == APART


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("keys", ["tail", "padded", "both"])
def test_keys_whose_weight_would_be_infinite_add_nothing(gluon_model, D, keys):
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


def test_hidden_queries_have_gradients_of_zero_beside_a_key_of_nan(gluon_model):
    real = torch.arange(150)[None] < 100
    do, dlse, q, k, *rest = call_of(64, real_queries=real)
    k[0, 0, 3] = torch.nan
    dq = hopper.backward(do, dlse, q, k, *rest, ALL)[0]
    assert dq[0, 0, :100].isnan().all()
    assert (dq[:, :, 100:] == 0).all()


def test_what_sees_nothing_has_gradients_of_zero(gluon_model):
    """Also where an item has no tile at all, and the memory of its gradient held something else."""
    dq, dk, dv, *_ = hopper.backward(*call_of(64, causal=True, q_offset=-140), ALL)
    assert (dq[:, :, :140] == 0).all()
    assert dq[:, :, 141:].any(-1).all()
    assert dv[:, :, :10].any(-1).all()
    for x in (dk, dv):
        assert (x[:, :, 10:] == 0).all()


def recorded(
    D: int, slots: tuple[int, int], blocks: int, items: int = 1, hidden: str = "", group: int = 1, **how: object
) -> Recording:
    """What the partitions of a program do, which computes so many items over so many query tiles each.

    slots: of Q and of dO. hidden: of "queries" or "keys" some are padding, so that their tiles come by another way.
    group: how many query heads share the keys.
    """
    config = FusedConfig(64 if D == 128 else 128, *slots, 240, 24, 168, True)
    n_q = blocks * config.BLOCK_M
    q, k = (torch.zeros(1, h, n, D, dtype=torch.float16) for h, n in ((items * group, n_q), (items, 128)))
    real = torch.ones(1, {"": 1, "queries": n_q, "keys": 128}[hidden], dtype=torch.bool)
    real[0, -2:-1] = False
    spec = Spec(Mask(**({f"real_{hidden}": real} if hidden else {})), 1.0, deterministic=False)
    recording = Recording()
    with (
        mock.patch.object(fused_backward, "fused_config", return_value=config),
        hopper_computes_for_the_cpu(multiprocessors=1),
        running_with(recording=recording, **how),
    ):
        hopper.backward(q, None, q, k, k, q, torch.zeros(q.shape[:3]), spec, ALL)
    return recording


PROTOCOLS = [  # head dim, slots, query tiles, work items, what is hidden, group
    *((D, slots, 3, 2, "", 1) for D in (64, 128) for slots in ((1, 1), (2, 1), (2, 2))),
    *((128, slots, 3, 2, hidden, 1) for slots in ((1, 1), (2, 2)) for hidden in ("queries", "keys")),
    (128, (2, 2), 5, 1, "", 1),
    (64, (2, 2), 1, 3, "keys", 1),
    (128, (2, 2), 2, 1, "", 3),
]


@pytest.mark.parametrize(("D", "slots", "blocks", "items", "hidden", "group"), PROTOCOLS)
def test_protocol_in_all_orders(D, slots, blocks, items, hidden, group):
    recording = recorded(D, slots, blocks, items, hidden, group)
    assert [len(steps) > 0 for steps in recording.steps] == [True] * 3
    assert explore(recording) > 10


SWAPPED = "the two lines in the other order"
BROKEN = {  # function, some of its lines, what stands there instead; and whether it is about the order of steps alone
    "groups that do not wait in a step": ("fused_step", "wait_for_each_other()", "pass", True),
    "groups that do not wait after an item": ("consume_all", "wait_for_each_other()", "pass", True),
    "room for dS of one step": ("fused_kernel", "[4, 1, 1, ROWS, BLOCK_M]", "[2, 1, 1, ROWS, BLOCK_M]", True),
    "no fence after dS": ("fused_step", "fence_async_shared()", "pass", False),
    "no fence after dQ": ("add_to_dq", "fence_async_shared()", "pass", False),
    "dQ written while it is added": ("fused_step", "store_wait(0)", "pass", True),
    "one place for both parts of dQ": ("add_to_dq", "tile_in(I_GROUP, ring)", "tile_in(0, ring)", True),
    "no wait for what is added": ("consume_all", "store_wait(0)", "store_wait(2)", True),
    "dO released too early": ("fused_step", "b_dv, b_dq = warp.*release.n, do_ring.", SWAPPED, True),
    "Q released too early": ("fused_step", "b_dk = warpgroup_mma_wait.*release.n, q_ring.", SWAPPED, True),
    "dQ used before it is there": ("fused_step", "wait.1, deps=.b_dv", "wait(2, deps=(b_dv", False),
    "K released before dK has left": ("consume_all", "store_wait.0.*release.I_GROUP, k_ring.", SWAPPED, True),
    "K never released": ("consume_all", "release.I_GROUP, k_ring.", "pass", True),
    "the slot of the other group's K": ("consume_all", "i, I_GROUP, k_ring", "i, 1 - I_GROUP, k_ring", True),
}


def swapped(lines: str) -> str:
    first, second = lines.split("\n")
    return f"{second.strip()}\n{second[: -len(second.lstrip())]}{first.strip()}"


@pytest.mark.parametrize("change", BROKEN)
def test_a_broken_protocol_is_found(change, monkeypatch):
    """In every order in which it runs, and, where it happens to run, by exploring the others."""
    name, old, new, of_order = BROKEN[change]
    source = inspect.getsource(getattr(fused_backward, name).fn)
    before, part, after = re.split(f"({old})" if "." in old else f"({re.escape(old)})", source, flags=re.DOTALL)
    made: dict[str, object] = {}
    exec(f"{before}{swapped(part) if new is SWAPPED else new}{after}", vars(fused_backward), made)
    monkeypatch.setattr(fused_backward, name, made[name])
    # With as many slots of dO as of Q, there is room for dO only after Q was released, which comes later.
    slots = (2, 1) if change.startswith("dO") else (2, 2)
    for order in ORDERS:
        with pytest.raises(KernelError):
            recorded(128, slots, 3, 2, order=order)
    for timing in TIMINGS if of_order else ():
        with pytest.raises(KernelError):
            explore(recorded(128, slots, 3, 2, timing=timing, unordered=True))
