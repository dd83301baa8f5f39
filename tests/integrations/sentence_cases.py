"""Models of sentence-transformers around a small random BERT."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import transformers
from model_cases import PADDINGS, Library, ModelCase, at_real
from torch import Tensor, nn
from transformers_cases import SIZES, TRANSFORMERS, ids, masked

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def save_bert(folder: Path) -> None:
    """Writes a small random BERT and its tokenizer, of single letters, into this folder."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(folder)


def sentence_model(pooling: str = "mean") -> nn.Module:
    """pooling: "mean", "cls", "max", ..., as sentence-transformers names them."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    with tempfile.TemporaryDirectory() as folder:
        save_bert(Path(folder))
        bert = Transformer(folder)
    return SentenceTransformer(modules=[bert, Pooling(SIZES["hidden_size"], pooling_mode=pooling), Normalize()])


def embedded(model: nn.Module, real: Tensor | None) -> dict[str, Tensor]:
    attended = torch.ones(ids().shape, dtype=torch.bool) if real is None else real
    output = model({"input_ids": ids(), **masked(attended)})
    return {
        "sentence_embedding": output["sentence_embedding"],
        "token_embeddings": at_real(output["token_embeddings"], real),
    }


SENTENCE_TRANSFORMERS = Library(
    "sentence-transformers",
    use_eager=lambda model: TRANSFORMERS.use_eager(model[0].model),
    use_exact=lambda model: TRANSFORMERS.use_exact(model[0].model),
)
CASES = (ModelCase(SENTENCE_TRANSFORMERS, "BERT", sentence_model, embedded, paddings=tuple(PADDINGS)),)
