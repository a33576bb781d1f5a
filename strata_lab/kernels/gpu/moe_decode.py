"""The experts of few tokens: every distinct expert's weights once, products on the ordinary cores.

A program holds a tile of rows over the whole width K in registers before it looks at an activation, so what limits it
is memory (10 to 40 KB outstanding per program, several programs per multiprocessor). Up to `M` tokens that share an
expert use the tile together; an expert with more of them is read again, from the second-level cache. Sums are float32.
A weight tile is [rows, C chunks, 16 codes]: 16-byte loads along K, the 16 products of a chunk added within a thread.

`expert_kernel` makes h = silu(gate) * up, or one y row per (token, slot) pair, which `combine_kernel` adds up in slot
order. `down_one_kernel` does both for a step of one token: it knows the experts before it must wait for h.
"""

from __future__ import annotations

import triton
import triton.language as tl

from strata_lab.kernels.gpu.launch import trigger, wait
from strata_lab.kernels.gpu.moe_route import best


@triton.jit
def _codes(data_ptr, row, live, chunk, K: tl.constexpr, FORMAT: tl.constexpr):
    """Codes [R, C, 16] of rows `row` (int64, [R, 1] or [R, C]) where `live` (same shape), chunks `chunk` [C]."""
    STRIDE: tl.constexpr = (K + 31) // 32 * 16 if FORMAT == "int4" else K
    place = (chunk[:, None] * 16 + tl.arange(0, 16)[None, :])[None, :, :]
    return tl.load(data_ptr + (row * STRIDE)[:, :, None] + place, mask=live[:, :, None] & (place < STRIDE), other=0.0)


@triton.jit
def _group_scales(ptr, row, live, chunk, K: tl.constexpr, FORMAT: tl.constexpr):
    """Scales or minima [R, C] in float32 of the group each chunk is in; int8 has two chunks to a group of 32."""
    GROUPS: tl.constexpr = (K + 31) // 32
    group = (chunk if FORMAT == "int4" else chunk // 2)[None, :]
    return tl.load(ptr + row * GROUPS + group, mask=live & (group < GROUPS), other=0.0).to(tl.float32)


@triton.jit
def _columns(
    x_ptr, norm_ptr, offset, live, chunk, K: tl.constexpr, NORM: tl.constexpr, FORMAT: tl.constexpr, HALF: tl.constexpr
):
    """x [C, 16] in float32 at the columns of `chunk`; HALF 1 are the columns of int4's high nibbles."""
    WIDTH: tl.constexpr = 32 if FORMAT == "int4" else 16
    cols = chunk[:, None] * WIDTH + HALF * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + offset + cols, mask=(cols < K) & live, other=0.0).to(tl.float32)
    if NORM:
        x *= tl.load(norm_ptr + cols, mask=cols < K, other=0.0).to(tl.float32)
    return x


@triton.jit
def _product(w, scale, low, x, x_high, FORMAT: tl.constexpr):
    """Sums over the 16 codes of each chunk, [R, C]; group formats with scale and minimum applied."""
    if FORMAT == "int4":
        pair = (w & 15).to(tl.float32) * x[None, :, :] + (w >> 4).to(tl.float32) * x_high[None, :, :]
        partial = tl.sum(pair, axis=2) * scale + low * tl.sum(x + x_high, axis=1)[None, :]
    else:
        partial = tl.sum(w.to(tl.float32) * x[None, :, :], axis=2)
        if FORMAT == "int8":
            partial *= scale
    return partial


@triton.jit
def _tile(
    data_ptr, scales_ptr, mins_ptr, row, live,
    K: tl.constexpr, C: tl.constexpr, CHUNKS: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Everything a product needs of rows `row` [R, 1]: tuples of codes, scales and minima, one element per C chunks."""
    codes, scales, mins = (), (), ()
    for start in tl.static_range(0, CHUNKS, C):
        chunk = start + tl.arange(0, C)
        codes += (_codes(data_ptr, row, live, chunk, K, FORMAT),)
        scales += (
            _group_scales(scales_ptr, row, live, chunk, K, FORMAT) if FORMAT == "int8" or FORMAT == "int4" else 1.0,
        )
        mins += (_group_scales(mins_ptr, row, live, chunk, K, FORMAT) if FORMAT == "int4" else 0.0,)
    return codes, scales, mins


@triton.jit
def _row_scale(scales_ptr, row, live, FORMAT: tl.constexpr):
    """[R] float32 for fp8, else 1."""
    if FORMAT == "fp8":
        return tl.sum(tl.load(scales_ptr + row, mask=live, other=0.0), axis=1)
    else:
        return 1.0


@triton.jit
def expert_kernel(
    x_ptr, norm_ptr, rs_ptr, data_ptr, scales_ptr, mins_ptr, logits_ptr, experts_ptr, pairs_ptr, count_ptr, out_ptr,
    x_stride,
    ROWS: tl.constexpr, K: tl.constexpr, CHUNKS: tl.constexpr, E: tl.constexpr, E_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr, SOURCE: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr, M: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, FORMAT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [pairs, ROWS]: GATED silu(gate x) * (up x) of x [T, K]; otherwise the product with the pair's own row of x.

    SOURCE says who knows the experts: "plan", or for one token "ids" or "logits" (then entry i is its slot i).
    """
    BLOCKS: tl.constexpr = (ROWS + R - 1) // R
    if GATED:  # the experts come from the kernel just before
        wait(PDL)
        trigger(PDL)
    total = TOP_K * BLOCKS if SOURCE != "plan" else tl.load(count_ptr) * BLOCKS
    if SOURCE == "logits":
        rank, _ = best(logits_ptr, E, E_BLOCK, TOP_K, False)
    for index in range(tl.program_id(0), total, tl.num_programs(0)):
        entry = index // BLOCKS
        if SOURCE == "logits":
            expert = tl.sum(tl.where(rank == entry, tl.arange(0, E_BLOCK), 0), axis=0).to(tl.int64)
        else:
            expert = tl.load(experts_ptr + entry).to(tl.int64)
        r = index % BLOCKS * R + tl.arange(0, R)
        live = (r < ROWS)[:, None]
        row = (expert * (2 * ROWS if GATED else ROWS) + r)[:, None]
        codes, scales, mins = _tile(data_ptr, scales_ptr, mins_ptr, row, live, K, C, CHUNKS, FORMAT)
        row_scale = _row_scale(scales_ptr, row, live, FORMAT)
        if GATED:
            up, up_scales, up_mins = _tile(data_ptr, scales_ptr, mins_ptr, row + ROWS, live, K, C, CHUNKS, FORMAT)
            up_row_scale = _row_scale(scales_ptr, row + ROWS, live, FORMAT)
        else:
            wait(PDL)
            trigger(PDL)
        pairs, sums, up_sums = (), (), ()
        for m in tl.static_range(M):
            pairs += (entry if SOURCE != "plan" else tl.load(pairs_ptr + entry * M + m),)
            sums += (tl.zeros((R, C), dtype=tl.float32),)
            up_sums += (tl.zeros((R, C), dtype=tl.float32),)
        for c in tl.static_range(0, CHUNKS, C):
            chunk = c + tl.arange(0, C)
            next_sums, next_up_sums = (), ()
            for m in tl.static_range(M):
                source = (pairs[m] // TOP_K if GATED else pairs[m]).to(tl.int64) * x_stride
                x = _columns(x_ptr, norm_ptr, source, pairs[m] >= 0, chunk, K, NORM, FORMAT, 0)
                high = x
                if FORMAT == "int4":
                    high = _columns(x_ptr, norm_ptr, source, pairs[m] >= 0, chunk, K, NORM, FORMAT, 1)
                next_sums += (sums[m] + _product(codes[c // C], scales[c // C], mins[c // C], x, high, FORMAT),)
                if GATED:
                    part = _product(up[c // C], up_scales[c // C], up_mins[c // C], x, high, FORMAT)
                    next_up_sums += (up_sums[m] + part,)
            sums, up_sums = next_sums, next_up_sums
        for m in tl.static_range(M):
            y = tl.sum(sums[m], axis=1) * row_scale
            if GATED:
                rs = tl.load(rs_ptr + pairs[m] // TOP_K, mask=pairs[m] >= 0, other=0.0) if NORM else 1.0
                y *= rs
                y = y / (1.0 + tl.exp(-y)) * (tl.sum(up_sums[m], axis=1) * up_row_scale * rs)
            tl.store(out_ptr + pairs[m].to(tl.int64) * ROWS + r, y, mask=(r < ROWS) & (pairs[m] >= 0))


@triton.jit
def down_one_kernel(
    residual_ptr, h_ptr, data_ptr, scales_ptr, mins_ptr, logits_ptr, ids_ptr, weights_ptr, out_ptr,
    HIDDEN: tl.constexpr, K: tl.constexpr, CHUNKS: tl.constexpr, SPAN: tl.constexpr, E: tl.constexpr,
    E_BLOCK: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, NORMALIZE: tl.constexpr, SOURCE: tl.constexpr,
    RESIDUAL: tl.constexpr, R: tl.constexpr, C: tl.constexpr, FORMAT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [HIDDEN] = residual + sum over slots of weight * (down[expert] @ h[slot]) for one token, R rows a program.

    A tile is C chunks wide and holds C / SPAN experts side by side, so that one read of h serves all R rows.
    """
    SIDE: tl.constexpr = C // SPAN  # experts of a tile
    PARTS: tl.constexpr = (CHUNKS + SPAN - 1) // SPAN  # tiles that one expert's columns take
    slots = tl.arange(0, SLOTS)
    if SOURCE == "logits":
        rank, weight = best(logits_ptr, E, E_BLOCK, TOP_K, NORMALIZE)
        place = rank[None, :] == slots[:, None]
        ids = tl.sum(tl.where(place, tl.arange(0, E_BLOCK)[None, :], 0), axis=1).to(tl.int64)
        shares = tl.sum(tl.where(place, weight[None, :], 0.0), axis=1)
    else:
        ids = tl.load(ids_ptr + slots, mask=slots < TOP_K, other=0).to(tl.int64)
        shares = tl.load(weights_ptr + slots, mask=slots < TOP_K, other=0.0)
    r = tl.program_id(0) * R + tl.arange(0, R)
    c = tl.arange(0, C)
    codes, scales, mins = (), (), ()
    for first in tl.static_range(0, TOP_K, SIDE):
        expert = tl.zeros((C,), dtype=tl.int64)
        share = tl.zeros((C,), dtype=tl.float32)
        for g in tl.static_range(SIDE):  # slots from TOP_K on have share 0 and are not loaded
            here = c // SPAN == g
            expert = tl.where(here, tl.sum(tl.where(slots == first + g, ids, 0), axis=0), expert)
            share = tl.where(here, tl.sum(tl.where(slots == first + g, shares, 0.0), axis=0), share)
        row = expert[None, :] * HIDDEN + r[:, None]
        live = (r < HIDDEN)[:, None] & (first + c // SPAN < TOP_K)[None, :]
        factor = share[None, :]
        if FORMAT == "fp8":
            factor *= tl.load(scales_ptr + row, mask=live, other=0.0)
        for start in tl.static_range(0, CHUNKS, SPAN):
            chunk = start + c % SPAN
            codes += (_codes(data_ptr, row, live, chunk, K, FORMAT),)
            scale = factor
            if FORMAT == "int8" or FORMAT == "int4":
                scale = factor * _group_scales(scales_ptr, row, live, chunk, K, FORMAT)
            scales += (scale,)
            low = 0.0
            if FORMAT == "int4":
                low = factor * _group_scales(mins_ptr, row, live, chunk, K, FORMAT)
            mins += (low,)
    wait(PDL)
    trigger(PDL)
    total = tl.zeros((R, C), dtype=tl.float32)
    for part in tl.static_range(len(codes)):
        slot = (part // PARTS * SIDE + c // SPAN)[:, None]
        chunk = part % PARTS * SPAN + c % SPAN
        x = _columns(h_ptr, h_ptr, slot * K, slot < TOP_K, chunk, K, False, FORMAT, 0)
        high = x
        if FORMAT == "int4":
            high = _columns(h_ptr, h_ptr, slot * K, slot < TOP_K, chunk, K, False, FORMAT, 1)
        product = _product(codes[part], scales[part], mins[part], x, high, FORMAT)
        if FORMAT == "fp8" or FORMAT == "bf16":
            product *= scales[part]
        total += product
    y = tl.sum(total, axis=1)
    if RESIDUAL:
        y += tl.load(residual_ptr + r, mask=r < HIDDEN, other=0.0).to(tl.float32)
    tl.store(out_ptr + r, y, mask=r < HIDDEN)


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
