"""Launches of the kernels of a call: by Triton the first time, and repeated for calls of the same kind.

Triton looks at each argument of a launch to find the kernel that was compiled for such arguments. That takes longer
than a short call on a GPU, and what it finds depends on metadata alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from ...spec import Spec
from ..compiling import launches_run
from .rules import Rules, rules_of
from .tiles import launch, tf32_will_do

MOST_KINDS = 4096
"""How many kinds of calls are remembered; the next one forgets them all."""


_STREAM, _OF_TRITON = 3, 9
"""Before the arguments of a kernel stand its grid, the stream, two handles, and three things for those who watch."""
_RULES = -1
"""The index of the rules, which stand behind the tensors of a call."""


class _Launch(NamedTuple):
    """A launch, to be repeated.

    run: of what Triton compiled, without what it does for those who watch launches, for whom `watched` is.
    arguments: first `_OF_TRITON` of Triton, then those of the kernel, if they are the same in each call; None for
    others. others: (position, which of the values of a call) of those. rules: position of the rules, and the queries of
    their tiles; None where they are the same in each call. made: positions of what `Launches.made` has made.
    """

    run: Callable
    watched: Callable
    arguments: list
    others: list[tuple[int, int]]
    rules: tuple[int, int] | None
    made: list[tuple[int, _Made]]


class _Made(NamedTuple):
    """An argument that `make` makes of tensors of a call, which are these, and of constants; `_RULES` are its rules."""

    make: Callable
    which: list[int]
    constants: tuple


class _Call(NamedTuple):
    """All launches of a call; its values are its inputs, its outputs, and what is made of `parts`.

    copied: which inputs are read as contiguous copies. outputs: what allocates them.
    parts: arguments that begin with neighbours among the tensors: which ones, and what follows.
    rules: makes those of a call of its spec; None where they are the same in each.
    """

    copied: list[int]
    outputs: list[Callable[[], Tensor] | None]
    parts: list[tuple[slice, tuple]]
    rules: Callable[[Spec], Rules] | None
    launches: list[_Launch]


_known: dict[tuple, _Call] = {}


def kind_of(what: object, inputs: tuple[Tensor | None, ...], spec: Spec) -> tuple:
    """All that the launches of a call depend on, but for the memory of its tensors."""
    of_inputs = what, tf32_will_do(), *[None if x is None else _metadata(x) for x in inputs]
    if spec.kind is spec:
        return spec, *of_inputs
    if spec.kind is not None:
        return spec.kind, *of_inputs, *map(_layout, spec.tensors())
    mask, (queries, keys) = spec.mask, spec.mask.segment_ids or (None, None)
    tensors = (
        mask.real_keys, mask.real_queries, queries, keys, mask.dense, spec.bias, spec.alibi_slopes, spec.sinks,
        spec.seed, spec.places,
    )  # fmt: skip
    return (
        *of_inputs,
        *[None if x is None else _metadata(x) for x in tensors],
        mask.causal,
        mask.q_offset if isinstance(mask.q_offset, int) else _metadata(mask.q_offset),
        mask.window,
        spec.scale,
        spec.softcap,
        spec.dropout_p,
        spec.bias_by_distance,
    )


def _metadata(x: Tensor) -> tuple:
    """All of a tensor that the compiled kernels depend on."""
    return x.dtype, x.shape, x.get_device(), x.stride(), x.data_ptr() % 16


def _layout(x: Tensor) -> tuple:
    """How a tensor lies in memory: also whether it begins at a multiple of 16 bytes."""
    return x.stride(), x.data_ptr() % 16


def repeated(kind: tuple, inputs: tuple[Tensor | None, ...], spec: Spec) -> list[Tensor | None] | None:
    """The outputs of a call whose launches are known, which are repeated for these inputs; None for any other."""
    known = _known.get(kind)
    if known is None or not launches_run():
        return None
    active, of_inputs = driver.active, inputs[0].get_device()
    if of_inputs not in (-1, device := active.get_current_device()):
        with torch.cuda.device(of_inputs):
            return repeated(kind, inputs, spec)
    if known.copied:
        inputs = tuple(
            x.clone(memory_format=torch.contiguous_format) if i in known.copied else x for i, x in enumerate(inputs)
        )
    outputs = [allocate and allocate() for allocate in known.outputs]
    tensors = (*inputs, *outputs)
    values = [*tensors, *[tensors[which] + rest for which, rest in known.parts]]
    rules = None if known.rules is None else known.rules(spec)
    stream, runtime = active.get_current_stream(device), triton.knobs.runtime
    watched = _any_of(runtime.launch_enter_hook) or _any_of(runtime.launch_exit_hook)
    of_call = (*tensors, rules)
    for run, run_watched, constants, others, of_rules, made in known.launches:
        arguments = constants.copy()
        arguments[_STREAM] = stream
        for position, which in others:
            arguments[position] = values[which]
        if of_rules is not None:
            arguments[of_rules[0]] = rules.in_tiles(of_rules[1])
        for position, (make, which, of_each) in made:
            arguments[position] = make(*[of_call[i] for i in which], *of_each)
        if watched:
            run_watched(*arguments[_OF_TRITON:])
        else:
            run(*arguments)
    return outputs


def forget() -> None:
    """Forgets all launches, as is due where kernels get other tiles."""
    _known.clear()


def _any_of(hook: object) -> bool:
    """Whether anything is called by a hook of Triton, which is a chain of functions, or None."""
    return bool(getattr(hook, "calls", hook))


class Launches:
    """The launches of a call, which `keep` remembers for others of its kind.

    Args:
        rules: of the call.
        given: its inputs, as `repeated` gets them. read: the same, as the kernels read them: a contiguous copy where
            they are not the same.
        outputs: that the launches write. zeroed: those among them that have to be 0 before. Nothing is remembered where
            a launch takes another tensor than these and those of the rules, or where one stands here twice: others of
            the kind may have two there.
    """

    def __init__(
        self,
        rules: Rules,
        given: tuple[Tensor | None, ...] = (),
        read: tuple[Tensor | None, ...] = (),
        outputs: tuple[Tensor | None, ...] = (),
        zeroed: tuple[Tensor, ...] = (),
    ) -> None:
        self.rules = rules
        self._copied = [i for i, (x, y) in enumerate(zip(given, read, strict=True)) if x is not y]
        self._outputs, self._zeroed = outputs, set(map(id, zeroed))
        self._tensors = [None if x is None else id(x) for x in (*read, *outputs)]
        objects = [x for x in self._tensors if x is not None]
        self._launches: list[_Launch] | None = [] if len(set(objects)) == len(objects) else None
        self._parts: list[tuple[slice, tuple]] = []
        self._constant_rules = not _has_tensors(rules)
        self._made: dict[int, tuple[object, _Made]] = {}

    def made(self, make: Callable, of_call: tuple[Tensor | Rules, ...], *constants: object) -> object:
        """`make(*of_call, *constants)`, an argument that is to be made anew in each call.

        Args:
            of_call: its tensors, as read or written, and its rules. `constants` must not hold any.
        """
        result = make(*of_call, *constants)
        if self._launches is not None and _has_tensors(result):
            which = [_RULES if x is self.rules else self._tensors.index(id(x)) for x in of_call]
            self._made[id(result)] = result, _Made(make, which, constants)  # whose id is its own as long as it lives
        return result

    def launch(
        self, kernel: triton.JITFunction, programs: int, *args: object, block_m: int | None = None, **options: object
    ) -> None:
        """`tiles.launch`, where a kernel that takes the rules has `block_m` or else BLOCK_M queries a tile."""
        position = next((i for i, x in enumerate(args) if x is self.rules), None)
        if position is not None:
            block_m = options["BLOCK_M"] if block_m is None else block_m
            args = (*args[:position], self.rules.in_tiles(block_m), *args[position + 1 :])
        compiled = launch(kernel, programs, *args, **options)
        if programs == 0 or self._launches is None:
            return
        made = [(_OF_TRITON + i, self._made[id(x)][1]) for i, x in enumerate(args) if id(x) in self._made]
        known = {position, *[i - _OF_TRITON for i, _ in made]}
        others = [(_OF_TRITON + i, self._value(x)) for i, x in enumerate(args) if i not in known and _has_tensors(x)]
        # The interpreter compiles nothing; and where kernels are compiled alone, no launch is to be repeated.
        if not hasattr(compiled, "packed_metadata") or any(which is None for _, which in others):
            self._launches = None
            return
        of_triton = [programs, 1, 1, None, compiled.function, compiled.packed_metadata, None, None, None]
        in_order = [*of_triton, *args, *(options[name] for name in kernel.arg_names[len(args) :])]
        of_rules = None if self._constant_rules or position is None else (_OF_TRITON + position, block_m)
        for i, _ in [*others, *made] if of_rules is None else [*others, *made, of_rules]:
            in_order[i] = None
        self._launches.append(_Launch(compiled.run, compiled[programs, 1, 1], in_order, others, of_rules, made))

    def keep(self, kind: tuple, *of_rules: object) -> None:
        """Remembers the launches so far as all that a call of this kind needs; `of_rules` are those of `rules_of`."""
        if self._launches is not None:
            if len(_known) >= MOST_KINDS:
                forget()
            constant = tuple(None if _has_tensors(member) else member for member in self.rules)
            rules = functools.partial(_rules_of_call, of_rules, constant)
            outputs = [None if x is None else _allocator(x, id(x) in self._zeroed) for x in self._outputs]
            _known[kind] = _Call(self._copied, outputs, self._parts, None if all(constant) else rules, self._launches)

    def _value(self, x: Tensor | tuple) -> int | None:
        """Which of the values of a call such an argument is; None where it holds any other tensor.

        Tuples begin with all the tensors that they hold.
        """
        if not isinstance(x, (Tensor, tuple)):
            return None
        held = [id(x)] if isinstance(x, Tensor) else [id(part) for part in x if isinstance(part, Tensor)]
        first = self._tensors.index(held[0]) if held[0] in self._tensors else 0
        which = slice(first, first + len(held))
        if self._tensors[which] != held:
            return None
        if isinstance(x, Tensor):
            return first
        part = which, tuple(x[len(held) :])
        if part not in self._parts:
            self._parts.append(part)
        return len(self._tensors) + self._parts.index(part)


def _has_tensors(x: object) -> bool:
    """Whether a tensor is in it; `base` is that of a descriptor."""
    return isinstance(x, Tensor) or hasattr(x, "base") or (isinstance(x, tuple) and any(_has_tensors(y) for y in x))


def _rules_of_call(of_rules: tuple, known: tuple, spec: Spec) -> Rules:
    return rules_of(spec, *of_rules, known=known)


def _allocator(x: Tensor, zeroed: bool) -> Callable[[], Tensor]:
    form = {"dtype": x.dtype, "device": x.device}
    if zeroed:
        return functools.partial(torch.zeros, x.shape, **form)
    return functools.partial(torch.empty_strided, x.shape, x.stride(), **form)
