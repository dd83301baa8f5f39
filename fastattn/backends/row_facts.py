"""Gradients that are one number for many queries, from what a backward kernel knows of each query's row of scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowFacts:
    """fp32 or fp64 [B, H, n_q] each.

    lse_log2: lse in base 2; +inf where a query sees nothing.
    rest_log2: what its rounding left out, or None for nothing.
    delta: rowsum(dO * O) - dlse.
    dlse: what arrives at the lse, 0 where a query sees nothing; or None.
    sinks: [H], or None.
    ds_of_queries: dS summed over the keys, which tells what the rounding of O has taken from delta; or None where
        nobody asks, or where that was nothing to speak of.
    """

    lse_log2: Tensor
    rest_log2: Tensor | None
    delta: Tensor
    dlse: Tensor | None
    sinks: Tensor | None
    ds_of_queries: Tensor | None

    def p_of_sinks(self) -> Tensor:
        """What each query gives to the sink of its head.

        Where a sink is nearly all of an lse of any size, the two are the same number only if both were rounded alike.
        """
        p_log2 = self.sinks[:, None].to(self.lse_log2.dtype) / math.log(2) - self.lse_log2
        return torch.exp2(p_log2 if self.rest_log2 is None else p_log2 - self.rest_log2)

    def lost_in_delta(self) -> Tensor:
        """What delta lacks since O was rounded: a gradient that is one number for all queries would show it.

        dS = P * (dP - delta), of which the kernels know all sums: dP's is what delta should hold, P's is 1 less the
        sink's.
        """
        if self.ds_of_queries is None:
            return torch.zeros_like(self.delta)
        lost = self.ds_of_queries
        lost = lost if self.sinks is None else lost - self.p_of_sinks() * self.delta
        return lost if self.dlse is None else lost - self.dlse

    def ds_of_sinks(self) -> Tensor:
        """A sink takes weight from the values and adds nothing to them: its dP is 0."""
        return -self.p_of_sinks() * (self.delta + self.lost_in_delta())

    def ds_of_keys(self) -> Tensor:
        """dS summed over the keys, as it would be if O had not been rounded.

        The dS of a row, its sink's included, sum to dlse: a softmax does not see what is added to all its scores. So
        this is dlse - ds_of_sinks(), but where the sink takes nearly everything that difference would be rounding
        alone. What stands here is the same, written with factors that are small there.
        """
        total = torch.zeros_like(self.delta) if self.dlse is None else self.dlse
        if self.sinks is None:
            return total
        of_sink = self.p_of_sinks()
        return of_sink * self.ds_of_queries + (1 - of_sink) * (of_sink * self.delta + total)

    def dalibi_slopes(self, ds_by_distance: Tensor, p_by_distance: Tensor) -> Tensor:
        """[B, H], from dS and P, each times the distance of the pair and summed over the keys."""
        return -(ds_by_distance - self.lost_in_delta() * p_by_distance).sum(2)
