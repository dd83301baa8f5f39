"""Results that are kept with the tensors they were computed from, until one of those dies or is changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


class _Known(NamedTuple):
    """Results of functions by their constants, as long as the tensors are of these versions, and of these values."""

    tensors: list[weakref.ref]
    versions: list[int]
    values: list[Tensor]
    results: dict[tuple, object]


_MOST_RESULTS = 8  # of the same tensors: a tensor of starts that is never replaced meets ever more keys
_known: dict[tuple[int, ...], _Known] = {}


def kept(function: Callable[..., _T], tensors: tuple[Tensor | None, ...], *constants: object) -> _T:
    """`function(*tensors, *constants)`, computed once: for the other layers of a model and for the backward.

    It is computed anew where no tensor is given, while a CUDA graph is captured, which would keep what it says, and
    from inference tensors, which do not tell that they are changed. Others do not tell it where NumPy or `x.data`
    writes: on the CPU, where nobody waits for it, they are compared with copies. What the function returns must not
    hold the tensors.
    """
    given = [x for x in tensors if x is not None]
    if not given or any([x.is_inference() for x in given]):  # noqa: C419  a generator takes longer
        return function(*tensors, *constants)
    stream = 0
    if given[0].is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return function(*tensors, *constants)
        stream = torch.cuda.current_stream(given[0].device).cuda_stream
    key, versions = tuple(map(id, tensors)), [x._version for x in given]
    known, of_call = _known.get(key), (function, stream, constants)
    if (
        known is None
        or known.versions != versions
        or any([ref() is None for ref in known.tensors])  # noqa: C419
        or not all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(given, known.values))  # noqa: B905
    ):
        refs = [weakref.ref(x, lambda _: _known.pop(key, None)) for x in given]
        values = [x.detach().clone() for x in given if not x.is_cuda]
        known = _known[key] = _Known(refs, versions, values, {})
    result = known.results.get(of_call)
    if result is None:
        result = function(*tensors, *constants)
        if len(known.results) >= _MOST_RESULTS:
            known.results.clear()
        known.results[of_call] = result
    return result
