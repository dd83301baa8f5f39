"""Tensor parallel models, alone and in a context_parallel block, against one process: the loss and all gradients."""

import pytest
import torch
from test_context import check


@pytest.mark.parametrize(
    ("kind", "context"),
    [
        ("attention", False), ("grouped heads", False), ("mask of each head", False), ("torch", False),
        ("decoder", False), ("language", False), ("dropout", False), ("grouped heads", True), ("torch", True),
        ("language", True), ("dropout", True), ("dense of each head", True),
    ],
)  # fmt: skip
def test_modules(ranks, kind, context):
    check(ranks.run("tensor_jobs.heads", 4 if context else 2, kind=kind, context=context))


@pytest.mark.parametrize(("kind", "context"), [("llama", False), ("gpt_oss", False), ("gpt_oss", True)])
def test_models_of_transformers(ranks, kind, context):
    check(ranks.run("tensor_jobs.hugging_face", 4 if context else 2, kind=kind, context=context))


REFUSED = {
    "linear": "module must be a MultiHeadAttention of fastattn, got Linear",
    "zero": "module must have neither add_bias_kv nor add_zero_attn",
    "heads": "num_heads and num_kv_heads must be multiples of the 2 ranks, got (4, 1)",
    "weights": "need_weights must be False, and cache None, where heads are on several ranks",
    "nothing": "module must have an attention or a Transformer layer of fastattn, got Linear",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_heads_to_share_is_refused(ranks, what):
    for message in ranks.run("tensor_jobs.refused", 2, what=what):
        assert message.startswith(REFUSED[what])


@pytest.mark.parametrize(("context", "kind"), [(True, "torch"), (False, "dropout")])
def test_compiled(ranks, kind, context):
    for actual, expected in ranks.run("tensor_jobs.compiled", 4 if context else 2, kind=kind, context=context):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_second_derivatives(ranks):
    for actual, expected in ranks.run("tensor_jobs.second_derivatives", 2):
        torch.testing.assert_close(actual, expected)
