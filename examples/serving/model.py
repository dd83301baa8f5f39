"""The model that is served, with random weights, and its cache: pages, or rows for PyTorch's attention."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fastattn.nn import LanguageModel, PagedCache, PagedStep, TransformerConfig

from ..training import InputError, positive_int, seed_everything

VOCABULARY, MAX_LENGTH, PAGE_SIZE = 1000, 2048, 64
ATTENTIONS = ("fastattn", "sdpa")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes of the model and of its cache to the parser."""
    parser.add_argument("--d-model", type=positive_int, default=256, metavar="N", help="in heads of 64; default: 256")
    parser.add_argument("--layers", type=positive_int, default=6, metavar="N", help="default: 6")
    parser.add_argument("--pages", type=positive_int, default=1024, metavar="N", help="of 64 tokens; default: 1024")


def make_model(d_model: int, layers: int) -> LanguageModel:
    """The same model in every process: heads of 64, of which four share one of keys and values where they can.

    Its embeddings are small and not those of the output, so that a next token depends on all tokens before it.
    """
    if d_model % 64:
        raise InputError(f"--d-model must be a multiple of 64, got {d_model}")
    seed_everything(0)
    heads = d_model // 64
    config = TransformerConfig(
        vocab_size=VOCABULARY, d_model=d_model, nhead=heads, num_layers=layers, dim_feedforward=2 * d_model,
        activation="swiglu", norm="rms", num_kv_heads=heads if heads % 4 else heads // 4, positions="learned",
        max_length=MAX_LENGTH, scale_embeddings=False, tie_embeddings=False,
    )  # fmt: skip
    return LanguageModel(config).eval()


def make_cache(attention: str, pages: int) -> PagedCache:
    """A cache of `pages` pages for this attention; rows of MAX_LENGTH tokens in the same memory for "sdpa".

    Raises:
        InputError: there is not the memory for one row.
    """
    if attention == "fastattn":
        return PagedCache(pages, PAGE_SIZE)
    if (rows := pages * PAGE_SIZE // MAX_LENGTH) < 1:
        raise InputError(f"--pages must be at least {MAX_LENGTH // PAGE_SIZE} with sdpa, got {pages}")
    return Rows(rows, MAX_LENGTH)


class Rows(PagedCache):
    """A cache in which a page is the whole row of a request, and PyTorch's attention reads one row after the other.

    This is the fastest way that was found to serve requests of different lengths with PyTorch's function on a CPU: rows
    are read where they lie, without padding, and without copies of keys and values.
    """

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pages: dict[str, Tensor],
        step: PagedStep,
        window: tuple[int | None, int | None],
    ) -> Tensor:
        counts = step.cu_seqlens.diff().tolist()
        new = (torch.split(x, counts) for x in (q, k, v))
        rows, outputs = step.table[:, 0].tolist(), []
        for row, length, n, q1, k1, v1 in zip(rows, step.lengths.tolist(), counts, *new, strict=True):
            keys, values = (pages[name][row, :length] for name in ("k_pages", "v_pages"))
            keys[-n:], values[-n:] = k1, v1
            seen = None if n in (1, length) else torch.ones(n, length, dtype=torch.bool).tril(length - n)
            queries, keys, values = (x.transpose(0, 1)[None] for x in (q1, keys, values))
            o = scaled_dot_product_attention(queries, keys, values, seen, is_causal=n == length > 1, enable_gqa=True)
            outputs.append(o[0].transpose(0, 1))
        return torch.cat(outputs)
