"""Modules built on `fastattn.attention`."""

from .attention import MultiHeadAttention
from .cache import KVCache
from .positions import LearnedPositions, RotaryPositions, SinusoidalPositions, TokenEmbedding, positions_of
from .transformer import (
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

__all__ = [
    "KVCache",
    "LearnedPositions",
    "MultiHeadAttention",
    "RotaryPositions",
    "SinusoidalPositions",
    "TokenEmbedding",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "positions_of",
]
