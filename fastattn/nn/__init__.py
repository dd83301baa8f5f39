"""Modules built on `fastattn.attention`: layers, the Transformer, whole models, and what they are made of."""

from .attention import MultiHeadAttention
from .batching import ContinuousBatch, Request
from .cache import KVCache
from .checkpoint import load, save
from .generation import GenerationOptions
from .models import LanguageModel, Seq2SeqModel, SequenceClassifier, TransformerConfig
from .packing import Packing
from .pages import PagedCache, PagedSequence, PagedStep
from .positions import LearnedPositions, RotaryPositions, SinusoidalPositions, TokenEmbedding, positions_of
from .transformer import (
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
    swiglu,
)

__all__ = [
    "ContinuousBatch",
    "GenerationOptions",
    "KVCache",
    "LanguageModel",
    "LearnedPositions",
    "MultiHeadAttention",
    "Packing",
    "PagedCache",
    "PagedSequence",
    "PagedStep",
    "Request",
    "RotaryPositions",
    "Seq2SeqModel",
    "SequenceClassifier",
    "SinusoidalPositions",
    "TokenEmbedding",
    "Transformer",
    "TransformerConfig",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "load",
    "positions_of",
    "save",
    "swiglu",
]
