"""Continuous batching: tokens as alone, one call a step, and pages that are lost, shared or overwritten by nobody."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import test_generation
import torch
from test_generation import CONFIG, made
from torch import Tensor

import fastattn
from fastattn import Mask
from fastattn.nn import (
    ContinuousBatch,
    KVCache,
    LanguageModel,
    PagedCache,
    Request,
    Seq2SeqModel,
    TransformerEncoder,
    batching,
)
from fastattn.validation import QUANTIZED

LENGTHS = (6, 1, 23, 4, 9, 17, 2)
# Sizes of models whose answers depend on every token.
SIZES = {"vocab_size": 97, "d_model": 32, "dim_feedforward": 128, "max_length": 64, "tie_embeddings": False}
CONFIGS = {name: replace(config, **SIZES) for name, config in test_generation.CONFIGS.items()}


@pytest.fixture(params=CONFIGS, ids=str)
def config(request) -> fastattn.nn.TransformerConfig:
    return CONFIGS[request.param]


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    """Token ids of these lengths; the id of padding is one like any other."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(97, (n,), generator=generator) for n in lengths]


def alone(model: LanguageModel, prompt: Tensor, **options: object) -> list[int]:
    """What `LanguageModel.generate` returns for a prompt without padding."""
    return model.generate(prompt[None], torch.ones_like(prompt)[None], **options)[0].tolist()


def test_tokens_of_a_prompt_matter(config):
    """Or the tests below would not see the keys of another request."""
    model, prompt = made(LanguageModel, config), prompts()[5]
    expected = alone(model, prompt, max_new_tokens=12)
    changed = [prompt.index_fill(0, torch.tensor(i), 1) for i in range(len(prompt))]
    assert len({*expected}) > 2
    assert sum(alone(model, other, max_new_tokens=12) != expected for other in changed) > 8


def run(batch: ContinuousBatch, most: int = 1000) -> int:
    """Steps until no request is left; their number."""
    for steps in range(most):
        if not batch:
            return steps
        batch.step()
    raise AssertionError(f"{len(batch)} requests have not ended after {most} steps")


def live_pages(batch: ContinuousBatch) -> Iterator[tuple[Request, list[int]]]:
    for request in batch._running:
        yield request, request._sequence.pages


def check_pages(batch: ContinuousBatch) -> None:
    """Every page is free, or belongs to one request that runs."""
    owned = [page for _, pages in live_pages(batch) for page in pages]
    assert sorted(owned + batch.cache._free) == list(range(batch.cache.pages))


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_quantized_pages_give_a_request_what_they_give_it_alone(config, dtype):
    model = made(LanguageModel, config)
    batch = ContinuousBatch(model, PagedCache(40, 4, dtype), max_tokens_per_step=7)
    requests = [batch.add(prompt, max_new_tokens=9) for prompt in prompts()]
    run(batch)
    for request, prompt in zip(requests, prompts(), strict=True):
        cache = PagedCache(20, 16, dtype)
        assert request.tokens == alone(model, prompt, max_new_tokens=9, cache=cache)
        assert {x.dtype for x in cache._layers[0].values()} == {dtype, torch.float32}


@pytest.mark.parametrize("stored", QUANTIZED, ids=str)
def test_quantized_pages_change_the_logits_a_little(stored):
    model, ids = made(LanguageModel, next(iter(CONFIGS.values()))), torch.cat(prompts())[None, :60]
    with torch.no_grad():
        exact = model(ids, torch.ones_like(ids))
        caches = [PagedCache(4, dtype=dtype) for dtype in (None, stored)]
        same, rounded = (model(ids, torch.ones_like(ids), cache.step({cache.open(60): 60})) for cache in caches)
    error = ((rounded - exact).norm() / exact.norm()).item()
    torch.testing.assert_close(same, exact, rtol=1e-4, atol=1e-4)
    assert 1e-4 < error < 0.03
    for wrong in (torch.float16, torch.ones(2).numpy()):  # what compares to an array is no bool
        must = f"dtype must be torch.int8, torch.float8_e4m3fn or None, got {wrong!r}"
        with pytest.raises(ValueError, match=re.escape(must)):
            PagedCache(4, dtype=wrong)


@pytest.mark.parametrize("max_tokens_per_step", [4, 7, 64])
def test_requests_have_the_tokens_that_they_have_alone(config, max_tokens_per_step):
    """Prompts of mixed lengths, in chunks or whole, that come while others generate, over too few pages for all."""
    model = made(LanguageModel, config)
    batch = ContinuousBatch(model, PagedCache(pages=12, page_size=4), max_tokens_per_step=max_tokens_per_step)
    requests = []
    for i, prompt in enumerate(prompts()):
        options = {"max_new_tokens": 3 + 2 * i}
        if i % 3 == 2:
            options["eos_token_id"] = alone(model, prompt, **options)[3]
        requests.append((batch.add(prompt if i % 2 else prompt.tolist(), **options), prompt, options))
        batch.step()
        batch.step()
    run(batch)
    for request, prompt, options in requests:
        assert request.tokens == alone(model, prompt, **options)
        assert request.ids == prompt.tolist() + request.tokens
        assert request.finish_reason == ("stop" if request.tokens[-1] == options.get("eos_token_id") else "length")
    assert {request.finish_reason for request, _, _ in requests} == {"stop", "length"}
    assert batch.cache.free == 12


@pytest.mark.parametrize("seed", range(6))
def test_no_page_is_lost_shared_or_overwritten(seed):
    """Random calls in random order: pages, the keys in those of others, order of admission and tokens stay right."""
    draw = random.Random(seed)
    model = made(LanguageModel, CONFIGS[draw.choice([*CONFIGS])])
    pages, page_size = draw.choice([(3, 8), (9, 3), (80, 1)])
    batch = ContinuousBatch(model, PagedCache(pages, page_size), max_tokens_per_step=draw.randint(1, 20))
    made_requests, admitted = [], []
    for _ in range(150):
        match draw.choice(["add", "step", "step", "step", "cancel"]):
            case "add":
                n = draw.randint(1, 14)
                prompt, options = torch.randint(97, (n,)), {"max_new_tokens": draw.randint(1, 24 - n)}
                if draw.random() < 0.5:
                    options["eos_token_id"] = alone(model, prompt, **options)[0]
                made_requests.append((batch.add(prompt, **options), prompt, options))
            case "cancel" if made_requests:
                batch.cancel(draw.choice(made_requests)[0])
            case "step":
                before, generating = rows_of_live_requests(batch), [r for r in batch._running if r.tokens]
                advanced = batch.step()
                assert advanced[: len(generating)] == generating
                assert all(request.tokens for request in advanced)
                admitted += [request for request in batch._running if request not in admitted]
                for pages_of_layer, at, rows in before:
                    assert torch.equal(pages_of_layer[at], rows)
        check_pages(batch)
    run(batch)
    assert batch.cache.free == pages
    order = [request for request, _, _ in made_requests]
    assert admitted == sorted(admitted, key=order.index)
    reasons = [request.finish_reason for request in order]
    assert {*reasons} == {"stop", "length", "cancelled"}
    for request, prompt, options in made_requests:
        expected = alone(model, prompt, **options)
        assert request.tokens == expected[: len(request.tokens) if request.finish_reason == "cancelled" else None]


def rows_of_live_requests(batch: ContinuousBatch) -> list[tuple[Tensor, tuple[Tensor, Tensor], Tensor]]:
    """The keys and values that requests have in the pages, and where."""
    result = []
    for request, pages in live_pages(batch):
        places = torch.arange(request._sequence.length)
        at = torch.tensor(pages)[places // batch.cache.page_size], places % batch.cache.page_size
        for of_layer in batch.cache._layers.values():
            result += [(x, at, x[at].clone()) for x in of_layer.values()]
    return result


def test_a_step_is_one_call_that_reads_generating_requests_first(monkeypatch):
    model = made(LanguageModel, CONFIG)
    calls = []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda ids, *rest: calls.append(ids[0].tolist()) or hidden(ids, *rest))
    batch = ContinuousBatch(model, PagedCache(100, 4), max_tokens_per_step=6)
    first, second, third = [batch.add([3 + i] * n, max_new_tokens=4) for i, n in enumerate((4, 9, 5))]
    assert [batch.step() for _ in range(4)] == [[first], [first], [first, second], [first, second, third]]
    assert calls == [
        [3, 3, 3, 3, 4, 4],
        [first.tokens[0], 4, 4, 4, 4, 4],
        [first.tokens[1], 4, 4, 5, 5, 5],  # the rest of the second prompt, and what there is room for of the third
        [first.tokens[2], second.tokens[0], 5, 5],
    ]
    run(batch)
    assert max(map(len, calls)) <= 6


def test_few_pages_make_requests_wait_in_their_order():
    model = made(LanguageModel, CONFIG)
    batch = ContinuousBatch(model, PagedCache(pages=4, page_size=2))
    sizes = [(3, 4), (6, 3), (1, 1), (2, 2)]  # of which the second needs all pages, and the last ones few
    requests = [batch.add([5] * n, max_new_tokens=new) for n, new in sizes]
    ended = []
    while batch:
        ended += [request for request in batch.step() if request.finish_reason]
        assert sum(request.running for request in requests[:2]) <= 1
    assert ended[:2] == requests[:2]
    assert [len(request.tokens) for request in requests] == [new for _, new in sizes]
    whole = batch.add([5] * 3, max_new_tokens=6)  # all pages to the last place: the last token needs none
    assert run(batch) == 6
    assert len(whole.tokens) == 6


def test_cancelled_requests_free_their_pages_at_once():
    batch = ContinuousBatch(made(LanguageModel, CONFIG), PagedCache(pages=4, page_size=4))
    running, waiting, last = [batch.add([4] * 10, max_new_tokens=5) for _ in range(3)]
    batch.step()
    assert (batch.cache.free, len(batch), running.running, waiting.running) == (0, 3, True, False)
    batch.cancel(waiting)
    assert (len(batch), waiting.finish_reason) == (2, "cancelled")
    batch.cancel(running)
    batch.cancel(running)
    assert (batch.cache.free, len(batch), running.finish_reason, len(running.tokens)) == (4, 1, "cancelled", 1)
    run(batch)
    assert (last.finish_reason, len(last.tokens), waiting.tokens) == ("length", 5, [])
    batch.cancel(last)
    assert (last.finish_reason, batch.cache.free) == ("length", 4)


def test_what_a_request_draws_depends_on_its_own_generator_alone():
    model = made(LanguageModel, CONFIGS["sinusoidal"])
    ways = [{}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.8, "temperature": 1.5}]

    def options(i: int) -> dict[str, object]:
        generator = torch.Generator().manual_seed(i)
        return {"max_new_tokens": 12, "do_sample": True, "generator": generator, **ways[i % 4]}

    expected = [alone(model, prompt, **options(i)) for i, prompt in enumerate(prompts())]
    for max_tokens_per_step in (8, 50):
        batch = ContinuousBatch(model, PagedCache(40, 4), max_tokens_per_step=max_tokens_per_step)
        requests = [batch.add(prompt, **options(i)) for i, prompt in enumerate(prompts())]
        others = [batch.add([5] * n, max_new_tokens=20, do_sample=n % 2 == 0) for n in (8, 3)]
        run(batch)
        assert [request.tokens for request in requests] == expected
        assert len(others[1].tokens) == 20


def test_after_an_error_the_same_step_can_be_made_again(monkeypatch):
    model = made(LanguageModel, CONFIGS["sinusoidal"])
    batch = ContinuousBatch(model, PagedCache(20, 4), max_tokens_per_step=8)
    requests = [batch.add(prompt, max_new_tokens=6) for prompt in prompts((6, 5))]
    for fails_at in range(20):
        if not batch:
            break
        with monkeypatch.context() as patch:
            module = (model.decoder.layers[1].linear2, model.head)[fails_at % 2]
            patch.setattr(module, "forward", lambda x: (_ for _ in ()).throw(MemoryError))
            lengths = [request._sequence and request._sequence.length for request in batch._running]
            with pytest.raises(MemoryError):
                batch.step() or batch.step()  # the head is not called for prompts alone
            assert not lengths or [request._sequence.length for request in batch._running] == lengths
        batch.step()
        check_pages(batch)
    assert [request.tokens for request in requests] == [alone(model, x, max_new_tokens=6) for x in prompts((6, 5))]


def test_after_an_error_what_was_drawn_is_drawn_again(monkeypatch):
    """Also where each request steps alone then, while nothing else is admitted."""
    model = made(LanguageModel, CONFIGS["sinusoidal"])
    first, second, third = prompts((6, 5, 4))

    def seeded(seed: int) -> dict[str, object]:
        return {"max_new_tokens": 6, "do_sample": True, "generator": torch.Generator().manual_seed(seed)}

    batch = ContinuousBatch(model, PagedCache(6, 4))  # for two of them
    requests = [batch.add(x, **seeded(i)) for i, x in enumerate((first, second, third))]
    batch.step()
    with monkeypatch.context() as patch:
        choose, calls = batching.choose, itertools.count()
        patch.setattr(batching, "choose", lambda *args: choose(*args) if next(calls) == 0 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            batch.step()
    for request in requests:
        assert batch.step([request]) == [request] * request.running
    assert [len(request.tokens) for request in requests] == [2, 2, 0]
    assert batch.step([]) == []
    with pytest.raises(TypeError, match="only must be a list of requests or None, got Request"):
        batch.step(requests[0])
    run(batch)
    expected = [alone(model, x, **seeded(i)) for i, x in enumerate((first, second, third))]
    assert [request.tokens for request in requests] == expected


@pytest.mark.parametrize("do_sample", [False, True])
def test_generate_over_pages_is_generate(config, do_sample, monkeypatch):
    model = made(LanguageModel, config)
    ids, real = torch.randint(3, 97, (4, 7)), torch.arange(7) >= torch.tensor([[0], [5], [2], [0]])
    cache = PagedCache(pages=7, page_size=4)  # for two of them
    options = {"max_new_tokens": 9, "eos_token_id": [2, 4]}
    if do_sample:  # with one generator the draws would be in another order
        options |= {"do_sample": True, "top_k": 1}
    assert torch.equal(model.generate(ids, real, cache=cache, **options), model.generate(ids, real, **options))
    assert cache.free == 7
    masked = ids.masked_fill(~real, config.padding_idx)
    assert torch.equal(model.generate(masked, cache=cache, **options), model.generate(masked, **options))
    assert model.generate(ids[:0], cache=cache, **options).shape == (0, 1)
    with pytest.raises(ValueError, match="must be at most the 29 tokens of all pages, got 33"):
        model.generate(ids, real, cache=cache, max_new_tokens=26)
    monkeypatch.setattr(model.head, "forward", lambda x: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        model.generate(ids, real, cache=cache, **options)
    assert cache.free == 7


@torch.no_grad()
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("window", [(None, None), (2, None), (0, 0)])
def test_layers_attend_to_pages_under_windows(window, batch_first):
    torch.manual_seed(0)
    layer = fastattn.nn.TransformerEncoderLayer(16, 4, 32, batch_first=batch_first, num_kv_heads=2)
    encoder = TransformerEncoder(layer, 2, rotary=fastattn.nn.RotaryPositions(4)).eval()
    mask = Mask(causal=True, window=window)
    tokens = [torch.randn(n, 16) for n in (11, 6)]

    def call(x: Tensor, **options: object) -> Tensor:
        x = encoder(x[None] if batch_first else x[:, None], mask, **options)
        return x[0] if batch_first else x[:, 0]

    cache = PagedCache(pages=9, page_size=2)
    first, second = cache.open(11), cache.open(6)
    chunks = [{first: 4}, {second: 5, first: 3}, {first: 1, second: 1}, {first: 3}]
    found = {first: [], second: []}
    for counts in chunks:
        step = cache.step(counts)
        new = [x[s.length - n : s.length] for s, n in counts.items() for x in (tokens[s is second],)]
        step.extend(sum(counts.values()))
        parts = call(torch.cat(new), cache=step).split([*counts.values()])
        for sequence, part in zip(counts, parts, strict=True):
            found[sequence].append(part)
    for sequence, x in zip((first, second), tokens, strict=True):
        torch.testing.assert_close(torch.cat(found[sequence]), call(x), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("error::fastattn.FallbackWarning")
@torch.no_grad()
def test_a_compiled_stack_gives_the_same_tokens(request):
    request.addfinalizer(torch._dynamo.reset)  # what other tests compile of the same functions counts with this
    model = made(LanguageModel, CONFIGS["sinusoidal"])
    expected = [alone(model, prompt, max_new_tokens=4) for prompt in prompts((6, 3))]
    model.decoder.compile(backend="eager")
    batch = ContinuousBatch(model, PagedCache(20, 4), max_tokens_per_step=8)
    requests = [batch.add(prompt, max_new_tokens=4) for prompt in prompts((6, 3))]
    run(batch)
    assert [request.tokens for request in requests] == expected


def batch_of(**options: object) -> ContinuousBatch:
    return ContinuousBatch(made(LanguageModel, replace(CONFIG, max_length=32)), PagedCache(3, 4), **options)


ADD = {"input_ids": [3, 4], "max_new_tokens": 2}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"input_ids": 3}, "input_ids must be a list of ints or a Tensor, got int"),
        ({"input_ids": "34"}, "input_ids must be a list of ints or a Tensor, got str"),
        ({"input_ids": []}, "input_ids must have at least 1 token, got none"),
        ({"input_ids": [3, 4.0]}, "each of input_ids must be an int, got 4.0"),
        ({"input_ids": [3, True]}, "each of input_ids must be an int, got True"),
        ({"input_ids": [11]}, "each of input_ids must be below the vocabulary's size 11, got 11"),
        ({"input_ids": [-1]}, "each of input_ids must be at least 0, got -1"),
        ({"input_ids": torch.ones(2)}, "input_ids must be int32 or int64, got torch.float32"),
        ({"input_ids": torch.ones(1, 2).long()}, "input_ids must be [n], got [1, 2]"),
        ({"input_ids": torch.ones(2, device="meta").long()}, "input_ids must hold numbers, got a meta tensor"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": 31}, "and max_new_tokens together must be at most max_length = 32 tokens, got 33"),
        ({"max_new_tokens": 12}, "and max_new_tokens together must be at most the 13 tokens of all pages, got 14"),
        ({"eos_token_id": 11}, "eos_token_id must be below the vocabulary's size 11, got 11"),
        ({"num_beams": 2}, "num_beams must be 1 for requests that come and go, got 2"),
        ({"temperature": 0.5}, "do_sample must be True with temperature, got False"),
        ({"beams": 2}, "beams"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_request_is_refused_by_name(change, sentence):
    batch = batch_of()
    with pytest.raises((ValueError, TypeError), match=re.escape(sentence)):
        batch.add(**ADD | change)
    assert (len(batch), batch.cache.free) == (0, 3)
    batch.add(**ADD | {"max_new_tokens": 11})
    assert run(batch) == 11


def test_batches_are_made_of_a_model_and_pages():
    model, cache = made(LanguageModel, CONFIG), PagedCache(3, 4)
    with pytest.raises(TypeError, match="model must be a LanguageModel, got Seq2SeqModel"):
        ContinuousBatch(made(Seq2SeqModel, CONFIG), cache)
    with pytest.raises(TypeError, match="cache must be a PagedCache, got KVCache"):
        ContinuousBatch(model, KVCache(1, 3))
    with pytest.raises(ValueError, match="max_tokens_per_step must be at least 1, got 0"):
        ContinuousBatch(model, cache, max_tokens_per_step=0)
    with pytest.raises(TypeError, match="request must be a Request, got int"):
        batch_of().cancel(3)
    with pytest.raises(ValueError, match="request must be of this batch, got one of another"):
        batch_of().cancel(batch_of().add(**ADD))
    assert batch_of().step() == []


def test_pages_that_somebody_else_holds_are_an_error_and_not_a_wait_for_ever():
    batch = batch_of()
    other = batch.cache.open(9)
    request = batch.add(**ADD)
    with pytest.raises(RuntimeError, match="cache must have 1 free pages for the next request while none runs, got 0"):
        batch.step()
    other.close()
    run(batch)
    assert len(request.tokens) == 2


def test_sequences_have_the_room_that_they_have_reserved():
    cache = PagedCache(pages=3, page_size=4)
    sequence = cache.open(5)
    assert (cache.free, cache.pages_of(8), cache.pages_of(9)) == (1, 2, 3)
    for length, sentence in [
        (5, "max_length must be at most 4, for which there are free pages, got 5"),
        (0, "max_length must be at least 1, got 0"),
        (1.0, "max_length must be an int, got 1.0"),
    ]:
        with pytest.raises((ValueError, TypeError), match=re.escape(sentence)):
            cache.open(length)
    cache.step({sequence: 3})
    closed = cache.open(1)
    closed.close()
    closed.close()
    assert cache.free == 1
    for counts, sentence in [
        ({sequence: 3}, "max_length of a sequence must be at least 6, got 5"),
        ({sequence: 0}, "each number in counts must be at least 1, got 0"),
        ({sequence: True}, "each number in counts must be an int, got True"),
        ({closed: 1}, "counts must have sequences that are open in this cache, got another one"),
        ({PagedCache(1).open(3): 1}, "counts must have sequences that are open in this cache, got another one"),
        ({3: 1}, "counts must have a PagedSequence for each number, got int"),
        ([sequence], "counts must be a mapping from sequences to numbers, got list"),
    ]:
        with pytest.raises((ValueError, TypeError), match=re.escape(sentence)):
            cache.step(counts)
        assert sequence.length == 3
    step = cache.step({sequence: 2})
    assert step.positions.tolist() == [[3, 4]]
    for _ in range(2):
        step.undo()
        assert sequence.length == 3
    counts = {sequence: 2}
    step = cache.step(counts)
    counts[sequence] = 1
    step.undo()
    assert sequence.length == 3
    step = cache.step({sequence: 2})
    sequence.close()
    step.undo()
    assert sequence.length == 0
    with pytest.raises(ValueError, match="pages must be at least 1, got 0"):
        PagedCache(0)
    with pytest.raises(TypeError, match=r"page_size must be an int, got 1\.5"):
        PagedCache(3, 1.5)


def test_pages_that_could_not_be_allocated_are_allocated_by_the_next_pass():
    model, cache = made(LanguageModel, CONFIG), PagedCache(3, 4)
    sequence, ids = cache.open(5), torch.tensor([[3, 4, 5]])
    cache.pages = 2**50
    with torch.no_grad():
        step = cache.step({sequence: 3})
        with pytest.raises(RuntimeError):
            model(ids, cache=step)
        step.undo()
        cache.pages = 3
        expected = model(ids)
        torch.testing.assert_close(model(ids, cache=cache.step({sequence: 3})), expected)


def test_a_step_of_a_closed_sequence_writes_to_nobodys_pages():
    model, cache, ids = made(LanguageModel, CONFIG), PagedCache(2, 8), torch.tensor([[3, 4, 5]])
    closed = cache.open(8)
    step = cache.step({closed: 3})
    closed.close()
    other = cache.open(8)
    with torch.no_grad():
        model(ids, cache=cache.step({other: 3}))
        with pytest.raises(ValueError, match="the step must be of open sequences"):
            model(torch.tensor([[6, 7, 8]]), cache=step)
        next_one = model(torch.tensor([[9]]), cache=cache.step({other: 1}))
        torch.testing.assert_close(next_one[:, -1], model(torch.tensor([[3, 4, 5, 9]]))[:, -1])


def test_calls_that_pages_cannot_serve_are_refused():
    model, cache = made(LanguageModel, CONFIG), PagedCache(9, 4)
    sequence, ids = cache.open(30), torch.tensor([[3, 4, 5]])
    ones = torch.ones_like(ids)

    def refused(sentence: str, call: object, error: type[Exception] = ValueError) -> None:
        step = cache.step({sequence: 3})
        with pytest.raises(error, match=re.escape(sentence)):
            call(step)
        step.undo()

    refused("gradients must be off with pages, as under torch.no_grad()", lambda step: model(ids, ones, step))
    with torch.no_grad():
        refused("with this step there must be 1 row of 3 new tokens, got 2", lambda step: model(ids[:, :2], cache=step))
        refused(
            "with this step there must be 1 row of 3 new tokens, got 2 of 3",
            lambda step: model(ids.expand(2, 3), ones.expand(2, 3), step),
        )
        refused("attention_mask must be True for every token in pages", lambda step: model(ids - 3, cache=step))
        refused("cache must be a KVCache, a PagedStep or None", lambda step: model(ids, cache=cache), TypeError)
        x, attention = torch.ones(1, 3, 16), model.decoder.layers[0].self_attn
        causal = {"attn_mask": Mask(causal=True), "need_weights": False}
        for change, sentence in [
            ({"need_weights": True}, "need_weights must be False with pages, got True"),
            ({"attn_mask": Mask()}, "mask must be causal, with a window at most, with a cache, got []"),
            ({"attn_mask": Mask(causal=True, q_offset=1)}, "with a cache, got ['causal', 'q_offset']"),
            ({"key_padding_mask": ids == 0}, "attn_mask must be a fastattn.Mask over all keys with a cache"),
        ]:
            refused(sentence, lambda step, c=change: attention(x, x, x, cache=step.layer(0), **causal | c))
        refused(
            "dropout must be 0 with pages in training mode, got 0.1",
            lambda step: attention.train()(x, x, x, cache=step.layer(0), **causal),
        )
        decoder = made(Seq2SeqModel, CONFIG).decoder
        refused(
            "cache must be a KVCache or None in a decoder, got a PagedStep",
            lambda step: decoder(x, x, Mask(causal=True), cache=step), TypeError,
        )  # fmt: skip
