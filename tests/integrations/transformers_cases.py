"""Families of Hugging Face transformers, each as small as its configuration allows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from operator import attrgetter

import torch
import transformers
from model_cases import PADDINGS, L, Library, ModelCase, RefusedCase, at_real, random_like
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils

VOCABULARY = 99
IMAGE_TOKEN = 2  # `ids` has none


def formula(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | float = 0.0,
    indices: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, Tensor]:
    """Attention in the dtype of the model throughout: eager attention of many models takes its softmax in fp32."""
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores + position_bias
    if attention_mask is not None and attention_mask.is_floating_point():
        scores = scores + attention_mask
    elif attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    if indices is not None:
        scores = scores.masked_fill(
            (indices[:, :, None] != torch.arange(key.shape[2])[:, None]).all(-1)[:, None], -torch.inf
        )
    if s_aux is not None:
        scores = torch.cat([scores, s_aux[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    seen = (scores > -torch.inf).any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~seen, 0), -1).masked_fill(~seen, 0)[..., : key.shape[2]]
    return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), weights


def formula_mask(**call: object) -> Tensor:
    return masking_utils.sdpa_mask(**call | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


AttentionInterface.register("formula", formula)
AttentionMaskInterface.register("formula", formula_mask)
TRANSFORMERS = Library(
    "transformers",
    use_eager=lambda model: model.set_attn_implementation("eager"),
    use_exact=lambda model: model.set_attn_implementation("formula"),
)


def exact(model: PreTrainedModel) -> PreTrainedModel:
    """The model in fp64."""
    model = copy.deepcopy(model).double()
    TRANSFORMERS.use_exact(model)
    return model


def ids(seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, (3, L), generator=torch.Generator().manual_seed(seed))


def masked(real: Tensor | None, name: str = "attention_mask") -> dict[str, Tensor]:
    """How transformers is told of padding: 1 is real."""
    return {} if real is None else {name: real.long()}


def as_encoder(model: PreTrainedModel, real: Tensor | None) -> dict[str, object]:
    return {"input_ids": ids(), **masked(real)}


def as_decoder(model: PreTrainedModel, real: Tensor | None) -> dict[str, object]:
    positions = {} if real is None else {"position_ids": (real.long().cumsum(1) - 1).clamp(min=0)}
    return {"input_ids": ids(), "use_cache": False, **masked(real), **positions}


def mirrored(real: Tensor | None) -> Tensor | None:
    """The padding of the target: another one than that of the source, for as many tokens."""
    return None if real is None else real.flip(1)


def as_seq2seq(model: PreTrainedModel, real: Tensor | None) -> dict[str, object]:
    target = {"decoder_input_ids": ids(2), "use_cache": False, **masked(mirrored(real), "decoder_attention_mask")}
    return {"input_ids": ids(), **masked(real), **target}


Rows = Callable[[Tensor | None], Tensor | None]
"""From the value of `PADDINGS` in a call to which of the rows of an output are real; None is all of them."""


def given(real: Tensor | None) -> Tensor | None:
    return real


def everything(real: Tensor | None) -> None:
    return None


HIDDEN: dict[str, Rows] = {"last_hidden_state": given}
LOGITS: dict[str, Rows] = {"logits": given}
ATTENTIONS: dict[str, Rows] = {"attentions": given}
SEQ2SEQ_ATTENTIONS: dict[str, Rows] = {
    "encoder_attentions": given,
    "decoder_attentions": mirrored,
    "cross_attentions": mirrored,
}


def made(model: str, config: dict[str, object]) -> PreTrainedModel:
    cls = getattr(transformers, model)
    return cls(cls.config_class(**copy.deepcopy(config)))


def transformers_case(
    family: str,
    model: str,
    config: dict[str, object],
    inputs: Callable[[PreTrainedModel, Tensor | None], dict[str, object]],
    *,
    needs: tuple[str, ...] = (),
    paddings: tuple[str, ...] = tuple(PADDINGS),
    outputs: dict[str, Rows] = HIDDEN,
    attentions: dict[str, Rows] = ATTENTIONS,
) -> ModelCase:
    """A case of transformers.

    model: the name of its class, which is imported when it is made.
    config: the arguments of its configuration.
    inputs: (model, real) -> the keyword arguments of its call.
    outputs: what to compare, by name.
    attentions: the same for the weights that `output_attentions` asks for; empty if they are not offered.
    """

    def run(model: PreTrainedModel, real: Tensor | None) -> dict[str, Tensor]:
        output = model(**inputs(model, real))
        return {name: at_real(attrgetter(name)(output), rows(real)) for name, rows in outputs.items()}

    def run_with_weights(model: PreTrainedModel, real: Tensor | None) -> dict[str, Tensor]:
        output = model(**inputs(model, real), output_attentions=True)
        return {
            f"{name}[{i}]": at_real(layer.transpose(1, 2), rows(real))
            for name, rows in attentions.items()
            for i, layer in enumerate(attrgetter(name)(output))
        }

    weights = run_with_weights if attentions else None
    return ModelCase(TRANSFORMERS, family, partial(made, model, config), run, frozenset(needs), paddings, weights)


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
GROUPED = SIZES | TOKENS | {"num_key_value_heads": 2, "head_dim": 8}
# All experts for every token, since which are best may turn on a rounding; and an implementation that knows fp64.
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
WINDOWED = GROUPED | {"sliding_window": 5}
LATENT = {  # keys and values of different width
    "num_key_value_heads": 4, "head_dim": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
    "q_lora_rank": 16, "kv_lora_rank": 16, "n_routed_experts": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
SEQ2SEQ = TOKENS | {"vocab_size": VOCABULARY, "d_model": 32, "decoder_start_token_id": 0}
BART = SEQ2SEQ | {
    f"{side}_{size}": n
    for side in ("encoder", "decoder")
    for size, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 37))
}
BART |= {"activation_function": "gelu"}  # not ReLU, whose gradient turns on a rounding
T5 = SEQ2SEQ | {"d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4, "feed_forward_proj": "gelu"}


def encoder(family: str, name: str, *needs: str, **config: object) -> ModelCase:
    """A case of an encoder that has the parameters of BERT's. name: that of its classes."""
    return transformers_case(family, f"{name}Model", SIZES | TOKENS | config, as_encoder, needs=needs)


def decoder(family: str, name: str, *needs: str, **config: object) -> ModelCase:
    """A case of a decoder that has the parameters of Llama's. name: that of its classes."""
    needs = ("causal", *needs)
    return transformers_case(family, f"{name}ForCausalLM", GROUPED | config, as_decoder, needs=needs, outputs=LOGITS)


def seq2seq(family: str, model: str, config: dict[str, object], *needs: str) -> ModelCase:
    """A case of an encoder with a decoder."""
    outputs = {"last_hidden_state" if model.endswith("Model") else "logits": mirrored}
    options = {"needs": ("causal", *needs), "outputs": outputs, "attentions": SEQ2SEQ_ATTENTIONS}
    return transformers_case(family, model, config, as_seq2seq, **options)


def as_seq2seq_of(name: str, inputs: Callable[[PreTrainedModel], Tensor]) -> Callable[..., dict[str, object]]:
    """The call of a decoder under an encoder whose input `name` has no padding."""

    def call(model: PreTrainedModel, real: Tensor | None) -> dict[str, object]:
        target = {"decoder_input_ids": ids(2), "use_cache": False, **masked(real, "decoder_attention_mask")}
        return {name: inputs(model), **target}

    return call


def image(model: PreTrainedModel) -> Tensor:
    return random_like(model, 3, 3, 8, 8)


def as_vision(model: PreTrainedModel, real: None) -> dict[str, object]:
    return {"pixel_values": image(model)}


def as_image_and_text(model: PreTrainedModel, real: Tensor | None) -> dict[str, object]:
    return {"input_ids": ids(), "pixel_values": image(model), **masked(real)}


def as_speech(model: PreTrainedModel, real: Tensor | None) -> dict[str, object]:
    """Four samples of sound for each frame that the layers see."""
    return {
        "input_values": random_like(model, 3, 4 * L),
        **masked(None if real is None else real.repeat_interleave(4, 1)),
    }


def with_image_tokens(model: PreTrainedModel, real: Tensor | None) -> dict[str, object]:
    """Tokens in the middle stand for the patches of an image."""
    arguments = as_decoder(model, real) | {"pixel_values": image(model)}
    types = torch.zeros_like(arguments["input_ids"])
    types[:, 4:8] = 1
    arguments["input_ids"] = arguments["input_ids"].where(types == 0, IMAGE_TOKEN)
    return arguments if model.config.model_type == "llava" else arguments | {"token_type_ids": types}


def with_patches(model: PreTrainedModel, real: Tensor | None) -> dict[str, object]:
    """One token stands for an image of two by two patches."""
    tokens = ids()
    tokens[:, 4] = IMAGE_TOKEN
    patches = {
        "pixel_values": random_like(model, 3 * 4, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 2, 2]] * 3),
    }
    return {"input_ids": tokens, "use_cache": False, **patches, **masked(real)}


VISION = {k: v for k, v in SIZES.items() if k not in ("vocab_size", "max_position_embeddings")}
VISION |= {"image_size": 8, "patch_size": 4}
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
SWIN = {"image_size": 8, "patch_size": 2, "embed_dim": 16, "num_heads": [2, 2], "window_size": 2}
PATCHES = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4}
PATCHES |= {"spatial_merge_size": 2, "window_size": 8, "fullatt_block_indexes": [1], "out_hidden_size": 32}
ROTARY_3D = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
SPEECH = {"conv_dim": (8,), "conv_kernel": (4,), "conv_stride": (4,), "num_feat_extract_layers": 1}
SPEECH |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False}


def vision(family: str, name: str, *needs: str, **config: object) -> ModelCase:
    """A case of an image encoder that has the parameters of ViT's."""
    options = {"needs": needs, "paddings": ("none",)}
    return transformers_case(family, f"{name}Model", VISION | config, as_vision, **options)


def two_towers(family: str, name: str, *needs: str) -> ModelCase:
    """A case of a text encoder beside an image encoder."""
    width = {"projection_dim": 16}
    config = {"text_config": SIZES | TOKENS | width | {"eos_token_id": 2}, "vision_config": VISION | width}
    rows: dict[str, Rows] = {"text_model_output": given, "vision_model_output": everything}
    return transformers_case(
        family, f"{name}Model", config, as_image_and_text, needs=needs,
        outputs={f"{tower}.last_hidden_state": real for tower, real in rows.items()}
        | {"vision_model_output.pooler_output": everything},
        attentions={f"{tower}.attentions": real for tower, real in rows.items()},
    )  # fmt: skip


def images_and_text(family: str, name: str, *needs: str, **config: object) -> ModelCase:
    """A case of a decoder that reads images among its tokens."""
    towers = {
        "text_config": GROUPED,
        "vision_config": VISION | {"model_type": "siglip_vision_model", "projection_dim": 32, "vision_use_head": False},
        "image_token_index": IMAGE_TOKEN,
    }
    return transformers_case(family, f"{name}Model", towers | config, with_image_tokens, needs=needs)


def speech(family: str, name: str) -> ModelCase:
    """A case of an encoder of sound."""
    return transformers_case(family, f"{name}Model", SIZES | SPEECH, as_speech, paddings=("none", "right"))


CASES = (
    encoder("BERT", "Bert"),
    encoder("RoBERTa", "Roberta"),
    encoder("XLM-RoBERTa", "XLMRoberta"),
    encoder("CamemBERT", "Camembert"),
    encoder("ELECTRA", "Electra", embedding_size=16),
    encoder("ALBERT", "Albert", embedding_size=16),
    encoder("ERNIE", "Ernie"),
    transformers_case(
        "DistilBERT", "DistilBertModel",
        {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}, as_encoder,
    ),
    encoder("ModernBERT", "ModernBert", "window", local_attention=6, global_attn_every_n_layers=2),
    encoder("EuroBERT", "EuroBert", num_key_value_heads=2),
    transformers_case(
        "EmbeddingGemma", "Gemma3TextModel", GROUPED | {"sliding_window": 6, "use_bidirectional_attention": True},
        as_encoder, needs=("dense",),
    ),
    transformers_case("GPT-2", "GPT2LMHeadModel", GPT | TOKENS, as_decoder, needs=("causal",), outputs=LOGITS),
    decoder("GPT-NeoX", "GPTNeoX"),
    decoder("GPT-BigCode", "GPTBigCode"),
    decoder("OPT", "OPT", ffn_dim=48, word_embed_proj_dim=32, activation_function="gelu"),
    decoder("Llama", "Llama"),
    decoder("Mistral", "Mistral", "window", sliding_window=5),
    decoder("Mixtral", "Mixtral", num_local_experts=2, **EXPERTS),
    decoder("Qwen2", "Qwen2"),
    decoder("Qwen3", "Qwen3"),
    decoder("Qwen3-Next", "Qwen3Next", layer_types=["linear_attention", "full_attention"], num_experts=2, **EXPERTS),
    decoder("Qwen3-MoE", "Qwen3Moe", num_experts=2, moe_intermediate_size=16, **EXPERTS),
    decoder("Phi", "Phi"),
    decoder("Phi-3", "Phi3"),
    decoder("Gemma", "Gemma"),
    decoder("Gemma 2", "Gemma2", "window", "softcap", sliding_window=5, attn_logit_softcapping=2.0),
    decoder("Gemma 3", "Gemma3", "window", sliding_window=5),
    decoder("OLMo 2", "Olmo2"),
    decoder("Granite", "Granite"),
    decoder("StarCoder 2", "Starcoder2"),
    decoder("SmolLM 3", "SmolLM3"),
    decoder("Cohere", "Cohere"),
    decoder("Cohere 2", "Cohere2", "window", sliding_window=5),
    decoder("GLM 4", "Glm4"),
    decoder(
        "Llama 4", "Llama4", "dense", attention_chunk_size=5, no_rope_layers=[1, 0], num_local_experts=2, **EXPERTS,
    ),
    decoder("DeepSeek-V3", "DeepseekV3", **LATENT, **EXPERTS),
    decoder("gpt-oss", "GptOss", "window", "sinks", sliding_window=5, num_local_experts=2, **EXPERTS),
    seq2seq("T5", "T5ForConditionalGeneration", T5, "relative_bias"),
    seq2seq("mT5", "MT5ForConditionalGeneration", T5, "relative_bias"),
    transformers_case(
        "T5Gemma", "T5GemmaForConditionalGeneration",
        {"vocab_size": VOCABULARY, "encoder": WINDOWED, "decoder": WINDOWED | {"cross_attention_hidden_size": 32}},
        as_seq2seq, needs=("causal", "window", "softcap"), outputs={"logits": mirrored}, attentions=SEQ2SEQ_ATTENTIONS,
    ),
    seq2seq("BART", "BartForConditionalGeneration", BART),
    seq2seq("mBART", "MBartModel", BART),
    seq2seq("Marian", "MarianModel", BART),
    seq2seq("M2M100, NLLB", "M2M100Model", BART),
    seq2seq("Pegasus", "PegasusModel", BART),
    vision("ViT", "ViT"),
    vision("DeiT", "DeiT"),
    vision("BEiT", "Beit", "bias", use_relative_position_bias=True),
    transformers_case(
        "Swin", "SwinModel", SWIN | {"depths": [1, 2]}, as_vision, needs=("bias",), paddings=("none",)
    ),
    vision("DINOv2", "Dinov2"),
    vision("DINOv2 with registers", "Dinov2WithRegisters"),
    vision("DINOv3", "DINOv3ViT"),
    two_towers("CLIP", "CLIP", "causal"),
    two_towers("SigLIP", "Siglip"),
    images_and_text(
        "LLaVA", "Llava", "causal", vision_config=VISION | {"model_type": "clip_vision_model"}, vision_feature_layer=-1
    ),
    images_and_text(
        "PaliGemma", "PaliGemma", "dense", text_config=GROUPED | {"model_type": "gemma"}, projection_dim=32
    ),
    images_and_text(
        "Gemma 3 with images", "Gemma3", "dense", text_config=GROUPED | {"sliding_window": 5}, mm_tokens_per_image=4
    ),
    transformers_case(
        "Qwen2.5-VL", "Qwen2_5_VLModel",
        {"text_config": GROUPED | ROTARY_3D, "vision_config": PATCHES, "image_token_id": IMAGE_TOKEN},
        with_patches, needs=("causal",),
    ),
    transformers_case(
        "Whisper", "WhisperModel",
        BART | {"num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 64},
        as_seq2seq_of("input_features", lambda model: random_like(model, 3, 4, 16)), needs=("causal",),
        attentions={"encoder_attentions": everything, "decoder_attentions": given, "cross_attentions": given},
    ),
    speech("Wav2Vec2", "Wav2Vec2"),
    speech("HuBERT", "Hubert"),
)  # fmt: skip


GEMMA_4 = decoder(  # its scores have no scale, so that bf16 is far off with whatever attention
    "Gemma 4", "Gemma4", "window", num_hidden_layers=4, num_kv_shared_layers=2, sliding_window=5, global_head_dim=8,
    layer_types=["sliding_attention", "full_attention"] * 2, hidden_size_per_layer_input=8,
)  # fmt: skip
DEEPSEEK_V3_2 = decoder(  # which keys its indexer chooses turns on a rounding, in bf16
    "DeepSeek-V3.2", "DeepseekV32", "dense", index_topk=4, index_n_heads=2, index_head_dim=8, **LATENT, **EXPERTS
)
QWEN_2_MOE = decoder(
    "Qwen2-MoE", "Qwen2Moe", num_experts=2, moe_intermediate_size=16, shared_expert_intermediate_size=16, **EXPERTS
)
BY_FAMILY = {case.family: case for case in CASES}


def with_own_attention(
    family: str,
    model: str,
    config: dict[str, object],
    refused: dict[str, str],
    *,
    inputs: Callable[[PreTrainedModel, Tensor | None], dict[str, object]] = as_encoder,
    rows: Rows = given,
    swapped: tuple[str, ...] = (),
) -> RefusedCase:
    """A case that fastattn does not compute, or not all of it.

    model, config, inputs: as in `transformers_case`.
    rows: which of the output's are real.
    """
    real = None if inputs is as_vision else PADDINGS["right"]

    def run(model: PreTrainedModel) -> Tensor:
        return at_real(model(**inputs(model, real)).last_hidden_state, rows(real))

    return RefusedCase(TRANSFORMERS, family, partial(made, model, config), run, refused, frozenset(swapped))


def whole(model: str) -> dict[str, str]:
    """Why a model that is made of nothing else stays what it is."""
    return {"": f"{model} does not use the AttentionInterface of transformers"}


def parts(attention: str, *names: str) -> dict[str, str]:
    """Why these modules stay what they are."""
    return dict.fromkeys(names, f"{attention} computes its attention by code of its own")


REFUSED = (
    with_own_attention("DeBERTa", "DebertaModel", SIZES | {"relative_attention": True}, whole("DebertaModel")),
    with_own_attention("DeBERTa v2, v3", "DebertaV2Model", SIZES, whole("DebertaV2Model")),
    with_own_attention("YOSO", "YosoModel", SIZES, whole("YosoModel")),
    with_own_attention("MPNet", "MPNetModel", SIZES, whole("MPNetModel")),
    with_own_attention("Longformer", "LongformerModel", SIZES | {"attention_window": 4}, whole("LongformerModel")),
    with_own_attention(
        "XLNet", "XLNetModel", {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
        whole("XLNetModel"),
    ),
    with_own_attention(
        "BLOOM", "BloomModel", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        whole("BloomModel"),
    ),
    with_own_attention("Falcon", "FalconModel", SIZES, whole("FalconModel"), inputs=as_decoder),
    with_own_attention("GPT-J", "GPTJModel", GPT | {"rotary_dim": 8}, whole("GPTJModel"), inputs=as_decoder),
    with_own_attention("Swin v2", "Swinv2Model", SWIN | {"depths": [1, 1]}, whole("Swinv2Model"), inputs=as_vision),
    *(
        with_own_attention(
            family, f"{name}Model", config, parts(own, *(f"encoder.{where.format(i)}" for i in range(2))),
            inputs=as_seq2seq, rows=mirrored, swapped=(swapped,),
        )
        for family, name, config, own, where, swapped in (
            ("LongT5", "LongT5", T5 | {"local_radius": 3}, "LongT5LocalAttention",
             "block.{}.layer.0.LocalSelfAttention", "LongT5Attention"),
            ("BigBird-Pegasus", "BigBirdPegasus", BART | {"attention_type": "original_full"},
             "BigBirdPegasusSelfAttention", "layers.{}.self_attn.self", "BigBirdPegasusDecoderAttention"),
            ("Pegasus-X", "PegasusX", BART | {"block_size": 4, "num_global_tokens": 2},
             "PegasusXGlobalLocalAttention", "layers.{}.self_attn", "PegasusXAttention"),
        )
    ),
    with_own_attention(
        "GIT", "GitModel", SIZES | TOKENS | {"vision_config": VISION},
        parts("GitSelfAttention", *(f"encoder.layer.{i}.attention.self" for i in range(2))), inputs=as_image_and_text,
        rows=lambda real: nn.functional.pad(real, (5, 0), value=True),  # patches, and what stands for the whole image
        swapped=("GitVisionAttention",),
    ),
)  # fmt: skip
