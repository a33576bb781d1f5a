"""Tiles of expert weights and of the activations that meet them, in registers.

A tile is [rows, C chunks, WIDTH codes] with 16 bytes to a chunk: a thread owns whole chunks, loads each at once, and
adds its products by itself. Activations are loaded in the very shape of the tile, the same values in every row: Triton
then gives them the tile's layout, while a [C, WIDTH] tensor would travel through shared memory with barriers around it.
That costs nothing where a thread has one row of a tile; more rows are more tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from strata_lab.kernels.gpu.moe_half import sums_of_eight
from strata_lab.kernels.gpu.moe_half_int4 import sums_of_eight_int4


@triton.jit
def load_codes(data_ptr, row, live, chunk, K: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr):
    """Codes [R, C, WIDTH] of rows `row` (int64, [R, 1] or [R, C]) where `live` (same shape), chunks `chunk` [C]."""
    STRIDE: tl.constexpr = (K + 31) // 32 * 16 if FORMAT == "int4" else K
    place = (chunk[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])[None, :, :]
    return tl.load(data_ptr + (row * STRIDE)[:, :, None] + place, mask=live[:, :, None] & (place < STRIDE), other=0.0)


@triton.jit
def load_rows(
    data_ptr, row, live, START: tl.constexpr, K: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Codes [R, C, WIDTH] of rows `row` (int64, [R, 1]) where `live`, C chunks from START on.

    Loaded flat: so a warp gets a row in every version of Triton, and sums need no shared memory.
    """
    STRIDE: tl.constexpr = (K + 31) // 32 * 16 if FORMAT == "int4" else K
    place = START * WIDTH + tl.arange(0, C * WIDTH)[None, :]
    w = tl.load(data_ptr + row * STRIDE + place, mask=live & (place < STRIDE), other=0.0)
    return tl.reshape(w, (row.shape[0], C, WIDTH))


@triton.jit
def load_activations(
    x_ptr, live, START: tl.constexpr, K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    FORMAT: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """What meets `load_rows`: `load_columns` of C chunks from START on, for a scalar `x_ptr` and `live`."""
    col = tl.arange(0, C * WIDTH)
    if FORMAT == "int4":
        col = START * 32 + col // 16 * 32 + col % 16 + HIGH * 16
    else:
        col += START * WIDTH
    cols = tl.broadcast_to(col[None, :], (R, C * WIDTH))
    return tl.reshape(tl.load(x_ptr + cols, mask=(cols < K) & live, other=0.0), (R, C, WIDTH))


@triton.jit
def load_groups(ptr, row, live, chunk, K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr):
    """Scales or minima [R, C] of the group of columns that each chunk is in; neighbours in a group share an address."""
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    CHUNKS: tl.constexpr = GROUP // (32 if FORMAT == "int4" else 16)  # of a group
    group = (chunk // CHUNKS)[None, :]
    return tl.load(ptr + row * GROUPS + group, mask=live & (group < GROUPS), other=0.0)


@triton.jit
def load_columns(
    x_ptr, live, chunk, K: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr, HIGH: tl.constexpr
):  # fmt: skip
    """x [R, C, WIDTH], equal rows: the columns of `chunk` [C]; HIGH: those of int4's high nibbles.

    `x_ptr` is a scalar or [1, C, 1], `live` likewise.
    """
    first = chunk * 32 + HIGH * 16 if FORMAT == "int4" else chunk * WIDTH
    cols = (first[:, None] + tl.arange(0, WIDTH)[None, :])[None, :, :] + tl.zeros((R, 1, 1), dtype=tl.int32)
    return tl.load(x_ptr + cols, mask=(cols < K) & live, other=0.0)


@triton.jit
def load_units(ptr, live, chunk, K: tl.constexpr, R: tl.constexpr, FORMAT: tl.constexpr):
    """Divisors of h [R, C, 2 | 4], equal rows: of each 8 columns of `chunk` [C]. `ptr` and `live` as in `_columns`."""
    GROUPS: tl.constexpr = (K + 7) // 8
    P: tl.constexpr = 4 if FORMAT == "int4" else 2  # of a chunk
    group = (chunk[:, None] * P + tl.arange(0, P)[None, :])[None, :, :] + tl.zeros((R, 1, 1), dtype=tl.int32)
    return tl.load(ptr + group, mask=(group < GROUPS) & live, other=0.0)


@triton.jit
def load_row_units(
    ptr, live, START: tl.constexpr, K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """`load_units` of C chunks from START on, for a scalar `ptr` and `live`; flat as `load_rows`."""
    P: tl.constexpr = 4 if FORMAT == "int4" else 2
    group = tl.broadcast_to(START * P + tl.arange(0, C * P)[None, :], (R, C * P))
    return tl.reshape(tl.load(ptr + group, mask=(group < (K + 7) // 8) & live, other=0.0), (R, C, P))


@triton.jit
def half_sums(w, x, high, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """Sums of products over each 8 columns of a chunk, of float16 activations as they are stored for the format."""
    if FORMAT == "int4":
        return sums_of_eight_int4(w, x, high, ASM)
    else:
        return sums_of_eight(w, x, FORMAT, ASM)


@triton.jit
def product(w, scale, low, x, x_high, FORMAT: tl.constexpr, GROUP: tl.constexpr, MINS: tl.constexpr):
    """Sums over the codes of each chunk, [R, C]; with groups scale and minimum applied. int4 without MINS: code - 8."""
    if FORMAT == "int4":
        ZERO: tl.constexpr = 0 if MINS else 8
        pair = _number(w & 15, ZERO) * x + _number(w >> 4, ZERO) * x_high
        partial = tl.sum(pair, axis=2) * scale.to(tl.float32)
        if MINS:
            partial += tl.sum(x + x_high, axis=2) * low.to(tl.float32)
    else:
        partial = tl.sum(w.to(tl.float32) * x, axis=2)
        if GROUP > 0:
            partial *= scale.to(tl.float32)
    return partial


@triton.jit
def _number(code, ZERO: tl.constexpr):
    """0..15 -> code - ZERO, float32, without the conversion unit: as the last bits of 2^23."""
    return (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit
def joined(ys, Q: tl.constexpr):
    """Q tensors (1, 2, 4 or 8) of one shape -> one, with further dimensions of 2 that count through them."""
    if Q == 1:
        return ys[0]
    elif Q == 2:
        return tl.join(ys[0], ys[1])
    elif Q == 4:
        return tl.join(tl.join(ys[0], ys[2]), tl.join(ys[1], ys[3]))
    else:
        even = tl.join(tl.join(ys[0], ys[4]), tl.join(ys[2], ys[6]))
        return tl.join(even, tl.join(tl.join(ys[1], ys[5]), tl.join(ys[3], ys[7])))
