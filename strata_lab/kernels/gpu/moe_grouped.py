"""The experts of many tokens: one product per expert over the tokens that chose it, on the tensor cores.

`sort_kernel` orders the (token, slot) pairs by expert; `grouped_kernel` has one program per (tile of up to BLOCK_T
pairs of one expert, block of rows) and finds its expert on the device: the grid is the bound pairs / BLOCK_T + experts,
programs past the last tile leave. The weight is the left operand, acc[rows, pairs] = w @ x^T, converted in registers.
Programs of one expert are neighbours, so its weights are read from memory once and then from the second-level cache.
Group formats multiply bare codes, 32 columns at a time, and apply scale and minimum to the float32 sum: exact codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from strata_lab.kernels.gpu.launch import trigger, wait


@triton.jit
def sort_kernel(
    ids_ptr, order_ptr, offsets_ptr, pairs, E: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Stable order of pairs by expert: order [pairs] int32, offsets [E + 1] int32; one program per expert."""
    expert = tl.program_id(0)
    wait(PDL)
    trigger(PDL)
    lower = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + pair, mask=pair < pairs, other=E).to(tl.int32)
        lower += (ids < expert).to(tl.int32)
    position = tl.sum(lower, axis=0)
    tl.store(offsets_ptr + expert, position)
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + pair, mask=pair < pairs, other=E).to(tl.int32)
        hit = (ids == expert).to(tl.int32)
        tl.store(order_ptr + position + tl.cumsum(hit, axis=0) - 1, pair, mask=hit != 0)
        position += tl.sum(hit, axis=0)
    if expert == E - 1:
        tl.store(offsets_ptr + E, pairs)


@triton.jit
def _locate(offsets_ptr, tile, E: tl.constexpr, E_BLOCK: tl.constexpr, BLOCK_T: tl.constexpr):
    """Expert of a tile (E or more: there is no such tile), its first sorted pair and the end of its expert's pairs."""
    e = tl.arange(0, E_BLOCK)
    begin = tl.load(offsets_ptr + e, mask=e < E, other=0)
    end = tl.load(offsets_ptr + e + 1, mask=e < E, other=0)
    tiles = (end - begin + BLOCK_T - 1) // BLOCK_T
    expert = tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32), axis=0)
    earlier = tl.sum(tl.where(e < expert, tiles, 0), axis=0)
    first = tl.sum(tl.where(e == expert, begin, 0), axis=0) + (tile - earlier) * BLOCK_T
    return expert, first, tl.sum(tl.where(e == expert, end, 0), axis=0)


@triton.jit
def _dot(w, x, acc, DOT: tl.constexpr, TERMS: tl.constexpr):
    """acc + w @ x, with x as a sum of TERMS numbers of 8 significant bits: 2 are all of a float16, 3 of a float32."""
    w = w.to(DOT)
    high = x.to(DOT)
    acc = tl.dot(w, high, acc)
    if TERMS > 1:
        rest = x.to(tl.float32) - high.to(tl.float32)  # exact, as is the next
        middle = rest.to(DOT)
        acc = tl.dot(w, middle, acc)
        if TERMS > 2:
            acc = tl.dot(w, (rest - middle.to(tl.float32)).to(DOT), acc)
    return acc


@triton.jit
def _step(
    data_ptr, scales_ptr, mins_ptr, row, live, x_rows, real, start, acc,
    K: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, DOT: tl.constexpr,
    TERMS: tl.constexpr,
):  # fmt: skip
    """acc [rows, pairs] with BLOCK_K more columns, which share a scale if there are groups."""
    zero = tl.zeros_like(acc)
    if GROUP > 0:
        at = row * ((K + GROUP - 1) // GROUP) + start // GROUP
        scale = tl.load(scales_ptr + at, mask=live, other=0.0).to(tl.float32)
    if FORMAT == "int4":
        STRIDE: tl.constexpr = (K + 31) // 32 * 16
        j = tl.arange(0, BLOCK_K // 2)
        low = start + j // 16 * 32 + j % 16
        high = low + 16
        place = start // 2 + j
        w = tl.load(data_ptr + (row * STRIDE)[:, None] + place, mask=live[:, None] & (place < STRIDE), other=0)
        w_low, w_high = w & 15, w >> 4
        if mins_ptr is None:  # codes about 8
            w_low, w_high = w_low.to(tl.int8) - 8, w_high.to(tl.int8) - 8
        x_low = tl.load(x_rows + low[:, None], mask=real & (low < K)[:, None], other=0.0)
        x_high = tl.load(x_rows + high[:, None], mask=real & (high < K)[:, None], other=0.0)
        sums = _dot(w_high, x_high, _dot(w_low, x_low, zero, DOT, TERMS), DOT, TERMS)
        acc += sums * scale[:, None]
        if mins_ptr is not None:
            lowest = tl.load(mins_ptr + at, mask=live, other=0.0).to(tl.float32)
            x_sum = tl.sum(x_low.to(tl.float32) + x_high.to(tl.float32), axis=0)
            acc += lowest[:, None] * x_sum[None, :]
    else:
        cols = start + tl.arange(0, BLOCK_K)
        w = tl.load(data_ptr + (row * K)[:, None] + cols, mask=live[:, None] & (cols < K), other=0.0)
        x = tl.load(x_rows + cols[:, None], mask=real & (cols < K)[:, None], other=0.0)
        if GROUP > 0:
            acc += _dot(w, x, zero, DOT, TERMS) * scale[:, None]
        elif TERMS > 2:  # float32: the tensor cores cut bits off a sum that they carry on, adding here rounds it
            acc += _dot(w, x, zero, DOT, TERMS)
        else:
            acc = _dot(w, x, acc, DOT, TERMS)
    return acc


@triton.jit
def grouped_kernel(
    x_ptr, data_ptr, scales_ptr, mins_ptr, order_ptr, offsets_ptr, out_ptr, x_stride,
    ROWS: tl.constexpr, K: tl.constexpr, E: tl.constexpr, E_BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, DOT: tl.constexpr, TERMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GATED: out[sorted pair] = silu(gate x) * (up x) of the pair's token; else out[pair] = down x[sorted pair]."""
    wait(PDL)
    trigger(PDL)
    expert, first, end = _locate(offsets_ptr, tl.program_id(0), E, E_BLOCK, BLOCK_T)
    if expert >= E:
        return
    position = first + tl.arange(0, BLOCK_T)
    real = (position < end)[None, :]
    pair = tl.load(order_ptr + position, mask=position < end, other=0)
    r = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = r < ROWS
    row = expert.to(tl.int64) * (2 * ROWS if GATED else ROWS) + r
    source = (pair // TOP_K if GATED else position).to(tl.int64)
    x_rows = x_ptr + source[None, :] * x_stride
    acc = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        acc = _step(
            data_ptr, scales_ptr, mins_ptr, row, live, x_rows, real, start, acc,
            K, BLOCK_K, FORMAT, GROUP, DOT, TERMS,
        )  # fmt: skip
        if GATED:
            up = _step(
                data_ptr, scales_ptr, mins_ptr, row + ROWS, live, x_rows, real, start, up,
                K, BLOCK_K, FORMAT, GROUP, DOT, TERMS,
            )  # fmt: skip
    if GROUP == 0 and scales_ptr is not None:
        acc *= tl.load(scales_ptr + row, mask=live, other=0.0)[:, None]
        if GATED:
            up *= tl.load(scales_ptr + row + ROWS, mask=live, other=0.0)[:, None]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    target = (position if GATED else pair).to(tl.int64)
    tl.store(out_ptr + target[None, :] * ROWS + r[:, None], acc, mask=live[:, None] & real)
