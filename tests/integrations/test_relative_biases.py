"""T5, mT5 and UMT5 swapped: their position biases are small tables all the way, and nothing of all pairs is made."""

import copy

import pytest
import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from transformers_cases import T5

import fastattn
from fastattn.integrations import transformers as integration

FAMILIES = ("T5", "MT5", "UMT5")
IDS, LABELS = (torch.randint(2, 50, (2, n), generator=torch.Generator().manual_seed(n)) for n in (40, 21))
REAL = (torch.arange(40) < torch.tensor([[40], [25]])).long()
BATCH = {"input_ids": IDS, "attention_mask": REAL, "labels": LABELS}


def made(family: str, kind: str = "ForConditionalGeneration") -> tuple[torch.nn.Module, torch.nn.Module]:
    """The model with attention of transformers, and a swapped copy."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**T5 | {"dropout_rate": 0.0, "decoder_start_token_id": 0})
    model = getattr(transformers, family + kind)(config).train()
    swapped = copy.deepcopy(model)
    fastattn.swap(swapped)
    model.set_attn_implementation("eager")
    return model, swapped


def learned(model: torch.nn.Module, batch: dict = BATCH) -> dict[str, torch.Tensor]:
    """The loss and the gradient of each parameter."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: x.grad.clone() for name, x in model.named_parameters()}


@pytest.fixture
def biases(monkeypatch):
    """The type of the bias of each call, with the numbers of queries and keys."""
    given = []

    def attend(q, k, v, mask, **terms):
        given.append((type(terms["bias"]).__name__, q.shape[2], k.shape[2]))
        return fastattn.attention(q, k, v, mask, **terms)

    monkeypatch.setattr(integration, "attention", attend)
    return given


SELF, CROSS = [("RelativeBias", 40, 40)] * 2, [("RelativeBias", 21, 21), ("NoneType", 21, 40)] * 2


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_with_checkpoints_or_without(family, reentrant, biases):
    model, swapped = made(family)
    if reentrant is not None:
        swapped.gradient_checkpointing_enable({"use_reentrant": reentrant})
    torch.testing.assert_close(learned(swapped), learned(model), rtol=1e-4, atol=1e-6)
    assert reentrant is not None or biases == SELF + CROSS
    lost = reentrant and family != "UMT5"  # whose layers hand on no bias
    assert {kind for kind, _, _ in biases} == {"Tensor" if lost else "RelativeBias", "NoneType"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation(family, cache, biases):
    model, swapped = made(family)
    options = {"attention_mask": REAL, "max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    expected, actual = (each.eval().generate(IDS, **options) for each in (model, swapped))
    assert torch.equal(actual, expected)
    assert {(kind, n_q) for kind, n_q, _ in biases} == {("RelativeBias", 40), ("Tensor", 1), ("NoneType", 1)}


def test_a_mask_of_numbers_is_added_to_the_bias_as_before(biases):
    model, swapped = made("T5")
    mask = torch.zeros(2, 1, 40, 40).masked_fill(~REAL.bool()[:, None, None], torch.finfo(torch.float32).min)
    expected, actual = (each.encoder(input_ids=IDS, attention_mask=mask)[0] for each in (model, swapped))
    torch.testing.assert_close(actual, expected)
    assert {kind for kind, _, _ in biases} == {"Tensor"}


@pytest.mark.parametrize("side", ["right", "left", "holes"])
def test_packed(side, biases):
    model, swapped = made("T5")
    fastattn.swap(swapped, packed=True)
    real = REAL.flip(1) if side == "left" else REAL
    if side == "holes":
        real = REAL * (torch.arange(40) % 3 > 0)
    batch = {**BATCH, "attention_mask": real, "use_cache": False, "decoder_attention_mask": torch.ones(2, 21).long()}
    torch.testing.assert_close(learned(swapped, batch), learned(model, batch), rtol=1e-4, atol=1e-6)
    tokens = 40 if side == "holes" else int(real.sum())  # holes change distances
    assert biases == [("RelativeBias", tokens, tokens)] * 2 + [
        ("RelativeBias", 42, 42), ("NoneType", 42, int(real.sum()))
    ] * 2  # fmt: skip


def test_other_implementations_get_tensors_again():
    _, swapped = made("T5")
    attention = swapped.encoder.block[0].layer[0].SelfAttention
    bias = attention.compute_bias(5, 7)
    assert type(bias) is fastattn.RelativeBias
    fastattn.unswap(swapped)
    tensor = attention.compute_bias(5, 7)
    assert tensor.shape == (1, 4, 5, 7)
    place = 4 - torch.arange(5)[:, None] + torch.arange(7)
    assert torch.equal(bias.table[:, place], tensor[0])
    learned(swapped)  # whose cross-attention makes its zeros again


def test_a_graph_of_the_encoder():
    model, swapped = made("T5", kind="EncoderModel")
    real = REAL.bool()
    compiled = torch.compile(swapped, backend="aot_eager", fullgraph=True)
    actual = compiled(input_ids=IDS, attention_mask=REAL)[0]
    torch.testing.assert_close(actual[real], model(input_ids=IDS, attention_mask=REAL)[0][real])


@pytest.mark.parametrize("family", ["T5", "MT5"])
def test_nothing_of_the_size_of_all_pairs_is_made(family):
    n = 1024
    _, swapped = made(family)
    batch = {name: torch.randint(2, 50, (1, n)) for name in ("input_ids", "labels")}
    batch["attention_mask"] = (torch.arange(n) < n - 9)[None].long()
    learned(swapped, batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        learned(swapped, batch)
    raw = profiled.profiler.kineto_results.events()  # the others leave out what operators allocate
    at_once = max(event.nbytes() for event in raw if event.name() == "[memory]")
    assert at_once < n * n
