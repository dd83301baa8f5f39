"""merge: attention over two sets of keys from attention over each, with everything that depends on it."""

import math
import re

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import fastattn
from fastattn import Mask
from fastattn.testing import DTYPES, Case, Inputs, assert_right, make_inputs

CUT = 20  # keys of the first set
SINKS = {"H": 16, "H_kv": 2, "sinks": True}  # so many that the budget is not that of two lucky roundings
CASES = {
    "plain": Case("", "", H=4, H_kv=2, n_q=30, n_k=50),
    "causal": Case("", "", n_q=30, n_k=50, causal=True, q_offset=5),  # the first queries see nothing in the second set
    "window": Case("", "", n_q=30, n_k=50, window=(3, 3), q_offset=10),  # the last see nothing in the first
    "padding": Case("", "", B=3, n_q=50, keys="none", queries=True),  # some see nothing at all
    "large-scores": Case("", "", n_q=30, n_k=50, scale=60.0),
    "sinks": Case("", "", n_q=30, n_k=50, causal=True, q_offset=5, **SINKS),  # as in "causal"
    "sinks-padding": Case("", "", B=3, n_q=50, keys="none", queries=True, **SINKS),  # as in "padding"
}


def merged(learned: dict[str, Tensor], inputs: Inputs, backend: str) -> tuple[Tensor, Tensor]:
    """Attention over the keys before CUT and from there on, merged."""
    q, k, v = (learned[name] for name in "qkv")
    results = []
    for first, last in ((0, CUT), (CUT, k.shape[2])):
        mask = inputs.mask
        part = Mask(
            mask.causal,
            q_offset=mask.q_offset - first,
            window=mask.window,
            real_keys=None if mask.real_keys is None else mask.real_keys[:, first:last],
            real_queries=mask.real_queries,
        )
        results += fastattn.attention(
            q, k[:, :, first:last], v[:, :, first:last], part, scale=inputs.options["scale"], return_lse=True,
            backend=backend,
        )  # fmt: skip
    return fastattn.merge(*results, sinks=learned.get("sinks"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_same_as_attention_over_all_keys(backend, name, dtype):
    inputs = make_inputs(CASES[name], dtype)
    learned = {n: x.detach().requires_grad_() for n, x in inputs.learned().items()}
    o, lse = merged(learned, inputs, backend)
    assert o.dtype == dtype
    gradients = torch.autograd.grad((o, lse), list(learned.values()), (inputs.do, inputs.dlse.to(lse.dtype)))
    actual = {"o": o, "lse": lse} | {f"d{n}": g for n, g in zip(learned, gradients, strict=True)}
    assert_right(inputs, {n: x.detach() for n, x in actual.items()})


def test_an_empty_side_leaves_the_other_to_the_bit():
    o, lse = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5)
    nothing = torch.zeros_like(o), torch.full_like(lse, -math.inf)
    for actual in (fastattn.merge(o, lse, *nothing), fastattn.merge(*nothing, o, lse)):
        assert torch.equal(actual[0], o)
        assert torch.equal(actual[1], lse)
    unwritten = torch.full_like(o, math.nan), nothing[1]
    assert torch.equal(fastattn.merge(*unwritten, o, lse)[0], o)
    assert torch.equal(fastattn.merge(o, lse, *unwritten)[0], o)
    assert torch.equal(fastattn.merge(*unwritten, *unwritten)[0], nothing[0])
    actual = fastattn.merge(*nothing, *nothing)
    assert torch.equal(actual[0], nothing[0])
    assert torch.equal(actual[1], nothing[1])


def test_what_is_far_below_rounds_nothing():
    o, lse = torch.randn(2, 8), torch.tensor([-0.394, 3.2461])
    below = torch.tensor([-700.123, -5e5])
    for actual in (fastattn.merge(o, lse, o, below), fastattn.merge(o, below, o, lse)):
        assert torch.equal(actual[1], lse)


@pytest.mark.parametrize("far", [0.0, 50.0, 1e4, 1e30])
def test_far_apart_is_exact_in_value_and_gradient(far):
    o1, o2 = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    lse1 = torch.tensor([far, -far, far, 0.0], dtype=torch.float64).requires_grad_()
    lse2 = torch.tensor([-far, far, 0.0, far], dtype=torch.float64).requires_grad_()
    o, lse = fastattn.merge(o1, lse1, o2, lse2)
    torch.testing.assert_close(lse, torch.logaddexp(lse1, lse2))
    weight = torch.softmax(torch.stack([lse1, lse2]), 0).detach()
    torch.testing.assert_close(o, weight[0][:, None] * o1 + weight[1][:, None] * o2)
    for actual, expected in zip(torch.autograd.grad(lse.sum(), (lse1, lse2)), weight, strict=True):
        torch.testing.assert_close(actual, expected)


def test_any_order():
    """With rows that are empty on one side, on both, and equal on both."""
    generator = torch.Generator().manual_seed(0)
    o1, o2 = (torch.randn(2, 5, 3, generator=generator, dtype=torch.float64) for _ in "12")
    lse1, lse2 = (torch.randn(2, 5, generator=generator, dtype=torch.float64) for _ in "12")
    lse1[0, 0] = lse2[0, 0]
    inputs = tuple(x.requires_grad_() for x in (o1, lse1, o2, lse2))
    empty1, empty2 = (torch.zeros(2, 5, dtype=torch.bool) for _ in "12")
    empty1[0, 1:3] = empty2[0, 2:4] = True

    def finite(o1, lse1, o2, lse2, sinks=None):
        o1, o2 = o1.masked_fill(empty1[..., None], 0), o2.masked_fill(empty2[..., None], 0)
        lse1, lse2 = lse1.masked_fill(empty1, -math.inf), lse2.masked_fill(empty2, -math.inf)
        o, lse = fastattn.merge(o1, lse1, o2, lse2, sinks=sinks)
        return o, lse.masked_fill(lse == -math.inf, 0)

    sinks = torch.randn(2, generator=generator, dtype=torch.float64).requires_grad_()
    for given in (inputs, (*inputs, sinks)):
        assert gradcheck(finite, given, check_forward_ad=True)
        assert gradgradcheck(finite, given, check_fwd_over_rev=True)


@pytest.mark.parametrize("sink", [-math.inf, -1e30, 1e30])
def test_sinks_that_take_nothing_or_all(sink):
    o, lse = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5)
    lse[:, :, 0] = -math.inf
    o[:, :, 0] = 0
    sinks = torch.full((3,), sink, requires_grad=True)
    actual, lse_of_all = fastattn.merge(o, lse, torch.zeros_like(o), torch.full_like(lse, -math.inf), sinks=sinks)
    assert torch.equal(actual, o if sink < 0 else torch.zeros_like(o))
    assert torch.equal(lse_of_all, lse if sink < 0 else torch.where(lse == -math.inf, lse, sink))
    (gradient,) = torch.autograd.grad(lse_of_all[lse != -math.inf].sum() + actual.sum(), sinks)
    assert torch.equal(gradient, torch.full((3,), 0.0 if sink < 0 else 8.0))  # 2 samples, 4 queries that see a key


def test_heads_first_as_attention_varlen_has_them():
    q, boundaries = torch.randn(12, 2, 8), torch.tensor([0, 5, 12])
    far, near = torch.randn(12, 2, 8), torch.randn(12, 2, 8)
    results = []
    for k in (far, near):
        o, lse = fastattn.attention_varlen(q, k, k, boundaries, return_lse=True)
        results += [o, lse.T]
    o, _ = fastattn.merge(*results)
    both = torch.cat([far[:5], near[:5], far[5:], near[5:]])
    torch.testing.assert_close(o, fastattn.attention_varlen(q, both, both, boundaries, 2 * boundaries))


OUTPUT, LSE = torch.zeros(2, 3, 5, 8), torch.zeros(2, 3, 5)
MALFORMED = {
    "type": ({"lse2": None}, "lse2 must be a floating Tensor, got NoneType"),
    "sparse": ({"o1": OUTPUT.to_sparse()}, "o1 must be a floating Tensor, got torch.sparse_coo"),
    "integers": ({"o1": OUTPUT.int()}, "o1 must be a floating Tensor, got torch.int32"),
    "no dimensions": ({"o1": OUTPUT[0, 0, 0, 0]}, "o1 must be [..., n_q, d_v], got []"),
    "device": ({"o2": OUTPUT.to("meta")}, "o2 must be on cpu like o1, got meta"),
    "shape": (
        {"o2": OUTPUT[..., :4]},
        "o2 must be [2, 3, 5, 8] of torch.float32 like o1, [..., n_q, d_v], got [2, 3, 5, 4]",
    ),
    "dtype": ({"o2": OUTPUT.half()}, "o2 must be [2, 3, 5, 8] of torch.float32 like o1"),
    "lse": ({"lse1": LSE.mT}, "lse1 must be [2, 3, 5] like o1, got [2, 5, 3]"),
    "sinks": ({"sinks": torch.zeros(5)}, "sinks must be [3], one for each head of lse1, got [5]"),
    "no-heads": (
        {"o1": OUTPUT[0, 0], "lse1": LSE[0, 0], "o2": OUTPUT[0, 0], "lse2": LSE[0, 0], "sinks": torch.zeros(5)},
        "sinks must be None where lse1 is [5], without heads",
    ),
    "sinks-type": ({"sinks": 1.0}, "sinks must be a floating Tensor, got float"),
    "sinks-device": ({"sinks": torch.zeros(3, device="meta")}, "sinks must be on cpu like o1, got meta"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_call_is_refused_in_a_sentence(name):
    wrong, sentence = MALFORMED[name]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        fastattn.merge(**({"o1": OUTPUT, "lse1": LSE, "o2": OUTPUT, "lse2": LSE} | wrong))
