"""Kernels of plain Triton, whose outcome the model and Triton's interpreter must agree on; imported once over each."""

import triton
import triton.language as tl


@triton.jit
def whole_numbers(x, y, result, N: tl.constexpr):
    """Divisions of numbers of both signs, of tiles and of scalars."""
    o = tl.arange(0, N)
    b_x, b_y = tl.load(x + o), tl.load(y + o)
    tl.store(result + o, b_x // b_y)
    tl.store(result + N + o, b_x % b_y)
    tl.store(result + 2 * N + o, tl.minimum(b_x, b_y) - tl.maximum(b_x, 3))
    tl.store(result + 3 * N + o, tl.cdiv(b_x, 4) + (b_x & 6) * 2 - (b_x >> 1))
    for i in range(tl.load(x), tl.load(y)):
        i_x = tl.load(x + i)
        tl.store(result + 4 * N + i, i_x // tl.load(y + i) * 3 + i_x % 5)
        tl.store(result + 5 * N + i, tl.where(i_x < 0, i_x, i).to(tl.int64))


@triton.jit
def real_numbers(x, result, factor, N: tl.constexpr):
    """Rounding, bits, NaN in the maxima of rows, masked lanes, and types that meet."""
    o = tl.arange(0, N)
    b_x = tl.load(x + o, mask=o < N - 3, other=-1.5)
    b_half = b_x.to(tl.float16)
    tl.store(result + o, b_half * o + b_x * factor)
    tl.store(result + N + o, (b_half * 1.1).to(tl.float32))
    tl.store(result + 2 * N + o, tl.where(b_x != b_x, 9.0, tl.maximum(b_x, 0.25) + tl.exp2(tl.minimum(b_x, 2.0))))
    tl.store(result + 3 * N + o, tl.where(o % 2 == 0, b_x, float("inf")))
    b_square = b_x[:, None] * o[None, :]
    tl.store(result + 4 * N + o, tl.max(b_square, 1), mask=o > 2)
    tl.store(result + 5 * N + o, tl.max(tl.where(b_square != b_square, 0.0, b_square), 0) / 3)
    tl.store(result + 6 * N + o, tl.where(tl.max(b_x, 0) > 1, 1.0, 2.0) * tl.log2(tl.abs(b_x) + 1))
    tl.store(result + 7 * N + o, (b_x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True))
    tl.store(result + 8 * N, (tl.load(x).to(tl.int32, bitcast=True) ^ 1).to(tl.float32, bitcast=True))
    tl.store(result + 9 * N + o, tl.fma(b_x, b_x, -(b_x * b_x)) * 16777216.0)
