"""The functions of `triton.language` and of Gluon's language that the kernels use, over `values`.

Layouts are taken and ignored: a compiler checks them, and they change no number.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from . import copies
from .errors import KernelError, source_line
from .machine import in_kernel, machine
from .values import (
    DType,
    Pointer,
    Value,
    common_type,
    constexpr,
    float32,
    float64,
    int1,
    int32,
    raw,
    scalar,
    value_of,
)


def program_id(axis: int = 0) -> Value:
    return Value(machine().program if axis == 0 else 0, int32)


def num_programs(axis: int = 0) -> Value:
    return Value(machine().programs if axis == 0 else 1, int32)


def num_warps() -> int:
    return machine().current.warps


def arange(start: int, end: int, layout: object = None) -> Value:
    n = int(end) - int(start)
    if n < 1 or n & (n - 1):
        raise KernelError(f"arange must have a power of two of entries, was {n}, at {source_line()}")
    return Value(torch.arange(int(start), int(end), dtype=torch.int32), int32)


def full(shape: object, value: object, dtype: DType, layout: object = None) -> Value:
    return Value(torch.full([int(n) for n in shape], raw(value), dtype=dtype.torch), dtype)


def zeros(shape: object, dtype: DType, layout: object = None) -> Value:
    return full(shape, 0, dtype)


def zeros_like(x: Value) -> Value:
    return Value(torch.zeros_like(x.data), x.dtype)


def cast(x: object, dtype: DType, *, bitcast: bool = False) -> Value:
    return value_of(x).to(dtype, bitcast=bitcast)


def to_tensor(x: object) -> Value:
    return value_of(x)


def convert_layout(x: Value, layout: object, assert_trivial: bool = False) -> Value:
    return value_of(x)


set_auto_layout = convert_layout


def expand_dims(x: Value, axis: int) -> Value:
    return Value(x.data.unsqueeze(int(axis)), x.dtype)


def reshape(x: Value, *shape: object) -> Value:
    shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], (int, Value)) else shape
    return Value(x.data.reshape([int(n) for n in shape]), x.dtype)


def broadcast_to(x: Value, *shape: object) -> Value:
    shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], (int, Value)) else shape
    return Value(torch.as_tensor(x.data, dtype=x.dtype.torch).expand([int(n) for n in shape]), x.dtype)


def trans(x: Value, *dims: int) -> Value:
    return Value(x.data.permute(dims) if dims else x.data.T, x.dtype)


def permute(x: Value, order: object) -> Value:
    return Value(x.data.permute(tuple(int(i) for i in order)), x.dtype)


def join(x: Value, y: Value) -> Value:
    return Value(torch.stack(torch.broadcast_tensors(x.data, y.data), -1), x.dtype)


def split(x: Value) -> tuple[Value, Value]:
    return Value(x.data[..., 0], x.dtype), Value(x.data[..., 1], x.dtype)


def where(condition: object, x: object, y: object) -> Value:
    condition, dtype = value_of(condition), common_type(x, y)
    if dtype.kind == 0:
        dtype = int1
    operands = [raw(condition, int1), raw(x, dtype), raw(y, dtype)]
    if not any(isinstance(operand, Tensor) for operand in operands):
        return scalar(operands[1] if operands[0] else operands[2], dtype)
    chosen = [torch.as_tensor(operands[0]), *(torch.as_tensor(o, dtype=dtype.torch) for o in operands[1:])]
    return Value(torch.where(*chosen), dtype)


def _of_two(of_tiles: Callable, of_scalars: Callable) -> Callable:
    def result(x: object, y: object, propagate_nan: object = None) -> Value:
        if not (isinstance(x, Value) or isinstance(y, Value)):
            return of_scalars(x, y)  # constants stay what they are
        dtype = common_type(x, y)
        a, b = raw(x, dtype), raw(y, dtype)
        if not (isinstance(a, Tensor) or isinstance(b, Tensor)):
            return scalar(of_scalars(a, b), dtype)
        return Value(of_tiles(*(torch.as_tensor(v, dtype=dtype.torch) for v in (a, b))), dtype)

    return result


# Unless asked otherwise, the larger of a number and NaN is the number.
maximum = _of_two(lambda a, b: torch.fmax(a, b), builtins.max)
minimum = _of_two(lambda a, b: torch.fmin(a, b), builtins.min)


def _of_each(of_tiles: Callable) -> Callable:
    def result(x: object) -> Value:
        x = value_of(x)
        if not isinstance(x.data, Tensor):
            dtype = x.dtype if x.dtype.kind else float32
            return scalar(of_tiles(torch.tensor(x.data, dtype=dtype.torch)).item(), dtype)
        return Value(of_tiles(x.data), x.dtype)

    return result


exp, exp2 = _of_each(torch.exp), _of_each(torch.exp2)
log, log2 = _of_each(torch.log), _of_each(torch.log2)
sqrt, rsqrt = _of_each(torch.sqrt), _of_each(torch.rsqrt)
abs = _of_each(torch.abs)
floor, ceil = _of_each(torch.floor), _of_each(torch.ceil)


def fma(x: object, y: object, z: object) -> Value:
    """x * y + z in fp32, of which the product is not rounded."""
    x, y, z = (value_of(operand).to(float64) for operand in (x, y, z))
    return (x * y + z).to(float32)


def cdiv(x: object, y: object) -> object:
    return (x + y - 1) // y


def _reduced(of_axis: Callable, of_all: Callable) -> Callable:
    def result(x: Value, axis: int | None = None, keep_dims: bool = False) -> Value:
        dtype = int32 if x.dtype.kind == 0 else x.dtype
        data = x.data.to(dtype.torch)
        if axis is None:
            return scalar(of_all(data).item(), dtype)
        reduced = of_axis(data, int(axis))
        if keep_dims:
            reduced = reduced.unsqueeze(int(axis))
        return Value(reduced, dtype) if reduced.dim() else scalar(reduced.item(), dtype)

    return result


def _without_nan(x: Tensor, instead: float) -> Tensor:
    """A reduction passes over NaN, unless there is nothing else."""
    if not x.is_floating_point():
        return x
    return x.where(~x.isnan(), instead)


def _extreme(x: Tensor, axis: int, largest: bool) -> Tensor:
    numbers = _without_nan(x, -float("inf") if largest else float("inf"))
    extreme = numbers.amax(axis) if largest else numbers.amin(axis)
    return extreme.where(~x.isnan().all(axis), float("nan")) if x.is_floating_point() else extreme


max = _reduced(lambda x, axis: _extreme(x, axis, True), lambda x: _extreme(x.flatten(), 0, True))
min = _reduced(lambda x, axis: _extreme(x, axis, False), lambda x: _extreme(x.flatten(), 0, False))
sum = _reduced(lambda x, axis: x.sum(axis, dtype=x.dtype), lambda x: x.sum(dtype=x.dtype))


def load(pointer: Pointer, mask: object = None, other: object = None) -> Value:
    return copies.gathered(pointer, mask, other)


def store(pointer: Pointer, value: object, mask: object = None) -> None:
    copies.scattered(pointer, value, mask)


def atomic_add(pointer: Pointer, value: object, mask: object = None) -> None:
    copies.scattered(pointer, value, mask, add=True)


def dot(x: Value, y: Value, acc: Value | None = None, input_precision: str = "ieee") -> Value:
    if input_precision != "ieee":
        raise KernelError(f"dot: input_precision must be 'ieee' here, was {input_precision!r}, at {source_line()}")
    product = x.data.float() @ y.data.float()
    return Value(product if acc is None else product + acc.data, float32)


class _Counted:
    """`range`, whose numbers are values inside of a kernel where one of its arguments is."""

    def __call__(self, *bounds: object) -> object:
        if not in_kernel() or not any(isinstance(bound, Value) for bound in bounds):
            return builtins.range(*(int(bound) for bound in bounds))
        return self._values(bounds)

    @staticmethod
    def _values(bounds: tuple) -> Iterator[Value]:
        dtype = next(bound.dtype for bound in bounds if isinstance(bound, Value))
        for i in builtins.range(*(int(value_of(bound)) for bound in bounds)):
            yield Value(i, dtype)


range = _Counted()
static_range = builtins.range


def static_assert(condition: object, message: str = "") -> None:
    if not condition:
        raise KernelError(f"static_assert: {message}, at {source_line()}")


device_assert = static_assert


def _unchanged(x: object, *_: object, **__: object) -> object:
    return x


assume = multiple_of = max_contiguous = max_constancy = _unchanged


def static_print(*_: object, **__: object) -> None: ...


device_print = static_print

__all__ = ["constexpr"]
