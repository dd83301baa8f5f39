"""What the algorithms have in common: the arguments of their calls, keys as rows, and parts of the keys."""

from __future__ import annotations

import functools
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from .. import api
from ..blocks import HERE
from ..spec import Mask
from .masks import Visibility, at, on, part_of

attention_here = functools.partial(api.attention, plan=HERE, return_lse=True)
"""(o, lse) of a call of this process alone."""


class Call(NamedTuple):
    """What a schedule depends on besides the plan and the mask. positional: what a query sees depends on its place."""

    B: int
    H: int
    H_kv: int
    positional: bool
    device: torch.device


class Options(TypedDict):
    """Arguments of `fastattn.attention` that every call of an algorithm has alike."""

    scale: float
    softcap: float | None
    deterministic: bool
    backend: str | None


class Learned(NamedTuple):
    """What has a gradient besides q, k and v: that of all tokens, on every rank."""

    bias: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None


def as_rows(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values [B, H_kv, n, D] and [B, H_kv, n, d_v] as rows [B * n, H_kv * (D + d_v)]."""
    return torch.cat([k, v], -1).transpose(1, 2).flatten(2).flatten(0, 1)


def as_keys(rows: Tensor, B: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of such rows; of k and v the shape counts."""
    both = rows.view(B, len(rows) // max(B, 1), k.shape[1], k.shape[3] + v.shape[3]).transpose(1, 2)
    return both[..., : k.shape[3]], both[..., k.shape[3] :]


class Part(NamedTuple):
    """Some keys, as a call sees them: the first step of a ring, or all that a rank gathers.

    mask: of the local queries and these keys. rows, keys: their indices among all tokens.
    """

    mask: Mask
    rows: Tensor
    keys: Tensor

    @classmethod
    def of(cls, visibility: Visibility, rows: Tensor, keys: Tensor, need: Tensor, call: Call) -> Part:
        """The part of the keys `keys`, of which those are there that `need` [B, n_k] has."""
        mask = part_of(visibility.mask, visibility.n_q, visibility.n_k, rows, keys, need[:, keys], call.positional)
        return cls(on(mask, call.device), rows.to(call.device), keys.to(call.device))

    def bias(self, bias: Tensor | None) -> Tensor | None:
        """What of a bias for all pairs these have."""
        return None if bias is None else at(at(bias, -2, self.rows), -1, self.keys)
