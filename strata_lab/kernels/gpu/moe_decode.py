"""The experts of few tokens: every distinct expert's weights once, products on the ordinary cores.

A program holds a tile of rows over the whole width K in registers before it looks at an activation, so what limits it
is memory (10 to 40 KB outstanding per program, several programs per multiprocessor). Up to `M` tokens that share an
expert use the tile together; an expert with more of them is read again, from the second-level cache. Sums are float32.

A tile is [rows, C chunks, WIDTH codes] with 16 bytes to a chunk: a thread owns whole chunks, loads each at once, and
adds its products by itself. Activations are loaded in the very shape of the tile, the same values in every row: Triton
then gives them the tile's layout, while a [C, WIDTH] tensor would travel through shared memory with barriers around it.
That costs nothing where a thread has one row of a tile, so `expert_kernel` tiles have one row per warp (sums stay
within a warp) and `down_one_kernel` tiles one row in all; more rows are more tiles.

`expert_kernel` makes h = silu(gate) * up, or one y row per (token, slot) pair, which `combine_kernel` adds up in slot
order. `down_one_kernel` does both for a step of one token: it knows the experts before it must wait for h.
"""

from __future__ import annotations

import triton
import triton.language as tl

from strata_lab.kernels.gpu.launch import trigger, wait
from strata_lab.kernels.gpu.moe_route import best


@triton.jit
def _codes(data_ptr, row, live, chunk, K: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr):
    """Codes [R, C, WIDTH] of rows `row` (int64, [R, 1] or [R, C]) where `live` (same shape), chunks `chunk` [C]."""
    STRIDE: tl.constexpr = (K + 31) // 32 * 16 if FORMAT == "int4" else K
    place = (chunk[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])[None, :, :]
    return tl.load(data_ptr + (row * STRIDE)[:, :, None] + place, mask=live[:, :, None] & (place < STRIDE), other=0.0)


@triton.jit
def _groups(ptr, row, live, chunk, K: tl.constexpr, FORMAT: tl.constexpr):
    """float16 scales or minima [R, C] of the group each chunk is in; int8 has two chunks to a group of 32."""
    GROUPS: tl.constexpr = (K + 31) // 32
    group = (chunk if FORMAT == "int4" else chunk // 2)[None, :]
    return tl.load(ptr + row * GROUPS + group, mask=live & (group < GROUPS), other=0.0)


@triton.jit
def _columns(
    x_ptr, live, chunk, K: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr, HIGH: tl.constexpr
):  # fmt: skip
    """x [R, C, WIDTH] in float32, equal rows: the columns of `chunk` [C]; HIGH: those of int4's high nibbles.

    `x_ptr` is a scalar or [1, C, 1], `live` likewise.
    """
    first = chunk * 32 + HIGH * 16 if FORMAT == "int4" else chunk * WIDTH
    cols = (first[:, None] + tl.arange(0, WIDTH)[None, :])[None, :, :] + tl.zeros((R, 1, 1), dtype=tl.int32)
    return tl.load(x_ptr + cols, mask=(cols < K) & live, other=0.0).to(tl.float32)


@triton.jit
def _product(w, scale, low, x, x_high, FORMAT: tl.constexpr):
    """Sums over the codes of each chunk, [R, C]; group formats with scale and minimum applied."""
    if FORMAT == "int4":
        pair = _number(w & 15) * x + _number(w >> 4) * x_high
        partial = tl.sum(pair, axis=2) * scale.to(tl.float32) + tl.sum(x + x_high, axis=2) * low.to(tl.float32)
    elif FORMAT == "int8":
        partial = tl.sum(w.to(tl.float32) * x, axis=2) * scale.to(tl.float32)
    else:
        partial = tl.sum(w.to(tl.float32) * x, axis=2)
    return partial


@triton.jit
def _number(code):
    """0..15 -> float32 without the conversion unit: as the last bits of 2^23."""
    return (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _tile(
    data_ptr, scales_ptr, mins_ptr, row, live,
    K: tl.constexpr, C: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """All of rows `row` [R, 1]: tuples of codes, scales and minima with an element per C chunks; scales [R] for fp8."""
    codes, scales, mins = (), (), ()
    for start in tl.static_range(0, CHUNKS, C):
        chunk = start + tl.arange(0, C)
        codes += (_codes(data_ptr, row, live, chunk, K, WIDTH, FORMAT),)
        scales += (_groups(scales_ptr, row, live, chunk, K, FORMAT) if FORMAT == "int8" or FORMAT == "int4" else 1.0,)
        mins += (_groups(mins_ptr, row, live, chunk, K, FORMAT) if FORMAT == "int4" else 0.0,)
    row_scale = 1.0
    if FORMAT == "fp8":
        row_scale = tl.sum(tl.load(scales_ptr + row, mask=live, other=0.0), axis=1)
    return codes, scales, mins, row_scale


@triton.jit
def _joined(ys, Q: tl.constexpr):
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


@triton.jit
def _multiply(
    x_ptr, out_ptr, pairs_ptr, entry, x_stride, r, gates, ups,
    ROWS: tl.constexpr, K: tl.constexpr, CHUNKS: tl.constexpr, TOP_K: tl.constexpr, SOURCE: tl.constexpr,
    GATED: tl.constexpr, M: tl.constexpr, COUNT: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    WIDTH: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Rows `r` of the first COUNT pairs of an entry, with the loaded tiles `gates` and (GATED) `ups`."""
    pairs, sums, up_sums = (), (), ()
    for m in tl.static_range(COUNT):
        pairs += (entry if SOURCE != "plan" else tl.load(pairs_ptr + entry * M + m),)
        for _q in tl.static_range(Q):
            sums += (tl.zeros((R, C), dtype=tl.float32),)
            up_sums += (tl.zeros((R, C), dtype=tl.float32),)
    for c in tl.static_range(0, CHUNKS, C):
        chunk = c + tl.arange(0, C)
        next_sums, next_up_sums = (), ()
        for m in tl.static_range(COUNT):
            source = x_ptr + (pairs[m] // TOP_K if GATED else pairs[m]).to(tl.int64) * x_stride
            x = _columns(source, pairs[m] >= 0, chunk, K, R, WIDTH, FORMAT, 0)
            high = x
            if FORMAT == "int4":
                high = _columns(source, pairs[m] >= 0, chunk, K, R, WIDTH, FORMAT, 1)
            for q in tl.static_range(Q):
                part = _product(gates[q][0][c // C], gates[q][1][c // C], gates[q][2][c // C], x, high, FORMAT)
                next_sums += (sums[m * Q + q] + part,)
                if GATED:
                    part = _product(ups[q][0][c // C], ups[q][1][c // C], ups[q][2][c // C], x, high, FORMAT)
                    next_up_sums += (up_sums[m * Q + q] + part,)
        sums, up_sums = next_sums, next_up_sums
    for m in tl.static_range(COUNT):
        ys = ()
        for q in tl.static_range(Q):
            y = tl.sum(sums[m * Q + q], axis=1) * gates[q][3]
            if GATED:
                y = y / (1.0 + tl.exp(-y)) * (tl.sum(up_sums[m * Q + q], axis=1) * ups[q][3])
            ys += (y,)
        out = out_ptr + pairs[m].to(tl.int64) * ROWS + r
        tl.store(out, tl.reshape(_joined(ys, Q), (R * Q,)), mask=(r < ROWS) & (pairs[m] >= 0))


@triton.jit
def expert_kernel(
    x_ptr, data_ptr, scales_ptr, mins_ptr, logits_ptr, experts_ptr, pairs_ptr, count_ptr, out_ptr, x_stride,
    ROWS: tl.constexpr, K: tl.constexpr, CHUNKS: tl.constexpr, E: tl.constexpr, E_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr, SOURCE: tl.constexpr, GATED: tl.constexpr, HOLD: tl.constexpr, M: tl.constexpr,
    Q: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [pairs, ROWS]: GATED silu(gate x) * (up x) of x [T, K]; otherwise the product with the pair's own row of x.

    A program makes Q tiles of R rows (GATED: of gate and as many of up) at a time. SOURCE says who knows the experts:
    "plan", or for one token "ids" or "logits" (then entry i is its slot i).
    """
    BLOCKS: tl.constexpr = (ROWS + R * Q - 1) // (R * Q)
    if GATED:  # the experts come from the kernel just before
        wait(PDL)
        trigger(PDL)
    total = TOP_K * BLOCKS if SOURCE != "plan" else tl.load(count_ptr) * BLOCKS
    if SOURCE == "logits":
        rank, _weight = best(logits_ptr, E, E_BLOCK, TOP_K, False)
    for index in range(tl.program_id(0), total, tl.num_programs(0)):
        entry = index // BLOCKS
        if SOURCE == "logits":
            expert = tl.sum(tl.where(rank == entry, tl.arange(0, E_BLOCK), 0), axis=0).to(tl.int64)
        else:
            expert = tl.load(experts_ptr + entry).to(tl.int64)
        gates, ups = (), ()
        for q in tl.static_range(Q):
            own = (index % BLOCKS * R + tl.arange(0, R)) * Q + q
            live = (own < ROWS)[:, None]
            row = (expert * (2 * ROWS if GATED else ROWS) + own)[:, None]
            gates += (_tile(data_ptr, scales_ptr, mins_ptr, row, live, K, C, CHUNKS, WIDTH, FORMAT),)
            if GATED:
                ups += (_tile(data_ptr, scales_ptr, mins_ptr, row + ROWS, live, K, C, CHUNKS, WIDTH, FORMAT),)
        if not GATED:
            wait(PDL)
            trigger(PDL)
        if HOLD:  # or ptxas moves each load down to its use, and the row scales to the very end
            tl.debug_barrier()
        r = index % BLOCKS * (R * Q) + tl.arange(0, R * Q)
        if FORMAT == "fp8" and M > 1:  # of other formats the two ways' conversions would be made before, and spill
            if tl.load(pairs_ptr + entry * M + 1) < 0:  # most entries of small batches: half the arithmetic
                _multiply(
                    x_ptr, out_ptr, pairs_ptr, entry, x_stride, r, gates, ups,
                    ROWS, K, CHUNKS, TOP_K, SOURCE, GATED, M, 1, Q, R, C, WIDTH, FORMAT,
                )  # fmt: skip
            else:
                _multiply(
                    x_ptr, out_ptr, pairs_ptr, entry, x_stride, r, gates, ups,
                    ROWS, K, CHUNKS, TOP_K, SOURCE, GATED, M, M, Q, R, C, WIDTH, FORMAT,
                )  # fmt: skip
        else:
            _multiply(
                x_ptr, out_ptr, pairs_ptr, entry, x_stride, r, gates, ups,
                ROWS, K, CHUNKS, TOP_K, SOURCE, GATED, M, M, Q, R, C, WIDTH, FORMAT,
            )  # fmt: skip


@triton.jit
def down_one_kernel(
    residual_ptr, h_ptr, data_ptr, scales_ptr, mins_ptr, logits_ptr, ids_ptr, weights_ptr, out_ptr,
    HIDDEN: tl.constexpr, K: tl.constexpr, CHUNKS: tl.constexpr, SPAN: tl.constexpr, E: tl.constexpr,
    E_BLOCK: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, NORMALIZE: tl.constexpr, SOURCE: tl.constexpr,
    RESIDUAL: tl.constexpr, HOLD: tl.constexpr, Q: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    FORMAT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [HIDDEN] = residual + sum over slots of weight * (down[expert] @ h[slot]) for one token, Q rows a program.

    A tile is one row, C chunks wide, with C / SPAN experts side by side: all threads share one read of h for Q rows.
    """
    SIDE: tl.constexpr = C // SPAN  # experts of a tile
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
    codes, scales, mins = (), (), ()
    for first in tl.static_range(0, TOP_K, SIDE):
        expert = tl.zeros((C,), dtype=tl.int32)
        share = tl.zeros((C,), dtype=tl.float32)
        for g in tl.static_range(SIDE):  # slots from TOP_K on have share 0 and are not loaded
            here = c // SPAN == g
            expert = tl.where(here, tl.sum(tl.where(slots == first + g, ids, 0), axis=0), expert)
            share = tl.where(here, tl.sum(tl.where(slots == first + g, shares, 0.0), axis=0), share)
        for start in tl.static_range(0, CHUNKS, SPAN):
            chunk = start + c % SPAN
            for q in tl.static_range(Q):
                row = expert.to(tl.int64)[None, :] * HIDDEN + first_row + q
                live = ((first + c // SPAN < TOP_K) & (first_row + q < HIDDEN))[None, :]
                codes += (_codes(data_ptr, row, live, chunk, K, WIDTH, FORMAT),)
                scale = share[None, :]
                low = 0.0
                if FORMAT == "fp8":
                    scale *= tl.load(scales_ptr + row, mask=live, other=0.0)
                elif FORMAT == "int8" or FORMAT == "int4":
                    scale *= _groups(scales_ptr, row, live, chunk, K, FORMAT).to(tl.float32)
                if FORMAT == "int4":
                    low = share[None, :] * _groups(mins_ptr, row, live, chunk, K, FORMAT).to(tl.float32)
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
        source = h_ptr + (slot * K)[None, :, None]
        x = _columns(source, (slot < TOP_K)[None, :, None], chunk, K, 1, WIDTH, FORMAT, 0)
        high = x
        if FORMAT == "int4":
            high = _columns(source, (slot < TOP_K)[None, :, None], chunk, K, 1, WIDTH, FORMAT, 1)
        next_totals = ()
        for q in tl.static_range(Q):
            y = _product(codes[part * Q + q], scales[part * Q + q], mins[part * Q + q], x, high, FORMAT)
            if FORMAT == "fp8" or FORMAT == "bf16":
                y *= scales[part * Q + q]
            next_totals += (totals[q] + y,)
        totals = next_totals
    y = tl.reshape(tl.sum(_joined(totals, Q), axis=1), (Q,))
    if RESIDUAL:
        y += residual.to(tl.float32)
    tl.store(out_ptr + rows, y, mask=rows < HIDDEN)


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
