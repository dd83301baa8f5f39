"""The model: torch.nn.Transformer between embeddings, with fastattn's attention in it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastattn

from .text import PAD


class Seq2Seq(nn.Module):
    """Logits of the next target token: [B, T, V].

    Args:
        source_vocabulary, target_vocabulary: numbers of tokens.
        joint: source and target share their vocabulary, and so their embeddings.
    """

    def __init__(
        self, source_vocabulary: int, target_vocabulary: int, joint: bool, *, d_model: int, nhead: int, num_layers: int,
        dim_feedforward: int, dropout: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.transformer = nn.Transformer(
            d_model, nhead, num_layers, num_layers, dim_feedforward, dropout, batch_first=True, norm_first=True
        )
        fastattn.swap(self.transformer)
        self.target_embedding = nn.Embedding(target_vocabulary, d_model, padding_idx=PAD)
        self.source_embedding = (
            self.target_embedding if joint else nn.Embedding(source_vocabulary, d_model, padding_idx=PAD)
        )
        self.dropout = nn.Dropout(dropout)
        for embedding in {self.source_embedding, self.target_embedding}:
            nn.init.normal_(embedding.weight, std=d_model**-0.5)
            nn.init.zeros_(embedding.weight[PAD].detach())
        self.d_model = d_model

    def embed(self, embedding: nn.Embedding, ids: Tensor) -> Tensor:
        d, L = self.d_model, ids.shape[1]
        rates = torch.exp(torch.arange(0, d, 2, device=ids.device) * (-math.log(10000.0) / d))
        angles = torch.arange(L, device=ids.device)[:, None] * rates
        positions = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
        return self.dropout(embedding(ids) * math.sqrt(d) + positions)

    def encode(self, source: Tensor) -> Tensor:
        return self.transformer.encoder(self.embed(self.source_embedding, source), src_key_padding_mask=source == PAD)

    def decode(self, target: Tensor, memory: Tensor, source: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], target.device, torch.bool)
        return self.transformer.decoder(
            self.embed(self.target_embedding, target), memory, tgt_mask=causal, tgt_is_causal=True,
            tgt_key_padding_mask=target == PAD, memory_key_padding_mask=source == PAD,
        )  # fmt: skip

    def hidden(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decode(target, self.encode(source), source)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.target_embedding.weight)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.logits(self.hidden(source, target))
