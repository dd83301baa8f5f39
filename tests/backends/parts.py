"""Calls that are a part of one that other processes compute too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor

from fastattn import plan, testing
from fastattn.spec import Spec


def places_of_a_part(n_q: int, n_k: int, device: torch.device | str = "cpu") -> Tensor:
    """`Spec.places` of queries and groups of four keys that stand anywhere in the whole call, in any order."""
    generator = torch.Generator().manual_seed(n_q)
    rows, fours = (torch.randperm(2 * n, generator=generator)[:n] for n in (n_q, -(-n_k // 4)))
    return torch.cat([torch.tensor([3, 5]), rows, fours]).to(device, torch.int32)


@contextlib.contextmanager
def drawn_at(places: Tensor | None) -> Iterator[None]:
    """Calls in this block, and the spec of `Inputs`, have these `Spec.places`, which no public function takes."""

    def with_places(*arguments: object, **terms: object) -> Spec:
        return replace(Spec(*arguments, **terms), places=places)

    with mock.patch.object(plan, "Spec", with_places), mock.patch.object(testing, "Spec", with_places):
        yield
