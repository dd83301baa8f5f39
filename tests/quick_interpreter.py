"""Triton's interpreter, quicker and with products like a GPU's.

It puts its own builtins in the place of triton.language's for each call of a function, also within a kernel, for which
that has been done, and builds a table of dtypes for each look-up in it: that is half of its time. It looks for overflow
of each sum and product of integers, and then says nothing of it outside of debugging; and it derives what follows of a
shape for each tensor: that is a third of what remains.

It multiplies tiles by numpy's BLAS, which on some processors adds the products of x @ y in another order than those of
y^T @ x^T. A GPU adds fp32 products in the order of the inner dimension, so a score that the backward recomputes
transposed has the bits that it had; in the interpreter it has them where the sums are rounded once. For the same reason
an fma is rounded once, which the interpreter does twice.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
import triton.language as tl
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


def _derived_once(block_type_init: Callable) -> Callable:
    """`block_type.__init__`, which reads what it set for another type of that element and shape."""
    known = {}

    def init(self: tl.block_type, element_ty: tl.dtype, shape: list) -> None:
        key = element_ty.name, *map(tl.core._unwrap_if_constexpr, shape)
        if key not in known:
            block_type_init(self, element_ty, shape)
            known[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known[key]

    return init


def _tensor_init(self: tl.tensor, handle: interpreter.TensorHandle, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _of_shape(*type.shape) if type.is_block() else _of_shape()


@functools.cache
def _of_shape(*shape: int) -> tuple[tl.tuple, tl.constexpr]:
    """`shape` and `numel` of a tensor."""
    return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


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
    tl.tensor.__init__ = _tensor_init
