"""Attention as a citizen of PyTorch: derivatives of every order, transforms, compile, autocast, checkpointing."""

import math
import re
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from modelled_gpu import CUDA_MACHINES
from torch._dynamo.testing import CompileCounter
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fastattn
from fastattn import Mask, RelativeBias, ops
from fastattn.backends import aten, backend_by_name, cpu, reference
from fastattn.spec import Spec, accumulation_dtype
from fastattn.testing import CASES, DTYPES, compare, make_inputs

FUSED_ON_CPU = ("cpu", "reference")  # Triton's interpreter is too slow for everything here; ops.py is the same


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


Q, K, V = random(2, 2, 3, 2, seed=1), random(2, 1, 5, 2, seed=2), random(2, 1, 5, 3, seed=3)
REAL_KEYS = torch.tensor([[0, 1, 0, 1, 1], [1, 1, 1, 0, 0]]).bool()
REAL_QUERIES = torch.tensor([[1, 1, 1], [0, 1, 1]]).bool()
SEGMENT_IDS = (torch.tensor([[0, 0, 1], [2, 2, -1]]), torch.tensor([[0, 0, 1, 1, -1], [2, 2, 3, 3, 3]]))
DENSE = torch.rand(2, 2, 3, 5, generator=torch.Generator().manual_seed(0)) < 0.7
Q_OFFSETS = torch.tensor([[0, 3, 1], [4, -1, 2]])
MASKS = {
    "none": Mask(),
    "positions": Mask(causal=True, q_offset=torch.tensor([1, 2]), window=(2, None)),
    "padding": Mask(causal=True, q_offset=1, real_keys=REAL_KEYS, real_queries=REAL_QUERIES),
    "segment_ids": Mask(causal=True, segment_ids=SEGMENT_IDS),
    "dense": Mask(dense=DENSE),
    "each-query": Mask(causal=True, q_offset=Q_OFFSETS, window=(3, None)),
    "everything": Mask(
        True,
        q_offset=Q_OFFSETS,
        window=(3, None),
        real_keys=REAL_KEYS,
        real_queries=REAL_QUERIES,
        segment_ids=SEGMENT_IDS,
        dense=DENSE,
    ),
}
LEARNED = {"bias": random(1, 2, 3, 5, seed=4), "alibi_slopes": random(2, seed=5), "sinks": random(2, seed=6)}


def leaves(*tensors):
    return tuple(x.detach().clone().requires_grad_() for x in tensors)


def attend_with_everything(mask, dropout_p=0.0):
    """A function of (q, k, v, bias, slopes, sinks) -> (o, lse) in which every derivative is finite."""

    def attend(q, k, v, bias, slopes, sinks):
        generator = torch.Generator().manual_seed(3) if dropout_p else None
        o, lse = fastattn.attention(
            q, k, v, mask, bias=bias, alibi_slopes=slopes, sinks=sinks, softcap=2.0, dropout_p=dropout_p,
            generator=generator, return_lse=True, backend="reference",
        )  # fmt: skip
        return o, lse.masked_fill(lse == -math.inf, 0)

    return attend


@pytest.mark.parametrize("name", MASKS)
def test_first_order(name):
    inputs = leaves(Q, K, V, *LEARNED.values())
    assert gradcheck(attend_with_everything(MASKS[name]), inputs, check_forward_ad=True)
    assert gradcheck(attend_with_everything(MASKS[name], dropout_p=0.4), inputs, check_forward_ad=True)
    assert gradcheck(attend_with_everything(MASKS[name]), inputs, check_batched_grad=True)


@pytest.mark.parametrize("name", MASKS)
def test_second_order(name):
    inputs = leaves(Q, K, V, *LEARNED.values())
    options = {"check_fwd_over_rev": True, "fast_mode": True}
    assert gradgradcheck(attend_with_everything(MASKS[name]), inputs, **options)
    assert gradgradcheck(attend_with_everything(MASKS[name], dropout_p=0.4), inputs, **options)


ALONE = {  # each feature without the others: what is absent is None all the way
    "nothing": {},
    "bias": {"bias": LEARNED["bias"]},
    "bias-of-keys": {"bias": random(5, seed=7)},
    "bias-of-queries": {"bias": random(2, 3, 1, seed=7)},
    "slopes": {"alibi_slopes": LEARNED["alibi_slopes"]},
    "slopes-of-samples": {"alibi_slopes": random(2, 2, seed=8)},
    "sinks": {"sinks": LEARNED["sinks"]},
    "softcap": {"softcap": 0.8},
    "dropout": {"dropout_p": 0.4},
    "dropout-of-all": {"dropout_p": 1.0},
}


@pytest.mark.parametrize("outputs", ["o", "lse", "o, lse"])
@pytest.mark.parametrize("name", ALONE)
def test_every_order_of_each_feature_alone(name, outputs):
    options = dict(ALONE[name])
    learned = {n: options.pop(n) for n in tuple(options) if isinstance(options[n], torch.Tensor)}

    def attend(q, k, v, *others):
        generator = torch.Generator().manual_seed(3) if "dropout_p" in options else None
        o, lse = fastattn.attention(
            q, k, v, MASKS["padding"], **options, **dict(zip(learned, others, strict=True)), generator=generator,
            return_lse=True, backend="reference",
        )  # fmt: skip
        by_name = {"o": o, "lse": lse.masked_fill(lse == -math.inf, 0)}
        return tuple(by_name[output] for output in outputs.split(", "))

    inputs = leaves(Q, K, V, *learned.values())
    assert gradcheck(attend, inputs, check_forward_ad=True)
    if outputs == "lse":  # v has no part in it, and torch's check of second derivatives wants every input to have one
        inputs, attend = (*inputs[:2], *inputs[3:]), lambda q, k, *others, attend=attend: attend(q, k, V, *others)
    # Entry by entry in two cases; in the others along a random direction, which finds what is wrong too.
    each_entry = name in ("nothing", "softcap") and outputs == "o, lse"
    assert gradgradcheck(attend, inputs, check_fwd_over_rev=True, fast_mode=not each_entry)


EVERY_FUNCTION = {
    "attention": lambda q, k, v, **options: fastattn.attention(q, k, v, return_lse=True, **options),
    "attention_weights": lambda q, k, v, **options: (fastattn.attention_weights(q, k, **options),),
    "attention_with_weights": fastattn.attention_with_weights,
    "attention_received": lambda q, k, v, **options: (fastattn.attention_received(q, k, **options),),
    "top_keys": lambda q, k, v, **options: fastattn.top_keys(q, k, top_k=2, **options)[:1],
}


@pytest.mark.parametrize(("backend", "dtype"), [("reference", torch.float64), *product(FUSED_ON_CPU, DTYPES)], ids=str)
@pytest.mark.parametrize("function", EVERY_FUNCTION)
@pytest.mark.parametrize("dtype_of_terms", [torch.float64, *DTYPES], ids=str)
def test_learned_terms_of_any_dtype_in_every_order(backend, function, dtype, dtype_of_terms):
    """They give what they give in the accumulation dtype of q, and have gradients in their own."""
    inputs = leaves(*(x.to(dtype) for x in (Q, K, V)), *(x.to(dtype_of_terms) for x in LEARNED.values()))
    tangents = tuple(map(torch.ones_like, inputs))

    def call(q, k, v, *terms):
        return EVERY_FUNCTION[function](q, k, v, backend=backend, **dict(zip(LEARNED, terms, strict=True)))

    def every_order(convert):
        inputs_here, tangents_here = ((*xs[:3], *map(convert, xs[3:])) for xs in (inputs, tangents))
        outputs = call(*inputs_here)
        loss = sum(x.square().sum() for x in outputs)
        first = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
        second = torch.autograd.grad(sum(x.float().square().sum() for x in first[:2]), inputs, allow_unused=True)
        return *outputs, *first, *second, *jvp(call, inputs_here, tangents_here)[1]

    expected = every_order(lambda term: term.to(accumulation_dtype(dtype)))
    tolerance = 8 * max(torch.finfo(dtype).eps, torch.finfo(dtype_of_terms).eps)
    for actual, wanted in zip(every_order(lambda term: term), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)


def test_forward_mode_in_the_layout_of_a_projection():
    inputs = leaves(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (Q, K, V)))
    assert gradcheck(lambda q, k, v: fastattn.attention(q, k, v, backend="reference"), inputs, check_forward_ad=True)


def test_second_order_goes_through_in_blocks(monkeypatch):
    monkeypatch.setattr(ops.derivatives, "BLOCK_ELEMENTS", 45)  # one query row at a time
    inputs = leaves(Q, K, V, *LEARNED.values())
    assert gradgradcheck(attend_with_everything(MASKS["padding"], dropout_p=0.4), inputs, fast_mode=True)


def test_hessian_vector_products_agree_in_every_order():
    def loss(q):
        return fastattn.attention(q, K, V, MASKS["padding"], backend="reference").sin().sum()

    direction = random(*Q.shape, seed=9)
    forward_over_reverse = jvp(grad(loss), (Q,), (direction,))[1]
    reverse_over_reverse = vjp(grad(loss), Q)[1](direction)[0]
    reverse_over_forward = grad(lambda q: jvp(loss, (q,), (direction,))[1])(Q)
    whole = (hessian(loss)(Q).flatten(4).flatten(0, 3) @ direction.flatten()).view_as(Q)
    for other in (reverse_over_reverse, reverse_over_forward, whole):
        torch.testing.assert_close(forward_over_reverse, other)
    torch.testing.assert_close(hessian(loss)(Q), jacrev(jacrev(loss))(Q))


def test_forward_over_forward_is_refused_instead_of_zero():
    def loss(q):
        return fastattn.attention(q, K, V, backend="reference").sin().sum()

    with pytest.raises(NotImplementedError, match="forward mode inside forward mode"):
        jacfwd(jacfwd(loss))(Q)


def test_second_order_of_a_fused_backend():
    inputs = make_inputs(next(c for c in CASES if c.name == "pad-left-causal"), torch.float32)
    inputs.q.nan_to_num_(), inputs.k.nan_to_num_(), inputs.v.nan_to_num_()

    def squared_gradients(dtype, backend):
        q, k, v = leaves(*(x.to(dtype) for x in (inputs.q, inputs.k, inputs.v)))
        o = fastattn.attention(q, k, v, inputs.mask, backend=backend)
        first = torch.autograd.grad(o, (q, k, v), inputs.do.to(dtype), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (q, k, v))

    ours, plain = squared_gradients(torch.float32, "cpu"), squared_gradients(torch.float32, "reference")
    for values in zip("qkv", ours, plain, squared_gradients(torch.float64, "reference"), strict=True):
        assert (error := compare(*values)).right, error


@pytest.mark.parametrize("backend", FUSED_ON_CPU)
def test_vmap_over_any_argument(backend):
    q, k, v = random(3, 2, 2, 3, 2).float(), K.float(), random(2, 3, 1, 5, 3).float()  # mapped at dim 0, not, at dim 1
    keys = torch.stack([REAL_KEYS, ~REAL_KEYS, REAL_KEYS.flip(0)], dim=-1)  # at the last

    def attend(q, k, v, real_keys):
        return fastattn.attention(q, k, v, Mask(real_keys=real_keys), backend=backend)

    def sample(i):
        return attend(q[i], k, v[:, i], keys[..., i])

    mapped = vmap(attend, in_dims=(0, None, 1, -1))(q, k, v, keys)
    assert torch.equal(mapped, torch.stack([sample(i) for i in range(3)]))

    def loss(q, v, real_keys):
        return attend(q, k, v, real_keys).square().sum()

    per_sample = vmap(grad(loss), in_dims=(0, 1, -1))(q, v, keys)
    expected = torch.stack([grad(loss)(q[i], v[:, i], keys[..., i]) for i in range(3)])
    torch.testing.assert_close(per_sample, expected)


MAPPED = {  # name: the function of it, and the values it is mapped over
    **{
        name: (lambda x, name=name: {name: x}, torch.stack([value, 2 * value, -value]))
        for name, value in LEARNED.items()
    },
    "q_offset": (lambda x: {"mask": Mask(causal=True, q_offset=x)}, torch.tensor([[1, 2], [0, -1], [3, 0]])),
    "q_offsets": (lambda x: {"mask": Mask(causal=True, q_offset=x)}, torch.stack([Q_OFFSETS, 1 - Q_OFFSETS])),
    "segment_ids": (
        lambda x: {"mask": Mask(segment_ids=(x, SEGMENT_IDS[1]))}, torch.stack([SEGMENT_IDS[0], SEGMENT_IDS[0].flip(0)])
    ),
    "dense": (lambda x: {"mask": Mask(dense=x)}, torch.stack([DENSE, ~DENSE])),
    "real_queries": (lambda x: {"mask": Mask(real_queries=x)}, torch.stack([REAL_QUERIES, ~REAL_QUERIES])),
}  # fmt: skip


@pytest.mark.parametrize("backend", FUSED_ON_CPU)
@pytest.mark.parametrize("name", MAPPED)
def test_vmap_over_what_describes_the_call(name, backend):
    options, values = MAPPED[name]

    def loss(q, x):
        o, lse = fastattn.attention(
            q, K.float(), V.float(), **options(x), softcap=2.0, return_lse=True, backend=backend
        )  # fmt: skip
        return o.square().sum() + lse.masked_fill(lse == -math.inf, 0).sin().sum()

    values = values.float() if values.is_floating_point() else values
    q = Q.float()
    mapped = vmap(grad(loss), in_dims=(None, 0))(q, values)
    torch.testing.assert_close(mapped, torch.stack([grad(loss)(q, x) for x in values]))


def test_vmap_over_no_samples():
    def loss(q, k):
        return fastattn.attention(q, k, k, Mask(causal=True), return_lse=True)[0].sum()

    q, k = torch.randn(2, 4, 5, 0, 8), torch.randn(2, 2, 6, 8)
    of_each = torch.vmap(torch.func.grad_and_value(loss), in_dims=(3, None), out_dims=(3, 0))
    gradient, value = of_each(q, k)
    assert gradient.shape == q.shape
    assert value.shape == (0,)


def test_vmap_with_one_dropout_for_all():
    def attend(q):
        return fastattn.attention(q, K, V, dropout_p=0.4, backend="reference")

    several = torch.stack([Q, Q.flip(0)])
    torch.manual_seed(5)
    mapped = vmap(attend, randomness="same")(several)
    for q, o in zip(several, mapped, strict=True):
        torch.manual_seed(5)
        assert torch.equal(o, attend(q))


def test_vmap_takes_a_mask_as_a_pytree():
    masks = [Mask(causal=True, real_keys=keys) for keys in (REAL_KEYS, ~REAL_KEYS)]
    stacked = tree_map(lambda *x: torch.stack(x) if isinstance(x[0], torch.Tensor) else x[0], *masks)
    in_dims = tree_map(lambda x: 0 if isinstance(x, torch.Tensor) else None, stacked)
    mapped = vmap(lambda mask: fastattn.attention(Q, K, V, mask, backend="reference"), in_dims=(in_dims,))
    expected = [fastattn.attention(Q, K, V, mask, backend="reference") for mask in masks]
    assert torch.equal(mapped(stacked), torch.stack(expected))


@pytest.mark.parametrize("backend", FUSED_ON_CPU)
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiles_whole_to_two_graphs_over_all_lengths(backend, compiler):
    torch._dynamo.reset()
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(compiler)(graph, example_inputs)

    def attend(q, k, v, real_keys):
        mask = Mask(causal=True, q_offset=k.shape[2] - q.shape[2], real_keys=real_keys)
        return fastattn.attention(q, k, v, mask, backend=None if backend == "cpu" else backend)

    compiled = torch.compile(attend, backend=count, fullgraph=True)
    for n_q, n_k in ((3, 5), (4, 9), (7, 8), (2, 30), (65, 130)):
        q, k, v = leaves(random(2, 4, n_q, 8).float(), random(2, 2, n_k, 8).float(), random(2, 2, n_k, 8).float())
        real_keys = torch.rand(2, n_k) < 0.7
        eager, fast = attend(q, k, v, real_keys), compiled(q, k, v, real_keys)
        assert torch.equal(eager, fast)
        arriving = torch.randn_like(eager)
        for a, b in zip(*(torch.autograd.grad(o, (q, k, v), arriving) for o in (eager, fast)), strict=True):
            assert torch.equal(a, b)
    assert len(graphs) <= 2


def test_compiles_to_two_graphs_over_all_seeds():
    torch._dynamo.reset()
    counter, x = CompileCounter(), torch.randn(1, 2, 5, 8)

    def attend(x, seed):
        return fastattn.attention(x, x, x, dropout_p=0.5, generator=fastattn.DropoutSeed(seed))

    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for seed in (3, 4, 5, -5, 2**62, -(2**63)):
        assert torch.equal(compiled(x, seed), attend(x, seed))
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    "terms",
    [
        {"real_keys": torch.ones(2, 5, dtype=torch.bool), "real_queries": torch.ones(2, 5, dtype=torch.bool)},
        {"segment_ids": (torch.zeros(2, 5, dtype=torch.int64),) * 2},
        {"causal": True, "q_offset": torch.tensor([0, 1])},
        {"alibi_slopes": torch.ones(2, 4)},
        {"bias": RelativeBias(torch.ones(4, 9))},
    ],
    ids=lambda terms: next(reversed(terms)),
)
def test_compiles_whole_where_a_tensor_comes_after_calls_of_all_sizes_without_it(terms):
    torch._dynamo.reset()

    def attend(x, given):
        mask = {name: value for name, value in given.items() if name not in ("alibi_slopes", "bias")}
        others = {name: value for name, value in given.items() if name not in mask}
        return fastattn.attention(x, x, x, Mask(**mask), **others)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for B, H, n in ((2, 4, 5), (3, 6, 7), (5, 8, 11)):  # from the second on Dynamo has symbols for them
        compiled(torch.randn(B, H, n, 8), {})
    x = torch.randn(2, 4, 5, 8)
    torch.testing.assert_close(compiled(x, terms), attend(x, terms))


def test_compiles_where_one_tensor_is_several_arguments():
    """Dynamo takes no autograd.Function that is given a tensor twice."""

    def attend(x, real):
        return fastattn.attention(x, x, x, Mask(real_keys=real, real_queries=real))

    x, real = leaves(Q.float())[0], torch.rand(Q.shape[0], Q.shape[2]) < 0.7
    eager, fast = attend(x, real), torch.compile(attend, fullgraph=True, backend="aot_eager")(x, real)
    assert torch.equal(eager, fast)
    torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), x)[0] for o in (eager, fast)))


@pytest.mark.parametrize("with_weights", [False, True])
def test_dynamo_takes_a_call_for_one_op(with_weights):
    """What it traced of Python instead would cost time for each layer, and guards in each call."""
    torch._dynamo.reset()
    counted = []

    def count(graph, example_inputs):
        counted.append(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    def attend(q, k, v, slopes, sinks, table, real_keys):
        mask = Mask(causal=True, q_offset=3, window=(4, None), real_keys=real_keys)
        terms = {"scale": 0.3, "softcap": 2, "alibi_slopes": slopes, "sinks": sinks}
        terms |= {"bias": fastattn.RelativeBias(table)}
        if with_weights:
            return fastattn.attention_with_weights(q, k, v, mask, **terms)
        return fastattn.attention(q, k, v, mask, return_lse=True, **terms)

    learned = torch.rand(2), torch.rand(2), torch.rand(2, Q.shape[2] + K.shape[2] - 1)
    inputs = leaves(*(x.float() for x in (Q, K, V, *learned)))
    results = [f(*inputs, REAL_KEYS) for f in (attend, torch.compile(attend, fullgraph=True, backend=count))]
    assert [name for name in counted[0] if "getitem" not in name] == ["fastattn.attention"]
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)
    found = (torch.autograd.grad(o.sum() + other.square().sum(), inputs) for o, other in results)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v: fastattn.attention(q, k[:, :, :3], v),
        lambda q, k, v: fastattn.attention(q, k, v, bias=torch.ones(3, 3)),
        lambda q, k, v: fastattn.attention(q, k, v, "causal"),
        lambda q, k, v: fastattn.attention(q, k, v, dropout_p=2.0),
        lambda q, k, v: fastattn.attention(q, k, v, scale=True),
        lambda q, k, v: fastattn.attention(q, k, v, softcap=True),
        lambda q, k, v: fastattn.attention(q[0], k, v, bias=RelativeBias(torch.ones(9))),
        lambda q, k, v: fastattn.attention(q, k, None),
        lambda q, k, v: fastattn.attention(q, k, v, deterministic="yes"),
        lambda q, k, v: fastattn.attention(q.double(), k.double(), v.double(), backend="cpu"),
    ],
)
def test_compiled_calls_are_refused_in_the_same_words(call):
    torch._dynamo.reset()
    inputs = Q.float(), K.float(), V.float()
    with pytest.raises((ValueError, NotImplementedError)) as eager:
        call(*inputs)
    with pytest.raises(eager.type, match=re.escape(str(eager.value))):
        torch.compile(call, backend="aot_eager")(*inputs)


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_a_graph_ends_before_a_number_that_is_read_of_a_tensor(name):
    torch._dynamo.reset()

    def attend(q, number):
        return fastattn.attention(q, q, q, **{name: number.item()})

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(attend, backend="aot_eager")
        for number in (torch.tensor(0.5), torch.tensor(0.25)):
            torch.testing.assert_close(compiled(Q, number), attend(Q, number))


@pytest.mark.parametrize("name", ["q_offset", "window"])
def test_a_graph_reads_integers_of_tensors(name):
    torch._dynamo.reset()

    def attend(q, number):
        mask = {"q_offset": number.item()} if name == "q_offset" else {"window": (number.item(), None)}
        return fastattn.attention(q, K, V, Mask(causal=True, **mask))

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        for number in (2, 0, 3):
            number = torch.tensor(number)
            torch.testing.assert_close(compiled(Q, number), attend(Q, number))


def test_compiled_second_order_is_refused():
    q = Q.clone().requires_grad_()
    compiled = torch.compile(
        lambda q: fastattn.attention(q, K, V, backend="reference"), fullgraph=True, backend="aot_eager"
    )
    first = torch.autograd.grad(compiled(q).sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(first.sum(), q)


@pytest.mark.parametrize("backend", [aten, cpu, reference, *CUDA_MACHINES[-1:]], ids=lambda b: b.NAME, indirect=True)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("plain", torch.float16),  # lse is of another dtype than o
        ("pad-queries-causal", torch.float32),
        ("projection-layout", torch.bfloat16),
        ("causal-cached", torch.float32),
    ],
)
def test_opcheck(backend, name, dtype):
    inputs = make_inputs(next(case for case in CASES if case.name == name), dtype)
    for x in (inputs.q, inputs.k, inputs.v, inputs.do):
        x.nan_to_num_()  # opcheck compares results, and NaN is not equal to NaN
    spec = inputs.spec()
    flat = ops._flatten(spec, backend)
    forward = (inputs.q, inputs.k, inputs.v, None, None, None, *flat)
    o, lse = torch.ops.fastattn.forward(*forward)
    wanted = (True, True, True, False, False, False)
    torch.library.opcheck(torch.ops.fastattn.forward.default, forward)
    backward = (inputs.do, inputs.dlse, inputs.q, inputs.k, inputs.v, o, lse, None, None, None, *wanted, *flat)
    torch.library.opcheck(torch.ops.fastattn.backward.default, backward)


SPOILED = {  # an argument of an op -> a size of it that does not fit
    "k": (1, 2, 7, 8), "v": (2, 2, 6, 8), "o": (2, 4, 2, 8), "lse": (2, 4, 2), "do": (2, 4, 3, 9), "dlse": (2, 3, 3),
}  # fmt: skip


@pytest.mark.parametrize("dtypes", [False, True])
@pytest.mark.parametrize("name", SPOILED)
@pytest.mark.parametrize("backend", ["cpu", "triton", "torch", "reference"])
def test_ops_refuse_sizes_and_dtypes_that_do_not_fit(backend, name, dtypes):
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    flat = ops._flatten(Spec(Mask(), 1.0), backend_by_name(backend))
    o, lse = torch.ops.fastattn.forward(q, k, v, None, None, None, *flat)
    arguments = {"do": o, "dlse": lse, "q": q, "k": k, "v": v, "o": o, "lse": lse}
    arguments[name] = arguments[name].half() if dtypes else torch.randn(SPOILED[name])
    with pytest.raises(ValueError, match=rf"{name} must be \["):
        torch.ops.fastattn.backward(*arguments.values(), None, None, None, *(True,) * 3, *(False,) * 3, *flat)
    if name in ("k", "v"):
        with pytest.raises(ValueError, match=rf"{name} must be \["):
            torch.ops.fastattn.forward(q, arguments["k"], arguments["v"], None, None, None, *flat)
    if name in ("k", "lse"):
        with pytest.raises(ValueError, match=rf"{name} must be \["):
            torch.ops.fastattn.weights(q, arguments["k"], arguments["lse"], None, None, None, "averaged", 0, *flat)


OF_SPEC = {  # a tensor of a spec -> one that does not fit two samples of 4 heads, 3 queries and 7 keys
    "q_offset": {"mask": Mask(q_offset=torch.zeros(1, dtype=torch.int64))},
    "real_keys": {"mask": Mask(real_keys=torch.ones(2, 3, dtype=torch.bool))},
    "segment_ids": {"mask": Mask(segment_ids=(torch.zeros(2, 3).long(), torch.zeros(1, 7).long()))},
    "dense": {"mask": Mask(dense=torch.ones(3, 6, dtype=torch.bool))},
    "bias": {"bias": torch.zeros(3, 1, 7)},
    "alibi_slopes": {"alibi_slopes": torch.zeros(1)},
    "sinks": {"sinks": torch.zeros(1)},
}


@pytest.mark.parametrize("name", OF_SPEC)
@pytest.mark.parametrize("backend", ["cpu", "triton", "reference"])
def test_ops_refuse_tensors_of_a_spec_that_do_not_fit(backend, name):
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 7, 8)
    spec = fastattn.spec.Spec(**{"mask": Mask(), "scale": 1.0} | OF_SPEC[name])
    terms = spec.bias, spec.alibi_slopes, spec.sinks
    flat = ops._flatten(spec, backend_by_name(backend))
    lse = q[..., 0].contiguous()
    with pytest.raises(ValueError, match=rf"{name}.* must be "):
        torch.ops.fastattn.forward(q, k, k, *terms, *flat)
    with pytest.raises(ValueError, match=rf"{name}.* must be "):
        torch.ops.fastattn.backward(q, lse, q, k, k, q, lse, *terms, *(True,) * 6, *flat)
    with pytest.raises(ValueError, match=rf"{name}.* must be "):
        torch.ops.fastattn.weights(q, k, lse, *terms, "averaged", 0, *flat)


@pytest.mark.parametrize(
    "spec",
    [
        Spec(MASKS["padding"], 0.5, **LEARNED, softcap=2.0, dropout_p=0.3, seed=torch.tensor(7)),
        Spec(Mask(), 0.5, random(2, 1, 7, seed=7), bias_by_distance=True),
    ],
    ids=["everything", "a bias by distance"],
)
def test_opcheck_of_what_is_learned(spec):
    flat, learned = ops._flatten(spec, reference), (spec.bias, spec.alibi_slopes, spec.sinks)
    forward = (Q, K, V, *learned, *flat)
    o, lse = torch.ops.fastattn.forward(*forward)
    torch.library.opcheck(torch.ops.fastattn.forward.default, forward)
    wanted = (True, True, True, *(x is not None for x in learned))
    backward = (torch.ones_like(o), None, Q, K, V, o, lse, *learned, *wanted, *flat)
    torch.library.opcheck(torch.ops.fastattn.backward.default, backward)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_does_what_it_does_to_sdpa(dtype):
    q, k, v = leaves(Q.float(), K.float(), V.float())
    with torch.autocast("cpu", dtype=dtype):
        o = fastattn.attention(q, k, v)
        assert o.dtype == dtype
        assert torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).dtype == dtype
    assert torch.equal(o, fastattn.attention(q.to(dtype), k.to(dtype), v.to(dtype)))
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(o.sum(), (q, k, v)))


def test_weights_compile_whole_under_autocast():
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: fastattn.attention_weights(q, q), backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(Q.float()).dtype == torch.bfloat16


def _gradients_twice(attend, q):
    (dq,) = torch.autograd.grad(attend(q).square().sum(), q, create_graph=True)
    return torch.autograd.grad(dq.square().sum(), q)[0]


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(
    "function",
    [
        lambda attend, q: attend(q),
        lambda attend, q: torch.autograd.grad(attend(q).sum(), q)[0],
        lambda attend, q: torch.func.jvp(attend, (q.detach(),), (q.detach(),))[1],
        _gradients_twice,
        lambda attend, q: torch.autograd.grad(fastattn.top_keys(q, q, top_k=2, backend="reference")[0].sum(), q)[0],
    ],
    ids=["forward", "backward", "jvp", "second order", "gradients of weights"],
)
def test_autocast_rounds_the_inputs_and_nothing_else(function, backend):
    q = random(2, 2, 5, 8).bfloat16().requires_grad_()

    def attend(q):
        return fastattn.attention(q, q, q, Mask(causal=True), softcap=5.0, backend=backend, return_lse=True)[1]

    expected = function(attend, q)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(function(attend, q), expected)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.filterwarnings("ignore::fastattn.FallbackWarning")
def test_checkpointing_recomputes_the_same_dropout(use_reentrant, dropout_p, backend):
    def attend(q, k, v):
        return fastattn.attention(q, k, v, Mask(real_keys=REAL_KEYS), dropout_p=dropout_p, backend=backend)

    def outputs(run):
        torch.manual_seed(4)
        q, k, v = leaves(*(x.float() for x in (Q, K, V)))
        o = run(q, k, v)
        o.square().sum().backward()  # the reentrant kind does not take torch.autograd.grad
        return o, q.grad, k.grad, v.grad

    plain = outputs(attend)
    saved = outputs(lambda *x: checkpoint(attend, *x, use_reentrant=use_reentrant))
    for a, b in zip(plain, saved, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("watched", ["forward", "backward"])
@pytest.mark.parametrize("weights", [False, True])
def test_checkpointing_computes_again_what_somebody_watches_once(weights, watched):
    """What is saved for the backward is the same with and without a profiler, and comes in the same order."""
    inputs = leaves(*(x.float() for x in (Q, K, V)))
    mask, bias = Mask(real_keys=REAL_KEYS), torch.randn(1, 1, 1, K.shape[2], requires_grad=True)

    def loss(q, k, v):
        if weights:
            return sum(x.square().sum() for x in fastattn.attention_with_weights(q, k, v, mask, bias=bias))
        return fastattn.attention(q, k, v, mask, bias=bias).square().sum()

    with FlopCounterMode(display=False) if watched == "forward" else nullcontext():
        actual = checkpoint(loss, *inputs, use_reentrant=False)
    with FlopCounterMode(display=False) if watched == "backward" else nullcontext():
        actual = torch.autograd.grad(actual, (*inputs, bias))
    torch.testing.assert_close(actual, torch.autograd.grad(loss(*inputs), (*inputs, bias)))


@pytest.mark.parametrize("backend", FUSED_ON_CPU)
def test_any_strides(backend):
    q, k, v = Q.float(), K.float(), V.float()
    expected = fastattn.attention(q, k, v, MASKS["padding"], backend=backend)

    def reordered(x):
        return x.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0)  # the head dim is the slowest

    variants = {
        "last stride not 1": (reordered(q), reordered(k), reordered(v)),
        "expanded": (q, k.expand(-1, 2, -1, -1), v.expand(-1, 2, -1, -1)),
        "every other token": tuple(x.repeat_interleave(2, 2)[:, :, ::2] for x in (q, k, v)),
    }
    for name, tensors in variants.items():
        whole = fastattn.attention(*(x.contiguous() for x in tensors), MASKS["padding"], backend=backend)
        assert torch.equal(fastattn.attention(*tensors, MASKS["padding"], backend=backend), whole), name
    torch.testing.assert_close(
        fastattn.attention(*variants["last stride not 1"], MASKS["padding"], backend=backend), expected
    )


def tensors_of_a_call(n_q: int, n_k: int) -> dict[str, torch.Tensor]:
    """Every tensor that a call may have, not all of them at once."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(2, 2, n, 8) for name, n in (("q", n_q), ("k", n_k), ("v", n_k))}
    tensors |= {"bias": torch.randn(2, 2, n_q, n_k), "table": torch.randn(2, n_q + n_k - 1)}
    tensors |= {"alibi_slopes": torch.rand(2, 2), "sinks": torch.randn(2), "q_offset": torch.tensor([n_k - n_q, 2])}
    tensors |= {"real_keys": torch.rand(2, n_k) < 0.8, "real_queries": torch.rand(2, n_q) < 0.8}
    tensors |= {"dense": torch.rand(2, 2, n_q, n_k) < 0.8, "documents": torch.arange(2 * n_k).view(2, n_k) // 9}
    return tensors


def forms_of(x: torch.Tensor) -> list[torch.Tensor]:
    """Tensors like it whose elements lie in memory once for all of a dimension, in another order, and apart."""
    repeated = [x.narrow(dim, 0, 1).expand(x.shape) for dim in range(x.dim())]
    reordered = [x.transpose(dim, -1).contiguous().transpose(dim, -1) for dim in range(x.dim() - 1)]
    return [*repeated, *reordered, x.repeat_interleave(2, -1)[..., ::2]]


@pytest.mark.parametrize("backend", [aten, cpu, reference], ids=lambda b: b.NAME)
@pytest.mark.parametrize("n_q", [1, 3, 40])
@pytest.mark.parametrize("name", tensors_of_a_call(1, 1))
def test_any_tensor_may_lie_in_memory_as_it_likes(name, n_q, backend):
    given = tensors_of_a_call(n_q, 70)

    def results(x: torch.Tensor) -> list[torch.Tensor]:
        q, k, v = (x if name == of else given[of] for of in "qkv")
        leaf = (v if name == "k" else k).clone().requires_grad_()
        terms = {name: x} if name in ("bias", "alibi_slopes", "sinks") else {}
        of_mask = {name: x} if name in ("q_offset", "real_keys", "real_queries", "dense") else {}
        if name == "table":
            terms = {"bias": RelativeBias(x)}
        if name == "documents":
            of_mask = {"segment_ids": (x[:, :n_q], x)}
        mask = Mask(causal=name in ("q_offset", "alibi_slopes"), **of_mask)
        k, v = (k, leaf) if name == "k" else (leaf, v)
        o = fastattn.attention(q, k, v, mask, **terms, backend=backend.NAME)
        return [o, *torch.autograd.grad(o.square().sum(), leaf)]

    for form in forms_of(given[name]):
        for actual, expected in zip(results(form), results(form.contiguous()), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_merging_the_heads_of_the_output_needs_no_copy():
    x = random(2, 5, 3 * 8).float()
    q = x.unflatten(-1, (3, 8)).transpose(1, 2)
    o = fastattn.attention(q, q, q)
    assert o.transpose(1, 2).flatten(2).data_ptr() == o.data_ptr()


def test_a_call_that_pytorch_only_passes_on_goes_straight_to_the_backend(monkeypatch):
    dispatched = []
    flatten = ops._flatten  # makes the arguments of the op
    monkeypatch.setattr(ops, "_flatten", lambda *arguments: dispatched.append(None) or flatten(*arguments))
    q = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    mask = Mask(causal=True, real_keys=torch.tensor([[True, True, False]]))
    expected = fastattn.attention(q, q, q, mask)
    assert not dispatched

    def seen_by_pytorch(call) -> bool:
        dispatched.clear()
        call()
        return bool(dispatched)

    negated = torch.complex(q, -q).conj().imag  # q, which lies in memory as -q
    assert negated.is_neg()
    assert seen_by_pytorch(lambda: torch.testing.assert_close(fastattn.attention(negated, q, q, mask), expected))
    for mode in (torch.profiler.profile, torch.overrides.BaseTorchFunctionMode, lambda: FlopCounterMode(display=False)):
        with mode():
            assert seen_by_pytorch(lambda: fastattn.attention(q, q, q, mask))
    assert seen_by_pytorch(lambda: vmap(lambda q: fastattn.attention(q[None], q[None], q[None], mask)[0])(q))
    assert not seen_by_pytorch(lambda: fastattn.attention(q, q, q, mask))
