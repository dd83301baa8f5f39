"""Models in a context_parallel block against the same models on one process: the loss and all gradients."""

import pytest
import torch

WHAT = ["nothing", "padding", "documents"]


def check(answers: list[dict]) -> None:
    for answer in answers:
        assert len(answer) > 3
        for name, (actual, expected) in answer.items():
            scale = expected.abs().max().item()
            assert scale > 1e-6 or name.endswith(("in_proj_bias", "k_proj.bias", "key.bias", "router.bias")), name
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * max(scale, 1e-2), msg=name)


@pytest.mark.parametrize(
    ("kind", "what", "size"),
    [
        (kind, what, size)
        for kind in ("llama", "gemma2", "gpt_oss", "bert")
        for what, size in (("nothing", 3), ("padding", 3), ("left padding", 2), ("documents", 3))
        if (kind, what) != ("bert", "documents")  # transformers reads none from the positions of such a model
    ],
)
def test_models_of_transformers(ranks, kind, what, size):
    check(ranks.run("model_jobs.hugging_face", size, kind=kind, what=what))


def test_activation_checkpointing_may_run_after_the_block(ranks):
    """The mask, which goes into the layers as an argument, has the plan."""
    check(ranks.run("model_jobs.hugging_face", 2, kind="llama", what="padding", checkpointing=True, use_cache=False))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_checkpointing_computes_again_is_of_the_block(ranks, use_reentrant):
    check(ranks.run("model_jobs.checkpointed", 2, use_reentrant=use_reentrant))


WITH_MASKS = ("encoder", "transformer")
WITHOUT = ("torch encoder", "torch transformer", "language", "language rotary", "language learned", "seq2seq")


@pytest.mark.parametrize(
    ("kind", "what", "size"),
    [
        (kind, what, size)
        for kind in (*WITH_MASKS, *WITHOUT)
        for what, size in (("nothing", 3), ("padding", 2), ("left padding", 3), ("documents", 3))
        if what != "documents" or kind in WITH_MASKS
    ],
)
def test_modules(ranks, kind, what, size):
    check(ranks.run("model_jobs.of_modules", size, kind=kind, what=what))


def test_modules_with_hooks_of_gradients(ranks):
    check(ranks.run("model_jobs.of_modules", 2, kind="torch transformer", what="padding", hooked=True))


@pytest.mark.parametrize("what", ["padding", "documents"])
def test_two_algorithms(ranks, what):
    check(ranks.run("model_jobs.of_modules", 4, kind="transformer", what=what, product=True))


def test_windows_and_dense_masks_of_a_plan(ranks):
    check(ranks.run("model_jobs.of_modules", 3, kind="encoder", what="window"))


PADDING = "must be the shard of what the plan's mask has, which says where padding and documents are"
REFUSED = {
    "weights": "attention weights cannot be computed in a context_parallel block",
    "other tokens": "attention to other tokens needs context_parallel(..., source=their plan)",
    "more keys": "k must have the ",
    "local dense": "mask.dense must be broadcastable to [2, 4, 27, 27]",
    "local documents": f"mask.segment_ids[0] {PADDING}",
    "offset": "mask.q_offset must be 0 in a context_parallel block",
    "cache": "cache must be None in a context_parallel block",
    "classifier": "the first token of each sample, which SequenceClassifier reads, cannot be computed",
    "sdpa": "a call of scaled_dot_product_attention that fastattn leaves to torch (",
    "hf encoder and decoder": "t5 attends to an encoder's tokens, which no context_parallel block does for it",
    "hf no padding": f"mask.real_keys {PADDING}",
    "hf all tokens": f"mask.real_keys {PADDING}",
    "hf cache": "past_key_values must be None in a context_parallel block",
    "hf lfm2": "lfm2 has layers of conv, which see the tokens of one rank alone",
    "hf positions again": "documents must be in the plan's mask as segment_ids, got position_ids that begin again",
    **{
        f"hf {kind} without positions": f"position_ids must be {given} in a context_parallel block"
        for kind, given in (("llama", "given"), ("gemma2", "given"), ("gpt_oss", "given"), ("qwen2_vl", "[4, B, n]"))
    },
    "torch's own block": "fastattn in LlamaAttention: context_parallel of torch, as of accelerate's cp_size",
}


@pytest.mark.parametrize("how", ["as it is", "checkpointed", "compiled"])
def test_a_module_drops_the_weights_that_one_process_drops(ranks, how):
    for error in ranks.run("model_jobs.dropped", 3, how=how):
        assert error < 1e-5


@pytest.mark.parametrize("what", ["no block", "two blocks", "source"])
def test_what_a_backward_computes_again_is_in_the_block_of_its_forward(ranks, what):
    for error in ranks.run("model_jobs.computed_again", 2, what=what):
        assert error < 1e-5


def test_a_rank_without_tokens_calls_pytorchs_function_too(ranks):
    assert ranks.run("model_jobs.without_tokens", 2) == [1, 0]


def test_blocks_leave_what_is_compiled_outside_of_them(ranks):
    assert ranks.run("model_jobs.compiled_outside", 2) == [1, 1]


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_block_does_not_say_is_refused_on_every_rank(ranks, what):
    for message in ranks.run("model_jobs.refused", 2, what=what):
        assert message.startswith(REFUSED[what])


def test_a_refusal_of_one_rank_reaches_all(ranks):
    first, last = ranks.run("model_jobs.refused", 2, what="local padding")
    assert PADDING in last
    assert first == "the call must be valid on every rank; rank 1 refused it and says why"


def test_positions_of_text_beside_those_of_images(ranks):
    for error in ranks.run("model_jobs.positions_of_text", 2):
        assert error < 1e-5
