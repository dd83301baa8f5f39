"""Checks of arguments: an error names the argument, what it must be and what it was.

As in torch.nn, an argument of a wrong type is a TypeError, and one out of range a ValueError.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ..spec import can_be_read, is_dense

if TYPE_CHECKING:
    _Forward = TypeVar("_Forward", bound=Callable[..., object])

    def called_as(forward: _Forward) -> Callable[[Callable[..., None]], _Forward]:
        """Gives `__call__` the types of `forward` in the eyes of type checkers: torch's `__call__` returns Any."""
        raise NotImplementedError


def check_ints(least: int, **values: object) -> None:
    """Raises where one of the values is not an int of at least `least` that torch can hold."""
    for name, x in values.items():
        if isinstance(x, bool) or not isinstance(x, (Integral, torch.SymInt)):
            raise TypeError(f"{name} must be an int, got {x!r}")
        if x < least:
            raise ValueError(f"{name} must be at least {least}, got {x}")
        if x >= 2**63:
            raise ValueError(f"{name} must be below 2**63, got {x}")


def check_numbers(wanted: str, is_right: Callable[[float], bool], **values: object) -> None:
    """Raises where one of the values is not a number that is right."""
    for name, x in values.items():
        if not isinstance(x, Real):
            raise TypeError(f"{name} must be a number, got {x!r}")
        if not is_right(x):
            raise ValueError(f"{name} must be {wanted}, got {x}")


def check_probability(**values: object) -> None:
    """Raises where one of the values is not a number from 0 to 1."""
    check_numbers("between 0 and 1", lambda p: 0 <= p <= 1, **values)


def check_bools(**values: object) -> None:
    """Raises where one of the values is not a bool."""
    for name, x in values.items():
        if not isinstance(x, bool):
            raise TypeError(f"{name} must be a bool, got {x!r}")


def check_heads(error: type[Exception] = AssertionError, **width_and_heads: object) -> None:
    """Raises where a width and a number of heads are not positive ints, and `error` where heads do not divide it."""
    check_ints(1, **width_and_heads)
    (of, width), (name, heads) = width_and_heads.items()
    if width % heads:
        raise error(f"{name} must divide {of} = {width}, got {heads}")


def check_ids(size: int, **ids: object) -> None:
    """Raises where one of the ids is not one of a vocabulary of this size."""
    for name, x in ids.items():
        check_ints(0, **{name: x})
        if x >= size:
            raise ValueError(f"{name} must be below the vocabulary's size {size}, got {x}")


def check_dense(name: str, x: object) -> None:
    """Raises where `x` is not a Tensor, or a nested or sparse one, or what torch.fx traces with.

    torch.fx takes torch.nn's classes of the same names whole, and no others.
    """
    if isinstance(x, torch.fx.Proxy):
        raise NotImplementedError(
            "torch.fx cannot trace modules of fastattn: trace the model of torch.nn, and fastattn.swap what comes of it"
        )
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(x).__name__}")
    if not is_dense(x):
        raise ValueError(f"{name} must be dense, got {'a nested Tensor' if x.is_nested else x.layout}")


def check_tensor(name: str, x: object, kind: str, shape: tuple[int | str, ...]) -> None:
    """Raises where `x` is not a Tensor of this kind and shape.

    Args:
        kind: "bool", or "integer" for int32 and int64.
        shape: a str in place of a length that may be any.
    """
    check_dense(name, x)
    if x.dtype not in ((torch.bool,) if kind == "bool" else (torch.int32, torch.int64)):
        raise ValueError(f"{name} must be {'bool' if kind == 'bool' else 'int32 or int64'}, got {x.dtype}")
    if x.dim() != len(shape) or any(n != m for n, m in zip(x.shape, shape, strict=True) if not isinstance(m, str)):
        raise ValueError(f"{name} must be [{', '.join(map(str, shape))}], got {list(x.shape)}")


def check_range(name: str, x: Tensor, size: int, limit: str = "{}") -> None:
    """Raises where a number in `x` is not from 0 to size - 1, as far as that needs no synchronisation with a device.

    Args:
        limit: `size` in words, with {} where it stands: written only for an error, since a graph may not know it.
    """
    if not can_be_read(x) or not x.numel():
        return
    first, last = map(int, x.aminmax())
    if first < 0:
        raise ValueError(f"{name} must be at least 0, got {first}")
    if last >= size:
        raise ValueError(f"{name} must be below {limit.format(size)}, got {last}")


def checked_index(name: str, x: int | None, size: int) -> int | None:
    """An index into a table of this size, which counts from the end where it is negative, as one from 0 on; or None."""
    if x is None:
        return None
    check_ints(-size, **{name: x})
    if x >= size:
        raise ValueError(f"{name} must be below {size}, got {x}")
    return x % size
