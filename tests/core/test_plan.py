"""Plans: a kind of call is judged once, and what a plan depends on is never taken from an earlier call."""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from fastattn import FallbackWarning, Mask, backends, ops, plan
from fastattn.backends import aten, cpu, reference
from fastattn.spec import Spec
from fastattn.testing import CASES, make_inputs

Q, K, V = (torch.randn(2, H, n, 8, generator=torch.Generator().manual_seed(n)) for H, n in ((4, 3), (2, 7), (2, 7)))
REAL = torch.tensor([[1, 1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 1, 1]], dtype=torch.bool)
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, -1, 2], [4, 3, 4, 3, 3, 3, 3]])


@pytest.fixture
def judged(monkeypatch) -> list[tuple]:
    """The arguments of every call that is judged from now on; no kind is known before, and no call is short."""
    calls, validated = [], plan.validated
    monkeypatch.setattr(plan, "validated", lambda *arguments: calls.append(arguments) or validated(*arguments))
    monkeypatch.setattr(ops, "short_way", lambda *arguments: None)
    plan.forget_plans()
    return calls


OF_A_KIND_OF_ITS_OWN = {
    "no mask": {},
    "causal": {"mask": Mask(causal=True)},
    "q_offset": {"mask": Mask(q_offset=1)},
    "q_offsets": {"mask": Mask(q_offset=torch.tensor([1, 2]))},
    "window": {"mask": Mask(window=(1, None))},
    "real_keys": {"mask": Mask(real_keys=REAL)},
    "real_queries": {"mask": Mask(real_queries=REAL[:, :3])},
    "segment_ids": {"mask": Mask(segment_ids=(DOCUMENTS[:, :3], DOCUMENTS))},
    "int32 segment ids": {"mask": Mask(segment_ids=(DOCUMENTS[:, :3].int(), DOCUMENTS.int()))},
    "dense": {"mask": Mask(dense=torch.ones(3, 7, dtype=torch.bool))},
    "scale": {"scale": 0.5},
    "bias": {"bias": torch.zeros(7)},
    "bias of queries": {"bias": torch.zeros(3, 1)},
    "softcap": {"softcap": 3.0},
    "slopes": {"alibi_slopes": torch.ones(4)},
    "slopes of samples": {"alibi_slopes": torch.ones(2, 4)},
    "sinks": {"sinks": torch.ones(4)},
    "dropout": {"dropout_p": 0.5},
    "any bits": {"deterministic": False},
    "backend": {"backend": "reference"},
    "fused": {"backend": "fused"},
    "dtype": {"q": Q.half(), "k": K.half(), "v": V.half()},
    "fewer keys": {"k": K[:, :, :5], "v": V[:, :, :5]},
    "parameter": {"q": torch.nn.Parameter(Q, requires_grad=False)},
}


def test_each_kind_is_judged_once(judged):
    calls = [{"q": Q, "k": K, "v": V} | call for call in OF_A_KIND_OF_ITS_OWN.values()]
    first = [fastattn.attention(**call) for call in calls]
    assert len(judged) == len(calls)
    for call, o in zip(calls, first, strict=True):
        other = {name: x.clone() if type(x) is Tensor else x for name, x in call.items()}
        assert torch.equal(fastattn.attention(**other), o) or "dropout_p" in call
    assert len(judged) == len(calls)


def test_functions_have_plans_of_their_own(judged):
    for _ in range(2):
        fastattn.attention(Q, K, K[..., :0])
        fastattn.attention_weights(Q, K)
        fastattn.attention_received(Q, K)
        fastattn.top_keys(Q, K, top_k=1)
    assert len(judged) == 4


def test_a_short_call_that_fails_in_cpp_raises_as_any_other(monkeypatch):
    fastattn.attention(Q, K, V)
    monkeypatch.setenv("FASTATTN_CPU_CAPABILITY", "none")
    with pytest.raises(ValueError, match="FASTATTN_CPU_CAPABILITY must be one of"):
        fastattn.attention(Q, K, V)


@pytest.mark.parametrize("number", [{"softcap": 2}, {"dropout_p": 1}, {"scale": 1}, {"deterministic": 0}], ids=str)
def test_numbers_are_converted_on_either_road(number):
    as_documented = {name: bool(x) if name == "deterministic" else float(x) for name, x in number.items()}
    expected = fastattn.attention(Q, K, V, **as_documented)
    for _ in range(2):
        assert torch.equal(fastattn.attention(Q, K, V, **number), expected)
        with Ops():
            assert torch.equal(fastattn.attention(Q, K, V, **number), expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_by_name():
    nested = torch.nested.nested_tensor([torch.ones(2, 3, 8), torch.ones(2, 5, 8)])
    with pytest.raises(ValueError, match="q must be a dense Tensor, got a nested tensor"):
        fastattn.attention(nested, nested, nested)


def test_a_spec_stands_for_calls_of_its_kind_until_it_is_another():
    def spec_of(**terms: object) -> Spec:
        arguments = {"mask": None, "bias": None, "dropout_p": 0.0, "generator": None} | terms
        mask, bias, *dropout = arguments.values()
        return plan.prepare(Q, K, V, mask, None, bias, None, None, None, *dropout, True, "cpu")[3]

    bare = spec_of()
    assert bare.kind is bare is spec_of()
    assert replace(bare, dropout_p=0.5).kind is None
    with_tensors = [spec_of(mask=Mask(real_keys=REAL), bias=torch.zeros(7)) for _ in range(2)]
    assert with_tensors[0].kind is with_tensors[1].kind not in (None, bare, *with_tensors)
    assert with_tensors[0].kind.tensors() == []
    places = fastattn.DropoutSeed(0, places=plan.places_from((0, 0), 3, 7, Q.device))
    assert spec_of(dropout_p=0.5).kind is spec_of(dropout_p=0.5).kind is not None
    assert spec_of(dropout_p=0.5, generator=places).kind is None


def test_plans_are_bounded(monkeypatch, judged):
    monkeypatch.setattr(plan, "MOST_PLANS", 3)
    for n in (1, 2, 3, 4, 1):
        fastattn.attention(Q, K[:, :, :n], V[:, :, :n])
    assert len(judged) == 5
    assert len(plan._plans) <= 3


def test_backends_that_are_replaced_are_asked_anew(monkeypatch):
    fastattn.attention(Q, K, V)
    monkeypatch.setattr(backends, "BACKENDS", (reference,))
    with pytest.warns(FallbackWarning):
        fastattn.attention(Q, K, V)


def test_a_fallback_warns_whenever_it_serves(monkeypatch):
    for backend in (cpu, aten):
        monkeypatch.setattr(backend, "by_name_only", lambda device: "is shy")
    plan.forget_plans()
    for _ in range(2):
        with pytest.warns(FallbackWarning, match="is shy"):
            fastattn.attention(Q, K, V, softcap=1.0)


class Watched(Tensor):
    """Lives by __torch_function__ alone, which sets no dispatch key."""

    seen = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen += function is torch.ops.fastattn.forward
        return super().__torch_function__(function, types, args, kwargs)


def test_a_subclass_sees_the_call():
    watched = DOCUMENTS.as_subclass(Watched)
    for call in (
        {"q": Q.as_subclass(Watched)},
        {"mask": Mask(real_keys=REAL.as_subclass(Watched))},
        {"mask": Mask(real_queries=REAL[:, :3].as_subclass(Watched))},
        {"mask": Mask(segment_ids=(watched[:, :3], DOCUMENTS))},
        {"mask": Mask(segment_ids=(DOCUMENTS[:, :3], watched))},
        {"bias": torch.zeros(7).as_subclass(Watched)},
    ):
        for _ in range(2):
            Watched.seen = 0
            fastattn.attention(**({"q": Q, "k": K, "v": V} | call))
            assert Watched.seen == 1


class Ops(TorchDispatchMode):
    """Keeps the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.add(op.name())
        return op(*args, **(kwargs or {}))


def leaves() -> list[Tensor]:
    return [x.clone().requires_grad_() for x in (Q, K, V)]


def test_who_looks_on_sees_the_backward():
    x = leaves()
    o = fastattn.attention(*x)
    expected = torch.autograd.grad(o.sum(), x, retain_graph=True)
    with Ops() as ops:
        gradients = torch.autograd.grad(o.sum(), x, retain_graph=True)
    with torch.profiler.profile() as profile:
        profiled = torch.autograd.grad(o.sum(), x, retain_graph=True)
    assert "fastattn::backward" in ops.names
    assert "fastattn::backward" in {event.key for event in profile.key_averages()}
    assert all(map(torch.equal, gradients, expected))
    assert all(map(torch.equal, profiled, expected))


def test_the_dispatcher_changes_no_bit():
    """Outputs and gradients of every case, with a mode that looks on and without."""
    for case in CASES:
        if case.timed or case.dropout_p:
            continue
        inputs = make_inputs(case, torch.float32)
        outputs = []
        for watched in (False, True):
            learned = {name: x.detach().requires_grad_() for name, x in inputs.learned().items()}
            terms = {n: learned[n] for n in "qkv"} | inputs.with_terms(learned)
            with Ops() if watched else contextlib.nullcontext():
                o, lse = fastattn.attention(mask=inputs.mask, return_lse=True, **terms)
                gradients = torch.autograd.grad((o, lse), list(learned.values()), (inputs.do, inputs.dlse))
            outputs.append((o, lse, *gradients))
        for direct, dispatched in zip(*outputs, strict=True):
            assert torch.equal(direct, dispatched), case.name
            assert (direct.dtype, direct.stride()) == (dispatched.dtype, dispatched.stride()), case.name


@pytest.mark.parametrize("backend", [None, "torch"])
@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("d_v", [8, 5])
def test_a_dual_number_keeps_its_tangent(d_v, one, backend):
    q, k, v = (x[:1, :1] if one else x for x in (Q[:, :, :1] if one else Q, K, V[..., :d_v]))
    fastattn.attention(q, k, v, backend=backend)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        o = fastattn.attention(dual, k, v, backend=backend)
        assert forward_ad.unpack_dual(o).tangent is not None


def test_autocast_decides_the_dtype_between_calls():
    mask = Mask(real_keys=REAL)
    for enabled in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert fastattn.attention(Q, K, V, mask).dtype == (torch.bfloat16 if enabled else torch.float32)


def test_the_mode_of_gradients_decides_between_calls():
    q, mask = Q.clone().requires_grad_(), Mask(causal=True)
    for enabled in (False, True, False):
        with torch.set_grad_enabled(enabled):
            assert fastattn.attention(q, K, V, mask).requires_grad == enabled


def test_default_dtype_and_threads_decide_nothing():
    expected = fastattn.attention(Q, K, V)
    dtype = torch.get_default_dtype()
    torch.set_num_threads(5)
    try:
        torch.set_default_dtype(torch.float64)
        assert torch.equal(fastattn.attention(Q, K, V), expected)
    finally:
        torch.set_default_dtype(dtype)


def test_a_mask_that_is_changed_in_place_counts_as_it_is_now():
    real = REAL.clone()
    mask = Mask(real_keys=real)
    before = fastattn.attention(Q, K, V, mask)
    real.numpy()[:, 3] = False  # of which PyTorch knows nothing
    after = fastattn.attention(Q, K, V, mask)
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, fastattn.attention(Q, K, V, Mask(real_keys=real), backend="reference"))
    real.resize_(2, 6)
    with pytest.raises(ValueError, match=r"mask\.real_keys must be \[2, 7\]"):
        fastattn.attention(Q, K, V, mask)


def test_a_mask_may_be_copied_and_used_by_two_threads():
    mask = Mask(causal=True, q_offset=4, real_keys=REAL)
    calls = [torch.randn(2, 4, n, 8, generator=torch.Generator().manual_seed(n)) for n in range(1, 9)]
    expected = [fastattn.attention(q, K, V, mask, backend="reference") for q in calls]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(20):
            for o, right in zip(threads.map(lambda q: fastattn.attention(q, K, V, mask), calls), expected, strict=True):
                torch.testing.assert_close(o, right)
    assert torch.equal(fastattn.attention(Q, K, V, copy.deepcopy(mask)), fastattn.attention(Q, K, V, mask))


@pytest.mark.parametrize("name", ["q", "real_keys", "documents"])
def test_what_was_changed_since_the_forward_is_refused(name):
    x, real, documents = leaves(), REAL.clone(), DOCUMENTS.clone()
    q = x[0] * 1.0
    o = fastattn.attention(q, *x[1:], Mask(real_keys=real, segment_ids=(documents[:, :3], documents)))
    with torch.no_grad():
        {"q": q, "real_keys": real, "documents": documents}[name].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


OF_TENSORS = ("q_offsets", "real_keys", "real_queries", "segment_ids", "dense", "bias", "slopes", "sinks")
ROADS = {"short": contextlib.nullcontext, "dispatched": BaseTorchFunctionMode}  # and the one of a backend by name


def tensors_of(call: dict) -> list[Tensor]:
    given = call.get("mask", Mask()).tensors().values()
    return [*given, *(x for x in call.values() if isinstance(x, Tensor))]


def made_anew(name: str) -> dict:
    """The arguments of a kind, in tensors of their own, not all alike, as this thread makes them."""
    call = copy.deepcopy(OF_A_KIND_OF_ITS_OWN[name])
    for x in tensors_of(call):
        if x.dtype == torch.bool or x.is_floating_point():
            x.copy_(torch.arange(x.numel()).view(x.shape) % 3 > 0)
    return call


@pytest.mark.parametrize("backend", [None, "cpu"])
@pytest.mark.parametrize("name", OF_TENSORS)
def test_what_a_backward_needs_is_kept_by_autograd_alone(name, backend):
    """Which may give it away, as a checkpoint does and those who save memory on GPUs, and get it again."""
    x, packed, call = leaves(), [], made_anew(name)
    expected = torch.autograd.grad(fastattn.attention(*x, **call, backend=backend).square().sum(), x)
    pack = lambda y: packed.append(y.clone()) or len(packed) - 1  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
        o = fastattn.attention(*x, **call, backend=backend)
    given = list(map(weakref.ref, tensors_of(call)))
    for tensor in tensors_of(call):
        tensor.zero_()
    del tensor
    call.clear()
    assert all(tensor() is None for tensor in given)
    assert all(map(torch.equal, torch.autograd.grad(o.square().sum(), x), expected))


@pytest.mark.parametrize("backend", [None, "cpu"])
@pytest.mark.parametrize("name", ["bias", "dense"])
def test_tables_are_free_after_the_backward(name, backend):
    x, call = leaves(), made_anew(name)
    o = fastattn.attention(*x, **call, backend=backend)
    (given,) = map(weakref.ref, tensors_of(call))
    call.clear()
    o.sum().backward()
    assert given() is None


@pytest.mark.parametrize("road", [*ROADS, "backend"])
@pytest.mark.parametrize("name", OF_TENSORS)
def test_what_was_made_in_inference_mode_serves_training(name, road):
    """As a mask that a model makes in its first forward, and keeps: PyTorch saves no such tensor for a backward."""
    with torch.inference_mode():
        call = made_anew(name)
    assert all(tensor.is_inference() for tensor in tensors_of(call))
    backend = {"backend": "cpu"} if road == "backend" else {}

    def gradients(call: dict) -> tuple[Tensor, ...]:
        x = leaves()
        with ROADS.get(road, contextlib.nullcontext)():
            o, weights = fastattn.attention_with_weights(*x, **call, **backend)
        both = torch.autograd.grad(o.square().sum() + weights.square().sum(), x)
        return *both, *torch.autograd.grad(fastattn.attention(*x, **call, **backend).square().sum(), x)

    for gradient, expected in zip(gradients(call), gradients(made_anew(name)), strict=True):
        torch.testing.assert_close(gradient, expected)


def forward_over_backward(o: Tensor, x: list[Tensor]) -> tuple[Tensor, ...]:
    with forward_ad.dual_level():
        do = forward_ad.make_dual(o.detach(), o.detach().cos())
        return tuple(y for g in torch.autograd.grad(o, x, do) for y in forward_ad.unpack_dual(g))


def again(o: Tensor, x: list[Tensor]) -> tuple[Tensor, ...]:
    gradients = torch.autograd.grad(o.sin().sum(), x, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in gradients), x)


def by_compiled_autograd(o: Tensor, x: list[Tensor]) -> tuple[Tensor, ...]:
    with compiled_autograd._enable(lambda graph: graph):
        o.sin().sum().backward()
    return tuple(leaf.grad for leaf in x)


BACKWARDS = {
    "plain": lambda o, x: torch.autograd.grad(o.sin().sum(), x),
    "of one": lambda o, x: torch.autograd.grad(o.sin().sum(), x[2:]),
    "again": again,
    "batched": lambda o, x: torch.autograd.grad(
        o, x, torch.stack([o.detach(), o.detach().sin()]), is_grads_batched=True
    ),
    "forward over backward": forward_over_backward,
    "compiled autograd": by_compiled_autograd,
}


TERMS = {
    "mask": Mask(
        causal=True, q_offset=torch.tensor([4, 2]), window=(5, None), real_keys=REAL,
        segment_ids=(DOCUMENTS[:, :3], DOCUMENTS),
    ),
    "scale": 0.3, "softcap": 2.0, "bias": torch.randn(3, 7), "alibi_slopes": torch.rand(4), "sinks": torch.rand(4),
}  # fmt: skip


def on_both_roads(gradients: Callable[[], tuple[str, tuple]], monkeypatch) -> tuple[tuple, tuple]:
    """The gradients of a function by the short way and on the general road, which its node of the graph tells apart."""
    fastattn.attention(Q, K, V)  # after which calls of every kind are short
    short = gradients()
    monkeypatch.setattr(ops, "short_way", lambda *arguments: None)
    general = gradients()
    assert short[0] != general[0]
    return short[1], general[1]


LAZILY_NEGATED = torch.randn(2, 4, 3, 8, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).conj().imag
COTANGENTS = {
    "of o": lambda o, lse, x: torch.autograd.grad(o, x, o.detach().cos()),
    "of lse": lambda o, lse, x: torch.autograd.grad(lse, x, lse.detach().cos()),
    "of both": lambda o, lse, x: torch.autograd.grad((o, lse), x, (o.detach().cos(), lse.detach().cos())),
    "lazily negated": lambda o, lse, x: torch.autograd.grad(o, x, LAZILY_NEGATED),
    "without memory": lambda o, lse, x: torch.autograd.grad(o, x, torch._efficientzerotensor(o.shape)),
    "expanded": lambda o, lse, x: torch.autograd.grad(o.sum(), x),
}


@pytest.mark.parametrize("name", [*BACKWARDS, *COTANGENTS])
def test_gradients_of_the_short_way_are_those_of_the_general_road(name, monkeypatch):
    """Whatever comes back to it."""

    def gradients() -> tuple[str, tuple[Tensor, ...]]:
        x = leaves()
        if name in BACKWARDS:
            o = fastattn.attention(*x, **TERMS)
            return type(o.grad_fn).__name__, BACKWARDS[name](o, x)
        o, lse = fastattn.attention(*x, **TERMS, return_lse=True)
        return type(o.grad_fn).__name__, COTANGENTS[name](o, lse, x)

    assert all(map(torch.equal, *on_both_roads(gradients, monkeypatch)))


def test_lse_is_in_the_graph_of_a_short_call_only_where_it_is_asked_for():
    fastattn.attention(Q, K, V)
    o, lse = fastattn.attention(*leaves(), return_lse=True)
    assert o.grad_fn is lse.grad_fn
    assert [len(y.grad_fn._input_metadata) for y in (o, fastattn.attention(*leaves()))] == [2, 1]


@pytest.mark.parametrize("backend", [None, "cpu", "torch", "reference"])
def test_what_no_longer_fits_in_the_backward_is_refused(backend):
    """Of a short call, and of any other that nobody watches."""
    fastattn.attention(Q, K, V)
    for i, other, sentence in ((0, torch.ones(3), "q must be"), (2, V[:, :, :5], "v must be")):
        x = leaves()
        o = fastattn.attention(*x, backend=backend)
        with pytest.raises(ValueError, match="do must be"):
            o.grad_fn.apply(o[:, :, :2].detach(), *[None] * (backend is not None))
        x[i].data = other
        with pytest.raises(ValueError, match=sentence):
            o.sum().backward()


@pytest.mark.parametrize("average_heads", [True, False])
def test_weights_of_the_short_way_are_those_of_the_general_road(average_heads, monkeypatch):
    attend = functools.partial(fastattn.attention_with_weights, Q, K, V, **TERMS, average_heads=average_heads)
    fastattn.attention(Q, K, V)
    with monkeypatch.context() as without_general_road:
        without_general_road.setattr(ops, "weights", None)
        short = attend()
    monkeypatch.setattr(ops, "short_way", lambda *arguments: None)
    assert all(map(torch.equal, short, attend()))


OF_WEIGHTS = {
    "of o": lambda o, weights: o.sin().sum(),
    "of the weights": lambda o, weights: weights.sin().sum(),
    "of both": lambda o, weights: o.sin().sum() + weights.cos().sum(),
}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", OF_WEIGHTS)
@pytest.mark.parametrize("average_heads", [True, False])
def test_gradients_with_weights_of_the_short_way_are_those_of_the_general_road(average_heads, name, again, monkeypatch):
    def gradients() -> tuple[str, tuple[Tensor, ...]]:
        x = leaves()
        o, weights = fastattn.attention_with_weights(*x, **TERMS, average_heads=average_heads)
        result = torch.autograd.grad(OF_WEIGHTS[name](o, weights), x, create_graph=again, allow_unused=True)
        if again:
            total = sum(g.square().sum() for g in result if g is not None)
            result = torch.autograd.grad(total, x, allow_unused=True)
        return type(weights.grad_fn).__name__, result

    for actual, expected in zip(*on_both_roads(gradients, monkeypatch), strict=True):
        assert (actual is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(actual, expected, **({} if again else {"rtol": 0, "atol": 0}))


def test_plans_are_not_made_while_a_call_is_compiled(judged):
    mask = Mask(causal=True, q_offset=4, real_keys=REAL)
    attend = functools.partial(fastattn.attention, mask=mask)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(Q, K, V), attend(Q, K, V))
    assert len(plan._plans) == 1


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_flags_are_checked_in_every_call(dropout_p):
    for _ in range(3):
        fastattn.attention(Q, Q, Q, dropout_p=dropout_p)
        for flag in ("x", 1.0, np.True_):  # the last two are equal to True, and have its hash
            with pytest.raises(ValueError, match=f"deterministic must be a bool, got {flag!r}"):
                fastattn.attention(Q, Q, Q, dropout_p=dropout_p, deterministic=flag, backend="cpu")
        fastattn.attention(Q, Q, Q, dropout_p=dropout_p, backend="cpu")


def test_an_int_is_a_flag_in_every_call():
    for flag in (True, 1, 1, False, 0, 0):
        result = fastattn.attention(Q, Q, Q, return_lse=flag)
        assert (isinstance(result, tuple) and result[1] is not None) == flag
