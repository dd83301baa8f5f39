"""Values in registers: scalars, tiles and pointers, with Triton's types and arithmetic.

A scalar is kept as a number of Python, a tile as a tensor. Whole numbers that overflow are an error.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import KernelError, source_line


@dataclass(frozen=True)
class DType:
    """A type of elements, as `tl` and `gl` name it."""

    name: str
    torch: torch.dtype
    kind: int  # 0 bool, 1 whole, 2 floating

    @property
    def primitive_bitwidth(self) -> int:
        return 1 if self.kind == 0 else 8 * self.torch.itemsize

    @property
    def bytes(self) -> int:
        return self.torch.itemsize

    def is_floating(self) -> bool:
        return self.kind == 2

    def is_fp16(self) -> bool:
        return self.torch == torch.float16

    def is_bf16(self) -> bool:
        return self.torch == torch.bfloat16

    def is_fp32(self) -> bool:
        return self.torch == torch.float32

    def __str__(self) -> str:
        return self.name


int1 = DType("int1", torch.bool, 0)
int8, int16 = DType("int8", torch.int8, 1), DType("int16", torch.int16, 1)
int32, int64 = DType("int32", torch.int32, 1), DType("int64", torch.int64, 1)
uint8 = DType("uint8", torch.uint8, 1)
float16, bfloat16 = DType("fp16", torch.float16, 2), DType("bf16", torch.bfloat16, 2)
float32, float64 = DType("fp32", torch.float32, 2), DType("fp64", torch.float64, 2)
_OF_TORCH = {
    dtype.torch: dtype for dtype in (int1, int8, int16, int32, int64, uint8, float16, bfloat16, float32, float64)
}


def dtype_of(x: Tensor) -> DType:
    return _OF_TORCH[x.dtype]


@dataclass(frozen=True)
class PointerType:
    """The type of a pointer."""

    element_ty: DType


class constexpr:  # noqa: N801  as Triton calls it
    """A constant: something that behaves like the value itself, and has it as `.value`."""

    def __new__(cls, value: object) -> object:
        if isinstance(value, (int, float)):  # True and False among them
            base = float if isinstance(value, float) else int
            return type("constexpr", (base,), {"value": value})(value)
        return value


class Value:
    """A scalar (a bool, int or float of Python) or a tile (a tensor) of one type."""

    __array_priority__ = 1000
    __slots__ = ("data", "dtype")
    __hash__ = None

    def __init__(self, data: Tensor | float, dtype: DType) -> None:
        self.data, self.dtype = data, dtype

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape) if isinstance(self.data, Tensor) else []

    @property
    def type(self) -> DType:
        return self.dtype

    @property
    def T(self) -> Value:  # noqa: N802
        return Value(self.data.T, self.dtype)

    def to(self, dtype: DType, *, bitcast: bool = False) -> Value:
        """The same in another type; or the same bits."""
        if bitcast:
            bits = torch.as_tensor(self.data, dtype=self.dtype.torch).view(dtype.torch)
            return Value(bits if isinstance(self.data, Tensor) else bits.item(), dtype)
        if isinstance(self.data, Tensor):
            return Value(self.data.to(dtype.torch), dtype)
        return scalar(self.data, dtype)

    cast = to

    def __bool__(self) -> bool:
        return bool(self._only())

    def __index__(self) -> int:
        if self.dtype.kind == 2:
            raise TypeError(f"a whole number is needed, got {self}")
        return int(self._only())

    __int__ = __index__

    def __float__(self) -> float:
        return float(self._only())

    def _only(self) -> float:
        if isinstance(self.data, Tensor):
            raise KernelError(f"a tile {self.shape} stands where a scalar must, at {source_line()}")
        return self.data

    def __getitem__(self, index: object) -> Value:
        if not isinstance(self.data, Tensor):
            if index == () or index is None or (isinstance(index, tuple) and set(index) == {None}):
                return Value(torch.as_tensor(self.data, dtype=self.dtype.torch)[index], self.dtype)
            raise TypeError("a scalar has no parts")
        return Value(self.data[index], self.dtype)

    def __repr__(self) -> str:
        return f"{self.data}:{self.dtype}"

    def __neg__(self) -> Value:
        return _made(-self.data, self.dtype)

    def __invert__(self) -> Value:
        if isinstance(self.data, bool):
            return Value(not self.data, int1)
        return Value(~self.data, self.dtype)


def scalar(number: float, dtype: DType) -> Value:
    """A number in a type, rounded as the type does; an error where a whole number does not fit."""
    if dtype.kind == 0:
        return Value(bool(number), dtype)
    if dtype.kind == 1:
        number = int(number)
        limit = 1 << (dtype.primitive_bitwidth - 1)
        if dtype is not uint8 and not -limit <= number < limit:
            raise KernelError(f"{number} does not fit into {dtype}, at {source_line()}")
        return Value(number, dtype)
    if dtype is float32:
        try:
            return Value(struct.unpack("f", struct.pack("f", number))[0], dtype)
        except OverflowError:
            return Value(float("inf") if number > 0 else -float("inf"), dtype)
    return Value(torch.tensor(float(number), dtype=dtype.torch).item(), dtype)


def value_of(x: object) -> Value:
    """`x` as a value; plain numbers of Python get the type that Triton gives to constants."""
    if isinstance(x, Value):
        return x
    if isinstance(x, bool) or isinstance(getattr(x, "value", None), bool):
        return Value(bool(x), int1)
    if isinstance(x, int):
        return Value(int(x), int32 if -(2**31) <= x < 2**31 else int64)
    if isinstance(x, float):
        return scalar(float(x), float32)
    if isinstance(x, Tensor):
        return Value(x, dtype_of(x))
    raise KernelError(f"{x!r} stands where a value in registers must, at {source_line()}")


def _made(data: Tensor | float, dtype: DType) -> Value:
    return Value(data, dtype) if isinstance(data, Tensor) else scalar(data, dtype)


def _kind_of_constant(x: object) -> int:
    if isinstance(getattr(x, "value", x), bool):
        return 0
    return 1 if isinstance(x, int) else 2


def common_type(x: object, y: object, division: bool = False) -> DType:
    """The type in which Triton computes with both; a constant takes the type of the other where its kind allows it."""
    if isinstance(x, Value) and isinstance(y, Value):
        a, b = x.dtype, y.dtype
    elif isinstance(x, Value):
        a = x.dtype
        b = a if _kind_of_constant(y) <= a.kind else value_of(y).dtype
    elif isinstance(y, Value):
        b = y.dtype
        a = b if _kind_of_constant(x) <= b.kind else value_of(x).dtype
    else:
        a, b = value_of(x).dtype, value_of(y).dtype
    if a.kind != b.kind:
        common = a if a.kind > b.kind else b
    elif a.kind == 2 and a is not b and {a, b} <= {float16, bfloat16}:
        common = float32
    else:
        common = a if a.primitive_bitwidth >= b.primitive_bitwidth else b
    if division and common in (float16, bfloat16):
        return float32
    return common


def raw(x: object, dtype: DType | None = None) -> Tensor | float:
    """The tensor or the number in `x`, in that type."""
    data = value_of(x).data
    if dtype is None:
        return data
    if isinstance(data, Tensor):
        return data.to(dtype.torch)
    return scalar(data, dtype).data if dtype in (float16, bfloat16) else data


def _truncated(x: int, y: int) -> int:
    quotient = abs(x) // abs(y)
    return quotient if (x < 0) == (y < 0) else -quotient


def _divided(x: object, y: object) -> object:
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return torch.div(x, y, rounding_mode="trunc")
    return _truncated(x, y)


def _remainder(x: object, y: object) -> object:
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return torch.fmod(torch.as_tensor(x), y)
    return x - y * _truncated(x, y)


def _true_division(x: object, y: object) -> object:
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return torch.true_divide(torch.as_tensor(x), y)
    return (torch.tensor(x, dtype=torch.float32) / torch.tensor(y, dtype=torch.float32)).item()


def _arithmetic(compute: Callable) -> Callable:
    def result(x: object, y: object) -> Value:
        dtype = common_type(x, y)
        if dtype.kind == 0 and compute not in (operator.and_, operator.or_, operator.xor):
            dtype = int32
        return _made(compute(raw(x, dtype), raw(y, dtype)), dtype)

    return result


def _division(x: object, y: object) -> Value:
    dtype = common_type(x, y, division=True)
    dtype = dtype if dtype.kind == 2 else float32
    return _made(_true_division(raw(x, dtype), raw(y, dtype)), dtype)


def _comparison(compute: Callable) -> Callable:
    def result(x: object, y: object) -> Value:
        dtype = common_type(x, y)
        return Value(compute(raw(x, dtype), raw(y, dtype)), int1)

    return result


_OPERATORS = {
    "add": _arithmetic(operator.add),
    "sub": _arithmetic(operator.sub),
    "mul": _arithmetic(operator.mul),
    "floordiv": _arithmetic(_divided),
    "mod": _arithmetic(_remainder),
    "and": _arithmetic(operator.and_),
    "or": _arithmetic(operator.or_),
    "xor": _arithmetic(operator.xor),
    "lshift": _arithmetic(operator.lshift),
    "rshift": _arithmetic(operator.rshift),
    "truediv": _division,
}


def _install() -> None:
    def forward(compute: Callable) -> Callable:
        def method(self: Value, other: object) -> Value:
            return NotImplemented if isinstance(other, Pointer) else compute(self, other)

        return method

    def backward(compute: Callable) -> Callable:
        return lambda self, other: compute(other, self)

    for name, compute in _OPERATORS.items():
        setattr(Value, f"__{name}__", forward(compute))
        setattr(Value, f"__r{name}__", backward(compute))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Value, f"__{name}__", forward(_comparison(getattr(operator, name))))


class GlobalTensor:
    """A tensor in global memory: only its elements may be read and written, not what lies between them."""

    _LARGEST_MAP = 2**28  # elements; of what is spread wider, only the ends are known

    def __init__(self, x: Tensor, name: str) -> None:
        self.tensor, self.name, self.dtype = x.detach(), name, dtype_of(x)
        self.extent = 0 if x.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        self.flat = self.tensor.as_strided((self.extent,), (1,), self.tensor.storage_offset())
        self._own: Tensor | None = None

    def check(self, offsets: Tensor, what: str) -> None:
        """An error where one of the offsets, int64 [any], is not an element."""
        if offsets.numel() == 0:
            return
        lowest, highest = int(offsets.min()), int(offsets.max())
        outside = lowest < 0 or highest >= self.extent
        if not outside and len(set(self.tensor.shape)) and self.extent > self.tensor.numel():
            outside = self.extent <= self._LARGEST_MAP and not bool(self._elements()[offsets].all())
        if outside:
            raise KernelError(
                f"{what} of {self.name} {list(self.tensor.shape)} outside of its elements, at {source_line()}: "
                f"offsets {lowest} to {highest}, with strides {self.tensor.stride()}"
            )

    def _elements(self) -> Tensor:
        if self._own is None:
            self._own = torch.zeros(self.extent, dtype=torch.bool)
            self._own.as_strided(self.tensor.shape, self.tensor.stride()).fill_(True)
        return self._own


class Pointer:
    """Pointers into one tensor: offsets in elements, a number or int64 of any shape."""

    __slots__ = ("into", "offsets")
    __hash__ = None

    def __init__(self, into: GlobalTensor, offsets: Tensor | int = 0) -> None:
        self.into, self.offsets = into, offsets

    @property
    def dtype(self) -> PointerType:
        return PointerType(self.into.dtype)

    type = dtype

    @property
    def shape(self) -> list[int]:
        return list(self.offsets.shape) if isinstance(self.offsets, Tensor) else []

    def _moved(self, by: object, sign: int) -> Pointer:
        by = value_of(by)
        if by.dtype.kind != 1:
            raise KernelError(f"a pointer is moved by {by}, at {source_line()}")
        return Pointer(self.into, self.offsets + sign * raw(by, int64))

    def __add__(self, by: object) -> Pointer:
        return self._moved(by, 1)

    __radd__ = __add__

    def __sub__(self, by: object) -> Pointer:
        return self._moved(by, -1)

    def __getitem__(self, index: object) -> Pointer:
        return Pointer(self.into, torch.as_tensor(self.offsets)[index])


_install()
