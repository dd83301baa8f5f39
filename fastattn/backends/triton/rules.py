"""A `Spec` as the kernels take it: one argument, of which everything that is None is compiled away."""

from __future__ import annotations

from typing import NamedTuple

from ...spec import Spec
from .dropout import Dropout, dropout
from .scores import Scoring, scoring
from .visibility import Visibility, visibility


class Rules(NamedTuple):
    """Which pairs are seen, what their scores are, which weights stay."""

    visible: Visibility
    scoring: Scoring
    dropout: Dropout | None


def rules_of(spec: Spec) -> Rules:
    """`spec` as the kernels take it."""
    return Rules(visibility(spec.mask), scoring(spec), dropout(spec))
