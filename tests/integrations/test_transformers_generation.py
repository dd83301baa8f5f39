"""generate() of transformers' models answers by fastattn what it answers by their own eager attention, token for token.

The weights are large enough for the answers to be decided: an fp64 copy of the model gives the same tokens, and where
tokens are chosen by their logits, the best lies further before the second best than rounding moves either.
"""

from __future__ import annotations

import copy
import functools
from typing import NamedTuple

import pytest
import torch
import transformers_cases
from decoder_cases import text_of, tokenizer_of_letters
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin
from transformers_cases import TOKENS, exact

import fastattn
from fastattn import ops
from fastattn.backends import cpu
from fastattn.spec import Spec
from fastattn.testing import compare

L = 12  # tokens in the prompt of each sample
NEW = 64
WINDOW = 5
SIZES = transformers_cases.GROUPED | {"max_position_embeddings": 256}
T5, BART = ({**sizes, "decoder_start_token_id": 1} for sizes in (transformers_cases.T5, transformers_cases.BART))
MIXED_LAYERS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"}

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "gpt2": ("GPT2LMHeadModel", transformers_cases.GPT | TOKENS | {"n_positions": 256}),
    "llama": ("LlamaForCausalLM", SIZES),
    "mistral": ("MistralForCausalLM", SIZES | {"sliding_window": WINDOW}),
    "qwen3": ("Qwen3ForCausalLM", SIZES),
    "gemma2": (
        "Gemma2ForCausalLM", SIZES | MIXED_LAYERS | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": None}
    ),
    "gemma3": ("Gemma3ForCausalLM", SIZES | MIXED_LAYERS),
    "gpt-oss": ("GptOssForCausalLM", SIZES | MIXED_LAYERS | EXPERTS),
    "t5": ("T5ForConditionalGeneration", T5),
    "bart": ("BartForConditionalGeneration", BART | {"max_position_embeddings": 256}),
    "whisper": (
        "WhisperForConditionalGeneration",
        BART | {"num_mel_bins": 8, "max_source_positions": L, "max_target_positions": 256}
        | {"suppress_tokens": None, "begin_suppress_tokens": None},
    ),
}  # fmt: skip


@functools.cache
def eager_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = transformers_cases.made(*MODELS[name]).eval()
    for parameter in model.parameters():  # so that attention is far from uniform, and logits from each other
        nn.init.normal_(parameter, std=0.2)
    model.set_attn_implementation("eager")
    return model


@functools.cache
def exact_model(name: str) -> PreTrainedModel:
    model = exact(eager_model(name))
    if name == "whisper":  # without a mask, which the formula needs
        model.set_attn_implementation("sdpa")
    return model


@functools.cache
def swapped_model(name: str) -> PreTrainedModel:
    model = copy.deepcopy(eager_model(name))
    report = fastattn.swap(model)
    assert report.swapped
    assert not report.refused
    return model


def prompt(name: str, padded: bool = True) -> dict[str, Tensor]:
    """Three samples with 0, 4 and 9 tokens of left padding, or (Whisper has none) three sounds."""
    generator = torch.Generator().manual_seed(1)
    if name == "whisper":
        return {"input_features": torch.randn(3, 8, 2 * L, generator=generator)}
    real = torch.arange(L) >= torch.tensor([[0], [4], [9]]) * int(padded)
    ids = torch.randint(3, 99, (3, L), generator=generator)
    return {"input_ids": ids.where(real, 0), "attention_mask": real.long()}


def generate(model: PreTrainedModel, call: dict[str, Tensor], **options: object) -> GenerateDecoderOnlyOutput:
    options = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True} | options
    call = {key: x.to(model.dtype) if x.is_floating_point() else x for key, x in call.items()}
    return GenerationMixin.generate(model, **call, **options, return_dict_in_generate=True)


@functools.cache
def expected(
    name: str, padded: bool = True, **options: object
) -> tuple[GenerateDecoderOnlyOutput, GenerateDecoderOnlyOutput]:
    """What eager attention generates with a dynamic cache, in fp32 and in fp64."""
    eager, right = (generate(m(name), prompt(name, padded), **options) for m in (eager_model, exact_model))
    assert torch.equal(eager.sequences, right.sequences), "rounding decides"
    return eager, right


def logits(generated: GenerateDecoderOnlyOutput) -> Tensor:
    """[B, new tokens, vocabulary]"""
    return torch.stack(generated.logits, dim=1)


class Call(NamedTuple):
    heads_that_share_keys: int
    n_q: int
    n_k: int
    spec: Spec

    def splits_keys(self) -> bool:
        """Whether the kernel for few queries takes it, which splits the keys (`decodes` in csrc/cpu/schedule.h)."""
        others = {"dropout", "dense", "segment_ids"}
        return self.heads_that_share_keys * self.n_q <= 8 and not self.spec.features() & others


@pytest.fixture
def served(monkeypatch) -> list[Call]:
    """Every call that the cpu backend serves."""
    calls = []
    forward = cpu.forward

    def seen(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
        calls.append(Call(q.shape[1] // k.shape[1], q.shape[2], k.shape[2], spec))
        return forward(q, k, v, spec)

    monkeypatch.setattr(cpu, "forward", seen)
    monkeypatch.setattr(ops, "short_way", lambda *arguments: None)
    return calls


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy(name, cache, served):
    eager, right = expected(name)
    actual = generate(swapped_model(name), prompt(name), cache_implementation=cache)
    assert actual.sequences.shape[1] >= NEW
    assert torch.equal(actual.sequences, eager.sequences)
    assert (error := compare("logits", logits(actual), logits(eager), logits(right))).right, error
    best, second = logits(right).topk(2).values.unbind(-1)
    assert (best - second).min() > 10 * (logits(eager) - logits(right)).abs().max()

    steps = [call for call in served if call.n_q == 1]
    assert len(steps) >= 2 * (NEW - 1)  # layers
    assert all(call.spec.mask.dense is None for call in served)
    assert all(call.splits_keys() for call in steps)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_beam_search(name, cache):
    options = {"num_beams": 3, "num_return_sequences": 3, "output_scores": True}
    eager, right = expected(name, **options)
    actual = generate(swapped_model(name), prompt(name), cache_implementation=cache, **options)
    assert torch.equal(actual.sequences, eager.sequences)
    error = compare("scores", actual.sequences_scores, eager.sequences_scores, right.sequences_scores)
    assert error.right, str(error)


@pytest.mark.parametrize("name", ["gpt2", "mistral", "t5"])
def test_sampling_with_a_seed(name):
    sequences = []
    for model in [of(name) for of in (swapped_model, eager_model, exact_model)]:  # made before the seed is set
        torch.manual_seed(3)
        sequences.append(generate(model, prompt(name), do_sample=True, top_k=20, temperature=0.7).sequences)
    actual, eager, right = sequences
    assert torch.equal(eager, right), "rounding decides"
    assert torch.equal(actual, eager)
    assert not torch.equal(actual, expected(name)[0].sequences)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_stop_strings(name):
    """generate hands the tokenizer that finds them on to every layer."""
    whole = generate(eager_model(name), one_sample(name)).sequences[0]
    options = {"tokenizer": tokenizer_of_letters(), "stop_strings": [text_of(whole[-9:-7].tolist())]}
    expected = generate(eager_model(name), one_sample(name), **options).sequences
    assert expected.shape[1] < len(whole)
    assert torch.equal(generate(swapped_model(name), one_sample(name), **options).sequences, expected)


@pytest.mark.parametrize("length", [3, 4 * NEW])
def test_a_sliding_window_far_shorter_and_longer_than_all_tokens(length):
    eager = copy.deepcopy(eager_model("mistral"))
    eager.config.sliding_window = length
    swapped = copy.deepcopy(eager)
    fastattn.swap(swapped)
    right = generate(exact(eager), prompt("mistral"))
    for cache in ("dynamic", "static"):
        options = {"cache_implementation": cache}
        actual, naive = (generate(model, prompt("mistral"), **options) for model in (swapped, eager))
        assert torch.equal(naive.sequences, right.sequences), "rounding decides"
        assert torch.equal(actual.sequences, naive.sequences)
    assert not torch.equal(actual.sequences, expected("mistral")[0].sequences)


def one_sample(name: str) -> dict[str, Tensor]:
    return {key: x[1:2] for key, x in prompt(name).items()}


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
@pytest.mark.parametrize("how", ["assistant", "prompt lookup"])
def test_assisted_decoding(name, how, served):
    """Several tokens are tried at once, and the cache is cut where they were wrong."""
    options = {"prompt_lookup_num_tokens": 3}
    if how == "assistant":
        assistant = copy.deepcopy(swapped_model(name))
        for parameter in assistant.parameters():  # right at times only
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4))
        options = {"assistant_model": assistant}
    actual = generate(swapped_model(name), one_sample(name), **options, output_logits=False).sequences
    assert torch.equal(actual, generate(eager_model(name), one_sample(name)).sequences)
    tried = [call for call in served if 1 < call.n_q < call.n_k]
    assert tried
    assert all(call.spec.mask.causal for call in tried)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_second_turn_with_the_cache_of_the_first(name, padded, served):
    """As in a chat. Turns of several lengths leave padding between the tokens."""

    def second_turn(model: PreTrainedModel, continued: bool) -> GenerateDecoderOnlyOutput:
        call = prompt(name, padded)
        first = generate(model, call, max_new_tokens=9)
        asked = torch.randint(3, 99, (3, 6), generator=torch.Generator().manual_seed(5))
        real = torch.arange(6) >= torch.tensor([[2], [0], [5]]) * int(padded)
        ids = torch.cat([first.sequences, asked.where(real, 0)], dim=1)
        mask = torch.cat([call["attention_mask"], torch.ones(3, 9, dtype=torch.long), real.long()], dim=1)
        cache = {"past_key_values": first.past_key_values} if continued else {}
        return generate(model, {"input_ids": ids, "attention_mask": mask}, max_new_tokens=24, **cache)

    actual = second_turn(swapped_model(name), continued=True)
    assert any(call.n_q == 7 and call.n_k > 7 for call in served)  # with the last token of the answer
    eager, right = (second_turn(model(name), continued=False) for model in (eager_model, exact_model))
    assert torch.equal(eager.sequences, right.sequences), "rounding decides"
    assert torch.equal(actual.sequences, eager.sequences)
    assert (error := compare("logits", logits(actual), logits(eager), logits(right))).right, error


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
def test_padding_in_the_cache_is_never_read(name, cache):
    """Nor what a static cache has not been given yet."""
    model, call = swapped_model(name), prompt(name)
    config = model.config
    past = DynamicCache(config=config) if cache == "dynamic" else StaticCache(config, max_cache_len=L + NEW)
    first = generate(model, call, max_new_tokens=1, past_key_values=past)
    real = torch.nn.functional.pad(call["attention_mask"].bool(), (0, NEW))
    for layer in past.layers:
        if not layer.is_sliding:  # else tokens have moved
            for x in (layer.keys, layer.values):
                x.masked_fill_(~real[:, None, : x.shape[2], None], torch.nan)
    mask = torch.cat([call["attention_mask"], torch.ones(3, 1, dtype=torch.long)], dim=1)
    more = {"input_ids": first.sequences, "attention_mask": mask}
    actual = generate(model, more, max_new_tokens=NEW - 1, past_key_values=past)
    assert torch.equal(actual.sequences, expected(name)[0].sequences)
