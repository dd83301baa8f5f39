"""The compiled forward of Hopper: borders of tiles, every configuration, the order of its items, edges.

On the machine for PTX, which finds what would go wrong in any order; `make ptx` runs it.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fastattn import Mask
from fastattn.backends import hopper, reference
from fastattn.backends.hopper import flash_forward, order
from fastattn.backends.hopper.configs import FORWARD_ALTERNATIVES, ForwardConfig, forward_config
from fastattn.backends.hopper.gluon import gl, jit
from fastattn.spec import Spec
from fastattn.testing import Case, Inputs, assert_right, make_inputs, run

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 193)
KEYS = (1, 64, 65, 127, 128, 129, 257, 400)
VARIANTS = {  # each with one dtype and one pair of head dims, whose kernels all its lengths share
    "full": {"D": 64},
    "causal": {"D": 128, "causal": True},
    "scattered": {"D": 72, "d_v": 128, "causal": True, "q_offset": "scattered"},
    "window": {"D": 256, "d_v": 8, "window": (20, 7)},
    "holes": {"D": 8, "d_v": 64, "keys": "holes", "queries": True},
    "documents": {"D": 128, "d_v": 72, "segment_ids": True, "causal": True},
    "grouped": {"D": 64, "d_v": 128, "H": 6, "H_kv": 2, "keys": "right", "causal": True},
    "sliced": {"D": 136, "layout": "sliced", "keys": "left"},
    "no key": {"D": 72, "d_v": 8, "layout": "BNHD", "H": 3, "H_kv": 1, "keys": "none"},
    "negative scale": {"D": 64, "d_v": 256, "q_offset": (100, -9), "window": (None, 30), "scale": -0.3},
    "everything": {"D": 128, "segment_ids": True, "q_offset": "scattered", "window": (40, 0)},
}


def around_borders(largest_head_dim: int = 256) -> list[tuple[Case, torch.dtype]]:
    """Every variant with four lengths of queries and of keys, by turns."""
    drawn = []
    for i, (name, terms) in enumerate(VARIANTS.items()):
        if max(terms["D"], terms.get("d_v", 0)) <= largest_head_dim:
            for j in range(4):
                n_q, n_k = LENGTHS[(i + 2 * j) % 8], KEYS[(3 * i + 2 * j + i // 8) % 8]
                drawn.append((Case(f"{name}-{n_q}x{n_k}", "", n_q=n_q, n_k=n_k, **terms), SIXTEEN_BITS[i % 2]))
    return drawn


@pytest.mark.parametrize(("case", "dtype"), around_borders(), ids=str)
def test_around_the_borders_of_tiles(hopper_gpu, case, dtype):
    inputs = make_inputs(case, dtype)
    assert_right(inputs, run(inputs, "hopper"))


SEVERAL_ITEMS = Case("several items", "", B=2, H=1, n_q=200, n_k=500, causal=True, q_offset=300, keys="right")


def test_same_bits_in_any_order(hopper_gpu):
    """Whatever waits longest: rings go round several times, and on from one work item to the next."""
    inputs = make_inputs(SEVERAL_ITEMS, torch.bfloat16)
    first = run(inputs, "hopper")
    assert_right(inputs, first)
    for multiprocessors in (1, 3):
        hopper_gpu.multiprocessors = multiprocessors
        for hopper_gpu.seed in (10, 20, 30, 40):
            outputs = run(inputs, "hopper")
            assert all(torch.equal(first[name], outputs[name]) for name in first)


def forward(inputs: Inputs) -> dict[str, torch.Tensor]:
    """What the forward alone gives."""
    o, lse = hopper.forward(inputs.q, inputs.k, inputs.v, inputs.spec())
    return {"o": o, "lse": lse}


def config(groups: int, slots: int, q_slots: int = 1, ping_pong: bool = False) -> ForwardConfig:
    registers, at_start = (240, 168) if groups == 2 else (160, 128)
    return ForwardConfig(groups, 64, slots, q_slots, ping_pong, registers, 24, at_start, True)


CONFIGS = [
    *FORWARD_ALTERNATIVES[64],
    *FORWARD_ALTERNATIVES[128],
    *(config(groups, slots, q_slots) for groups in (2, 3) for slots in (1, 2, 3) for q_slots in (1, 2)),
    *(config(2, slots, 2, ping_pong=True) for slots in (1, 2, 3)),
]
LOOPS = [  # tiles of keys, and work items, of one program: rings that are not filled, and that go round several times
    Case("3 tiles, 2 items", "", B=1, H=2, n_q=64, n_k=180, D=64),
    Case("1 tile, 3 items", "", B=1, H=3, n_q=64, n_k=50, D=64),
    Case("7 tiles, 1 item", "", B=1, H=1, n_q=100, n_k=430, D=64),
]


@pytest.mark.parametrize("keys", [None, "right"], ids=["TMA", "cp.async"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(map(str, c[:5])))
def test_every_configuration(hopper_gpu, config, keys):
    hopper_gpu.multiprocessors = 1
    with mock.patch.object(flash_forward, "forward_config", return_value=config):
        for case in LOOPS:
            inputs = make_inputs(Case(**vars(case) | {"keys": keys}), torch.float16)
            assert_right(inputs, forward(inputs))


def test_nothing_to_see_takes_no_part_in_the_protocol(hopper_gpu):
    """Items without key tiles, before and between those with some, on one program."""
    hopper_gpu.multiprocessors = 1
    q, k = (torch.zeros(3, 2, n, 64, dtype=torch.float16) for n in (128, 192))
    real_keys = torch.zeros(3, 192, dtype=torch.bool)
    real_keys[1, :70] = True
    o, lse = hopper.forward(q, k, k, Spec(Mask(real_keys=real_keys), 1.0))
    assert (o == 0).all()
    assert (lse[[0, 2]] == -torch.inf).all()
    assert (lse[1] > 4).all()


@jit
def order_kernel(result, i_first, n_items, n_tiles, n_heads, l2_group, H):
    for i in range(i_first, n_items):
        i_m, i_h, i_b = order.item_at(i, order.Order(n_items, 1, n_tiles, n_heads, l2_group, H))
        gl.store(result + 3 * i, i_m)
        gl.store(result + 3 * i + 1, i_h.to(gl.int32))
        gl.store(result + 3 * i + 2, i_b.to(gl.int32))


@pytest.mark.parametrize(("B", "H", "n_tiles", "l2_group"), [(1, 1, 1, 1), (2, 3, 5, 1), (2, 3, 4, 4), (3, 4, 2, 12)])
def test_every_item_has_its_turn_and_the_heaviest_of_an_l2_group_come_first(hopper_gpu, B, H, n_tiles, l2_group):
    n_items = B * H * n_tiles
    result = torch.full((n_items, 3), -1, dtype=torch.int32)
    order_kernel[(1,)](result, 0, n_items, n_tiles, B * H, l2_group, H, num_warps=4)
    items = [(i_b * H + i_h, i_m) for i_m, i_h, i_b in result.tolist()]
    expected = []
    for first in range(0, B * H, l2_group):
        heads = range(first, min(first + l2_group, B * H))
        expected += [(head, tile) for tile in reversed(range(n_tiles)) for head in heads]
    assert items == expected


@pytest.mark.parametrize("scale", [-0.5, 0.0, 1e-45])
def test_scales_that_are_not_positive(hopper_gpu, scale):
    """The largest product has the smallest score, or all are alike; 1e-45 is 0 where small numbers are flushed."""
    case = Case(f"scale {scale}", "", n_q=70, n_k=200, D=64, causal=True, keys="holes", scale=scale)
    inputs = make_inputs(case, torch.float16)
    assert_right(inputs, forward(inputs))


@pytest.mark.parametrize(("n_q", "n_k"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_compute(hopper_gpu, n_q, n_k):
    q, k = (torch.randn(2, 2, n, 64).half() for n in (n_q, n_k))
    o, lse = hopper.forward(q, k, k, Spec(Mask(), 1.0))
    assert torch.equal(o, torch.zeros(2, 2, n_q, 64).half())
    assert torch.equal(lse, torch.full((2, 2, n_q), -torch.inf))


@pytest.mark.parametrize("hidden", [0, 63, 127, 128, 255])
def test_one_hidden_key_at_the_edge_of_a_tile(hopper_gpu, hidden):
    """Its values are NaN: they have to be left out where all other keys of the tile are read."""
    q, k, v = (torch.randn(1, 2, 256, 64).half() for _ in range(3))
    real_keys = torch.arange(256)[None] != hidden
    k[:, :, hidden], v[:, :, hidden] = torch.nan, torch.nan
    o, lse = hopper.forward(q, k, v, Spec(Mask(real_keys=real_keys), 0.1))
    expected = reference.forward(q.double(), k.double(), v.double(), Spec(Mask(real_keys=real_keys), 0.1))
    torch.testing.assert_close(o.double(), expected[0], atol=2e-3, rtol=0)
    torch.testing.assert_close(lse.double(), expected[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("window", [(300, 0), (0, 300), (200, 200)])
def test_tiles_on_both_sides_of_full_ones_are_masked(hopper_gpu, window):
    case = Case(f"window {window}", "", n_q=300, n_k=900, D=64, q_offset=300, window=window)
    inputs = make_inputs(case, torch.float16)
    assert_right(inputs, forward(inputs))


def test_documents_in_tiles_of_three_warp_groups(hopper_gpu):
    """192 queries a tile, which is no power of two."""
    inputs = make_inputs(Case("documents", "", n_q=400, D=64, segment_ids=True, causal=True), torch.float16)
    config = forward_config(64)
    assert config.block_m == 192
    with mock.patch.object(flash_forward, "forward_config", return_value=config):
        assert_right(inputs, forward(inputs))
