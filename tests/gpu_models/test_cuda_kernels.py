"""The compiled CUDA kernels on the machine that executes PTX: around the borders of their tiles, and in random calls.

Most of what they are held to stands in tests/backends/test_conformance.py, beside others: `make ptx` runs both.
"""

import dataclasses
import itertools
import math
import re
import warnings
from collections.abc import Callable
from unittest import mock

import pytest
import test_paged
import torch
from hypothesis import given
from hypothesis import strategies as st
from modelled_gpu import CUDA_MACHINES, PtxMachine
from ptx import gpu
from ptx.cuda import Gpu
from ptx.machine import program
from test_paged import WORDS, Requests, forward_paged
from test_properties import FEATURES, cases, check, errors_of, profile

import fastattn
from fastattn import Mask
from fastattn.testing import CASES, DTYPES, Case, assert_right, make_inputs, run

NAMED = {case.name: case for case in CASES if not case.timed}
OLDEST, WITH_ALL = CUDA_MACHINES  # without asynchronous copies and bf16, and the first with both

on_each, on_one, on_the_oldest = (
    pytest.mark.parametrize("backend", machines, ids=lambda machine: machine.NAME, indirect=True)
    for machines in (CUDA_MACHINES, [WITH_ALL], [OLDEST])
)

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


def around_borders() -> list[tuple[PtxMachine, Case, torch.dtype]]:
    """Every length of queries with every head dim; the rest by turns, so that each meets most of what it can."""
    drawn = []
    for (i, n_q), (j, D) in itertools.product(enumerate(LENGTHS), enumerate(HEAD_DIMS)):
        turn = len(HEAD_DIMS) * i + j
        n_k, d_v = LENGTHS[(7 * i + 4 * j) % len(LENGTHS)], HEAD_DIMS[(3 * i + j) % len(HEAD_DIMS)]
        case = Case(f"{n_q}x{n_k}-D{D}-{d_v}-{turn % len(VARIANTS)}", "", n_q=n_q, n_k=n_k, D=D, d_v=d_v)
        dtype = DTYPES[(i + j) % len(DTYPES)]
        machine = OLDEST if turn % 4 == 0 and dtype != torch.bfloat16 else WITH_ALL
        drawn.append((machine, dataclasses.replace(case, **VARIANTS[turn % len(VARIANTS)]), dtype))
    return drawn


@pytest.mark.parametrize(
    ("backend", "case", "dtype"), around_borders(), ids=lambda x: getattr(x, "NAME", str(x)), indirect=["backend"]
)
def test_around_the_borders_of_tiles(backend, case, dtype):
    check(case, dtype, backend.NAME)


MORE = [
    Case(
        "many-tiles-of-keys", "the next ones are found while a tile is multiplied",
        B=1, H=1, n_q=20, n_k=600, D=136, causal=True, q_offset=580, keys="holes",
    ),
    Case(
        "many-tiles-of-queries", "the same for a tile of keys",
        B=1, H=1, n_q=600, n_k=20, D=136, keys="holes", queries=True,
    ),
    Case(
        "many-samples", "more groups of tokens than the threads of a block sum up",
        B=70, H=1, n_q=33, n_k=40, D=8, keys="holes", queries=True,
    ),
    Case("last-query-not-first-key", "a tile that one row does not see whole", n_q=128, window=(62, None)),
    Case("first-query-not-last-key", "the same for a tile of keys", n_q=128, window=(None, 62)),
    Case("last-query-next-key", "a tile that one row sees", n_q=128, n_k=200, causal=True, q_offset=(1, 65)),
    Case("last-key-next-query", "the same for a tile of keys", n_q=130, window=(1, None)),
]  # fmt: skip


@on_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", MORE, ids=str)
def test_more_tiles(backend, case, dtype):
    check(case, dtype, backend.NAME)


@on_one
def test_sums_over_wide_heads_round_little(backend):
    """With one key dP - delta is dlse and nothing but rounding: of sums of 256 products, and every seed must do."""
    case = Case("one-key", "", n_q=130, n_k=1, D=63, d_v=256)
    for seed in range(8):
        inputs = make_inputs(case, torch.float32, seed=seed)
        errors = errors_of(inputs, run(inputs, backend.NAME))
        assert all(error.right for error in errors), "; ".join(map(str, errors))


def in_parts(case: Case) -> Case:
    """The same with 5 queries near the end of so many keys that they are split."""
    n_q, n_k, q_offset = 5, 700, case.q_offset
    if isinstance(q_offset, int):
        q_offset += n_k - n_q - 3
    elif q_offset != "scattered":
        q_offset = tuple(n_k - n_q + offset for offset in q_offset)
    bias = case.bias
    if bias is not None:
        lengths = zip((n_q, n_k)[-len(bias) :], bias[-2:], strict=True)
        bias = (*bias[:-2], *(1 if of_bias == 1 else n for n, of_bias in lengths))
    return dataclasses.replace(case, n_q=n_q, n_k=n_k, q_offset=q_offset, bias=bias)


def every_case_in_parts() -> list[tuple[PtxMachine, Case, torch.dtype]]:
    """Those that the backend takes; dtypes and GPUs by turns."""
    drawn, of_turns = [], [(WITH_ALL, dtype) for dtype in DTYPES]
    of_turns += [(OLDEST, dtype) for dtype in DTYPES if dtype != torch.bfloat16]
    for i, case in enumerate(NAMED.values()):
        if 0 < case.D <= 256 and 0 < (case.d_v or case.D) <= 256:
            machine, dtype = of_turns[i % len(of_turns)]
            drawn.append((machine, in_parts(case), dtype))
    return drawn


@pytest.mark.parametrize(
    ("backend", "case", "dtype"), every_case_in_parts(), ids=lambda x: getattr(x, "NAME", str(x)), indirect=["backend"]
)
def test_keys_in_parts(backend, case, dtype):
    check(case, dtype, backend.NAME)


GROUPS = [
    Case("a-tile-of-rows", "as many as the tile has", H=16, H_kv=1, n_q=1, n_k=530, D=64),
    Case("rows-of-a-query", "in two tiles", B=1, H=12, H_kv=1, n_q=3, n_k=1100, D=40, causal=True, q_offset=1090),
    Case("tiles-of-rows", "the last has one row", B=1, H=11, H_kv=1, n_q=3, n_k=1300, D=64, dense=True),
    Case("wide", "two warps share the columns", B=1, H=4, H_kv=2, n_q=2, n_k=520, D=256, d_v=200, keys="holes"),
    Case("few-queries-at-most", "with one more the keys are not split", B=1, H=2, n_q=16, n_k=600, D=128),
    Case("whole-part", "no key in the second one", B=1, H=4, H_kv=1, n_q=1, n_k=256, alibi=True, sinks=True),
    Case("one-key-more", "in the second part", B=1, H=4, H_kv=1, n_q=1, n_k=257, alibi=True, dropout_p=0.3),
    Case("many-parts", "of which each warp adds several", B=1, H=1, n_q=1, n_k=3000, window=(2000, 0), q_offset=2800),
]  # fmt: skip


@on_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", GROUPS, ids=str)
def test_heads_that_share_keys(backend, case, dtype):
    check(case, dtype, backend.NAME)


def launches_of(call: Callable[[], object]) -> dict[str, int]:
    """The blocks of threads of each kernel of a call, none of which runs."""
    with mock.patch.object(gpu.Gpu, "runs", autospec=True) as runs:
        call()
    return {arguments.args[1]: arguments.args[3][0] for arguments in runs.call_args_list}


@on_each
def test_parts_fill_the_gpu(backend):
    def blocks(n_q: int, n_k: int, H: int = 32, H_kv: int = 8) -> dict[str, int]:
        q = torch.empty(1, H, n_q, 128, dtype=torch.float16)
        k = torch.empty(1, H_kv, n_k, 128, dtype=torch.float16)
        return launches_of(lambda: fastattn.attention(q, k, k, backend=backend.NAME))

    assert blocks(1, 8192) == {"decoding_kernel": 256, "combining_kernel": 32}
    assert blocks(1, 8193) == {"decoding_kernel": 264, "combining_kernel": 32}
    assert blocks(1, 256) == {"decoding_kernel": 8}
    assert blocks(5, 8192) == {"decoding_kernel": 256, "combining_kernel": 160}
    assert blocks(16, 8192, H=8) == {"decoding_kernel": 256, "combining_kernel": 128}
    assert list(blocks(17, 8192)) == ["forward_kernel"]


@on_each
@pytest.mark.parametrize(
    ("dtype", "first", "n"),
    [(torch.float32, 16, 20), (torch.float16, 64, 100), (torch.float32, 64, 256), (torch.float16, 64, 300)],
    ids=str,
)
def test_where_nothing_is_seen_a_nan_is_not_either(backend, dtype, first, n):
    """The second query sees key n; the first one nothing of the keys of that warp, or of that part."""
    inputs = make_inputs(Case("nan", "", B=1, H=2, H_kv=1, n_q=2, n_k=600, D=64), dtype)
    inputs.v[:, :, n] = math.nan
    dense = torch.zeros(2, 600, dtype=torch.bool)
    dense[0, :first], dense[1, : n + 1] = True, True
    o, lse = fastattn.attention(inputs.q, inputs.k, inputs.v, Mask(dense=dense), return_lse=True, backend=backend.NAME)
    assert o[:, :, 1].isnan().all()
    assert lse.isfinite().all()
    expected, _ = fastattn.attention(
        inputs.q[:, :, :1].double(), *(x[:, :, :first].double() for x in (inputs.k, inputs.v)), return_lse=True,
        backend="reference",
    )  # fmt: skip
    torch.testing.assert_close(o[:, :, :1].double(), expected, rtol=2e-3, atol=2e-3)


@on_one
@pytest.mark.parametrize("n_q", [40, 12])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_query_that_sees_nothing_gets_zeros_beside_a_nan(backend, dtype, n_q):
    """Its weights are 0, but 0 times what others see of the same tile is NaN."""
    inputs = make_inputs(Case("before", "", n_q=n_q, n_k=33, causal=True, q_offset=-5), dtype)
    inputs.v[:, :, 0] = math.nan
    o = run(inputs, backend.NAME)["o"]
    assert (o[:, :, :5] == 0).all()
    assert o[:, :, 5:].isnan().all()


@on_one
@pytest.mark.parametrize("shape", list(itertools.product((1, 2), (1, 4), (1, 70), (1, 90))), ids=str)
def test_bias_of_any_shape(backend, shape):
    case = Case("bias", "", H=4, H_kv=2, n_q=70, n_k=90, bias=shape, dense=True)
    for dtype in DTYPES:
        check(case, dtype, backend.NAME)


@on_one
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_documents_whose_tokens_lie_anywhere(backend, causal, dtype):
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
    assert_right(inputs, run(inputs, backend.NAME))


@on_one
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("output", ["o", "lse"])
@pytest.mark.parametrize("name", ["tail-above", "bias-broadcast", "alibi", "pad-queries-causal", "sinks"])
def test_gradient_through_one_output_only(backend, name, output, dtype):
    inputs = make_inputs(NAMED[name], dtype)
    (inputs.dlse if output == "o" else inputs.do).zero_()  # for what is right; the backend gets none
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.learned().items()}
    o, lse = fastattn.attention(
        **leaves, mask=inputs.mask, scale=inputs.options["scale"], return_lse=True, backend=backend.NAME
    )
    through, arriving = (o, inputs.do) if output == "o" else (lse, inputs.dlse)
    gradients = torch.autograd.grad(through, list(leaves.values()), arriving)
    assert_right(inputs, {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)})


OF_PAGES = [
    (OLDEST, 1, torch.float32),
    (OLDEST, 16, torch.float16),
    (WITH_ALL, 7, torch.float32),
    (WITH_ALL, 16, torch.bfloat16),
    (WITH_ALL, 1000, torch.float16),
]


@pytest.mark.parametrize(
    ("backend", "page_size", "dtype"), OF_PAGES, ids=lambda x: getattr(x, "NAME", str(x)), indirect=["backend"]
)
@pytest.mark.parametrize("case", test_paged.CASES, ids=str)
def test_keys_in_pages(backend, case, page_size, dtype):
    inputs = make_inputs(case, dtype)
    outputs = [forward_paged(inputs, page_size, layout, backend) for layout in ("NHD", "HND")]
    for output in outputs:
        assert_right(inputs, output)
    assert torch.equal(outputs[0]["o"], outputs[1]["o"])


@on_each
@pytest.mark.parametrize("words", WORDS)
def test_requests_in_pages(backend, words):
    """Of one query, of a few and of whole prompts, in one call; beyond their lengths the table names no pages."""
    mask, options = WORDS[words]
    requests = Requests(torch.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fastattn.FallbackWarning)
        actual = requests.attend(**{"causal": False} | mask | options, return_lse=True, backend=backend.NAME)
    requests.check(actual, mask, **options)


@on_each
@pytest.mark.parametrize("page_size", [1, 16, 100])
@pytest.mark.parametrize("options", [{}, {"scale": 0.5}, WORDS["sinks"][1]], ids=lambda options: "".join(options))
def test_the_bits_of_a_request_in_pages_depend_on_no_other(backend, options, page_size):
    dtypes = DTYPES if torch.cuda.get_device_capability() >= (8, 0) else (torch.float32, torch.float16)
    for dtype in dtypes:
        test_paged.check_bits(page_size, dtype, backend=backend.NAME, **options)


@on_one
def test_a_tree_and_a_prefix_in_pages(backend):
    """As the copies that the reference computes of."""
    requests, n = Requests(), 32
    requests.table = torch.cat([requests.table[4, :2].expand(len(requests.lengths), 2), requests.table], 1)
    requests.lengths = requests.lengths + n
    tree = torch.ones(4, 4, dtype=torch.bool).tril() & ~torch.eye(4, dtype=torch.bool).roll(-2, 1)
    newest = torch.tensor([4, 4]).cumsum(0)
    calls = [
        lambda name: requests.attend(prefix=n, return_lse=True, backend=name),
        lambda name: fastattn.attention_paged(
            requests.q[:8], requests.k_pages, requests.v_pages, requests.table[2:4], requests.lengths[2:4],
            torch.nn.functional.pad(newest, (1, 0)), tree=tree, return_lse=True, backend=name,
        ),
    ]  # fmt: skip
    for call in calls:
        for actual, expected in zip(call(backend.NAME), call("reference"), strict=True):
            torch.testing.assert_close(actual, expected, rtol=2e-6, atol=1e-5)


@test_paged.each_stored_dtype
@pytest.mark.parametrize(
    ("backend", "page_size", "dtype"), OF_PAGES, ids=lambda x: getattr(x, "NAME", str(x)), indirect=["backend"]
)
@pytest.mark.parametrize("case", test_paged.OF_QUANTIZED, ids=str)
def test_quantized_keys_in_pages(case, backend, page_size, dtype, stored):
    """The bits that pages of the numbers themselves give."""
    inputs = make_inputs(case, dtype)
    output = test_paged.forward_quantized(inputs, page_size, stored, backend)
    expected = forward_paged(inputs, page_size, "HND", backend)
    assert all(torch.equal(output[name], x) for name, x in expected.items())


@on_each
@test_paged.each_stored_dtype
@pytest.mark.parametrize("words", WORDS)
def test_requests_in_quantized_pages(backend, words, stored):
    mask, options = WORDS[words]
    requests = test_paged.OfQuantized(torch.float16, stored)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fastattn.FallbackWarning)
        actual = requests.attend(**{"causal": False} | mask | options, return_lse=True, backend=backend.NAME)
    requests.check(actual, mask, **options)


@on_each
@test_paged.each_stored_dtype
@pytest.mark.parametrize(("n_q", "D"), [(1, 3), (20, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_all_codes_are_numbers_or_none(backend, n_q, D, dtype, stored):
    test_paged.check_codes(backend, torch.ones(256, 1, n_q, D, dtype=dtype), stored)


@on_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_pages_of_any_strides(backend, dtype):
    """Rows that begin anywhere, columns apart from each other, and keys in whole chunks beside values that are not."""
    inputs = make_inputs(Case("strides", "", n_q=20, n_k=90, D=40, d_v=21, H=4, H_kv=2), dtype)
    (k, table), (v, _) = (test_paged.in_pages(x, 16) for x in (inputs.k, inputs.v))
    real = torch.arange(96).expand(len(table), 96) < 90
    spec = dataclasses.replace(inputs.spec(), mask=Mask(real_keys=real))

    def scattered(x: torch.Tensor, columns_apart: int) -> torch.Tensor:
        wider = x.new_full((*x.shape[:3], x.shape[3] + 1, columns_apart), math.nan)
        wider[..., :-1, 0] = x
        return wider[..., :-1, 0].transpose(1, 2)

    outputs = [
        backend.forward_paged(inputs.q, *pages, table.long().T.contiguous().T, spec)
        for pages in ((k.transpose(1, 2), scattered(v, 1)), (scattered(k, 1), scattered(v, 3)))
    ]
    for o, lse in outputs:
        assert_right(inputs, {"o": o, "lse": lse})
    assert torch.equal(outputs[0][0], outputs[1][0])


@on_each
@pytest.mark.parametrize("n_q", [1, 20])
def test_no_table_makes_a_kernel_read_outside_the_pages(backend, n_q):
    """Nor any position; and where there are no pages, there are no keys."""
    inputs = make_inputs(Case("", "", n_q=n_q, n_k=64, keys="right"), torch.float32)
    around = inputs.k.new_full((6, inputs.k.shape[1], 16, inputs.k.shape[3]), math.nan)
    pages = around[2:4].fill_(1.0)
    table = torch.tensor([[-1, 2, 1, 0], [0, 2**31 - 1, -(2**31), 1]], dtype=torch.int32)
    far = dataclasses.replace(inputs.spec(), mask=Mask(causal=True, q_offset=torch.tensor([10**6, 2**40])))
    for spec in (inputs.spec(), far):
        o, _ = backend.forward_paged(inputs.q, pages, pages, table, spec)
        assert torch.equal(o.unique(), o.new_ones(1))
        o, lse = backend.forward_paged(inputs.q, pages[:0], pages[:0], table, spec)
        assert o.eq(0).all()
        assert lse.eq(-math.inf).all()


@on_the_oldest
def test_bf16_is_refused_on_the_oldest_gpus(backend):
    with pytest.raises(NotImplementedError, match=re.escape("needs compute capability 8.0 or later for bfloat16")):
        run(make_inputs(NAMED["plain"], torch.bfloat16), backend.NAME)


@pytest.mark.parametrize("machine", CUDA_MACHINES, ids=lambda machine: machine.NAME)
def test_a_launch_that_a_gpu_refuses_is_told(machine):
    inputs = make_inputs(NAMED["plain"], torch.float16)
    with (
        mock.patch.dict(gpu.SHARED_BYTES, {machine.arch: 30_000}),
        machine.computes_for_the_cpu(),
        pytest.raises(RuntimeError, match="CUDA error: 1"),
    ):
        run(inputs, "cuda")


@pytest.mark.parametrize(
    ("machine", "dtype"),
    [(OLDEST, torch.float16), (WITH_ALL, torch.bfloat16)],
    ids=lambda x: getattr(x, "NAME", str(x)),
)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_tiles_lie_without_bank_conflicts(machine, dtype, D):
    """Where they are copied, and where tensor cores load them."""
    counting = Gpu(machine.arch, counting=True)
    with counting.computes_for_the_cpu():
        program.cache_clear()  # a program counts from when it was parsed
        run(make_inputs(Case("tiles", "", n_q=130, D=D, causal=True), dtype), "cuda")
    kernels = [of_name[0] for of_name in counting.programs.values()]
    counted = [(text, x) for kernel in kernels for text, x in kernel.counts() if TILES.search(text) and x.warps]
    assert len(counted) > 100
    assert [(text, x.wavefronts) for text, x in counted if x.wavefronts != x.fewest_wavefronts] == []


TILES = re.compile(r"ldmatrix|cp\.async\.cg|st\.shared\.v4")


@on_one
@profile(0.3)
@given(case=cases(FEATURES, longest=140, widest=256), dtype=st.sampled_from(DTYPES))
def test_drawn_calls(backend, case, dtype):
    check(case, dtype, backend.NAME)


@on_one
@profile(0.1)
@given(case=cases(FEATURES, longest=700, widest=20), dtype=st.sampled_from(DTYPES))
def test_drawn_calls_over_many_tiles(backend, case, dtype):
    check(case, dtype, backend.NAME)
