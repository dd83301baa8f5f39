"""Sentence pairs as tensors: batches of pairs of like length, each of about as many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .text import EOS, PAD, SOS, Vocabularies

Pair = tuple[list[int], list[int]]


class Batch(NamedTuple):
    """A batch of sentence pairs, padded with `PAD` on the right.

    source: int64 [B, S], each sentence with `EOS` at its end.
    target_in: int64 [B, T], each sentence with `SOS` at its beginning: the input of the decoder.
    target_out: int64 [B, T], each sentence with `EOS` at its end: the tokens that it has to predict.
    """

    source: Tensor
    target_in: Tensor
    target_out: Tensor

    def to(self, device: torch.device | str) -> Batch:
        return Batch(*(x.to(device) for x in self))


def encode(pairs: Sequence[tuple[str, str]], vocabularies: Vocabularies, max_length: int) -> list[Pair]:
    """The ids of the pairs; a pair with a side that is empty or has more than `max_length` tokens is left out."""
    encoded = ((vocabularies.source.encode(source), vocabularies.target.encode(target)) for source, target in pairs)
    return [pair for pair in encoded if all(0 < len(side) <= max_length for side in pair)]


def collate(pairs: Sequence[Pair]) -> Batch:
    """One batch of the pairs, in their order."""
    return Batch(
        pad([[*source, EOS] for source, _ in pairs]),
        pad([[SOS, *target] for _, target in pairs]),
        pad([[*target, EOS] for _, target in pairs]),
    )


def pad(sentences: Sequence[Sequence[int]]) -> Tensor:
    """The sentences as int64 [B, L], padded on the right to the longest one."""
    longest = max(map(len, sentences))
    return torch.tensor([[*sentence, *[PAD] * (longest - len(sentence))] for sentence in sentences])


def bucketed(pairs: Sequence[Pair], tokens: int, generator: torch.Generator | None = None) -> list[list[int]]:
    """The indices of the pairs of each batch: every pair once, pairs of about the same length together.

    Args:
        tokens: most tokens of a batch on either side, padding, `SOS` and `EOS` included; a pair that is longer is a
            batch of its own.
        generator: the generator that shuffles pairs of the same length, and the batches; without one the batches are in
            the order of their lengths.
    """
    order = range(len(pairs)) if generator is None else torch.randperm(len(pairs), generator=generator).tolist()
    order = sorted(order, key=lambda i: (len(pairs[i][1]), len(pairs[i][0])))
    batches: list[list[int]] = []
    longest = 0
    for i in order:
        longest = max(longest, 1 + max(map(len, pairs[i])))
        if not batches or (len(batches[-1]) + 1) * longest > tokens:
            batches.append([])
            longest = 1 + max(map(len, pairs[i]))
        batches[-1].append(i)
    if generator is None:
        return batches
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
