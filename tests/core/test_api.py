"""The public functions on tensors: refusals in sentences, the choice of a backend, the drop-in for torch's SDPA."""

import functools
import math
import re
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import FallbackWarning, Mask, plan
from fastattn.backends import BACKENDS, aten, cpu

Q = torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
K = torch.randn(2, 2, 7, 8, generator=torch.Generator().manual_seed(1))
ONES = torch.ones(2, 7, dtype=torch.bool)

made_of = functools.partial(functools.partial, Mask)  # a Mask is judged when it is made
MALFORMED = {  # what is passed instead, and the sentence that answers
    "rank": ({"q": Q[0]}, "q must be [batch, heads, length, head_dim], got [4, 5, 8]"),
    "type": ({"k": 3}, "k must be a Tensor, got int"),
    "integers": ({"q": Q.long()}, "q must be float32, float64, float16 or bfloat16, got torch.int64"),
    "dtypes": ({"k": K.half()}, "k and v must be of dtype torch.float32 like q, got torch.float16 and torch.float32"),
    "device": ({"v": K.to("meta")}, "v must be on cpu like q, got meta"),
    "batch": ({"k": K[:1]}, "k must be [2, H_kv, n_k, 8] like q, got [1, 2, 7, 8]"),
    "head_dim": ({"k": K[..., :4]}, "k must be [2, H_kv, n_k, 8] like q, got [2, 2, 7, 4]"),
    "length": ({"v": K[:, :, :3]}, "v must be [2, 2, 7, d_v] like k, got [2, 2, 3, 8]"),
    "heads": ({"q": Q[:, :3]}, "the heads of k must divide the 3 heads of q, got 2"),
    "no heads": ({"k": K[:, :0], "v": K[:, :0]}, "the heads of k must divide the 4 heads of q, got 0"),
    "nan scale": ({"scale": math.nan}, "scale must be a finite number that fp32 can hold, 2.35e+38 at most, got nan"),
    "text scale": ({"scale": "1"}, "scale must be a finite number that fp32 can hold, 2.35e+38 at most, got '1'"),
    "softcap": (
        {"softcap": 0.0},
        "softcap must be a positive number that fp32 can hold, 2.35e+38 at most, or None, got 0.0",
    ),
    "dropout": ({"dropout_p": 1.5}, "dropout_p must be between 0 and 1, got 1.5"),
    "nan dropout": ({"dropout_p": math.nan}, "dropout_p must be between 0 and 1, got nan"),
    "generator": ({"dropout_p": 0.5, "generator": 3}, "generator must be a torch.Generator, a DropoutSeed"),
    "mask": ({"mask": ONES}, "mask must be a fastattn.Mask or None, got Tensor; write Mask(dense=...) for [..., n_q"),
    "mask in place of causal": ({"mask": made_of(ONES)}, "mask.causal must be a bool, got Tensor; write real_keys=..."),
    "ints": ({"mask": made_of(real_keys=ONES.long())}, "got torch.int64; .bool() makes it so where 1 is real"),
    "dense of ints": ({"mask": made_of(dense=ONES.int())}, "got torch.int32; .bool() makes it so where 1 is seen"),
    "FlashAttention's window": ({"mask": made_of(window=(256, -1))}, "got -1; None is no limit"),
    "scale with a gradient": ({"scale": torch.ones((), requires_grad=True)}, "scale must be a finite number"),
    "scale in a vector": ({"scale": torch.ones(1)}, "scale must be a finite number"),
    "mask dtype": ({"mask": made_of(real_keys=Q[:, 0, :, 0])}, "mask.real_keys must be bool (True is real), got"),
    "mask shape": ({"mask": made_of(real_keys=ONES.T)}, "mask.real_keys must be [2, 7], got [7, 2]"),
    "mask type": ({"mask": made_of(real_keys=[1])}, "mask.real_keys must be a Tensor, got list"),
    "mask device": ({"mask": made_of(real_keys=ONES.to("meta"))}, "mask.real_keys must be on cpu like q, got meta"),
    "real_queries": ({"mask": made_of(real_queries=ONES)}, "mask.real_queries must be [2, 5], got [2, 7]"),
    "dense": ({"mask": made_of(dense=Q[0, 0])}, "mask.dense must be bool (True may see; a float mask is a bias), got"),
    "dense shape": ({"mask": made_of(dense=ONES)}, "mask.dense must be broadcastable to [2, 4, 5, 7], got [2, 7]"),
    "window": ({"mask": made_of(window=(-1, None))}, "mask.window's left must be None or an int from 0 to 2**63 - 1"),
    "window pair": ({"mask": made_of(window=3)}, "mask.window must be a pair (left, right), got 3"),
    "window of NumPy": ({"mask": made_of(window=np.float32(3))}, "mask.window must be a pair (left, right), got "),
    "q_offset": ({"mask": made_of(q_offset=0.5)}, "mask.q_offset must be an int or an integer Tensor, got 0.5"),
    "q_offset shape": ({"mask": made_of(q_offset=ONES.long())}, "mask.q_offset must be [2] or [2, 5], got [2, 7]"),
    "q_offset tensor": ({"mask": made_of(q_offset=Q[:, 0, 0, 0])}, "mask.q_offset must be int32 or int64, got torch"),
    "causal": ({"mask": made_of(causal=1)}, "mask.causal must be a bool, got 1"),
    "sparse": ({"q": Q.to_sparse()}, "q must be a dense Tensor, got torch.sparse_coo"),
    "a number for values": ({"v": [1]}, "v must be a Tensor, got list"),
    "no dropout": ({"dropout_p": None}, "dropout_p must be between 0 and 1, got None"),
    "dropout as a flag": ({"dropout_p": False}, "dropout_p must be between 0 and 1, got False"),
    "infinite scale": ({"scale": math.inf}, "scale must be a finite number that fp32 can hold"),
    "meta scale": ({"scale": torch.tensor(1.0, device="meta")}, "scale must be a finite number that fp32 can hold"),
    "meta softcap": ({"softcap": torch.tensor(1.0, device="meta")}, "softcap must be a positive number"),
    "meta dropout": ({"dropout_p": torch.tensor(0.5, device="meta")}, "dropout_p must be between 0 and 1, got tensor"),
    "tiny scale": ({"scale": 1e-46}, "scale must be a finite number that fp32 can hold"),
    "huge scale": ({"scale": 2**2000}, "scale must be a finite number that fp32 can hold"),
    "far scale": ({"scale": -3e38}, "scale must be a finite number that fp32 can hold, 2.35e+38 at most, got -3e+38"),
    "scale as a flag": ({"scale": True}, "scale must be a finite number"),
    "far softcap": ({"softcap": 3e38}, "softcap must be a positive number that fp32 can hold, 2.35e+38 at most"),
    "softcap as a flag": ({"softcap": True}, "softcap must be a positive number"),
    "list for a softcap": ({"softcap": []}, "softcap must be a positive number"),
    "flags": ({"dropout_p": 0.5, "deterministic": Q}, "deterministic must be a bool, got tensor"),
    "flag of lse": ({"return_lse": Q}, "return_lse must be a bool, got tensor"),
    "segment ids of queries": (
        {"mask": made_of(segment_ids=(ONES.long(), ONES.long()))},
        "mask.segment_ids[0] must be [2, 5], got [2, 7]",
    ),
    "one slope": ({"alibi_slopes": torch.ones(1)}, "alibi_slopes must be [4] or [2, 4], got [1]"),
    "one slope a sample": ({"alibi_slopes": torch.ones(2, 1)}, "alibi_slopes must be [4] or [2, 4], got [2, 1]"),
    "slopes of ints": ({"alibi_slopes": torch.ones(4).int()}, "alibi_slopes must be a floating Tensor, got torch"),
    "sinks of ints": ({"sinks": torch.ones(4).int()}, "sinks must be a floating Tensor, got torch.int32"),
    "bias of five dimensions": ({"bias": torch.ones(1, 1, 1, 1, 7)}, "bias must be broadcastable to"),
    "sparse bias": ({"bias": torch.ones(7).to_sparse()}, "bias must be a floating Tensor, got torch.sparse_coo"),
    "backend in a list": ({"backend": []}, "backend must be a str or None, got list"),
    "far q_offset": (
        {"mask": made_of(q_offset=2**61 + 1)},
        f"mask.q_offset must be an int from -2**61 to 2**61, got {2**61 + 1}",
    ),
    "far window": (
        {"mask": made_of(window=(2**63, 0))},
        f"mask.window's left must be None or an int from 0 to 2**63 - 1, got {2**63}",
    ),
    "q_offset rank": (
        {"mask": made_of(q_offset=ONES[None].long())},
        "mask.q_offset must have 1 or 2 dimensions, got 3",
    ),
    "half of the segment ids": (
        {"mask": made_of(segment_ids=(ONES.long(), None))},
        "mask.segment_ids[1] must be a Tensor, got NoneType",
    ),
    "one tensor of segment ids": (
        {"mask": made_of(segment_ids=torch.zeros(2, 2, 7).long())},
        "mask.segment_ids must be a pair of Tensors (of queries, of keys), got Tensor",
    ),
    "segment_ids": (
        {"mask": made_of(segment_ids=(ONES, ONES))},
        "mask.segment_ids[0] must be int32 or int64, got torch.bool",
    ),
    "bias": ({"bias": torch.zeros(5, 5)}, "bias must be broadcastable to [2, 4, 5, 7], got [5, 5]"),
    "bias dtype": ({"bias": ONES}, "bias must be a floating Tensor, got torch.bool"),
    "slopes": ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes must be [4] or [2, 4], got [3]"),
    "sinks": ({"sinks": torch.zeros(2, 4)}, "sinks must be [4], got [2, 4]"),
    "backend": (
        {"backend": "native"},
        "backend must be one of 'fused', 'hopper', 'triton', 'cuda', 'cpu', 'torch', 'reference', got 'native'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("after_right_ones", [False, True])
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_call_is_refused_in_a_sentence(name, after_right_ones):
    """Also after calls of almost the same kind, which have plans then."""
    (wrong, sentence), right = MALFORMED[name], {"q": Q, "k": K, "v": K}
    plan.forget_plans()
    for other in ({}, {"mask": Mask(real_keys=ONES)}, {"scale": 1.0}, {"softcap": 1.0}) if after_right_ones else ():
        fastattn.attention(**right | other)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        fastattn.attention(**right | {name: x() if callable(x) else x for name, x in wrong.items()})


FOREIGN = {  # names of other libraries, and what is written here
    (fastattn.attention, "is_causal"): "; write mask=fastattn.Mask(causal=True)",
    (fastattn.attention, "attn_mask"): "; write mask=fastattn.Mask(dense=...), bool, True where a query may see a key",
    (fastattn.attention, "key_padding_mask"): "; write mask=fastattn.Mask(real_keys=...), bool, True where a token is",
    (fastattn.attention, "window_size"): "; write mask=fastattn.Mask(window=...), (left, right), each an int or None",
    (fastattn.attention, "softmax_scale"): "; write scale=...",
    (fastattn.attention, "enable_gqa"): "; leave it out",
    (fastattn.attention, "nonsense"): "",
    (fastattn.attention_varlen, "max_seqlen_q"): "; leave it out",
    (fastattn.attention_varlen, "is_causal"): "; write causal=True",
    (fastattn.attention_varlen, "dropout"): "; write dropout_p=...",
    (fastattn.attention_varlen, "attn_mask"): "",
    (fastattn.explain, "causal"): "; write mask=fastattn.Mask(causal=True)",
    (fastattn.explain, "softmax_scale"): "; write scale=...",
    (fastattn.explain, "backend"): "",
    (fastattn.attention_weights, "softmax_scale"): "; write scale=...",
    (fastattn.attention_with_weights, "attn_bias"): "; write bias=...",
    (fastattn.attention_received, "scaling"): "; write scale=...",
    (fastattn.attention_received, "dropout"): "",
    (fastattn.top_keys, "is_causal"): "; write mask=fastattn.Mask(causal=True)",
    (Mask, "is_causal"): "; write causal=True",
    (Mask, "attention_mask"): "; write real_keys=..., bool, True where a token is real",
    (Mask, "sliding_window"): "; write window=..., (left, right), each an int or None for no limit",
    (Mask, "nonsense"): "",
    (fastattn.scaled_dot_product_attention, "causal"): "; write is_causal=True",
    (fastattn.scaled_dot_product_attention, "dropout"): "; write dropout_p=...",
    (fastattn.scaled_dot_product_attention, "softmax_scale"): "; write scale=...",
    (fastattn.scaled_dot_product_attention, "key_padding_mask"): "; write attn_mask=~key_padding_mask[:, None, None]",
    (fastattn.scaled_dot_product_attention, "attention_mask"): "; write attn_mask=attention_mask[:, None, None].bool()",
    (fastattn.scaled_dot_product_attention, "window_size"): "; write fastattn.attention(...), which can do it",
    (fastattn.scaled_dot_product_attention, "nonsense"): "",
    (fastattn.MultiHeadAttention, "hidden_size"): "; write embed_dim=...",
    (fastattn.MultiHeadAttention, "num_attention_heads"): "; write num_heads=...",
    (fastattn.MultiHeadAttention, "dropout_p"): "; write dropout=...",
    (fastattn.MultiHeadAttention, "nonsense"): "",
    (fastattn.MultiHeadAttention.forward, "attention_mask"): "; write key_padding_mask=attention_mask == 0",
    (fastattn.MultiHeadAttention.forward, "causal"): "; write attn_mask=fastattn.Mask(causal=True)",
    (fastattn.MultiHeadAttention.forward, "mask"): "; write attn_mask=..., bool, True hides a key, or a fastattn.Mask",
    (fastattn.MultiHeadAttention.forward, "output_attentions"): "; write need_weights=...",
    (fastattn.MultiHeadAttention.forward, "dropout"): "",
}


@pytest.mark.parametrize(("function", "name"), FOREIGN, ids=lambda x: getattr(x, "__qualname__", x))
def test_a_name_of_another_library_is_answered_with_ours(function, name):
    packed = (Q[0].mT, Q[0].mT, Q[0].mT, torch.tensor([0, 4]))
    layer, x = fastattn.MultiHeadAttention(8, 2), torch.ones(3, 1, 8)
    others = {fastattn.MultiHeadAttention: (8, 2), fastattn.MultiHeadAttention.forward: (layer, x, x, x)}
    others |= dict.fromkeys((fastattn.attention_weights, fastattn.attention_received, fastattn.top_keys), (Q, K))
    more = {"top_k": 1} if function is fastattn.top_keys else {}
    given = ({Mask: (), fastattn.attention_varlen: packed} | others).get(function, (Q, K, K))
    how = FOREIGN[function, name]
    said = re.escape(f"{function.__qualname__}() got an unexpected keyword argument '{name}'{how}") + (
        "" if how else "$"
    )
    with pytest.raises(TypeError, match=said):
        function(*given, **more, **{name: True})


@pytest.mark.parametrize("number", [np.float32, np.float64, torch.tensor, np.int64, lambda x: torch.tensor(int(x))])
def test_numbers_of_numpy_and_torch_are_numbers(number):
    terms = {"scale": 2.0, "softcap": 3.0}
    other = {name: number(x) for name, x in terms.items()}
    assert torch.equal(fastattn.attention(Q, K, K, **other), fastattn.attention(Q, K, K, **terms))
    assert torch.equal(fastattn.attention_weights(Q, K, **other), fastattn.attention_weights(Q, K, **terms))
    assert fastattn.explain(Q, K, K, **other, dropout_p=number(0.0)).backend == "cpu"
    dropped = [fastattn.attention(Q, K, K, dropout_p=p, generator=torch.Generator()) for p in (number(1.0), 1.0)]
    assert torch.equal(*dropped)


@pytest.mark.parametrize("integer", [np.int64, np.int32, torch.tensor])
def test_integers_of_numpy_and_torch_are_integers(integer):
    mask = Mask(q_offset=integer(2), window=[integer(3), None])
    assert (mask.q_offset, mask.window) == (2, (3, None))
    assert all(type(x) is int for x in (mask.q_offset, mask.window[0]))
    actual, expected = (fastattn.top_keys(Q, K, top_k=k) for k in (integer(2), 2))
    assert torch.equal(actual[1], expected[1])
    assert str(Mask().show(integer(3), sample=integer(0))) == str(Mask().show(3))
    seeds = (fastattn.DropoutSeed(number(7), first=(number(1), 0)) for number in (integer, int))
    actual, expected = (fastattn.attention(Q, K, K, dropout_p=0.5, generator=seed) for seed in seeds)
    assert torch.equal(actual, expected)


def test_a_scale_in_a_tensor_is_read_in_each_call():
    scale = torch.tensor(1.0)
    first = fastattn.attention(Q, K, K, scale=scale)
    assert not torch.equal(fastattn.attention(Q, K, K, scale=scale.fill_(2.0)), first)


X, MULTI_HEAD = Q[0], fastattn.MultiHeadAttention(8, 2)
MISPLACED = {  # a mask that has another form elsewhere
    "Mask for attn_mask": (
        lambda: fastattn.scaled_dot_product_attention(Q, Q, Q, Mask(causal=True)),
        "attn_mask must be a Tensor, got Mask; fastattn.attention takes one as its mask",
    ),
    "ints for attn_mask": (
        lambda: fastattn.scaled_dot_product_attention(Q, Q, Q, torch.ones(5, 5, dtype=torch.int64)),
        "got torch.int64; .bool() makes it so where 1 is seen",
    ),
    "Mask for key_padding_mask": (
        lambda: MULTI_HEAD(X, X, X, Mask(real_keys=ONES)),
        "key_padding_mask must be a Tensor or None, got Mask; attn_mask takes one",
    ),
    "attention_mask for key_padding_mask": (
        lambda: MULTI_HEAD(X, X, X, torch.ones(5, 4, dtype=torch.int64)),
        "got torch.int64; True hides, so `== 0` makes it of a mask in which 1 is seen, as transformers' attention_mask",
    ),
}


@pytest.mark.parametrize("name", MISPLACED)
def test_a_mask_of_another_form_is_answered_with_the_right_one(name):
    call, sentence = MISPLACED[name]
    with pytest.raises((TypeError, RuntimeError, AssertionError), match=re.escape(sentence)):
        call()


def test_only_causal_goes_without_its_name():
    with pytest.raises(TypeError, match="positional"):
        Mask(True, 1)


def test_nothing_is_drawn_for_a_refused_call():
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="sinks"):
        fastattn.attention(Q, K, K, dropout_p=0.5, sinks=torch.zeros(1))
    assert torch.equal(before, torch.get_rng_state())


@pytest.fixture
def lacking(monkeypatch):
    """No fused backend computes softcap and sinks."""
    for backend in (cpu, aten):
        features = backend.features
        monkeypatch.setattr(
            backend, "features", lambda device, features=features: features(device) - {"softcap", "sinks"}
        )


def test_first_willing_backend_is_chosen_and_explained():
    explanation = fastattn.explain(Q, K, K, Mask(causal=True))
    assert explanation.backend == "cpu"
    assert explanation.objections["cpu"] == []
    assert explanation.objections["triton"]
    assert "cpu: takes this call" in str(explanation)
    assert "reference: would take this call too" in str(explanation)


def test_explain_does_not_run_warn_or_draw(lacking):
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastattn.explain(Q, K, K, softcap=1.0, dropout_p=0.5)
        explanation = fastattn.explain(Q, K, K, softcap=1.0)
    assert explanation.backend == "reference"
    assert explanation.objections["cpu"] == ["does not support softcap on cpu"]
    assert torch.equal(before, torch.get_rng_state())


def test_explain_refuses_unknown_options():
    with pytest.raises(TypeError, match=r"explain\(\) got an unexpected keyword argument 'backend'$"):
        fastattn.explain(Q, K, K, backend="cpu")


def test_explain_takes_nested_tensors_as_attention_does():
    x = torch.nested.nested_tensor([torch.randn(3, 4, 8), torch.randn(2, 4, 8)], layout=torch.jagged).transpose(1, 2)
    fastattn.attention(x, x, x, Mask(causal=True))
    assert fastattn.explain(x, x, x, Mask(causal=True)).backend == "cpu"
    with pytest.raises(ValueError, match=r"mask must be a fastattn\.Mask of causal and window"):
        fastattn.explain(x, x, x, Mask(q_offset=3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize(
    "fields", [{}, {"causal": True}, {"real_keys": torch.arange(40) < 38}], ids=["none", "causal", "padding"]
)
def test_a_query_of_nan_gives_nan_beside_any_number_of_keys(backend, dtype, fields):
    """Also where a kernel's vectors are longer than a row of scores."""
    if (backend, dtype) == ("cpu", torch.float64):
        return
    for n_k in (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 40):
        q, k = torch.randn(1, 2, 3, 8).to(dtype), torch.randn(1, 2, n_k, 8).to(dtype)
        q[:, :, 1] = math.nan
        mask = Mask(**{name: x[None, :n_k] if isinstance(x, Tensor) else x for name, x in fields.items()})
        o, lse = fastattn.attention(q, k, k, mask, return_lse=True, backend=backend)
        assert torch.equal(o.isnan().all(-1)[0, 0], torch.tensor([False, True, False])), n_k
        assert torch.equal(lse.isnan()[0, 0], torch.tensor([False, True, False])), n_k


def test_explain_knows_who_computes_an_lse():
    q, k = Q.to("meta"), K.to("meta")  # where PyTorch's function serves, which returns none
    assert fastattn.explain(q, k, k).backend == "torch"
    assert fastattn.explain(q, k, k, return_lse=True).backend == "reference"


def test_reference_serves_with_a_warning_that_says_why(lacking):
    with pytest.warns(FallbackWarning, match="cpu: does not support softcap on cpu"):
        served = fastattn.attention(Q, K, K, softcap=1.0)
    assert torch.equal(served, fastattn.attention(Q, K, K, softcap=1.0, backend="reference"))


def test_the_warning_comes_once_per_reason(lacking):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            fastattn.attention(Q, K, K, softcap=1.0)
            fastattn.attention(Q, K, K, sinks=torch.zeros(4))
    assert len([w for w in caught if w.category is FallbackWarning]) == 2


def test_fused_refuses_instead_of_falling_back(lacking):
    with pytest.raises(NotImplementedError, match="cpu: does not support softcap on cpu") as refusal:
        fastattn.attention(Q, K, K, softcap=1.0, backend="fused")
    assert "reference" not in str(refusal.value)


def test_named_backend_is_used_or_refused(lacking):
    with pytest.raises(NotImplementedError, match="cpu: does not support softcap on cpu"):
        fastattn.attention(Q, K, K, softcap=1.0, backend="cpu")
    named = fastattn.attention(Q, K, K, backend="cpu")
    assert torch.equal(named, fastattn.attention(Q, K, K))


def test_backend_that_cannot_run_here_is_an_objection(monkeypatch):
    monkeypatch.setattr(cpu, "unavailable", lambda device: "needs a C++ compiler, found none")
    with pytest.warns(FallbackWarning, match="cpu: needs a C\\+\\+ compiler, found none"):
        fastattn.attention(Q, K, K)


def test_a_backend_that_is_not_asked_is_not_built(monkeypatch):
    monkeypatch.setattr(cpu, "unavailable", lambda device: pytest.fail("built for a call it does not take"))
    assert fastattn.explain(Q.double(), K.double(), K.double()).backend == "torch"
    fastattn.attention(Q.double(), K.double(), K.double(), softcap=1.0)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.NAME)
def test_backend_lists_only_known_features(backend):
    for device in ("cpu", "cuda"):
        assert backend.features(torch.device(device)) <= fastattn.spec.FEATURES


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_microbatches_drop_what_the_batch_does(backend, dtype):
    torch.manual_seed(0)
    x = [torch.randn(6, 4, n, 16).to(dtype).requires_grad_() for n in (20, 33, 33)]
    do, mask = torch.randn(6, 4, 20, 16).to(dtype), fastattn.Mask.from_lengths([33, 5, 20, 33, 1, 30], 33)
    options = {"dropout_p": 0.4, "backend": backend}
    o = fastattn.attention(*x, mask, **options, generator=fastattn.DropoutSeed(-7))
    expected = o.detach(), *torch.autograd.grad(o, x, do)
    for seed in (-7, torch.tensor(-7)):
        for samples, heads in ((slice(0, 2), slice(0, 4)), (slice(2, 6), slice(1, 3))):
            part = [y[samples, heads].detach().requires_grad_() for y in x]
            generator = fastattn.DropoutSeed(seed, first=(samples.start, heads.start))
            of_samples = fastattn.Mask(real_keys=mask.real_keys[samples])
            o = fastattn.attention(*part, of_samples, **options, generator=generator)
            actual = o.detach(), *torch.autograd.grad(o, part, do[samples, heads])
            for name, y, whole in zip(("o", "dq", "dk", "dv"), actual, expected, strict=True):
                torch.testing.assert_close(y, whole[samples, heads], msg=lambda text, name=name: f"{name}: {text}")
    other = fastattn.attention(*x, mask, **options, generator=fastattn.DropoutSeed(-6))
    assert not torch.allclose(other, expected[0], atol=0.1)


def test_weights_and_documents_take_a_seed():
    q = torch.randn(3, 2, 8, 16)
    seeds = {first: fastattn.DropoutSeed(3, first=first) for first in ((0, 0), (2, 0))}
    whole = fastattn.attention_weights(q, q, dropout_p=0.5, generator=seeds[0, 0])
    assert torch.equal(fastattn.attention_weights(q[2:], q[2:], dropout_p=0.5, generator=seeds[2, 0]), whole[2:])
    packed, ends = q[0].transpose(0, 1), torch.tensor([0, 8])
    of_documents = fastattn.attention_varlen(packed, packed, packed, ends, dropout_p=0.5, generator=seeds[0, 0])
    of_rows = fastattn.attention(*[q[:1]] * 3, dropout_p=0.5, generator=seeds[0, 0])
    torch.testing.assert_close(of_documents.transpose(0, 1)[None], of_rows)


def test_a_wrong_seed_is_a_sentence():
    for given, sentence in [
        ((2**63,), "generator.seed must be an int from -2^63 to 2^63 - 1, or a Tensor, got 9223372036854775808"),
        (("x",), "generator.seed must be an int from -2^63 to 2^63 - 1, or a Tensor, got 'x'"),
        ((torch.tensor(1.0),), "generator.seed must be an int64 scalar on cpu like q, got [] of torch.float32 on cpu"),
        ((torch.ones(2, dtype=torch.int64),), "generator.seed must be an int64 scalar on cpu like q, got [2]"),
        ((1, None, (-1, 0)), "generator.first must be a pair (sample, head) of ints from 0, got (-1, 0)"),
        ((1, None, 3), "generator.first must be a pair (sample, head) of ints from 0, got 3"),
        ((1, (1, 0)), "generator.places must be a Tensor or None, got (1, 0); write first=..."),
    ]:
        plan.forget_plans()
        for _ in range(2):  # the second call of its kind
            for function in (fastattn.attention, fastattn.explain):
                with pytest.raises(ValueError, match=re.escape(sentence)):
                    function(Q, K, K, dropout_p=0.5, generator=fastattn.DropoutSeed(*given))
            fastattn.attention(Q, K, K, dropout_p=0.5, generator=fastattn.DropoutSeed(1))


def test_dropout_follows_the_seed():
    def drop(seed):
        torch.manual_seed(seed)
        return fastattn.attention(Q, K, K, dropout_p=0.5, backend="reference")

    assert torch.equal(drop(1), drop(1))
    assert not torch.equal(drop(1), drop(2))
    a, b = (fastattn.attention(Q, K, K, dropout_p=0.5, generator=torch.Generator().manual_seed(1), backend="reference")
            for _ in range(2))  # fmt: skip
    assert torch.equal(a, b)


# --- the drop-in for torch.nn.functional.scaled_dot_product_attention


def test_sdpa_refuses_by_torchs_names():
    with pytest.raises(RuntimeError, match=r"^value must be of dtype torch\.float32 like query, got torch\.float64"):
        fastattn.scaled_dot_product_attention(Q, Q, Q.double())


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"causal": torch.ones(2)}, "mask.causal must be a bool, got Tensor"),
        ({"dropout_p": torch.zeros(2)}, "dropout_p must be between 0 and 1, got tensor"),
        ({"dropout_p": np.zeros(2)}, "dropout_p must be between 0 and 1, got array"),
    ],
)
def test_documents_of_one_query_refuse_in_a_sentence(wrong, sentence):
    q, ends = torch.ones(2, 2, 8), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match=re.escape(sentence)):
        fastattn.attention_varlen(q, q, q, ends, ends, align="end", **wrong)


def test_documents_of_one_query_under_autocast():
    q, ends = torch.randn(2, 2, 8), torch.tensor([0, 1, 2])
    with torch.autocast("cpu", torch.bfloat16):
        o, lse = fastattn.attention_varlen(q, q, q, ends, ends, return_lse=True)
    assert torch.equal(o, q.bfloat16())
    assert lse.dtype == torch.float32


def test_sdpa_padding_mask_runs_fused():
    k = K.repeat_interleave(2, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastattn.scaled_dot_product_attention(Q, k, k, ONES.tril()[:, None, None])
