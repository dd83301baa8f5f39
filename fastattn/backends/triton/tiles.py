"""Operations that the kernels share: reading, writing and multiplying a tile, and the launch of a kernel.

Names in kernels: `i_` index, `o_` positions along an axis, `m_` which of them may be read, `p_` pointer, `b_` block in
registers, `s_` stride, `_log2` a quantity in base 2. M counts queries, N keys, D head dims.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import spec

LOG2E: tl.constexpr = tl.constexpr(spec.LOG2E)
INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


class Heads(NamedTuple):
    """A tensor [B, H, N, D] and its strides; Triton compiles a last stride of 1 into the kernel.

    Where there is no such tensor, data is None; see `Table`.

    aligned: 1 where every row begins at a multiple of 16 bytes from the first one, else None. Triton sees by itself
        only which strides are multiples of 16 elements, and loads one element at a time where they are not.
    """

    data: Tensor | None
    s: tuple[int, int, int, int] | None
    aligned: int | None = None


class Table(NamedTuple):
    """Something broadcastable to [B, H, n_q, n_k], and its strides; s_q and s_k are None where one entry is for all.

    Where there is no such thing, data is None: Triton 3.6 cannot compare a tuple that holds a None with None.

    by_distance: 1 where the entry of a pair is as far from data as the key is from the query, by index; else None.
    """

    data: Tensor | None
    s_b: int | None
    s_h: int | None
    s_q: int | None
    s_k: int | None
    by_distance: int | None = None


class Pages(NamedTuple):
    """Where keys lie that are in pages: tensors of them are [pages, H_kv, size, D] then, for `Heads` as any others.

    Where they are not, table is None; see `Table`.

    table: integer [B, n_k / size], the pages of each sample. number: of all pages, within which every load stays.
    """

    table: Tensor | None
    size: int | None
    number: int | None


def heads(x: Tensor | None) -> Heads:
    """`x` [B, H, N, D] for a kernel, as it is."""
    if x is None:
        return Heads(None, None)
    strides = x.stride()
    return Heads(x, strides, None if any(s * x.element_size() % 16 for s in strides[:3]) else 1)


def readable(x: Tensor) -> Tensor:
    """`x` [B, H, N, D] for a kernel that reads it many times; copied where its rows are scattered."""
    return x if x.stride(3) == 1 or x.shape[3] <= 1 else x.contiguous()


def pages(table: Tensor | None, k: Tensor) -> Pages:
    """The pages of keys `k` [pages, H_kv, size, D], by a table [B, pages of a sample]; without one, of none."""
    return Pages(None, None, None) if table is None else Pages(table.contiguous(), k.shape[2], k.shape[0])


def table(x: Tensor | None) -> Table:
    """`x` for a kernel, as it lies in memory."""
    if x is None:
        return Table(None, None, None, None, None)
    x = x if x.dim() == 4 else x[(None,) * (4 - x.dim())]
    strides = [0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
    return Table(x, *strides[:2], *(s or None for s in strides[2:]))


def by_distance(x: Tensor, n_q: int) -> Table:
    """`x` [H or 1, 1, n_q + n_k - 1] for a kernel, as an entry for each distance of a key from a query."""
    x = x.contiguous()
    return Table(x[..., n_q - 1 :], 0, 0 if len(x) == 1 else x.shape[2], None, None, 1)


def launch(
    kernel: triton.JITFunction, programs: int, x: Heads | Tensor | object, *args: object, **options: object
) -> triton.compiler.CompiledKernel | None:
    """Runs `programs` instances of `kernel` on the GPU of its first argument; nothing where there is nothing to do.

    Args:
        x: a tensor, `Heads`, or a descriptor of a tensor.

    Returns:
        The kernel that Triton compiled; None where none was.
    """
    if programs == 0:
        return None
    tensor = x if isinstance(x, Tensor) else x.data if isinstance(x, Heads) else x.base
    with torch.cuda.device_of(tensor):
        # Triton 3.10 turns the fusion of a * b + c off by default.
        return kernel[(programs,)](x, *args, **options, enable_fp_fusion=True)


def tf32_will_do() -> bool:
    """Whether torch is told that less than fp32 will do for matrix products.

    torch.get_float32_matmul_precision raises where that was said by `torch.backends` alone.
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def dot_precision(q: Tensor) -> str:
    """How `dot` multiplies fp32: exactly, unless torch is told that less will do for matrix products.

    "bf16x6": by tensor cores, each number as the sum of three of bf16, of whose products the six largest count. That is
    as exact as fp32; three products of two numbers of TF32 are not, since tensor cores cut off their sums, more often
    then. On sm_86, sm_89 and sm_120 they would be no faster than the other units; on sm_100 nothing was tried.
    """
    if tf32_will_do():
        return "tf32"
    if triton.knobs.runtime.interpret or q.dtype != torch.float32:
        return "ieee"
    return "bf16x6" if torch.cuda.get_device_capability(q.device) in ((8, 0), (9, 0)) else "ieee"


@triton.jit
def program_share(n_tiles, H):
    """(tile, head, batch entry) of this program. All on one axis of the grid, since the others end at 65535."""
    i_program = tl.program_id(0)
    i_bh = (i_program // n_tiles).to(tl.int64)  # 64 bits: it is multiplied with strides
    return i_program % n_tiles, i_bh % H, i_bh // H


@triton.jit
def head_of(x, i_b, i_h):
    """Pointer to row 0 of a head."""
    offset = i_b * x.s[0] + i_h * x.s[1]
    if x.aligned is not None:
        IN_16_BYTES: tl.constexpr = 128 // x.data.dtype.element_ty.primitive_bitwidth
        offset = tl.multiple_of(offset, IN_16_BYTES)
    return x.data + offset


@triton.jit
def tile_pointers(p_head, x, i_tile, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers [BLOCK, BLOCK_D] to a tile of rows of a head of `x`."""
    p_tile = p_head + tl.cast(i_tile, tl.int64) * BLOCK * x.s[2]
    o_row = tl.arange(0, BLOCK).to(tl.int64)
    o_col = tl.arange(0, BLOCK_D).to(tl.int64)
    o_rows = o_row[:, None] * x.s[2]
    if x.aligned is not None:
        IN_16_BYTES: tl.constexpr = 128 // x.data.dtype.element_ty.primitive_bitwidth
        o_rows = tl.multiple_of(o_rows, [IN_16_BYTES, IN_16_BYTES])
    return p_tile + o_rows + o_col[None, :] * x.s[3]


@triton.jit
def load_tile(p_head, x, i_tile, m_row, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a head of `x` [BLOCK, BLOCK_D]; where `m_row` is False and past column D 0, without reading."""
    p_rows = tile_pointers(p_head, x, i_tile, BLOCK, BLOCK_D)
    m_col = (tl.arange(0, BLOCK_D) < D)[None, :]
    return tl.load(p_rows, mask=m_row[:, None] & m_col, other=0.0)


@triton.jit
def rows_of_heads(p_x, x, i_b, i_h, i_row, BLOCK_D: tl.constexpr):
    """Pointers [M, BLOCK_D] to rows of `x`, counted from `p_x`; each index is one for all, or a vector of M of them."""
    o_row = tl.cast(i_b, tl.int64) * x.s[0] + tl.cast(i_h, tl.int64) * x.s[1] + tl.cast(i_row, tl.int64) * x.s[2]
    if x.aligned is not None:
        IN_16_BYTES: tl.constexpr = 128 // x.data.dtype.element_ty.primitive_bitwidth
        o_row = tl.multiple_of(o_row, IN_16_BYTES)
    return p_x + o_row[:, None] + tl.arange(0, BLOCK_D).to(tl.int64)[None, :] * x.s[3]


@triton.jit
def real_columns(m_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """bool [M, BLOCK_D]: the columns up to D of the rows that `m_row` names."""
    return m_row[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]


@triton.jit
def page_and_row(pages, i_b, o_k, m_k, n_k):
    """(page, row of it) of keys, each int64 [N]."""
    p_page = pages.table + i_b * (n_k // pages.size) + o_k // pages.size
    b_page = tl.load(p_page, mask=m_k, other=0).to(tl.int64)
    # Whatever the table says, no load leaves the pages.
    return tl.minimum(tl.maximum(b_page, 0), pages.number - 1), (o_k % pages.size).to(tl.int64)


@triton.jit
def load_from_pages(x, i_h, places, m_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """`load_tile` for the rows of a head at these places of `page_and_row`."""
    p_rows = rows_of_heads(head_of(x, 0, i_h), x, places[0], 0, places[1], BLOCK_D)
    return tl.load(p_rows, mask=real_columns(m_row, D, BLOCK_D), other=0.0)


@triton.jit
def numbers(b_x, STORED: tl.constexpr):
    """A tile of stored numbers, as `stored_as` says, in fp32: times `scale_of_stored`."""
    if STORED == "float8 as bits":
        b_bits = b_x.to(tl.int16)
        b_half = ((b_bits & 0x7F) << 7) | (b_bits & -0x8000)
        b_numbers = tl.where((b_bits & 0x7F) == 0x7F, float("nan"), b_half.to(tl.float16, bitcast=True).to(tl.float32))
    elif STORED == "float8":
        b_numbers = b_x.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        b_numbers = b_x.to(tl.float32)
    return _of_32_bits(b_numbers)


@triton.jit
def scale_of_stored(STORED: tl.constexpr):
    """With one bit more in the exponent float8_e4m3fn is fp16, whose numbers are so many times as small."""
    return 256.0 if STORED == "float8 as bits" else 1.0


@triton.jit
def store_tile(p_head, x, i_tile, m_row, b_rows, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes the rows [BLOCK, BLOCK_D] of a head of `x` that `m_row` names, up to column D."""
    p_rows = tile_pointers(p_head, x, i_tile, BLOCK, BLOCK_D)
    m_col = (tl.arange(0, BLOCK_D) < D)[None, :]
    tl.store(p_rows, b_rows.to(p_rows.dtype.element_ty), mask=m_row[:, None] & m_col)


@triton.jit
def entries(x, pairs):
    """The entries of a `Table` for a tile of pairs, broadcastable to it; 0 where either token may not be read.

    pairs: (queries, keys, batch entry, head, n_q, n_k), of which the last two are not read. Tokens are (index, which
    may be read, position), those of one side a column and those of the other a row.
    """
    o_q, m_q, _ = pairs[0]
    o_k, m_k, _ = pairs[1]
    p_head = x.data + pairs[2] * x.s_b + pairs[3] * x.s_h
    if x.by_distance is not None:
        return tl.load(p_head + (o_k - o_q), mask=m_q & m_k, other=0.0)
    elif x.s_q is not None and x.s_k is not None:
        return tl.load(p_head + o_q.to(tl.int64) * x.s_q + o_k.to(tl.int64) * x.s_k, mask=m_q & m_k, other=0.0)
    elif x.s_q is not None:
        return tl.load(p_head + o_q.to(tl.int64) * x.s_q, mask=m_q, other=0.0)
    elif x.s_k is not None:
        return tl.load(p_head + o_k.to(tl.int64) * x.s_k, mask=m_k, other=0.0)
    else:
        return tl.load(p_head)


@triton.jit
def as_operand(b_x, dtype, rules):
    """A tile of weights, or of gradients of scores, in `dtype`, for the left side of `dot`.

    A mask of `rules`, which is loaded in 8 bits, would count for its layout.
    """
    if rules.visible.dense.data is not None or rules.dropout.seed is not None:
        b_x = _of_32_bits(b_x)
    return b_x.to(dtype)


@triton.jit
def _of_32_bits(b_x):
    """A tile of fp32, in a product of which Triton does not ask for narrower types that it was made of.

    It chooses the layout of operands by the narrowest type that anything in them was loaded in, or joined from. For 8
    bits a tile that lies in registers as it is needed would go through shared memory, and for 4, or 8 with 16 keys, the
    product is wrong (Triton 3.6 to 3.9). It does not look behind assembly, which ptxas removes.
    """
    if INTERPRETED:
        return b_x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [b_x], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def dot(b_x, b_y, b_sum, PRECISION: tl.constexpr, SWAPPED: tl.constexpr = False):
    """b_sum + b_x @ b_y with fp32 accumulation; b_sum may be None.

    Args:
        PRECISION: of fp32; see `dot_precision`.
        SWAPPED: whether to round as (b_y^T @ b_x^T)^T does: other kernels recompute scores bit by bit.
    """
    if INTERPRETED:  # where bf16 is kept as bare integers, which must not be multiplied
        return tl.dot(b_x.to(tl.float32), b_y.to(tl.float32), b_sum, input_precision=PRECISION)
    elif PRECISION == "bf16x6" and b_x.dtype == tl.float32:
        b_x_0, b_x_1, b_x_2 = _in_bf16(b_x)
        b_y_0, b_y_1, b_y_2 = _in_bf16(b_y)
        b_rest = tl.dot(b_x_1, b_y_1)
        if SWAPPED:
            b_rest = tl.dot(b_x_2, b_y_0, tl.dot(b_x_0, b_y_2, b_rest))
            b_rest = tl.dot(b_x_1, b_y_0, tl.dot(b_x_0, b_y_1, b_rest))
        else:
            b_rest = tl.dot(b_x_0, b_y_2, tl.dot(b_x_2, b_y_0, b_rest))
            b_rest = tl.dot(b_x_0, b_y_1, tl.dot(b_x_1, b_y_0, b_rest))
        # What is left of an infinity is NaN, and its product is in the last one.
        b_product = tl.dot(b_x_0, b_y_0, tl.where(b_rest == b_rest, b_rest, 0.0))
        return b_product if b_sum is None else b_sum + b_product
    else:
        return tl.dot(b_x, b_y, b_sum, input_precision=PRECISION)


@triton.jit
def _in_bf16(b_x):
    """Three tiles of bf16 whose sum is the tile `b_x` of fp32."""
    b_0 = b_x.to(tl.bfloat16)
    b_rest = b_x - b_0.to(tl.float32)
    b_1 = b_rest.to(tl.bfloat16)
    return b_0, b_1, (b_rest - b_1.to(tl.float32)).to(tl.bfloat16)
