"""Typical code of a user, which nobody runs: `make lint` has mypy and pyright check it against our types."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fastattn
from fastattn import Mask


def on_tensors(q: Tensor, return_lse: bool) -> Tensor:
    o: Tensor = fastattn.attention(q, q, q, Mask(causal=True), scale=0.5)
    loss = fastattn.attention(q, q, q).sum()
    o, lse = fastattn.attention(q, q, q, softcap=30.0, return_lse=True)
    either: Tensor | tuple[Tensor, Tensor] = fastattn.attention(q, q, q, return_lse=return_lse)
    assert isinstance(either, Tensor)
    merged, merged_lse = fastattn.merge(o, lse, o, lse)
    weights, indices = fastattn.top_keys(q, q, Mask(window=(2, None)), top_k=2)
    o = fastattn.scaled_dot_product_attention(q, q, q, is_causal=True)
    keep: Tensor = Mask(real_keys=torch.ones(2, 5, dtype=torch.bool)).keep(5, 5)
    both: Mask = Mask(causal=True) & Mask.from_lengths([2, 5], 5, of="both")
    dense = Mask.from_flex(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 5, 5)
    print((both & dense).show(sample=1).svg)
    print(fastattn.explain(q, q, q).backend, weights, indices, keep, either)
    return loss + merged.sum() + merged_lse.sum() + o.sum()


def on_documents(q: Tensor, cu_seqlens: Tensor) -> Tensor:
    o: Tensor = fastattn.attention_varlen(q, q, q, cu_seqlens, causal=True, window=(8, 0))
    o, lse = fastattn.attention_varlen(q, q, q, cu_seqlens, align="end", return_lse=True)
    return o.sum() + lse.sum()


def on_models(x: Tensor, model: nn.Module) -> Tensor:
    layer = fastattn.MultiHeadAttention(8, 2, batch_first=True)
    y, weights = layer(x, x, x)
    encoder = fastattn.nn.TransformerEncoder(fastattn.nn.TransformerEncoderLayer(8, 2), num_layers=2)
    z: Tensor = encoder(y)
    report = fastattn.swap(model, packed=True)
    print(report.swapped.items(), report.refused, report.calls.packed if report.calls else 0, weights)
    with fastattn.patch_sdpa() as patch:
        print(patch.computed, patch.left.most_common())
    fastattn.unswap(model)
    return z


def mistakes(q: Tensor) -> None:
    """What a type checker finds before the first run; an error that it no longer finds is an error itself."""
    fastattn.attention(q, q, q, is_causal=True)  # type: ignore[call-overload]
    fastattn.attention(q, q, q, return_lse=True).sum()  # type: ignore[attr-defined]
    Mask(True, 1)  # type: ignore[call-arg]
