"""Gradients of bias, ALiBi slopes and sinks: which sums of dS a backward pass has to make, and what comes of them.

dS = P * (dP - delta) is the gradient of the scores, with dP = dO V^T and delta = rowsum(dO * O) - dlse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..spec import LOG2E, Spec, summed_like


class Sums(NamedTuple):
    """Sums of dS, each fp32 or None; or which of them are wanted, each a bool.

    of_pairs: over whatever shares an entry of a bias that has one for each pair or each distance, as a table that
        `summed_like` can sum.
    of_keys: over the queries, [B, H, n_k].
    of_queries: over the keys, [B, H, n_q].
    by_distance: over the keys, times the distance of the pair, [B, H, n_q].
    """

    of_pairs: Tensor | bool | None
    of_keys: Tensor | bool | None
    of_queries: Tensor | bool | None
    by_distance: Tensor | bool | None


def wanted_sums(spec: Spec, output_mask: tuple[bool, ...], rounded: bool) -> Sums:
    """Which sums of dS the gradients need that `output_mask` asks for.

    Args:
        output_mask: whether the gradients of q, k, v, bias, alibi_slopes and sinks are wanted.
        rounded: whether what the rounding of O takes from delta is to be made good.
    """
    *_, bias_wanted, slopes_wanted, sinks_wanted = output_mask
    along = spec.bias_shared_along() if bias_wanted else None
    of_queries = (along == "keys" and spec.sinks is not None) or (rounded and (slopes_wanted or sinks_wanted))
    return Sums(along == "neither", along == "queries", of_queries, slopes_wanted)


def learned_gradients(
    spec: Spec, output_mask: tuple[bool, ...], sums: Sums, stats: RowStats | None, p_by_distance: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of bias, alibi_slopes and sinks in their dtypes; None where `output_mask` does not ask.

    Args:
        stats: None where they are not needed: for a bias that differs along the keys, and for ALiBi slopes without
            `p_by_distance`.
        p_by_distance: P over the keys, times the distance of the pair, [B, H, n_q]; None where nothing is to be made
            good of what the rounding of O has taken from delta.
    """
    *_, bias_wanted, slopes_wanted, sinks_wanted = output_mask
    dbias = dslopes = dsinks = None
    if bias_wanted:
        along = spec.bias_shared_along()
        ds = sums.of_pairs if along == "neither" else sums.of_keys[:, :, None] if along == "queries" else None
        dbias = summed_like(spec.bias, stats.ds_of_keys()[..., None] if ds is None else ds)
    if slopes_wanted:
        ds = sums.by_distance if p_by_distance is None else sums.by_distance - stats.lost_in_delta() * p_by_distance
        dslopes = summed_like(spec.alibi_slopes, -ds.sum(2, dtype=torch.float64))
    if sinks_wanted:
        dsinks = stats.ds_of_sinks().sum((0, 2)).to(spec.sinks.dtype)
    return dbias, dslopes, dsinks


@dataclass(frozen=True)
class RowStats:
    """What a backward pass knows of each query, fp32 or fp64 [B, H, n_q] each.

    lse_log2, rest_log2: their sum is the lse in base 2, +inf where a query sees nothing; None for no rest.
    delta: rowsum(dO * O) - dlse.
    dlse: what arrives at the lse, 0 where a query sees nothing; or None.
    sinks: [H], or None.
    ds_of_queries: dS summed over the keys, or None.
    rounded: whether `ds_of_queries` tells what the rounding of O has taken from delta, or that was nothing to speak of.
    """

    lse_log2: Tensor
    rest_log2: Tensor | None
    delta: Tensor
    dlse: Tensor | None
    sinks: Tensor | None
    ds_of_queries: Tensor | None
    rounded: bool = True

    def p_of_sinks(self) -> Tensor:
        """What each query gives to the sink of its head.

        Where a sink is nearly all of an lse of any size, the two are the same number only if both were rounded alike.
        """
        p_log2 = self.sinks[:, None].to(self.lse_log2.dtype) * LOG2E - self.lse_log2
        return torch.exp2(p_log2 if self.rest_log2 is None else p_log2 - self.rest_log2)

    def lost_in_delta(self) -> Tensor:
        """What delta lacks since O was rounded: a gradient that is one number for all queries would show it.

        dS = P * (dP - delta), of which the kernels know all sums: dP's is what delta should hold, P's is 1 less the
        sink's.
        """
        if self.ds_of_queries is None or not self.rounded:
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
