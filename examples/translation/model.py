"""The model: embeddings and positions, `fastattn.nn.Transformer`, and an output that is the target embedding again."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn import Mask
from fastattn.nn import KVCache, SinusoidalPositions, TokenEmbedding, Transformer

from .text import PAD


class Seq2Seq(nn.Module):
    """Logits of the next target token, [B, T, V], from sources [B, S] and targets [B, T] that are padded with `PAD`.

    Args:
        source_vocabulary, target_vocabulary: numbers of tokens.
        joint: source and target share their vocabulary, and so their embedding.
        d_model, nhead, num_layers, dim_feedforward, dropout: of the Transformer, which is pre-norm; `num_layers` of
            encoder and of decoder.
    """

    def __init__(
        self, source_vocabulary: int, target_vocabulary: int, joint: bool, *, d_model: int, nhead: int,
        num_layers: int, dim_feedforward: int, dropout: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.transformer = Transformer(
            d_model, nhead, num_layers, num_layers, dim_feedforward, dropout, batch_first=True, norm_first=True
        )
        self.target_embedding = TokenEmbedding(target_vocabulary, d_model, PAD, scaled=True)
        self.source_embedding = (
            self.target_embedding if joint else TokenEmbedding(source_vocabulary, d_model, PAD, scaled=True)
        )
        self.positions = SinusoidalPositions(d_model)
        self.dropout = nn.Dropout(dropout)

    def encode(self, source: Tensor) -> Tensor:
        """The memory [B, S, E]."""
        positions = self.positions(torch.arange(source.shape[1], device=source.device))
        x = self.dropout(self.source_embedding(source) + positions)
        return self.transformer.encoder(x, src_key_padding_mask=source == PAD)

    def decode(self, target: Tensor, memory: Tensor, source: Tensor, cache: KVCache | None = None) -> Tensor:
        """What the decoder makes of each target token, [B, T, E]; with a cache, of those that follow the ones in it."""
        if cache is None:
            positions = torch.arange(target.shape[1], device=target.device)
        else:
            positions = cache.advance(target.shape[1], device=target.device)
        x = self.dropout(self.target_embedding(target) + self.positions(positions))
        return self.transformer.decoder(
            x, memory, Mask(causal=True), cache=cache, memory_key_padding_mask=source == PAD,
            tgt_key_padding_mask=target == PAD if cache is None else None,
        )  # fmt: skip

    def logits(self, decoded: Tensor) -> Tensor:
        """[..., V]."""
        return F.linear(decoded, self.target_embedding.weight)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.logits(self.decode(target, self.encode(source), source))
