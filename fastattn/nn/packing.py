"""Packing of a padded batch: the real tokens of all samples one after the other, without the padding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .checks import check_dense, check_tensor
from .masks import can_look_at

WORTHWHILE = 0.9
"""The largest share of real tokens with which a batch is packed, since packing has a cost of its own. Untuned."""


@dataclass(frozen=True, eq=False)
class Packing:
    """Packs and unpacks a padded batch, both differentiably.

    real: bool [B, L], False at padding.

    Example:
        >>> packing = Packing(torch.tensor([[True, False], [True, True]]))
        >>> packing.pack(torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])).flatten()
        tensor([1., 3., 4.])
        >>> packing.unpack(torch.tensor([[1.0], [3.0], [4.0]])).flatten(1)
        tensor([[1., 0.],
                [3., 4.]])
    """

    real: Tensor

    def __post_init__(self) -> None:
        check_tensor("real", self.real, "bool", ("B", "L"))

    @cached_property
    def index(self) -> Tensor:
        """int64 [tokens]: the index of each token in the flattened batch. On a GPU the host waits for it."""
        return self.real.flatten().nonzero().squeeze(1)

    @cached_property
    def documents(self) -> Tensor:
        """int64 [1, tokens]: the sample that each token belongs to, as `Mask.segment_ids` wants it."""
        return (self.index // self.real.shape[1])[None]

    @cached_property
    def contiguous(self) -> bool:
        """Whether no sample has padding between its tokens, so that packing keeps their distances."""
        begins = self.real[:, 1:] & ~self.real[:, :-1]
        return bool((begins.sum(1) + self.real[:, 0] <= 1).all())

    def pack(self, x: Tensor) -> Tensor:
        """[tokens, ...] from [B, L, ...]."""
        self._check(x, self.real.shape)
        return x.flatten(0, 1).index_select(0, self.index)

    def unpack(self, x: Tensor) -> Tensor:
        """[B, L, ...] from [tokens, ...], 0 at padding."""
        self._check(x, self.index.shape)
        empty = x.new_zeros(self.real.numel(), *x.shape[1:])
        filled = empty.index_copy_(0, self.index, x)
        # Nobody else has `filled`, so this need not be a view of it: FSDP2 warns of modules that return views.
        return torch.ops.aten._unsafe_view(filled, [*self.real.shape, *x.shape[1:]])

    def _check(self, x: Tensor, shape: torch.Size) -> None:
        check_dense("x", x)
        if x.shape[: len(shape)] != shape:
            raise ValueError(f"x must be [{', '.join(map(str, shape))}, ...], got {list(x.shape)}")


def worth_packing(*batches: Tensor | None) -> bool:
    """Whether enough of these batches is padding for packing to pay; of each its `real`, or None without padding."""
    known = [real for real in batches if real is not None]
    if not known or not all(can_look_at(real) for real in known):
        return False
    tokens = torch.stack([real.sum() for real in known]).sum()
    return int(tokens) <= WORTHWHILE * sum(real.numel() for real in known)
