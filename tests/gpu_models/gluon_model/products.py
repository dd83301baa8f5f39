"""wgmma: products of a warp group that read shared memory while they are under way."""

from __future__ import annotations

from torch import Tensor

from .errors import KernelError, source_line
from .machine import machine
from .protocol import Begin
from .shared import View
from .values import DType, Value, bfloat16, float16, float32, raw, value_of


class Accumulator:
    """The outcome of a product that may still be under way: only a wait or another product may be given it."""

    def __init__(self, product: _Product) -> None:
        self._product = product
        self.dtype: DType = float32
        self.shape = product.shape

    def __getattr__(self, name: str) -> object:
        raise KernelError(f"the outcome of {self._product} is used ({name}) before a wait, at {source_line()}")

    def __str__(self) -> str:
        return f"the outcome of {self._product}"


def _unreadable(name: str) -> None:
    def method(self: Accumulator, *_: object) -> None:
        raise KernelError(f"the outcome of {self._product} is used before a wait, at {source_line()}")

    setattr(Accumulator, name, method)


for _name in ("add", "sub", "mul", "truediv", "radd", "rsub", "rmul", "neg", "getitem", "bool", "lt", "gt", "ge", "le"):
    _unreadable(f"__{_name}__")


class _Product:
    def __init__(self, a: View | Value, b: View, acc: Value | Accumulator, use_acc: bool) -> None:
        m = machine()
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.shape = [a.shape[0], b.shape[1]]
        self.where = f"wgmma {[*a.shape, b.shape[1]]} by {m.current.name} at {source_line()}"
        self._check(m.current.warps)
        self.accesses = []
        for operand in (a, b):
            if isinstance(operand, View):
                self.accesses.append(operand.allocation.access(operand, False, False, "wgmma"))
                m.record(Begin, self.accesses[-1])
        self.result: Tensor | None = None
        self.early = m.early()
        if self.early and not isinstance(acc, Accumulator):
            self._compute()

    def __str__(self) -> str:
        return self.where

    def _check(self, warps: int) -> None:
        a, b, acc = self.a, self.b, self.acc
        (rows, depth), columns = a.shape, b.shape[1]
        rules = (
            (
                isinstance(a, (View, Value)) and isinstance(b, View),
                "b must lie in shared memory, a there or in registers",
            ),
            (a.dtype in (float16, bfloat16), f"a must have 16 bits, was {a.dtype}"),
            (b.dtype is a.dtype, f"b must be {a.dtype} like a, was {b.dtype}"),
            (acc.dtype is float32, f"the accumulator must be fp32, was {acc.dtype}"),
            (b.shape[0] == depth, f"a is {a.shape}, b {b.shape}"),
            (list(acc.shape) == [rows, columns], f"the accumulator must be {[rows, columns]}, was {acc.shape}"),
            (rows % 64 == 0, f"a must have a multiple of 64 rows, had {rows}"),
            (columns % 8 == 0 and columns <= 256, f"b must have up to 256 columns, by 8, had {columns}"),
            (depth % 16 == 0, f"a must have a multiple of 16 columns, had {depth}"),
            (warps == 4, f"one warp group must do it, got {warps} warps"),
        )
        for right, rule in rules:
            if not right:
                raise KernelError(f"{self.where}: {rule}")

    def _compute(self) -> None:
        a, b = self.a.data.float(), self.b.data.float()
        self.result = a @ b
        if self.use_acc:
            self.result += self.acc._product.result if isinstance(self.acc, Accumulator) else raw(self.acc)
        self.a = self.b = None  # read

    def complete(self) -> None:
        """Its result is there, and its operands have been read."""
        if self.result is None:
            self._compute()
        for access in self.accesses:
            machine().over(access)


def warpgroup_mma(
    a: View | Value,
    b: View,
    acc: Value | Accumulator,
    *,
    use_acc: object = True,
    precision: object = None,
    max_num_imprecise_acc: object = None,
    is_async: bool = False,
) -> Value | Accumulator:
    """a @ b + acc; if asynchronous, to be waited for."""
    m = machine()
    m.pause()
    m.current.products.append(product := _Product(a, b, acc, bool(value_of(use_acc))))
    outcome = Accumulator(product)
    return outcome if is_async else warpgroup_mma_wait(0, deps=(outcome,))


def warpgroup_mma_init(value: Value) -> Value:
    """A value in the place of a product's outcome, which need not be waited for."""
    return value


def warpgroup_mma_wait(num_outstanding: int = 0, deps: object = None) -> object:
    """Until at most so many products are under way; the outcomes of those in `deps` that are over."""
    if deps is None:
        raise KernelError(f"deps must be given, at {source_line()}")
    m = machine()
    m.pause()
    me = m.current
    while len(me.products) > int(num_outstanding):
        me.products.pop(0).complete()
    outcomes = tuple(_outcome(x, me.products) for x in deps)
    return outcomes[0] if len(outcomes) == 1 else outcomes


def _outcome(x: object, under_way: list) -> object:
    if isinstance(x, Accumulator) and x._product not in under_way:
        return Value(x._product.result, float32)
    return x
