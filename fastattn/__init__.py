"""Attention that is fused, takes the masks real models have, and means the same on CPU and GPU."""

from .api import (
    Explanation,
    attention,
    attention_received,
    attention_varlen,
    attention_weights,
    attention_with_weights,
    explain,
    merge,
    scaled_dot_product_attention,
    top_keys,
)
from .backends import FallbackWarning
from .nn import MultiHeadAttention, Transformer
from .spec import Mask
from .swap import SwapReport, swap

__version__ = "0.1.0"
__all__ = [
    "Explanation",
    "FallbackWarning",
    "Mask",
    "MultiHeadAttention",
    "SwapReport",
    "Transformer",
    "attention",
    "attention_received",
    "attention_varlen",
    "attention_weights",
    "attention_with_weights",
    "explain",
    "merge",
    "scaled_dot_product_attention",
    "swap",
    "top_keys",
]
