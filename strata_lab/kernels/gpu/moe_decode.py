"""The experts of few tokens: every distinct expert's weights once, products on the ordinary cores.

A program holds a tile of rows (`moe_tiles.py`: one row per warp, so that sums stay within a warp) over the whole width
K in registers before it looks at an activation, so what limits it is memory (10 to 40 KB outstanding per program,
several programs per multiprocessor). Up to `M` tokens that share an expert use the tile together; an expert with more
of them is read again, from the second-level cache. Sums are float32; with `HALF` (`moe_half.py`) products are made in
float16: activations come as float16 with a divisor, and h leaves so.

`expert_kernel` makes h = silu(gate) * up, or one y row per (token, slot) pair, which `combine_kernel` adds up in slot
order. For one token `moe_one.py` has the second half.
"""

from __future__ import annotations

import triton
import triton.language as tl

from strata_lab.kernels.gpu.launch import trigger, wait
from strata_lab.kernels.gpu.moe_half import PEAK
from strata_lab.kernels.gpu.moe_half_int4 import stored_place
from strata_lab.kernels.gpu.moe_route import best
from strata_lab.kernels.gpu.moe_tiles import (
    half_sums,
    joined,
    load_activations,
    load_groups,
    load_row_units,
    load_rows,
    product,
)


@triton.jit
def _tile(
    data_ptr, scales_ptr, mins_ptr, row, live,
    K: tl.constexpr, C: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """All of rows `row` [R, 1]: tuples of codes, scales and minima with an element per C chunks; scales [R] of rows."""
    codes, scales, mins = (), (), ()
    for start in tl.static_range(0, CHUNKS, C):
        chunk = start + tl.arange(0, C)
        codes += (load_rows(data_ptr, row, live, start, K, C, WIDTH, FORMAT),)
        scales += (load_groups(scales_ptr, row, live, chunk, K, FORMAT, GROUP) if GROUP > 0 else 1.0,)
        mins += (load_groups(mins_ptr, row, live, chunk, K, FORMAT, GROUP) if mins_ptr is not None else 0.0,)
    row_scale = 1.0
    if GROUP == 0 and scales_ptr is not None:
        row_scale = tl.sum(tl.load(scales_ptr + row, mask=live, other=0.0), axis=1)
    return codes, scales, mins, row_scale


@triton.jit
def _asked(
    sources, unit_ptr, pairs, START: tl.constexpr, K: tl.constexpr, COUNT: tl.constexpr, GATED: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """float16 activations of the pairs for C chunks from START on, those of int4's high nibbles, and their units."""
    xs, highs, units = (), (), ()
    for m in tl.static_range(COUNT):
        real = pairs[m] >= 0
        xs += (load_activations(sources[m], real, START, K, R, C, WIDTH, FORMAT, 0),)
        highs += (load_activations(sources[m], real, START, K, R, C, WIDTH, FORMAT, 1) if FORMAT == "int4" else 0.0,)
        if GATED:
            units += (1.0,)
        else:
            own = unit_ptr + pairs[m].to(tl.int64) * ((K + 7) // 8)
            units += (load_row_units(own, real, START, K, R, C, FORMAT),)
    return xs, highs, units


@triton.jit
def _multiply(
    x_ptr, unit_ptr, out_ptr, out_unit_ptr, pairs, x_stride, block, gates, ups,
    ROWS: tl.constexpr, K: tl.constexpr, CHUNKS: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr,
    COUNT: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, MINS: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Rows of block `block` of the first COUNT `pairs`, with the loaded tiles `gates` and (GATED) `ups`."""
    GROUPS: tl.constexpr = ((ROWS if GATED else K) + 7) // 8  # of 8 columns of h
    sums, up_sums, sources = (), (), ()
    for m in tl.static_range(COUNT):
        sources += (x_ptr + (pairs[m] // TOP_K if GATED else pairs[m]).to(tl.int64) * x_stride,)
        for _q in tl.static_range(Q):
            sums += (tl.zeros((R, C), dtype=tl.float32),)
            up_sums += (tl.zeros((R, C), dtype=tl.float32),)
    asked = ()
    for c in tl.static_range(0, CHUNKS, C):
        next_sums, next_up_sums = (), ()
        if HALF:  # asked for a chunk ahead: asm stays in order, so nobody else would
            if c == 0:
                asked = _asked(sources, unit_ptr, pairs, 0, K, COUNT, GATED, R, C, WIDTH, FORMAT)
            xs_now, highs_now, units_now = asked
            if c + C < CHUNKS:
                asked = _asked(sources, unit_ptr, pairs, c + C, K, COUNT, GATED, R, C, WIDTH, FORMAT)
        else:
            xs_now = ()
            for m in tl.static_range(COUNT):
                xs_now += (load_activations(sources[m], pairs[m] >= 0, c, K, R, C, WIDTH, FORMAT, 0),)
        for m in tl.static_range(COUNT):
            if HALF:
                for q in tl.static_range(Q):
                    part = half_sums(gates[q][0][c // C], xs_now[m], highs_now[m], FORMAT, ASM) * units_now[m]
                    next_sums += (sums[m * Q + q] + tl.sum(part, axis=2) * gates[q][1][c // C],)
                    if GATED:
                        part = half_sums(ups[q][0][c // C], xs_now[m], highs_now[m], FORMAT, ASM)
                        next_up_sums += (up_sums[m * Q + q] + tl.sum(part, axis=2) * ups[q][1][c // C],)
            else:
                x = xs_now[m].to(tl.float32)
                high = x
                if FORMAT == "int4":
                    high = load_activations(sources[m], pairs[m] >= 0, c, K, R, C, WIDTH, FORMAT, 1).to(tl.float32)
                for q in tl.static_range(Q):
                    tile = gates[q]
                    part = product(tile[0][c // C], tile[1][c // C], tile[2][c // C], x, high, FORMAT, GROUP, MINS)
                    next_sums += (sums[m * Q + q] + part,)
                    if GATED:
                        tile = ups[q]
                        part = product(tile[0][c // C], tile[1][c // C], tile[2][c // C], x, high, FORMAT, GROUP, MINS)
                        next_up_sums += (up_sums[m * Q + q] + part,)
        sums, up_sums = next_sums, next_up_sums
    for m in tl.static_range(COUNT):
        unit = 1.0
        if HALF and GATED:
            unit = tl.load(unit_ptr + pairs[m] // TOP_K, mask=pairs[m] >= 0, other=0.0)
        ys = ()
        for q in tl.static_range(Q):
            y = tl.sum(sums[m * Q + q], axis=1) * gates[q][3]
            if GATED:
                y *= unit
                y = y / (1.0 + tl.exp(-y)) * (tl.sum(up_sums[m * Q + q], axis=1) * ups[q][3] * unit)
            ys += (y,)
        y = joined(ys, Q)
        pair = pairs[m].to(tl.int64)
        if HALF and GATED:
            y = tl.reshape(y, (R * Q // 8, 8))
            unit = tl.maximum(tl.max(tl.abs(y), axis=1), 1e-30) * (1.0 / PEAK)
            group = block * (R * Q // 8) + tl.arange(0, R * Q // 8)
            r = group[:, None] * 8 + tl.arange(0, 8)[None, :]
            tl.store(out_unit_ptr + pair * GROUPS + group, unit, mask=(group < GROUPS) & (pair >= 0))
            place = stored_place(r) if FORMAT == "int4" else r
            tl.store(out_ptr + pair * ROWS + place, y / unit[:, None], mask=(r < ROWS) & (pair >= 0))
        else:
            r = block * (R * Q) + tl.arange(0, R * Q)
            tl.store(out_ptr + pair * ROWS + r, tl.reshape(y, (R * Q,)), mask=(r < ROWS) & (pair >= 0))


@triton.jit
def expert_kernel(
    x_ptr, unit_ptr, data_ptr, scales_ptr, mins_ptr, logits_ptr, experts_ptr, pairs_ptr, count_ptr, out_ptr,
    out_unit_ptr, x_stride,
    ROWS: tl.constexpr, K: tl.constexpr, CHUNKS: tl.constexpr, E: tl.constexpr, E_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr, SOURCE: tl.constexpr, GATED: tl.constexpr, HOLD: tl.constexpr, M: tl.constexpr,
    Q: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [pairs, ROWS]: GATED silu(gate x) * (up x) of x [T, K]; otherwise the product with the pair's own row of x.

    A program makes Q tiles of R rows (GATED: of gate and as many of up) at a time. SOURCE says who knows the experts:
    "plan", or for one token "ids" or "logits" (then entry i is its slot i). HALF: x is float16, to be multiplied by
    `unit` (GATED [T]; else [pairs, columns / 8]); GATED, so is out.
    """
    BLOCKS: tl.constexpr = (ROWS + R * Q - 1) // (R * Q)
    MINS: tl.constexpr = mins_ptr is not None
    if GATED:  # the experts come from the kernel just before
        wait(PDL)
        trigger(PDL)
    first = tl.program_id(0)
    if SOURCE == "logits":
        rank, _weight = best(logits_ptr, E, E_BLOCK, TOP_K, False)
        upcoming = first // BLOCKS
    else:  # asked for together with the count; there is room for as many entries as there are programs
        upcoming = tl.load(experts_ptr + first // BLOCKS).to(tl.int32)
    total = TOP_K * BLOCKS if SOURCE != "plan" else tl.load(count_ptr) * BLOCKS
    for index in range(first, total, tl.num_programs(0)):
        entry = index // BLOCKS
        block = index % BLOCKS
        pairs = ()
        for m in tl.static_range(M):
            pairs += (entry if SOURCE != "plan" else tl.load(pairs_ptr + entry * M + m),)
        if SOURCE == "logits":
            expert = tl.sum(tl.where(rank == entry, tl.arange(0, E_BLOCK), 0), axis=0).to(tl.int64)
        else:
            expert = upcoming.to(tl.int64)
            later = index + tl.num_programs(0)
            upcoming = tl.load(experts_ptr + later // BLOCKS, mask=later < total, other=0).to(tl.int32)
        gates, ups = (), ()
        for q in tl.static_range(Q):
            own = (block * R + tl.arange(0, R)) * Q + q
            live = (own < ROWS)[:, None]
            row = (expert * (2 * ROWS if GATED else ROWS) + own)[:, None]
            gates += (_tile(data_ptr, scales_ptr, mins_ptr, row, live, K, C, CHUNKS, WIDTH, FORMAT, GROUP),)
            if GATED:
                ups += (_tile(data_ptr, scales_ptr, mins_ptr, row + ROWS, live, K, C, CHUNKS, WIDTH, FORMAT, GROUP),)
        if not GATED:
            wait(PDL)
            trigger(PDL)
        if HOLD:  # or ptxas moves each load down to its use, and the row scales to the very end
            tl.debug_barrier()
        if (FORMAT == "fp8" or HALF) and M > 1:  # of others the two ways' conversions would be made before, and spill
            if pairs[1] < 0:  # most entries of small batches: half the arithmetic
                _multiply(
                    x_ptr, unit_ptr, out_ptr, out_unit_ptr, pairs, x_stride, block, gates, ups,
                    ROWS, K, CHUNKS, TOP_K, GATED, 1, Q, R, C, WIDTH, FORMAT, GROUP, MINS, HALF, ASM,
                )  # fmt: skip
            else:
                _multiply(
                    x_ptr, unit_ptr, out_ptr, out_unit_ptr, pairs, x_stride, block, gates, ups,
                    ROWS, K, CHUNKS, TOP_K, GATED, M, Q, R, C, WIDTH, FORMAT, GROUP, MINS, HALF, ASM,
                )  # fmt: skip
        else:
            _multiply(
                x_ptr, unit_ptr, out_ptr, out_unit_ptr, pairs, x_stride, block, gates, ups,
                ROWS, K, CHUNKS, TOP_K, GATED, M, Q, R, C, WIDTH, FORMAT, GROUP, MINS, HALF, ASM,
            )  # fmt: skip


@triton.jit
def combine_kernel(
    residual_ptr, y_ptr, weights_ptr, out_ptr, x_stride,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = residual[t] + sum over slots, in their order, of weight[t, s] * y[t, s]."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < HIDDEN
    wait(PDL)
    trigger(PDL)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for s in tl.static_range(TOP_K):
        y = tl.load(y_ptr + (token * TOP_K + s) * HIDDEN + cols, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + token * TOP_K + s) * y
    if RESIDUAL:
        total += tl.load(residual_ptr + token * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + cols, total, mask=inside)
