"""Blocks in which the attention of a model is computed by a plan, and masks of calls in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from .. import blocks
from ..blocks import Within
from ..spec import Mask
from .plans import Plan


@contextmanager
def context_parallel(plan: Plan, *, source: Plan | None = None) -> Iterator[None]:
    """Block in which models compute with the tokens of this rank, and attend to those of all ranks.

    Inside it, every call of fastattn without a plan of its own is one with `plan`: those of `fastattn.nn`, of models
    that `fastattn.swap` has changed, and of Hugging Face models with `attn_implementation="fastattn"`. A query sees
    what both the plan's mask and the call's show: the causal mask and the window of a layer stay, and count positions
    as the plan's mask does; padding and documents are the plan's, and a call that says something else about the local
    tokens is refused. So is what a plan does not say: a cache, pages, attention weights.

    The inputs of the model are those of this rank: `plan.shard` of ids, labels and padding, and `plan.positions()` for
    rotary and learned positions, which the models of `fastattn.nn` know by themselves. All ranks enter the block, and
    make the same calls in it. Where activation checkpointing runs the forward again, the backward belongs in the block.

    Args:
        plan: that of the tokens of the model; of self-attention, so for as many queries as keys.
        source: that of the tokens that an encoder reads, for `Transformer`, `Seq2SeqModel` and a `TransformerDecoder`,
            whose attention to them is that of `plan.attending(source)`. It is that of every `MultiHeadAttention` whose
            key is another tensor than its query.

    Raises:
        ValueError: a plan is none, is not carried out by a group, or is not of self-attention. In the block, on every
            rank: a call is one that the plan does not say.
        NotImplementedError: in the block, a call asks for attention weights, reads pages, or is a SequenceClassifier's.
        RuntimeError: after it, a backward computes attention of the block again.

    Example:
        >>> import torch, fastattn, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun needs no store
        >>> plan = fastattn.parallel.plan(fastattn.Mask(causal=True), 6, dist.group.WORLD)
        >>> layer = torch.nn.TransformerEncoderLayer(8, nhead=2, dropout=0.0, batch_first=True)
        >>> _ = fastattn.swap(layer)
        >>> with fastattn.parallel.context_parallel(plan):
        ...     layer(plan.shard(torch.ones(1, 6, 8), dim=1)).shape
        torch.Size([1, 6, 8])
        >>> dist.destroy_process_group()
    """
    for name, given in (("plan", plan), ("source", source)):
        if given is None and name == "source":
            continue
        if not isinstance(given, Plan):
            raise ValueError(f"{name} must be made by fastattn.parallel.plan, got {type(given).__name__}")
        given._known_group()
        if not given.together:
            raise ValueError(f"{name} must be of self-attention, made for n tokens, got one for other queries and keys")
    block = blocks.Block(plan, source, None if source is None else plan.attending(source), begin=blocks.beginning())
    blocks.ENTERED.append(block)
    try:
        yield
    finally:
        blocks.ENTERED.remove(block)
        if blocks.number_of_node() is None:  # else it was in the forward before
            tokens = {len(given.positions()) for given in (plan, source) if given is not None}
            blocks.LEFT.append(blocks.Left(tokens, block.begin, torch.autograd._get_sequence_nr()))


def combined(within: Within, mask: Mask | None) -> Mask:
    """The mask of a call in a block, of all tokens: the plan's and the call's, whose padding is of the local tokens.

    Raises:
        ValueError: the call cannot be right, or its mask says of the local tokens what the plan's does not.
    """
    plan, objection = within
    if objection is not None:
        raise ValueError(objection)
    if not isinstance(mask, Mask):
        return plan.mask if mask is None else mask  # which is refused by name
    whole = plan.mask
    if isinstance(mask.q_offset, Tensor) or mask.q_offset != 0:
        raise ValueError("mask.q_offset must be 0 in a context_parallel block, where the plan says where tokens stand")
    if mask.segment_ids is not None:
        for i, of in enumerate(("queries", "keys")):
            _check_local(plan, f"segment_ids[{i}]", mask.segment_ids[i], whole.segment_ids and whole.segment_ids[i], of)
    if mask.real_keys is not None:
        _check_local(plan, "real_keys", mask.real_keys, whole.readable_keys(), "keys")
    if mask.real_queries is not None:
        readable = whole.readable_queries()
        if readable is None and plan.together:
            whole = whole.with_padding(real_queries=(readable := whole.readable_keys()))
        _check_local(plan, "real_queries", mask.real_queries, readable, "queries")
    both = Mask(whole.causal, window=whole.window, dense=whole.dense) & Mask(
        mask.causal, window=mask.window, dense=mask.dense
    )
    return replace(whole, causal=both.causal, window=both.window, dense=both.dense)


def _check_local(plan: Plan, name: str, mine: Tensor, whole: Tensor | None, of: str) -> None:
    """Raises ValueError where a table [B, local tokens] is not what this rank has of that of all tokens."""
    rows = plan.positions(of=of, device=mine.device)
    if whole is None and mine.dtype == torch.bool:
        whole = mine.new_ones(len(mine), plan._length(of))
    if whole is not None and torch.equal(mine, whole.to(mine)[:, rows]):
        return
    raise ValueError(
        f"mask.{name} must be the shard of what the plan's mask has, which says where padding and documents are in a "
        f"context_parallel block; got another {list(mine.shape)}"
    )
