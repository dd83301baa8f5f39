"""What only the native backend has: instruction sets, threads, chunks of keys, and C++ twins of Python definitions."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_spec import PHILOX_ANSWERS

import fastattn
from fastattn.backends import native
from fastattn.spec import Mask, Spec
from fastattn.testing import CASES, DTYPES, Case, Inputs, assert_right, make_inputs, run

CAPABILITIES = ("amx", "avx512_bf16", "avx512", "avx2", "portable")
BF16_PRODUCTS = ("amx", "avx512_bf16")
HALVES = (torch.float16, torch.bfloat16)

COMPUTED = [
    case
    for case in CASES
    if not case.timed and make_inputs(case, torch.float32).spec().features() <= native.features(torch.device("cpu"))
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
    Case("three-heads", "one head more than two threads", B=3, H=1, n_q=130, n_k=500, window=(100, 40), keys="right"),
)
DROPPED = (
    Case(
        "dropout-holes",
        "keys and queries keep their own numbers",
        B=3, H=4, H_kv=2, n_q=70, D=33, keys="holes", queries=True, dropout_p=0.3,
    ),
    Case("dropout-window", "blocks that begin among four keys", n_q=150, window=(13, 6), q_start=3, dropout_p=0.5),
    Case("dropout-chunks", "over chunks", B=1, H=2, H_kv=1, n_q=40, n_k=500, D=256, keys="left", dropout_p=0.1),
    Case("dropout-one-head", "dq apart from dk and dv", B=1, H=1, n_q=200, n_k=500, causal=True, dropout_p=0.1),
)  # fmt: skip


@pytest.fixture(params=CAPABILITIES)
def capability(request, monkeypatch) -> str:
    """An instruction set that the environment asks for; where this machine lacks it, the next one below is used."""
    monkeypatch.setenv("FASTATTN_CPU_CAPABILITY", request.param)
    return request.param


def test_environment_lowers_the_instruction_set(capability):
    info = native.build.load().build_info()
    below = info["compiled_for"][info["compiled_for"].index(capability) :]
    assert native.capability() == next(name for name in below if name in info["runs_here"])


@pytest.mark.parametrize("wrong", ["avx", "AVX2", "1"])
def test_unknown_instruction_set_is_refused(monkeypatch, wrong):
    monkeypatch.setenv("FASTATTN_CPU_CAPABILITY", wrong)
    message = f"FASTATTN_CPU_CAPABILITY must be one of .*'portable', got '{wrong}'"
    with pytest.raises(ValueError, match=message):
        native.capability()
    x = torch.zeros(1, 1, 2, 8)
    with pytest.raises(ValueError, match=message):
        native.forward(x, x, x, Spec(Mask(), 1.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*COMPUTED, *DROPPED], ids=str)
@pytest.mark.parametrize("capability", ["avx2", "portable"], indirect=True)
def test_lower_instruction_sets_are_right(capability, case, dtype):
    inputs = make_inputs(case, dtype)
    assert_right(inputs, run(inputs, "native"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*CHUNKED, *ONE_HEAD, *DROPPED], ids=str)
def test_many_keys_are_right(case, dtype):
    inputs = make_inputs(case, dtype)
    assert_right(inputs, run(inputs, "native"))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", [*CHUNKED, *ONE_HEAD, *DROPPED], ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(case, threads, capability):
    """One thread takes all gradients of a head together; more threads may take dq apart from dk and dv."""
    inputs = make_inputs(case, torch.float32)
    threads(1)
    alone = run(inputs, "native")
    for number in (2, 3, 7):
        threads(number)
        for name, value in run(inputs, "native").items():
            assert torch.equal(alone[name], value), f"{name} with {number} threads"


def results(inputs: Inputs, spec: Spec, wanted: tuple[bool, ...] = (True,) * 3) -> tuple[torch.Tensor | None, ...]:
    """o, lse, dq, dk and dv, None for gradients that are not wanted."""
    q, k, v = inputs.q, inputs.k, inputs.v
    o, lse = native.forward(q, k, v, spec)
    return o, lse, *native.backward(inputs.do, inputs.dlse, q, k, v, o, lse, spec, wanted + (False,) * 3)[:3]


def test_subset_of_gradients_has_the_same_bits(threads):
    """What is not wanted is not computed, and the rest is unchanged."""
    threads(1)
    inputs = make_inputs(CHUNKED[2], torch.float32)
    every = results(inputs, inputs.spec())[2:]
    for wanted in ((True, False, False), (False, True, True)):
        some = results(inputs, inputs.spec(), wanted)[2:]
        for is_wanted, gradient, complete in zip(wanted, some, every, strict=True):
            assert torch.equal(gradient, complete) if is_wanted else gradient is None


lengths = st.integers(0, 40)
limits = st.none() | st.integers(-5, 45)


@settings(max_examples=400, deadline=None)
@given(n_q=lengths, n_k=lengths, causal=st.booleans(), window=st.tuples(limits, limits), data=st.data())
def test_keep_in_cpp_is_keep_in_python(n_q, n_k, causal, window, data):
    B = 2

    def flags(n: int) -> torch.Tensor | None:
        row = st.lists(st.booleans(), min_size=n, max_size=n)
        drawn = data.draw(st.none() | st.lists(row, min_size=B, max_size=B))
        return None if drawn is None else torch.tensor(drawn, dtype=torch.bool).reshape(B, n)

    starts = st.integers(-50, 50)
    q_start = data.draw(starts | st.lists(starts, min_size=B, max_size=B).map(torch.tensor))
    mask = Mask(causal=causal, q_start=q_start, window=window, real_keys=flags(n_k), real_queries=flags(n_q))
    q, k = torch.empty(B, 1, n_q, 1), torch.empty(B, 1, n_k, 1)
    for block in (1, 7, 32):
        found = native.build.load().keep(native.native_mask(mask, q, k), block)
        assert torch.equal(found, mask.keep(n_q, n_k)[:, 0].expand(B, n_q, n_k))


@pytest.mark.parametrize("q_start", [2**61, -(2**61)])
@pytest.mark.parametrize("window", [(None, None), (2**61, 2**61), (3, 3)])
@pytest.mark.parametrize("causal", [True, False])
def test_far_positions_do_not_overflow(q_start, window, causal):
    mask = Mask(causal=causal, q_start=q_start, window=window)
    x = torch.empty(1, 1, 5, 1)
    found = native.build.load().keep(native.native_mask(mask, x, x), 4)
    assert torch.equal(found, mask.keep(5, 5)[:, 0])


@pytest.mark.parametrize(("seed", "counter", "words"), PHILOX_ANSWERS)
def test_philox_in_cpp_gives_the_published_answers(seed, counter, words):
    assert tuple(native.build.load().philox(seed, counter)) == words


def holes(n: int, seed: int) -> torch.Tensor:
    return torch.rand(2, n, generator=torch.Generator().manual_seed(seed)) < 0.5


@pytest.mark.parametrize("seed", [0, 7 << 32, -1, -(2**63), 2**63 - 1])
@pytest.mark.parametrize(("n_q", "n_k"), [(37, 131), (70, 33), (1, 3)])
@pytest.mark.parametrize("masked", ["nothing", "causal", "window", "holes", "everything"])
def test_dropout_keeps_what_the_definition_keeps(masked, n_q, n_k, seed, capability):
    """With equal scores and values of 0 and 1 the output, and then dv, shows each weight by itself."""
    p, B, H, H_kv, group = 0.4, 2, 6, 2, 3
    padding = {"real_keys": holes(n_k, 1), "real_queries": holes(n_q, 2)}
    mask = {
        "nothing": Mask(),
        "causal": Mask(causal=True, q_start=2),
        "window": Mask(window=(5, 4), q_start=torch.tensor([3, 30])),
        "holes": Mask(**padding),
        "everything": Mask(causal=True, q_start=9, window=(50, None), **padding),
    }[masked]
    spec = Spec(mask, 1.0, dropout_p=p, seed=torch.tensor(seed))
    visible = mask.keep(n_q, n_k).expand(B, H, n_q, n_k)
    kept = visible & spec.dropout_keep(B, H, n_q, n_k)
    expected = kept / ((1 - p) * visible.sum(-1, keepdim=True).clamp(min=1))

    q, k = torch.zeros(B, H, n_q, 5), torch.zeros(B, H_kv, n_k, 5)
    d_v = max(n_k, group * n_q)
    v = torch.eye(n_k, d_v).expand(B, H_kv, n_k, d_v)
    o, lse = native.forward(q, k, v, spec)
    assert torch.equal(o[..., :n_k] != 0, kept)
    torch.testing.assert_close(o[..., :n_k], expected)
    torch.testing.assert_close(lse, visible.sum(-1).log())

    do = torch.eye(group * n_q, d_v).unflatten(0, (group, n_q)).repeat(B, H_kv, 1, 1)
    dv = native.backward(do, None, q, k, v, o, lse, spec, (True,) * 3 + (False,) * 3)[2]
    weights = dv.mT[:, :, : group * n_q].unflatten(2, (group, n_q)).flatten(1, 2)  # [B, H, n_q, n_k]
    assert torch.equal(weights != 0, kept)
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("p", [0.0, 1e-12])
def test_dropping_nothing_changes_no_bit(p, capability):
    inputs = make_inputs(Case("plain", "", H=4, H_kv=2, n_q=70, n_k=120, D=33, causal=True, q_start=9), torch.float32)
    spec = inputs.spec()
    dropping = replace(spec, dropout_p=p, seed=torch.tensor(3))
    for plain, dropped in zip(results(inputs, spec), results(inputs, dropping), strict=True):
        assert torch.equal(plain, dropped)


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


@pytest.mark.parametrize("n_q", (1, 20))  # by dot products, by blocks of queries
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_half_passes_unchanged(dtype, n_q, capability):
    """A single key gives its value back: each of the 65536 patterns is read and written once, NaN as some NaN.

    The processor's own bf16 products take a subnormal number for zero.
    """
    v = every_pattern(dtype).reshape(1, 256, 1, 256)
    x = torch.ones(1, 256, n_q, 8, dtype=dtype)
    o, _ = native.forward(x, x[:, :, :1], v, Spec(Mask(), 1.0))
    if n_q > 1 and dtype == torch.bfloat16 and native.capability() in BF16_PRODUCTS:
        v = v.where(v.abs() >= torch.finfo(dtype).tiny, 0 * v)
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
    o, _ = native.forward(x[:, :, :1], x, values, Spec(Mask(), 1.0))
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
    mask = Mask(causal=True, q_start=11)
    o, lse = native.forward(q, k, v, Spec(mask, 0.25))
    poisoned = mask.keep(20, n_k)[0, 0].T[:, None]  # [n_k, 1, 20]: sample b has its NaN in key b
    assert torch.equal(lse.isnan(), poisoned)
    assert o.isnan().all(-1)[poisoned].all()


@pytest.mark.parametrize("value", [math.inf, -math.inf, 3e38])
def test_infinite_scores_give_what_softmax_gives(value, capability):
    q, k, v = torch.ones(1, 1, 3, 4), torch.ones(1, 1, 50, 4), torch.randn(1, 1, 50, 4)
    k[0, 0, 20, 0] = value
    o, _ = native.forward(q, k, v, Spec(Mask(), 0.5))
    torch.testing.assert_close(o, torch.softmax(q @ k.mT * 0.5, -1) @ v, equal_nan=True)


def test_rows_with_gaps_are_copied():
    """Transposed inputs and gradients: elements of a row that do not lie side by side."""
    inputs = make_inputs(Case("plain", "", n_q=20, D=24), torch.float32)
    expected = run(inputs, "native")
    for name in ("q", "k", "v", "do"):
        setattr(inputs, name, getattr(inputs, name).mT.contiguous().mT)
    for name, value in run(inputs, "native").items():
        assert torch.equal(value, expected[name]), name


def test_what_is_not_taken_is_said():
    x = torch.zeros(1, 1, 2, 8, dtype=torch.float64)
    assert native.unsupported(x, x, x, Spec(Mask(), 1.0)) == [
        "q must be float32, bfloat16 or float16, got torch.float64"
    ]
    meta = torch.zeros(1, 1, 2, 8, device="meta")
    with pytest.raises(NotImplementedError, match="native: q must be on the CPU, got meta"):
        fastattn.attention(meta, meta, meta, backend="native")
