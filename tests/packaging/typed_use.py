"""Typical code of a user, which nobody runs: `make lint` has mypy and pyright check it against our types."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import fastattn
from fastattn import Mask


def on_tensors(q: Tensor, return_lse: bool) -> Tensor:
    o: Tensor = fastattn.attention(q, q, q, Mask(causal=True), scale=0.5)
    loss = fastattn.attention(q, q, q).sum()
    o, lse = fastattn.attention(q, q, q, softcap=30.0, return_lse=True)
    either: Tensor | tuple[Tensor, Tensor] = fastattn.attention(q, q, q, return_lse=return_lse)
    assert isinstance(either, Tensor)
    merged, merged_lse = fastattn.merge(o, lse, o, lse)
    relative = fastattn.RelativeBias(q[0, :, 0], lambda distance: distance.clamp(0, 7))
    loss = loss + fastattn.attention(q, q, q, bias=relative).sum()
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
    packed = fastattn.attention_varlen(q, q, q, cu_seqlens, bias=fastattn.RelativeBias(q[0]))
    return o.sum() + lse.sum() + packed.sum()


def on_models(x: Tensor, model: nn.Module) -> Tensor:
    layer = fastattn.MultiHeadAttention(8, 2, batch_first=True)
    y, weights = assert_type(layer(x, x, x), tuple[Tensor, Tensor])
    assert_type(layer(x, x, x, attn_mask=Mask(causal=True), need_weights=False), tuple[Tensor, Tensor | None])
    encoder = fastattn.nn.TransformerEncoder(fastattn.nn.TransformerEncoderLayer(8, 2), num_layers=2)
    z: Tensor = encoder(y)
    report = fastattn.swap(model, packed=True)
    print(report.swapped.items(), report.refused, report.calls.packed if report.calls else 0, weights)
    with fastattn.patch_sdpa() as patch:
        print(patch.computed, patch.left.most_common())
    fastattn.unswap(model)
    return z


def on_calls_of_modules(x: Tensor, ids: Tensor, path: Path) -> None:
    config = fastattn.nn.TransformerConfig(vocab_size=9, d_model=8, nhead=2)
    layer, decoder_layer = fastattn.nn.TransformerEncoderLayer(8, 2), fastattn.nn.TransformerDecoderLayer(8, 2)
    assert_type(layer(x, Mask(causal=True)), Tensor)
    assert_type(decoder_layer(x, x, memory_mask=Mask()), Tensor)
    assert_type(decoder_layer.multihead_attn, fastattn.MultiHeadAttention)
    assert_type(fastattn.nn.TransformerEncoder(layer, 2)(x, Mask(causal=True)), Tensor)
    assert_type(fastattn.nn.TransformerDecoder(decoder_layer, 2)(x, x, Mask(causal=True)), Tensor)
    assert_type(fastattn.Transformer(8, 2)(x, x, tgt_mask=Mask(causal=True), src_key_padding_mask=ids == 0), Tensor)
    language_model = fastattn.nn.LanguageModel(config)
    assert_type(language_model(ids, cache=fastattn.nn.KVCache(2, 8)), Tensor)
    batch = fastattn.nn.ContinuousBatch(language_model, fastattn.nn.PagedCache(pages=8))
    assert_type(batch.add([3, 4], max_new_tokens=2).tokens, list[int])
    assert_type(batch.step(), list[fastattn.nn.Request])
    assert_type(language_model.decoder, fastattn.nn.TransformerEncoder)
    assert_type(fastattn.nn.Seq2SeqModel(config)(ids, ids, decoder_attention_mask=ids != 0), Tensor)
    classifier = fastattn.nn.SequenceClassifier(config, num_classes=3)
    assert_type(classifier(ids, ids != 0), Tensor)
    assert_type(classifier.embedding(ids), Tensor)
    if classifier.positions is not None:
        assert_type(classifier.positions(ids), Tensor)
    assert_type(fastattn.nn.RotaryPositions(4)(ids)(x), Tensor)
    assert_type(fastattn.nn.load(path, classifier), fastattn.nn.SequenceClassifier)
    model = fastattn.nn.load(path)
    assert isinstance(model, fastattn.nn.LanguageModel)
    assert_type(model(ids), Tensor)


def mistakes(q: Tensor) -> None:
    """What a type checker finds before the first run; an error that it no longer finds is an error itself."""
    fastattn.attention(q, q, q, is_causal=True)  # type: ignore[call-overload]
    fastattn.explain(q, q, q, causal=True)  # type: ignore[call-arg]
    fastattn.top_keys(q, q, top_k=2, softmax_scale=1.0)  # type: ignore[arg-type]
    fastattn.attention(q, q, q, return_lse=True).sum()  # type: ignore[attr-defined]
    Mask(True, 1)  # type: ignore[call-arg]
    fastattn.MultiHeadAttention(8, 2)(q, q, q, causal=True)  # type: ignore[call-overload]
    fastattn.Transformer(8, 2)(q, q, causal=True)  # type: ignore[call-arg]
    fastattn.scaled_dot_product_attention(q, q, q, causal=True)  # type: ignore[arg-type]
    fastattn.MultiHeadAttention(8, hidden_size=2)  # type: ignore[call-arg]
