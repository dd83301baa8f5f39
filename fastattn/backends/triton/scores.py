"""From products to scores: scale."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl  # noqa: F401

from ...spec import LOG2E, Spec


class Scoring(NamedTuple):
    """What makes scores of products; None where the call has no such term.

    scale_log2: factor on q k^T, for scores in base 2.
    """

    scale_log2: float


def scoring(spec: Spec) -> Scoring:
    """The terms of `spec` as the kernels take them."""
    return Scoring(spec.scale * LOG2E)


@triton.jit
def scores_log2(b_qk, scoring):
    """The scores of a tile of products q k^T, in base 2, before the mask."""
    return b_qk * scoring.scale_log2
