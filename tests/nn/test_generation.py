"""Models of fastattn.nn and generate(): steps equal the full pass, padding changes nothing, and each way to choose."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.func import functional_call, grad, vmap

from fastattn import Mask, nn
from fastattn.nn import (
    GenerationOptions,
    KVCache,
    LanguageModel,
    Packing,
    PagedCache,
    RotaryPositions,
    Seq2SeqModel,
    SequenceClassifier,
    TransformerConfig,
    positions_of,
)
from fastattn.nn.generation import Generation, choose, filtered, generate

CONFIG = TransformerConfig(vocab_size=11, d_model=16, nhead=4, num_layers=2, dim_feedforward=32, padding_idx=0)
CONFIGS = {
    "sinusoidal": CONFIG,
    "learned, post-norm": replace(CONFIG, positions="learned", max_length=32, norm_first=False, tie_embeddings=False),
    "rotary, grouped heads, swiglu, rms": replace(
        CONFIG, positions="rotary", num_kv_heads=2, activation="swiglu", norm="rms", scale_embeddings=False
    ),
}
LENGTHS = (6, 2, 4)
N = max(LENGTHS)
START, EOS = 1, 2
GENERATING = {LanguageModel: {}, Seq2SeqModel: {"decoder_start_token_id": START}}  # with what their generate() begins


@pytest.fixture(params=CONFIGS, ids=str)
def config(request) -> TransformerConfig:
    return CONFIGS[request.param]


def made(cls: type, config: TransformerConfig, **arguments: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return cls(config, **arguments).eval()


def prompts(side: str) -> tuple[Tensor, Tensor]:
    """Token ids [B, N], padded on this side with an id that means something elsewhere; bool, which are real."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 11, (len(LENGTHS), N), generator=generator)
    rows = [ids[b, :n] for b, n in enumerate(LENGTHS)]
    place = torch.arange(N) >= N - torch.tensor(LENGTHS)[:, None]
    real = place if side == "left" else torch.arange(N) < torch.tensor(LENGTHS)[:, None]
    padded = torch.full_like(ids, 5)
    for b, row in enumerate(rows):
        padded[b, real[b]] = row
    return padded, real


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_decoding_step_by_step_is_the_full_pass(config, side):
    model = made(LanguageModel, config)
    ids, real = prompts(side)
    more = torch.randint(3, 11, (len(ids), 5))
    cache = KVCache(len(ids), N + 5)
    first = model(ids, real, cache)
    steps = [model(more[:, i : i + 1], torch.ones(len(ids), 1, dtype=torch.bool), cache) for i in range(5)]
    for b in range(len(ids)):
        alone = torch.cat([ids[b, real[b]], more[b]])[None]
        close(torch.cat([first[b, real[b]], *(step[b] for step in steps)]), model(alone)[0])


@torch.no_grad()
def test_chunks_of_any_length_fill_the_cache(config):
    """Without padding, so that one offset holds for all samples."""
    model = made(LanguageModel, replace(config, padding_idx=None))
    ids = torch.randint(3, 11, (2, 9))
    cache = KVCache(2, 9)
    parts = [model(part, cache=cache) for part in ids.split([4, 3, 2], dim=1)]
    close(torch.cat(parts, dim=1), model(ids))


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("cls", GENERATING)
def test_padding_of_prompts_changes_nothing(config, cls, num_beams):
    model = made(cls, replace(config, tie_embeddings=False))  # or the answer would hardly depend on the prompt
    options = {"max_new_tokens": 7, "num_beams": num_beams, "eos_token_id": EOS, "pad_token_id": 0} | GENERATING[cls]
    (left, real_left), (right, real_right) = prompts("left"), prompts("right")
    expected = model.generate(left, real_left, **options)
    assert torch.equal(model.generate(right, real_right, **options), expected)
    for b in range(len(left)):
        alone = model.generate(left[b : b + 1, real_left[b]], **options)[0]
        assert torch.equal(alone, expected[b, : len(alone)])


def score_of(model: Seq2SeqModel, source: Tensor, target: Tensor) -> Tensor:
    """log p of a target [n] that follows the start token."""
    given = torch.cat([torch.tensor([START]), target])[None]
    log_p = model(source, given, decoder_attention_mask=torch.ones_like(given)).log_softmax(-1)[0, :-1]
    return log_p.gather(1, target[:, None]).sum()


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@torch.no_grad()
def test_a_beam_as_wide_as_the_tree_finds_the_best_of_all(length_penalty):
    """Against every sequence that there is: 4 tokens, one of which ends."""
    model = made(Seq2SeqModel, replace(CONFIG, vocab_size=4, padding_idx=None))
    sources = torch.tensor([[3, 1, 3], [1, 3, 3], [3, 3, 1]])
    n_max, eos = 3, 0
    generated = model.generate(
        sources, decoder_start_token_id=START, max_new_tokens=n_max, num_beams=4**n_max, eos_token_id=eos,
        length_penalty=length_penalty,
    )  # fmt: skip
    every = [
        torch.tensor(sequence)
        for n in range(1, n_max + 1)
        for sequence in itertools.product(range(4), repeat=n)
        if eos not in sequence[:-1] and (sequence[-1] == eos or n == n_max)
    ]
    for b, source in enumerate(sources):
        worth = [score_of(model, source[None], target) / len(target) ** length_penalty for target in every]
        best = every[int(torch.stack(worth).argmax())]
        assert torch.equal(generated[b, : len(best)], best)


class Beginnings:
    """What `generate` asks for, by a function that gives the logits after whole sequences of ids [B, n]."""

    def __init__(self, logits: Callable[[Tensor], Tensor], ids: Tensor) -> None:
        self.logits, self.ids = logits, ids

    def begin(self, max_new_tokens: int) -> Generation:
        return Generation(self.logits(self.ids), self.step, self.select)

    def step(self, new: Tensor) -> Tensor:
        self.ids = torch.cat([self.ids, new[:, None]], dim=1)
        return self.logits(self.ids)

    def select(self, samples: Tensor) -> None:
        self.ids = self.ids[samples]


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("cls", GENERATING)
@torch.no_grad()
def test_caches_follow_the_sequences(config, cls, num_beams):
    model = made(cls, replace(config, tie_embeddings=False)).double()  # tied, it repeats the last token
    ids = torch.randint(1, 11, (30, 4), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 6, "num_beams": num_beams, "eos_token_id": EOS}
    if cls is LanguageModel:
        without_cache = Beginnings(lambda ids: model(ids, torch.ones_like(ids))[:, -1], ids)
    else:
        ids[::2, 2:] = CONFIG.padding_idx
        without_cache = Beginnings(
            lambda ids: model(ids[:, :4], ids[:, 4:], decoder_attention_mask=torch.ones_like(ids[:, 4:]))[:, -1],
            torch.nn.functional.pad(ids, (0, 1), value=START),
        )
    found = model.generate(ids, **options, **GENERATING[cls])
    assert torch.equal(found, generate(without_cache.begin, 0, **options))


def scripted(script: dict[tuple[int, ...], list[float]]) -> Beginnings:
    """Logits that follow a script: of a sequence the probabilities after each beginning."""
    return Beginnings(
        lambda ids: torch.tensor([script.get(tuple(row), [0.25] * 4) for row in ids.tolist()]).log(),
        torch.empty(1, 0, dtype=torch.int64),
    )


SECOND_BEST = {(): [0.05, 0.5, 0.45, 0.0], (1,): [0.4, 0.3, 0.3, 0.0], (2,): [0.9, 0.1, 0.0, 0.0]}  # token 0 ends
# [2, 0] ends early, as likely as [2, 1, 3, 0], which is worth more by its length.
LONGER = {
    (): [0.1, 0.0, 0.9, 0.0],
    (2,): [0.5, 0.5, 0.0, 0.0],
    (2, 1): [0.0, 0.0, 0.0, 1.0],
    (2, 1, 3): [1.0, 0.0, 0.0, 0.0],
}
# Two sequences have ended, worth more than the running one is now, and less than it is in the end.
LONGER_THAN_BOTH = LONGER | {(): [0.5, 0.0, 0.26, 0.24], (2,): [0.0, 0.9, 0.1, 0.0], (3,): [1.0, 0.0, 0.0, 0.0]}
# After two tokens the best beam comes from the second best of the step before.
PLACES = {
    (): [0.0, 0.55, 0.45, 0.0],
    (1,): [0.2, 0.4, 0.2, 0.2],
    (2,): [0.0, 0.0, 0.0, 1.0],
    (2, 3): [0.0, 1.0, 0.0, 0.0],
}


@pytest.mark.parametrize(
    ("script", "options", "expected"),
    [
        (SECOND_BEST, {"max_new_tokens": 2, "num_beams": 1}, [1, 0]),
        (SECOND_BEST, {"max_new_tokens": 2}, [2, 0]),
        (PLACES, {"max_new_tokens": 3, "eos_token_id": None}, [2, 3, 1]),
        (LONGER_THAN_BOTH, {}, [2, 1, 3, 0]),
        (LONGER, {}, [2, 1, 3, 0]),
        (LONGER, {"early_stopping": True}, [2, 0]),
        (LONGER, {"length_penalty": 0.0}, [2, 0]),
    ],
)
def test_what_beams_find_and_when_they_stop(script, options, expected):
    options = {"max_new_tokens": 4, "num_beams": 2, "eos_token_id": 0} | options
    assert generate(scripted(script).begin, None, **options).tolist() == [expected]


def test_sequences_that_ended_are_padded_and_generation_stops_early():
    model = made(LanguageModel, CONFIG)
    ids, real = prompts("left")
    free = model.generate(ids, real, max_new_tokens=8)
    eos = int(free[0, 2])
    ended = model.generate(ids, real, max_new_tokens=8, eos_token_id=eos, pad_token_id=9)
    for row, expected in zip(ended.tolist(), free.tolist(), strict=True):
        n = expected.index(eos) + 1 if eos in expected else len(expected)
        assert row[:n] == expected[:n]
        assert set(row[n:]) <= {9}
    one = model.generate(ids[:1], real[:1], max_new_tokens=8, eos_token_id=eos)
    assert one[0].tolist() == free[0].tolist()[: free[0].tolist().index(eos) + 1]


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
@pytest.mark.parametrize("num_beams", [1, 2])
def test_any_of_several_tokens_ends_a_sequence(kind, num_beams):
    """The likeliest end early, in one token or the other; the best one is found although all others end before it."""
    script = {
        (): [0.0, 0.0, 0.5, 0.5],
        (2,): [0.4, 0.4, 0.2, 0.0],
        (3,): [0.4, 0.4, 0.1, 0.1],
        (2, 2): [0.0, 1.0, 0.0, 0.0],
        (3, 2): [1.0, 0.0, 0.0, 0.0],
    }
    options = {"max_new_tokens": 4, "eos_token_id": kind([0, 1]), "num_beams": num_beams, "length_penalty": 3.0}
    found = generate(scripted(script).begin, None, **options)
    assert found.tolist() == ([[2, 0]] if num_beams == 1 else [[2, 2, 1]])


def test_a_negative_padding_idx_counts_from_the_end():
    negative, positive = (made(LanguageModel, replace(CONFIG, padding_idx=i)) for i in (-1, 10))
    assert negative.config == positive.config
    assert torch.equal(negative(torch.tensor([[10, 3]])), positive(torch.tensor([[10, 3]])))
    assert (nn.SinusoidalPositions(4, 5, padding_idx=-1)(torch.tensor(4)) == 0).all()


def test_no_more_tokens_leave_a_cache_as_it_was():
    cache = filled_cache()
    assert cache.extend(0, REAL[:, :0]).shape == (2, 0)
    assert cache.extend(1).tolist() == [[2], [2]]


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (None, None, 4),
        (2, None, 2),
        (9, None, 4),
        (None, 0.5, 1),
        (None, 0.51, 2),
        (None, 1.0, 4),
        (3, 0.89, 3),
        (3, 0.84, 2),
    ],
)
def test_what_may_be_drawn(top_k, top_p, kept):
    """Of 0.5, 0.3, 0.15, 0.05; after top_k = 3 they are 0.526, 0.316, 0.158."""
    probabilities = torch.tensor([0.15, 0.5, 0.05, 0.3])
    actual = filtered(probabilities.log().expand(2, 4), top_k, top_p).softmax(-1)
    allowed = probabilities >= probabilities.sort(descending=True).values[kept - 1]
    expected = probabilities * allowed / (probabilities * allowed).sum()
    torch.testing.assert_close(actual, expected.expand(2, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_logits_in_16_bits_are_drawn_from_as_in_fp32(dtype, monkeypatch):
    given = []
    monkeypatch.setattr(torch, "multinomial", lambda p, n, **_: given.append(p) or p.argmax(-1, keepdim=True))
    choose(torch.zeros(1, 1000, dtype=dtype), GenerationOptions(1, do_sample=True, top_p=0.8985))
    assert (given[0] > 0).sum() == 899


def test_sampling_follows_the_probabilities():
    model = made(LanguageModel, CONFIG)
    ids = torch.tensor([[3, 4, 5]]).expand(20000, 3)
    generator = torch.Generator().manual_seed(0)
    options = {"do_sample": True, "max_new_tokens": 1, "temperature": 0.7, "top_k": 5}
    drawn = model.generate(ids, generator=generator, **options)[:, 0].bincount(minlength=11) / len(ids)
    with torch.no_grad():
        logits = model(ids[:1])[0, -1] / 0.7
    expected = logits.where(logits >= logits.topk(5).values[-1], -torch.inf).softmax(-1)
    assert (drawn - expected).abs().max() < 0.02
    assert (drawn[expected == 0] == 0).all()
    again = model.generate(ids, generator=torch.Generator().manual_seed(0), **options)[:, 0]
    assert torch.equal(again.bincount(minlength=11) / len(ids), drawn)


@pytest.mark.parametrize(
    "numbers", [{"temperature": 10**20}, {"temperature": Fraction(1, 2), "top_p": Fraction(1, 2)}], ids=str
)
def test_sampling_takes_numbers_of_any_type(numbers):
    model, ids = made(LanguageModel, CONFIG), torch.tensor([[3, 4, 5]])
    drawn = []
    for given in (numbers, {name: float(x) for name, x in numbers.items()}):
        options = given | {"do_sample": True, "generator": torch.Generator().manual_seed(0)}
        drawn.append(model.generate(ids, max_new_tokens=5, **options))
    assert torch.equal(*drawn)


def filled_cache(n: int = 2) -> KVCache:
    cache = KVCache(2, 8)
    cache.extend(n, torch.ones(2, n, dtype=torch.bool))
    return cache


IDS, REAL = torch.tensor([[3, 4], [3, 4]]), torch.ones(2, 2, dtype=torch.bool)
OF_LAYERS = [
    ({"d_model": 0}, "d_model must be at least 1, got 0"),
    ({"nhead": "2"}, "nhead must be an int, got '2'"),
    ({"nhead": 3}, "nhead must divide d_model = 8, got 3"),
    ({"dim_feedforward": -1}, "dim_feedforward must be at least 0, got -1"),
    ({"dropout": "a"}, "dropout must be a number, got 'a'"),
    ({"layer_norm_eps": -1.0}, "layer_norm_eps must be at least 0 and finite, got -1.0"),
    ({"activation": 3}, "activation must be 'relu', 'gelu', 'swiglu' or a function, got 3"),
    ({"activation": "tanh"}, "activation must be 'relu', 'gelu', 'swiglu' or a function, got 'tanh'"),
    ({"norm": "batch"}, "norm must be 'layer', 'rms', got 'batch'"),
    ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads = 2, got 3"),
]
HOSTILE = {  # what is called -> the change of one argument, and the sentence about it
    nn.MultiHeadAttention: [
        ({"embed_dim": -8}, "embed_dim must be at least 1, got -8"),
        ({"embed_dim": 8.0}, "embed_dim must be an int, got 8.0"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"num_heads": 3}, "num_heads must divide embed_dim = 8, got 3"),
        ({"num_kv_heads": True}, "num_kv_heads must be an int, got True"),
        ({"kdim": -1}, "kdim must be at least 1, got -1"),
        ({"kdim": 3, "num_kv_heads": 1}, "num_kv_heads must be 2 with kdim, vdim or add_bias_kv, got 1"),
        ({"dropout": 1.5}, "dropout must be between 0 and 1, got 1.5"),
        ({"dropout": math.nan}, "dropout must be between 0 and 1, got nan"),
    ],
    nn.TransformerEncoderLayer: OF_LAYERS,
    nn.TransformerDecoderLayer: OF_LAYERS,
    nn.TransformerEncoder: [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"rotary": RotaryPositions(6)}, "rotary must be of head_dim 4 like the layer, got 6"),
    ],
    nn.TransformerDecoder: [
        ({"num_layers": -1}, "num_layers must be at least 0, got -1"),
        ({"rotary": 3}, "rotary must be a RotaryPositions or None, got int"),
    ],
    nn.Transformer: [
        ({"num_encoder_layers": -1}, "num_encoder_layers must be at least 1, got -1"),
        ({"num_decoder_layers": 1.0}, "num_decoder_layers must be an int, got 1.0"),
    ],
    TransformerConfig: [
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"vocab_size": None}, "vocab_size must be an int, got None"),
        ({"d_model": -8}, "d_model must be at least 1, got -8"),
        ({"nhead": 3}, "nhead must divide d_model = 8, got 3"),
        ({"num_layers": -1}, "num_layers must be at least 1, got -1"),
        ({"num_decoder_layers": 0}, "num_decoder_layers must be at least 1, got 0"),
        ({"num_kv_heads": 0}, "num_kv_heads must be at least 1, got 0"),
        ({"num_kv_heads": 3, "nhead": 2}, "num_kv_heads must divide nhead = 2, got 3"),
        ({"layer_norm_eps": "a"}, "layer_norm_eps must be a number, got 'a'"),
        ({"dim_feedforward": 2.0}, "dim_feedforward must be an int, got 2.0"),
        ({"dropout": -0.1}, "dropout must be between 0 and 1, got -0.1"),
        ({"max_length": 0}, "max_length must be at least 1, got 0"),
        ({"padding_idx": 11}, "padding_idx must be below 11, got 11"),
        ({"padding_idx": -12}, "padding_idx must be at least -11, got -12"),
        ({"padding_idx": -1, "tgt_vocab_size": 5}, "padding_idx must be below the vocabulary's size 5, got 10"),
        ({"norm_first": "no"}, "norm_first must be a bool, got 'no'"),
        ({"norm": []}, "norm must be 'layer', 'rms', got []"),
        ({"norm": "batch"}, "norm must be 'layer', 'rms', got 'batch'"),
        ({"activation": "tanh"}, "activation must be 'relu', 'gelu', 'swiglu', got 'tanh'"),
        ({"positions": "none"}, "positions must be 'sinusoidal', 'learned' or 'rotary', got 'none'"),
    ],
    SequenceClassifier: [
        ({"num_classes": 0}, "num_classes must be at least 1, got 0"),
        ({"config": 3}, "config must be a TransformerConfig, got int"),
    ],
    nn.TokenEmbedding: [
        ({"num_embeddings": -1}, "num_embeddings must be at least 1, got -1"),
        ({"padding_idx": 5}, "padding_idx must be below 5, got 5"),
    ],
    nn.SinusoidalPositions: [
        ({"max_length": -1}, "max_length must be at least 1, got -1"),
        ({"padding_idx": -6}, "padding_idx must be at least -5, got -6"),
    ],
    nn.LearnedPositions: [({"d_model": 0}, "d_model must be at least 1, got 0")],
    RotaryPositions: [
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"head_dim": 7}, "head_dim must be even for rotary positions, got 7"),
        ({"base": 0.0}, "base must be above 0 and finite, got 0.0"),
    ],
    nn.SinusoidalPositions(4, 5): [
        ({"positions": torch.tensor([-1])}, "positions must be at least 0, got -1"),
        ({"positions": torch.tensor([3, 5])}, "positions must be below max_length = 5, got 5"),
    ],
    positions_of: [({"real": REAL.float()}, "real must be bool, got torch.float32")],
    nn.swiglu: [({"x": torch.ones(2, 3)}, "x must be [..., 2 F], got [2, 3]")],
    Packing: [
        ({"real": REAL.float()}, "real must be bool, got torch.float32"),
        ({"real": REAL[0]}, "real must be [B, L]"),
    ],
    Packing(REAL).pack: [
        ({"x": torch.ones(2, 3)}, "x must be [2, 2, ...], got [2, 3]"),
        ({"x": 3}, "x must be a Tensor, got int"),
        ({"x": REAL.to_sparse()}, "x must be dense, got torch.sparse_coo"),
    ],
    Packing(REAL).unpack: [({"x": torch.ones(5, 3)}, "x must be [4, ...], got [5, 3]")],
    KVCache: [
        ({"batch_size": -1}, "batch_size must be at least 0, got -1"),
        ({"max_length": 2.0}, "max_length must be an int, got 2.0"),
    ],
    KVCache(2, 8).extend: [
        ({"n": -1}, "n must be at least 0, got -1"),
        ({"n": 9}, "max_length of the cache must be at least 9, got 8"),
        ({"real": REAL[:1]}, "real must be [2, 2], got [1, 2]"),
        ({"real": REAL[:, :1]}, "real must be [2, 2], got [2, 1]"),
        ({"real": REAL.float()}, "real must be bool, got torch.float32"),
        ({"real": [[True, True]] * 2}, "real must be a Tensor, got list"),
    ],
    filled_cache().extend: [
        ({"real": REAL.to("meta")}, "real must be on cpu like that of the tokens before, got meta")
    ],
    KVCache(2, 8).mask: [
        ({"mask": None}, "mask must be a fastattn.Mask, got NoneType"),
        ({"mask": Mask()}, "mask must be causal, with a window at most, with a cache, got []"),
    ],
    PagedCache(4).pages_of: [
        ({"length": "a"}, "length must be an int, got 'a'"),
        ({"length": -1}, "length must be at least 0, got -1"),
    ],
    KVCache(2, 8).select: [
        ({"samples": torch.tensor([2])}, "samples must be from 0 to 1, got [2]"),
        ({"samples": torch.tensor([True, False])}, "samples must be int32 or int64, got torch.bool"),
    ],
    GenerationOptions: [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": "3"}, "max_new_tokens must be an int, got '3'"),
        ({"num_beams": 0}, "num_beams must be at least 1, got 0"),
        ({"num_beams": 2, "do_sample": True}, "num_beams must be 1 with do_sample, got 2"),
        ({"top_p": 0.0, "do_sample": True}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_k": 0, "do_sample": True}, "top_k must be at least 1, got 0"),
        ({"temperature": 0.0, "do_sample": True}, "temperature must be from 1e-37 to 1e37, got 0.0"),
        ({"temperature": 1e-40, "do_sample": True}, "temperature must be from 1e-37 to 1e37, got 1e-40"),
        ({"temperature": 10**400, "do_sample": True}, "temperature must be from 1e-37 to 1e37, got 1000"),
        ({"temperature": 0.5}, "do_sample must be True with temperature, got False"),
        ({"generator": torch.Generator()}, "do_sample must be True with generator, got False"),
        ({"do_sample": "yes"}, "do_sample must be a bool, got 'yes'"),
        ({"length_penalty": math.nan}, "length_penalty must be from -32 to 32, got nan"),
        ({"length_penalty": 10**400}, "length_penalty must be from -32 to 32, got 1000"),
        ({"generator": 3}, "generator must be a torch.Generator or None, got 3"),
        ({"pad_token_id": -1}, "pad_token_id must be at least 0, got -1"),
        ({"eos_token_id": [3, "4"]}, "eos_token_id must be an int, got '4'"),
        ({"eos_token_id": torch.tensor([3.0])}, "eos_token_id must be an int, got 3.0"),
        ({"eos_token_id": torch.ones(2, device="meta")}, "eos_token_id must hold numbers, got a meta tensor"),
        ({"max_length": 8}, "got an unexpected keyword argument 'max_length'; write max_new_tokens="),
        ({"num_beams": 2**63}, "num_beams must be below 2**63, got 9223372036854775808"),
    ],
    made(LanguageModel, CONFIG): [
        ({"input_ids": IDS.float()}, "input_ids must be int32 or int64, got torch.float32"),
        ({"input_ids": IDS[0]}, "input_ids must be [B, L], got [2]"),
        ({"input_ids": -IDS}, "input_ids must be at least 0, got -4"),
        ({"input_ids": IDS + 7}, "input_ids must be below the vocabulary's size 11, got 11"),
        ({"cache": 3}, "cache must be a KVCache, a PagedStep or None, got int"),
        ({"attention_mask": REAL.float()}, "attention_mask must be bool or integer, True or 1 for real tokens"),
        ({"attention_mask": REAL[:1]}, "attention_mask must be [2, 2] like the ids, got [1, 2]"),
    ],
    made(LanguageModel, CONFIG).decoder: [
        ({"mask": 3}, "attn_mask must be a Tensor or None, got int"),
        ({"mask": REAL.to("meta")}, "attn_mask must be on cpu like the queries, got meta"),
        ({"is_causal": REAL}, "is_causal must be a bool, got tensor"),
        ({"cache": KVCache(2, 8), "mask": Mask(causal=True)}, "there must be 2 samples of 0 new tokens"),
        ({"cache": filled_cache(3), "mask": Mask(causal=True)}, "there must be 2 samples of 3 new tokens"),
    ],
    made(LanguageModel, replace(CONFIG, positions="rotary")).decoder: [
        ({"positions": torch.arange(3)}, "positions must be [2, 2] or [2], got [3]"),
        ({"positions": torch.zeros(3, 2)}, "positions must be [2, 2] or [2], got [3, 2]"),
    ],
    nn.save: [
        ({"model": 3}, "model must be a torch.nn.Module, got int"),
        ({"path": 3}, "path must be a str or an os.PathLike, got int"),
        ({"path": "/"}, "path must be a file, got the folder /"),
        ({"path": "/nowhere/x"}, "path must be in an existing folder, got /nowhere/x"),
    ],
    nn.load: [
        ({"model": 3}, "model must be a torch.nn.Module, got int"),
        ({"path": "nowhere.safetensors"}, "path must be a file, got nowhere.safetensors"),
    ],
    made(Seq2SeqModel, CONFIG): [
        ({"decoder_input_ids": [[3]]}, "decoder_input_ids must be a Tensor, got list"),
        ({"decoder_attention_mask": REAL.float()}, "decoder_attention_mask must be bool or integer, True or 1"),
    ],
    made(SequenceClassifier, CONFIG, num_classes=2): [
        ({"input_ids": IDS[:, :0]}, "input_ids must have at least 1 token in each sample, got [2, 0]")
    ],
    made(LanguageModel, CONFIG).generate: [
        ({"input_ids": IDS[:, :0]}, "input_ids must have at least 1 token in each sample, got [2, 0]"),
        ({"attention_mask": torch.tensor([[1, 1], [0, 0]])}, "got only padding in sample 1"),
        ({"pad_token_id": 11}, "pad_token_id must be below the vocabulary's size 11, got 11"),
        ({"eos_token_id": [2, 11]}, "eos_token_id must be below the vocabulary's size 11, got 11"),
    ],
    made(Seq2SeqModel, CONFIG).generate: [
        ({"decoder_start_token_id": -1}, "decoder_start_token_id must be at least 0, got -1"),
        ({"decoder_start_token_id": 11}, "decoder_start_token_id must be below the vocabulary's size 11, got 11"),
    ],
    made(Seq2SeqModel, replace(CONFIG, padding_idx=START)).generate: [
        ({"decoder_start_token_id": START}, f"decoder_start_token_id must not be padding_idx = {START}"),
    ],
}
RIGHT = {  # a value for each argument that must be given, by name
    "batch_size": 2, "config": CONFIG, "d_model": 8, "decoder_input_ids": IDS,
    "decoder_layer": nn.TransformerDecoderLayer(8, 2), "decoder_start_token_id": START, "embed_dim": 8,
    "encoder_layer": nn.TransformerEncoderLayer(8, 2), "head_dim": 8, "input_ids": IDS, "max_length": 5,
    "max_new_tokens": 1, "model": torch.nn.Linear(1, 1), "n": 2, "nhead": 2, "num_classes": 2,
    "num_embeddings": 5, "num_heads": 2, "num_layers": 1, "path": "x", "src": torch.ones(2, 2, 16), "vocab_size": 11,
}  # fmt: skip


def described(call: object) -> str:
    return getattr(call, "__qualname__", type(call).__name__)


@pytest.mark.parametrize(
    ("call", "change", "sentence"),
    [pytest.param(call, *row, id=f"{described(call)}: {row[1]}") for call, rows in HOSTILE.items() for row in rows],
)
def test_hostile_arguments_are_refused_by_name(call, change, sentence):
    parameters = inspect.signature(call.forward if isinstance(call, torch.nn.Module) else call).parameters
    takes_options = {"max_new_tokens"} if "options" in parameters else set()
    given = {name: RIGHT[name] for name in RIGHT if name in {*parameters, *takes_options}} | change
    with pytest.raises((ValueError, TypeError, AssertionError, RuntimeError, OSError), match=re.escape(sentence)):
        call(*given.values()) if isinstance(call, nn.SinusoidalPositions) else call(**given)


def test_more_tokens_than_there_is_room_for_are_refused():
    model = made(LanguageModel, CONFIGS["learned, post-norm"])
    with pytest.raises(ValueError, match="must be at most max_length = 32 tokens, got 34"):
        model.generate(torch.full((1, 4), 3), max_new_tokens=30)
    cache = KVCache(1, 3)
    model(torch.tensor([[3, 4]]), cache=cache)
    with pytest.raises(ValueError, match="max_length of the cache must be at least 4, got 3"):
        model(torch.tensor([[3, 4]]), cache=cache)
    with pytest.raises(ValueError, match="positions must be below max_length = 32, got 32"):
        model(torch.full((1, 33), 3))


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=str)
def test_padding_of_prompts_takes_no_positions(options):
    model = made(LanguageModel, replace(CONFIG, max_length=8))
    ids = torch.tensor([[3, 4, 5], [0, 6, 7]])
    padded = torch.nn.functional.pad(ids, (9, 0))
    options |= {"max_new_tokens": 5}
    assert torch.equal(model.generate(padded, **options), model.generate(ids, **options))
    with pytest.raises(ValueError, match="must be at most max_length = 8 tokens, got 9"):
        model.generate(padded, **options | {"max_new_tokens": 6})


def test_padding_takes_no_room():
    """A cache has room for max_length tokens of each sample, however much padding it was given with them."""
    model, cache = made(LanguageModel, CONFIG), KVCache(2, 4)
    ids, real = torch.tensor([[0, 0, 3, 4], [5, 0, 0, 6]]), torch.tensor([[0, 0, 1, 1], [1, 0, 0, 1]]).bool()
    model(ids, real, cache=cache)
    more = torch.tensor([[7, 0, 8], [0, 9, 3]])
    logits = model(more, more != 0, cache=cache)
    alone = model(torch.tensor([[3, 4, 7, 8], [5, 6, 9, 3]]))
    torch.testing.assert_close(logits[more != 0].view(2, 2, -1), alone[:, 2:])
    with pytest.raises(ValueError, match="max_length of the cache must be at least 5, got 4"):
        cache.extend(1)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ids", [torch.full((3, 1), 5), torch.full((2, 40), 5)], ids=["other batch", "too many"])
def test_after_an_error_a_cache_is_as_before(ids, padded):
    model = made(LanguageModel, replace(CONFIGS["learned, post-norm"], padding_idx=None))
    cache, expected = KVCache(2, 64), KVCache(2, 64)
    prompts, more = torch.tensor([[3, 4, 5], [6, 7, 8]]), torch.tensor([[9, 10], [3, 4]])
    real = torch.tensor([[1, 1, 1], [0, 1, 1]]).bool() if padded else None
    model(prompts, real, cache=cache)
    model(prompts, real, cache=expected)
    with pytest.raises(ValueError, match=r"input_ids must be \[2, L\] with this cache, got|positions must be below"):
        model(ids, cache=cache)
    assert torch.equal(model(more, cache=cache), model(more, cache=expected))


@pytest.mark.parametrize("real", [None, torch.tensor([[False, True], [True, True]])], ids=["whole", "padded"])
def test_a_cache_is_of_the_dtype_of_its_first_tokens(real):
    model, cache, ids = made(LanguageModel, CONFIG), KVCache(2, 4), torch.tensor([[3, 4, 5], [6, 7, 8]])
    with torch.no_grad():
        model(ids[:, :2], real, cache)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids[:, 2:], None, cache)
        whole = None if real is None else torch.cat([real, real[:, 1:]], 1)
        torch.testing.assert_close(logits.float(), model(ids, whole)[:, 2:], rtol=0.05, atol=0.05)
        with pytest.raises(ValueError, match=r"k and v must be of dtype torch\.bfloat16 like q, got torch\.float32"):
            model.bfloat16()(ids[:, :1], None, cache)


@pytest.mark.parametrize("use", ["filled", "selected", "paged"])
def test_a_cache_that_was_first_used_in_inference_mode_is_used_outside_too(use):
    model, ids, paged = made(LanguageModel, CONFIG), torch.tensor([[3, 4, 5, 6]]), use == "paged"
    cache = PagedCache(4, dtype=torch.int8) if paged else KVCache(1, 8)
    sequence = cache.open(8) if paged else None
    with torch.inference_mode():
        model(ids[:, :2], cache=cache.step({sequence: 2}) if paged else cache)
        if use == "selected":
            cache.select(torch.tensor([0]))
    with torch.no_grad():
        logits = model(ids[:, 2:], cache=cache.step({sequence: 2}) if paged else cache)
    tolerance = 0.1 if paged else 1e-5
    torch.testing.assert_close(logits, model(ids)[:, 2:], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("without_gradients", [None, 1])
def test_gradients_go_through_all_passes_of_a_cache(config, side, without_gradients):
    """Also where a pass between two others has none; of a part of the parameters, too."""
    model, (ids, real) = made(LanguageModel, config).double(), prompts(side)
    model.decoder.layers[0].self_attn.requires_grad_(False)  # whose queries, of the embedding, want its keys
    leaves, factors = [x for x in model.parameters() if x.requires_grad], torch.randn(*ids.shape, 11).double()
    factors[~real] = 0
    cache, loss = KVCache(len(ids), N), 0
    for i, chunk in enumerate(torch.arange(N).split([4, 1, N - 5])):
        with torch.set_grad_enabled(i != without_gradients):
            logits = model(ids[:, chunk], real[:, chunk], cache)
        if i != without_gradients:
            loss += (logits * factors[:, chunk]).sum()
    if without_gradients is not None:  # the keys and values of that pass are constants
        assert all(x.isfinite().all() for x in torch.autograd.grad(loss, leaves))
        return
    expected = torch.autograd.grad((model(ids, real) * factors).sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), expected)


def test_a_pass_for_which_no_room_was_made_is_refused():
    """It would overwrite the tokens before it."""
    model, cache, x = made(LanguageModel, CONFIG), KVCache(1, 8), torch.randn(1, 1, 16)
    for undone in (False, True):
        cache.extend(1)
        model.decoder(x, Mask(causal=True), cache=cache)
        with pytest.raises(ValueError, match=r"KVCache\.extend must be called before each pass"):
            model.decoder(x, Mask(causal=True), cache=cache)
        if undone:
            cache.undo()
    cache.extend(1)
    cache.undo()
    with pytest.raises(ValueError, match=r"must be called before each pass|new tokens"):
        model.decoder(x, Mask(causal=True), cache=cache)


def test_tokens_are_taken_back_once_and_not_after_samples_are_selected():
    cache = KVCache(2, 8)
    cache.undo()
    cache.extend(3)
    cache.extend(2)
    cache.undo()
    cache.undo()
    assert cache.extend(1).tolist() == [[3]]
    cache.select(torch.tensor([1]))
    cache.undo()
    assert cache.extend(1).tolist() == [[4]]


def test_samples_are_selected_before_the_first_pass():
    cache = KVCache(3, 4)
    layer = cache.layer(0)
    cache.select(torch.tensor([2, 0]))
    cache.extend(1)
    assert layer.update(*torch.ones(2, 2, 1, 1, 8))[0].shape == (2, 1, 1, 8)


@pytest.mark.parametrize("make", [lambda: KVCache(1, 8), lambda: PagedCache(4, 4)], ids=["dense", "paged"])
@torch.no_grad()
def test_only_caches_that_a_call_makes_are_exported(make):
    model, ids = made(LanguageModel, replace(CONFIG, padding_idx=None)), torch.tensor([[3, 4, 5]])

    class Twice(torch.nn.Module):
        def __init__(self, kept: KVCache | PagedCache | None = None) -> None:
            super().__init__()
            self.model, self.kept = model, kept

        def forward(self, ids: Tensor) -> Tensor:
            cache = self.kept or make()
            sequence = cache.open(8) if isinstance(cache, PagedCache) else None
            for _ in range(2):
                logits = self.model(ids, cache=cache.step({sequence: 3}) if sequence else cache)
            return logits

    kept = Twice(make())
    with pytest.raises(NotImplementedError, match=f"for torch.export, .* keep a {type(kept.kept).__name__}"):
        torch.export.export(kept, (ids,))
    expected = kept(ids)
    program = torch.export.export(Twice(), (ids,)).module()
    assert torch.equal(program(ids), expected)
    assert torch.equal(program(ids), expected)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_models_are_blind_to_padding_and_causal(config, side):
    """Changed padding leaves every bit; a changed token reaches what may see it, and nothing else."""
    ids, real = prompts(side)
    other = torch.where(real, ids, 7)
    classifier = made(SequenceClassifier, config, num_classes=3)
    language = made(LanguageModel, config)
    translator = made(Seq2SeqModel, config)
    assert torch.equal(classifier(other, real), classifier(ids, real))
    assert torch.equal(language(other, real)[real], language(ids, real)[real])
    assert torch.equal(translator(other, other, real, real)[real], translator(ids, ids, real, real)[real])
    for model in (lambda x: language(x, real), lambda x: translator(ids, x, real, real)):
        expected = model(ids)
        for i in range(N):
            changed = ids.clone()
            changed[:, i] = (changed[:, i] - 2) % 8 + 3  # another id
            actual = model(changed)
            before = real & (torch.arange(N) < i)
            after = real & (torch.arange(N) >= i) & real[:, i : i + 1]
            close(actual[before], expected[before])
            assert ((actual - expected).abs().amax(-1)[after] > 1e-5).all()


@torch.no_grad()
def test_a_classifier_reads_the_first_real_token(config):
    classifier = made(SequenceClassifier, config, num_classes=3)
    (left, real_left), (right, real_right) = prompts("left"), prompts("right")
    expected = torch.cat([classifier(right[b : b + 1, :n]) for b, n in enumerate(LENGTHS)])
    close(classifier(left, real_left), expected)
    close(classifier(right, real_right), expected)
    ids = torch.where(real_right, right, CONFIG.padding_idx)
    close(classifier(ids), expected)  # padding_idx says which tokens are padding


def test_weights_are_tied_or_not():
    tied, free = (made(Seq2SeqModel, replace(CONFIG, tie_embeddings=tie)) for tie in (True, False))
    assert tied.head.weight is tied.tgt_embedding.weight is tied.embedding.weight
    assert free.head.weight is not free.tgt_embedding.weight
    two = made(Seq2SeqModel, replace(CONFIG, tgt_vocab_size=7))
    assert two.head.weight is two.tgt_embedding.weight is not two.embedding.weight
    assert two(torch.tensor([[3, 4]]), torch.tensor([[1]])).shape == (1, 1, 7)


def test_layers_of_a_model_differ_from_the_start():
    for model in (made(LanguageModel, CONFIG), made(Seq2SeqModel, CONFIG)):
        first, second = model.decoder.layers
        for name in ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"):
            assert not torch.equal(first.get_parameter(name), second.get_parameter(name))


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary"])
def test_gradients_of_each_sample_by_vmap(positions):
    model = made(SequenceClassifier, replace(CONFIG, positions=positions, dropout=0.0), num_classes=3)
    parameters, ids = dict(model.named_parameters()), torch.tensor([[3, 4, 5], [6, 7, 8]])

    def total(parameters: dict[str, Tensor], ids: Tensor) -> Tensor:
        return functional_call(model, parameters, (ids,)).square().sum()

    of_each = vmap(grad(lambda parameters, ids: total(parameters, ids[None])), (None, 0))(parameters, ids)
    of_all = grad(total)(parameters, ids)
    torch.testing.assert_close({name: x.sum(0) for name, x in of_each.items()}, of_all)


@pytest.mark.parametrize("cls", [SequenceClassifier, LanguageModel, Seq2SeqModel])
def test_models_learn_and_compile(cls):
    """Under torch.compile the loss and its gradients are those of eager, and a few steps bring the loss down."""
    extra = {"num_classes": 3} if cls is SequenceClassifier else {}
    model = made(cls, replace(CONFIG, dropout=0.0), **extra).train()
    ids, real = prompts("right")
    inputs = (ids, ids, real, real) if cls is Seq2SeqModel else (ids, real)
    target = torch.tensor([0, 1, 2]) if extra else torch.where(real, ids, -100)

    def loss() -> Tensor:
        return torch.nn.functional.cross_entropy(model(*inputs).flatten(0, -2), target.flatten())

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(loss(), list(model.parameters())))

    eager = gradients()
    model.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(), eager, rtol=1e-3, atol=1e-5)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    begin = loss().item()
    for _ in range(20):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss().item() < 0.5 * begin


@pytest.mark.parametrize("cls", [SequenceClassifier, LanguageModel, Seq2SeqModel])
def test_models_export_for_every_size(cls):
    model = made(cls, CONFIG, **({"num_classes": 3} if cls is SequenceClassifier else {}))
    count = 2 if cls is Seq2SeqModel else 1
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    ids = torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0], [9, 0, 0, 0]])
    program = torch.export.export(model, (ids,) * count, dynamic_shapes=(sizes,) * count).module()
    for other in (ids, ids[1:, :3], ids[:1]):
        close(program(*(other,) * count), model(*(other,) * count))


@pytest.mark.parametrize(
    "wrap", [checkpoint_wrapper, partial(torch.compile, backend="eager")], ids=["checkpoint", "compile"]
)
@pytest.mark.parametrize("cls", GENERATING)
def test_models_of_wrapped_layers(cls, wrap, request):
    request.addfinalizer(torch._dynamo.reset)
    model = made(cls, CONFIGS["rotary, grouped heads, swiglu, rms"])
    ids, options = torch.tensor([[3, 4, 5], [6, 7, 0]]), {"max_new_tokens": 3} | GENERATING[cls]
    inputs = (ids,) if cls is LanguageModel else (ids, ids)
    expected, tokens = model(*inputs)[ids > 0], model.generate(ids, **options)
    for layers in [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]:
        for i, layer in enumerate(layers):
            layers[i] = wrap(layer)
    close(model(*inputs)[ids > 0], expected)
    assert torch.equal(model.generate(ids, **options), tokens)


@pytest.mark.parametrize("cls", GENERATING)
def test_compiled_stacks_generate(cls, request):
    request.addfinalizer(torch._dynamo.reset)
    model, counter = made(cls, replace(CONFIG, padding_idx=None)), CompileCounter()
    ids, options = torch.tensor([[3, 4, 5], [6, 7, 8]]), {"max_new_tokens": 6} | GENERATING[cls]
    expected = model.generate(ids, **options)
    for part in model.children():
        if isinstance(part, (nn.TransformerEncoder, nn.TransformerDecoder)):
            part.compile(backend=counter)
    assert torch.equal(model.generate(ids, **options), expected)
    assert 0 < counter.frame_count <= 4  # the prompt, the first token, the second, and all others


@torch.no_grad()
def test_steps_after_padded_prompts_are_a_whole_graph(request, monkeypatch):
    request.addfinalizer(torch._dynamo.reset)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: torch.compiler.is_dynamo_compiling())  # as torch 2.10
    model, (ids, real) = made(LanguageModel, replace(CONFIG, padding_idx=None)), prompts("left")
    cache, expected, counter = KVCache(len(ids), 2 * N), KVCache(len(ids), 2 * N), CompileCounter()
    model(ids, real, cache)
    model(ids, real, expected)
    step = torch.compile(model, fullgraph=True, backend=counter)
    for i in range(N):
        close(step(ids[:, i : i + 1], cache=cache), model(ids[:, i : i + 1], cache=expected))
    assert counter.frame_count <= 2  # one for these lengths, one for all


def test_positions_count_real_tokens():
    real = torch.tensor([[0, 1, 1, 0, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    assert positions_of(real)[real].tolist() == [0, 1, 2, 0]
    assert positions_of(real).min() == 0


@pytest.mark.parametrize("early_stopping", [False, True])
def test_the_beams_of_a_sample_depend_on_no_other(early_stopping):
    """Nor does one that has what it needs look for more while others run."""
    options = {"max_new_tokens": 10, "num_beams": 2, "early_stopping": early_stopping, "eos_token_id": 9}
    for seed in range(20):
        torch.manual_seed(seed)
        model = LanguageModel(replace(CONFIG, vocab_size=12, num_layers=1)).eval()
        ids = torch.randint(1, 12, (4, 3))
        for of_all, prompt in zip(model.generate(ids, **options), ids, strict=True):
            alone = model.generate(prompt[None], **options)[0]
            assert torch.equal(of_all[: len(alone)], alone)
            assert (of_all[len(alone) :] == 0).all()


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 3}], ids=str)
@pytest.mark.parametrize("padding_idx", [None, 0])
def test_no_prompts(options, padding_idx):
    ids = torch.zeros(0, 9, dtype=torch.int64)
    model = made(LanguageModel, replace(CONFIG, padding_idx=padding_idx))
    assert len(model.generate(ids, max_new_tokens=4, eos_token_id=2, **options)) == 0


@pytest.mark.parametrize("options", [{"temperature": 1e-37}, {"top_p": 1e-300}, {"top_p": 5e-324, "top_k": 3}], ids=str)
def test_the_likeliest_token_is_left_where_nothing_else_is(options):
    model, ids = made(LanguageModel, CONFIG), torch.tensor([[3, 4, 5]])
    drawn = model.generate(ids, max_new_tokens=4, do_sample=True, **options)
    assert torch.equal(drawn, model.generate(ids, max_new_tokens=4))
