"""RelativeBias: its meaning, its derivatives, its memory, and what it refuses. Every backend has cases of it."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import vmap
from torch.profiler import ProfilerActivity, profile

import fastattn
from fastattn import Mask, RelativeBias
from fastattn.testing import Case, make_inputs

INPUTS = make_inputs(Case("", "", H=4, n_q=7, n_k=9, D=8), torch.float64)
Q, K, V = INPUTS.q, INPUTS.k, INPUTS.v
TABLE = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def bucket(distance: torch.Tensor) -> torch.Tensor:
    return distance.clamp(-3, 2) + 3


def dense(table: torch.Tensor, n_q: int, n_k: int, q_offset: int = 0) -> torch.Tensor:
    """[H, n_q, n_k], written as it is defined."""
    rows = [[table[:, max(-3, min(j - i - q_offset, 2)) + 3] for j in range(n_k)] for i in range(n_q)]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


@pytest.mark.parametrize("q_offset", [0, 2, -4])
def test_meaning(q_offset):
    mask = Mask(causal=True, q_offset=q_offset)
    o = fastattn.attention(Q, K, V, mask, bias=RelativeBias(TABLE, bucket))
    torch.testing.assert_close(o, fastattn.attention(Q, K, V, mask, bias=dense(TABLE, 7, 9, q_offset)))


@pytest.mark.parametrize("backend", ["reference", "cpu", "torch"])
def test_one_table_for_all_heads(backend):
    q, k, v, table = (x.float() for x in (Q, K, V, TABLE[:1]))
    expected = fastattn.attention(q, k, v, bias=RelativeBias(table.expand(4, 6), bucket), backend=backend)
    for of_all in (table, table[0]):
        o = fastattn.attention(q, k, v, bias=RelativeBias(of_all, bucket), backend=backend)
        torch.testing.assert_close(o, expected)


@pytest.mark.parametrize("backend", ["reference", "cpu", "torch"])
def test_without_a_bucket_the_table_is_by_distance(backend):
    values = torch.randn(15, 4).T.requires_grad_()  # whose rows do not lie side by side
    place = 6 - torch.arange(7)[:, None] + torch.arange(9)
    q, k, v = Q.float(), K.float(), V.float()
    results = []
    for bias in (RelativeBias(values), values[:, place]):
        o = fastattn.attention(q, k, v, Mask(causal=True, q_offset=2), bias=bias, backend=backend)
        results.append((o, *torch.autograd.grad(o.square().sum(), values)))
    torch.testing.assert_close(*results)


def attend(q, k, v, table):
    mask = Mask(causal=True, q_offset=2)
    o, lse = fastattn.attention(q, k, v, mask, bias=RelativeBias(table, bucket), return_lse=True)
    return o, lse.masked_fill(lse == -math.inf, 0)


def test_derivatives_of_every_order():
    inputs = [x[:1, :2, :4].clone().requires_grad_() for x in (Q, K, V)] + [TABLE[:2].clone().requires_grad_()]
    assert gradcheck(attend, inputs, check_forward_ad=True)
    assert gradgradcheck(attend, inputs, fast_mode=True)


@pytest.mark.parametrize("function", ["weights", "received", "top_keys"])
def test_derivatives_of_weights(function, monkeypatch):
    monkeypatch.setattr("fastattn.derivatives.BLOCK_ELEMENTS", 1)  # a query at a time

    def of_weights(q, k, table):
        bias = RelativeBias(table, bucket)
        if function == "weights":
            return fastattn.attention_weights(q, k, bias=bias, backend="reference")
        if function == "received":
            return fastattn.attention_received(q, k, bias=bias, backend="reference")
        return fastattn.top_keys(q, k, bias=bias, top_k=2, backend="reference")[0]

    inputs = [x[:1, :2, :4].clone().requires_grad_() for x in (Q, K)] + [TABLE[:2].clone().requires_grad_()]
    assert gradcheck(of_weights, inputs, check_forward_ad=True)
    assert gradgradcheck(of_weights, inputs, fast_mode=True)


def test_vmap_over_tables():
    tables = torch.stack([TABLE, 2 * TABLE])
    o, _ = vmap(lambda table: attend(Q, K, V, table))(tables)
    for one, table in zip(o, tables, strict=True):
        torch.testing.assert_close(one, attend(Q, K, V, table)[0])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_as_one_graph(backend):
    def loss(q, k, v, table):
        bias = RelativeBias(table, lambda distance: bucket(distance))  # a function that Dynamo has to make
        return fastattn.attention(q, k, v, Mask(causal=True, q_offset=2), bias=bias).square().sum()

    inputs = [x.float().requires_grad_() for x in (Q, K, V, TABLE)]
    gradients = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend=backend)(*inputs), inputs)
    torch.testing.assert_close(gradients, torch.autograd.grad(loss(*inputs), inputs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_gradient_of_a_table_of_16_bits_is_added_up_in_fp32(dtype):
    """In 16 bits a sum of 4096 small numbers would stop growing long before the end."""
    table = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    values = RelativeBias(table, torch.zeros_like).by_distance(4000, 97)
    values.backward(torch.full_like(values, 0.01))
    torch.testing.assert_close(table.grad.float(), torch.full((1, 1), 40.96), rtol=0.01, atol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_documents_are_what_they_are_alone(causal):
    inputs = make_inputs(Case("", "", B=1, n_q=60, D=16), torch.float32)
    table = TABLE[:2].float().requires_grad_()
    q, k, v = inputs.q, inputs.k, inputs.v
    ids = torch.tensor([0] * 25 + [1] * 30 + [-1] * 5)[None]
    packed = fastattn.attention(q, k, v, Mask(causal, segment_ids=(ids, ids)), bias=RelativeBias(table, bucket))
    alone = [
        fastattn.attention(*(x[:, :, part] for x in (q, k, v)), Mask(causal), bias=RelativeBias(table, bucket))
        for part in (slice(0, 25), slice(25, 55))
    ]
    expected = torch.cat([*alone, torch.zeros(1, 2, 5, 16)], 2)
    torch.testing.assert_close(packed, expected)
    gradients = [torch.autograd.grad(o.square().sum(), table)[0] for o in (packed, expected)]
    torch.testing.assert_close(*gradients)


def test_packed_documents():
    table = TABLE.float().requires_grad_()
    q, k, v = torch.randn(3, 40, 4, 8)
    ends, bias = torch.tensor([0, 11, 12, 38]), RelativeBias(table, bucket)
    packed = fastattn.attention_varlen(q, k, v, ends, causal=True, bias=bias)
    alone = []
    for first, end in ((0, 11), (11, 12), (12, 38)):
        one = (x[None, first:end].transpose(1, 2) for x in (q, k, v))
        alone.append(fastattn.attention(*one, Mask(causal=True), bias=bias)[0].transpose(0, 1))
    torch.testing.assert_close(packed, torch.cat([*alone, torch.zeros(2, 4, 8)]))
    with pytest.raises(ValueError, match="bias must be None where cu_seqlens_k is given, got a RelativeBias"):
        fastattn.attention_varlen(q, k, v, ends, ends, bias=bias)
    with pytest.raises(ValueError, match="bias must be a RelativeBias or None, got a Tensor"):
        fastattn.attention_varlen(q, k, v, ends, bias=torch.zeros(40, 40))


@pytest.mark.parametrize("documents", [False, True])
def test_the_same_bits_on_any_number_of_threads(documents):
    case = Case("", "", B=2, H=4, H_kv=2, n_q=700, D=16, causal=True, keys=None if documents else "holes")
    inputs, table = make_inputs(case, torch.float32), TABLE.float().requires_grad_()
    ids = (torch.arange(700) // 90)[None].expand(2, -1)
    mask = Mask(True, segment_ids=(ids, ids)) if documents else inputs.mask
    gradients = []
    for threads in (1, 2, 5, 16):
        torch.set_num_threads(threads)
        o = fastattn.attention(inputs.q, inputs.k, inputs.v, mask, bias=RelativeBias(table, bucket), backend="cpu")
        gradients += torch.autograd.grad(o, table, inputs.do)
    assert all(torch.equal(gradients[0], other) for other in gradients)


def test_nothing_of_the_size_of_all_pairs_is_made():
    n = 1024
    inputs = make_inputs(Case("", "", B=1, H=2, n_q=n, D=16, causal=True), torch.float32)
    q, table = inputs.q.requires_grad_(), TABLE[:2].float().requires_grad_()
    fastattn.attention(q, inputs.k, inputs.v, bias=RelativeBias(table, bucket), backend="cpu").sum().backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        o = fastattn.attention(q, inputs.k, inputs.v, inputs.mask, bias=RelativeBias(table, bucket), backend="cpu")
        o.backward(inputs.do)
    largest = max(event.self_cpu_memory_usage for event in profiled.key_averages())
    assert 0 < largest < 4 * n * n / 4


def test_explained():
    explanation = fastattn.explain(Q.float(), K.float(), V.float(), bias=RelativeBias(TABLE.float(), bucket))
    assert explanation.backend in ("cpu", "torch")
    assert explanation.objections["hopper"][0] == "does not support relative_bias on cpu"


def test_a_table_without_entries_for_no_queries():
    q, k = torch.zeros(1, 2, 0, 8), torch.zeros(1, 2, 1, 8)
    for table in (torch.zeros(0), torch.zeros(2, 0)):
        assert fastattn.attention(q, k, k, bias=RelativeBias(table)).shape == q.shape


WRONG_TABLES = {
    "float": (1.0, "table must be a floating Tensor, [buckets] or [H, buckets], got float"),
    "integers": (torch.ones(2, 3).long(), "table must be .*, got [2, 3] of torch.int64"),
    "dimensions": (torch.ones(1, 2, 3), "table must be .*, got [1, 2, 3] of torch.float32"),
}


@pytest.mark.parametrize("name", WRONG_TABLES)
def test_a_wrong_table_is_refused(name):
    table, why = WRONG_TABLES[name]
    with pytest.raises(ValueError, match=why.replace("[", r"\[").replace("]", r"\]")):
        RelativeBias(table)
    with pytest.raises(ValueError, match="bucket must be a function of distances, or None, got 3"):
        RelativeBias(TABLE, 3)


SEGMENT_IDS = torch.zeros(2, 9, dtype=torch.int32)
REFUSED = {
    "heads": (RelativeBias(TABLE[:3], bucket), Mask(), "bias.table must be .buckets. or .4 or 1, buckets., got"),
    "device": (RelativeBias(TABLE.to("meta"), bucket), Mask(), "bias.table must be on cpu like q, got meta"),
    "width": (RelativeBias(TABLE), Mask(), "bias.table must have n_q . n_k - 1 = 17 columns without a bucket, got"),
    "no index": (RelativeBias(TABLE, lambda d: d.float()), Mask(), "bias.bucket must return int64 .*torch.float32"),
    "too few": (RelativeBias(TABLE, lambda d: bucket(d[1:])), Mask(), "bias.bucket must return int64 .17. .*got .16."),
    "too large": (RelativeBias(TABLE, lambda d: d.clamp(0, 6)), Mask(), "bias.bucket must return from 0 to 5"),
    "negative": (RelativeBias(TABLE, lambda d: d.clamp(-1, 5)), Mask(), "bias.bucket must return from 0 to 5"),
    "offsets": (
        RelativeBias(TABLE, bucket), Mask(causal=True, q_offset=torch.tensor([1, 2])),
        "mask.q_offset must be an int beside a RelativeBias with a bucket, got a Tensor",
    ),
    "documents": (
        RelativeBias(TABLE, bucket), Mask(segment_ids=(SEGMENT_IDS, SEGMENT_IDS.clone())),
        "mask.segment_ids must be one Tensor for queries and keys beside a RelativeBias, got two",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_in_a_sentence(name):
    bias, mask, why = REFUSED[name]
    q = K.clone()
    same = SEGMENT_IDS.clone()
    fastattn.attention(q, K, V, Mask(segment_ids=(same, same)), bias=RelativeBias(TABLE, bucket))  # of the same kind
    for call in (
        lambda: fastattn.attention(q, K, V, mask, bias=bias),
        lambda: fastattn.explain(q, K, V, mask, bias=bias),
    ):
        with pytest.raises(ValueError, match=why):
            call()


def test_other_arguments_are_refused_first():
    with pytest.raises(ValueError, match="q must be a Tensor, got float"):
        fastattn.attention(1.0, K, V, bias=RelativeBias(TABLE, bucket))
    with pytest.raises(ValueError, match=r"mask must be a fastattn\.Mask or None"):
        fastattn.attention(Q, K, V, torch.ones(7, 9), bias=RelativeBias(TABLE, bucket))
    with pytest.raises(ValueError, match=r"plan must be made by fastattn\.parallel\.plan, got object"):
        fastattn.attention(Q, K, V, bias=RelativeBias(TABLE, bucket), plan=object())
    nested = torch.nested.nested_tensor([torch.randn(3, 2, 8)] * 2, layout=torch.jagged).transpose(1, 2)
    with pytest.raises(ValueError, match="bias must be None where q is nested, got RelativeBias"):
        fastattn.attention(nested, nested, nested, bias=RelativeBias(TABLE, bucket))


@pytest.mark.parametrize("empty", ["n_q", "n_k", "both"])
def test_lengths_of_zero(empty):
    q, k = (x[:, :, :0] if empty in (name, "both") else x for name, x in (("n_q", Q), ("n_k", K)))
    table = TABLE.clone().requires_grad_()
    o = fastattn.attention(q, k, V[:, :, : k.shape[2]], bias=RelativeBias(table, bucket))
    assert torch.equal(o, torch.zeros_like(o))
    (gradient,) = torch.autograd.grad(o.sum(), table, create_graph=True)
    assert torch.equal(gradient, torch.zeros_like(table))
    weights = fastattn.attention_weights(q, k, bias=RelativeBias(table, bucket), backend="reference")
    assert torch.equal(torch.autograd.grad(weights.sum(), table)[0], torch.zeros_like(table))
