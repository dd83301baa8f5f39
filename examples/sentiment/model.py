"""The classifier, pre-trained word vectors, and the folder of a trained model."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from fastattn import nn

from ..training import InputError, write_json
from .reviews import CORPORA, LABELS
from .tokens import PADDING

MAX_TOKENS = 8192  # of a text, with the classifying one
MODEL, TOKENIZER, ABOUT = "model.safetensors", "tokenizer.json", "about.json"  # in the folder of a run


def build(vocabulary: int, **sizes: Any) -> nn.SequenceClassifier:
    """A classifier of texts by the output of pre-norm encoder layers for the first token.

    Sinusoidal positions are added to embeddings times sqrt(d_model).

    Args:
        vocabulary: number of token ids.
        sizes: d_model, nhead, num_layers, dim_feedforward and dropout, as in `TransformerConfig`.

    Raises:
        InputError: a size is not one that a Transformer can have.
    """
    try:
        config = nn.TransformerConfig(vocabulary, **sizes, norm_first=True, max_length=MAX_TOKENS, padding_idx=PADDING)
    except ValueError as error:
        raise InputError(str(error)) from error
    return nn.SequenceClassifier(config, len(LABELS))


def use_vectors(model: nn.SequenceClassifier, path: Path, vocabulary: dict[str, int]) -> int:
    """Replaces embeddings by the word vectors of a file, freezes all embeddings, and returns the number of words found.

    Args:
        path: a text file as word2vec, GloVe and fastText write them: a word and its numbers on each line, with or
            without a first line that says how many words and numbers there are.
        vocabulary: words and their ids. Those that the file lacks keep their random vectors.

    Raises:
        InputError: the file is missing, or has vectors of another width or of none of the words.
    """
    weight = model.embedding.weight
    vectors_by_id: dict[int, Tensor] = {}
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                word, *numbers = line.rstrip().split(" ")
                if (number == 1 and len(numbers) == 1) or word not in vocabulary:
                    continue
                if len(numbers) > weight.shape[1] and not _is_number(numbers[-weight.shape[1] - 1]):
                    continue  # a word with spaces in it, as GloVe has some, and no vocabulary
                if len(numbers) != weight.shape[1]:
                    raise InputError(
                        f"vectors must have {weight.shape[1]} numbers each, the model's width, got {len(numbers)} in "
                        f"line {number} of {path}"
                    )
                vectors_by_id.setdefault(vocabulary[word], torch.tensor([float(x) for x in numbers]))
    except (OSError, ValueError) as error:
        raise InputError(f"vectors must be a text file of words and their numbers, got {path}: {error}") from error
    if not vectors_by_id:
        raise InputError(f"vectors must be of words in the reviews, got none of those in {path}")
    with torch.no_grad():
        vectors = torch.stack(list(vectors_by_id.values()))
        # To the size of the embeddings that the model would have begun with.
        weight[list(vectors_by_id)] = vectors / vectors.square().mean().sqrt() * weight.shape[1] ** -0.5
    weight.requires_grad_(False)
    return len(vectors_by_id)


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        float(text)
        return True
    return False


def save(model: nn.SequenceClassifier, tokenizer: Tokenizer, folder: Path, about: dict[str, Any]) -> None:
    """Writes the model, the tokenizer, and then `about` as JSON; each file appears whole or not at all."""
    part = folder / f"{TOKENIZER}.partial"
    tokenizer.save(str(part))
    part.replace(folder / TOKENIZER)
    nn.save(model, folder / MODEL)
    write_json(folder / ABOUT, about)


def about(folder: Path) -> dict[str, Any] | None:
    """The content of `about` that `save` wrote into this folder; None if there is none.

    Raises:
        InputError: the file is damaged.
    """
    try:
        said: dict[str, Any] = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        _ = CORPORA[said["corpus"]], said["seed"], said["epoch"], said["held_out_accuracy"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / ABOUT} must be a file that training wrote: {error!r}") from error
    return said


def load(folder: Path) -> tuple[nn.SequenceClassifier, Tokenizer, dict[str, Any]]:
    """The model that training wrote into this folder, in evaluation mode, its tokenizer, and its `about`.

    Raises:
        InputError: a file is missing or damaged, or they do not belong together.
    """
    said = about(folder)
    if said is None:
        raise InputError(f"model must be the folder of a trained model, got {folder}, which has no {ABOUT}")
    try:
        model = nn.load(folder / MODEL)
    except (OSError, ValueError) as error:
        raise InputError(f"model must be the folder of a trained model: {error}") from error
    if not isinstance(model, nn.SequenceClassifier):
        raise InputError(f"model must be the folder of a trained classifier, got a {type(model).__name__} in {folder}")
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:  # the library raises nothing narrower
        raise InputError(f"{folder / TOKENIZER} must be the tokenizer that training wrote: {error}") from error
    if tokenizer.get_vocab_size() != model.config.vocab_size:
        raise InputError(
            f"{folder / TOKENIZER} must have {model.config.vocab_size} tokens like the model, "
            f"got {tokenizer.get_vocab_size()}"
        )
    return model.eval(), tokenizer, said
