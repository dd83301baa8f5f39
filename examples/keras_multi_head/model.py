"""A classifier of sentences on the Keras layer: words and their positions, blocks as in Keras BERT, a mean."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastattn.nn import SinusoidalPositions, TokenEmbedding

from .layer import MultiHeadAttention

PAD = 0


class Block(nn.Module):
    """norm(x + dropout(attention(x))), and the same with a feed-forward network."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(width, heads)
        self.feed_forward = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """[B, n, width] of x [B, n, width]; real: bool [B, n]."""
        x = self.norm1(x + self.dropout(self.attention(x, real)))
        output: Tensor = self.norm2(x + self.dropout(self.feed_forward(x)))
        return output


class Classifier(nn.Module):
    """Logits [B, labels] from the mean of the last block's output over the real words.

    Args:
        vocabulary: number of words; 0 is padding.
        labels: number of labels.
        width: width of the embeddings and the blocks.
        heads: number of heads of each block.
        blocks: number of blocks.
        dropout: probability to drop an element of the embeddings, in the blocks, and before the last layer.
        max_length: largest number of words of a sentence.

    Example:
        >>> Classifier(vocabulary=9, labels=2, width=8, heads=2)(torch.tensor([[3, 4, 0], [5, 6, 7]])).shape
        torch.Size([2, 2])
    """

    def __init__(
        self,
        vocabulary: int,
        labels: int,
        width: int = 64,
        heads: int = 4,
        blocks: int = 1,
        dropout: float = 0.5,
        max_length: int = 512,
    ) -> None:
        super().__init__()
        self.words = TokenEmbedding(vocabulary, width, padding_idx=PAD, scaled=True)
        self.positions = SinusoidalPositions(width, max_length)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(blocks))
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(width, labels)

    def forward(self, words: Tensor) -> Tensor:
        """[B, labels] of words, integers [B, n] with at least one real word in each row."""
        real = words != PAD
        x = self.dropout(self.words(words) + self.positions(torch.arange(words.shape[1], device=words.device)))
        for block in self.blocks:
            x = block(x, real)
        mean = x.masked_fill(~real[..., None], 0).sum(1) / real.sum(1, keepdim=True)
        logits: Tensor = self.classifier(self.dropout(mean))
        return logits
