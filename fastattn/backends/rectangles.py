"""Pairs that a mask shows, as rectangles of queries and keys: what a kernel without masks can compute of a call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Rectangle(NamedTuple):
    """Pairs of queries and keys of neighbouring samples, all of which are seen.

    causal: those above the diagonal from the first query and the first key are not.
    """

    samples: slice
    queries: slice
    keys: slice
    causal: bool


def of_mask(
    real_queries: Tensor | None,
    real_keys: Tensor | None,
    documents_q: Tensor | None,
    documents_k: Tensor | None,
    offsets: Tensor | None,
    causal: bool,
    q_offset: int,
    B: int,
    n_q: int,
    n_k: int,
) -> list[Rectangle] | None:
    """Rectangles that hold all pairs which are seen and no others, each query and key in one at most; None where there
    are no such: the real tokens or a document are not neighbours, or the diagonal begins elsewhere.

    Args:
        real_queries, real_keys, documents_q, documents_k, offsets, causal, q_offset: the fields of a Mask, either those
            of real tokens or those of documents; offsets is q_offset where that is a tensor, and q_offset 0 then.
    """
    if offsets is not None and offsets.dim() == 2:
        return None
    runs_q = _runs(_labels(real_queries, documents_q), B, n_q)
    runs_k = _runs(_labels(real_keys, documents_k), B, n_k)
    if runs_q is None or runs_k is None:
        return None
    of_offsets = [q_offset] * B if offsets is None else offsets.tolist()
    of_samples: list[tuple[int, list]] = []  # the first sample of some with the same rectangles, and those
    for b in range(B):
        found = []
        for label, queries in runs_q[b].items():
            if label not in runs_k[b]:
                continue
            keys = runs_k[b][label]
            first = of_offsets[b] if documents_q is not None else of_offsets[b] + queries.start - keys.start
            seen = _seen(queries, keys, first) if causal else (queries, keys, False)
            if seen is None:
                return None
            if seen[0].start < seen[0].stop and seen[1].start < seen[1].stop:
                found.append(seen)
        if not of_samples or of_samples[-1][1] != found:
            of_samples.append((b, found))
    ends = [first for first, _ in of_samples[1:]] + [B]
    return [
        Rectangle(slice(first, end), *seen)
        for (first, found), end in zip(of_samples, ends, strict=True)
        for seen in found
    ]


def _labels(real: Tensor | None, documents: Tensor | None) -> Tensor | None:
    """The document of each token, negative for padding; without documents all real tokens are one."""
    return documents if real is None else real.to(torch.int8) - 1


def _runs(labels: Tensor | None, B: int, n: int) -> list[dict[int, slice]] | None:
    """Of each sample, where the tokens of a label lie; None where some do not lie side by side."""
    if labels is None:
        return [{0: slice(0, n)}] * B
    is_first = F.pad(labels[:, 1:] != labels[:, :-1], (1, 0), value=True)
    starts: list[list[int]] = [[] for _ in range(B)]
    for b, start in is_first.nonzero().tolist():
        starts[b].append(start)
    of_runs, result = iter(labels[is_first].tolist()), []
    for begins in starts:
        runs = {}
        for start, end, label in zip(begins, [*begins[1:], n], of_runs):  # noqa: B905  others are of the next sample
            if label in runs:
                return None
            if label >= 0:
                runs[label] = slice(start, end)
        result.append(runs)
    return result


def _seen(queries: slice, keys: slice, first: int) -> tuple[slice, slice, bool] | None:
    """The part of a rectangle that is seen, and whether as far as a diagonal; None where that begins elsewhere.

    Args:
        first: the position of the first query, counted from the first key.
    """
    queries = slice(queries.start + max(0, -first), queries.stop)
    first = max(0, first)
    keys = slice(keys.start, min(keys.stop, keys.start + first + queries.stop - queries.start))
    if first == 0:
        return queries, keys, True
    return (queries, keys, False) if first >= keys.stop - keys.start - 1 else None
