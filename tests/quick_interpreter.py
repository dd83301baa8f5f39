"""Triton's interpreter, quicker and with products like a GPU's.

It puts its own builtins in the place of triton.language's for each call of a function, also within a kernel, for which
that has been done, and builds a table of dtypes for each look-up in it: that is half of its time. It looks for overflow
of each sum and product of integers, and then says nothing of it outside of debugging; and it derives what follows of a
shape for each tensor: that is a third of what remains. It asks for each pair of operands what becomes of their dtypes,
where most pairs are of one dtype, or of a tensor and a constant: that, and how it hands arguments on, is a third again.

It multiplies tiles by numpy's BLAS, which on some processors adds the products of x @ y in another order than those of
y^T @ x^T. A GPU adds fp32 products in the order of the inner dimension, so a score that the backward recomputes
transposed has the bits that it had; in the interpreter it has them where the sums are rounded once. For the same reason
an fma is rounded once, which the interpreter does twice.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


class _Patches(interpreter._LangPatchScope):
    """What is changed in triton.language until `restore`, by the kernel that runs."""

    in_force = False

    def restore(self) -> None:
        super().restore()
        _Patches.in_force = False


def _once(patch_lang: Callable) -> Callable:
    def patch(fn: Callable) -> interpreter._LangPatchScope:
        if _Patches.in_force:
            return interpreter._LangPatchScope()
        scope = _Patches()
        # Functions of triton.language use modules that the kernel does not.
        scope._changes = patch_lang(fn)._changes + patch_lang(tl.sum.fn)._changes
        _Patches.in_force = True
        return scope

    return patch


def _from_table(np_dtype: Callable) -> Callable:
    named = functools.cache(lambda name: np_dtype(tl.dtype(name)))
    return lambda dtype: np.dtype(np.uint64) if dtype.scalar.is_ptr() else named(dtype.scalar.name)


def _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc) -> interpreter.TensorHandle:
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _create_fma(self, x, y, z) -> interpreter.TensorHandle:
    exact = x.data.astype(np.float64) * y.data + z.data
    return interpreter.TensorHandle(exact.astype(x.data.dtype), z.dtype.scalar)


def _unwrapped(unwrap: Callable) -> Callable:
    wrap_nothing = {int, float, tl.tensor, tl.dtype}
    return lambda o: o if type(o) in wrap_nothing else o.value if type(o) is tl.constexpr else unwrap(o)


def _derived_once(block_type_init: Callable) -> Callable:
    """`block_type.__init__`, which reads what it set for others of that element and shape; and `sizes`, of ints."""
    known = {}

    def init(self: tl.block_type, element_ty: tl.dtype, shape: Iterable) -> None:
        key = element_ty.name, *map(tl.core._unwrap_if_constexpr, shape)
        if key not in known:
            block_type_init(self, element_ty, list(shape))
            known[key] = vars(self) | {"sizes": key[1:]}
        vars(self).update(known[key], element_ty=element_ty)

    return init


def _tensor_init(self: tl.tensor, handle: interpreter.TensorHandle, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _of_sizes(type.sizes)


@functools.cache
def _of_sizes(sizes: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    """`shape` and `numel` of a tensor."""
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def _handle_init(self: interpreter.TensorHandle, data: np.ndarray, dtype: tl.dtype, attr: dict | None = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if data.itemsize > 1 and data.itemsize * 8 > getattr(dtype, "primitive_bitwidth", 64):
        self.__post_init__()  # which raises what there is to say of it


def _broadcast(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    if lhs.type.sizes == rhs.type.sizes:
        return lhs, rhs
    sizes = _sizes_of_both(lhs.type.sizes, rhs.type.sizes)
    return _expanded(lhs, sizes), _expanded(rhs, sizes)


_sizes_of_both = functools.cache(np.broadcast_shapes)


def _expanded(x: tl.tensor, sizes: tuple[int, ...]) -> tl.tensor:
    if x.type.sizes == sizes:
        return x
    data = np.empty(sizes, x.handle.data.dtype)
    data[...] = x.handle.data
    return tl.tensor(interpreter.TensorHandle(data, x.handle.dtype.scalar), tl.block_type(x.dtype, sizes))


def _operands(checked: Callable) -> Callable:
    """`binary_op_type_checking_impl`, which learns once what becomes of two dtypes, or of a dtype beside a constant."""
    known = {}

    def become(self: TritonSemantic, x: tl.tensor | float, operand: tl.tensor) -> Callable:
        if isinstance(x, tl.tensor):
            return functools.partial(self.cast, dst_ty=operand.dtype) if x.dtype != operand.dtype else lambda x: x
        constant = self.scalar_constant(x, operand.dtype)
        constant.handle.data.flags.writeable = False  # it is an operand of others too
        return lambda _: constant

    def operands(self: TritonSemantic, lhs: tl.tensor | float, rhs: tl.tensor | float, *options: bool) -> tuple:
        left = lhs.dtype.name if isinstance(lhs, tl.tensor) else (type(lhs), lhs)
        right = rhs.dtype.name if isinstance(rhs, tl.tensor) else (type(rhs), rhs)
        key = left, right, options
        if key not in known:
            known[key] = [
                become(self, x, y) for x, y in zip((lhs, rhs), checked(self, lhs, rhs, *options), strict=True)
            ]
        of_lhs, of_rhs = known[key]
        return self.broadcast_impl_value(of_lhs(lhs), of_rhs(rhs))

    return operands


def _with_semantic(obj: object, name: str, member: Callable, builder: object, scope: _Patches) -> None:
    """`_patch_attr`, but for the layer of a builtin that asks whether there is a semantic."""
    builtin = getattr(member, "__wrapped__", member)

    def of_interpreter(*args, **kwargs):
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return builtin(*args, **kwargs)

    scope.set_attr(obj, name, of_interpreter)


def install() -> None:
    """Does so in this process."""
    interpreter._patch_lang = _once(interpreter._patch_lang)
    interpreter._get_np_dtype = _from_table(interpreter._get_np_dtype)
    interpreter.InterpreterBuilder.create_dot = _create_dot
    interpreter.InterpreterBuilder.create_fma = _create_fma
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    tl.block_type.__init__ = _derived_once(tl.block_type.__init__)
    tl.core._unwrap_if_constexpr = _unwrapped(tl.core._unwrap_if_constexpr)
    tl.tensor.__init__ = _tensor_init
    tl.dtype.sizes = ()
    interpreter.TensorHandle.__init__ = _handle_init
    TritonSemantic.broadcast_impl_value = _broadcast
    TritonSemantic.binary_op_type_checking_impl = _operands(TritonSemantic.binary_op_type_checking_impl)
    interpreter._patch_attr = _with_semantic
