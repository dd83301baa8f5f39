"""Tokenization, from text to token ids with their spans in the text, by the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from ..training import InputError

PADDING, UNKNOWN, CLASSIFY = range(3)
SPECIAL = ["<pad>", "<unk>", "<cls>"]  # their ids are their places here


@dataclass(frozen=True, slots=True)
class Tokens:
    """ids[i] stands for text[spans[i][0] : spans[i][1]]; the classifying token, ids[0], for nothing at the start."""

    ids: list[int]
    spans: list[tuple[int, int]]


def train(texts: Iterable[str], unit: str, size: int, min_frequency: int) -> Tokenizer:
    """A tokenizer whose vocabulary is the most frequent of the texts' tokens, in lower case.

    Args:
        unit: "word": runs of letters and digits, and runs of other signs; "character"; or "subword": pieces of those
            words, or of sentences where no spaces part words, by a unigram language model.
        size: largest number of entries of the vocabulary.
        min_frequency: number of times that a word or character must occur to be an entry.

    Raises:
        InputError: the vocabulary cannot be as small.

    Sources:
        Kudo, Subword Regularization (2018), for "subword".
    """
    words = pre_tokenizers.Whitespace()
    if unit == "subword":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = words
        trainer: trainers.Trainer = trainers.UnigramTrainer(
            vocab_size=size, special_tokens=SPECIAL, unk_token=SPECIAL[UNKNOWN], show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.WordLevel(unk_token=SPECIAL[UNKNOWN]))
        characters = pre_tokenizers.Sequence([words, pre_tokenizers.Split(Regex("."), "isolated")])
        tokenizer.pre_tokenizer = words if unit == "word" else characters
        trainer = trainers.WordLevelTrainer(
            vocab_size=size, min_frequency=min_frequency, special_tokens=SPECIAL, show_progress=False
        )
    # NFKC: the Japanese reports write the same sign in full and half width.
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    try:
        if size < len(SPECIAL):
            raise ValueError(f"{len(SPECIAL)} are special")
        tokenizer.train_from_iterator(texts, trainer)
    except Exception as error:  # the library raises nothing narrower
        raise InputError(f"vocabulary must have room for the tokens of the texts, got {size}: {error}") from error
    return tokenizer


def tokenize(tokenizer: Tokenizer, texts: list[str], max_tokens: int | None = None) -> Iterator[Tokens]:
    """The tokens of each text, the classifying one first.

    A text with more than `max_tokens` is cut in the middle: a review says at its beginning what it is about, and at its
    end what it concludes.

    Sources:
        Sun et al., How to Fine-Tune BERT for Text Classification? (2019), section 5.3.1, for keeping both ends.
    """
    tokenizer.encode_special_tokens = True  # as text: "<pad>" in a review is three tokens like any others
    for first in range(0, len(texts), 1000):  # what the library keeps of a text is a hundred times as large
        for encoding in tokenizer.encode_batch(texts[first : first + 1000], add_special_tokens=False):
            ids, spans = [CLASSIFY, *encoding.ids], [(0, 0), *encoding.offsets]
            if max_tokens is not None and len(ids) > max_tokens:
                tail = (max_tokens - 1) // 2
                head = max_tokens - tail
                ids, spans = ids[:head] + ids[len(ids) - tail :], spans[:head] + spans[len(spans) - tail :]
            yield Tokens(ids, spans)
