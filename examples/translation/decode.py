"""Sentences from the model, by beam search; a beam of one is greedy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .batches import pad
from .model import Seq2Seq
from .text import EOS, PAD, SOS, Vocabularies

LONGER = 1.5  # a translation has at most this times the tokens of its source, and EXTRA
EXTRA = 10


@torch.inference_mode()
def beam_search(model: Seq2Seq, source: Tensor, beams: int, length_penalty: float) -> list[list[int]]:
    """The best ids found for each source [B, S], without SOS and EOS: the largest sum of log p / length^penalty."""
    B = len(source)
    memory = model.encode(source).repeat_interleave(beams, 0)
    source = source.repeat_interleave(beams, 0)
    ids = torch.full((B * beams, 1), SOS)
    scores = torch.full((B, beams), float("-inf"))
    scores[:, 0] = 0.0
    best: list[tuple[float, list[int]]] = [(float("-inf"), []) for _ in range(B)]
    steps = int((source != PAD).sum(1).max() * LONGER) + EXTRA
    first = torch.arange(B)[:, None] * beams
    for length in range(1, steps + 1):
        logp = model.logits(model.decode(ids, memory, source)[:, -1]).log_softmax(-1)
        logp[:, [PAD, SOS]] = float("-inf")
        ended = (scores + logp[:, EOS].view(B, beams)) / length**length_penalty
        for b, (value, which) in enumerate(zip(*(x.tolist() for x in ended.max(1)), strict=True)):
            if value > best[b][0]:
                best[b] = (value, ids[b * beams + which, 1:].tolist())
        logp[:, EOS] = float("-inf")
        scores, index = (scores.view(-1, 1) + logp).view(B, -1).topk(beams)
        rows = (first + index // logp.shape[1]).flatten()
        ids = torch.cat([ids[rows], (index % logp.shape[1]).flatten()[:, None]], 1)
        ahead = scores[:, 0] / (steps if length_penalty > 0 else length) ** length_penalty
        if all(value >= other for (value, _), other in zip(best, ahead.tolist(), strict=True)):
            break
    return [ids for _, ids in best]


def translate(
    model: Seq2Seq, vocabularies: Vocabularies, sentences: Sequence[str], *, beams: int = 1,
    length_penalty: float = 1.0, batch: int = 64,
) -> list[str]:  # fmt: skip
    """The translations, in order; an empty sentence has an empty one."""
    encoded = [vocabularies.source.encode(sentence) for sentence in sentences]
    order = sorted((i for i, ids in enumerate(encoded) if ids), key=lambda i: len(encoded[i]))
    found = [""] * len(sentences)
    device = next(model.parameters()).device
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        source = pad([[*encoded[i], EOS] for i in chosen]).to(device)
        for i, ids in zip(chosen, beam_search(model, source, beams, length_penalty), strict=True):
            found[i] = vocabularies.target.decode(ids)
    return found
