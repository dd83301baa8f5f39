"""Embeddings and positions, beside their formulas."""

from __future__ import annotations

import math

import peft
import pytest
import torch

from fastattn.nn import (
    LanguageModel,
    LearnedPositions,
    RotaryPositions,
    SinusoidalPositions,
    TokenEmbedding,
    TransformerConfig,
    TransformerEncoder,
    TransformerEncoderLayer,
)


@pytest.mark.parametrize("d_model", [6, 7])
def test_sinusoidal_positions_are_those_of_the_paper(d_model):
    table = SinusoidalPositions(d_model, max_length=40)(torch.arange(40))
    for position in (0, 1, 2, 39):
        for column in range(d_model):
            angle = position / 10000 ** (2 * (column // 2) / d_model)
            expected = math.sin(angle) if column % 2 == 0 else math.cos(angle)
            assert table[position, column].item() == pytest.approx(expected, abs=1e-6)


def test_the_position_of_padding_is_zero():
    positions = SinusoidalPositions(8, padding_idx=0)
    encoded = positions(torch.tensor([[0, 1], [2, 0]]))
    assert encoded.shape == (2, 2, 8)
    assert (encoded[0, 0] == 0).all()
    assert (encoded[1, 1] == 0).all()
    assert torch.equal(encoded[0, 1], SinusoidalPositions(8)(torch.tensor(1)))
    assert positions.state_dict() == {}


@pytest.mark.parametrize("module", [RotaryPositions(4), SinusoidalPositions(4), LearnedPositions(4)], ids=str)
def test_what_is_no_position_is_refused(module):
    with pytest.raises(TypeError, match="positions must be a Tensor, got list"):
        module([0, 1])
    with pytest.raises(ValueError, match=r"positions must be int32 or int64, got torch\.float32"):
        module(torch.ones(2))


def test_a_rotation_is_of_rows_of_tokens():
    with pytest.raises(ValueError, match=r"positions must be \[N, L\] or \[L\], got \[\]"):
        RotaryPositions(4)(torch.tensor(3))


def test_layers_with_rotary_positions_compile():
    encoder = TransformerEncoder(
        TransformerEncoderLayer(16, 2, 16, 0.0, batch_first=True), 1, rotary=RotaryPositions(8, 9)
    )
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(torch.compile(encoder, backend="eager", fullgraph=True)(x), encoder(x))


def test_embeddings_are_scaled_and_padding_stays_zero():
    torch.manual_seed(0)
    ids = torch.tensor([[3, 0]])
    plain = TokenEmbedding(1000, 64, padding_idx=0)
    scaled = TokenEmbedding(1000, 64, padding_idx=0, scaled=True)
    scaled.load_state_dict(plain.state_dict())
    assert torch.equal(scaled(ids), 8 * plain(ids))
    assert plain.weight[1:].std().item() == pytest.approx(1 / 8, rel=0.02)
    assert (plain.weight[0] == 0).all()
    scaled(ids).sum().backward()
    assert (scaled.weight.grad[0] == 0).all()
    assert (scaled.weight.grad[3] == 8).all()


def test_the_table_has_the_digits_of_its_dtype():
    """Whatever dtypes it had before, since no state_dict repairs it."""
    module, positions = SinusoidalPositions(6, 4), torch.arange(4)
    expected = {dtype: SinusoidalPositions(6, 4, dtype=dtype).table for dtype in (torch.float64, torch.float32)}
    for dtype in (torch.float32, torch.float64):
        module.bfloat16().to(dtype)
        assert torch.equal(module(positions), expected[dtype])


@pytest.mark.parametrize("assign", [False, True])
def test_the_table_of_a_module_from_the_meta_device_is_computed(assign):
    with torch.device("meta"):
        module = SinusoidalPositions(6, 4, padding_idx=0, dtype=torch.float64)
    if not assign:
        module.to_empty(device="cpu")
    module.load_state_dict({}, assign=assign)
    expected = SinusoidalPositions(6, 4, padding_idx=0, dtype=torch.float64)
    assert torch.equal(module(torch.arange(4)), expected(torch.arange(4)))


IDS = torch.tensor([[1, 2, 3, 4]])


def language_model(**options: object) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(TransformerConfig(vocab_size=9, d_model=64, nhead=2, num_layers=1, **options)).eval()


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary"])
def test_a_model_computes_in_the_dtype_that_its_weights_have_in_a_call(positions):
    """As under the mixed precision of FSDP, which casts parameters, and not buffers."""
    model = language_model(positions=positions)
    halves = {name: weight.bfloat16() for name, weight in model.named_parameters()}
    logits = torch.func.functional_call(model, halves, (IDS,))
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), model(IDS), rtol=0, atol=0.1)


def test_adapters_of_a_scaled_embedding_are_scaled_too():
    model = language_model(tie_embeddings=False)
    expected = model(IDS)
    tokens = peft.TrainableTokensConfig(target_modules=["embedding"], token_indices=[1])
    torch.testing.assert_close(peft.get_peft_model(model, tokens)(IDS), expected)
    weights = peft.LoraConfig(r=2, target_modules=["embedding"], init_lora_weights=False)
    adapted = peft.get_peft_model(language_model(tie_embeddings=False), weights).eval()
    expected = adapted(IDS)
    adapted.merge_adapter()
    torch.testing.assert_close(adapted(IDS), expected)
