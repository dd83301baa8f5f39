"""Models of Hugging Face transformers answer by fastattn what their own eager attention answers, from a Mask alone.

Models are compared where tokens are real. At padding they may differ: padded queries are not computed here, and their
attention is 0, while eager attention computes something there that nothing reads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils

import fastattn
from fastattn import Mask
from fastattn.integrations import transformers as integration
from fastattn.testing import compare

# The decorator of tests whose masks have no fused kernel on every machine; the others fail where one would be missing.
may_fall_back = pytest.mark.filterwarnings("ignore::fastattn.FallbackWarning")

L = 12  # tokens in each sample
SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
SEQ2SEQ = {"vocab_size": 99, "d_model": 32, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": None}
BART = SEQ2SEQ | {
    f"{side}_{size}": n
    for side in ("encoder", "decoder")
    for size, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 37))
}
T5 = SEQ2SEQ | {"d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4}


def bert() -> PreTrainedModel:
    return transformers.BertModel(transformers.BertConfig(**SIZES))


def gpt2() -> PreTrainedModel:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=64, bos_token_id=1, eos_token_id=None
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))


def mistral() -> PreTrainedModel:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**GROUPED, sliding_window=5))


def modernbert() -> PreTrainedModel:
    config = transformers.ModernBertConfig(**SIZES, local_attention=6, global_attn_every_n_layers=2, pad_token_id=0)
    return transformers.ModernBertModel(config)


def gemma2() -> PreTrainedModel:
    config = transformers.Gemma2Config(**GROUPED, sliding_window=5, attn_logit_softcapping=2.0)
    return transformers.Gemma2ForCausalLM(config)


def gpt_oss() -> PreTrainedModel:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"}  # for fp64
    config = transformers.GptOssConfig(**GROUPED, sliding_window=5, **experts)
    return transformers.GptOssForCausalLM(config)


def t5() -> PreTrainedModel:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))


def bart() -> PreTrainedModel:
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**BART))


FUSED = (bert, gpt2, llama, mistral, modernbert)  # the native backend computes all that these ask for
DECODERS = (gpt2, llama, mistral)
OTHERS = (gemma2, gpt_oss, t5, bart)


def formula(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | float = 0.0,
    **options: object,
) -> tuple[Tensor, Tensor]:
    """Attention in the dtype of the model throughout: eager attention of many models takes its softmax in fp32."""
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).mT * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = (scores + position_bias).masked_fill(~attention_mask, -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    seen = (scores > -torch.inf).any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~seen, 0), -1).masked_fill(~seen, 0)[..., : key.shape[2]]
    return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2), weights


def formula_mask(**call: object) -> Tensor:
    return masking_utils.sdpa_mask(**call | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


AttentionInterface.register("formula", formula)
AttentionMaskInterface.register("formula", formula_mask)


@pytest.fixture
def received(monkeypatch) -> Iterator[list[object]]:
    """The mask of every attention call that fastattn served."""
    masks = []
    forward = integration.attention_forward

    def seen(module, query, key, value, attention_mask, **options):
        masks.append(attention_mask)
        return forward(module, query, key, value, attention_mask, **options)

    monkeypatch.setattr(integration, "attention_forward", seen)
    yield masks
    monkeypatch.undo()
    integration.register()


def both(make: Callable[[], PreTrainedModel]) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model with its own eager attention, and a swapped copy."""
    torch.manual_seed(0)
    eager = make().eval()
    for parameter in eager.parameters():  # so that attention is far from uniform
        nn.init.normal_(parameter, std=0.2)
    swapped = copy.deepcopy(eager)
    eager.set_attn_implementation("eager")
    report = fastattn.swap(swapped)
    assert report.swapped
    assert not report.refused
    return eager, swapped


def exact(model: PreTrainedModel) -> PreTrainedModel:
    """The model in fp64."""
    model = copy.deepcopy(model).double()
    model.set_attn_implementation("formula")
    return model


def padding(kind: str) -> Tensor:
    """attention_mask [3, L] as transformers has it: 1 is real."""
    mask = torch.ones(3, L, dtype=torch.long)
    if kind == "right":
        mask[0, 8:] = mask[1, 3:] = 0
    if kind == "left":
        mask[0, :4] = mask[1, :9] = 0
    if kind == "holes":
        mask[0, 2:5] = mask[1, 4] = mask[1, 9:] = mask[2, :2] = 0
    return mask


def inputs(model: PreTrainedModel, mask: Tensor) -> dict[str, Tensor]:
    ids = torch.randint(3, 99, mask.shape, generator=torch.Generator().manual_seed(1))
    found = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:  # as many queries as keys in the cross-attention, which must not be confused
        found |= {"decoder_input_ids": ids.flip(1)}
    elif model.config.model_type in ("llama", "mistral", "gpt2"):
        found |= {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    return found


def real_outputs(model: PreTrainedModel, call: dict[str, Tensor]) -> Tensor:
    """The first output where tokens are real."""
    output = model(**call)[0]
    return output.flatten(0, 1) if model.config.is_encoder_decoder else output[call["attention_mask"].bool()]


def outputs_and_gradients(model: PreTrainedModel, call: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs at real tokens, and the gradients of a loss over them, as one vector."""
    output = real_outputs(model, call)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(output, parameters, cotangent, allow_unused=True)
    return {"output": output.detach(), "gradients": torch.cat([g.flatten() for g in gradients if g is not None])}


def assert_within_budget(actual: dict[str, Tensor], naive: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    errors = [compare(name, actual[name], naive[name], exact[name].double()) for name in exact]
    assert all(error.budget < 1e-3 * exact[error.output].abs().max() for error in errors), "naive and exact disagree"
    assert all(error.right for error in errors), [str(error) for error in errors if not error.right]


def assert_same_as_eager(make: Callable[[], PreTrainedModel], mask: Tensor) -> None:
    eager, swapped = both(make)
    call = inputs(eager, mask)
    actual, naive = outputs_and_gradients(swapped, call), outputs_and_gradients(eager, call)
    assert_within_budget(actual, naive, outputs_and_gradients(exact(eager), call))


@pytest.mark.parametrize("kind", ["none", "right", "left", "holes"])
@pytest.mark.parametrize("make", FUSED)
def test_outputs_and_gradients(make, kind, received):
    assert_same_as_eager(make, padding(kind))
    assert received
    for mask in received:
        assert isinstance(mask, Mask)
        assert mask.dense is None
        assert mask.real_keys is not None


@may_fall_back
@pytest.mark.parametrize("kind", ["none", "right", "left", "holes"])
@pytest.mark.parametrize("make", OTHERS)
def test_outputs_and_gradients_with_bias_softcap_sinks_and_cross_attention(make, kind, received):
    assert_same_as_eager(make, padding(kind))
    assert received
    assert all(isinstance(mask, Mask) and mask.dense is None for mask in received)


@pytest.mark.parametrize("make", DECODERS)
def test_padded_queries_are_skipped(make, received):
    _, swapped = both(make)
    swapped(**inputs(swapped, padding("right")))
    assert all(torch.equal(mask.real_queries, padding("right").bool()) for mask in received)


@pytest.mark.parametrize("model_type", sorted(integration._SELF_ATTENTION_ONLY))
def test_padded_queries_are_skipped_in_encoders(model_type, received):
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 37, "vocab_size": 99}
    sizes = sizes if model_type == "distilbert" else SIZES | {"embedding_size": 32}
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    assert_same_as_eager(lambda: transformers.AutoModel.from_config(config), padding("holes"))
    assert all(torch.equal(mask.real_queries, padding("holes").bool()) for mask in received)


@may_fall_back
@pytest.mark.parametrize("make", [bert, gpt2, llama, gemma2, gpt_oss, t5])
def test_output_attentions(make):
    eager, swapped = both(make)
    call = inputs(eager, padding("left"))
    names = ("attentions",) if make is not t5 else ("encoder_attentions", "decoder_attentions", "cross_attentions")
    found = {"actual": swapped, "naive": eager, "exact": exact(eager)}
    found = {role: model(**call, output_attentions=True) for role, model in found.items()}
    for name in names:
        layers = {role: output[name] for role, output in found.items()}
        assert len(layers["actual"]) == len(layers["naive"]) == 2
        for actual, naive, right in zip(*layers.values(), strict=True):
            assert actual.shape == naive.shape
            real = call["attention_mask"].bool() if "decoder" not in name and "cross" not in name else slice(None)
            weights = {"actual": actual, "naive": naive, "exact": right}
            weights = {role: {"weights": w.transpose(1, 2)[real]} for role, w in weights.items()}
            assert_within_budget(**weights)


@pytest.mark.parametrize("make", DECODERS)
def test_a_cache_gives_what_one_pass_gives(make, received):
    eager, swapped = both(make)
    call = inputs(eager, padding("left"))
    whole = real_outputs(swapped, call)
    cache, parts = None, []
    for start, stop in ((0, 5), (5, 9), (9, 10), (10, L)):
        part = swapped(
            call["input_ids"][:, start:stop],
            attention_mask=call["attention_mask"][:, :stop],
            position_ids=call["position_ids"][:, start:stop],
            past_key_values=cache,
            use_cache=True,
        )
        cache = part.past_key_values
        parts.append(part.logits)
    pieces = torch.cat(parts, dim=1)[call["attention_mask"].bool()]
    assert_within_budget({"o": pieces}, {"o": whole}, {"o": real_outputs(exact(eager), call)})
    assert all(isinstance(mask, Mask) and mask.dense is None for mask in received)


@may_fall_back
@pytest.mark.parametrize("make", [llama, mistral])
def test_packed_sequences_do_not_see_each_other(make, received):
    eager, swapped = both(make)
    ids = inputs(eager, padding("none"))["input_ids"]
    call = {"input_ids": ids, "position_ids": torch.tensor([*range(7), *range(5)]).expand(3, -1), "use_cache": False}
    assert_within_budget({"o": swapped(**call).logits}, {"o": eager(**call).logits}, {"o": exact(eager)(**call).logits})
    assert all(mask.segments is not None and mask.dense is None for mask in received)


@may_fall_back
@pytest.mark.parametrize("as_float", [True, False])
@pytest.mark.parametrize("make", [bert, llama])
def test_a_users_own_4d_mask(make, as_float):
    eager, swapped = both(make)
    call = inputs(eager, padding("none"))
    keep = torch.rand(3, 1, L, L, generator=torch.Generator().manual_seed(3)) < 0.5
    keep |= torch.eye(L, dtype=torch.bool)
    additive = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    boolean, additive = {"attention_mask": keep}, {"attention_mask": additive}
    actual, naive = swapped(**call | (additive if as_float else boolean))[0], eager(**call | additive)[0]
    assert_within_budget({"o": actual}, {"o": naive}, {"o": exact(eager)(**call | boolean)[0]})


def functions_of_transformers() -> list[tuple[str, Callable, bool]]:
    """(name, mask function, whether a Mask says it without `dense`)."""
    m = masking_utils
    packed = torch.tensor([[0] * 4 + [1] * 5, [0] * 7 + [1] * 2])
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 0, 1]])
    blocks = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1], [-1] * 4 + [0] * 5])
    causal, left_padding = m.causal_mask_function, torch.tensor([0, 2])
    remapped = m.remap_positions_for_packed_sequence(causal, position_ids)
    window, local = m.sliding_window_causal_mask_function(3), m.sliding_window_bidirectional_mask_function(2)

    def own(batch, head, q, k):
        return (q + k) % 2 == 0

    return [
        ("causal", causal, True),
        ("bidirectional", m.bidirectional_mask_function, True),
        ("window", window, True),
        ("local", local, True),
        ("packed", m.packed_sequence_compatibility_function(causal, position_ids, packed), True),
        ("packed window", m.packed_sequence_compatibility_function(window, position_ids, packed), True),
        ("remapped, not packed", remapped, False),
        ("remapped and more, not packed", m.and_masks(m.bidirectional_mask_function, remapped), False),
        ("two windows", m.and_masks(window, local), False),
        ("chunked", m.chunked_causal_mask_function(4, left_padding), False),
        ("blocks", m.or_masks(causal, m.blockwise_overlay(blocks)), False),
        ("own", own, False),
        ("causal and own", m.and_masks(causal, own), False),
    ]


WHOLE = (9, 9, 0, 0)  # q_length, kv_length, q_offset, kv_offset
CACHED = [(1, 9, 8, 0), (3, 6, 6, 3), (4, 9, 5, 0), (5, 9, 0, 0)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("function", "known", "lengths"),
    [
        pytest.param(function, known, lengths, id=f"{name}-{lengths}")
        for name, function, known in functions_of_transformers()
        for lengths in ([WHOLE] if "packed" in name else [WHOLE, *CACHED])  # packed sequences come without a cache
    ],
)
def test_the_mask_is_that_of_transformers(function, known, lengths, padded):
    q_length, kv_length, q_offset, kv_offset = lengths
    real = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1, 1]]).bool() if padded else None
    call = {"batch_size": 2, "mask_function": function, "attention_mask": real}
    call |= {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
    mask = integration.attention_mask(**call)
    expected = masking_utils.sdpa_mask(**call, allow_is_causal_skip=False)
    if mask.real_queries is not None:
        assert torch.equal(mask.real_queries, real[:, q_offset:][:, :q_length])
        expected = expected & mask.real_queries[:, None, :, None]
    assert torch.equal(mask.keep(q_length, kv_length).expand(2, 1, q_length, kv_length), expected)
    assert (mask.dense is None) == known


@may_fall_back
def test_a_users_mask_function_is_not_forgotten(monkeypatch, received):
    eager, swapped = both(llama)
    create = masking_utils.create_causal_mask

    def with_prefix(*args, **kwargs):
        return create(*args, **kwargs, or_mask_function=lambda batch, head, q, k: k < 4)

    monkeypatch.setattr(transformers.models.llama.modeling_llama, "create_causal_mask", with_prefix)
    call = inputs(eager, padding("right"))
    actual, naive = real_outputs(swapped, call), real_outputs(eager, call)
    assert_within_budget({"o": actual}, {"o": naive}, {"o": real_outputs(exact(eager), call)})
    assert all(mask.dense is not None for mask in received)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"head_mask": torch.ones(4)}, "the option head_mask is not supported"),
        ({"indices": torch.ones(1), "cache": object()}, "the option cache, indices is not supported"),
        ({"sliding_window": 2}, "sliding_window=2 came without a mask"),
        ({"cu_seq_lens_q": torch.tensor([0, 1, 3])}, "pass position_ids too"),
        ({"attention_mask": Mask(causal=True), "is_causal": False}, "is_causal=False came with a causal mask"),
    ],
)
def test_options_that_change_the_result_are_refused(options, why):
    q = torch.ones(1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match=why):
        integration.attention_forward(nn.Identity(), q, q, q, **{"attention_mask": None} | options)


def test_options_without_effect_are_ignored():
    q = torch.ones(1, 2, 3, 4)
    options = {
        "use_cache": True,
        "position_ids": torch.arange(3),
        "head_mask": None,
        "cu_seq_lens_q": torch.tensor([0, 3]),
    }
    o, weights = integration.attention_forward(nn.Identity(), q, q, q, None, **options)
    assert torch.equal(o, q.transpose(1, 2))
    assert weights is None


@pytest.mark.parametrize(
    ("module_says", "call_says", "causal"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True)],
)
def test_without_a_mask_the_module_says_whether_it_is_causal(module_says, call_says, causal):
    module = nn.Identity()
    module.is_causal = module_says
    q = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    o, _ = integration.attention_forward(module, q, q, q, None, is_causal=call_says)
    assert torch.equal(o, fastattn.attention(q, q, q, Mask(causal=causal)).transpose(1, 2))


@may_fall_back
def test_dropout_only_in_training():
    _, swapped = both(gpt2)
    call = inputs(swapped, padding("none"))
    assert torch.equal(swapped(**call).logits, swapped(**call).logits)
    for module in swapped.modules():
        if isinstance(module, nn.Dropout) and module is not swapped.transformer.h[0].attn.attn_dropout:
            module.p = 0.0
    swapped.train()
    assert not torch.equal(swapped(**call).logits, swapped(**call).logits)


def test_malformed_masks_are_refused():
    q = torch.ones(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"a 4-D attention_mask must be bool or floating, got torch.int64"):
        integration.attention_forward(nn.Identity(), q, q, q, torch.ones(1, 1, 3, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"attention_mask must be \[B, n\] or \[B, H, n_q, n_k\], got \[1, 3, 3\]"):
        integration.attention_mask(1, 3, 3, attention_mask=torch.ones(1, 3, 3, dtype=torch.bool))


def test_both_functions_are_registered():
    integration.register()
    assert AttentionInterface()["fastattn"] is integration.attention_forward
    assert AttentionMaskInterface()["fastattn"] is integration.attention_mask


def test_the_report_names_attention_modules_inside_a_larger_model():
    model = nn.ModuleDict({"text": bert(), "head": nn.TransformerEncoderLayer(8, 2), "no": nn.Linear(1, 1)})
    report = fastattn.swap(model)
    layers = [f"text.encoder.layer.{i}.attention.self" for i in range(2)]
    assert report.swapped == dict.fromkeys(layers, "BertSelfAttention") | {"head.self_attn": "MultiheadAttention"}
    assert str(report) == "swapped: 2 BertSelfAttention, 1 MultiheadAttention"
    assert fastattn.swap(model).already == dict.fromkeys(layers, "BertSelfAttention") | {
        "head.self_attn": "MultiHeadAttention"
    }
    model["text"].set_attn_implementation("sdpa")
    assert fastattn.swap(model).swapped == dict.fromkeys(layers, "BertSelfAttention")


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_unswap_gives_the_implementation_back(implementation):
    clip = transformers.CLIPConfig(
        text_config=SIZES | {"projection_dim": 16},
        vision_config={**SIZES, "image_size": 8, "patch_size": 4, "projection_dim": 16},
    )
    model = nn.ModuleDict({"clip": transformers.CLIPModel(clip), "bert": bert()})
    for part in model.values():
        part.set_attn_implementation(implementation)
    pretrained = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    saved = [module.config.to_json_string() for module in pretrained]
    for _ in range(2):
        fastattn.swap(model)
    assert {module.config._attn_implementation for module in pretrained} == {"fastattn"}
    assert [module.config.to_json_string() for module in pretrained] == saved  # a saved model does not need fastattn
    fastattn.unswap(model)
    assert {module.config._attn_implementation for module in pretrained} == {implementation}
    assert not any("fastattn" in name for module in model.modules() for name in vars(module))


def test_a_model_with_its_own_attention_is_refused_and_left_alone():
    config = transformers.BloomConfig(vocab_size=99, hidden_size=32, n_layer=1, n_head=4)
    model = nn.ModuleDict({"bloom": transformers.BloomModel(config), "bert": bert()})
    report = fastattn.swap(model)
    assert report.refused == {"bloom": "BloomModel does not use the AttentionInterface of transformers"}
    assert model["bloom"].config._attn_implementation == "eager"
    assert len(report.swapped) == 2


def test_a_model_that_refuses_halfway_is_put_back(monkeypatch):
    config = transformers.CLIPConfig(
        text_config=SIZES | {"projection_dim": 16},
        vision_config={**SIZES, "image_size": 8, "patch_size": 4, "projection_dim": 16},
    )
    model = transformers.CLIPModel(config)

    def refuse(self, *args, **kwargs):
        raise ValueError("the vision tower needs sdpa")

    tower = type(next(m for m in model.vision_model.modules() if isinstance(m, PreTrainedModel)))
    monkeypatch.setattr(tower, "get_correct_attn_implementation", refuse)
    report = fastattn.swap(model)
    assert report == fastattn.SwapReport(refused={"": "the vision tower needs sdpa"})
    assert str(report) == "swapped: nothing\nnot swapped: the model: the vision tower needs sdpa"
    pretrained = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    assert {module.config._attn_implementation for module in pretrained} == {"sdpa"}
