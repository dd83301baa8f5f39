"""Derivatives through torch.func's transforms, nested in any order, and inside and around graphs of torch.compile."""

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, jacobian
from torch.func import grad, jacfwd, jacrev, jvp, vmap

import fastattn
from fastattn import RelativeBias

torch.manual_seed(0)
Q, K, V = (torch.randn(3, 1, 2, 5, 4, dtype=torch.float64) for _ in range(3))
TABLE = torch.randn(2, 9, dtype=torch.float64)


def naive(q, k, v, bias=None):
    scores = q @ k.mT / 2
    return (scores if bias is None else scores + bias).softmax(-1) @ v


def loss(attention, *arguments):
    return attention(*arguments).square().sum()


NESTED = {
    "grad of vmap": lambda f: grad(lambda q: vmap(f)(q, K, V).square().sum())(Q),
    "grad of vmap over one": lambda f: grad(lambda q: vmap(f, (0, None, None))(q, K[0], V[0]).square().sum())(Q),
    "grad of vmap of grad": lambda f: grad(lambda q: vmap(grad(lambda *qkv: loss(f, *qkv)))(q, K, V).square().sum())(Q),
    "grad of vmap of jvp": lambda f: grad(
        lambda q: vmap(lambda q, k, v: jvp(lambda x: f(x, k, v), (q,), (k,))[1])(q, K, V).square().sum()
    )(Q),
    "jvp of grad of vmap": lambda f: jvp(grad(lambda q: vmap(f)(q, K, V).square().sum()), (Q,), (K,))[1],
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(lambda q: loss(f, q, K[0], V[0])))(Q[0]),
    "grad of jvp of grad": lambda f: grad(
        lambda q: jvp(grad(lambda q: loss(f, q, K[0], V[0])), (q,), (K[0],))[1].square().sum()
    )(Q[0]),
    "vectorized hessian": lambda f: hessian(lambda q: loss(f, q, K[0], V[0]), Q[0], vectorize=True),
    "vectorized jacobian": lambda f: jacobian(
        lambda q: f(q, K[0], V[0]), Q[0], vectorize=True, strategy="forward-mode"
    ),
    "vectorized hessian by a bias": lambda f: hessian(
        lambda bias: f(Q[0], K[0], V[0], bias=bias).square().sum(), TABLE[:, :5, None], vectorize=True
    ),
    "vectorized jacobian by a bias": lambda f: jacobian(
        lambda bias: f(Q[0], K[0], V[0], bias=bias), TABLE[:, :5, None], vectorize=True, strategy="forward-mode"
    ),
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_transforms(name):
    torch.testing.assert_close(NESTED[name](fastattn.attention), NESTED[name](naive))


def test_an_ensemble_of_models():
    """By torch.vmap inside of what autograd differentiates: parameters, a bias, and twice."""
    projection = torch.nn.Linear(4, 4).double()
    bias = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    learned = [*projection.parameters(), bias]

    def gradients(attention):
        def model(x):
            return attention(*[projection(x)] * 3, bias=bias)

        first = torch.autograd.grad(vmap(model)(Q).square().sum(), learned, create_graph=True)
        return first, torch.autograd.grad(sum(x.square().sum() for x in first), learned)

    torch.testing.assert_close(gradients(fastattn.attention), gradients(naive))


def test_a_table_of_distances_around_vmap():
    table = TABLE.clone().requires_grad_()
    place = 4 - torch.arange(5)[:, None] + torch.arange(5)
    ours = vmap(lambda q, k, v: fastattn.attention(q, k, v, bias=RelativeBias(table)))(Q, K, V)
    expected = vmap(lambda q, k, v: naive(q, k, v, table[:, place]))(Q, K, V)
    torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), table) for o in (ours, expected)))


@pytest.mark.parametrize("mapped", [(0, 0, 0), (None, 0, 0)], ids=["all", "keys"])
def test_vmap_over_documents_of_one_query(mapped):
    """Which are computed as samples: autograd is around it, or what it writes to is not mapped over."""
    q, k, v = Q[:, 0, 0].clone().requires_grad_(), K[:, 0, 0], V[:, 0, 0]
    of_k = torch.tensor([0, 2, 5])

    def attention(q, k, v):
        return fastattn.attention_varlen(q[:2, None], k[:, None], v[:, None], torch.tensor([0, 1, 2]), of_k)[:, 0]

    def expected(q, k, v):
        return torch.cat([naive(q[i : i + 1], *(x[of_k[i] : of_k[i + 1]] for x in (k, v))) for i in (0, 1)])

    given = [q if mapped[0] == 0 else q[0].detach(), k, v]
    outputs = [vmap(f, mapped)(*given) for f in (attention, expected)]
    torch.testing.assert_close(*outputs)
    if mapped[0] == 0:
        torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), q) for o in outputs))


def test_vectorized_derivatives_of_a_short_call_with_weights():
    q, k = Q[0].float(), K[0, :, :1].float()
    fastattn.attention(q, k, k)  # after which calls of this kind are short

    def of_both(q, k):
        return torch.stack([x.square().sum() for x in fastattn.attention_with_weights(q, k, k)])

    for ours, expected in zip(*(jacobian(of_both, (q, k), vectorize=way) for way in (True, False)), strict=True):
        torch.testing.assert_close(ours, expected)


def test_second_derivatives_do_not_read_what_arrives_at_padding():
    leaves = [x[0].clone().requires_grad_() for x in (Q, K, V)]
    real = torch.tensor([[True, False, True, True, True]])
    o, lse = fastattn.attention(*leaves, fastattn.Mask(real_queries=real), return_lse=True)
    do, dlse = torch.ones_like(o), torch.ones_like(lse)
    do[:, :, 1], dlse[:, :, 1] = torch.nan, torch.nan
    first = torch.autograd.grad([o, lse], leaves, [do, dlse], create_graph=True)
    for gradient in torch.autograd.grad(sum(x.square().sum() for x in first), leaves):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "in a graph"])
@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (partial(fastattn.attention_weights, average_heads=False), lambda q, k: (q @ k.mT / 2).softmax(-1)),
        (fastattn.attention_received, lambda q, k: (q @ k.mT / 2).softmax(-1).sum(-2)),
    ],
    ids=["of each head", "received"],
)
def test_weights(weights, expected, compiled):
    torch._dynamo.reset()

    def of(weights):
        return lambda q: grad(lambda q: vmap(weights)(q, K).square().sum())(q)

    ours = of(lambda q, k: weights(q, k, backend="reference"))
    ours = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    torch.testing.assert_close(ours(Q), of(expected)(Q))


IN_GRAPHS = {
    "grad": lambda f: lambda q: grad(lambda q: loss(f, q, K[0], V[0]))(q[0]),
    "jvp": lambda f: lambda q: jvp(lambda q: f(q, K[0], V[0]), (q[0],), (K[0],))[1],
    "grad of vmap": lambda f: lambda q: grad(lambda q: vmap(f)(q, K, V).square().sum())(q),
    "vmap": lambda f: lambda q: vmap(f)(q, K, V),
    "vmap of grad": lambda f: lambda q: vmap(grad(lambda q: loss(f, q, K[0], V[0])))(q),
    "jacrev of grad": lambda f: lambda q: jacrev(grad(lambda q: loss(f, q, K[0], V[0])))(q[0]),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", IN_GRAPHS)
@pytest.mark.parametrize("attention", [fastattn.attention, fastattn.scaled_dot_product_attention])
def test_transforms_inside_of_graphs(name, backend, attention):
    torch._dynamo.reset()
    compiled = torch.compile(IN_GRAPHS[name](attention), backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(Q), IN_GRAPHS[name](naive)(Q))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_autograd_around_a_graph_of_vmap(backend):
    torch._dynamo.reset()
    q = Q.clone().requires_grad_()
    compiled = torch.compile(IN_GRAPHS["vmap"](fastattn.attention), backend=backend)
    ours, expected = compiled(q), IN_GRAPHS["vmap"](naive)(q)
    torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), q) for o in (ours, expected)))


class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        return fastattn.attention(q, k, v), fastattn.attention_weights(q, k, average_heads=False, backend="reference")


def test_exported_programs_have_derivatives():
    q = Q[0].clone().requires_grad_()
    exported = torch.export.export(Attention(), (Q[0], K[0], V[0])).module()
    o, weights = exported(q, K[0], V[0])
    ours = torch.autograd.grad(o.square().sum() + weights.square().sum(), q, create_graph=True)[0]
    of_weights = (q @ K[0].mT / 2).softmax(-1)
    expected = torch.autograd.grad(
        (of_weights @ V[0]).square().sum() + of_weights.square().sum(), q, create_graph=True
    )[0]
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), q) for x in (ours, expected)))


@pytest.mark.parametrize("name", IN_GRAPHS)
def test_transforms_of_exported_programs(name):
    exported = torch.export.export(Attention(), (Q[0], K[0], V[0])).module()
    ours, weights = (IN_GRAPHS[name](lambda *qkv, i=i: exported(*qkv)[i])(Q) for i in (0, 1))
    torch.testing.assert_close(ours, IN_GRAPHS[name](naive)(Q))
    torch.testing.assert_close(weights, IN_GRAPHS[name](lambda q, k, v: (q @ k.mT / 2).softmax(-1))(Q))


@pytest.mark.parametrize("i", [0, 1], ids=["attention", "weights"])
@pytest.mark.parametrize("through", ["compiled", "decomposed"])
def test_tangents_pass_through_ops_in_graphs(through, i):
    torch._dynamo.reset()
    program = torch.compile(Attention(), backend="aot_eager")
    if through == "decomposed":
        program = torch.export.export(Attention(), (Q[0], K[0], V[0])).run_decompositions().module()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(Q[0], K[0])
        results = (forward_ad.unpack_dual(f(dual, K[0], V[0])[i]).tangent for f in (program, Attention()))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", ["grad", "jvp"])
def test_transforms_of_ops_alone_are_refused(name):
    exported = torch.export.export(Attention(), (Q[0], K[0], V[0])).run_decompositions().module()
    for i in (0, 1):
        with pytest.raises(NotImplementedError, match="call attention itself in them, or an exported program before"):
            IN_GRAPHS[name](lambda *qkv, i=i: exported(*qkv)[i])(Q)


class Masked(torch.nn.Module):
    def forward(self, q, mask):
        return fastattn.attention(q, q, q, mask)


@pytest.mark.parametrize("strict", [False, True])
def test_a_mask_is_an_input_of_an_exported_program(strict):
    real = torch.tensor([[True, True, True, False, False]])
    mask = fastattn.Mask(causal=True, real_keys=real)
    exported = torch.export.export(Masked(), (Q[0], mask), strict=strict).module()
    other = fastattn.Mask(causal=True, real_keys=~real)
    torch.testing.assert_close(exported(Q[0], other), fastattn.attention(Q[0], Q[0], Q[0], other))


def test_values_that_stand_for_others_are_not_looked_at():
    """Those that torch.vmap maps over, and those of fake tensors."""
    lengths, q = torch.tensor([[2], [5]]), Q[0]

    def attend(lengths):
        return fastattn.attention(q, q, q, fastattn.Mask.from_lengths(lengths, 5))

    def in_documents(ends):
        return fastattn.attention_varlen(*[q[0].transpose(0, 1)] * 3, ends, torch.tensor([0, 2, 5]))

    torch.testing.assert_close(vmap(attend)(lengths), torch.stack([attend(x) for x in lengths]))
    ends = torch.tensor([[0, 1, 5], [0, 2, 5]])
    torch.testing.assert_close(vmap(in_documents)(ends), torch.stack([in_documents(x) for x in ends]))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake, ends = mode.from_tensor(q[0].transpose(0, 1)), mode.from_tensor(torch.tensor([0, 2, 5]))
        assert fastattn.attention_varlen(fake, fake, fake, ends).shape == fake.shape
        assert fastattn.attention_varlen(fake, fake, fake, ends, ends).shape == fake.shape
        bias = RelativeBias(mode.from_tensor(TABLE), lambda distance: distance.clamp(0, 3))
        assert (
            fastattn.attention(mode.from_tensor(q), mode.from_tensor(q), mode.from_tensor(q), bias=bias).shape
            == q.shape
        )
