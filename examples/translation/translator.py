"""A trained model with its vocabularies, which translates, and its files in the folder of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from sacrebleu.metrics.bleu import BLEU, BLEUScore
from torch import Tensor

import fastattn.nn

from ..training import InputError, write_json
from .batches import pad
from .text import EOS, SOS, Vocabularies


@dataclass(frozen=True)
class Translator:
    """Translates sentences by a trained model.

    model: reads ids of `vocabularies.source`, writes ids of `vocabularies.target`.
    """

    model: fastattn.nn.Seq2SeqModel
    vocabularies: Vocabularies

    def save(self, folder: Path) -> None:
        """Writes `model.safetensors` and `vocabulary.json`."""
        write_json(folder / "vocabulary.json", self.vocabularies.to_json())
        fastattn.nn.save(self.model, folder / "model.safetensors")

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu") -> Translator:
        """A translator from the files that `save` has written.

        Raises:
            InputError: the folder has no model, or a damaged one.
        """
        folder = Path(folder)
        try:
            vocabularies = Vocabularies.from_json(json.loads((folder / "vocabulary.json").read_text(encoding="utf-8")))
            model = load_model(folder / "model.safetensors")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{folder} must hold a trained model, got {error}") from error
        sizes = model.config.vocab_size, model.config.tgt_vocab_size or model.config.vocab_size
        if (found := (len(vocabularies.source), len(vocabularies.target))) != sizes:
            raise InputError(f"{folder} must hold vocabularies of {sizes} tokens like its model, got {found}")
        return cls(model.to(device).eval(), vocabularies)

    @torch.inference_mode()
    def translate(
        self,
        sentences: Sequence[str],
        *,
        num_beams: int = 1,
        length_penalty: float = 1.0,
        batch_size: int = 64,
        advance: Callable[[int], None] = lambda done: None,
    ) -> list[str]:
        """The translations, in the order of the sentences; that of an empty sentence is empty.

        Args:
            num_beams: 1 is greedy.
            length_penalty: above 0 prefers long translations; without effect if greedy.
            batch_size: number of sentences, of about the same length, that are translated together.
            advance: called after each batch with the number of sentences that are done.

        Raises:
            InputError: a sentence has more tokens than the model has positions.
        """
        encoded = [self.vocabularies.source.encode(sentence) for sentence in sentences]
        positions = self.model.config.max_length
        for number, ids in enumerate(encoded, 1):
            if len(ids) >= positions:
                raise InputError(f"sentence {number} must have fewer than {positions} tokens, got {len(ids)}")
        generate = partial(
            self.model.generate, decoder_start_token_id=SOS, eos_token_id=EOS, num_beams=num_beams,
            length_penalty=length_penalty,
        )  # fmt: skip
        device = next(self.model.parameters()).device
        return translated(
            lambda source: generate(source, max_new_tokens=min(most_tokens(source.shape[1]), positions)),
            encoded, self.vocabularies.target.decode, device, batch_size, advance,
        )  # fmt: skip


def translated(
    generate: Callable[[Tensor], Tensor],
    sources: Sequence[list[int]],
    decode: Callable[[list[int]], str],
    device: torch.device,
    batch_size: int = 64,
    advance: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """The translations of token ids, in their order; that of an empty sentence is empty.

    Args:
        generate: from sources [B, n], each of which ends with EOS, to the tokens of their translations.
        batch_size, advance: as in `Translator.translate`.
    """
    order = sorted((i for i, ids in enumerate(sources) if ids), key=lambda i: len(sources[i]))
    translations = [""] * len(sources)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        written = generate(pad([[*sources[i], EOS] for i in chosen]).to(device))
        for i, row in zip(chosen, written.tolist(), strict=True):
            translations[i] = decode(row[: row.index(EOS)] if EOS in row else row)
        advance(start + len(chosen))
    return translations


def load_model(path: Path) -> fastattn.nn.Seq2SeqModel:
    """The model in a file that `fastattn.nn.save` has written.

    Raises:
        OSError, ValueError: the file is missing or damaged, or has another kind of model.
    """
    model = fastattn.nn.load(path)
    if not isinstance(model, fastattn.nn.Seq2SeqModel):
        raise ValueError(f"{path} must be of a Seq2SeqModel, got a {type(model).__name__}")
    return model


def most_tokens(source_length: int) -> int:
    """The largest number of tokens of a translation: 1.5 times those of the source, and 10 more."""
    return source_length * 3 // 2 + 10


def bleu(translations: Sequence[str], references: Sequence[str], *, lowercase: bool) -> tuple[BLEUScore, str]:
    """sacrebleu's score, with its default tokenizer, and the signature that says how it was computed."""
    metric = BLEU(lowercase=lowercase)
    score = metric.corpus_score(list(translations), [list(references)])
    return score, str(metric.get_signature())
