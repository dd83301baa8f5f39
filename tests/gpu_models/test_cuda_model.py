"""The CUDA kernels on a model of a GPU: around the borders of their tiles, in any order of threads, and on old GPUs.

Most of what they are held to stands in tests/backends/test_conformance.py, with the other backends.
"""

import dataclasses
import itertools
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from modelled_gpu import modelled_gpu
from test_properties import check, errors_of

import fastattn
from fastattn import Mask
from fastattn.testing import CASES, DTYPES, Case, assert_right, make_inputs, run

NAMED = {case.name: case for case in CASES if not case.timed}
TAKEN = [case for case in NAMED.values() if case.D > 0 and max(case.D, case.d_v or 0) <= 256]

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130)
HEAD_DIMS = (1, 8, 33, 63, 64, 65, 96, 128, 129, 192, 256)
VARIANTS = (
    {},
    {"causal": True},
    {"causal": True, "q_offset": "scattered"},
    {"window": (20, 7)},
    {"keys": "holes", "queries": True},
    {"segment_ids": True, "causal": True},
    {"H": 6, "H_kv": 2, "keys": "right", "causal": True},
    {"layout": "sliced"},
    {"layout": "BNHD", "H": 3, "H_kv": 1, "keys": "left"},
    {"softcap": 3.0, "alibi": True, "q_offset": (5, -9), "window": (None, 30)},
    {"sinks": True, "keys": "none"},
    {"dropout_p": 0.3, "dense": True},
    {"segment_ids": True, "q_offset": "scattered", "window": (40, 0), "alibi": True},
)


def by_turns(cases: Sequence, dtypes: Sequence[torch.dtype]) -> list[tuple]:
    """Each case in one of the dtypes."""
    return list(zip(cases, itertools.cycle(dtypes), strict=False))


def around_borders() -> list[tuple[Case, torch.dtype]]:
    """Every length of queries with every head dim; the rest by turns, so that each meets most of what it can."""
    drawn = []
    for (i, n_q), (j, D) in itertools.product(enumerate(LENGTHS), enumerate(HEAD_DIMS)):
        turn = len(HEAD_DIMS) * i + j
        n_k, d_v = LENGTHS[(7 * i + 4 * j) % len(LENGTHS)], HEAD_DIMS[(3 * i + j) % len(HEAD_DIMS)]
        case = Case(f"{n_q}x{n_k}-D{D}-{d_v}-{turn % len(VARIANTS)}", "", n_q=n_q, n_k=n_k, D=D, d_v=d_v)
        drawn.append((dataclasses.replace(case, **VARIANTS[turn % len(VARIANTS)]), DTYPES[(i + j) % len(DTYPES)]))
    return drawn


@pytest.mark.parametrize(("case", "dtype"), around_borders(), ids=str)
def test_around_the_borders_of_tiles(gpu_model, case, dtype):
    check(case, dtype, "cuda")


def test_sums_over_wide_heads_round_little(gpu_model):
    """With one key dP - delta is dlse and nothing but rounding: of sums of 256 products, and every seed must do."""
    case = Case("one-key", "", n_q=130, n_k=1, D=63, d_v=256)
    for seed in range(8):
        inputs = make_inputs(case, torch.float32, seed=seed)
        errors = errors_of(inputs, run(inputs, "cuda"))
        assert all(error.right for error in errors), "; ".join(map(str, errors))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_query_that_sees_nothing_gets_zeros_beside_a_nan(gpu_model, dtype):
    """Its weights are 0, but 0 times what others see of the same tile is NaN."""
    inputs = make_inputs(Case("before", "", n_q=40, n_k=33, causal=True, q_offset=-5), dtype)
    inputs.v[:, :, 0] = math.nan
    o = run(inputs, "cuda")["o"]
    assert (o[:, :, :5] == 0).all()
    assert o[:, :, 5:].isnan().all()


@pytest.mark.parametrize("shape", list(itertools.product((1, 2), (1, 4), (1, 70), (1, 90))), ids=str)
def test_bias_of_any_shape(gpu_model, shape):
    case = Case("bias", "", H=4, H_kv=2, n_q=70, n_k=90, bias=shape, dense=True)
    for dtype in DTYPES:
        check(case, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_documents_whose_tokens_lie_anywhere(gpu_model, causal, dtype):
    """In another order for the queries than for the keys: what their tiles see of each other are patches."""
    inputs = make_inputs(Case("packed", "", n_q=150, n_k=140, segment_ids=True), dtype)
    generator = torch.Generator().manual_seed(0)
    of_queries, of_keys = (torch.randperm(n // 10, generator=generator) for n in (150, 140))
    orders = [(10 * order[:, None] + torch.arange(10)).flatten() for order in (of_queries, of_keys)]
    segment_ids = tuple(ids[:, order] for ids, order in zip(inputs.mask.segment_ids, orders, strict=True))
    q, do, dlse = (x.index_select(2, orders[0]) for x in (inputs.q, inputs.do, inputs.dlse))
    k, v = (x.index_select(2, orders[1]) for x in (inputs.k, inputs.v))
    inputs = dataclasses.replace(
        inputs, q=q, k=k, v=v, do=do, dlse=dlse, mask=Mask(causal=causal, segment_ids=segment_ids)
    )
    assert_right(inputs, run(inputs, "cuda"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("output", ["o", "lse"])
@pytest.mark.parametrize("name", ["tail-above", "bias-broadcast", "alibi", "pad-queries-causal", "sinks"])
def test_gradient_through_one_output_only(gpu_model, name, output, dtype):
    inputs = make_inputs(NAMED[name], dtype)
    (inputs.dlse if output == "o" else inputs.do).zero_()  # for what is right; the backend gets none
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.learned().items()}
    o, lse = fastattn.attention(
        **leaves, mask=inputs.mask, scale=inputs.options["scale"], return_lse=True, backend="cuda"
    )
    through, arriving = (o, inputs.do) if output == "o" else (lse, inputs.dlse)
    gradients = torch.autograd.grad(through, list(leaves.values()), arriving)
    assert_right(inputs, {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)})


IN_ANY_ORDER = (
    "tail-above", "head-dim-256", "wide-values", "multi-query", "window-causal", "pad-holes", "pad-queries-causal",
    "segments-causal", "scattered", "bias-shared", "sinks", "everything",
)  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), by_turns(IN_ANY_ORDER, DTYPES), ids=str)
def test_same_bits_in_any_order_of_threads(gpu_model, name, dtype):
    """What depends on the order has a race."""
    inputs = make_inputs(NAMED[name], dtype)
    in_turn = run(inputs, "cuda")
    for order, seed in (("descending", 1), ("random", 1), ("random", 2)):
        with gpu_model.runs_in(order, seed):
            actual = run(inputs, "cuda")
        for output, value in in_turn.items():
            torch.testing.assert_close(value, actual[output], rtol=0, atol=0, equal_nan=True, msg=f"{output}, {order}")


def test_nothing_is_read_beyond_the_end_of_a_tensor(gpu_model):
    """A process of its own, for it ends where something is."""
    program = Path(__file__).with_name("fenced_cases.py")
    environment = os.environ | {"PYTHONPATH": str(program.parents[2])}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "done"), done.stdout + done.stderr


@pytest.fixture
def old_gpu() -> Iterator[None]:
    """One without asynchronous copies and bf16, and with less shared memory."""
    with modelled_gpu(7, 5).computes_for_the_cpu():
        yield


@pytest.mark.parametrize(("case", "dtype"), by_turns(TAKEN, (torch.float32, torch.float16)), ids=str)
def test_on_the_oldest_gpus(old_gpu, case, dtype):
    check(case, dtype, "cuda")


def test_bf16_is_refused_on_the_oldest_gpus(old_gpu):
    with pytest.raises(NotImplementedError, match=re.escape("needs compute capability 8.0 or later for bfloat16")):
        run(make_inputs(NAMED["plain"], torch.bfloat16), "cuda")
