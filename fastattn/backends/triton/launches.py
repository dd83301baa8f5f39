"""Launches of the kernels of a call: by Triton the first time, and repeated for calls of the same kind.

Triton looks at each argument of a launch to find the kernel that was compiled for such arguments. That takes longer
than a short call on a GPU, and what it finds depends on metadata alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ...spec import Spec
from .rules import Rules, rules_of
from .tiles import dot_precision, launch

MOST_KINDS = 4096
"""How many kinds of calls are remembered; the next one forgets them all."""


class _Launch(NamedTuple):
    """A launch, to be repeated.

    run: the compiled kernel with its grid. arguments: those that are the same in each call, and None for others.
    others: (position, function of the tensors of a call) of those. rules: position of the rules, and the queries of
    their tiles; None where they are the same in each call.
    """

    run: Callable
    arguments: list
    others: list[tuple[int, Callable]]
    rules: tuple[int, int] | None


_known: dict[tuple, list[_Launch]] = {}


def kind_of(what: object, tensors: tuple[Tensor | None, ...], spec: Spec) -> tuple:
    """All that the launches of a call depend on, but for the memory of its tensors."""
    mask, (queries, keys) = spec.mask, spec.mask.segment_ids or (None, None)
    q_offset = mask.q_offset
    return (
        what,
        tuple([_metadata(x) for x in tensors]),
        mask.causal,
        q_offset if isinstance(q_offset, int) else _metadata(q_offset),
        mask.window,
        tuple([_metadata(x) for x in (mask.real_keys, mask.real_queries, queries, keys, mask.dense)]),
        spec.scale,
        spec.softcap,
        spec.dropout_p,
        spec.bias_by_distance,
        tuple([_metadata(x) for x in (spec.bias, spec.alibi_slopes, spec.sinks, spec.seed, spec.places)]),
        dot_precision(),
    )


def _metadata(x: Tensor | None) -> tuple | None:
    """All of a tensor that the compiled kernels depend on: also whether it begins at a multiple of 16 bytes."""
    return None if x is None else (x.dtype, x.shape, x.stride(), x.get_device(), x.data_ptr() % 16)


def repeated(kind: tuple, tensors: tuple[Tensor | None, ...], spec: Spec, n_q: int, n_k: int) -> bool:
    """Whether the launches of such a call are known; they are repeated then, with these tensors."""
    launches = _known.get(kind)
    if launches is None:
        return False
    rules = rules_of(spec, n_q, n_k, tensors[0].dtype) if any(launch.rules for launch in launches) else None
    with torch.cuda.device_of(tensors[0]):
        for known in launches:
            arguments = known.arguments.copy()
            for position, argument in known.others:
                arguments[position] = argument(tensors)
            if known.rules is not None:
                position, block_m = known.rules
                arguments[position] = rules.in_tiles(block_m)
            known.run(*arguments)
    return True


class Launches:
    """The launches of a call, which `keep` remembers for others of its kind.

    Args:
        rules: of the call.
        tensors: that differ from call to call. Nothing is remembered where a launch takes another one but those of the
            rules, or where one stands here twice: others of the kind may have two there.
    """

    def __init__(self, rules: Rules, tensors: tuple[Tensor | None, ...] = ()) -> None:
        self.rules = rules
        self._tensors = tensors
        objects = [id(x) for x in tensors if x is not None]
        self._launches: list[_Launch] | None = [] if len(set(objects)) == len(objects) else None
        self._constant_rules = not _has_tensors(rules)

    def launch(
        self, kernel: triton.JITFunction, programs: int, *args: object, block_m: int | None = None, **options: object
    ) -> None:
        """`tiles.launch`, for a kernel that takes the rules, and `block_m` or else BLOCK_M queries a tile."""
        position = next(i for i, x in enumerate(args) if x is self.rules)
        block_m = options["BLOCK_M"] if block_m is None else block_m
        args = (*args[:position], self.rules.in_tiles(block_m), *args[position + 1 :])
        compiled = launch(kernel, programs, *args, **options)
        if programs == 0 or self._launches is None:
            return
        others = [(i, self._reader(x)) for i, x in enumerate(args) if i != position and _has_tensors(x)]
        # The interpreter compiles nothing; and where kernels are compiled alone, no launch is to be repeated.
        if not hasattr(compiled, "packed_metadata") or any(reader is None for _, reader in others):
            self._launches = None
            return
        in_order = [*args, *(options[name] for name in kernel.arg_names[len(args) :])]
        of_rules = None if self._constant_rules else (position, block_m)
        for i in [i for i, _ in others] + ([] if of_rules is None else [position]):
            in_order[i] = None
        self._launches.append(_Launch(compiled[programs, 1, 1], in_order, others, of_rules))

    def keep(self, kind: tuple) -> None:
        """Remembers the launches so far as all that a call of this kind needs."""
        if self._launches is not None:
            if len(_known) >= MOST_KINDS:
                _known.clear()
            _known[kind] = self._launches

    def _reader(self, x: Tensor | tuple) -> Callable | None:
        """A function that makes such an argument of the tensors of a call; None where it holds any other tensor.

        Tuples begin with all the tensors that they hold.
        """
        of_argument = [x] if isinstance(x, Tensor) else [part for part in x if isinstance(part, Tensor)]
        given = [id(y) for y in self._tensors]
        if not all(id(y) in given for y in of_argument):
            return None
        get = operator.itemgetter(*(given.index(id(y)) for y in of_argument))
        if isinstance(x, Tensor):
            return get
        tail = x[len(of_argument) :]
        if len(of_argument) == 1:
            return lambda tensors: (get(tensors), *tail)
        return lambda tensors: (*get(tensors), *tail)


def _has_tensors(x: object) -> bool:
    return isinstance(x, Tensor) or (isinstance(x, tuple) and any(_has_tensors(part) for part in x))
