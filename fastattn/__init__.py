"""Exact attention for PyTorch that skips padding and masks: fused forward and backward on CPU and GPU."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from . import flash_attn as flash_attn
from .api import (
    Explanation,
    attention,
    attention_received,
    attention_varlen,
    attention_weights,
    attention_with_weights,
    explain,
    merge,
    top_keys,
)
from .backends import FallbackWarning, NoBackendError
from .integrations import register_with_transformers
from .integrations.torch_sdpa import SDPAPatch, patch_sdpa, register_flash_implementation
from .nn import MultiHeadAttention, Transformer
from .paged import attention_paged
from .sdpa import scaled_dot_product_attention
from .spec import DropoutSeed, Mask, RelativeBias
from .swap import SwapReport, swap, unswap

if TYPE_CHECKING:
    from . import parallel as parallel

__version__ = "0.1.0"
__all__ = [
    "DropoutSeed",
    "Explanation",
    "FallbackWarning",
    "Mask",
    "MultiHeadAttention",
    "NoBackendError",
    "RelativeBias",
    "SDPAPatch",
    "SwapReport",
    "Transformer",
    "attention",
    "attention_paged",
    "attention_received",
    "attention_varlen",
    "attention_weights",
    "attention_with_weights",
    "explain",
    "merge",
    "patch_sdpa",
    "scaled_dot_product_attention",
    "swap",
    "top_keys",
    "unswap",
]


def __dir__() -> list[str]:
    """The names that users call; the modules behind them are found by import alone."""
    return sorted([*__all__, "__version__", "flash_attn", "nn", "parallel"])


def __getattr__(name: str) -> ModuleType:
    """`parallel`, which is imported when it is asked for: PyTorch can be built without torch.distributed."""
    if name == "parallel":
        return importlib.import_module(".parallel", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register_flash_implementation()
register_with_transformers()
