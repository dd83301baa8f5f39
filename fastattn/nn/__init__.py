"""Modules built on `fastattn.attention`."""

from .attention import MultiHeadAttention

__all__ = ["MultiHeadAttention"]
