"""Modules that torch.nn builds on its attention."""

from __future__ import annotations

from collections.abc import Callable

from model_cases import PADDINGS, L, Library, ModelCase, at_real, random_like
from torch import Tensor, nn
from vision_cases import write_attention_out

E = 32
LAYER = {"d_model": E, "nhead": 4, "dim_feedforward": 48, "batch_first": True}
LAYER |= {"activation": "gelu"}  # a gradient that jumps, as relu's does, makes errors in bf16 a matter of luck
TORCH = Library("torch.nn", write_attention_out, write_attention_out)


def hidden(real: Tensor | None) -> Tensor | None:
    """How torch is told of padding: True is none."""
    return None if real is None else ~real


def later(model: nn.Module) -> Tensor:
    """The causal mask, of torch's polarity and in the dtype of the model."""
    return nn.Transformer.generate_square_subsequent_mask(L, dtype=next(model.parameters()).dtype)


def attention(model: nn.MultiheadAttention, real: Tensor | None) -> dict[str, Tensor]:
    x = random_like(model, 3, L, E)
    return {"output": at_real(model(x, x, x, key_padding_mask=hidden(real), need_weights=False)[0], real)}


def attention_weights(model: nn.MultiheadAttention, real: Tensor | None) -> dict[str, Tensor]:
    x = random_like(model, 3, L, E)
    return {"weights": at_real(model(x, x, x, key_padding_mask=hidden(real))[1], real)}


def encoded(model: nn.TransformerEncoder, real: Tensor | None) -> dict[str, Tensor]:
    return {"output": at_real(model(random_like(model, 3, L, E), src_key_padding_mask=hidden(real)), real)}


def decoded(model: nn.TransformerDecoder, real: Tensor | None) -> dict[str, Tensor]:
    x, memory = random_like(model, 2, 3, L, E)
    masks = {"tgt_mask": later(model), "tgt_key_padding_mask": hidden(real), "memory_key_padding_mask": hidden(real)}
    return {"output": at_real(model(x, memory, **masks), real)}


def translated(model: nn.Transformer, real: Tensor | None) -> dict[str, Tensor]:
    source, target = random_like(model, 2, 3, L, E)
    masks = {"tgt_mask": later(model), "src_key_padding_mask": hidden(real), "memory_key_padding_mask": hidden(real)}
    return {"output": at_real(model(source, target, tgt_key_padding_mask=hidden(real), **masks), real)}


def encoder(norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(**LAYER, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def decoder() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(**LAYER), 2)


def transformer() -> nn.Module:
    return nn.Transformer(**LAYER, num_encoder_layers=1, num_decoder_layers=1)


def torch_case(name: str, make: Callable, run: Callable, **options: object) -> ModelCase:
    return ModelCase(TORCH, name, make, run, **{"paddings": tuple(PADDINGS)} | options)


# Padding is packed, as documents. Where it comes first, a causal query sees nothing, and torch's own answer is NaN.
CAUSAL = {"needs": frozenset({"causal", "segment_ids"}), "paddings": ("none", "right")}

CASES = (
    torch_case(
        "MultiheadAttention",
        lambda: nn.MultiheadAttention(E, 4, batch_first=True),
        attention,
        run_with_weights=attention_weights,
    ),
    torch_case("TransformerEncoder", lambda: encoder(norm_first=False), encoded),
    torch_case("TransformerEncoder, norm first", lambda: encoder(norm_first=True), encoded),
    torch_case("TransformerDecoder", decoder, decoded, **CAUSAL),
    torch_case("Transformer", transformer, translated, **CAUSAL),
)
