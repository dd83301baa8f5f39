"""The short way from `attention` to the native backend: which calls take it, and that nothing else tells them apart."""

from __future__ import annotations

import copy
import functools
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fastattn
from fastattn import FallbackWarning, Mask, backends
from fastattn.backends import native
from fastattn.spec import Spec
from fastattn.testing import CASES, Inputs, make_inputs

Q, K, V = (torch.randn(2, H, n, 8, generator=torch.Generator().manual_seed(n)) for H, n in ((4, 3), (2, 7), (2, 7)))
REAL = torch.tensor([[1, 1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 1, 1]], dtype=torch.bool)
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, -1, 2], [4, 3, 4, 3, 3, 3, 3]])
TOLD_AT_ONCE = {"causal", "q_start", "window", "real_keys", "real_queries", "segments"}
TAKEN = [
    case
    for case in CASES
    if not case.timed
    and (spec := make_inputs(case, torch.float32).spec()).features() <= TOLD_AT_ONCE
    and isinstance(spec.mask.q_start, int)
]


def answer(**call: object) -> tuple[Tensor, Tensor] | None:
    """Of the backend alone."""
    call = {"q": Q, "k": K, "v": V, "mask": Mask(), "scale": None} | call
    found = native.at_once(*call.values())
    if found is None:
        return None
    o, lse, of_gradients = found
    wanted = torch.is_grad_enabled() and any(call[name].requires_grad for name in "qkv")
    assert (of_gradients is not None) == wanted
    return o, lse


@pytest.fixture
def answers(monkeypatch) -> list[bool]:
    """Whether each call that was tried was answered."""
    tried, at_once = [], native.at_once

    def noted(*call: object) -> tuple[Tensor, Tensor, object | None] | None:
        found = at_once(*call)
        tried.append(found is not None)
        return found

    monkeypatch.setattr(native, "at_once", noted)
    return tried


def readable(inputs: Inputs) -> bool:
    """Whether a backend can read them as they are."""
    return all(x.numel() and (x.stride(-1) == 1 or x.shape[-1] == 1) for x in (inputs.q, inputs.k, inputs.v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", TAKEN, ids=lambda case: case.name)
def test_it_is_what_forward_returns(case, dtype):
    inputs = make_inputs(case, dtype)
    spec = inputs.spec()
    found = answer(q=inputs.q, k=inputs.k, v=inputs.v, mask=spec.mask, scale=spec.scale)
    assert (found is not None) == readable(inputs)
    if readable(inputs):
        for actual, expected in zip(found, native.forward(inputs.q, inputs.k, inputs.v, spec), strict=True):
            assert torch.equal(actual, expected)
            assert (actual.dtype, actual.stride()) == (expected.dtype, expected.stride())


def test_most_cases_without_other_terms_are_answered():
    assert len(TAKEN) >= 20
    assert set().union(*(make_inputs(c, torch.float32).spec().features() for c in TAKEN)) == TOLD_AT_ONCE
    assert sum(answer(q=i.q, k=i.k, v=i.v) is not None for i in (make_inputs(c, torch.float32) for c in TAKEN)) >= 15


def test_the_scale_is_that_of_attention():
    for D in (1, 3, 8, 33, 64, 80):
        q = torch.randn(1, 2, 3, D, generator=torch.Generator().manual_seed(D))
        assert torch.equal(answer(q=q, k=q, v=q)[0], native.forward(q, q, q, Spec(Mask(), D**-0.5))[0])


REFUSED = {
    "rank": {"q": Q[0]},
    "integers": {"q": Q.long(), "k": K.long(), "v": V.long()},
    "fp64": {"q": Q.double(), "k": K.double(), "v": V.double()},
    "dtype of k": {"k": K.half()},
    "dtype of v": {"v": V.half()},
    "device of k": {"k": K.to("meta")},
    "device": {"q": Q.to("meta"), "k": K.to("meta"), "v": V.to("meta")},
    "batch": {"k": K[:1], "v": V[:1]},
    "head_dim": {"k": K[..., :4].contiguous()},
    "length": {"v": V[:, :, :3]},
    "heads": {"q": Q[:, :3]},
    "heads of v": {"v": V[:, :1]},
    "no queries": {"q": Q[:, :, :0]},
    "no keys": {"k": K[:, :, :0], "v": V[:, :, :0]},
    "no heads": {"k": K[:, :0], "v": V[:, :0]},
    "no dims": {"q": Q[..., :0], "k": K[..., :0]},
    "columns": {"v": V.mT.contiguous().mT},
    "scale": {"scale": float("nan")},
    "infinite scale": {"scale": float("inf")},
    "real_keys": {"mask": Mask(real_keys=REAL[:, :5])},
    "shared real_keys": {"mask": Mask(real_keys=REAL[:1])},
    "real_keys dtype": {"mask": Mask(real_keys=REAL.int())},
    "real_keys device": {"mask": Mask(real_keys=REAL.to("meta"))},
    "real_queries": {"mask": Mask(real_queries=REAL)},
    "real_queries dtype": {"mask": Mask(real_queries=REAL[:, :3].int())},
    "documents of queries": {"mask": Mask(segments=(DOCUMENTS, DOCUMENTS))},
    "documents of keys": {"mask": Mask(segments=(DOCUMENTS[:, :3], DOCUMENTS[:, :3]))},
    "documents dtype": {"mask": Mask(segments=(DOCUMENTS[:, :3].short(), DOCUMENTS))},
    "dtype of the documents of keys": {"mask": Mask(segments=(DOCUMENTS[:, :3], DOCUMENTS.float()))},
    "documents device": {"mask": Mask(segments=(DOCUMENTS[:, :3].to("meta"), DOCUMENTS))},
    "negated q": {"q": torch.complex(Q, -Q).conj().imag},
    "negated k": {"k": torch.complex(K, -K).conj().imag},
    "negated v": {"v": torch.complex(V, -V).conj().imag},
    "sparse": {"q": Q.to_sparse()},
}


@pytest.mark.parametrize("name", REFUSED)
def test_no_answer_to(name):
    assert answer() is not None
    assert answer(**REFUSED[name]) is None


@pytest.mark.parametrize(
    "context",
    [
        torch.profiler.profile,
        torch.autograd.profiler.profile,
        BaseTorchFunctionMode,
        functools.partial(FlopCounterMode, display=False),
        functools.partial(torch.autocast, "cpu"),
        functools.partial(torch.device, "cpu"),
    ],
)
def test_no_answer_where_somebody_looks_on(context):
    with context():
        assert answer() is None
    assert answer() is not None


def test_no_answer_inside_of_a_transform():
    found = []
    torch.func.vmap(lambda q: found.append(answer(q=q)) or q)(Q[None])
    torch.func.vmap(lambda q: found.append(answer()) or q)(Q[None])
    assert found == [None, None]


@pytest.mark.parametrize("name", "qkv")
def test_its_gradients_are_ready_where_they_are_wanted(name):
    o, lse = answer(**{name: {"q": Q, "k": K, "v": V}[name].clone().requires_grad_()})
    assert not o.requires_grad
    assert not lse.requires_grad


def test_inference_mode_and_no_grad_are_answered():
    q = Q.clone().requires_grad_()
    for quiet in (torch.inference_mode, torch.no_grad):
        with quiet():
            o, lse = answer(q=q)
            assert torch.equal(o, answer()[0])
            assert not o.requires_grad
            assert not lse.requires_grad


OTHERWISE = {  # calls of attention that are right, but not for the short way
    "bias": {"bias": torch.zeros(7)},
    "softcap": {"softcap": 3.0},
    "slopes": {"alibi_slopes": torch.ones(4)},
    "sinks": {"sinks": torch.ones(4)},
    "dropout": {"dropout_p": 0.5},
    "int dropout": {"dropout_p": 0},
    "generator": {"generator": torch.Generator()},
    "backend": {"backend": "native"},
    "int scale": {"scale": 1},
    "parameter": {"q": nn.Parameter(Q, requires_grad=False)},
    "dense": {"mask": Mask(dense=torch.ones(3, 7, dtype=torch.bool))},
    "q_start": {"mask": Mask(q_start=torch.tensor([1, 2]))},
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_other_calls_go_the_long_way(name, answers):
    fastattn.attention(**({"q": Q, "k": K, "v": V} | OTHERWISE[name]))
    assert not answers


@pytest.mark.parametrize(
    "mask",
    [
        None,
        Mask(causal=True, q_start=4),
        Mask(window=(3, None), real_keys=REAL, real_queries=REAL[:, :3]),
        Mask(causal=True, segments=(DOCUMENTS[:, :3], DOCUMENTS)),
        Mask(segments=(DOCUMENTS[:, :3].int(), DOCUMENTS.int())),
    ],
)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_plain_calls_go_the_short_way(mask, scale, answers):
    o, lse = fastattn.attention(Q, K, V, mask, scale=scale, return_lse=True)
    assert answers == [True]
    for actual, expected in zip(
        (o, lse), fastattn.attention(Q, K, V, mask, scale=scale, return_lse=True, backend="native"), strict=True
    ):
        assert torch.equal(actual, expected)
    assert answers == [True]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"mask": Mask(window=(True, None))}, "mask.window's left must be None or an int"),
        ({"mask": Mask(window=(None, -1))}, "mask.window's right must be None or an int"),
        ({"mask": Mask(window=[1, 1])}, "mask.window must be a pair"),
        ({"mask": Mask(window=(1, 1, 1))}, "mask.window must be a pair"),
        ({"mask": Mask(q_start=True)}, "mask.q_start must be an int"),
        ({"mask": Mask(real_keys=[1])}, "mask.real_keys must be a Tensor"),
        ({"mask": Mask(real_queries=[1])}, "mask.real_queries must be a Tensor"),
        ({"mask": Mask(segments=(DOCUMENTS[:, :3], [1]))}, r"mask.segments\[1\] must be a Tensor"),
        ({"mask": Mask(segments=(DOCUMENTS, DOCUMENTS))}, r"mask.segments\[0\] must be \[2, 3\]"),
        ({"mask": REAL}, "mask must be a fastattn.Mask"),
        ({"dropout_p": False}, "dropout_p must be between 0 and 1"),
        ({"dropout_p": None}, "dropout_p must be between 0 and 1"),
        ({"scale": True}, "scale must be a finite number"),
        ({"scale": float("inf")}, "scale must be a finite number"),
        ({"q": Q[:1]}, "k must be \\[1, H_kv, n_k, 8\\] like q"),
        ({"mask": Mask(real_keys=REAL[:, 1:])}, "mask.real_keys must be \\[2, 7\\]"),
    ],
)
def test_what_is_wrong_is_refused_after_a_right_call(wrong, sentence):
    fastattn.attention(Q, K, V, Mask(real_keys=REAL))
    with pytest.raises(ValueError, match=sentence):
        fastattn.attention(**({"q": Q, "k": K, "v": V} | wrong))


class Watched(Tensor):
    """Lives by __torch_function__ alone, which sets no dispatch key."""

    seen = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen += 1
        return super().__torch_function__(function, types, args, kwargs)


def test_a_subclass_sees_the_call(answers):
    watched = DOCUMENTS.as_subclass(Watched)
    for call in (
        {"q": Q.as_subclass(Watched)},
        {"mask": Mask(real_keys=REAL.as_subclass(Watched))},
        {"mask": Mask(real_queries=REAL[:, :3].as_subclass(Watched))},
        {"mask": Mask(segments=(watched[:, :3], DOCUMENTS))},
        {"mask": Mask(segments=(DOCUMENTS[:, :3], watched))},
    ):
        Watched.seen = 0
        fastattn.attention(**({"q": Q, "k": K, "v": V} | call))
        assert Watched.seen
    assert not any(answers)


def test_a_dual_number_keeps_its_tangent(answers):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(Q, torch.ones_like(Q))
        o = fastattn.attention(dual, K, V)
        assert torch.autograd.forward_ad.unpack_dual(o).tangent is not None
    assert not answers


def test_autocast_decides_the_dtype_between_calls(answers):
    mask = Mask(real_keys=REAL)
    for enabled in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert fastattn.attention(Q, K, V, mask).dtype == (torch.bfloat16 if enabled else torch.float32)
    assert answers == [True, False, True]


def test_the_mode_of_gradients_decides_between_calls(answers):
    q, mask = Q.clone().requires_grad_(), Mask(causal=True)
    for enabled in (False, True, False):
        with torch.set_grad_enabled(enabled):
            assert fastattn.attention(q, K, V, mask).requires_grad == enabled
    assert answers == [True, True, True]


def test_a_mask_that_is_changed_in_place_counts_as_it_is_now(answers):
    real = REAL.clone()
    mask = Mask(real_keys=real)
    before = fastattn.attention(Q, K, V, mask)
    real.numpy()[:, 3] = False  # of which PyTorch knows nothing
    after = fastattn.attention(Q, K, V, mask)
    assert answers == [True, True]
    assert not torch.equal(after, before)
    assert torch.equal(after, fastattn.attention(Q, K, V, Mask(real_keys=real), backend="native"))
    real.resize_(2, 6)
    with pytest.raises(ValueError, match=r"mask\.real_keys must be \[2, 7\]"):
        fastattn.attention(Q, K, V, mask)


def test_a_mask_may_be_copied_and_used_by_two_threads():
    mask = Mask(causal=True, q_start=4, real_keys=REAL)
    calls = [torch.randn(2, 4, n, 8, generator=torch.Generator().manual_seed(n)) for n in range(1, 9)]
    expected = [fastattn.attention(q, K, V, mask, backend="reference") for q in calls]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(20):
            for o, right in zip(threads.map(lambda q: fastattn.attention(q, K, V, mask), calls), expected, strict=True):
                torch.testing.assert_close(o, right)
    assert torch.equal(fastattn.attention(Q, K, V, copy.deepcopy(mask)), fastattn.attention(Q, K, V, mask))


def test_a_dtype_that_is_not_computed_builds_nothing(monkeypatch):
    def build(device: torch.device) -> None:
        raise AssertionError("built for a call it does not take")

    monkeypatch.setattr(native.cpu, "unavailable", build)
    with pytest.warns(FallbackWarning, match="float64"):
        fastattn.attention(Q.double(), K.double(), V.double())


def test_a_backend_that_serves_by_name_only_is_not_asked(monkeypatch, answers):
    backends.asked_first.cache_clear()
    monkeypatch.setattr(native, "by_name_only", lambda device: "is shy")
    try:
        with pytest.warns(FallbackWarning, match="is shy"):
            fastattn.attention(Q, K, V)
    finally:
        backends.asked_first.cache_clear()
    assert not answers


def differentiated(
    inputs: Inputs, backend: str | None, wanted: str = "qkv", outputs: str = "o lse"
) -> dict[str, Tensor]:
    """The outputs, and the gradients that arrive through those named."""
    leaves = {name: getattr(inputs, name).detach().requires_grad_(name in wanted) for name in "qkv"}
    spec = inputs.spec()
    o, lse = fastattn.attention(*leaves.values(), spec.mask, scale=spec.scale, return_lse=True, backend=backend)
    arriving = {"o": (o, inputs.do), "lse": (lse, inputs.dlse)}
    of, gradients = zip(*(arriving[name] for name in outputs.split()), strict=True)
    found = torch.autograd.grad(of, [leaves[name] for name in wanted], gradients)
    return {"o": o, "lse": lse} | dict(zip(wanted, found, strict=True))


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name
        assert (actual[name].dtype, actual[name].stride()) == (expected[name].dtype, expected[name].stride()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", TAKEN, ids=lambda case: case.name)
def test_gradients_are_those_of_the_long_way(case, dtype, answers):
    inputs = make_inputs(case, dtype)
    found = differentiated(inputs, None)
    assert answers == [
        all(x.numel() and (x.stride(-1) == 1 or x.shape[-1] == 1) for x in (inputs.q, inputs.k, inputs.v))
    ]
    assert_same_bits(found, differentiated(inputs, "native"))
    assert len(answers) == 1


SOME = make_inputs(next(case for case in TAKEN if case.name == "window-causal"), torch.float32)


@pytest.mark.parametrize("outputs", ["o", "lse", "o lse"])
@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "qv", "kv"])
def test_any_gradients_of_any_output(wanted, outputs, answers):
    assert_same_bits(differentiated(SOME, None, wanted, outputs), differentiated(SOME, "native", wanted, outputs))
    assert answers == [True]


def leaves() -> list[Tensor]:
    return [x.clone().requires_grad_() for x in (Q, K, V)]


def test_gradients_that_are_one_number_for_all_elements(answers):
    found = torch.autograd.grad(fastattn.attention(*(q := leaves())).sum(), q)
    assert answers == [True]
    expected = torch.autograd.grad(fastattn.attention(*(q := leaves()), backend="native").sum(), q)
    assert all(map(torch.equal, found, expected))


def test_derivatives_of_the_gradients(answers):
    def second(backend: str | None) -> tuple[Tensor, ...]:
        x, mask = leaves(), Mask(causal=True, q_start=4, real_keys=REAL)
        gradients = torch.autograd.grad(fastattn.attention(*x, mask, backend=backend).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), x)

    found = second(None)
    assert answers == [True]
    assert all(map(torch.equal, found, second("native")))


def test_gradients_of_several_at_a_time(answers):
    def batched(backend: str | None) -> tuple[Tensor, ...]:
        x = leaves()
        o = fastattn.attention(*x, backend=backend)
        several = torch.randn(3, *o.shape, generator=torch.Generator().manual_seed(0))
        return torch.autograd.grad(o, x, several, is_grads_batched=True)

    found = batched(None)
    assert answers == [True]
    assert all(map(torch.equal, found, batched("native")))


class Ops(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.add(op.name())
        return op(*args, **(kwargs or {}))


def test_who_looks_on_sees_the_backward():
    x = leaves()
    o = fastattn.attention(*x)
    expected = torch.autograd.grad(o.sum(), x, retain_graph=True)
    with Ops() as ops:
        found = torch.autograd.grad(o.sum(), x, retain_graph=True)
    with torch.profiler.profile() as profile:
        profiled = torch.autograd.grad(o.sum(), x, retain_graph=True)
    assert "fastattn::backward" in ops.names
    assert "fastattn::backward" in {event.key for event in profile.key_averages()}
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, profiled, expected))


def test_a_tangent_passes_through_the_backward():
    def tangents(backend: str | None) -> list[Tensor]:
        x = leaves()
        o = fastattn.attention(*x, backend=backend)
        with torch.autograd.forward_ad.dual_level():
            do = torch.autograd.forward_ad.make_dual(torch.zeros_like(o), torch.ones_like(o))
            return [torch.autograd.forward_ad.unpack_dual(g).tangent for g in torch.autograd.grad(o, x, do)]

    assert all(map(torch.equal, tangents(None), tangents("native")))


@pytest.mark.parametrize("name", ["q", "real_keys", "documents"])
def test_what_was_changed_since_the_forward_is_refused(name, answers):
    x, real, documents = leaves(), REAL.clone(), DOCUMENTS.clone()
    q = x[0] * 1.0
    o = fastattn.attention(q, *x[1:], Mask(real_keys=real, segments=(documents[:, :3], documents)))
    assert answers == [True]
    with torch.no_grad():
        {"q": q, "real_keys": real, "documents": documents}[name].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_a_checkpoint_around_it(answers):
    def gradients(checkpointed: bool) -> tuple[Tensor, ...]:
        x = leaves()
        attend = functools.partial(fastattn.attention, mask=Mask(real_keys=REAL))
        o = checkpoint(attend, *x, use_reentrant=False) if checkpointed else attend(*x)
        return torch.autograd.grad(o.sin().sum(), x)

    assert all(map(torch.equal, gradients(checkpointed=True), gradients(checkpointed=False)))
    assert answers == [True] * 3


@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_calls_are_one_graph(compiled, answers):
    mask = Mask(causal=True, q_start=4, real_keys=REAL)
    attend = functools.partial(fastattn.attention, mask=mask)
    run = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    with torch.no_grad() if compiled else nullcontext():
        assert torch.equal(run(Q, K, V), fastattn.attention(Q, K, V, mask, backend="native"))
    assert answers == ([] if compiled else [True])
