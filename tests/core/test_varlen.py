"""attention_varlen: documents one after the other, against a loop over them."""

import math
import re

import pytest
import torch
from modelled_gpu import CUDA_MACHINES
from places import place_id
from torch import Tensor

import fastattn
from fastattn import Mask, decoding
from fastattn.backends import BACKENDS, objections, triton
from fastattn.spec import Spec
from fastattn.testing import DTYPES, Inputs, compare, exact, naive

LENGTHS_Q = (5, 0, 17, 1, 40, 3)
LENGTHS_K = (9, 4, 17, 0, 23, 30)
SLACK = 3  # tokens after the last document

CALLS = {  # the arguments, and whether the keys have lengths of their own
    "plain": ({}, False),
    "causal": ({"causal": True}, False),
    "cross": ({}, True),
    "cross-causal": ({"causal": True}, True),
    "cross-causal-end": ({"causal": True, "align": "end"}, True),
    "window": ({"window": (7, 2)}, True),
    "window-end": ({"window": (7, 2), "align": "end"}, True),
    "end-of-equal-lengths": ({"causal": True, "align": "end"}, False),
    "end-without-positions": ({"align": "end", "softcap": 2.0}, True),
    "alibi-end": ({"alibi": True, "align": "end"}, True),
    "sinks-softcap": ({"causal": True, "sinks": True, "softcap": 1.5, "scale": 0.7}, False),
}


def cu_seqlens(lengths: tuple[int, ...], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).to(dtype)


def packed(total: int, heads: int, dim: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(total, heads, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def by_document(x: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
    """[1, H, n, D] of each document."""
    return [part.transpose(0, 1)[None] for part in x[: sum(lengths)].split(lengths)]


@pytest.mark.parametrize(
    ("backend", "name", "dtype"),
    [
        (backend, name, dtype)
        for backend in (*BACKENDS, *CUDA_MACHINES)
        for i, name in enumerate(CALLS)
        # Interpreted, a call takes a second, and what becomes of its arguments does not depend on their dtype.
        for dtype in (DTYPES[i % 3 :][:1] if backend is triton else DTYPES)
    ],
    ids=place_id,
    indirect=["backend"],
)
def test_same_as_a_loop_over_the_documents(backend, name, dtype):
    options, cross = CALLS[name]
    options = dict(options)
    H, H_kv, D, d_v = 4, 2, 24, 16
    lengths_q, lengths_k = LENGTHS_Q, LENGTHS_K if cross else LENGTHS_Q
    total_q, total_k = sum(lengths_q) + SLACK, sum(lengths_k) + SLACK
    q, k, v = packed(total_q, H, D, 0, dtype), packed(total_k, H_kv, D, 1, dtype), packed(total_k, H_kv, d_v, 2, dtype)
    do, dlse = packed(total_q, H, d_v, 3, dtype), packed(total_q, H, 1, 4, torch.float32)[..., 0].T
    for x in (q, k, v, do):
        x[-SLACK:] = math.nan
    learned = {}
    if options.pop("alibi", False):
        learned["alibi_slopes"] = 2.0 ** -torch.arange(1, H + 1)
    if options.pop("sinks", False):
        learned["sinks"] = packed(1, H, 1, 5, torch.float32).flatten()

    leaves = {n: x.clone().requires_grad_() for n, x in {"q": q, "k": k, "v": v, **learned}.items()}

    def attend() -> tuple[Tensor, Tensor]:
        boundaries = (cu_seqlens(lengths_q), cu_seqlens(lengths_k, torch.int64) if cross else None)
        return fastattn.attention_varlen(
            *(leaves[n] for n in "qkv"), *boundaries, **options, **{n: leaves[n] for n in learned}, return_lse=True,
            backend=backend.NAME,
        )  # fmt: skip

    # Every field that the call can need, so that a backend either takes it or says what it lacks.
    aligned = options.pop("align", None) == "end"
    position = {n: options.pop(n) for n in ("causal", "window") if n in options}
    segment_ids = (torch.zeros(1, total_q, dtype=torch.int64), torch.zeros(1, total_k, dtype=torch.int64))
    each = (
        torch.zeros(1, total_q, dtype=torch.int64)
        if aligned and cross and (position or "alibi_slopes" in learned)
        else 0
    )
    spec = Spec(
        Mask(**position, q_offset=each, segment_ids=segment_ids), 1.0, softcap=options.get("softcap"), **learned
    )
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    why = objections(backend, *heads_first, spec)
    options |= position | ({"align": "end"} if aligned else {})
    if why:
        with pytest.raises(NotImplementedError, match=re.escape("; ".join(why))):
            attend()
        return

    o, lse = attend()
    assert o.shape == (total_q, H, d_v)
    assert lse.shape == (H, total_q)
    gradients = torch.autograd.grad((o, lse), list(leaves.values()), (do, dlse))
    actual = {"o": o, "lse": lse} | {f"d{n}": g for n, g in zip(leaves, gradients, strict=True)}

    parts: dict[str, list[list[Tensor]]] = {n: [[], []] for n in actual}
    pieces = (
        by_document(x, lengths) for x, lengths in ((q, lengths_q), (k, lengths_k), (v, lengths_k), (do, lengths_q))
    )
    of_lse = dlse[None, :, : sum(lengths_q)].split(lengths_q, -1)
    for a, b, c, d, e in zip(*pieces, of_lse, strict=True):
        n_q, n_k = a.shape[2], b.shape[2]
        mask = Mask(**position, q_offset=n_k - n_q if aligned else 0)
        scale = options.get("scale", D**-0.5)
        inputs = Inputs(a, b, c, d, e, mask, {"scale": scale, "softcap": options.get("softcap"), **learned})
        right = exact(inputs)
        plain = naive(inputs) if n_q * n_k else right
        for n, both in parts.items():
            for part, value in zip(both, (plain[n], right[n]), strict=True):
                part.append(value.double())

    slack = {"o": 0.0, "lse": -math.inf, "dq": 0.0, "dk": 0.0, "dv": 0.0}
    for n, both in parts.items():
        if n in slack:
            token = 1 if n == "lse" else 0
            whole = [torch.cat(part, 2)[0] if n == "lse" else torch.cat(part, 2)[0].transpose(0, 1) for part in both]
            rest = torch.full_like(whole[0].narrow(token, 0, 1), slack[n]).repeat_interleave(SLACK, token)
            whole = [torch.cat((x, rest), -1 if n == "lse" else 0) for x in whole]
        else:
            whole = [torch.stack(part).sum(0) for part in both]
        error = compare(n, actual[n], *whole)
        assert error.right, error
    assert (actual["o"][-SLACK:] == 0).all()


@pytest.mark.parametrize(("backend", "dtype"), [("reference", torch.float64), ("cpu", torch.float32)])
@pytest.mark.parametrize("lengths_q", [(1, 1, 0, 1, 1, 1), (5, 1, 1, 0, 9, 1), (1, 0, 1, 2, 1, 1)], ids=str)
@pytest.mark.parametrize("name", [name for name, (_, cross) in CALLS.items() if cross])
def test_without_gradients_queries_alone_in_their_documents_are_computed_apart(
    name, lengths_q, backend, dtype, monkeypatch
):
    monkeypatch.setattr(decoding, "_AT_ONCE", 2)
    lengths_k = (9, 4, 17, 6, 0, 30)
    total_q, total_k = sum(lengths_q) + SLACK, sum(lengths_k) + SLACK
    q, k, v = (
        packed(n, H, D, i, dtype) for i, (n, H, D) in enumerate(((total_q, 4, 24), (total_k, 2, 24), (total_k, 2, 16)))
    )
    for x in (q, k, v):
        x[-SLACK:] = math.nan
    options = dict(CALLS[name][0], sinks=packed(1, 4, 1, 5, dtype).flatten(), return_lse=True, backend=backend)
    if options.pop("alibi", False):
        options["alibi_slopes"] = 2.0 ** -torch.arange(1, 5)
    tolerance = 100 * torch.finfo(dtype).eps
    boundaries, shapes = (cu_seqlens(lengths_q), cu_seqlens(lengths_k)), []

    def attend(q, k, v, mask=None, **options):
        shapes.append((q.shape[0], q.shape[2]))
        return attention(q, k, v, mask, **options)

    attention = fastattn.api.attention
    monkeypatch.setattr(fastattn.api, "attention", attend)
    actual = fastattn.attention_varlen(q, k, v, *boundaries, **options)
    together = [(1, total_q)] if max(lengths_q) > 1 else []
    ones = lengths_q.count(1)
    assert shapes == together + [(2, 1)] * (ones // 2) + [(1, 1)] * (ones % 2)
    expected = fastattn.attention_varlen(q.clone().requires_grad_(), k, v, *boundaries, **options)
    torch.testing.assert_close(actual, tuple(x.detach() for x in expected), rtol=tolerance, atol=tolerance)
    assert shapes[-1] == (1, total_q)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_dropout_is_that_of_the_packed_tokens(backend):
    q = packed(30, 2, 8, 0, torch.float32)
    seeded = {"dropout_p": 0.4, "backend": backend}
    o = fastattn.attention_varlen(q, q, q, cu_seqlens((10, 20)), generator=torch.Generator().manual_seed(1), **seeded)
    ids = (torch.arange(30)[None] >= 10).int()
    x = q.transpose(0, 1)[None]
    expected = fastattn.attention(
        x, x, x, Mask(segment_ids=(ids, ids)), generator=torch.Generator().manual_seed(1), **seeded
    )
    assert torch.equal(o, expected[0].transpose(0, 1))


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)], ids=str)
def test_no_documents_are_all_padding(lengths):
    q = torch.full((4, 2, 8), math.nan)
    o, lse = fastattn.attention_varlen(q, q, q, cu_seqlens(lengths), causal=True, return_lse=True)
    assert (o == 0).all()
    assert (lse == -math.inf).all()
    k = torch.full((7, 2, 8), math.nan)
    o = fastattn.attention_varlen(q, k, k, cu_seqlens(lengths), cu_seqlens(lengths), causal=True, align="end")
    assert (o == 0).all()


def test_boundaries_may_be_any_slice_of_a_tensor():
    q = packed(30, 2, 8, 0, torch.float32)
    boundaries = torch.tensor([[0, 9], [10, 9], [30, 9]])
    expected = fastattn.attention_varlen(q, q, q, torch.tensor([0, 10, 30]))
    assert torch.equal(fastattn.attention_varlen(q, q, q, boundaries[:, 0]), expected)


def test_output_is_packed_like_the_queries():
    q = packed(30, 2, 8, 0, torch.float32)
    assert fastattn.attention_varlen(q, q, q, cu_seqlens((30,))).is_contiguous()


@pytest.mark.parametrize("align", ["start", "end"])
def test_compiles_whole(align):
    def attend(q, k, boundaries_q, boundaries_k):
        return fastattn.attention_varlen(q, k, k, boundaries_q, boundaries_k, causal=True, align=align)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for lengths_q, lengths_k in (((5, 9), (6, 20)), ((3, 3, 8), (10, 2, 8))):
        q, k = packed(sum(lengths_q), 2, 8, 0, torch.float32), packed(sum(lengths_k), 2, 8, 1, torch.float32)
        call = (q, k, cu_seqlens(lengths_q), cu_seqlens(lengths_k))
        assert torch.equal(compiled(*call), attend(*call))


Q = torch.zeros(10, 4, 8)
BOUNDARIES = torch.tensor([0, 4, 10])
MALFORMED = {
    "rank": ({"q": Q[None]}, "q must be a Tensor [tokens, heads, head_dim], got [1, 10, 4, 8]"),
    "type": ({"v": None}, "v must be a Tensor [tokens, heads, head_dim], got NoneType"),
    "head dim": ({"k": Q[..., :4]}, "k must be [total_k, H_kv, 8] like q, got [10, 4, 4]"),
    "values": ({"v": Q[:9]}, "v must be [10, 4, d_v] like k, got [9, 4, 8]"),
    "heads": ({"q": Q[:, :3]}, "the heads of k must divide the 3 heads of q, got 4"),
    "align": ({"align": "left"}, "align must be 'start' or 'end', got 'left'"),
    "sparse": (
        {"cu_seqlens_q": torch.tensor([0, 10]).to_sparse()},
        "cu_seqlens_q must be an int32 or int64 Tensor, got torch.sparse_coo",
    ),
    "list": ({"cu_seqlens_q": [0, 10]}, "cu_seqlens_q must be an int32 or int64 Tensor, got list"),
    "floats": (
        {"cu_seqlens_q": BOUNDARIES.float()},
        "cu_seqlens_q must be an int32 or int64 Tensor, got torch.float32",
    ),
    "table": ({"cu_seqlens_k": BOUNDARIES[None]}, "cu_seqlens_k must be [documents + 1], got [1, 3]"),
    "none": ({"cu_seqlens_q": BOUNDARIES[:0]}, "cu_seqlens_q must be [documents + 1], got [0]"),
    "device": ({"cu_seqlens_q": BOUNDARIES.to("meta")}, "cu_seqlens_q must be on cpu like q, got meta"),
    "documents": ({"cu_seqlens_k": BOUNDARIES[:2]}, "cu_seqlens_k must be [3] like cu_seqlens_q, got [2]"),
    "lengths": ({"k": Q[:9], "v": Q[:9]}, "cu_seqlens_k must be given where k has another length than q, got 9 and 10"),
    "begin": (
        {"cu_seqlens_q": BOUNDARIES + 1},
        "cu_seqlens_q must begin at 0, never fall, and end at 10 at most, got [1, 5, 11]",
    ),
    "falls": ({"cu_seqlens_k": torch.tensor([0, 6, 5])}, "cu_seqlens_k must begin at 0, never fall, and end at 10 at"),
    "end": ({"cu_seqlens_q": torch.tensor([0, 4, 11])}, "cu_seqlens_q must begin at 0, never fall, and end at 10 at"),
    "slopes": ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes must be [4], got [3]"),
    "slopes of samples": ({"alibi_slopes": torch.zeros(1, 4)}, "alibi_slopes must be [4], got [1, 4]"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_call_is_refused_in_a_sentence(name):
    wrong, sentence = MALFORMED[name]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        fastattn.attention_varlen(**({"q": Q, "k": Q, "v": Q, "cu_seqlens_q": BOUNDARIES} | wrong))


def jagged(*lengths: int, heads: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(lengths))
    parts = [torch.randn(n, heads, 8, generator=generator) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)


@pytest.mark.parametrize("mask", [None, Mask(causal=True), Mask(window=(0, 2))], ids=["", "causal", "window"])
def test_nested_tensors_are_documents(mask):
    q, k = jagged(3, 5, 2, heads=4), jagged(4, 1, 6)
    o, lse = fastattn.attention(q, k, k, mask, scale=0.5, return_lse=True)
    assert (q + o).shape == q.shape
    for o_one, lse_one, q_one, k_one in zip(o.unbind(), lse.unbind(), q.unbind(), k.unbind(), strict=True):
        expected = fastattn.attention(q_one[None], k_one[None], k_one[None], mask, scale=0.5, return_lse=True)
        torch.testing.assert_close((o_one[None], lse_one[None]), expected)
    dropped = (fastattn.scaled_dot_product_attention(k, k, k, None, p, is_causal=True) for p in (1.0, 0.0))
    assert next(dropped).values().abs().max() == 0
    torch.testing.assert_close(next(dropped).values(), fastattn.attention(k, k, k, Mask(causal=True)).values())


@pytest.mark.parametrize("lengths", [(0, 0), (0, 3), ()])
def test_nested_tensors_may_be_empty(lengths):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    x = torch.nested.nested_tensor_from_jagged(torch.ones(sum(lengths), 2, 8), offsets).transpose(1, 2)
    for o in (fastattn.attention(x, x, x), fastattn.scaled_dot_product_attention(x, x, x)):
        assert torch.equal(o.values(), x.values())


def with_holes() -> torch.Tensor:
    x = torch.nested.nested_tensor_from_jagged(torch.ones(8, 2, 8), torch.tensor([0, 4, 8]), torch.tensor([3, 2]))
    return x.transpose(1, 2)


NESTED, DENSE = jagged(3, 5), torch.ones(2, 2, 5, 8)
NOT_NESTED = {
    "k": ({"k": DENSE}, "k must be nested, [batch, heads, j, head_dim] of layout torch.jagged, where q is, got torch"),
    "heads inside": (
        {"q": NESTED.transpose(1, 2)},
        "q must be nested, [batch, heads, j, head_dim] of layout torch.jag",
    ),
    "holes": ({"q": with_holes()}, "with holes"),
    "other lengths": ({"v": jagged(4, 4)}, "v must be nested with the lengths of k"),
    "mask": ({"mask": Mask(real_keys=torch.ones(2, 5).bool())}, "of causal and window, or None, where q is nested"),
    "q_offset": ({"mask": Mask(q_offset=1)}, "of causal and window, or None, where q is nested, got ['q_offset']"),
    "bias": ({"bias": torch.zeros(1)}, "bias must be None where q is nested, got Tensor"),
    "samples": ({"q": jagged(3, 5, 1)}, "k must have 3 documents like q, got 2"),
}


@pytest.mark.parametrize("name", NOT_NESTED)
def test_what_nested_tensors_cannot_have(name):
    wrong, sentence = NOT_NESTED[name]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        fastattn.attention(**({"q": NESTED, "k": NESTED, "v": NESTED} | wrong))
