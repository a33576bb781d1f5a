"""The second half of a step of one token: down, the sum over its experts and the residual in one kernel.

It ranks the token's logits for itself, so that it knows the experts, and has all its weights on the way, before it must
wait for h. Best when all programs are resident, so that there is no second wave: on 132 multiprocessors 640 programs
of 4 rows need at most 96 registers a thread, which `LATE` is for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from strata_lab.kernels.gpu.gemv_math import prefetch
from strata_lab.kernels.gpu.launch import trigger, wait
from strata_lab.kernels.gpu.moe_route import best
from strata_lab.kernels.gpu.moe_tiles import (
    half_sums,
    joined,
    load_codes,
    load_columns,
    load_groups,
    load_units,
    product,
)


@triton.jit
def down_one_kernel(
    residual_ptr, h_ptr, unit_ptr, data_ptr, scales_ptr, mins_ptr, logits_ptr, ids_ptr, weights_ptr, out_ptr,
    HIDDEN: tl.constexpr, K: tl.constexpr, CHUNKS: tl.constexpr, SPAN: tl.constexpr, E: tl.constexpr,
    E_BLOCK: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, NORMALIZE: tl.constexpr, SOURCE: tl.constexpr,
    RESIDUAL: tl.constexpr, HOLD: tl.constexpr, LATE: tl.constexpr, Q: tl.constexpr, C: tl.constexpr,
    WIDTH: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [HIDDEN] = residual + sum over slots of weight * (down[expert] @ h[slot]) for one token, Q rows a program.

    A tile is one row, C chunks wide, with C / SPAN experts side by side: all threads share one read of h for Q rows.
    HALF: h is float16, to be multiplied by `unit` [slots, columns / 8]. LATE: row scales are only brought to the
    second-level cache ahead, and loaded where they are used: a register less per tile, so more programs are resident.
    """
    SIDE: tl.constexpr = C // SPAN  # experts of a tile
    MINS: tl.constexpr = mins_ptr is not None
    PARTS: tl.constexpr = (CHUNKS + SPAN - 1) // SPAN  # tiles that one expert's columns take
    slots = tl.arange(0, SLOTS)
    if SOURCE == "logits":
        rank, weight = best(logits_ptr, E, E_BLOCK, TOP_K, NORMALIZE)
        place = rank[None, :] == slots[:, None]
        ids = tl.sum(tl.where(place, tl.arange(0, E_BLOCK)[None, :], 0), axis=1)
        shares = tl.sum(tl.where(place, weight[None, :], 0.0), axis=1)
    else:
        ids = tl.load(ids_ptr + slots, mask=slots < TOP_K, other=0).to(tl.int32)
        shares = tl.load(weights_ptr + slots, mask=slots < TOP_K, other=0.0)
    first_row = tl.program_id(0) * Q
    rows = first_row + tl.arange(0, Q)
    if RESIDUAL:  # older than h
        residual = tl.load(residual_ptr + rows, mask=rows < HIDDEN, other=0.0)
    c = tl.arange(0, C)
    if LATE and ASM:
        place = ids.to(tl.int64)[:, None] * HIDDEN + tl.minimum(rows, HIDDEN - 1)[None, :]
        prefetch(scales_ptr + place)
    codes, scales, mins = (), (), ()
    row_of, shares_of = (), ()
    for first in tl.static_range(0, TOP_K, SIDE):
        expert = tl.zeros((C,), dtype=tl.int32)
        share = tl.zeros((C,), dtype=tl.float32)
        for g in tl.static_range(SIDE):  # slots from TOP_K on have share 0 and are not loaded
            here = c // SPAN == g
            expert = tl.where(here, tl.sum(tl.where(slots == first + g, ids, 0), axis=0), expert)
            share = tl.where(here, tl.sum(tl.where(slots == first + g, shares, 0.0), axis=0), share)
        row_of += (expert[None, :] * HIDDEN + first_row,)
        shares_of += (share[None, :],)
        for start in tl.static_range(0, CHUNKS, SPAN):
            chunk = start + c % SPAN
            for q in tl.static_range(Q):
                row = (row_of[first // SIDE] + q).to(tl.int64)
                live = ((first + c // SPAN < TOP_K) & (first_row + q < HIDDEN))[None, :]
                codes += (load_codes(data_ptr, row, live, chunk, K, WIDTH, FORMAT),)
                scale = share[None, :]
                low = 0.0
                if GROUP > 0:
                    scale *= load_groups(scales_ptr, row, live, chunk, K, FORMAT, GROUP).to(tl.float32)
                elif scales_ptr is not None and not LATE:
                    scale *= tl.load(scales_ptr + row, mask=live, other=0.0)
                if MINS:
                    low = share[None, :] * load_groups(mins_ptr, row, live, chunk, K, FORMAT, GROUP).to(tl.float32)
                scales += (scale,)
                mins += (low,)
    wait(PDL)
    trigger(PDL)
    if HOLD:
        tl.debug_barrier()
    totals = ()
    for _q in tl.static_range(Q):
        totals += (tl.zeros((1, C), dtype=tl.float32),)
    for part in tl.static_range((TOP_K + SIDE - 1) // SIDE * PARTS):
        slot = part // PARTS * SIDE + c // SPAN
        chunk = part % PARTS * SPAN + c % SPAN
        real = (slot < TOP_K)[None, :, None]
        x = load_columns(h_ptr + (slot * K)[None, :, None], real, chunk, K, 1, WIDTH, FORMAT, 0)
        if HALF:
            units = load_units(unit_ptr + (slot * ((K + 7) // 8))[None, :, None], real, chunk, K, 1, FORMAT)
        else:
            x = x.to(tl.float32)
        high = x
        if FORMAT == "int4":
            high = load_columns(h_ptr + (slot * K)[None, :, None], real, chunk, K, 1, WIDTH, FORMAT, 1)
            high = high if HALF else high.to(tl.float32)
        next_totals = ()
        for q in tl.static_range(Q):
            if HALF:
                y = tl.sum(half_sums(codes[part * Q + q], x, high, FORMAT, ASM) * units, axis=2)
            else:
                y = product(
                    codes[part * Q + q], scales[part * Q + q], mins[part * Q + q], x, high, FORMAT, GROUP, MINS
                )  # fmt: skip
            if LATE:
                inside = (slot < TOP_K)[None, :] & (first_row + q < HIDDEN)
                y *= shares_of[part // PARTS] * tl.load(scales_ptr + row_of[part // PARTS] + q, mask=inside, other=0.0)
            elif HALF or GROUP == 0:
                y *= scales[part * Q + q]
            next_totals += (totals[q] + y,)
        totals = next_totals
    y = tl.reshape(tl.sum(joined(totals, Q), axis=1), (Q,))
    if RESIDUAL:
        y += residual.to(tl.float32)
    tl.store(out_ptr + rows, y, mask=rows < HIDDEN)
