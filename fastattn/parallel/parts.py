"""What the algorithms have in common: the arguments of their calls, keys as rows, and parts of the keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypedDict

import torch
from torch import Tensor

from .. import api
from ..blocks import HERE
from ..spec import DropoutSeed, Mask, RelativeBias
from .masks import Visibility, at, on, part_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


def attention_here(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, seed: Tensor | None, places: Tensor | None, **terms: Unpack[api.Terms]
) -> tuple[Tensor, Tensor]:
    """(o, lse) of a call of this process alone, with the seed of the whole call and its places in that."""
    drawn = None if seed is None else DropoutSeed(seed, places)
    return api.attention(q, k, v, mask, **terms, generator=drawn, plan=HERE, return_lse=True)


def refuse_by_distance(bias: object) -> None:
    """Raises NotImplementedError where a bias is a table by distance, of which no part of the keys has its own."""
    if isinstance(bias, RelativeBias):
        raise NotImplementedError("bias must be a Tensor where tokens are on several ranks, got a RelativeBias")


class Call(NamedTuple):
    """What a schedule depends on besides the plan and the mask.

    positional: what a query sees depends on its place. first: of all, the first sample and the first head here, where
    there is dropout.
    """

    B: int
    H: int
    H_kv: int
    positional: bool
    device: torch.device
    first: tuple[int, int] | None

    def places(self, rows: Tensor, keys: Tensor) -> Tensor | None:
        """`Spec.places` of queries and of keys that are ascending and in whole fours; None without dropout."""
        if self.first is None:
            return None
        return torch.cat([torch.tensor(self.first, device="cpu"), rows, keys[::4] // 4]).int().to(self.device)


class Options(TypedDict):
    """Arguments of `fastattn.attention` that every call of an algorithm has alike."""

    scale: float
    softcap: float | None
    dropout_p: float
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


def as_keys(rows: Tensor, n: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`n` keys and values of each sample, of such rows; all other sizes are those of k and v."""
    both = rows.view(len(k), n, k.shape[1], k.shape[3] + v.shape[3]).transpose(1, 2)
    return both[..., : k.shape[3]], both[..., k.shape[3] :]


class Part(NamedTuple):
    """Some keys, as a call sees them: the first step of a ring, or all that a rank gathers.

    mask: of the local queries and these keys. rows, keys: their indices among all tokens. places: as `Spec` has them.
    """

    mask: Mask
    rows: Tensor
    keys: Tensor
    places: Tensor | None

    @classmethod
    def of(cls, visibility: Visibility, rows: Tensor, keys: Tensor, need: Tensor, call: Call) -> Part:
        """The part of the keys `keys`, of which those are there that `need` [B, n_k] has."""
        mask = part_of(visibility.mask, visibility.n_q, visibility.n_k, rows, keys, need[:, keys], call.positional)
        return cls(on(mask, call.device), rows.to(call.device), keys.to(call.device), call.places(rows, keys))

    def bias(self, bias: Tensor | None) -> Tensor | None:
        """What of a bias for all pairs these have."""
        return None if bias is None else at(at(bias, -2, self.rows), -1, self.keys)
