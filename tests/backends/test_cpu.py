"""The CPU backend: instruction sets, threads, chunks of keys, and C++ twins of Python definitions."""

import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parts import places_of_a_part
from places import CAPABILITIES
from test_spec import PHILOX_ANSWERS
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from fastattn.backends import build, cpu
from fastattn.spec import Mask, Spec
from fastattn.testing import CASES, DTYPES, Case, Inputs, assert_right, compare, exact, make_inputs, run

BF16_PRODUCTS = ("amx", "avx512_bf16", "neon_bf16")
HALVES = (torch.float16, torch.bfloat16)

COMPUTED = [
    case
    for case in CASES
    if not case.timed and make_inputs(case, torch.float32).spec().features() <= cpu.features(torch.device("cpu"))
]

CHUNKED = (
    Case("chunks", "dk and dv of more keys than stay in the cache", B=1, n_q=40, n_k=300, D=512),
    Case("chunks-holes", "padding at the ends of chunks", B=3, n_q=33, n_k=300, D=512, keys="holes", queries=True),
    Case("chunks-grouped", "dq of each head over chunks", H=4, H_kv=2, n_q=150, D=512, causal=True, keys="left"),
    Case("chunks-window", "blocks that begin inside a chunk", n_q=220, n_k=250, D=512, window=(70, 9), keys="holes"),
)
ONE_HEAD = (
    Case("one-head", "fewer heads than threads: dq apart from dk and dv", B=1, H=1, n_q=300, n_k=700, causal=True),
    Case("one-group", "dk and dv of a group of heads", B=1, H=4, H_kv=1, n_q=200, n_k=500, keys="holes", queries=True),
    Case("decode-no-head-dim", "one query whose scores are all 0", H=4, H_kv=2, n_q=1, n_k=300, D=0, d_v=8, scale=1.0),
    Case("three-heads", "one head more than two threads", B=3, H=1, n_q=130, n_k=500, window=(100, 40), keys="right"),
)
DROPPED = (
    Case(
        "dropout-holes",
        "keys and queries keep their own numbers",
        B=3, H=4, H_kv=2, n_q=70, D=33, keys="holes", queries=True, dropout_p=0.3,
    ),
    Case("dropout-window", "blocks that begin among four keys", n_q=150, window=(13, 6), q_offset=3, dropout_p=0.5),
    Case("dropout-chunks", "over chunks", B=1, H=2, H_kv=1, n_q=40, n_k=500, D=256, keys="left", dropout_p=0.1),
    Case("dropout-one-head", "dq apart from dk and dv", B=1, H=1, n_q=200, n_k=500, causal=True, dropout_p=0.1),
)  # fmt: skip
ADDED = (
    Case(
        "bias-holes",
        "rows of a bias are gathered",
        B=3, H=4, H_kv=2, n_q=70, n_k=90, D=33, keys="holes", queries=True, bias=(3, 4, 70, 90),
    ),
    Case(
        "bias-shared", "samples add to one gradient",
        B=3, n_q=150, n_k=300, causal=True, q_offset=99, bias=(150, 300),
    ),
    Case("bias-chunks", "over chunks", B=1, H=2, H_kv=1, n_q=40, n_k=500, D=256, keys="left", bias=(1, 2, 40, 500)),
    Case("bias-one-head", "dq apart from dk and dv", B=1, H=1, n_q=200, n_k=500, window=(90, 30), bias=(200, 500)),
    Case(
        "bias-groups", "heads that share keys add to one gradient, rows of padding",
        B=3, H=6, H_kv=3, n_q=150, n_k=300, keys="left", queries=True, bias=(3, 1, 150, 300),
    ),
    Case("bias-heads-share", "more heads than are added at once", H=6, n_q=150, n_k=200, causal=True, bias=(150, 200)),
    Case("bias-keys", "one row for all queries", n_q=50, n_k=130, bias=(2, 1, 1, 130), keys="holes"),
    Case("bias-keys-long", "blocks of queries add to it", H=4, H_kv=2, n_q=300, n_k=90, bias=(4, 1, 90), causal=True),
    Case("bias-queries", "one entry for all keys", n_q=50, n_k=130, bias=(2, 50, 1), causal=True, q_offset=80),
    Case("bias-heads", "one entry for all of a head", n_q=50, n_k=130, bias=(2, 1, 1), window=(20, 20)),
    Case("bias-one-key", "a row of one", n_q=40, n_k=1, bias=(2, 2, 40, 1)),
    Case("bias-decode", "one query", H=4, H_kv=1, n_q=1, n_k=200, bias=(2, 4, 1, 200), keys="left"),
    Case("bias-scales", "the sign and the size of scale", n_q=40, scale=-7.0, bias=(2, 2, 40, 40), causal=True),
    Case("bias-zero-scale", "nothing but the bias", n_q=40, scale=0.0, bias=(2, 40, 40), keys="holes"),
    Case("bias-dropout", "the gradient of dropped weights", n_q=70, bias=(2, 70, 70), dropout_p=0.3, keys="holes"),
    Case("alibi-positions", "distances to both sides", H=4, H_kv=2, n_q=50, n_k=90, q_offset=(40, -7), alibi=True),
    Case("alibi-chunks", "slopes sum over chunks", H=2, n_q=90, n_k=300, D=256, q_offset=99, keys="holes", alibi=True),
    Case("alibi-one-head", "dq apart from dk and dv", B=1, H=1, n_q=200, n_k=400, causal=True, alibi=True),
    Case(
        "alibi-segments", "distances in the document, beside a bias",
        n_q=90, n_k=70, segment_ids=True, q_offset=3, alibi=True, bias=(70,),
    ),
    Case("softcap-holes", "a bound on both sides", H=4, H_kv=2, n_q=70, n_k=90, D=33, keys="holes", softcap=0.7),
    Case("softcap-decode", "one query", H=4, H_kv=2, n_q=1, n_k=50, softcap=0.7),
    Case("softcap-chunks", "over chunks", B=1, H=2, H_kv=1, n_q=40, n_k=500, D=256, keys="left", softcap=2.0),
    Case("softcap-one-head", "dq apart from dk and dv", B=1, H=1, n_q=200, n_k=500, window=(90, 30), softcap=1.0),
    Case("softcap-scales", "the sign and the size of scale", n_q=70, scale=-1.0, softcap=8.0),
    Case(
        "softcap-bias", "dbias and dslope are of the score, dq and dk of the product",
        H=8, n_q=50, n_k=70, softcap=1.5, bias=(50, 70), alibi=True, dropout_p=0.2, keys="holes",
    ),
    Case("sinks-holes", "rows of padding", B=3, H=4, H_kv=2, n_q=70, n_k=90, keys="holes", queries=True, sinks=True),
    Case("sinks-decode", "parts of keys", H=4, H_kv=2, n_q=1, n_k=1300, keys="none", sinks=True),
    Case("sinks-one-group", "dq apart from dk and dv", B=1, H=4, H_kv=1, n_q=200, n_k=500, sinks=True, dropout_p=0.3),
    Case("sinks-large-scores", "an lse that is refined", n_q=70, n_k=90, scale=70.0, sinks=True, causal=True),
)  # fmt: skip
MASKED = (
    Case("segments-long", "documents of several blocks", B=3, H=4, H_kv=2, n_q=300, n_k=500, segment_ids=True),
    Case(
        "segments-window", "positions in the document",
        n_q=200, n_k=170, segment_ids=True, window=(30, 9), q_offset=5,
    ),
    Case("segments-holes", "padding inside of documents", n_q=90, n_k=110, segment_ids=True, keys="holes", causal=True),
    Case(
        "dense-holes", "rows of a mask are gathered",
        B=3, H=4, H_kv=2, n_q=150, n_k=130, dense=True, keys="holes", queries=True, window=(90, 50),
    ),
    Case("dense-decode", "one query, and gaps", H=4, H_kv=2, n_q=1, n_k=700, dense=True),
    Case("dense-segments", "gaps of both kinds", n_q=90, n_k=110, segment_ids=True, dense=True, causal=True),
    Case("dense-dropout", "the mask comes before dropout", n_q=90, n_k=110, dense=True, dropout_p=0.3),
    Case("dense-bias-alibi", "all that meets the scores", H=8, n_q=80, n_k=110, dense=True, bias=(80, 110), alibi=True),
)  # fmt: skip


@pytest.fixture(params=[name for name in CAPABILITIES if name in build.CPU.load().build_info()["runs_here"]])
def capability(request, monkeypatch) -> str:
    """An instruction set that the environment asks for."""
    monkeypatch.setenv("FASTATTN_CPU_CAPABILITY", request.param)
    return request.param


@pytest.mark.parametrize("capability", CAPABILITIES, indirect=True)
def test_environment_lowers_the_instruction_set(capability):
    """Where this machine lacks what it asks for, the next one below is used."""
    info = build.CPU.load().build_info()
    below = info["compiled_for"][info["compiled_for"].index(capability) :]
    assert cpu.capability() == next(name for name in below if name in info["runs_here"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [5, 8, 40, 72])
def test_what_stands_behind_a_row_is_not_read(head_dim, dtype):
    """The last vector of a row may hold fewer elements than the registers, which NaN comes after."""
    q, *of_keys = (torch.randn(1, 2, n, head_dim).to(dtype) for n in (1, 50, 50))
    cut_out = [torch.full_like(x, math.nan).repeat(1, 1, 1, 2) for x in of_keys]
    for x, larger in zip(of_keys, cut_out, strict=True):
        larger[..., :head_dim] = x
    o = fastattn.attention(q, *(larger[..., :head_dim] for larger in cut_out), backend="cpu")
    assert torch.equal(o, fastattn.attention(q, *of_keys, backend="cpu"))


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm lists what the module asks for")
def test_the_module_takes_of_torch_what_every_torch_has():
    listed = subprocess.run(["nm", "-D", "-u", build.CPU.load().__file__], check=True, capture_output=True, text=True)
    names = {line.split()[-1] for line in listed.stdout.splitlines()}
    of_torch = {name for name in names if re.search("torch|^_ZNK?(2at|3c10)", name)}
    assert of_torch == {"torch_parallel_for", "torch_get_num_threads"}


X, SPEC = torch.zeros(2, 4, 5, 8), Spec(Mask(), 1.0)
LSE = torch.zeros(2, 4, 5)
WITHOUT_SUMS = (None,) * 6
DROPPING, PLACES = replace(SPEC, dropout_p=0.5, seed=torch.tensor(0)), torch.zeros(9, dtype=torch.int32)


@pytest.mark.parametrize(
    ("function", "arguments", "error", "message"),
    [
        ("forward", (X, X, X), TypeError, "must have 4 arguments, got 3"),
        ("forward", ("q", X, X, SPEC), TypeError, "q must be a Tensor, got <class 'str'>"),
        ("forward", (X[0], X, X, SPEC), ValueError, "q must be [B, H, N, D], got [4, 5, 8]"),
        ("forward", (X, X[:, :3], X, SPEC), ValueError, "k must be [B, H_kv, n_k, D] like q, where H_kv divides H"),
        ("forward", (X, X, X[:, :, :3], SPEC), ValueError, "v must be [2, 4, 5, 8], got [2, 4, 3, 8]"),
        ("forward", (X, X.half(), X, SPEC), ValueError, "k and v must be float32 like q, got float16 and float32"),
        (
            "forward",
            (X.double(), X, X, SPEC),
            NotImplementedError,
            "q must be float32, bfloat16 or float16, got float64",
        ),
        ("forward", (X.to_sparse(), X, X, SPEC), ValueError, "q must be dense on the CPU, got torch.sparse_coo on cpu"),
        ("forward", (X.to("meta"), X, X, SPEC), ValueError, "q must be dense on the CPU, got torch.strided on meta"),
        ("forward", (X, X, torch._efficientzerotensor(X.shape), SPEC), ValueError, "v must be a Tensor with memory of"),
        ("forward", (X, X, X, None), AttributeError, "no attribute 'softcap'"),
        ("forward", (X, X, X, replace(SPEC, dropout_p=0.5)), ValueError, "seed must be one int64 where dropout_p is"),
        ("forward", (X, X, X, replace(DROPPING, places=PLACES[1:])), ValueError, "places must be [9], got [8]"),
        ("forward", (X, X, X, replace(DROPPING, places=PLACES[None])), ValueError, "places must be [9], got [1, 9]"),
        (
            "weights",
            (X, X, None, replace(DROPPING, places=PLACES.long()), X),
            ValueError,
            "places must be int32, got int64",
        ),
        (
            "forward",
            (X, X, X, replace(SPEC, bias=torch.zeros(3, 5))),
            ValueError,
            "bias must broadcast to [2, 4, 5, 5]",
        ),
        ("forward", (X, X, X, replace(SPEC, sinks=torch.zeros(3))), ValueError, "sinks must be [4], got [3]"),
        (
            "backward",
            (X, None, X, X, X, X[:1], LSE, SPEC, (True,) * 3, *WITHOUT_SUMS),
            ValueError,
            "o must be [2, 4, 5, 8]",
        ),
        (
            "backward",
            (X, None, X, X, X, X, LSE[0], SPEC, (True,) * 3, *WITHOUT_SUMS),
            ValueError,
            "lse must be [2, 4, 5]",
        ),
        (
            "backward",
            (X, LSE.half(), X, X, X, X, LSE, SPEC, (True,) * 3, *WITHOUT_SUMS),
            ValueError,
            "dlse must be float32",
        ),
        ("backward", (X, None, X, X, X, X, LSE, SPEC, [True], *WITHOUT_SUMS), SystemError, "bad argument"),
        (
            "backward",
            (X, None, X, X, X, X, LSE, SPEC, (True,) * 3, *WITHOUT_SUMS[:4], X, LSE),
            ValueError,
            "d_weights must broadcast to [2, 4, 5, 5], got [2, 4, 5, 8]",
        ),
        (
            "backward",
            (X, None, X, X, X, X, LSE, SPEC, (True,) * 3, *WITHOUT_SUMS[:4], X[..., :5], LSE[0]),
            ValueError,
            "the sums of d_weights must be [2, 4, 5]",
        ),
        ("weights", (X, X, None, SPEC, X), ValueError, "weights must be [2, 4, 5, 5], got [2, 4, 5, 8]"),
        ("weights", (X, X, None, SPEC, X[..., :5].half()), ValueError, "weights must be float32, got float16"),
        ("received", (X, X, SPEC, LSE.int()), ValueError, "the sums must be contiguous and float32, got int32"),
        ("top_keys", (X, X, SPEC, X, X), ValueError, "keys must be contiguous and int64, got float32"),
    ],
)
def test_the_binding_refuses_what_does_not_fit_and_keeps_no_reference(function, arguments, error, message):
    own = [x for x in arguments if x is not None]  # others take references to None, and drop theirs
    before = [sys.getrefcount(x) for x in own]
    for _ in range(3):
        with pytest.raises(error, match=re.escape(message)):
            getattr(build.CPU.load(), function)(*arguments)
    assert [sys.getrefcount(x) for x in own] == before


def test_the_binding_keeps_no_reference_to_what_it_reads_and_returns():
    q, k, v, do = (torch.randn(2, 4, 5, 8) for _ in range(4))
    mask = Mask(segment_ids=(torch.zeros(2, 5).long(),) * 2, dense=torch.ones(5, 5, dtype=torch.bool))
    spec = Spec(mask, 1.0, bias=torch.zeros(5, 5), alibi_slopes=torch.ones(4).double(), sinks=torch.zeros(4).half())
    terms, with_gradient = (mask, None, spec.bias, None, spec.alibi_slopes, spec.sinks), q.clone().requires_grad_()
    module = build.CPU.load()
    o, lse = module.forward(q, k, v, spec)
    tensors = (q, k, v, do, o, lse, spec.bias, spec.alibi_slopes, spec.sinks, mask.dense, *mask.segment_ids, mask, spec)
    before = [sys.getrefcount(x) for x in (*tensors, None)]
    for _ in range(100):
        results = (
            *module.forward(q, k, v, spec),
            *module.backward(
                do, None, q, k, v, o, lse, spec, (True, False, True), *(None,) * 4, spec.bias, torch.zeros_like(lse)
            ),
            *module.attend(q, k, v, *terms, False, None)[:3],
            *module.attend(q, k, v, *terms, False, True)[:3],
            *module.attend(with_gradient, k, v, *terms, False, True)[:3],
            *module.attend_backward(do, None, q, k, v, o, lse, *terms, (True, False, True)),
        )
        assert all(x is None or sys.getrefcount(x) == 3 for x in results)  # of the tuple, the loop and the call
    del results
    assert all(abs(sys.getrefcount(x) - n) < 50 for x, n in zip((*tensors, None), before, strict=True))


def of_float8(k: Tensor, v: Tensor, decodes: bool) -> Tensor:
    """o [256, D] of keys that are uint8 [256, 256] in the bits of float8_e4m3fn, and of values [256, D], of which each
    query gives all of its weight to one: in a step of decoding, or in a prompt."""
    k_pages, v_pages = (x.view(torch.float8_e4m3fn).view(16, 16, 1, -1) for x in (k, v))
    table, lengths = torch.arange(16).expand(256 if decodes else 1, 16), torch.tensor([256])
    return fastattn.attention_paged(
        100 * torch.eye(256)[:, None], k_pages, v_pages, table, lengths.expand(len(table)),
        None if decodes else torch.tensor([0, 256]), causal=False, scale=1.0,
        k_scales=torch.full((16, 16, 1), 4.0), v_scales=torch.full((16, 16, 1), 0.25),
    )[:, 0]  # fmt: skip


KEYS_OF_FLOAT8 = torch.eye(256).to(torch.float8_e4m3fn).view(torch.uint8)


@pytest.mark.parametrize(("D", "decodes"), [(1, True), (19, False), (64, True)])
def test_every_number_of_float8_is_read_as_torch_reads_it(D, decodes, capability):
    numbers = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    v = numbers[(torch.arange(256)[:, None] + torch.arange(D)) % len(numbers)]
    for flush in (False, True):  # subnormal numbers of fp32
        torch.set_flush_denormal(flush)
        try:
            o = of_float8(KEYS_OF_FLOAT8, v, decodes)
        finally:
            torch.set_flush_denormal(False)
        assert torch.equal(o, 0.25 * v.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("decodes", [True, False], ids=["decoding", "prompt"])
def test_what_is_no_number_of_float8_is_read_as_nan(decodes, capability):
    v = torch.zeros(256, 48, dtype=torch.uint8)
    v[100, 7], v[200, 40] = 0x7F, 0xFF
    is_nan = of_float8(KEYS_OF_FLOAT8, v, decodes).isnan()
    assert is_nan.all(0).nonzero().flatten().tolist() == is_nan.any(0).nonzero().flatten().tolist() == [7, 40]
    for code in (0x7F, 0xFF):
        k = KEYS_OF_FLOAT8.clone()
        k[100, 7] = code
        assert of_float8(k, torch.zeros_like(v), decodes).isnan().all()


@pytest.mark.parametrize("wrong", ["avx", "AVX2", "1"])
def test_unknown_instruction_set_is_refused(monkeypatch, wrong):
    monkeypatch.setenv("FASTATTN_CPU_CAPABILITY", wrong)
    message = f"FASTATTN_CPU_CAPABILITY must be one of .*'{CAPABILITIES[-1]}', got '{wrong}'"
    with pytest.raises(ValueError, match=message):
        cpu.capability()
    x = torch.zeros(1, 1, 2, 8)
    with pytest.raises(ValueError, match=message):
        cpu.forward(x, x, x, Spec(Mask(), 1.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*COMPUTED, *DROPPED], ids=str)
@pytest.mark.parametrize("capability", CAPABILITIES[-2:], indirect=True)
def test_lower_instruction_sets_are_right(capability, case, dtype):
    inputs = make_inputs(case, dtype)
    assert_right(inputs, run(inputs, "cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*CHUNKED, *ONE_HEAD, *DROPPED], ids=str)
def test_many_keys_are_right(case, dtype):
    inputs = make_inputs(case, dtype)
    assert_right(inputs, run(inputs, "cpu"))


@pytest.mark.parametrize(("n_q", "factor"), [(1, 1), (2, 1), (3, 1), (3, 5), (40, 5)])
def test_gradients_of_few_queries_by_thousands_of_keys_are_right(n_q, factor):
    case = Case("", "", B=2, H=4, n_q=n_q, n_k=4096, D=64)
    for seed in range(4):
        inputs = make_inputs(case, torch.float32, seed=seed)
        inputs.q *= factor  # by 5 the lse of a row is above 16, which is too rough for its weights
        assert_right(inputs, run(inputs, "cpu"))


@pytest.mark.parametrize("name", ["window", "documents"])
def test_the_gradients_of_one_head_take_no_longer_than_those_of_two(name):
    """Whose queries and runs of documents are to be found once, and not for each chunk of keys of each item."""
    n = 200_000 if name == "window" else 400_000
    documents = (torch.arange(n) // 10)[None]
    mask = Mask(causal=True, window=(64, 0)) if name == "window" else Mask(segment_ids=(documents, documents))

    def seconds(heads: int) -> float:
        q, k, v = (torch.randn(1, heads, n, 16, requires_grad=True) for _ in range(3))
        wanted = (q, k, v) if name == "window" or heads > 1 else (k, v)
        q.requires_grad_(len(wanted) == 3)
        o = fastattn.attention(q, k, v, mask, backend="cpu")
        begin = time.perf_counter()
        torch.autograd.grad(o, wanted, torch.ones_like(o))
        return time.perf_counter() - begin

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        one, two = (min(seconds(heads) for _ in range(2)) for heads in (1, 2))
    finally:
        torch.set_num_threads(threads)
    assert one < 2 * two


def test_what_is_repeated_is_copied_once():
    """A bias for all samples and heads, whose rows are the columns of a matrix."""
    q, bias = torch.ones(8, 8, 64, 1), torch.randn(64, 64)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        fastattn.attention(q, q, q, bias=bias.T.expand(8, 8, 64, 64), backend="cpu")
    largest = max(event.self_cpu_memory_usage for event in profiled.key_averages())
    assert 0 < largest <= 8 * bias.nbytes


def test_large_scores_are_measured_once_for_all_parts_of_backward():
    """An lse above 16 is too rough for weights, so the scores of its query are computed once more."""

    def seconds(factor: float) -> float:
        q, k = torch.randn(1, 1, 32, 256) * factor, torch.randn(1, 1, 16384, 256)
        q.requires_grad_(), k.requires_grad_()
        o = fastattn.attention(q, k, k.detach(), backend="cpu")
        times = []
        for _ in range(5):
            start = time.process_time()
            torch.autograd.grad(o, (q, k), o, retain_graph=True)
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(5) < 4 * seconds(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*ADDED, *MASKED], ids=str)
def test_what_meets_the_scores_is_right(case, dtype, capability):
    inputs = make_inputs(case, dtype)
    assert_right(inputs, run(inputs, "cpu"))


def with_mask(inputs: Inputs, mask: Mask) -> Inputs:
    """The inputs with another mask, and NaN in what nobody may read."""
    inputs.mask = mask
    queries, keys = mask.readable_queries(), mask.readable_keys()
    for x, rows in ((inputs.q, queries), (inputs.k, keys), (inputs.v, keys), (inputs.do, queries)):
        if rows is not None:
            x.masked_fill_(~rows[:, None, :, None], math.nan)
    return inputs


def random_mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.6


DENSE = {
    "keys": random_mask(391),
    "queries": random_mask(70, 1),
    "heads": random_mask(4, 1, 1),
    "all": torch.tensor(True),
    "nothing": torch.tensor(False),
    "samples": random_mask(2, 1, 1, 391),
    "every": random_mask(2, 4, 70, 391),
    "of-heads": random_mask(1, 4, 70, 391),
    "transposed": random_mask(2, 4, 391, 70).mT,
    "sliced": random_mask(2, 1, 70, 820)[..., 7:789:2],
    "triangle": torch.ones(70, 391).tril(320).bool(),
    "bands": torch.stack([torch.ones(70, 391).tril(20 * h + 290).triu(5 * h - 40).bool() for h in range(4)]),
    "one-gap": torch.ones(70, 391).bool() & (torch.arange(391) != 64),
    "gap-near-the-end": torch.ones(70, 391).bool() & (torch.arange(391) != 389),
    "blocks": random_mask(2, 4, 5, 11).repeat_interleave(16, 2).repeat_interleave(40, 3)[:, :, 3:73, 5:396],
    "tiles": random_mask(2, 4, 5, 25).repeat_interleave(16, 2).repeat_interleave(16, 3)[:, :, :70, :391],
    "late": (torch.arange(391) > 380) & (torch.arange(70)[:, None] < 40),
}


@pytest.mark.parametrize("n_q", [70, 3, 1])  # by blocks of queries, by dot products
@pytest.mark.parametrize("shape", DENSE)
def test_dense_masks_of_any_shape_are_right(shape, n_q, capability):
    case = Case("", "", H=4, H_kv=2, n_q=n_q, n_k=391, keys="holes")
    inputs = make_inputs(case, torch.float32)
    dense = DENSE[shape]
    if dense.dim() > 1 and dense.shape[-2] > 1:
        dense = dense[..., 70 - n_q :, :]
    inputs = with_mask(inputs, replace(inputs.mask, dense=dense, causal=True, q_offset=330))
    assert_right(inputs, run(inputs, "cpu"))


WITH_WEIGHTS = (
    Case("few-keys", "one pass", n_q=70, n_k=90),
    Case("few-keys-padded", "and rows of padding", B=3, H=4, H_kv=2, n_q=70, n_k=90, D=33, keys="holes", queries=True),
    Case("few-keys-window", "keys that few queries see", n_q=120, n_k=128, window=(13, 6), sinks=True, layout="BNHD"),
    Case("few-keys-nothing", "queries that see nothing", n_q=40, n_k=50, causal=True, q_offset=-7, keys="none"),
    Case("more-keys", "two passes", n_q=70, n_k=129, keys="left"),
    Case("few-queries", "two passes, the first as in decoding", n_q=3, n_k=90, causal=True, q_offset=80),
)


@pytest.mark.parametrize("average_heads", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", WITH_WEIGHTS, ids=str)
def test_output_and_weights_of_a_short_call_are_right(case, dtype, average_heads, capability):
    inputs = make_inputs(case, dtype)
    scale, sinks = inputs.options["scale"], inputs.options.get("sinks")
    call = (inputs.q, inputs.k, inputs.v, inputs.mask, scale, None, None, None, sinks)
    with torch.no_grad():
        (o, *_), (o_beside, _, weights, _) = (build.CPU.load().attend(*call, True, x) for x in (None, average_heads))
        naive, right = (
            fastattn.attention_weights(
                inputs.q.to(of), inputs.k.to(of), inputs.mask, scale=scale, sinks=sinks, average_heads=average_heads,
                backend="reference",
            )
            for of in (dtype, torch.float64)
        )  # fmt: skip
    assert torch.equal(o_beside, o)
    error = compare("weights", weights, naive, right)
    assert error.right, str(error)


@pytest.mark.parametrize("n", [96, 384])  # a single block of keys, and several
def test_keys_that_a_mask_hides_from_a_block_of_queries_are_not_read(n, capability):
    """NaN stands there, which a weight of 0 would not hide, and keys that are seen on both sides of it."""
    hidden = slice(n // 3, 2 * n // 3)
    dense = torch.ones(n, n, dtype=torch.bool)
    dense[:, hidden] = False
    dense[hidden] = False
    tensors = torch.randn(4, 1, 1, n, 16, generator=torch.Generator().manual_seed(0))
    tensors[:, :, :, hidden] = math.nan
    *leaves, do = (x.clone().requires_grad_() for x in tensors)
    o = fastattn.attention(*leaves, Mask(dense=dense), backend="cpu")
    for x in (o, *torch.autograd.grad(o, leaves, do)):
        assert x.isfinite().all()
        assert (x[:, :, hidden] == 0).all()


@pytest.mark.parametrize("n_q", [150, 2])
@pytest.mark.parametrize("n_documents", [1, 3, 40])
@pytest.mark.parametrize("position", [{}, {"causal": True}, {"window": (4, 2), "q_offset": 3}], ids=str)
def test_documents_in_pieces_are_right(position, n_documents, n_q, capability):
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(-1, n_documents, (2, n), generator=generator) * 2**33 for n in (n_q, 130)]
    ids[1][:, 40:80] = ids[1][:, 40:41]  # a run
    inputs = make_inputs(Case("", "", H=4, H_kv=2, n_q=n_q, n_k=130), torch.float32)
    inputs = with_mask(inputs, Mask(segment_ids=tuple(ids), **position))
    assert_right(inputs, run(inputs, "cpu"))


def close_to_exact(inputs: Inputs) -> None:
    """Where the plain formula gives NaN, so that there is no budget."""
    expected = exact(inputs)
    for name, value in run(inputs, "cpu").items():
        torch.testing.assert_close(
            value.double(), expected[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_a_block_of_queries_that_see_nothing_between_others_of_their_document(capability):
    """Queries of a document without keys stand among those of another one, whose keys are a list with gaps."""
    inputs = make_inputs(Case("blind", "", B=1, n_q=200, n_k=8), torch.float32)
    ids = torch.zeros(1, 200, dtype=torch.int32)
    ids[:, 1:-1] = 5
    keys = torch.arange(8)[None] != 1
    mask = Mask(segment_ids=(ids, torch.zeros(1, 8, dtype=torch.int32)), real_keys=keys)
    inputs = replace(inputs, mask=mask)
    assert_right(inputs, run(inputs, "cpu"))


@pytest.mark.parametrize("spoiled", [math.nan, math.inf])
@pytest.mark.parametrize("case", ["holes", "causal", "dense", "segment_ids"])
def test_hidden_entries_of_a_bias_change_nothing(case, spoiled, capability):
    fields = {"holes": {"keys": "holes", "queries": True}, "causal": {"causal": True, "q_offset": 7}}
    hidden_by = fields.get(case, {case: True})
    inputs = make_inputs(Case("", "", H=4, H_kv=2, n_q=70, n_k=90, bias=(2, 4, 70, 90), **hidden_by), torch.float32)
    clean = run(inputs, "cpu")
    inputs.options["bias"].masked_fill_(~inputs.mask.keep(70, 90), spoiled)
    for name, value in run(inputs, "cpu").items():
        assert torch.equal(value, clean[name]), name


def test_visible_nan_in_a_bias_stays_in_its_row(capability):
    inputs = make_inputs(Case("", "", n_q=70, n_k=90, bias=(2, 2, 70, 90)), torch.float32)
    inputs.options["bias"][1, 0, 37, 65] = math.nan
    o = run(inputs, "cpu")["o"]
    assert o[1, 0, 37].isnan().all()
    assert o.isnan().any(-1).sum() == 1


def test_minus_infinity_in_a_bias_hides(capability):
    inputs = make_inputs(Case("", "", n_q=70, n_k=90, bias=(2, 1, 70, 90), keys="holes"), torch.float32)
    inputs.options["bias"].masked_fill_(random_mask(70, 90), -math.inf)
    inputs.options["bias"][0, 0, 9] = -math.inf  # a query that sees nothing
    close_to_exact(inputs)
    assert (run(inputs, "cpu")["o"][0, :, 9] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lowest_number_in_a_bias_hides_beside_others_and_is_equal_alone(dtype, capability):
    """As masks of other libraries have it: a row of nothing else gives the mean of the values."""
    inputs = make_inputs(Case("", "", n_q=40, n_k=50, bias=(1, 1, 40, 50)), dtype)
    bias, lowest = inputs.options["bias"], torch.finfo(dtype).min
    bias.masked_fill_(random_mask(40, 50), lowest)
    bias[..., 9, :] = lowest
    actual, expected = run(inputs, "cpu"), exact(inputs)
    assert actual["o"].isfinite().all()
    rows = torch.arange(40) != 9
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    for name in ("o", "dq", "dk", "dv", "dbias"):
        torch.testing.assert_close(actual[name].double(), expected[name], **close, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(actual["lse"][..., rows].double(), expected["lse"][..., rows], **close)
    assert (actual["lse"][..., 9] < -1e37).all()


SEVERAL = [case for case in ADDED if case.name in ("bias-holes", "bias-shared", "bias-keys", "alibi-segments")]


@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_bias_of_any_layout_and_dtype(case, capability):
    """The same bits from transposed and sliced memory, and from wider dtypes with the same numbers."""
    inputs = make_inputs(case, torch.bfloat16)
    expected = run(inputs, "cpu")
    bias = inputs.options["bias"]
    wide = torch.full((*bias.shape[:-1], 3 * bias.shape[-1] + 2), math.nan, dtype=bias.dtype)
    wide[..., 1:-1:3] = bias
    layouts = [wide[..., 1:-1:3], bias.float(), bias.double()]
    for other in layouts + ([bias.mT.contiguous().mT] if bias.dim() > 1 else []):
        inputs.options["bias"] = other
        for name, value in run(inputs, "cpu").items():
            assert torch.equal(value if name != "dbias" else value.bfloat16(), expected[name]), name


def test_bias_may_be_a_scalar(capability):
    inputs = make_inputs(Case("", "", n_q=40, n_k=50, bias=(), keys="right"), torch.float32)
    scalar = run(inputs, "cpu")
    inputs.options["bias"] = inputs.options["bias"].expand(2, 2, 40, 50)
    for name, value in run(inputs, "cpu").items():
        if name == "dbias":
            torch.testing.assert_close(value.sum(), scalar[name], rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(value, scalar[name]), name


ALONE = (
    "bias-shared",
    "bias-groups",
    "bias-heads-share",
    "bias-keys-long",
    "bias-one-head",
    "alibi-segments",
    "softcap-bias",
    "sinks-holes",
)


@pytest.mark.parametrize("case", [CHUNKED[2], *(case for case in ADDED if case.name in ALONE)], ids=str)
def test_gradients_come_alone_too(case):
    inputs = make_inputs(case, torch.float32)
    q, k, v, spec = inputs.q, inputs.k, inputs.v, inputs.spec()
    o, lse = cpu.forward(q, k, v, spec)
    learned = tuple(x is not None for x in (spec.bias, spec.alibi_slopes, spec.sinks))
    every = cpu.backward(inputs.do, inputs.dlse, q, k, v, o, lse, spec, (True,) * 3 + learned)
    for number in (1, 2, 7):
        torch.set_num_threads(number)
        for wanted in ((False,) * 3, (True, False, False), (False, True, True)):
            output_mask = wanted + learned
            some = cpu.backward(inputs.do, inputs.dlse, q, k, v, o, lse, spec, output_mask)
            for is_wanted, gradient, complete in zip(output_mask, some, every, strict=True):
                assert torch.equal(gradient, complete) if is_wanted else gradient is None


def capped_scores(products: torch.Tensor, softcap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The capped scores and their derivatives: a query that sees one key has its score for an lse."""
    q = products.reshape(1, 1, -1, 1)
    k = torch.ones(1, 1, 1, 1, dtype=q.dtype)
    spec = Spec(Mask(), 1.0, softcap=softcap)
    o, lse = cpu.forward(q, k, k, spec)
    dq = cpu.backward(None, torch.ones_like(lse), q, k, k, o, lse, spec, (True,) + (False,) * 5)[0]
    return lse.flatten(), dq.flatten()


@pytest.mark.parametrize("softcap", [1e-3, 1.0, 50.0])
def test_softcap_is_exact_to_the_relative_error(softcap, capability):
    exponents = torch.linspace(-20, 2, 4000, dtype=torch.float64)
    products = (10**exponents * softcap).float()
    products = torch.cat([products, -products, torch.tensor([0.0, math.inf, -math.inf])])
    scores, derivatives = capped_scores(products, softcap)
    exact = products.double() / softcap
    torch.testing.assert_close(scores.double(), softcap * exact.tanh(), rtol=5e-7, atol=0)
    # Near the bound the derivative exp(-2 |x|) has the rounding error of x, times 2 |x|.
    torch.testing.assert_close(derivatives.double(), 1 / exact.cosh() ** 2, rtol=2e-5, atol=1e-37)


@pytest.mark.parametrize("softcap", [1e-300, 1e-45, 1e45, 1e300])
def test_any_softcap_is_a_number(softcap, capability):
    products = torch.tensor([0.0, 1e-3, 2.0, -5.0])
    scores, derivatives = capped_scores(products, softcap)
    bound = products if softcap > 1 else torch.zeros(4)
    torch.testing.assert_close(scores, bound)
    torch.testing.assert_close(derivatives, torch.ones(4) if softcap > 1 else torch.tensor([1.0, 0.0, 0.0, 0.0]))


@pytest.mark.parametrize("n_q", [1, 40])
@pytest.mark.parametrize("above", [0.0, 100.0, 1e4, 1e30])
def test_sinks_far_from_the_scores(above, n_q, capability):
    """Whichever is larger leaves the other no weight, without overflow."""
    inputs = make_inputs(Case("", "", n_q=n_q, n_k=70, sinks=True, causal=True, q_offset=3), torch.float32)
    inputs.options["sinks"] = torch.tensor([above, -above])
    assert_right(inputs, run(inputs, "cpu"))


@pytest.mark.parametrize("n_q", [1, 40])
def test_a_sink_of_minus_infinity_is_none(n_q, capability):
    inputs = make_inputs(Case("", "", n_q=n_q, n_k=70, sinks=True, keys="holes"), torch.float32)
    inputs.options["sinks"] = torch.full((2,), -math.inf)
    outputs = run(inputs, "cpu")
    assert (outputs.pop("dsinks") == 0).all()
    inputs.options.pop("sinks")
    for name, value in run(inputs, "cpu").items():
        assert torch.equal(value, outputs[name]), name


@pytest.mark.parametrize("n_q", [1, 40])
def test_a_sink_of_infinity_takes_all(n_q, capability):
    """Of queries that see something, from whose lse it takes the whole gradient; the others do not see it either."""
    inputs = make_inputs(Case("", "", n_q=n_q, n_k=70, sinks=True, causal=True, q_offset=3), torch.float32)
    inputs.options["sinks"] = torch.full((2,), math.inf)
    inputs.mask = replace(inputs.mask, real_keys=torch.tensor([[True], [False]]).expand(2, 70))
    outputs = run(inputs, "cpu")
    assert (outputs.pop("lse") == torch.tensor([math.inf, -math.inf])[:, None, None]).all()
    torch.testing.assert_close(outputs.pop("dsinks"), inputs.dlse[0].sum(-1))
    for name, value in outputs.items():
        assert (value == 0).all(), name


@pytest.mark.parametrize("case", [*CHUNKED, *ONE_HEAD, *DROPPED, *ADDED, *MASKED], ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(case, capability):
    """One thread takes all gradients of a head together; more threads may take dq apart from dk and dv."""
    inputs = make_inputs(case, torch.float32)
    torch.set_num_threads(1)
    alone = run(inputs, "cpu")
    for number in (2, 3, 7):
        torch.set_num_threads(number)
        for name, value in run(inputs, "cpu").items():
            assert torch.equal(alone[name], value), f"{name} with {number} threads"


def results(inputs: Inputs, spec: Spec, wanted: tuple[bool, ...] = (True,) * 3) -> tuple[torch.Tensor | None, ...]:
    """o, lse, dq, dk and dv, None for gradients that are not wanted."""
    q, k, v = inputs.q, inputs.k, inputs.v
    o, lse = cpu.forward(q, k, v, spec)
    return o, lse, *cpu.backward(inputs.do, inputs.dlse, q, k, v, o, lse, spec, wanted + (False,) * 3)[:3]


class Largest(TorchDispatchMode):
    """Notes how many elements the largest tensor has that comes out of an operation."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.untyped_storage().size() // result.element_size())
        return result


@pytest.mark.parametrize("shape", [(1, 1, 300, 340), (1, 12, 1, 340), (3, 1, 300, 1), (340,), (3, 1, 1, 1)], ids=str)
def test_gradient_of_a_bias_is_summed_in_its_own_size(shape):
    torch.set_num_threads(1)  # each has scratch memory of its own
    inputs = make_inputs(Case("", "", B=3, H=12, n_q=300, n_k=340, sinks=True, bias=shape), torch.float32)
    q, k, v, spec = inputs.q, inputs.k, inputs.v, inputs.spec()
    o, lse = cpu.forward(q, k, v, spec)
    with Largest() as largest:
        cpu.backward(inputs.do, inputs.dlse, q, k, v, o, lse, spec, (False, False, False, True, False, False))
    assert 0 < largest.elements <= 4 * 300 * 340  # not a table for each head, let alone each sample


lengths = st.integers(0, 40)
limits = st.none() | st.integers(0, 45)


@settings(max_examples=400, deadline=None)
@given(n_q=lengths, n_k=lengths, causal=st.booleans(), window=st.tuples(limits, limits), data=st.data())
def test_keep_in_cpp_is_keep_in_python(n_q, n_k, causal, window, data):
    B, H = 2, 2

    def table(values: st.SearchStrategy, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        n = math.prod(shape)
        return torch.tensor(data.draw(st.lists(values, min_size=n, max_size=n)), dtype=dtype).reshape(shape)

    def flags(n: int) -> torch.Tensor | None:
        return table(st.booleans(), (B, n), torch.bool) if data.draw(st.booleans()) else None

    def documents(n: int) -> torch.Tensor:
        ids = table(st.integers(-1, 4), (B, n), torch.int32)
        return ids.sort(-1).values if data.draw(st.booleans()) else ids

    def dense() -> torch.Tensor:
        """Rows with few changes, so that some have gaps and some have none."""
        shape = [data.draw(st.sampled_from((1, n))) for n in (B, H, n_q, n_k)]
        changes = table(st.integers(0, 9), (*shape[:-1], 3), torch.int64)
        return (torch.arange(shape[-1]) >= 5 * changes[..., None]).sum(-2) % 2 == 1

    starts = st.integers(-50, 50)
    mask = Mask(
        causal=causal,
        q_offset=data.draw(starts | st.sampled_from(((B,), (B, n_q))).map(lambda s: table(starts, s, torch.int64))),
        window=window,
        real_keys=flags(n_k),
        real_queries=flags(n_q),
        segment_ids=(documents(n_q), documents(n_k)) if data.draw(st.booleans()) else None,
        dense=dense() if n_q * n_k and data.draw(st.booleans()) else None,
    )
    q, k = torch.empty(B, H, n_q, 1), torch.empty(B, H, n_k, 1)
    for block in (1, 7, 32):
        assert torch.equal(_keep_in_cpp(q, k, mask, block), mask.keep(n_q, n_k).expand(B, H, n_q, n_k))


def _keep_in_cpp(q, k, mask, block):
    result = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.bool)
    build.CPU.load().keep(q, k, Spec(mask, 1.0), block, result)
    return result


@pytest.mark.parametrize("q_offset", [2**61, -(2**61)])
@pytest.mark.parametrize("window", [(None, None), (2**61, 2**61), (3, 3)])
@pytest.mark.parametrize("causal", [True, False])
def test_far_positions_do_not_overflow(q_offset, window, causal):
    mask = Mask(causal=causal, q_offset=q_offset, window=window)
    x = torch.empty(1, 1, 5, 1)
    assert torch.equal(_keep_in_cpp(x, x, mask, 4), mask.keep(5, 5))


@pytest.mark.parametrize("n_q", [1, 40])
@pytest.mark.parametrize("q_offset", [2**32, -(2**33)])
def test_distances_to_far_positions(q_offset, n_q, capability):
    """They decide beside a sink, though among the keys they are all about equal."""
    inputs = make_inputs(Case("", "", n_q=n_q, n_k=70, alibi=True, sinks=True, q_offset=q_offset), torch.float32)
    inputs.options["alibi_slopes"] *= 1e-10
    assert_right(inputs, run(inputs, "cpu"))


@pytest.mark.parametrize(("seed", "counter", "words"), PHILOX_ANSWERS)
def test_philox_in_cpp_gives_the_published_answers(seed, counter, words):
    assert build.CPU.load().philox(seed, *counter) == tuple(words)


def holes(n: int, seed: int) -> torch.Tensor:
    return torch.rand(2, n, generator=torch.Generator().manual_seed(seed)) < 0.5


@pytest.mark.parametrize(
    ("seed", "part"), [(0, False), (7 << 32, False), (-1, False), (-(2**63), False), (2**63 - 1, False), (1, True)]
)
@pytest.mark.parametrize(("n_q", "n_k"), [(37, 131), (70, 33), (1, 3)])
@pytest.mark.parametrize("masked", ["nothing", "causal", "window", "holes", "everything"])
def test_dropout_keeps_what_the_definition_keeps(masked, n_q, n_k, seed, part, capability):
    """With equal scores and values of 0 and 1 the output, and then dv, shows each weight by itself."""
    p, B, H, H_kv, group = 0.4, 2, 6, 2, 3
    padding = {"real_keys": holes(n_k, 1), "real_queries": holes(n_q, 2)}
    mask = {
        "nothing": Mask(),
        "causal": Mask(causal=True, q_offset=2),
        "window": Mask(window=(5, 4), q_offset=torch.tensor([3, 30])),
        "holes": Mask(**padding),
        "everything": Mask(causal=True, q_offset=9, window=(50, None), **padding),
    }[masked]
    places = places_of_a_part(n_q, n_k) if part else None
    spec = Spec(mask, 1.0, dropout_p=p, seed=torch.tensor(seed), places=places)
    visible = mask.keep(n_q, n_k).expand(B, H, n_q, n_k)
    kept = visible & spec.dropout_keep(B, H, n_q, n_k)
    expected = kept / ((1 - p) * visible.sum(-1, keepdim=True).clamp(min=1))

    q, k = torch.zeros(B, H, n_q, 5), torch.zeros(B, H_kv, n_k, 5)
    d_v = max(n_k, group * n_q)
    v = torch.eye(n_k, d_v).expand(B, H_kv, n_k, d_v)
    o, lse = cpu.forward(q, k, v, spec)
    assert torch.equal(o[..., :n_k] != 0, kept)
    torch.testing.assert_close(o[..., :n_k], expected)
    torch.testing.assert_close(lse, visible.sum(-1).log())

    do = torch.eye(group * n_q, d_v).unflatten(0, (group, n_q)).repeat(B, H_kv, 1, 1)
    dv = cpu.backward(do, None, q, k, v, o, lse, spec, (True,) * 3 + (False,) * 3)[2]
    weights = dv.mT[:, :, : group * n_q].unflatten(2, (group, n_q)).flatten(1, 2)  # [B, H, n_q, n_k]
    assert torch.equal(weights != 0, kept)
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("p", [0.0, 1e-12])
def test_dropping_nothing_changes_no_bit(p, capability):
    inputs = make_inputs(Case("plain", "", H=4, H_kv=2, n_q=70, n_k=120, D=33, causal=True, q_offset=9), torch.float32)
    spec = inputs.spec()
    dropping = replace(spec, dropout_p=p, seed=torch.tensor(3))
    for plain, dropped in zip(results(inputs, spec), results(inputs, dropping), strict=True):
        assert torch.equal(plain, dropped)


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


@pytest.mark.parametrize("n_q", [1, 20])  # by dot products, by blocks of queries
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_half_passes_unchanged(dtype, n_q, capability):
    """A single key gives its value back: each of the 65536 patterns is read and written once, NaN as some NaN.

    The processor's own bf16 products take subnormal numbers for zero, and so what is subnormal times the weight of the
    one key, which is 2^-10.
    """
    v = every_pattern(dtype).reshape(1, 256, 1, 256)
    x = torch.ones(1, 256, n_q, 8, dtype=dtype)
    o, _ = cpu.forward(x, x[:, :, :1], v, Spec(Mask(), 1.0))
    if dtype == torch.bfloat16 and cpu.capability() in BF16_PRODUCTS:
        v = v.where(v.abs() >= 2**10 * torch.finfo(dtype).tiny, 0 * v)
    v = v.expand_as(o)
    assert torch.equal(o.isnan(), v.isnan())
    assert torch.equal(o.nan_to_num(0.0, math.inf, -math.inf), v.nan_to_num(0.0, math.inf, -math.inf))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_output_is_rounded_once_to_nearest_even(dtype, capability):
    """The mean of two values, exact in fp32 but for its last place, against torch's own rounding."""
    a = every_pattern(dtype).reshape(256, 256)
    b = a.flatten().roll(12345).reshape(256, 256)
    values = torch.stack((a, b), dim=1)[None].nan_to_num(1.0, 2.0, -2.0)  # [1, 256, 2, 256]
    x = torch.zeros(1, 256, 2, 8, dtype=dtype)
    o, _ = cpu.forward(x[:, :, :1], x, values, Spec(Mask(), 1.0))
    mean = (values[:, :, 0].float() + values[:, :, 1].float()) / 2
    assert torch.equal(o[:, :, 0], mean.to(dtype))


@pytest.mark.parametrize("payload", [0x7FC00000, 0x7F800001, 0x7FC00001, 0xFFFFFFFF])
def test_no_nan_is_swallowed(payload, capability):
    """Whatever its bits, and wherever the key lies in the tiles."""
    nan = torch.tensor(payload - 2**32 if payload >= 2**31 else payload, dtype=torch.int32).view(torch.float32)
    n_k = 31
    k = torch.randn(n_k, 1, n_k, 16)
    k[torch.arange(n_k), 0, torch.arange(n_k), 3] = nan
    q, v = torch.randn(n_k, 1, 20, 16), torch.randn(n_k, 1, n_k, 16)
    mask = Mask(causal=True, q_offset=11)
    o, lse = cpu.forward(q, k, v, Spec(mask, 0.25))
    poisoned = mask.keep(20, n_k)[0, 0].T[:, None]  # [n_k, 1, 20]: sample b has its NaN in key b
    assert torch.equal(lse.isnan(), poisoned)
    assert o.isnan().all(-1)[poisoned].all()


@pytest.mark.parametrize("value", [math.inf, -math.inf, 3e38])
def test_infinite_scores_give_what_softmax_gives(value, capability):
    q, k, v = torch.ones(1, 1, 3, 4), torch.ones(1, 1, 50, 4), torch.randn(1, 1, 50, 4)
    k[0, 0, 20, 0] = value
    o, _ = cpu.forward(q, k, v, Spec(Mask(), 0.5))
    torch.testing.assert_close(o, torch.softmax(q @ k.mT * 0.5, -1) @ v, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_q", [1, 5])
def test_a_key_whose_scores_are_minus_infinity_has_no_gradient(n_q, dtype, capability):
    q, k, v = torch.ones(1, 1, n_q, 8), torch.randn(1, 1, 50, 8), torch.randn(1, 1, 50, 8)
    k[0, 0, 20, 3] = -math.inf
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    fastattn.attention(q, k, v, backend="cpu").sum().backward()
    assert (k.grad[0, 0, 20] == 0).all()
    assert (v.grad[0, 0, 20] == 0).all()


def test_rows_with_gaps_are_copied():
    """Transposed inputs and gradients: elements of a row that do not lie side by side."""
    inputs = make_inputs(Case("plain", "", n_q=20, D=24), torch.float32)
    expected = run(inputs, "cpu")
    for name in ("q", "k", "v", "do"):
        setattr(inputs, name, getattr(inputs, name).mT.contiguous().mT)
    for name, value in run(inputs, "cpu").items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is limited as on Linux")
def test_memory_that_a_thread_lacks_is_an_error():
    """PyTorch says only that a thread threw: the mask would hide all."""
    code = """
import re, resource, torch, fastattn
from pathlib import Path
n_k = 1 << 25
q, dense = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, n_k, dtype=torch.bool)
dense[..., 5] = False
fastattn.attention(q, q, q, fastattn.Mask(dense=dense[..., :1]), backend="cpu")
used = 1024 * int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
resource.setrlimit(resource.RLIMIT_AS, (used + n_k, -1))
try:
    fastattn.attention(q, q.expand(1, 1, n_k, 1), q.expand(1, 1, n_k, 1), fastattn.Mask(dense=dense), backend="cpu")
except MemoryError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"


def test_what_is_not_taken_is_said():
    x = torch.zeros(1, 1, 2, 8, dtype=torch.float64)
    assert cpu.unsupported(x, x, x, Spec(Mask(), 1.0)) == ["q must be float32, bfloat16 or float16, got torch.float64"]
    meta = torch.zeros(1, 1, 2, 8, device="meta")
    with pytest.raises(NotImplementedError, match="cpu: q must be on the CPU, got meta"):
        fastattn.attention(meta, meta, meta, backend="cpu")


def thread_times(*runs: Callable[[], object], repeats: int = 7) -> list[float]:
    """Seconds that this thread computes in each run, the least of several: in turn, so that each has quiet moments."""
    torch.empty(31 << 20, dtype=torch.uint8)  # glibc keeps what is smaller, so that no run has to get pages of memory
    times = [[] for _ in runs]
    for compute, of_run in [*zip(runs, times, strict=True)] * (repeats + 1):
        start = time.thread_time()
        compute()
        of_run.append(time.thread_time() - start)
    return [min(of_run[1:]) for of_run in times]


def runs_of_documents(number: int, length: int, heads: int, packed: bool, causal: bool) -> list[Callable[[], object]]:
    """Forward and backward over documents of equal length, packed or as a batch."""
    mask = Mask(causal=causal)
    shape = (1, heads, number * length, 64) if packed else (number, heads, length, 64)
    if packed:
        ids = (torch.arange(number * length) // length)[None]
        mask = replace(mask, segment_ids=(ids, ids))
    x = torch.randn(shape)
    spec = Spec(mask, 0.125)
    o, lse = cpu.forward(x, x, x, spec)
    wanted = (True,) * 3 + (False,) * 3
    return [
        lambda: cpu.forward(x, x, x, spec),
        lambda: cpu.backward(x, None, x, x, x, o, lse, spec, wanted),
    ]


@pytest.mark.parametrize("causal", [False, True])
def test_packed_documents_take_as_long_as_a_batch_of_them(causal):
    torch.set_num_threads(1)
    runs = zip(*(runs_of_documents(64, 64, 8, packed, causal) for packed in (False, True)), strict=True)
    for name, of_function in zip(("forward", "backward"), runs, strict=True):
        alone, together = thread_times(*of_function)
        assert together < 1.5 * alone, f"{name}: {together:.4f} s packed, {alone:.4f} s as a batch"


def test_work_grows_with_the_documents_not_with_their_pairs():
    torch.set_num_threads(1)
    runs = zip(*(runs_of_documents(number, 64, 1, packed=True, causal=True) for number in (64, 512)), strict=True)
    for name, of_function in zip(("forward", "backward"), runs, strict=True):
        short, long = thread_times(*of_function)
        assert long < 1.5 * 8 * short, f"{name}: {long:.4f} s for 8 times the documents that take {short:.4f} s"


PACKED = (
    Case("packed", "more blocks than a strip has", B=2, H=4, H_kv=2, n_q=700, n_k=600, keys="holes"),
    Case("packed-one-head", "dq apart from dk and dv", B=1, H=1, n_q=900, n_k=900, softcap=2.0),
    Case("packed-wide", "several chunks", B=1, H=2, n_q=700, n_k=700, D=256),
)


def scattered_documents(case: Case, dtype: torch.dtype) -> Inputs:
    """Documents of 1 to 60 tokens one after the other, the last one padding, others not among the keys."""
    inputs = make_inputs(case, dtype)
    generator = torch.Generator().manual_seed(4)

    def ids(n: int) -> torch.Tensor:
        lengths = torch.randint(1, 60, (case.B, n), generator=generator)
        of_token = torch.stack([torch.arange(n).repeat_interleave(row)[:n] for row in lengths])
        return of_token.masked_fill(of_token == of_token[:, -1:], -1)

    segment_ids = (ids(case.n_q), ids(case.shapes()[1][2]))
    return with_mask(inputs, replace(inputs.mask, segment_ids=segment_ids, causal=True, q_offset=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed_documents_are_right_on_any_number_of_threads(case, dtype, capability):
    inputs = scattered_documents(case, dtype)
    torch.set_num_threads(1)
    alone = run(inputs, "cpu")
    assert_right(inputs, alone)
    for number in (2, 3, 7):
        torch.set_num_threads(number)
        for name, value in run(inputs, "cpu").items():
            assert torch.equal(alone[name], value), f"{name} with {number} threads"


@pytest.mark.parametrize("lengths_q", [(1, 1, 1, 1), (2, 1), (1, 0, 3)], ids=str)
@pytest.mark.parametrize("H", [2, 4])
def test_decoding_of_packed_documents(lengths_q, H, capability):
    """Few queries, each with keys of its own."""
    inputs = make_inputs(Case("", "", B=1, H=H, H_kv=2, n_q=sum(lengths_q), n_k=1500), torch.float32)
    ids_q = torch.arange(len(lengths_q)).repeat_interleave(torch.tensor(lengths_q))[None]
    ids_k = (torch.arange(1500)[None] // 400).masked_fill(torch.arange(1500) > 1450, -1)
    inputs = with_mask(inputs, Mask(causal=True, q_offset=300, segment_ids=(ids_q, ids_k)))
    assert_right(inputs, run(inputs, "cpu"))
