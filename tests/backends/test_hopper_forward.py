"""The Hopper forward: the order of its items, what TMA may read, scales, empty calls."""

from unittest import mock

import pytest
import torch
from gluon_model import modelled
from gluon_model.gluon import gl, jit
from modelled_hopper import hopper_computes_for_the_cpu

from fastattn import Mask
from fastattn.backends import hopper, reference
from fastattn.backends.hopper.configs import FORWARD_ALTERNATIVES
from fastattn.backends.triton.preparation import visibility
from fastattn.spec import Spec
from fastattn.testing import Case, assert_right, make_inputs

flash_forward, order, rings = (modelled(f"hopper.{name}") for name in ("flash_forward", "order", "rings"))


@jit
def order_kernel(result, i_first, n_items, n_tiles, n_heads, l2_group, H):
    for i in range(i_first, n_items):
        i_m, i_h, i_b = order.item_at(i, order.Order(n_items, 1, n_tiles, n_heads, l2_group, H))
        gl.store(result + 3 * i, i_m)
        gl.store(result + 3 * i + 1, i_h.to(gl.int32))
        gl.store(result + 3 * i + 2, i_b.to(gl.int32))


@pytest.mark.parametrize(("B", "H", "n_tiles", "l2_group"), [(1, 1, 1, 1), (2, 3, 5, 1), (2, 3, 4, 4), (3, 4, 2, 12)])
def test_every_item_has_its_turn_and_the_heaviest_of_an_l2_group_come_first(B, H, n_tiles, l2_group):
    n_items = B * H * n_tiles
    result = torch.full((n_items, 3), -1, dtype=torch.int32)
    order_kernel[(1,)](result, 0, n_items, n_tiles, B * H, l2_group, H, num_warps=4)
    items = [(i_b * H + i_h, i_m) for i_m, i_h, i_b in result.tolist()]
    expected = []
    for first in range(0, B * H, l2_group):
        heads = range(first, min(first + l2_group, B * H))
        expected += [(head, tile) for tile in reversed(range(n_tiles)) for head in heads]
    assert items == expected


def test_l2_groups_fit_into_the_cache():
    causal, window, full = (
        visibility(mask, 64, 64) for mask in (Mask(causal=True), Mask(causal=True, window=(9, 0)), Mask())
    )
    mib = 2**20
    assert [order.l2_group_of(64, 1, size * mib, causal) for size in (64, 32, 9, 8, 1)] == [1, 1, 2, 4, 32]
    assert order.l2_group_of(64, 4, 16 * mib, causal) == 8
    assert order.l2_group_of(6, 1, 1, causal) == 6
    assert order.l2_group_of(64, 1, 1, window) == order.l2_group_of(64, 1, 1, full) == 1


def readable_by_tma() -> dict[str, torch.Tensor]:
    x = torch.randn(2, 3, 40, 64).half()
    return {
        "as it is": x,
        "heads in tokens": x.transpose(1, 2).contiguous().transpose(1, 2),
        "part of a wider tensor": torch.randn(2, 3, 40, 136).half()[..., 8:72],
        "one head of odd stride": torch.randn(1, 40 * 64 + 3).half()[:, : 40 * 64].view(1, 1, 40, 64),
    }


def not_readable_by_tma() -> dict[str, torch.Tensor]:
    return {
        "columns apart": torch.randn(2, 3, 64, 40).half().mT,
        "heads shared": torch.randn(2, 1, 40, 64).half().expand(2, 3, 40, 64),
        "base not on 16 bytes": torch.randn(2 * 3 * 40 * 64 + 1).half()[1:].view(2, 3, 40, 64),
        "rows not on 16 bytes": torch.randn(2, 3, 40, 68).half()[..., :64],
    }


@pytest.mark.parametrize("name", readable_by_tma())
def test_what_tma_reads_is_not_copied(name):
    x = readable_by_tma()[name]
    assert rings.loadable(x) is x
    assert all(stride % 8 == 0 for stride in rings.strides_of(x)[:3])


@pytest.mark.parametrize("name", not_readable_by_tma())
def test_what_tma_does_not_read_is_copied(gluon_model, name):
    x = not_readable_by_tma()[name]
    copy = rings.loadable(x)
    assert copy.is_contiguous()
    assert torch.equal(copy, x)
    q = torch.randn(x.shape).half()
    for actual, expected in zip(
        hopper.forward(q, x, x, Spec(Mask(), 0.1)), hopper.forward(q, copy, copy, Spec(Mask(), 0.1)), strict=True
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 1e-45])
def test_scales_that_are_not_positive(gluon_model, scale):
    """The largest product has the smallest score, or all are alike; 1e-45 is 0 where small numbers are flushed."""
    inputs = make_inputs(
        Case(f"scale {scale}", "", n_q=70, n_k=200, D=64, causal=True, keys="holes", scale=scale), torch.float16
    )
    o, lse = hopper.forward(inputs.q, inputs.k, inputs.v, inputs.spec())
    assert_right(inputs, {"o": o, "lse": lse})


@pytest.mark.parametrize(("n_q", "n_k"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_compute(gluon_model, n_q, n_k):
    q, k = (torch.randn(2, 2, n, 64).half() for n in (n_q, n_k))
    o, lse = hopper.forward(q, k, k, Spec(Mask(), 1.0))
    assert torch.equal(o, torch.zeros(2, 2, n_q, 64).half())
    assert torch.equal(lse, torch.full((2, 2, n_q), -torch.inf))


@pytest.mark.parametrize("hidden", [0, 63, 127, 128, 255])
def test_one_hidden_key_at_the_edge_of_a_tile(gluon_model, hidden):
    """Its values are NaN: they have to be left out where all other keys of the tile are read."""
    q, k, v = (torch.randn(1, 2, 256, 64).half() for _ in range(3))
    real_keys = torch.arange(256)[None] != hidden
    k[:, :, hidden], v[:, :, hidden] = torch.nan, torch.nan
    o, lse = hopper.forward(q, k, v, Spec(Mask(real_keys=real_keys), 0.1))
    expected = reference.forward(q.double(), k.double(), v.double(), Spec(Mask(real_keys=real_keys), 0.1))
    torch.testing.assert_close(o.double(), expected[0], atol=2e-3, rtol=0)
    torch.testing.assert_close(lse.double(), expected[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("window", [(300, 0), (0, 300), (200, 200)])
def test_tiles_on_both_sides_of_full_ones_are_masked(gluon_model, window):
    inputs = make_inputs(
        Case(f"window {window}", "", n_q=300, n_k=900, D=64, q_offset=300, window=window), torch.float16
    )
    o, lse = hopper.forward(inputs.q, inputs.k, inputs.v, inputs.spec())
    assert_right(inputs, {"o": o, "lse": lse})


def test_documents_in_tiles_of_three_warp_groups():
    """192 queries a tile, which is no power of two."""
    inputs = make_inputs(Case("documents", "", n_q=400, D=64, segment_ids=True, causal=True), torch.float16)
    config = FORWARD_ALTERNATIVES[64][0]
    assert config.block_m == 192
    with mock.patch.object(flash_forward, "forward_config", return_value=config), hopper_computes_for_the_cpu():
        o, lse = hopper.forward(inputs.q, inputs.k, inputs.v, inputs.spec())
    assert_right(inputs, {"o": o, "lse": lse})
