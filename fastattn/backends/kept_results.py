"""Results that are kept with the tensors they were computed from, until one of those dies or is changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


class _Known(NamedTuple):
    """Results of functions by their constants, as long as the tensors are of these versions and lie where they did."""

    tensors: list[weakref.ref]
    versions: list[tuple[int, int]]
    results: dict[tuple, object]


_MOST_RESULTS = 8  # of the same tensors: a tensor of starts that is never replaced meets ever more keys
_known: dict[tuple[int, ...], _Known] = {}


def kept(function: Callable[..., _T], tensors: tuple[Tensor | None, ...], *constants: object) -> _T:
    """`function(*tensors, *constants)`, computed once: for the other layers of a model and for the backward.

    It is computed anew where no tensor is given, while a CUDA graph is captured, which would keep what it says, and
    from inference tensors, which do not tell that they are changed. What the function returns must not hold the
    tensors.
    """
    given = [x for x in tensors if x is not None]
    if not given or any([x.is_inference() for x in given]):  # noqa: C419  a generator takes longer
        return function(*tensors, *constants)
    stream = 0
    if given[0].is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return function(*tensors, *constants)
        stream = torch.cuda.current_stream(given[0].device).cuda_stream
    key, versions = tuple(map(id, tensors)), [(x._version, x.data_ptr()) for x in given]  # `x.data = y` counts as none
    known, of_call = _known.get(key), (function, stream, constants)
    if known is None or known.versions != versions or any([ref() is None for ref in known.tensors]):  # noqa: C419
        refs = [weakref.ref(x, lambda _: _known.pop(key, None)) for x in given]
        known = _known[key] = _Known(refs, versions, {})
    result = known.results.get(of_call)
    if result is None:
        result = function(*tensors, *constants)
        if len(known.results) >= _MOST_RESULTS:
            known.results.clear()
        known.results[of_call] = result
    return result
