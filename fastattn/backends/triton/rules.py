"""A `Spec` as the kernels take it: one argument, of which everything that is None is compiled away."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...spec import Spec
from .dropout import Dropout, dropout
from .preparation import visibility
from .scores import Scoring, scoring
from .visibility import Visibility


class Rules(NamedTuple):
    """Rules of a call: which pairs are seen, what their scores are, which weights stay.

    Triton 3.6 can take a constant, such as a stride of 1, for None in a loop where it stands in a tuple that stands in
    another one, unless that one holds tuples alone, as this one does, or has a constant of its own further behind.
    """

    visible: Visibility
    scoring: Scoring
    dropout: Dropout

    @property
    def heavy_terms(self) -> int:
        """Number of terms that make a tile need more registers than limits and padding do."""
        visible, scoring = self.visible, self.scoring
        tables = (visible.dense, scoring.bias, scoring.slopes)
        terms = (visible.documents_q, scoring.softcap_log2, self.dropout.seed, *(table.data for table in tables))
        terms = (*terms, scoring.bias.by_distance)  # of which more is loaded one by one than of any other
        return sum(term is not None for term in terms)

    def in_tiles(self, block_m: int) -> Rules:
        """Copy of these rules for a kernel that takes `block_m` queries a tile."""
        return self if self.visible.key_blocks is None else Rules(self.visible.in_tiles(block_m), *self[1:])


def rules_of(
    spec: Spec,
    n_q: int,
    n_k: int,
    dtype: torch.dtype,
    of_padding: torch.dtype = torch.int32,
    known: tuple[tuple | None, ...] = (None, None, None),
) -> Rules:
    """`spec` as the kernels take it, for n_q queries, n_k keys, and values of `dtype`; see `visibility`.

    Args:
        known: those members of the result that need not be made.
    """
    visible, scored, dropped = known
    return Rules(
        visibility(spec.mask, n_q, n_k, of_padding) if visible is None else visible,
        scoring(spec, n_q, dtype) if scored is None else scored,
        dropout(spec) if dropped is None else dropped,
    )
