"""The form of a case: a small model of another library with random weights, and how to call it.

The cases themselves are in one file for each group of libraries. `tests/test_models.py` compares each one, swapped, with
the library's own attention, and docs/models.md is rendered from what that finds (`tests/model_table.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import fastattn
from fastattn import api
from fastattn.spec import Spec
from fastattn.testing import compare

L = 12  # tokens in each sample of a model that takes padding
PADDINGS: dict[str, Tensor | None] = {  # bool [3, L], True is real; None: the model is called without a mask
    "none": None,
    "right": torch.arange(L) < torch.tensor([[8], [3], [L]]),
    "left": torch.arange(L) >= torch.tensor([[4], [9], [0]]),
    "holes": torch.tensor(
        [[1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0], [0, 0] + [1] * 10]
    ).bool(),
}


@dataclass(frozen=True)
class Library:
    """Where models come from.

    name: as in the table.
    use_eager: sets a model, in place, to the attention that the library itself writes out.
    use_exact: the same to one that computes in the dtype of the model throughout, for a model in fp64.
    """

    name: str
    use_eager: Callable[[nn.Module], object]
    use_exact: Callable[[nn.Module], object]


@dataclass(frozen=True)
class ModelCase:
    """One family of models: a row of the table.

    library: whose it is.
    family: its name, as people know it.
    make: a small one, with dropout or without: it is compared in eval mode.
    run: (model, real) -> its outputs by name, where they mean something. `real` is a value of `PADDINGS`.
    needs: what its attention asks of fastattn besides padding, in names of `fastattn.spec.FEATURES`.
    paddings: the keys of `PADDINGS` that it takes.
    run_with_weights: like `run`, for the attention weights of every layer; None if the model does not offer them.
    """

    library: Library
    family: str
    make: Callable[[], nn.Module]
    run: Callable[[nn.Module, Tensor | None], dict[str, Tensor]]
    needs: frozenset[str] = frozenset()
    paddings: tuple[str, ...] = ("none",)
    run_with_weights: Callable[[nn.Module, Tensor | None], dict[str, Tensor]] | None = None

    def __str__(self) -> str:
        return f"{self.library.name}: {self.family}"
