"""Triton's interpreter, quicker and with products like a GPU's.

It puts its own builtins in the place of triton.language's for each call of a function, also within a kernel, for which
that has been done, and builds a table of dtypes for each look-up in it: that is half of its time.

It multiplies tiles by numpy's BLAS, which on some processors adds the products of x @ y in another order than those of
y^T @ x^T. A GPU adds fp32 products in the order of the inner dimension, so a score that the backward recomputes
transposed has the bits that it had; in the interpreter it has them where the sums are rounded once. For the same reason
an fma is rounded once, which the interpreter does twice.
"""

from __future__ import annotations

import functools
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


def install() -> None:
    """Does so in this process."""
    interpreter._patch_lang = _once(interpreter._patch_lang)
    interpreter._get_np_dtype = _from_table(interpreter._get_np_dtype)
    interpreter.InterpreterBuilder.create_dot = _create_dot
    interpreter.InterpreterBuilder.create_fma = _create_fma
