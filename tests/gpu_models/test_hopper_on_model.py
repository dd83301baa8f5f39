"""The Hopper kernels on a model of Gluon: around the borders of their tiles, in any order, and their protocol in all.

Most of what they are held to stands in tests/backends/test_conformance.py, with the other backends.
"""

import itertools
from unittest import mock

import pytest
import torch
from gluon_model import ORDERS, TIMINGS, KernelError, modelled, running_with
from gluon_model.gluon import jit, mbarrier
from gluon_model.protocol import Recording, explore
from modelled_hopper import hopper_computes_for_the_cpu

from fastattn import Mask
from fastattn.backends import hopper
from fastattn.backends.hopper.configs import FORWARD_ALTERNATIVES, DkDvConfig, DqConfig, ForwardConfig
from fastattn.spec import Spec
from fastattn.testing import Case, assert_right, make_inputs, run

flash_forward, flash_backward = modelled("hopper.flash_forward"), modelled("hopper.flash_backward")
rings = modelled("hopper.rings")

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 193)
KEYS = (1, 64, 65, 127, 128, 129, 257, 400)
HEAD_DIMS = (8, 64, 72, 128, 136, 256)
VARIANTS = (
    {},
    {"causal": True},
    {"causal": True, "q_offset": "scattered"},
    {"window": (20, 7)},
    {"keys": "holes", "queries": True},
    {"segment_ids": True, "causal": True},
    {"H": 6, "H_kv": 2, "keys": "right", "causal": True},
    {"layout": "sliced", "keys": "left"},
    {"layout": "BNHD", "H": 3, "H_kv": 1, "keys": "none"},
    {"q_offset": (100, -9), "window": (None, 30), "scale": -0.3},
    {"segment_ids": True, "q_offset": "scattered", "window": (40, 0)},
)


def around_borders() -> list[tuple[Case, torch.dtype]]:
    """Every length of queries with every head dim; the rest by turns."""
    drawn = []
    for turn, (n_q, D) in enumerate(itertools.product(LENGTHS, HEAD_DIMS)):
        n_k, d_v = KEYS[(3 * turn + turn // 8) % len(KEYS)], HEAD_DIMS[(5 * turn + turn // 6) % len(HEAD_DIMS)]
        variant = turn % len(VARIANTS)
        case = Case(f"{n_q}x{n_k}-D{D}-{d_v}-{variant}", "", n_q=n_q, n_k=n_k, D=D, d_v=d_v, **VARIANTS[variant])
        drawn.append((case, SIXTEEN_BITS[turn // 2 % 2]))
    return drawn


@pytest.mark.parametrize(("case", "dtype"), around_borders(), ids=str)
def test_around_the_borders_of_tiles(gluon_model, case, dtype):
    inputs = make_inputs(case, dtype)
    assert_right(inputs, run(inputs, "hopper"))


SEVERAL_ITEMS = Case("several items", "", B=2, H=1, n_q=200, n_k=500, causal=True, q_offset=300, keys="right")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("timing", TIMINGS)
def test_same_bits_in_any_order(order, timing):
    """Whatever waits longest: rings go round several times, and on from one work item to the next."""
    inputs = make_inputs(SEVERAL_ITEMS, torch.bfloat16)
    with hopper_computes_for_the_cpu():
        first = run(inputs, "hopper")
    assert_right(inputs, first)
    for multiprocessors, seed in ((1, 1), (3, 2)):
        with hopper_computes_for_the_cpu(multiprocessors), running_with(order=order, timing=timing, seed=seed):
            outputs = run(inputs, "hopper")
        assert all(torch.equal(first[name], outputs[name]) for name in first)


def config(groups: int, slots: int, q_slots: int = 1, ping_pong: bool = False, block_n: int = 64) -> ForwardConfig:
    return ForwardConfig(groups, block_n, slots, q_slots, ping_pong, 240, 24, 168, True)


CONFIGS = [
    *(alternative for alternatives in FORWARD_ALTERNATIVES.values() for alternative in alternatives),
    *(config(groups, slots, q_slots) for groups in (2, 3) for slots in (1, 2, 3) for q_slots in (1, 2)),
    config(2, 1, ping_pong=True),
    config(2, 3, 2, ping_pong=True),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(map(str, c[:5])))
def test_every_configuration(config):
    inputs = make_inputs(SEVERAL_ITEMS, torch.float16)
    with (
        mock.patch.object(flash_forward, "forward_config", return_value=config),
        hopper_computes_for_the_cpu(),
        running_with(order="random"),
    ):
        assert_right(inputs, run(inputs, "hopper"))


def recorded(config: ForwardConfig, blocks: int, items: int, hidden: bool = False, **how: object) -> Recording:
    """What the partitions of a program of the forward do, which computes so many heads over so many key tiles each.

    hidden: keys of the last tile are padding, so that it comes by another way.
    """
    q = torch.zeros(1, items, config.block_m, 64, dtype=torch.float16)
    k = torch.zeros(1, items, blocks * config.BLOCK_N, 64, dtype=torch.float16)
    real_keys = torch.ones(1, k.shape[2], dtype=torch.bool)
    real_keys[0, -2:-1] = False
    spec = Spec(Mask(real_keys=real_keys if hidden else None), 1.0)
    recording = Recording()
    with (
        mock.patch.object(flash_forward, "forward_config", return_value=config),
        hopper_computes_for_the_cpu(multiprocessors=1),
        running_with(recording=recording, **how),
    ):
        hopper.forward(q, k, k, spec)
    return recording


def recorded_backward(
    config: DkDvConfig | DqConfig, blocks: int, items: int, hidden: bool = False, group: int = 1, **how: object
) -> Recording:
    """The same of the kernel that the configuration is for; `blocks` are its tiles of queries or keys.

    group: how many query heads share the keys that a work item of dK and dV is about.
    """
    of_dq = isinstance(config, DqConfig)
    n_q, n_k = (128, blocks * config.BLOCK_N) if of_dq else (blocks * config.BLOCK_M, 128)
    q, k = (torch.zeros(1, h, n, 64, dtype=torch.float16) for h, n in ((items * group, n_q), (items, n_k)))
    real = torch.ones(1, n_k if of_dq else n_q, dtype=torch.bool)
    real[0, -2:-1] = False
    spec = Spec(Mask(**{"real_keys" if of_dq else "real_queries": real if hidden else None}), 1.0)
    recording = Recording()
    with hopper_computes_for_the_cpu(multiprocessors=1), running_with(recording=recording, **how):
        inputs, visible = flash_backward.prepared(q, None, q, k, k, q, torch.zeros(q.shape[:3]), spec)
        if of_dq:
            with mock.patch.object(flash_backward, "dq_config", return_value=config):
                flash_backward.compute_dq(torch.empty_like(q), inputs, visible, 1.0)
        else:
            with mock.patch.object(flash_backward, "dk_dv_config", return_value=config):
                flash_backward.compute_dk_dv(torch.empty_like(k), torch.empty_like(k), inputs, visible, 1.0)
    return recording


PROTOCOLS = [  # (configuration, key tiles, work items)
    *((config(2, slots, q_slots), 3, 2) for slots in (1, 2, 3) for q_slots in (1, 2)),
    *((config(2, slots), blocks, 1) for slots in (1, 2, 3) for blocks in (1, 2, 5)),
    *((config(2, slots, 2, ping_pong=True), 3, 2) for slots in (1, 2, 3)),
    (config(2, 3), 1, 3),
    (config(3, 1), 3, 2),
    (config(3, 2), 3, 1),
    (config(3, 2, 2), 2, 2),
    (config(3, 3), 4, 1),
]


@pytest.mark.parametrize("hidden", [False, True], ids=["TMA", "cp.async"])
@pytest.mark.parametrize(
    ("config", "blocks", "items"), PROTOCOLS, ids=lambda x: str(x[:5] if isinstance(x, tuple) else x)
)
def test_protocol_of_the_forward_in_all_orders(config, blocks, items, hidden):
    recording = recorded(config, blocks, items, hidden)
    assert [len(steps) > 0 for steps in recording.steps] == [True] * (config.GROUPS + 1)
    assert explore(recording) > 10


PROTOCOLS_OF_BACKWARD = [  # (configuration, tiles, work items)
    *((DqConfig(64, *slots, 240, 24, 168, True), 3, 2) for slots in ((1, 1), (2, 1), (2, 2))),
    *((DkDvConfig(True, 64, *slots, 240, 24, 168, True), 3, 2) for slots in ((1, 1), (2, 1), (2, 2))),
    (DqConfig(64, 2, 2, 240, 24, 168, True), 5, 1),
    (DkDvConfig(True, 64, 2, 2, 240, 24, 168, True), 5, 1),
]


@pytest.mark.parametrize("hidden", [False, True], ids=["TMA", "cp.async"])
@pytest.mark.parametrize(
    ("config", "blocks", "items"), PROTOCOLS_OF_BACKWARD, ids=lambda x: str(x[:4] if isinstance(x, tuple) else x)
)
def test_protocol_of_the_backward_in_all_orders(config, blocks, items, hidden):
    assert explore(recorded_backward(config, blocks, items, hidden)) > 10


def test_protocol_of_the_backward_of_grouped_heads_in_all_orders():
    assert explore(recorded_backward(DkDvConfig(True, 64, 2, 2, 240, 24, 168, True), 2, 1, group=3)) > 10


def test_nothing_to_see_takes_no_part_in_the_protocol():
    """Items without key tiles, before and between those with some, on one program."""
    q, k = (torch.zeros(1, 4, n, 64, dtype=torch.float16) for n in (128, 192))
    real_keys = torch.zeros(1, 192, dtype=torch.bool)
    recording = Recording()
    with hopper_computes_for_the_cpu(multiprocessors=1), running_with(recording=recording):
        o, lse = hopper.forward(q, k, k, Spec(Mask(real_keys=real_keys), 1.0))
    assert (o == 0).all()
    assert (lse == -torch.inf).all()
    assert explore(recording) == 1


@jit
def slot_with_the_other_phase(n, ring):
    SLOTS = ring.tiles.shape[0]
    return n % SLOTS, (n // SLOTS + 1) & 1


@jit
def slot_whose_phase_never_flips(n, ring):
    return n % ring.tiles.shape[0], 0


@jit
def slot_that_flips_too_late(n, ring):
    SLOTS = ring.tiles.shape[0]
    return n % SLOTS, (n // (2 * SLOTS)) & 1


@jit
def no_release(n, ring, pred=True):
    pass


@jit
def release_of_the_next(n, ring, pred=True):
    mbarrier.arrive(ring.empty.index((n + 1) % ring.tiles.shape[0]), count=1, pred=pred)


@jit
def no_wait(n, ring):
    pass


BROKEN = {
    "other phase": (rings, "slot_of", slot_with_the_other_phase),
    "one phase": (rings, "slot_of", slot_whose_phase_never_flips),
    "half as many phases": (rings, "slot_of", slot_that_flips_too_late),
    "no release": (flash_forward, "release", no_release),
    "release of another slot": (flash_forward, "release", release_of_the_next),
    "no wait for a full slot": (flash_forward, "wait_full", no_wait),
    "no wait for an empty slot": (rings, "wait_empty", no_wait),
}


@pytest.mark.parametrize("change", BROKEN)
def test_a_broken_protocol_is_found(change):
    """In every order in which it runs, and, where it happens to run, by exploring the others."""
    for order in ORDERS:
        with mock.patch.object(*BROKEN[change]), pytest.raises(KernelError):
            recorded(config(2, 2), 5, 2, order=order)
    for timing in TIMINGS:
        with mock.patch.object(*BROKEN[change]), pytest.raises(KernelError):
            explore(recorded(config(2, 2), 5, 2, order="consumers first", timing=timing, unordered=True))
