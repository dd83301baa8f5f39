"""The attention that the classifying token pays each token of a text, of each layer and head, and rolled out.

Everything here takes memory in proportion to the text: of the n x n weights of a head only the classifying token's row
is ever computed, and the rolled-out rows are products with those weights that the fused backward pass makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import fastattn


@dataclass(frozen=True)
class Evidence:
    """The evidence for the verdict on a text of n tokens, the classifying one first; every row sums to 1.

    probabilities: the probability of each label.
    raw: [layers, H, n], the classifying token's row of each head's weights.
    rolled: [layers, n]. rolled[l] is the share of each token in the verdict at the input of layer l; rolled[0] is that
        of the embeddings themselves.
    """

    probabilities: Tensor
    raw: Tensor
    rolled: Tensor

    def views(self) -> list[View]:
        """All rows, each under a name: rolled out first, then each head of each layer."""
        layers, heads, _ = self.raw.shape
        return [
            View("rolled out, " + (f"layers {layer + 1} to {layers}" if layer + 1 < layers else f"layer {layers}"), row)
            for layer, row in enumerate(self.rolled)
        ] + [
            View(f"raw, layer {layer + 1}" + (f", head {head + 1}" if heads > 1 else ""), self.raw[layer, head])
            for layer in range(layers)
            for head in range(heads)
        ]

    def on_text(self, spans: list[tuple[int, int]]) -> tuple[Evidence, list[tuple[int, int]]]:
        """The evidence for the parts of the text that the tokens stand for, and the spans of those parts.

        Tokens that share a character of the text, as the three tokens of "㈱", become one part with their sum.
        """
        parts, part_of_token = [spans[0]], [0]
        for start, stop in spans[1:]:
            start = max(start, parts[-1][1])
            if start < stop:
                parts.append((start, stop))
            part_of_token.append(len(parts) - 1)
        index = torch.tensor(part_of_token, device=self.raw.device)

        def summed(rows: Tensor) -> Tensor:
            return rows.new_zeros(*rows.shape[:-1], len(parts)).index_add(-1, index, rows)

        return Evidence(self.probabilities, summed(self.raw), summed(self.rolled)), parts


class View(NamedTuple):
    """A row of weights [n] to shade a text by."""

    name: str
    weights: Tensor

    def shades(self) -> Tensor:
        """[n], from 0 to 1: the weights over the largest that a token of the text has; the classifying token's is 0.

        In a roll-out that one keeps at least 1 / 2**layers of all weight, which would leave the text pale.
        """
        of_text = self.weights.clone()
        of_text[0] = 0
        return of_text / of_text.max().clamp_min(torch.finfo(of_text.dtype).tiny)

    def strongest(self, count: int) -> list[int]:
        """The indices of the text's tokens with the most weight, in descending order."""
        return (1 + self.weights[1:].topk(min(count, len(self.weights) - 1)).indices).tolist()


@torch.no_grad()
def collect(model: fastattn.nn.SequenceClassifier, ids: Tensor) -> Evidence:
    """The evidence for the verdict of a pre-norm model on one text, token ids [n].

    Raw attention says where a layer reads, though what it reads there has been mixed from all tokens by the layers
    below. Attention rolled out follows it to the tokens: each layer passes half of a token on by its residual
    connection and half by attention, averaged over the heads, so with A the weights of layer l

        rolled[l] = 0.5 rolled[l + 1] + 0.5 rolled[l + 1] A,    rolled[layers] = the classifying token alone.

    Sources:
        Abnar and Zuidema, Quantifying Attention Flow in Transformers (2020), section 3.
    """
    model.eval()
    assert model.positions is not None, "the positions must be added to the embeddings"
    x = model.embedding(ids[None]) + model.positions(torch.arange(len(ids), device=ids.device))
    raw, projected = [], []
    for layer in model.encoder.layers:
        assert isinstance(layer, fastattn.nn.TransformerEncoderLayer)
        normed = layer.norm1(x)
        q, k, _ = layer.self_attn.project(normed, normed, normed)
        projected.append((q, k))
        raw.append(fastattn.attention_weights(q[:, :, :1], k, average_heads=False)[0, :, 0])
        x = layer(x)
    row = torch.zeros_like(ids, dtype=x.dtype)
    row[0] = 1
    rolled: list[Tensor] = []
    for q, k in reversed(projected):
        row = 0.5 * row + 0.5 * _row_times_weights(row, q, k)
        rolled.insert(0, row)
    probabilities = model(ids[None])[0].softmax(-1)
    return Evidence(probabilities, torch.stack(raw), torch.stack(rolled))


def _row_times_weights(row: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """row [n] times the weights of q and k [1, H, n, D], averaged over the heads: [n], in memory O(n).

    Attention's output is A v, so for a v of width 1 and the upstream gradient g its gradient with respect to v is g A.
    """
    v = k.new_zeros(*k.shape[:3], 1, requires_grad=True)
    with torch.enable_grad():
        o = fastattn.attention(q, k, v)
    (product,) = torch.autograd.grad(o, v, row[:, None].expand_as(o))
    return product[0, :, :, 0].mean(0)
