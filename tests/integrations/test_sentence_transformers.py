"""sentence-transformers: what `encode` returns is the same, plain and packed, and the report names what was swapped."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from model_cases import calls_seen
from sentence_cases import SENTENCE_TRANSFORMERS, sentence_model
from torch import Tensor, nn

import fastattn
from fastattn.testing import compare

SENTENCES = [
    "a b c",
    "one sentence of more words than the others have, and one more for good measure",
    "",
    "twice",
    "twice",
    *(" ".join("abcdefghij"[:n]) for n in range(1, 10)),
]


def encoded(model: nn.Module, **options: object) -> Tensor:
    return model.encode(SENTENCES, batch_size=4, convert_to_tensor=True, show_progress_bar=False, **options)


def assert_embeddings_are_right(swapped: nn.Module, original: nn.Module, **options: object) -> None:
    """original: with the attention that it has by default."""
    eager, exact = original, copy.deepcopy(original).double()
    SENTENCE_TRANSFORMERS.use_eager(eager)
    SENTENCE_TRANSFORMERS.use_exact(exact)
    error = compare("embeddings", *(encoded(model, **options) for model in (swapped, eager, exact)))
    assert error.right, str(error)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "lasttoken"])
def test_embeddings(pooling, packed):
    torch.manual_seed(0)
    model = sentence_model(pooling).eval()
    swapped = copy.deepcopy(model)
    report = fastattn.swap(swapped, packed=packed)
    assert report.swapped == dict.fromkeys(
        [f"0.model.encoder.layer.{i}.attention.self" for i in range(2)], "BertSelfAttention"
    )
    assert str(report) == "swapped: 2 BertSelfAttention"
    with calls_seen() as calls:
        assert_embeddings_are_right(swapped, model)
    assert calls.backends == {"cpu"}
    if packed:
        assert report.calls.packed > 0
        assert report.calls.packed + report.calls.unpacked.total() == 4  # batches
        assert set(report.calls.unpacked) <= {"the batch has little padding, or none"}


def test_a_cross_encoder(tmp_path):
    from sentence_cases import save_bert
    from sentence_transformers import CrossEncoder

    torch.manual_seed(0)
    save_bert(tmp_path)
    model = CrossEncoder(str(tmp_path), num_labels=1)
    pairs = list(zip(SENTENCES, reversed(SENTENCES), strict=True))
    expected = model.predict(pairs, show_progress_bar=False)
    report = fastattn.swap(model, packed=True)
    assert list(report.swapped.values()) == ["BertSelfAttention"] * 2
    np.testing.assert_allclose(model.predict(pairs, show_progress_bar=False), expected, rtol=1e-4, atol=1e-6)
    assert report.calls.packed > 0
