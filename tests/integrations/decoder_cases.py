"""Small decoders of transformers whose attention decides the tokens, prompts, and what eager attention generates."""

from __future__ import annotations

import copy
import functools
import string

import tokenizers
import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}  # fmt: skip
SLIDING = {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "qwen2, sliding": transformers.Qwen2Config(**SIZES, use_sliding_window=True, **SLIDING),
    "gpt-oss, sliding, sinks": transformers.GptOssConfig(
        **SIZES, num_local_experts=2, num_experts_per_tok=1, **SLIDING
    ),
    "gemma2, sliding, softcap": transformers.Gemma2Config(**SIZES, attn_logit_softcapping=2.0, **SLIDING),
}
PROMPTS = [list(range(1, 6)), list(range(7, 60)), [3], list(range(20, 33))]
GREEDY = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=999, pad_token_id=0)


def model_of(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():  # attention that is far from uniform, and decides the tokens
        if parameter.dim() > 1 or name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std={"o_proj": 5.0, "embed_tokens": 0.05}.get(name.split(".")[-2], 0.5))
    model.set_attn_implementation("eager")
    return model


@functools.cache
def alone(name: str) -> list[list[int]]:
    """The tokens after each prompt by itself."""
    model = model_of(name)
    prompts = (torch.tensor([prompt]) for prompt in PROMPTS)
    return [model.generate(x, generation_config=GREEDY)[0, x.shape[1] :].tolist() for x in prompts]


LETTERS = string.ascii_letters + "".join(chr(ord("一") + i) for i in range(SIZES["vocab_size"] - 52))


def text_of(tokens: list[int]) -> str:
    """A letter for each token, so that texts are equal where the tokens are."""
    return "".join(LETTERS[token] for token in tokens)


def tokenizer_of_letters() -> PreTrainedTokenizerFast:
    """What reads and writes such texts; as a template of chats, nothing is between the messages."""
    tokens = {letter: token for token, letter in enumerate(LETTERS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(tokens, unk_token=LETTERS[0]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)
