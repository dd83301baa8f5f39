"""Cases that small ones on a CPU cannot stand for: many runs, long rows, large grids. Real sizes need a GPU."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from places import CUDA_TAKES_BF16, WITH_ANY_MASK, in_each_place, most_precise_dtype, place_id

from fastattn.backends import aten, hopper
from fastattn.testing import Case, assert_right, make_inputs, run

ON_GPU = torch.cuda.is_available()
LENGTH, RUNS, B_LARGE = (1000, 30, 7000) if ON_GPU else (40, 2, 2)  # the interpreter takes minutes for more
TRAINING = Case(
    "training", "all that training uses at once",
    B=2, H=2, H_kv=1, n_q=LENGTH, D=64, keys="right", queries=True, causal=True, bias=(2, LENGTH, LENGTH),
    dropout_p=0.1,
)  # fmt: skip


@in_each_place
def test_many_runs_give_the_same_bits(backend, device):
    case = TRAINING
    if backend is aten and device == "cuda":  # which takes no other mask there
        case = Case("causal", "", B=2, H=2, H_kv=1, n_q=LENGTH, D=64, causal=True)
    elif backend in (aten, hopper):
        case = dataclasses.replace(case, bias=case.bias if backend is aten else None, dropout_p=0.0)
    inputs = make_inputs(case, torch.float16, device)
    first = run(inputs, backend.NAME)
    for _ in range(RUNS - 1):
        for name, value in run(inputs, backend.NAME).items():
            assert torch.equal(first[name], value), name


@pytest.mark.parametrize(("backend", "device"), WITH_ANY_MASK, ids=place_id)
@pytest.mark.parametrize("keys", ["right", "left", "holes", "skewed"])
def test_nan_in_padding_of_long_rows_is_never_read(backend, device, keys):
    """In the padding, and around each row in memory."""
    case = Case("", "", B=2, H=1, n_q=LENGTH, D=64, keys=keys, queries=True, causal=True, layout="sliced")
    inputs = make_inputs(case, torch.float16, device)
    assert inputs.k.isnan().any()
    assert_right(inputs, run(inputs, backend.NAME))


@pytest.mark.parametrize(("backend", "device"), WITH_ANY_MASK, ids=place_id)
def test_more_heads_than_a_grid_dimension_takes(backend, device):
    """A dimension of a grid ends at 65,535."""
    inputs = make_inputs(Case("", "", B=B_LARGE, H=10, n_q=3, D=16, keys="right"), most_precise_dtype(backend), device)
    assert_right(inputs, run(inputs, backend.NAME))


@in_each_place
def test_case_of_pytorch_196678(backend, device, record_property):
    """Rows whose lse is below -88.7: cuDNN's dq is NaN there with an attn_mask, if the length leaves 64 modulo 128."""
    case = Case("", "", B=1, H=1, n_q=704 if ON_GPU else 64, D=64, causal=True)
    dtype = torch.bfloat16 if device == "cuda" and CUDA_TAKES_BF16 else torch.float16
    inputs = make_inputs(case, dtype, device)
    for x, first in ((inputs.q, 1.0), (inputs.k, -120 * math.sqrt(case.D))):
        x.mul_(0.1)[..., 0] = first
    outputs = run(inputs, backend.NAME)
    assert (outputs["lse"] < -88.7).all()
    assert_right(inputs, outputs)

    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    keep = inputs.mask.keep(case.n_q, case.n_q, inputs.q.device)
    theirs = torch.autograd.grad(F.scaled_dot_product_attention(*leaves, attn_mask=keep), leaves, inputs.do)
    wrong = sum((~gradient.isfinite()).sum().item() for gradient in theirs)
    record_property("torch's default SDPA", f"{wrong} of {sum(x.numel() for x in theirs)} gradients are NaN or Inf")
