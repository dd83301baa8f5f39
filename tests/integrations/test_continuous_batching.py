"""Continuous batching of transformers by fastattn: the tokens that each prompt has alone, with eager attention."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
from decoder_cases import CONFIGS, GREEDY, PROMPTS, alone, model_of
from transformers import ContinuousBatchingConfig, PreTrainedModel

import fastattn
from fastattn.integrations import continuous_batching


def together(model: PreTrainedModel, **sizes: int) -> list[list[int]]:
    """The tokens after each prompt in one batch; with none where the engine failed, which it only logs."""
    config = ContinuousBatchingConfig(page_size=16, **{"num_blocks": 64, "max_batch_tokens": 128} | sizes)
    results = model.generate_batch(inputs=PROMPTS, generation_config=GREEDY, continuous_batching_config=config)
    assert [result.prompt_ids for result in results.values()] == PROMPTS
    return [result.generated_tokens for result in results.values()]


PREPARED = {
    "by name": lambda model: model.set_attn_implementation("fastattn"),
    "by packed name": lambda model: model.set_attn_implementation("fastattn_packed"),
    "swapped": fastattn.swap,
    "swapped and packed": functools.partial(fastattn.swap, packed=True),
}


@pytest.mark.parametrize(
    ("name", "how"),  # each model by a name and swapped, packed and not
    zip([*CONFIGS] * 2, ["by name", "by packed name"] * 2 + ["swapped and packed", "swapped"] * 2, strict=True),
)
def test_the_tokens_are_those_of_each_prompt_alone(name, how):
    model = model_of(name)
    report = PREPARED[how](model)
    assert how != "swapped" or not report.refused
    before = model.config._attn_implementation
    assert together(model) == alone(name)
    assert model.config._attn_implementation == before
    batch = torch.tensor([PROMPTS[3], PROMPTS[1][:13]])
    expected = model_of(name).generate(batch, generation_config=GREEDY)
    assert torch.equal(model.generate(batch, generation_config=GREEDY), expected)  # as it was before


@pytest.mark.parametrize("name", ["llama", "gpt-oss, sliding, sinks"])
@pytest.mark.parametrize("sizes", [{"max_batch_tokens": 20}, {"num_blocks": 8}], ids=["prefill in chunks", "few pages"])
def test_prompts_in_chunks_and_requests_that_wait(name, sizes, monkeypatch):
    model, shapes = model_of(name), []
    PREPARED["by name"](model)

    def attend(q, k, *args, **kwargs):
        shapes.append((len(q), len(k)))
        return fastattn.attention_varlen(q, k, *args, **kwargs)

    monkeypatch.setattr(continuous_batching, "attention_varlen", attend)
    assert together(model, **sizes) == alone(name)
    assert max(n_q for n_q, _ in shapes) <= sizes.get("max_batch_tokens", 128)
    assert max(n_k for _, n_k in shapes) >= len(PROMPTS[1])


def test_what_is_not_known_is_refused(caplog):
    model = model_of("llama")
    PREPARED["by name"](model)
    attention = model.model.layers[0].self_attn
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"of_the_future": 1}), with_kwargs=True
    )
    with caplog.at_level(logging.ERROR):
        assert all(tokens == [] for tokens in together(model))
    assert "the option of_the_future is not supported" in caplog.text


def test_other_names_are_transformers_own():
    model = model_of("llama")
    assert together(model) == alone("llama")
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="flex_attention is not supported for continuous batching"):
        together(model)
