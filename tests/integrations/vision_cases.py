"""Models of timm, torchvision and open_clip, each as small as its constructor allows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import open_clip
import timm
import torch
import torchvision
from model_cases import Library, ModelCase, RefusedCase, random_like
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

CLASSES = 7


class Formula(TorchFunctionMode):
    """While it is entered, scaled_dot_product_attention is its own definition."""

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return formula(*args, **(kwargs or {}))


def formula(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0) -> Tensor:
    assert dropout_p == 0
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores if attn_mask is None else scores + attn_mask
    return scores.softmax(-1) @ v


def in_formula(forward: Callable, *args: object, **kwargs: object) -> object:
    with Formula():
        return forward(*args, **kwargs)


def write_attention_out(model: nn.Module) -> None:
    """Sets every attention in the model to what its library writes out as products and a softmax."""
    for module in model.modules():
        if hasattr(module, "fused_attn"):  # timm's
            module.fused_attn = False
        if hasattr(module, "use_fsdpa"):  # open_clip's own code for this fails
            module.forward = partial(in_formula, module.forward)
        if isinstance(module, nn.MultiheadAttention):
            module.register_forward_pre_hook(with_weights, with_kwargs=True)


def with_weights(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The same call of nn.MultiheadAttention on the path that has the weights in memory."""
    return args, kwargs | {"need_weights": True}


def images(model: nn.Module, size: int = 32) -> Tensor:
    return random_like(model, 2, 3, size, size)


def classified(model: nn.Module, real: None) -> dict[str, Tensor]:
    return {"logits": model(images(model))}


def timm_case(family: str, make: Callable[[], nn.Module], needs: tuple[str, ...] = ()) -> ModelCase:
    return ModelCase(TIMM, family, make, classified, frozenset(needs))


def created(name: str, **options: object) -> Callable[[], nn.Module]:
    return partial(timm.create_model, name, num_classes=CLASSES, **options)


TIMM = Library("timm", write_attention_out, write_attention_out)
TORCHVISION = Library("torchvision", write_attention_out, write_attention_out)
OPEN_CLIP = Library("open_clip", write_attention_out, write_attention_out)

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
STAGES = {"img_size": 32, "patch_size": 4, "embed_dim": 16, "depths": (2, 1), "num_heads": (2, 4), "window_size": 4}
STAGES |= {"num_classes": CLASSES}


CLIP = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 32, "head_width": 8, "layers": 2},
    "text_cfg": {"context_length": 12, "vocab_size": 99, "width": 32, "heads": 4, "layers": 2},
}


def clip(model: type[nn.Module] = open_clip.CLIP, **options: object) -> nn.Module:
    """options: of both towers."""
    return model(**CLIP | {tower: CLIP[tower] | options for tower in ("vision_cfg", "text_cfg")})


def coca() -> nn.Module:
    """With a decoder of text, whose cross-attention reads what attention pools from the image."""
    pooled = {"attentional_pool": True, "attn_pooler_heads": 4, "attn_pooler_queries": 5}
    tokens = {"output_tokens": True}
    return open_clip.coca_model.CoCa(
        embed_dim=32,
        vision_cfg=CLIP["vision_cfg"] | pooled | tokens,
        text_cfg=CLIP["text_cfg"] | {"embed_cls": True} | tokens,
        multimodal_cfg=CLIP["text_cfg"],
    )


def text(length: int) -> Tensor:
    """The second one is padded by three tokens."""
    ids = torch.randint(1, 99, (2, length), generator=torch.Generator().manual_seed(1))
    ids[1, -3:] = 0
    return ids


def both_towers(model: nn.Module, real: None) -> dict[str, Tensor]:
    image_features, text_features, _ = model(images(model), text(12))
    return {"image_features": image_features, "text_features": text_features}


def captioned(model: nn.Module, real: None) -> dict[str, Tensor]:
    outputs = model(images(model), text(11))  # and one more for the class token
    return {name: outputs[name] for name in ("image_features", "text_features", "logits")}


CASES = (
    timm_case("ViT", created("vit_tiny_patch16_224", **VIT)),
    timm_case("DeiT, distilled", created("deit_tiny_distilled_patch16_224", **VIT)),
    timm_case("SigLIP's ViT", created("vit_base_patch16_siglip_224", **VIT)),
    timm_case("ViT with relative positions", created("vit_relpos_small_patch16_224", **VIT), ("bias",)),
    timm_case("BEiT", created("beit_base_patch16_224", **VIT), ("bias",)),
    timm_case("EVA-02", created("eva02_tiny_patch14_224", **VIT)),
    timm_case("XCiT", created("xcit_nano_12_p16_224", **VIT | {"patch_size": 16, "img_size": 64})),
    timm_case(
        "SAM's image encoder",
        partial(
            timm.models.VisionTransformerSAM, **VIT, window_size=2, global_attn_indexes=(1,), use_rel_pos=True,
            use_abs_pos=True, neck_chans=8, num_classes=CLASSES,
        ),
        ("bias",),
    ),
    timm_case("Swin", partial(timm.models.SwinTransformer, **STAGES, drop_path_rate=0.0), ("bias",)),  # with shifts
    timm_case(
        "TinyViT",
        partial(
            timm.models.TinyVit, embed_dims=(8, 16), depths=(1, 2), num_heads=(2, 2), window_sizes=(4, 4),
            num_classes=CLASSES,
        ),
        ("bias",),
    ),
    timm_case(
        "Hiera",  # with windows in its first stage and the whole image in the second
        partial(
            timm.models.Hiera, img_size=(32, 32), embed_dim=16, num_heads=2, stages=(1, 2), q_pool=1,
            mask_unit_size=(4, 4), mask_unit_attn=(True, False), patch_kernel=(4, 4), patch_stride=(4, 4),
            patch_padding=(0, 0), num_classes=CLASSES,
        ),
    ),
    ModelCase(
        TORCHVISION, "ViT",
        partial(torchvision.models.VisionTransformer, 32, 8, 2, 4, hidden_dim=32, mlp_dim=48, num_classes=CLASSES),
        classified,
    ),
    ModelCase(OPEN_CLIP, "CLIP", clip, both_towers, frozenset({"causal"})),
    ModelCase(
        OPEN_CLIP, "CLIP with its own attention",  # in place of torch's
        partial(clip, open_clip.CustomTextCLIP, qk_norm=True, scale_heads=True, scale_attn_inner=True), both_towers,
        frozenset({"bias"}),
    ),
    ModelCase(OPEN_CLIP, "CoCa", coca, captioned, frozenset({"causal", "dense"})),
)  # fmt: skip
REFUSED = tuple(
    RefusedCase(
        TIMM, family, make, lambda model: model(images(model)),
        dict.fromkeys(names, f"timm.models.{attention} computes attention by code of its own"), frozenset(swapped),
    )
    for family, make, names, attention, swapped in (
        ("CaiT", created("cait_xxs24_224", **VIT), ("blocks.0.attn", "blocks.1.attn"), "cait.TalkingHeadAttn",
         {"ClassAttn"}),
        ("Swin v2", partial(timm.models.SwinTransformerV2, **STAGES),
         [f"layers.{place}.attn" for place in ("0.blocks.0", "0.blocks.1", "1.blocks.0")],
         "swin_transformer_v2.WindowAttention", ()),
    )
)  # fmt: skip
