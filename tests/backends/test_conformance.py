"""Every case on every backend: computed and within the budget, or refused with exactly its objections."""

import contextlib
import dataclasses
import os
import re

import pytest
import torch
from modelled_gpu import CUDA_MACHINES, PTX_MACHINES
from parts import drawn_at, places_of_a_part
from places import CUDA_TAKES_BF16, PLACES, THREADS, WITH_ANY_MASK, most_precise_dtype, place_id

import fastattn
from fastattn.backends import aten, cpu, cuda, hopper, objections, selfcheck, triton
from fastattn.testing import CASES, DTYPES, OUTPUTS, Case, Inputs, assert_right, exact, formula, make_inputs, run

TESTED = [case for case in CASES if not case.timed]
ON_MODELS = [(machine, "cpu") for machine in PTX_MACHINES]
COMPUTING = [*WITH_ANY_MASK, *ON_MODELS]
OF_HOPPER = [hopper, *(machine for machine in PTX_MACHINES if machine.backend is hopper)]
WITH_BIAS = [place for place in COMPUTING if place[0] not in OF_HOPPER]
WITH_SINKS = [place for place in WITH_BIAS if place[0] is not aten]
on_each, on_each_with_bias, on_each_with_sinks = (
    pytest.mark.parametrize(("backend", "device"), places, ids=place_id, indirect=["backend"])
    for places in (COMPUTING, WITH_BIAS, WITH_SINKS)
)

POSITIONS = {"causal", "q_offset", "window", "real_keys", "real_queries"}
TERMS = {"segment_ids", "dense", "bias", "softcap", "alibi_slopes", "sinks", "dropout"}


PROMISES = {  # what each backend must take, so that none gets greener by refusing more
    "hopper": {
        "features": POSITIONS | {"segment_ids"},
        "dtypes": {torch.float16, torch.bfloat16},
        "head_dims": range(8, 257, 8),
    },
    "triton": {
        "features": POSITIONS | TERMS | {"relative_bias"},
        "dtypes": set(DTYPES),
        "head_dims": range(1, 257),
    },
    "cpu": {
        "features": POSITIONS | TERMS | {"relative_bias"},
        "dtypes": set(DTYPES),
        "head_dims": range(1, 513),
    },
    "cuda": {
        "features": POSITIONS | TERMS | {"relative_bias"},
        "dtypes": {*DTYPES} if CUDA_TAKES_BF16 else {*DTYPES} - {torch.bfloat16},
        "head_dims": range(1, 257),
    },
    "torch": {
        "features": POSITIONS | TERMS | {"relative_bias"},
        "dtypes": {*DTYPES, torch.float64},
        "head_dims": range(1, 513),
    },
    "torch on a GPU": {
        "features": {"causal"},
        "dtypes": {*DTYPES} if CUDA_TAKES_BF16 else {*DTYPES} - {torch.bfloat16},
        "head_dims": range(8, 257, 8),
    },
    "reference": {
        "features": POSITIONS | TERMS | {"relative_bias"},
        "dtypes": {*DTYPES, torch.float64},
        "head_dims": range(1, 513),
    },
}


SLACK = {aten: 1.5}  # PyTorch's fp32 kernel has an exp of 20 units in the last place
OVERFLOWS = pytest.mark.xfail(strict=False, reason="PyTorch's kernels for GPUs have no headroom for the sum of values")


def every_call() -> list[tuple]:
    """Every case in every place in every dtype; where Triton is interpreted, 16 bits are fp16 and bf16 by turns.

    The interpreter multiplies both in fp32, and kernels do not ask which of them they have. `make ptx` does the same
    of what Triton compiles.
    """
    turns, places = (torch.float16, torch.bfloat16), []
    if not torch.cuda.is_available():
        places.append(triton)
    if os.environ.get("FASTATTN_PTX_BY_TURNS"):
        places += [machine for machine in PTX_MACHINES if machine not in CUDA_MACHINES]
    return [
        pytest.param(backend, device, case, dtype, marks=_overflows(backend, device, case, dtype))
        for backend, device in [*PLACES, *ON_MODELS]
        for i, case in enumerate(TESTED)
        for dtype in DTYPES
        if backend not in places or dtype is not turns[i % 2]
    ]


def _overflows(backend, device, case, dtype) -> tuple:
    is_known = backend is aten and device == "cuda" and dtype is not torch.float16 and (case.huge or case.huge_values)
    return (OVERFLOWS,) if is_known else ()


@pytest.mark.parametrize(("backend", "device", "case", "dtype"), every_call(), ids=place_id, indirect=["backend"])
def test_case_is_right_or_refused(backend, device, case, dtype):
    inputs = make_inputs(case, dtype, device)
    why = objections(backend, inputs.q, inputs.k, inputs.v, inputs.spec())
    if why:
        with pytest.raises(NotImplementedError, match=re.escape("; ".join(why))):
            run(inputs, backend.NAME)
    else:
        slack = SLACK.get(backend, 1.0)
        outputs = run(inputs, backend.NAME)
        assert_right(inputs, outputs, slack)
        for threads in THREADS if backend is cpu else ():
            for name, value in run(inputs, cpu.NAME, threads).items():
                assert torch.equal(value, outputs[name]), f"{name} with {threads} threads"
        if device == "cuda":  # where the launches of the second call of a kind are those of the first one
            others = make_inputs(case, dtype, device, seed=1)
            assert_right(others, run(others, backend.NAME), slack)


ALONE = [case for case in TESTED if case.name in ("bias-of-queries", "far-keys", "bias-broadcast", "everything")]


@pytest.mark.parametrize("case", ALONE, ids=str)
@pytest.mark.parametrize(("backend", "device"), COMPUTING, ids=place_id, indirect=["backend"])
def test_each_gradient_alone_is_what_it_is_among_all(backend, device, case):
    inputs = make_inputs(case, torch.float16, device)
    if objections(backend, inputs.q, inputs.k, inputs.v, inputs.spec()):
        return
    every = run(inputs, backend.NAME)
    for name in inputs.learned():
        alone = run(inputs, backend.NAME, wanted=[name])
        assert alone.keys() == {"o", "lse", f"d{name}"}
        torch.testing.assert_close(alone[f"d{name}"], every[f"d{name}"], rtol=1e-3, atol=1e-3)


def every_call_in_any_order() -> list[tuple]:
    """Those of the backends that sum gradients in any order if they may; on the machine in both dtypes by turns."""
    dtypes = (torch.float16, torch.bfloat16)
    return [
        (backend, device, case, dtype)
        for backend, device in [*PLACES, *ON_MODELS]
        if backend in OF_HOPPER or (backend is aten and device == "cuda")
        for i, case in enumerate(TESTED)
        for dtype in (dtypes if backend is hopper else dtypes[i % 2 :][:1])
    ]


@pytest.mark.parametrize(
    ("backend", "device", "case", "dtype"), every_call_in_any_order(), ids=place_id, indirect=["backend"]
)
def test_case_is_right_or_refused_in_any_order(backend, device, case, dtype):
    inputs = make_inputs(case, dtype, device)
    inputs.options["deterministic"] = False
    if objections(backend, inputs.q, inputs.k, inputs.v, inputs.spec()):
        with pytest.raises(NotImplementedError):
            run(inputs, backend.NAME)
    else:
        assert_right(inputs, run(inputs, backend.NAME))


@pytest.mark.parametrize(
    ("backend", "device"), [*PLACES, *((gpu, "cpu") for gpu in PTX_MACHINES)], ids=place_id, indirect=["backend"]
)
def test_backend_keeps_its_promises(backend, device):
    promise = PROMISES["torch on a GPU" if backend is aten and device == "cuda" else backend.NAME]
    device = torch.device(device)
    assert backend.unavailable(device) is None
    assert backend.features(device) == promise["features"]
    for dtype in promise["dtypes"]:
        for head_dim in promise["head_dims"]:
            q = torch.empty(1, 2, 3, head_dim, dtype=dtype, device=device)
            assert objections(backend, q, q, q, fastattn.spec.Spec(fastattn.Mask(), 1.0)) == []


@on_each
def test_backend_passes_the_check_of_unknown_machines(backend, device, monkeypatch):
    """No GPU has run it: here it must not be stricter than the kernels are exact."""
    if backend is triton and device == "cpu":
        monkeypatch.setattr(selfcheck, "_FAR_BELOW_ZERO", (1, 4, 2, 160, 160, 64))  # several tiles, as ever
    slow = backend in (triton, hopper) and device == "cpu"  # interpreted or on a machine: half a minute for each dtype
    for dtype in {most_precise_dtype(backend)} if slow else PROMISES[backend.NAME]["dtypes"]:
        assert selfcheck.find_fault(backend, torch.device(device), dtype, training=True) is None


@pytest.mark.parametrize("case", TESTED, ids=str)
def test_reference_agrees_with_autograd_of_the_formula(case):
    """The oracle itself: its written-out gradients against autograd of the plain formula, both in fp64."""
    # autograd takes the weights from logsumexp, which from about 2^53 on has lost what equal scores add to it.
    case = dataclasses.replace(case, huge=min(case.huge, 0.02), huge_values=min(case.huge_values, 0.02))
    inputs = make_inputs(case, torch.float64)
    written = exact(inputs)
    assert set(written) <= set(OUTPUTS)
    leaves = {name: x.detach().double().requires_grad_() for name, x in inputs.learned().items()}
    o, lse, _ = formula(inputs, leaves)
    arriving = (inputs.do.nan_to_num(), inputs.dlse.double().masked_fill(lse == -float("inf"), 0))
    gradients = torch.autograd.grad((o, lse), list(leaves.values()), arriving)
    derived = {"o": o, "lse": lse} | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}
    for name, value in written.items():
        torch.testing.assert_close(value, derived[name], rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@on_each
def test_hidden_values_change_nothing(backend, device):
    """Bit for bit the same output and gradients, whatever stands in padded keys and padded query rows."""
    case = next(case for case in CASES if case.name == "pad-queries")
    inputs = make_inputs(case, most_precise_dtype(backend), device)
    poisoned = run(inputs, backend.NAME)
    for x in (inputs.q, inputs.k, inputs.v, inputs.do):
        x.nan_to_num_(nan=7.0)
    clean = run(inputs, backend.NAME)
    for name, value in poisoned.items():
        assert torch.equal(value, clean[name]), name


@on_each
def test_values_without_channels_leave_the_lse_as_it_is(backend, device):
    """Of few queries too, whose padded keys, which are NaN, no output can show then."""
    case = next(case for case in CASES if case.name == "pad-queries")
    inputs = make_inputs(case, most_precise_dtype(backend), device)
    few = inputs.q[:, :, inputs.mask.real_queries.all(0)][:, :, :5]
    assert few.shape[2] == 5
    assert inputs.k.isnan().any()

    def lse_with(v: torch.Tensor) -> torch.Tensor:
        mask = fastattn.Mask(real_keys=inputs.mask.real_keys)
        return fastattn.attention(few, inputs.k, v, mask, return_lse=True, backend=backend.NAME)[1]

    expected = lse_with(inputs.v)
    assert expected.isfinite().all()
    takes_none = backend in (cuda, hopper)
    with pytest.raises(fastattn.NoBackendError, match="got 0 for v") if takes_none else contextlib.nullcontext():
        torch.testing.assert_close(lse_with(inputs.v[..., :0]), expected)


@on_each
def test_visible_nan_stays_in_its_sample(backend, device):
    inputs = make_inputs(next(case for case in CASES if case.name == "plain"), most_precise_dtype(backend), device)
    inputs.k[0, 0, 3] = float("nan")
    for name, value in run(inputs, backend.NAME).items():
        assert value[0, 0].isnan().any(), f"{name} hides a NaN"
        assert value[1].isfinite().all(), f"{name} spreads a NaN to another sample"


@on_each
@pytest.mark.parametrize("poisoned", ["nothing", "k", "v"])
def test_queries_that_see_nothing_give_exactly_zero(backend, device, poisoned):
    """Also where a key that others see is NaN; hopper multiplies a dS of 0 by such a k."""
    case = next(case for case in CASES if case.name == "pad-left-causal")
    inputs = make_inputs(case, most_precise_dtype(backend), device)
    if poisoned != "nothing" and (poisoned, backend) != ("k", hopper):
        getattr(inputs, poisoned)[:, :, -20] = float("nan")
    seen = inputs.mask.keep(*case.shapes()[0][2:3], case.shapes()[1][2], inputs.q.device).any(-1)  # [B, 1, n_q]
    assert not seen.all()
    empty = (~seen).expand(inputs.q.shape[:3])
    outputs = run(inputs, backend.NAME)
    assert (outputs["o"][empty] == 0).all()
    assert (outputs["lse"][empty] == -float("inf")).all()
    assert (outputs["dq"][empty] == 0).all()
    unread = ~inputs.mask.real_keys[:, None].expand(inputs.k.shape[:3])
    assert (outputs["dk"][unread] == 0).all()
    assert (outputs["dv"][unread] == 0).all()


@on_each_with_bias
def test_bias_of_minus_infinity_hides(backend, device):
    inputs = make_inputs(next(case for case in CASES if case.name == "dense"), torch.float32, device)
    bias = torch.zeros_like(inputs.mask.dense, dtype=torch.float32).masked_fill(~inputs.mask.dense, -float("inf"))
    hidden_by_bias = dataclasses.replace(inputs, mask=fastattn.Mask(), options=inputs.options | {"bias": bias})
    outputs = run(hidden_by_bias, backend.NAME)
    assert (outputs.pop("dbias")[~inputs.mask.dense] == 0).all()
    assert_right(inputs, outputs)


@on_each_with_sinks
@pytest.mark.parametrize("above", [100.0, 1e4, 1e30])
def test_sinks_far_from_the_scores(backend, device, above):
    """Whichever is larger leaves the other no weight, without overflow."""
    case = next(case for case in CASES if case.name == "bias-of-queries")
    inputs = make_inputs(case, torch.float32, device)
    inputs.options["sinks"] = torch.tensor([above, -above], device=device)
    assert_right(inputs, run(inputs, backend.NAME))


PARTS = (
    Case("few-queries", "a tile has rows of several heads", H=4, H_kv=2, n_q=3, n_k=70, dropout_p=0.3),
    Case("few-keys", "a single block of keys", n_q=37, n_k=11, dropout_p=0.3),
    Case("bias", "in its gradient too", B=1, H=4, H_kv=2, n_q=20, n_k=50, keys="holes", bias=(20, 50), dropout_p=0.3),
)


@on_each
@pytest.mark.parametrize("case", PARTS, ids=str)
def test_dropout_of_a_part_is_right(backend, device, case):
    inputs = make_inputs(case, most_precise_dtype(backend), device)
    if not objections(backend, inputs.q, inputs.k, inputs.v, inputs.spec()):
        with drawn_at(places_of_a_part(case.n_q, case.n_k, device)):
            assert_right(inputs, run(inputs, backend.NAME))


@on_each
@pytest.mark.parametrize(("n_q", "n_k"), [(3, 70), (37, 51)])
def test_dropout_of_a_part_keeps_what_the_definition_keeps(backend, device, n_q, n_k):
    """With equal scores and values of 0 and 1 the output, and then dv, shows each weight by itself."""
    B, H, p, dtype = 2, 2, 0.4, most_precise_dtype(backend)
    q, k = (torch.zeros(B, H, n, 8, dtype=dtype, device=device) for n in (n_q, n_k))
    v, do = (torch.eye(n, max(n_q, n_k), dtype=dtype, device=device).expand(B, H, -1, -1) for n in (n_k, n_q))
    generator = torch.Generator(device).manual_seed(1)
    options = {"scale": 1.0, "dropout_p": p, "generator": generator}
    inputs = Inputs(q, k, v, do, torch.zeros(B, H, n_q, device=device), fastattn.Mask(), options)
    if objections(backend, q, k, v, inputs.spec()):
        return
    with drawn_at(places_of_a_part(n_q, n_k, device)):
        spec, outputs = inputs.spec(), run(inputs, backend.NAME)
        expected = spec.dropout_keep(B, H, n_q, n_k).to(dtype) / ((1 - p) * n_k)
        shown = [(outputs["o"][..., :n_k], expected), (outputs["dv"].mT[:, :, :n_q], expected)]
        if not objections(backend, q, k, k[..., :0], spec, function="weights"):
            for average_heads, each in ((False, expected), (True, expected.mean(1))):
                again = options | {"generator": generator.clone_state(), "backend": backend.NAME}
                weights = fastattn.attention_with_weights(q, k, v, average_heads=average_heads, **again)[1]
                shown.append((weights, each))
    for actual, each in shown:
        assert torch.equal(actual != 0, each != 0)
        torch.testing.assert_close(actual, each)


@on_each
def test_same_inputs_give_the_same_bits(backend, device):
    case = next(case for case in CASES if case.name == "pad-queries-causal")
    inputs = make_inputs(case, most_precise_dtype(backend), device)
    first = run(inputs, backend.NAME)
    for _ in range(3):
        for name, value in run(inputs, backend.NAME).items():
            assert torch.equal(first[name], value), name


@on_each
@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v",), ("q", "v"), ("k", "v")], ids="".join)
def test_gradients_of_any_subset(backend, device, wanted):
    inputs = make_inputs(next(case for case in CASES if case.name == "causal-end"), most_precise_dtype(backend), device)
    every = run(inputs, backend.NAME)
    leaves = {name: x.detach().requires_grad_(name in wanted) for name, x in inputs.learned().items()}
    o, lse = fastattn.attention(**leaves, mask=inputs.mask, return_lse=True, backend=backend.NAME)
    gradients = torch.autograd.grad((o, lse), [leaves[n] for n in wanted], (inputs.do, inputs.dlse))
    for name, gradient in zip(wanted, gradients, strict=True):
        assert torch.equal(gradient, every[f"d{name}"]), name


@on_each
@pytest.mark.parametrize("output", ["o", "lse"])
def test_gradient_through_one_output_only(backend, device, output):
    inputs = make_inputs(next(case for case in CASES if case.name == "causal-end"), most_precise_dtype(backend), device)
    unused = inputs.dlse if output == "o" else inputs.do
    unused.zero_()
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.learned().items()}
    o, lse = fastattn.attention(**leaves, mask=inputs.mask, return_lse=True, backend=backend.NAME)
    arriving = (o, inputs.do) if output == "o" else (lse, inputs.dlse)
    gradients = torch.autograd.grad(*(arriving[0], list(leaves.values()), arriving[1]))
    results = {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}
    assert_right(inputs, results, SLACK.get(backend, 1.0))


@on_each
@pytest.mark.parametrize("empty", ["B", "n_q", "n_k", "H"])
def test_zero_length_inputs_never_reach_a_backend(backend, device, empty, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("asked to compute nothing")

    monkeypatch.setattr(backend, "forward", refuse)
    monkeypatch.setattr(backend, "backward", refuse)
    size = {"B": 2, "H": 2, "n_q": 3, "n_k": 4} | {empty: 0}
    options = {"dtype": most_precise_dtype(backend), "device": device, "requires_grad": True}
    q = torch.ones(size["B"], size["H"], size["n_q"], 8, **options)
    k, v = (torch.ones(size["B"], max(size["H"], 1), size["n_k"], 8, **options) for _ in "kv")
    o, lse = fastattn.attention(q, k, v, fastattn.Mask(causal=True), return_lse=True, backend=backend.NAME)
    assert o.shape == q.shape
    assert (o == 0).all()
    assert (lse == -float("inf")).all()
    for x, gradient in zip((q, k, v), torch.autograd.grad(o.sum(), (q, k, v)), strict=True):
        assert gradient.shape == x.shape
        assert (gradient == 0).all()


@on_each
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "heads", "tokens"])
def test_offsets_beyond_32_bits(backend, device, dim, monkeypatch):
    """Rows 3 * 2^30 elements apart: the address space is reserved, but only the pages with rows are ever touched."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # else on a machine for PTX
    case = next(case for case in CASES if case.name == "causal-cached")
    inputs = make_inputs(case, torch.float16, device)
    far = {}
    for name in "qkv":
        x = getattr(inputs, name)
        strides = list(x.stride())
        strides[dim] = 3 * 2**30 // (x.shape[dim] - 1)
        last = sum(stride * (n - 1) for stride, n in zip(strides, x.shape, strict=True))
        reserved = torch.empty(last + 1, dtype=x.dtype, device=x.device)
        far[name] = reserved.as_strided(x.shape, strides).copy_(x)
    assert_right(inputs, run(dataclasses.replace(inputs, **far), backend.NAME))
