"""The classifier: word embeddings and positions, encoder blocks, and a verdict from the first token alone."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastattn import nn

from ..training import InputError
from .reviews import LABELS
from .tokens import PADDING, SPECIAL, UNKNOWN

MAX_TOKENS = 8192  # of a text, with the classifying one


@dataclass(frozen=True)
class Config:
    """Sizes of the model, and what is dropped while it learns.

    dropout: in the encoder; embedding_dropout: of what goes into it; word_dropout: words that become unknown ones.
    """

    vocabulary: int
    d_model: int = 300
    heads: int = 1
    layers: int = 2
    d_ff: int = 300
    dropout: float = 0.3
    embedding_dropout: float = 0.4
    word_dropout: float = 0.1


class SentimentClassifier(torch.nn.Module):
    """Logits over `LABELS`, from what the encoder makes of the first token of each text.

    The blocks are pre-norm: x + attention(norm(x)), then x + feed_forward(norm(x)); one more norm follows the last.

    Sources:
        Vaswani et al., Attention Is All You Need (2017), for positions added to embeddings times sqrt(d_model);
        Xiong et al., On Layer Normalization in the Transformer Architecture (2020), for pre-norm.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.TokenEmbedding(config.vocabulary, config.d_model, PADDING, scaled=True)
        self.positions = nn.SinusoidalPositions(config.d_model, MAX_TOKENS)
        self.embedding_dropout = torch.nn.Dropout(config.embedding_dropout)
        block = nn.TransformerEncoderLayer(
            config.d_model, config.heads, config.d_ff, config.dropout, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(block, config.layers, norm=torch.nn.LayerNorm(config.d_model))
        self.head = torch.nn.Linear(config.d_model, len(LABELS))

    def embed(self, ids: Tensor) -> Tensor:
        """What goes into the encoder, [B, n, d_model], of token ids [B, n]."""
        if self.training:
            forgotten = torch.rand(ids.shape, device=ids.device) < self.config.word_dropout
            ids = ids.masked_fill(forgotten & (ids >= len(SPECIAL)), UNKNOWN)
        positions = self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.embedding_dropout(self.embedding(ids) + positions)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [B, labels] of token ids [B, n], each row a classifying token, a text, and padding."""
        hidden = self.encoder(self.embed(ids), src_key_padding_mask=ids == PADDING)
        return self.head(hidden[:, 0])


def use_vectors(model: SentimentClassifier, path: Path, vocabulary: dict[str, int]) -> int:
    """Puts the word vectors of a file in the place of the embeddings, and freezes them all; how many words it had.

    Args:
        path: a text file as word2vec, GloVe and fastText write them: a word and its numbers on each line, with or
            without a first line that says how many words and numbers there are.
        vocabulary: words and their ids. Those that the file lacks keep their random vectors.

    Raises:
        InputError: the file is missing or has vectors of another width.
    """
    weight = model.embedding.weight
    found: dict[int, Tensor] = {}
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                word, *numbers = line.rstrip().split(" ")
                if (number == 1 and len(numbers) == 1) or word not in vocabulary:
                    continue
                if len(numbers) != weight.shape[1]:
                    raise InputError(
                        f"vectors must have {weight.shape[1]} numbers each, the model's width, got {len(numbers)} in "
                        f"line {number} of {path}"
                    )
                found.setdefault(vocabulary[word], torch.tensor([float(x) for x in numbers]))
    except (OSError, ValueError) as error:
        raise InputError(f"vectors must be a text file of words and their numbers, got {path}: {error}") from error
    if not found:
        raise InputError(f"vectors must be of words in the reviews, got none of those in {path}")
    with torch.no_grad():
        vectors = torch.stack(list(found.values()))
        # To the size of the embeddings that the model would have begun with.
        weight[list(found)] = vectors / vectors.square().mean().sqrt() * weight.shape[1] ** -0.5
    weight.requires_grad_(False)
    return len(found)


def save(model: SentimentClassifier, path: Path, about: dict) -> None:
    """Weights and sizes in a safetensors file, atomically, with what there is to say `about` it, as JSON has it."""
    temporary = path.with_suffix(".partial")
    described = {"config": asdict(model.config), **about}
    save_file(model.state_dict(), temporary, {name: json.dumps(value) for name, value in described.items()})
    temporary.replace(path)


def load(path: Path) -> tuple[SentimentClassifier, dict]:
    """The model that `save` wrote, in evaluation mode, and what it said about it.

    Raises:
        InputError: the file is missing, damaged, or not one of these.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = {name: json.loads(text) for name, text in (file.metadata() or {}).items()}
            model = SentimentClassifier(Config(**about.pop("config")))
            model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError, json.JSONDecodeError, KeyError, TypeError, RuntimeError) as error:
        raise InputError(f"the model must be a file that training wrote, got {path}: {error}") from error
    return model.eval(), about
