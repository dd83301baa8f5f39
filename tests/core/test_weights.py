"""The weights in every form: computed and within the budget, or refused with exactly the objections of a backend.

Weights are the output of attention for values that are the identity, so `formula` is their oracle too.
"""

import dataclasses
import functools
import itertools
import re
import subprocess
import sys

import pytest
import torch

import fastattn
from fastattn import Mask, derivatives, ops
from fastattn.backends import BACKENDS, cpu, objections, reference, triton
from fastattn.testing import CASES, DTYPES, Inputs, compare, formula, make_inputs

TESTED = [case for case in CASES if not case.timed]
TOP_K = 5
PROMISES = {b.NAME: {"weights", "received", "top_keys"} for b in BACKENDS} | {
    name: set() for name in ("hopper", "cuda", "torch")
}
COMPUTING = [b for b in BACKENDS if PROMISES[b.NAME]]


@dataclasses.dataclass(frozen=True)
class Form:
    """A way to ask for the weights: the backend's function, and the call. `drops`: it knows dropout."""

    name: str
    function: str
    call: object
    drops: bool = True

    def __str__(self) -> str:
        return self.name

    def __call__(self, inputs: Inputs, backend: str | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        options = dict(inputs.options)
        if "generator" in options:
            options["generator"] = options["generator"].clone_state()
        result = self.call(inputs.q, inputs.k, inputs.mask, backend=backend, **options)
        return result if isinstance(result, tuple) else (result, None)


def each_head_beside_output(q, k, mask, **options):
    v = k.new_ones(*k.shape[:3], 3)
    return fastattn.attention_with_weights(q, k, v, mask, average_heads=False, **options)[1]


def top_keys(q, k, mask, **options):
    return fastattn.top_keys(q, k, mask, top_k=TOP_K, **options)


FORMS = (
    Form("averaged", "weights", fastattn.attention_weights),
    Form("each-head", "weights", each_head_beside_output),
    Form("received", "received", fastattn.attention_received, drops=False),
    Form("top-keys", "top_keys", top_keys, drops=False),
)


def inputs_for(form: Form, case, dtype: torch.dtype) -> Inputs:
    inputs = make_inputs(case, dtype)
    if not form.drops:
        inputs.options.pop("dropout_p", None)
        inputs.options.pop("generator", None)
    return inputs


def case_named(name: str):
    return next(case for case in CASES if case.name == name)


def refusals(backend, form: Form, inputs: Inputs) -> list[str]:
    spec = inputs.spec()
    return objections(backend, inputs.q, inputs.k, inputs.k[..., :0], spec, function=form.function)


def textbook(inputs: Inputs, dtype: torch.dtype):
    """(weights [B, H, n_q, n_k], their gradients as a function of what arrives) by the plain formula in that dtype."""
    n_k = inputs.k.shape[2]
    learned = {name: x.detach().to(dtype) for name, x in inputs.learned().items()}
    learned["v"] = torch.eye(n_k, dtype=dtype).expand(*inputs.k.shape[:2], n_k, n_k)
    weights, lse, gradients = formula(inputs, learned)

    def of_weights(d_weights):
        by_name = dict(zip(learned, gradients(d_weights, torch.zeros_like(lse)), strict=True))
        return {f"d{name}": x for name, x in by_name.items() if name != "v"}

    return weights, of_weights


@functools.lru_cache(maxsize=2)  # calls of one case and dtype follow each other, see every_call
def oracle(case, dtype: torch.dtype, drops: bool):
    """What `textbook` says in fp64, and in `dtype`."""
    form = next(form for form in FORMS if form.drops == drops)
    inputs = inputs_for(form, case, dtype)
    return textbook(inputs, torch.float64), textbook(inputs, dtype)


def formed(form: Form, weights: torch.Tensor, keys: torch.Tensor | None) -> torch.Tensor:
    if form.function == "received":
        return weights.sum(2)
    if form.function == "top_keys":
        return weights.gather(-1, keys.clamp(min=0)) * (keys >= 0)
    return weights if form.name == "each-head" else weights.mean(1)


def by_pair(form: Form, arriving: torch.Tensor, keys: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """The gradient of every weight, from that of the form."""
    arriving = arriving.to(like.dtype)
    if form.function == "received":
        return arriving[:, :, None].expand_as(like)
    if form.function == "top_keys":
        return torch.zeros_like(like).scatter_add(-1, keys.clamp(min=0), arriving * (keys >= 0))
    return arriving if form.name == "each-head" else (arriving / like.shape[1])[:, None].expand_as(like)


def largest(weights: torch.Tensor) -> torch.Tensor:
    values = weights.sort(-1, descending=True).values[..., :TOP_K]
    return torch.nn.functional.pad(values, (0, TOP_K - values.shape[-1]))


def visible(inputs: Inputs) -> torch.Tensor:
    """bool [B, H, n_q, n_k]."""
    n_q, n_k = inputs.q.shape[2], inputs.k.shape[2]
    return inputs.mask.keep(n_q, n_k).expand(*inputs.q.shape[:3], n_k)


def assert_all_right(judged) -> None:
    wrong = [str(error) for error in judged if not error.right]
    assert not wrong, "; ".join(wrong)


def every_call() -> list[tuple]:
    """Each case in all forms and in all dtypes, not in all pairs of them: the forms are made of the same weights.

    Where Triton is interpreted, which is slow, each case in one form and one dtype, in turn; on a GPU in every pair.
    """
    interpreted = not torch.cuda.is_available()

    def wanted(i: int, j: int, k: int, backend) -> bool:
        if backend is triton and interpreted:
            return (i % len(FORMS), i % len(DTYPES)) == (j, k)
        return backend not in (reference, cpu) or (i + j) % len(DTYPES) == k

    places = itertools.product(enumerate(TESTED), enumerate(DTYPES), enumerate(FORMS), COMPUTING)
    return [(case, dtype, form, b) for (i, case), (k, dtype), (j, form), b in places if wanted(i, j, k, b)]


@pytest.mark.parametrize(("case", "dtype", "form", "backend"), every_call(), ids=lambda x: getattr(x, "NAME", str(x)))
def test_weights_are_right_or_refused(case, dtype, form, backend):
    inputs = inputs_for(form, case, dtype)
    if why := refusals(backend, form, inputs):
        with pytest.raises(NotImplementedError, match=re.escape("; ".join(why))):
            form(inputs, backend.NAME)
        return
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.learned().items() if name != "v"}
    with_leaves = dataclasses.replace(inputs, q=leaves["q"], k=leaves["k"], options=inputs.with_terms(leaves))
    actual, keys = form(with_leaves, backend.NAME)
    (exact, exact_gradients), (naive, naive_gradients) = oracle(case, dtype, form.drops)
    assert actual.dtype == (dtype if form.function == "weights" else torch.float32)

    errors = [compare("weights", actual.detach(), formed(form, naive, keys), formed(form, exact, keys))]
    if form.function == "top_keys":
        assert keys.dtype == torch.int64
        errors.append(compare("largest", actual.detach(), largest(naive), largest(exact)))
        places = visible(inputs).sum(-1, keepdim=True).clamp(max=TOP_K)
        assert torch.equal(keys >= 0, torch.arange(TOP_K) < places)
        assert visible(inputs).gather(-1, keys.clamp(min=0))[keys >= 0].all()
        ordered = keys.sort(-1).values
        assert ((ordered[..., 1:] != ordered[..., :-1]) | (ordered[..., 1:] < 0)).all()
    hidden = ~visible(inputs)
    if form.function == "weights":
        hidden = hidden if form.name == "each-head" else hidden.all(1)
        assert (actual[hidden] == 0).all()
    if form.function == "received":
        assert (actual[hidden.all(2)] == 0).all()

    generator, by_call = torch.Generator().manual_seed(1), []
    for _ in range(3):  # sums of so many rounded numbers, of which the naive ones may cancel by luck in a single call
        arriving = torch.randn(actual.shape, generator=generator).to(actual.dtype)
        gradients = torch.autograd.grad(actual, list(leaves.values()), arriving, retain_graph=True)
        of_naive = naive_gradients(by_pair(form, arriving, keys, naive))
        of_exact = exact_gradients(by_pair(form, arriving, keys, exact))
        by_call.append(
            [(x, of_naive[f"d{name}"], of_exact[f"d{name}"]) for name, x in zip(leaves, gradients, strict=True)]
        )
    for name, *of_calls in zip(leaves, *by_call, strict=True):
        errors.append(compare(f"d{name}", *map(torch.stack, zip(*of_calls, strict=True))))
    assert_all_right(errors)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.NAME)
def test_backend_keeps_its_promises(backend):
    promised = PROMISES[backend.NAME]
    x = torch.ones(1, 1, 2, 16)
    refused = {f.function: refusals(backend, f, Inputs(x, x, x, x, x, Mask(), {"scale": 1.0})) for f in FORMS}
    assert {function for function, why in refused.items() if not why} == promised


def test_a_backend_without_the_function_objects(monkeypatch):
    monkeypatch.setattr(cpu, "lacks", lambda device: {"weights"})
    x = torch.ones(1, 1, 2, 16)
    with pytest.raises(NotImplementedError, match="cpu: does not compute weights on cpu"):
        fastattn.attention_weights(x, x, backend="cpu")
    with pytest.raises(NotImplementedError, match="no fused backend computes this call"):
        fastattn.attention_with_weights(x, x, x, backend="fused")
    with pytest.warns(fastattn.FallbackWarning, match="cpu: does not compute weights on cpu"):
        fastattn.attention_weights(x, x)
    assert fastattn.attention_received(x, x, backend="cpu").shape == (1, 1, 2)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("backend", [cpu, reference], ids=lambda b: b.NAME)
def test_hidden_values_change_nothing(backend, form):
    inputs = make_inputs(case_named("pad-queries"), torch.float32)
    poisoned = form(inputs, backend.NAME)
    for x in (inputs.q, inputs.k):
        assert x.isnan().any()
        x.nan_to_num_(nan=7.0)
    for a, b in zip(poisoned, form(inputs, backend.NAME), strict=True):
        assert (a is b is None) or torch.equal(a, b)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("backend", [cpu, reference], ids=lambda b: b.NAME)
def test_visible_nan_stays_in_its_sample(backend, form):
    inputs = make_inputs(case_named("plain"), torch.float32)
    inputs.k[0, :, 3] = float("nan")
    values, keys = form(inputs, backend.NAME)
    assert values[0].isnan().all()
    assert values[1].isfinite().all()
    if keys is not None:
        assert (keys >= 0).all()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", ["grouped-heads", "pad-queries-causal", "dropout", "dense", "segments"])
def test_any_number_of_threads_gives_the_same_bits(form, name, monkeypatch):
    inputs = inputs_for(form, case_named(name), torch.float32)
    results = []
    for n in (1, 2, 5):
        torch.set_num_threads(n)
        results.append(form(inputs, "cpu"))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert (a is b is None) or torch.equal(a, b)


@pytest.mark.parametrize("backend", [cpu, reference], ids=lambda b: b.NAME)
def test_equal_weights_stand_in_the_order_of_their_keys(backend):
    q, k = torch.ones(1, 2, 150, 8), torch.ones(1, 1, 150, 8)
    real = torch.arange(150) % 3 != 1
    mask = Mask(causal=True, window=(40, None), real_keys=real[None])
    weights, keys = fastattn.top_keys(q, k, mask, top_k=7, backend=backend.NAME)
    keep = mask.keep(150, 150)[0, 0]
    for i in range(150):
        seen = keep[i].nonzero()[:, 0]
        first = torch.nn.functional.pad(seen[:7], (0, max(7 - len(seen), 0)), value=-1)
        assert torch.equal(keys[0, 0, i], first)
        torch.testing.assert_close(weights[0, 1, i], (first >= 0) / max(len(seen), 1))


@pytest.mark.parametrize("backend", [cpu, reference], ids=lambda b: b.NAME)
def test_keys_whose_weight_is_too_small_for_a_float_are_still_there(backend):
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([0.0, 3.0, 1.0, 2.0]).view(1, 1, 4, 1)
    bias = torch.tensor([0.0, 0.0, -float("inf"), 0.0])
    weights, keys = fastattn.top_keys(q, k, top_k=4, scale=1000.0, bias=bias, backend=backend.NAME)
    assert weights.tolist() == [[[[1.0, 0.0, 0.0, 0.0]]]]
    assert keys.tolist() == [[[[1, 0, 3, -1]]]]


def test_more_keys_than_a_tile_of_triton_holds_are_refused():
    q, k = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 70_000, 1)
    with pytest.raises(NotImplementedError, match=r"'triton' takes top_k up to \d+ of as many keys, got 70000"):
        fastattn.top_keys(q, k, top_k=70_000, backend="triton")


@pytest.mark.parametrize("backend", COMPUTING, ids=lambda b: b.NAME)
def test_any_number_of_keys_beyond_those_there_are(backend):
    q, k = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 3, 8)
    of_three = fastattn.top_keys(q, k, top_k=3, backend=backend.NAME)
    of_many = fastattn.top_keys(q, k, top_k=70_000, backend=backend.NAME)
    for x, first, rest in zip(of_many, of_three, (0, -1), strict=True):
        assert torch.equal(x, torch.nn.functional.pad(first, (0, 70_000 - 3), value=rest))


@pytest.mark.parametrize("backend", [cpu, reference], ids=lambda b: b.NAME)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_output_beside_weights_has_the_bits_of_attention(backend, dtype, dropout_p):
    inputs = make_inputs(case_named("causal"), dtype)

    def options():
        return {
            "dropout_p": dropout_p,
            "generator": torch.Generator().manual_seed(2),
            "backend": backend.NAME,
        }

    q, k, v = inputs.q, inputs.k, inputs.v
    o, _ = fastattn.attention_with_weights(q, k, v, inputs.mask, **options())
    assert torch.equal(o, fastattn.attention(q, k, v, inputs.mask, **options()))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("backend", [cpu, reference], ids=lambda b: b.NAME)
@pytest.mark.parametrize("empty", ["B", "n_q", "n_k", "H"])
def test_zero_length_inputs_never_reach_a_backend(backend, form, empty, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("asked to compute nothing")

    for function in ("forward", "weights", "received", "top_keys"):
        monkeypatch.setattr(backend, function, refuse)
    size = {"B": 2, "H": 2, "n_q": 3, "n_k": 4} | {empty: 0}
    q = torch.ones(size["B"], size["H"], size["n_q"], 8, requires_grad=True)
    k = torch.ones(size["B"], max(size["H"], 1), size["n_k"], 8, requires_grad=True)
    inputs = Inputs(q, k, k, q, q, Mask(causal=True), {"scale": None})
    values, keys = form(inputs, backend.NAME)
    assert (values == 0).all()
    assert keys is None or (keys == -1).all()
    for x, gradient in zip((q, k), torch.autograd.grad(values.sum(), (q, k)), strict=True):
        assert gradient.shape == x.shape
        assert (gradient == 0).all()


@pytest.mark.parametrize("head_dim", [0, 1])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_narrow_heads(form, head_dim):
    x = torch.ones(1, 2, 40, head_dim)
    inputs = Inputs(x, x, x, x, x, Mask(causal=True), {"scale": None})
    for a, b in zip(form(inputs, "cpu"), form(inputs, "reference"), strict=True):
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("top_k", [0, -1, 2.0, True, None])
def test_top_k_is_checked(top_k):
    x = torch.ones(1, 1, 2, 4)
    with pytest.raises(ValueError, match=re.escape(f"top_k must be an int from 1 to 2**63 - 1, got {top_k!r}")):
        fastattn.top_keys(x, x, top_k=top_k)


@pytest.mark.parametrize("call", [fastattn.attention_weights, fastattn.attention_received])
def test_malformed_calls_are_refused(call):
    x = torch.ones(1, 1, 2, 4)
    with pytest.raises(ValueError, match="k must be a Tensor, got int"):
        call(x, 3)
    with pytest.raises(ValueError, match="k must be"):
        call(x, torch.ones(1, 1, 2, 5))


def learned(bias_rows: int = 1) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 2, 3, 2), (2, 1, 6, 2), (1, 2, bias_rows, 6), (2,), (2,))
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)


def of_learned(form: Form, **options):
    """The form as a function of q, k, bias, alibi_slopes and sinks, by the reference in fp64."""
    mask = Mask(causal=True, q_offset=1, real_keys=torch.arange(6) != torch.tensor([[2], [9]]))

    def function(q, k, bias, alibi_slopes, sinks):
        more = {"bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks, "softcap": 3.0, "scale": 0.7}
        return form(Inputs(q, k, k, q, q, mask, more | options), "reference")[0]

    return function


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_derivatives_of_first_and_second_order(form):
    dropout = {"dropout_p": 0.3, "generator": torch.Generator().manual_seed(1)} if form.drops else {}
    function = of_learned(form, **dropout)
    assert torch.autograd.gradcheck(function, learned(), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, learned(), fast_mode=True)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_what_arrives_at_a_weight_of_zero_is_not_read(backend, together, dropout_p):
    """inf from the entropy of a row, whose value at 0 is 0: of keys that are hidden or dropped, and of padding."""
    leaves = [torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(2)]
    mask = Mask(causal=True, real_queries=torch.tensor([[True, True, True, False]]))
    options = {"average_heads": False, "backend": backend}
    if dropout_p:
        options |= {"dropout_p": dropout_p, "generator": fastattn.DropoutSeed(0)}
    q, k = leaves
    weights = (
        fastattn.attention_with_weights(q, k, k, mask, **options)[1]
        if together
        else fastattn.attention_weights(q, k, mask, **options)
    )
    for gradient in torch.autograd.grad(torch.special.entr(weights).sum(), leaves):
        assert gradient.isfinite().all()
        assert gradient[:, :, :3].count_nonzero() > 0


def test_weights_of_a_graph_that_nobody_uses_change_no_gradient():
    leaves = [torch.randn(2, 3, 50, 16, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(fastattn.attention_with_weights, backend="aot_eager", fullgraph=True)
    alone = torch.autograd.grad(fastattn.attention(*leaves).sum(), leaves)
    for gradient, expected in zip(torch.autograd.grad(compiled(*leaves)[0].sum(), leaves), alone, strict=True):
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("bias_rows", [1, 3])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_blocks_of_queries_change_no_derivative(form, bias_rows, monkeypatch):
    function, inputs = of_learned(form), learned(bias_rows)

    def derivatives_of_both_modes():
        output = function(*inputs)
        gradients = torch.autograd.grad(output.square().sum(), inputs)
        _, tangent = torch.func.jvp(function, inputs, tuple(map(torch.ones_like, inputs)))
        return *gradients, tangent

    whole = derivatives_of_both_modes()
    monkeypatch.setattr(derivatives, "BLOCK_ELEMENTS", 2 * 2 * 2 * 6)
    for a, b in zip(whole, derivatives_of_both_modes(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_vmap_and_grad(form):
    function = of_learned(form)
    q, *others = (x.detach() for x in learned())
    stacked = torch.stack([q, 2 * q, -q])

    def loss(q):
        return function(q, *others).square().sum()

    values, gradients = (
        torch.func.vmap(lambda q: function(q, *others))(stacked),
        torch.func.vmap(torch.func.grad(loss))(stacked),
    )
    for i, sample in enumerate(stacked):
        assert torch.equal(values[i], function(sample, *others))
        torch.testing.assert_close(gradients[i], torch.func.grad(loss)(sample))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("backend", [cpu, reference], ids=lambda b: b.NAME)
def test_compiles_to_one_graph(backend, form):
    q, k = torch.randn(2, 4, 9, 8, requires_grad=True), torch.randn(2, 2, 9, 8, requires_grad=True)

    def outputs(run):
        output = run(q, k)
        return output.detach(), *torch.autograd.grad(output.square().sum(), (q, k))

    def weights(q, k):
        return form(Inputs(q, k, k, q, q, Mask(causal=True), {"scale": 0.5}), backend.NAME)[0]

    torch.compiler.reset()  # each form is another graph of the same function
    compiled = torch.compile(weights, fullgraph=True, backend="aot_eager")
    for a, b in zip(outputs(compiled), outputs(weights), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("form", ["averaged", "each head", "received", "top_keys"])
@pytest.mark.parametrize("backend", [cpu, reference], ids=lambda b: b.NAME)
def test_opcheck(backend, form):
    case = dataclasses.replace(case_named("alibi"), layout="BNHD")  # fakes must promise the same memory order
    inputs = make_inputs(case, torch.float32)
    spec = inputs.spec()
    learned, flat = (None, spec.alibi_slopes, None), ops._flatten(spec, backend)
    arguments = (inputs.q, inputs.k, None, *learned, form, TOP_K, *flat)
    torch.library.opcheck(torch.ops.fastattn.weights.default, arguments)
    weights, keys = torch.ops.fastattn.weights(*arguments)
    backward = (torch.ones_like(weights), keys, inputs.q, inputs.k, None, *learned, form, *flat)
    torch.library.opcheck(torch.ops.fastattn.weights_backward.default, backward)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read as Linux tells it")
@pytest.mark.parametrize("call", ["attention_received(q, k, mask)", "top_keys(q, k, mask, top_k=8)"])
def test_memory_grows_with_the_length_not_its_square(call):
    """A process of its own: the peak of this one may be higher already, and ru_maxrss of a child begins with it."""
    program = f"""
import re, torch, fastattn
from fastattn import *
def peak_mib():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024
q, k = torch.randn(1, 1, 256, 16), torch.randn(1, 1, 256, 16)
mask = Mask(causal=True)
{call}  # loads what there is to load
before = peak_mib()
q, k = torch.randn(1, 1, 20_000, 16), torch.randn(1, 1, 20_000, 16)
{call}
print(peak_mib() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    of_all_pairs = 20_000**2 * 4 / 2**20
    assert float(done.stdout) < of_all_pairs / 30, done.stdout
