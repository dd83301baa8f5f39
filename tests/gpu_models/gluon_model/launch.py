"""`jit`: functions that kernels call, and kernels that the host launches."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable

import torch
from torch import Tensor

from . import language
from .copies import TensorDescriptor
from .errors import KernelError, source_line
from .machine import Machine, in_kernel, settings
from .values import GlobalTensor, Pointer, Value, scalar, value_of

_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion"}


class JITFunction:
    """A function as Triton's and Gluon's `jit` make it: to be called in a kernel, or launched with `[grid]`."""

    def __init__(self, fn: Callable) -> None:
        self.fn = fn
        functools.update_wrapper(self, fn)
        # What a kernel counts are values, of which it may ask the type.
        fn.__globals__.setdefault("range", language.range)
        self._signature = inspect.signature(fn)
        self._constants = {
            name for name, parameter in self._signature.parameters.items() if "constexpr" in str(parameter.annotation)
        }

    def __call__(self, *arguments: object, **options: object) -> object:
        if not in_kernel():
            raise KernelError(f"{self.__name__} is called outside of a kernel, at {source_line()}")
        named = (*zip(self._signature.parameters, arguments, strict=False), *options.items())
        for name, value in named if self._constants else ():
            if name in self._constants and isinstance(value, (Value, Pointer)):
                raise KernelError(f"{self.__name__} needs a constant for {name}, got {value}, at {source_line()}")
        return self.fn(*arguments, **options)

    def __getitem__(self, grid: object) -> Callable:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: object, *arguments: object, **options: object) -> None:
        launched = {
            name: options.pop(name) for name in _OPTIONS & set(options) if name not in self._signature.parameters
        }
        bound = self._signature.bind(*arguments, **options)
        bound.apply_defaults()
        if callable(grid):
            grid = grid(bound.arguments)
        programs = math.prod(int(n) for n in grid) if isinstance(grid, tuple) else int(grid)
        if isinstance(grid, tuple) and any(int(n) != 1 for n in grid[1:]):
            raise KernelError(f"{self.__name__}: a grid must have one axis here, was {grid}")
        tensors: dict[int, GlobalTensor] = {}
        values = {
            name: x if name in self._constants else _on_the_device(x, name, tensors)
            for name, x in bound.arguments.items()
        }
        how = settings()
        for program in how.programs(range(programs)):
            Machine(program, programs, launched.get("num_warps", 4), how).run(self.fn, **values)


def _on_the_device(x: object, name: str, tensors: dict[int, GlobalTensor]) -> object:
    """An argument of a launch as the kernel sees it."""
    if x is None or isinstance(x, TensorDescriptor):
        return x
    if isinstance(x, Tensor):
        return Pointer(tensors.setdefault(id(x), GlobalTensor(x, name)))
    if isinstance(x, tuple):
        fields = getattr(x, "_fields", [str(i) for i in range(len(x))])
        parts = [_on_the_device(part, f"{name}.{field}", tensors) for field, part in zip(fields, x, strict=True)]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    if isinstance(x, (bool, int)):
        return value_of(x)
    if isinstance(x, float):
        return scalar(x, language.float32)
    if isinstance(x, torch.dtype):
        raise KernelError(f"{name}: a dtype can only be a constant")
    return x


def jit(fn: Callable | None = None, **_: object) -> object:
    """Triton's and Gluon's decorator, with or without options."""
    return jit if fn is None else JITFunction(fn)
