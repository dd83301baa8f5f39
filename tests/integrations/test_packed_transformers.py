"""swap(model, packed=True): layers compute real tokens only, everything around them sees the batch as it came."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
import transformers
import transformers_cases
from model_cases import PADDINGS, ModelCase
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers_cases import SIZES, TOKENS

import fastattn
from fastattn.integrations import packed_transformers
from fastattn.integrations.packed_transformers import MODEL_TYPES, _stacks
from fastattn.integrations.transformers import PreparedMask

GROUPED = SIZES | {"num_key_value_heads": 2, "use_cache": False}
T5 = transformers_cases.T5 | {"use_cache": False, "dropout_rate": 0.0}
UNDROPPED = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
SEQ2SEQ = transformers_cases.BART | {"use_cache": False} | UNDROPPED
MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES)),
    "llama": lambda: transformers.LlamaModel(transformers.LlamaConfig(**GROUPED)),
    "bart": lambda: transformers.BartModel(transformers.BartConfig(**SEQ2SEQ)),
    "t5": lambda: transformers.T5Model(transformers.T5Config(**T5)),
}
L = 12
REAL = {
    "right": torch.arange(L) < torch.tensor([[12], [5], [8]]),
    "left": torch.arange(L) >= torch.tensor([[0], [7], [3]]),
}


def model_of(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = MODELS[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def inputs(side: str, target: str | None = None) -> dict[str, Tensor]:
    """A batch with padding on this side; with a target, also for the decoder (on no side for "none")."""
    ids = torch.randint(3, 99, (3, L), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": REAL[side].long()}
    if target is not None:
        batch["decoder_input_ids"] = ids.flip(1)[:, :9]
        batch["decoder_attention_mask"] = torch.ones(3, 9, dtype=torch.long)
    if target not in (None, "none"):
        batch["decoder_attention_mask"] = REAL[target].flip(0)[:, :9].long()
    return batch


def results(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The hidden states at real tokens, and the gradients of every parameter."""
    real = batch.get("decoder_attention_mask", batch["attention_mask"])
    hidden = model(**batch).last_hidden_state[real.bool()]
    model.zero_grad()
    (hidden * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    return {"hidden": hidden.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(actual: object, expected: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-5)


def rows_in(model: nn.Module) -> set[int]:
    """How many rows the norms and projections inside the layers are given, from now on."""
    seen: set[int] = set()
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList):
            for part in layers.modules():
                if isinstance(part, (nn.Linear, transformers.pytorch_utils.Conv1D)):
                    part.register_forward_hook(lambda _, args, __: seen.add(args[0].shape[:-1].numel()))
    return seen


NOT_PACKED = {  # family: the types of its layers
    "Llama 4": {"llama4_text"},  # which count their tokens
    "Qwen2.5-VL": {"qwen2_5_vl_text", "qwen2_5_vl_vision"},  # whose tokens have several positions
    "Qwen3-Next": {"qwen3_next"},  # which mix tokens without attention
    "SigLIP": {"siglip_text_model", "siglip_vision_model"},  # whose pooled output is the last place
    "Whisper": {"whisper"},  # whose encoder has no padding
}
OF_IMAGES = {"clip_vision_model", "siglip_vision_model"}  # without padding
WITH_PADDING = [case for case in transformers_cases.CASES if "right" in case.paddings]
CASES = [case for case in WITH_PADDING if case.family not in NOT_PACKED]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layers_see_real_tokens_only(case):
    """What they answer, and its gradients, are in test_models.py."""
    model = case.make().eval()
    model.config.use_cache = False
    report = fastattn.swap(model, packed=True)
    seen, real = rows_in(model), PADDINGS["right"]
    with torch.no_grad():
        case.run(model, real)
    assert seen >= {int(real.sum())}
    assert not seen & {real.numel()}
    assert report.calls.packed == (2 if model.config.is_encoder_decoder else 1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_hidden_states_have_the_shape_of_the_batch(case):
    model, outputs = case.make().eval(), []
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel):
            module.config.output_hidden_states = True
            module.register_forward_hook(lambda _, __, output: outputs.append(output))
    shapes = []
    for swap in (lambda: None, lambda: fastattn.swap(model, packed=True)):
        report = swap()
        outputs.clear()
        with torch.no_grad():
            case.run(model, PADDINGS["right"])
        names = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")
        shapes.append([getattr(x, "shape", x) for output in outputs for name in names for x in output.get(name) or ()])
    assert shapes[0]
    assert shapes[0] == shapes[1]
    assert report.calls.packed == 0


def test_every_model_type_is_tested():
    def types(case: ModelCase) -> set[str]:
        return {owner.config.model_type for owner in _stacks(case.make()).values()}

    assert set().union(*(types(case) for case in CASES)) - OF_IMAGES == MODEL_TYPES
    assert {case.family: types(case) for case in WITH_PADDING if case not in CASES} == NOT_PACKED


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_no_layer_returns_a_view(name):
    """Of which FSDP2 warns."""
    model, batch = model_of(name).eval(), inputs("left", "none" if name == "t5" else None)
    report = fastattn.swap(model, packed=True)
    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    for layer in layers:
        layer.register_forward_hook(lambda _, __, output: returned.append(output))
    returned = []
    model(**batch)
    assert report.calls.packed
    assert len(returned) == len(layers)
    assert not any(x._is_view() for output in returned for x in (output if isinstance(output, tuple) else [output])[:1])


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_what_comes_out_at_padding(name):
    """0 after the last layer, and in a model that ends with a norm what that makes of 0."""
    model, batch = model_of(name).eval(), inputs("left")
    fastattn.swap(model, packed=True)
    assert (model(**batch).last_hidden_state[~REAL["left"]] == 0).all()


def test_calls_that_cannot_be_packed_run_as_they_were_and_are_counted():
    model, batch = model_of("llama").eval(), inputs("right")
    plain = copy.deepcopy(model)
    fastattn.swap(plain)
    report = fastattn.swap(model, packed=True)
    with torch.no_grad():
        for options in ({"use_cache": True}, {"output_hidden_states": True}, {"output_attentions": True}):
            actual, expected = model(**batch, **options), plain(**batch, **options)
            assert_same(actual.last_hidden_state, expected.last_hidden_state)
            assert_same(actual.hidden_states, expected.hidden_states)
            assert_same(actual.attentions, expected.attentions)
        model(**batch, use_cache=False, cache_position=torch.arange(L))
        model(input_ids=batch["input_ids"])
        for mask in (torch.ones(3, L), torch.zeros(3, L), torch.ones(3, 1, L, L, dtype=torch.bool).tril()):
            model(input_ids=batch["input_ids"], attention_mask=mask)
    assert report.calls.packed == 0
    assert report.calls.unpacked == {
        "the call has a cache, past_key_values; use_cache=False does without": 1,
        "hidden states or attentions are asked for": 2,
        "the call has cache_position": 1,
        "no attention_mask was given": 1,
        "the batch has little padding, or none": 1,
        "all tokens are padding": 1,
        "the mask is none of fastattn's": 1,
    }
    assert f"\n{report.calls}" in str(report)
    assert str(report.calls).startswith("packed: 0 passes through a stack of layers\nnot packed: 2: hidden states")


def test_masks_that_say_more_than_padding():
    model, batch = model_of("bert").eval(), inputs("right")
    packed = copy.deepcopy(model)
    report = fastattn.swap(packed, packed=True)
    x = model.embeddings(batch["input_ids"])
    dense = torch.rand(3, 1, L, L, generator=torch.Generator().manual_seed(0)) < 0.7
    mask = PreparedMask(dense=dense, real_keys=REAL["right"])
    with torch.no_grad():
        actual = packed.encoder(x, attention_mask=mask)[0]
        expected = model.encoder(x, attention_mask=dense & REAL["right"][:, None, None])[0]
    assert_same(actual[REAL["right"]], expected[REAL["right"]])
    assert report.calls.packed == 1


def test_a_mask_of_the_users_own_for_the_encoders_output():
    model, batch = model_of("bart").eval(), inputs("right", "right")
    packed = copy.deepcopy(model)
    report = fastattn.swap(packed, packed=True)
    real, states = batch["decoder_attention_mask"].bool(), torch.randn(3, L, 32)
    own = (torch.rand(3, 1, 9, L) < 0.7).logical_or(torch.arange(L) == 0)
    call = {"input_ids": batch["decoder_input_ids"], "attention_mask": real, "encoder_hidden_states": states}
    with torch.no_grad():
        actual, expected = (one.decoder(**call, encoder_attention_mask=own)[0] for one in (packed, model))
    assert_same(actual[real], expected[real])
    assert report.calls.unpacked == {"the mask for the encoder's output is none of fastattn's": 1}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["bert", "llama", "bart", "t5"])
def test_gradient_checkpointing(name, reentrant):
    model = model_of(name).train()
    batch = inputs("right", "left" if model.config.is_encoder_decoder else None)
    expected = results(model, batch)
    report = fastattn.swap(model, packed=True)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(results(model, batch), expected)
    assert (report.calls.packed, report.calls.unpacked.total()) == (1 + model.config.is_encoder_decoder, 0)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_a_decoder_without_padding_saves_that_of_its_encoder(name):
    model, batch = model_of(name), inputs("right", "none")
    packed = copy.deepcopy(model)
    report = fastattn.swap(packed, packed=True)
    seen = rows_in(packed)
    assert_same(results(packed, batch), results(model, batch))
    assert report.calls.packed == 2
    assert seen == {int(batch["attention_mask"].sum()), batch["decoder_input_ids"].numel()}
    del batch["decoder_attention_mask"]
    assert_same(packed(**batch).last_hidden_state, model(**batch).last_hidden_state)
    assert report.calls.packed == 4


def test_layers_left_out_at_random():
    torch.manual_seed(0)
    model = transformers.BartModel(transformers.BartConfig(**SEQ2SEQ, encoder_layerdrop=0.5, decoder_layerdrop=0.5))
    packed, batch = copy.deepcopy(model.train()), inputs("right", "left")
    report = fastattn.swap(packed, packed=True)
    for seed in range(8):
        hidden = []
        for one in (model, packed):
            torch.manual_seed(seed)
            hidden.append(one(**batch).last_hidden_state[batch["decoder_attention_mask"].bool()])
        assert_same(*hidden)
    assert report.calls.unpacked.keys() == {"layers are left out at random (layerdrop)"}
    packed.eval()(**batch)
    assert report.calls.packed == 2


def test_models_that_are_not_known_to_take_it_are_named_and_run():
    torch.manual_seed(0)
    model = transformers.UMT5EncoderModel(transformers.UMT5Config(**T5)).eval()
    batch = inputs("right")
    expected = model(**batch).last_hidden_state
    report = fastattn.swap(model, packed=True)
    assert report.refused == {
        "encoder.block": "not packed: umt5 is not among the models whose layers are known to take it"
    }
    assert len(report.swapped) == 2
    assert_same(model(**batch).last_hidden_state[REAL["right"]], expected[REAL["right"]])


def test_a_stack_that_was_cut_is_not_packed():
    model, batch = model_of("bert").eval(), inputs("right")
    report = fastattn.swap(model, packed=True)
    model.encoder.layer = model.encoder.layer[:1]
    shorter = model_of("bert").eval()
    shorter.encoder.layer = shorter.encoder.layer[:1]
    real = REAL["right"]
    assert_same(model(**batch).last_hidden_state[real], shorter(**batch).last_hidden_state[real])
    assert report.calls.unpacked == {"the stack of layers was changed after the swap": 1}


def test_another_implementation_switches_it_off():
    model, batch = model_of("bert").eval(), inputs("right")
    fastattn.swap(model, packed=True)
    model.set_attn_implementation("sdpa")
    seen = rows_in(model)
    model(**batch)
    assert seen == {3 * L}


def test_twice_copies_and_back():
    model, batch = model_of("bert").eval(), inputs("right")
    expected = results(model, batch)
    first = fastattn.swap(model, packed=True)
    second = fastattn.swap(model, packed=True)
    copied = copy.deepcopy(model)
    seen = rows_in(copied)
    assert_same(results(copied, batch), expected)
    assert seen == {int(REAL["right"].sum())}
    assert (first.calls.packed, second.calls.packed) == (0, 0)  # the copy counts for itself
    assert_same(results(model, batch), expected)
    assert (first.calls.packed, second.calls.packed) == (1, 1)
    fastattn.unswap(model)
    seen = rows_in(model)
    assert_same(results(model, batch), expected)
    assert seen == {3 * L}
    assert not any("fastattn" in name for module in model.modules() for name in vars(module))


class Centring(nn.Module):
    """A layer of somebody else's around one of transformers', for which the tokens of a sample belong together."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        return self.layer(hidden_states - hidden_states.mean(1, keepdim=True), *args, **kwargs)


class Summing(transformers.models.llama.modeling_llama.LlamaModel):
    """A stack of somebody else's, which reads the first token of each sample between its layers."""

    def forward(self, *args: object, **kwargs: object) -> object:
        return super().forward(*args, **kwargs)


IN_PLACE = {  # what stands for the feed-forward network of a layer, where that is changed
    "attention of torch": lambda mlp: nn.Sequential(mlp, nn.TransformerEncoderLayer(32, 4, 8, 0.0, batch_first=True)),
    "a pool of tokens": lambda mlp: nn.Sequential(mlp, nn.AvgPool2d((3, 1), 1, (1, 0))),
    "a softmax over the tokens": lambda mlp: nn.Sequential(mlp, nn.Softmax(1)),
    "a norm over the tokens": lambda mlp: nn.Sequential(mlp, nn.LayerNorm((L, 32))),
    "a module in it": Centring,
}


CHANGED = (*IN_PLACE, "a module around it", "a method in place of its own", "its stack", "compiled", "around all")


@pytest.mark.parametrize("how", CHANGED)
def test_layers_that_somebody_changed_are_not_packed(how):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, batch = model_of("llama").eval(), inputs("right")
    if how == "its stack":
        model.__class__ = Summing
    elif how in IN_PLACE:
        model.layers[1].mlp = IN_PLACE[how](model.layers[1].mlp).eval()
    elif how == "a module around it":
        model.layers[1] = Centring(model.layers[1])
    elif how == "compiled":
        model.layers[1].compile(backend="eager")
    elif how == "around all":
        model.layers = nn.ModuleList(torch.compile(layer, backend="eager") for layer in model.layers)
    else:
        forward = model.layers[1].forward
        model.layers[1].forward = lambda x, *args, **kwargs: forward(x - x.mean(1, keepdim=True), *args, **kwargs)
    by_itself = how in ("a method in place of its own", "compiled")
    plain = None if by_itself else copy.deepcopy(model)
    with torch.no_grad():
        if plain is not None:
            fastattn.swap(plain)
            expected = plain(**batch, use_cache=False).last_hidden_state
        report = fastattn.swap(model, packed=True)
        actual = model(**batch, use_cache=False).last_hidden_state
    if plain is not None:
        assert_same(actual, expected)
    assert report.calls.packed == 0
    part = "the stack" if how == "its stack" else "a layer"
    why = "a layer is compiled by itself" if how == "compiled" else f"{part} is not as transformers has it"
    assert report.calls.unpacked == {why: 1}


@pytest.mark.parametrize("packed", [False, True])
def test_a_compiled_model_takes_a_mask_for_a_batch_of_any_size(packed, monkeypatch):
    """Dynamo then knows the size of ids as a symbol, and that of a mask that is new as a number; it asks no layer."""
    asked = mock.Mock(side_effect=AssertionError("nothing is packed in a graph"))
    monkeypatch.setattr(packed_transformers, "_is_as_transformers_has_it", asked)
    torch._dynamo.reset()
    model, batch = model_of("bert").eval(), inputs("right")
    plain = copy.deepcopy(model)
    fastattn.swap(model, packed=packed)
    compiled, ids = torch.compile(model, backend="eager", fullgraph=True), batch["input_ids"]
    with torch.no_grad():
        for size in (4, 2):
            compiled(input_ids=ids[:1].expand(size, -1))
        actual, expected = (m(**batch).last_hidden_state for m in (compiled, plain))
    real = batch["attention_mask"].bool()
    assert_same(actual[real], expected[real])


WAV2VEC2 = transformers_cases.SPEECH | {"add_adapter": True, "num_adapter_layers": 1, "output_hidden_size": 32}
READ_PADDING = {  # why they are not packed: a model, and its inputs
    "weighs the tokens of a sample with its padding": (
        lambda: transformers.BertForQuestionAnswering(transformers.BertConfig(**SIZES)), lambda real: inputs("right"),
    ),
    "siglip_text_model is not among": (
        lambda: transformers.SiglipTextModel(transformers.SiglipTextConfig(**SIZES, **TOKENS)),
        lambda real: inputs("right"),
    ),
    "its adapter reads the frames at padding": (
        lambda: transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(**SIZES, **WAV2VEC2)),
        lambda real: {"input_values": torch.randn(3, 4 * L), "attention_mask": real.repeat_interleave(4, 1).long()},
    ),
}  # fmt: skip


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("why", READ_PADDING)
def test_models_that_read_the_output_at_padding_are_not_packed(why, by_name):
    make, call = READ_PADDING[why]
    torch.manual_seed(0)
    model, batch = make().eval(), call(REAL["right"])
    plain, seen = copy.deepcopy(model), rows_in(model)
    fastattn.swap(plain)
    if by_name:
        with pytest.warns(UserWarning, match=why):
            model.set_attn_implementation("fastattn_packed")
    else:
        report = fastattn.swap(model, packed=True)
        assert all(why in sentence for sentence in report.refused.values())
    with torch.no_grad():
        for actual, expected in zip(model(**batch).values(), plain(**batch).values(), strict=True):
            assert_same(actual, expected)
    assert int(REAL["right"].sum()) not in seen


def test_a_part_that_was_packed_before_its_whole_was_known_is_packed_no_more():
    config = transformers.BertConfig(**SIZES, attn_implementation="fastattn_packed")
    with pytest.warns(UserWarning, match="BertForQuestionAnswering weighs the tokens"):
        model = transformers.BertForQuestionAnswering(config)
    seen = rows_in(model.eval())
    model(**inputs("right"))
    assert seen == {3 * L}


@pytest.mark.parametrize("option", ["adapter_names", "alora_offsets"])
def test_hooks_that_are_told_the_samples_see_the_batch(option):
    """As those of peft, for adapters of each sample."""
    model, batch = model_of("bert").eval(), inputs("right")
    report = fastattn.swap(model, packed=True)
    hook = partial(lambda module, args, **given: None, **{option: ["a", "b", "c"]})
    with model.encoder.layer[0].output.dense.register_forward_pre_hook(hook):
        model(**batch)
    model(**batch)
    assert (report.calls.packed, report.calls.unpacked.total()) == (1, 1)


def test_no_pass_waits_for_the_collector_of_cycles():
    model, batch = model_of("bert").eval(), inputs("right")
    report = fastattn.swap(model, packed=True)
    with torch.no_grad():
        model(**batch)
        gc.collect()
        gc.disable()
        # Held, for this pass may end the life of what an earlier test left in a cycle.
        before = [x for x in gc.get_objects() if issubclass(type(x), Tensor | PreparedMask)]
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            model(**batch)
            gc.collect()
            left = [x for x in gc.garbage if isinstance(x, Tensor | PreparedMask)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    del before
    assert left == []
    assert report.calls.packed == 2
