"""The kernel of a decode step of attention (`attention_decode.py`): a share of a request's cache, for one KV head.

A program takes one request, one KV head (with its whole group of query heads, so that K and V cross the bus once) and
a run of tiles of the cache. At 512 tokens and 4 KV heads all of K and V is 512 KB: what counts is latency, not bytes.
So a program loads its first tile, which earlier steps wrote, before it waits for the kernel that computes q, and
converts it while q is on its way; later tiles come through a pipeline in shared memory. How many programs there are
depends on shapes alone; how many of them work, and on how many tiles, on the request's length: the rest leave at once.
Each leaves its maximum, sum and weighted values in float32, and the last one of a head to arrive adds them up in a
fixed order, so that the result does not depend on who that was. The new token belongs to the last part: its key and
value are used as stored, from registers. Where several rows are tokens of one text that are new together (`together`),
a program takes as many of them as its tile has room for, so that their past is read once; the last one makes the keys
of all new ones that it sees, since no program waits for another's.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from strata_lab.kernels.gpu import launch
from strata_lab.kernels.gpu.attention_tiles import (
    LOG2E,
    attend,
    block_ids,
    combine,
    held,
    hidden_tiles,
    load_tile,
    place,
)
from strata_lab.kernels.gpu.kv_write import rms_factor, rotated, stored


@triton.jit
def attention_decode_kernel(
    x_ptr, out_ptr, k_cache_ptr, v_cache_ptr, tables_ptr, seq_lens_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr,
    slots_ptr, acc_ptr, stats_ptr, counters_ptr, eps, scale, k_scale, v_scale, x_stride, table_stride,
    block_stride, slot_stride,
    G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF_P: tl.constexpr, D_P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, FUSED: tl.constexpr,
    ROWS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, SCALED: tl.constexpr, HOLD: tl.constexpr,
    SINKS: tl.constexpr, WINDOW: tl.constexpr, TOGETHER: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x: q rows [B, H * D], or with FUSED rows of the QKV product. See the module."""
    HALF: tl.constexpr = D // 2
    ROWS_P: tl.constexpr = triton.next_power_of_2(TOKENS * G)
    kv_head, split = tl.program_id(0), tl.program_id(2)
    texts = tl.num_programs(1) * TOKENS // TOGETHER  # row j * texts + i is token j of text i
    text, token = tl.program_id(1) % texts, tl.program_id(1) // texts * TOKENS  # the first of this program's tokens
    request = token * texts + text
    if not FUSED:  # the newest key was written by the kernel just before
        launch.wait(PDL)
        launch.trigger(PDL)
    fresh = 1  # tokens of this step that the last of the program's rows sees
    if TOGETHER > 1:
        every = tl.arange(0, ROWS)
        news = tl.load(slots_ptr + every * texts + text, mask=every < token + TOKENS, other=-1) >= 0
        fresh = tl.sum(news.to(tl.int32))
        seq_len = tl.where(fresh > token, tl.load(seq_lens_ptr + text) - 1 + fresh, 0)
        oldest = seq_len - fresh + token + 1 - WINDOW  # position in the window of the first of the tokens
    else:
        seq_len = tl.load(seq_lens_ptr + request)
        oldest = seq_len - WINDOW
    hidden = hidden_tiles(oldest, SINKS, WINDOW, TILE)
    seq_len -= hidden * TILE  # from here on `begin`, `end` and `limit` count without the tiles that are hidden
    tiles = tl.cdiv(seq_len, TILE)
    per_split = tl.cdiv(tiles, SPLITS)
    active = tl.maximum(tl.cdiv(tiles, tl.maximum(per_split, 1)), 1)
    if split >= active:
        return
    begin = split * per_split * TILE
    end = tl.minimum(begin + per_split * TILE, seq_len)
    is_last = split == active - 1
    slot = -1
    limit = end
    if FUSED:
        slot = tl.load(slots_ptr + request)
        limit = tl.where(slot >= 0, tl.minimum(end, seq_len - fresh), end)
    table = tables_ptr + text * table_stride
    k_base, v_base = k_cache_ptr + kv_head * D, v_cache_ptr + kv_head * D
    at = place(begin, hidden, SINKS, WINDOW, TILE)
    ids = block_ids(table, at, limit + at - begin, BLOCK_SIZE, TILE)
    tile_first, tile_second, tile_v = load_tile(
        k_base, v_base, ids, at, limit + at - begin, oldest, block_stride, slot_stride, D, HALF_P, D_P, BLOCK_SIZE,
        TILE, SINKS, WINDOW,
    )  # fmt: skip

    rows = tl.arange(0, ROWS)[:, None]
    half, col = tl.arange(0, HALF_P)[None, :], tl.arange(0, D_P)
    within = half < HALF
    real = rows < TOKENS * G
    mine = is_last & (slot >= 0)  # the new token is this program's
    behind, head_row, row_seen, row_oldest = 0, rows, 0, oldest
    if TOGETHER > 1:
        behind, head_row = rows // G, rows % G  # tokens behind the first one, head of the group
        row_seen = tl.where(token + behind < fresh, token + behind + 1, 0)  # of the new tokens
        row_oldest = oldest + behind
    if FUSED:
        if q_norm_ptr is not None:
            q_weight_first = tl.load(q_norm_ptr + half, mask=within, other=0.0).to(tl.float32)
            q_weight_second = tl.load(q_norm_ptr + HALF + half, mask=within, other=0.0).to(tl.float32)
        if k_norm_ptr is not None:
            k_weight_first = tl.load(k_norm_ptr + half, mask=within, other=0.0).to(tl.float32)
            k_weight_second = tl.load(k_norm_ptr + HALF + half, mask=within, other=0.0).to(tl.float32)
        launch.wait(PDL)
        launch.trigger(PDL)
    x = x_ptr + request.to(tl.int64) * x_stride
    q_ptr = x + behind * texts * x_stride + (kv_head * G + head_row) * D + half
    q_first = tl.load(q_ptr, mask=real & within, other=0.0)
    q_second = tl.load(q_ptr + HALF, mask=real & within, other=0.0)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_P], tl.float32)
    to_log2 = scale * k_scale * LOG2E
    if FUSED:
        KV_DTYPE: tl.constexpr = k_cache_ptr.dtype.element_ty
        X_DTYPE: tl.constexpr = x_ptr.dtype.element_ty
        turn, turned = (request + behind * texts) * HALF + half, within
        if TOGETHER > 1:
            turned = real & within
        cos = tl.load(cos_ptr + turn, mask=turned, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + turn, mask=turned, other=0.0).to(tl.float32)
        if TOGETHER > 1:  # a new key in each row
            there = (rows < fresh) & mine
            new_row = rows.to(tl.int64) * texts + text
            new_slot = tl.load(slots_ptr + new_row, mask=there, other=0).to(tl.int64)
            new_cos = tl.load(cos_ptr + new_row * HALF + half, mask=there & within, other=0.0).to(tl.float32)
            new_sin = tl.load(sin_ptr + new_row * HALF + half, mask=there & within, other=0.0).to(tl.float32)
            new_x = x_ptr + new_row * x_stride
            v_new = tl.load(new_x + (HKV * (G + 1) + kv_head) * D + col[None, :], mask=there & (col[None, :] < D),
                            other=0.0).to(tl.float32)  # fmt: skip
        else:  # the new key in every row: it is multiplied by all q
            there, new_cos, new_sin, new_x = (rows < G) & mine, cos, sin, x + rows * 0
            v_new = tl.load(x + (HKV * (G + 1) + kv_head) * D + col, mask=(col < D) & mine, other=0.0).to(tl.float32)
        k_ptr = new_x + (HKV * G + kv_head) * D + half
        k_first = tl.load(k_ptr, mask=there & within, other=0.0).to(tl.float32)
        k_second = tl.load(k_ptr + HALF, mask=there & within, other=0.0).to(tl.float32)
    tile_first, tile_second, tile_v = held(tile_first, HOLD), held(tile_second, HOLD), held(tile_v, HOLD)
    if FUSED:
        first, second = q_first.to(tl.float32), q_second.to(tl.float32)
        if q_norm_ptr is not None:
            q_rms = rms_factor(first, second, eps, D)
            first, second = first * q_rms * q_weight_first, second * q_rms * q_weight_second
        first, second = rotated(first, second, cos, sin)
        q_first, q_second = first.to(X_DTYPE), second.to(X_DTYPE)
        if mine:  # its own softmax is where this program begins
            if k_norm_ptr is not None:
                k_rms = rms_factor(k_first, k_second, eps, D)
                k_first, k_second = k_first * k_rms * k_weight_first, k_second * k_rms * k_weight_second
            k_first, k_second = rotated(k_first, k_second, new_cos, new_sin)
            k_kept, k_kept_second = (
                stored(k_first, k_scale, KV_DTYPE, SCALED),
                stored(k_second, k_scale, KV_DTYPE, SCALED),
            )
            v_kept = stored(v_new, v_scale, KV_DTYPE, SCALED)
            if TOGETHER > 1:
                new = new_slot // BLOCK_SIZE * block_stride + new_slot % BLOCK_SIZE * slot_stride
                own = (rows >= token) & (rows < fresh)
                tl.store(v_base + new + col[None, :], v_kept, mask=own & (col[None, :] < D))
                highest, total, acc = attend(
                    q_first.to(DOT), q_second.to(DOT), k_kept, k_kept_second, v_kept, 0, row_seen, 0, to_log2, highest,
                    total, acc, ROWS, DOT, PRECISION, 0, 0,
                )  # fmt: skip
            else:
                new = slot.to(tl.int64) // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
                own = rows == 0
                tl.store(v_base + new + col, v_kept, mask=col < D)
                product = q_first.to(tl.float32) * k_kept.to(tl.float32)
                product += q_second.to(tl.float32) * k_kept_second.to(tl.float32)
                highest = tl.sum(product, axis=1) * to_log2
                total = total + 1.0
                acc = acc + v_kept.to(tl.float32)[None, :]
            tl.store(k_base + new + half + rows * 0, k_kept, mask=own & within)
            tl.store(k_base + new + HALF + half + rows * 0, k_kept_second, mask=own & within)
    q_first, q_second = q_first.to(DOT), q_second.to(DOT)

    until = limit + at - begin
    if TOGETHER > 1:
        until = tl.where(row_seen > 0, until, 0)
    highest, total, acc = attend(
        q_first, q_second, tile_first, tile_second, tile_v, at, until, row_oldest, to_log2, highest, total, acc, TILE,
        DOT, PRECISION, SINKS, WINDOW,
    )  # fmt: skip
    if begin + TILE < limit:  # spares programs of one tile the start of a pipelined loop
        for here in range(begin + TILE, limit, TILE):
            at = place(here, hidden, SINKS, WINDOW, TILE)
            seen = limit + at - here
            ids = block_ids(table, at, seen, BLOCK_SIZE, TILE)
            tile_first, tile_second, tile_v = load_tile(
                k_base, v_base, ids, at, seen, oldest, block_stride, slot_stride, D, HALF_P, D_P, BLOCK_SIZE, TILE,
                SINKS, WINDOW,
            )  # fmt: skip
            if TOGETHER > 1:
                seen = tl.where(row_seen > 0, seen, 0)
            highest, total, acc = attend(
                q_first, q_second, tile_first, tile_second, tile_v, at, seen, row_oldest, to_log2, highest, total, acc,
                TILE, DOT, PRECISION, SINKS, WINDOW,
            )  # fmt: skip

    head = tl.program_id(1) * HKV + kv_head
    cols = col[None, :]
    inside = real & (cols < D)
    token_stride = texts * HKV * (G * D)
    out = out_ptr + (request * HKV + kv_head).to(tl.int64) * (G * D)
    if active == 1:
        share = v_scale / tl.where(total > 0, total, 1.0)  # a request of no tokens gets zeros
        out_at = out + behind * token_stride + head_row * D + cols
        tl.store(out_at, (acc * share[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    elif SPLITS > 1:
        part = head.to(tl.int64) * SPLITS + split
        tl.store(acc_ptr + part * (TOKENS * G * D) + rows * D + cols, acc, mask=inside)
        group = tl.arange(0, ROWS)
        tl.store(stats_ptr + part * (2 * ROWS_P) + group, highest, mask=group < ROWS_P)
        tl.store(stats_ptr + part * (2 * ROWS_P) + ROWS_P + group, total, mask=group < ROWS_P)
        tl.debug_barrier()  # the counter speaks for all threads
        if tl.atomic_add(counters_ptr + head, 1, sem="acq_rel") == active - 1:
            tl.store(counters_ptr + head, 0)
            part = head.to(tl.int64) * SPLITS
            combine(
                acc_ptr + part * (TOKENS * G * D), stats_ptr + part * (2 * ROWS_P), out, active, v_scale, token_stride,
                G, TOKENS, D, D_P, CHUNK,
            )  # fmt: skip
