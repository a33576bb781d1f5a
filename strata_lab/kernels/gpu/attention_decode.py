"""One decode step of attention: a token per request over its paged cache, split along the cache, in one kernel.

`decode` is `paged_attention` for max_q_len 1. `decode_fused` takes the QKV product and does everything up to the output
projection: norm and rotation of q and k, the cache write and attention, with the arithmetic of `kv_write.py`.

A program takes one request, one KV head (with its whole group of query heads, so that K and V cross the bus once) and
a run of tiles of the cache. At 512 tokens and 4 KV heads all of K and V is 512 KB: what counts is latency, not bytes.
So a program loads its first tile, which earlier steps wrote, before it waits for the kernel that computes q, and
converts it while q is on its way; later tiles come through a pipeline in shared memory. How many programs there are
depends on shapes alone; how many of them work, and on how many tiles, on the request's length: the rest leave at once.
Each leaves its maximum, sum and weighted values in float32, and the last one of a head to arrive adds them up in a
fixed order, so that the result does not depend on who that was. The new token belongs to the last part: its key and
value are used as stored, from registers. So do those before it where several rows are tokens of one text that are new
together (`together`): each row's last program makes the keys of all it sees, since no program waits for another's.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata_lab.kernels.gpu import launch, meta
from strata_lab.kernels.gpu.attention_config import DecodeConfig, decode_config
from strata_lab.kernels.gpu.attention_tiles import (
    LOG2E,
    attend,
    block_ids,
    combine,
    held,
    hidden_tiles,
    load_tile,
    operand,
    place,
)
from strata_lab.kernels.gpu.kv_write import rms_factor, rotated, stored

ROWS = 16  # query heads of a group, padded to the smallest tile of tl.dot
MAX_CHUNK = 16  # partial results that are loaded at once and added up
COMBINED_REGISTERS = 64  # of a thread, for them


@triton.jit
def _attention_decode_kernel(
    x_ptr, out_ptr, k_cache_ptr, v_cache_ptr, tables_ptr, seq_lens_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr,
    slots_ptr, acc_ptr, stats_ptr, counters_ptr, eps, scale, k_scale, v_scale, x_stride, table_stride,
    block_stride, slot_stride,
    G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF_P: tl.constexpr, D_P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, FUSED: tl.constexpr,
    ROWS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, SCALED: tl.constexpr, HOLD: tl.constexpr,
    SINKS: tl.constexpr, WINDOW: tl.constexpr, TOGETHER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x: q rows [B, H * D], or with FUSED rows of the QKV product. See the module."""
    HALF: tl.constexpr = D // 2
    ROWS_P: tl.constexpr = triton.next_power_of_2(G)
    kv_head, request, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if not FUSED:  # the newest key was written by the kernel just before
        launch.wait(PDL)
        launch.trigger(PDL)
    seq_len = tl.load(seq_lens_ptr + request)
    oldest = seq_len - WINDOW  # position in the window
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
    texts = tl.num_programs(1) // TOGETHER  # row j * texts + i is token j of text i
    fresh = request // texts + 1  # tokens of this step that the row sees
    if FUSED:
        slot = tl.load(slots_ptr + request)
        limit = tl.where(slot >= 0, tl.minimum(end, seq_len - fresh), end)
    table = tables_ptr + request * table_stride
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
    mine = is_last & (slot >= 0)  # the new token is this program's
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
    q_ptr = x + (kv_head * G + rows) * D + half
    q_first = tl.load(q_ptr, mask=(rows < G) & within, other=0.0)
    q_second = tl.load(q_ptr + HALF, mask=(rows < G) & within, other=0.0)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_P], tl.float32)
    to_log2 = scale * k_scale * LOG2E
    if FUSED:
        KV_DTYPE: tl.constexpr = k_cache_ptr.dtype.element_ty
        X_DTYPE: tl.constexpr = x_ptr.dtype.element_ty
        cos = tl.load(cos_ptr + request * HALF + half, mask=within, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + request * HALF + half, mask=within, other=0.0).to(tl.float32)
        if TOGETHER > 1:  # a new key in each row
            there = (rows < fresh) & mine
            new_row = rows.to(tl.int64) * texts + request % texts
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
            new = slot.to(tl.int64) // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
            own = rows == fresh - 1
            tl.store(k_base + new + half + rows * 0, k_kept, mask=own & within)
            tl.store(k_base + new + HALF + half + rows * 0, k_kept_second, mask=own & within)
            if TOGETHER > 1:
                tl.store(v_base + new + col[None, :] + rows * 0, v_kept, mask=own & (col[None, :] < D))
                highest, total, acc = attend(
                    q_first.to(DOT), q_second.to(DOT), k_kept, k_kept_second, v_kept, 0, fresh, 0, to_log2, highest,
                    total, acc, ROWS, DOT, PRECISION, 0, 0,
                )  # fmt: skip
            else:
                tl.store(v_base + new + col, v_kept, mask=col < D)
                product = q_first.to(tl.float32) * k_kept.to(tl.float32)
                product += q_second.to(tl.float32) * k_kept_second.to(tl.float32)
                highest = tl.sum(product, axis=1) * to_log2
                total = total + 1.0
                acc = acc + v_kept.to(tl.float32)[None, :]
    q_first, q_second = q_first.to(DOT), q_second.to(DOT)

    highest, total, acc = attend(
        q_first, q_second, tile_first, tile_second, tile_v, at, limit + at - begin, oldest, to_log2, highest, total,
        acc, TILE, DOT, PRECISION, SINKS, WINDOW,
    )  # fmt: skip
    if begin + TILE < limit:  # spares programs of one tile the start of a pipelined loop
        for here in range(begin + TILE, limit, TILE):
            at = place(here, hidden, SINKS, WINDOW, TILE)
            until = limit + at - here
            ids = block_ids(table, at, until, BLOCK_SIZE, TILE)
            tile_first, tile_second, tile_v = load_tile(
                k_base, v_base, ids, at, until, oldest, block_stride, slot_stride, D, HALF_P, D_P, BLOCK_SIZE, TILE,
                SINKS, WINDOW,
            )  # fmt: skip
            highest, total, acc = attend(
                q_first, q_second, tile_first, tile_second, tile_v, at, until, oldest, to_log2, highest, total, acc,
                TILE, DOT, PRECISION, SINKS, WINDOW,
            )  # fmt: skip

    head = request * HKV + kv_head
    cols = col[None, :]
    inside = (rows < G) & (cols < D)
    out = out_ptr + head.to(tl.int64) * (G * D)
    if active == 1:
        share = v_scale / tl.where(total > 0, total, 1.0)  # a request of no tokens gets zeros
        tl.store(out + rows * D + cols, (acc * share[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    elif SPLITS > 1:
        part = head.to(tl.int64) * SPLITS + split
        tl.store(acc_ptr + part * (G * D) + rows * D + cols, acc, mask=inside)
        group = tl.arange(0, ROWS)
        tl.store(stats_ptr + part * (2 * ROWS_P) + group, highest, mask=group < ROWS_P)
        tl.store(stats_ptr + part * (2 * ROWS_P) + ROWS_P + group, total, mask=group < ROWS_P)
        tl.debug_barrier()  # the counter speaks for all threads
        if tl.atomic_add(counters_ptr + head, 1, sem="acq_rel") == active - 1:
            tl.store(counters_ptr + head, 0)
            part = head.to(tl.int64) * SPLITS
            combine(
                acc_ptr + part * (G * D), stats_ptr + part * (2 * ROWS_P), out, active, v_scale, G, D, D_P, CHUNK,
            )  # fmt: skip


def _launch(
    x: Tensor, out: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, seq_lens: Tensor, q_heads: int,
    scale: float, k_scale: float, v_scale: float, eps: float, config: DecodeConfig | None,
    fused: tuple[Tensor | None, ...] = (None,) * 5, sinks: int = 0, window: int = 0, together: int = 1,
) -> Tensor:  # fmt: skip
    _, block_size, kv_heads, width = k_cache.shape
    assert k_cache.stride() == v_cache.stride() and k_cache.stride()[2:] == (width, 1), k_cache.stride()
    batch, group, device = seq_lens.shape[0], q_heads // kv_heads, x.device
    assert 1 <= together <= ROWS and batch % together == 0, (together, batch)
    dot, precision = operand(x.dtype, k_cache.dtype)
    max_tokens = min(tables.shape[1] * block_size, sinks + window if window else sys.maxsize)
    c = config or decode_config(batch, kv_heads, max_tokens, dot == tl.float32, launch.num_sms(device), together, width)
    acc = stats = arrivals = None
    if c.splits > 1:
        parts, padded = batch * kv_heads * c.splits, triton.next_power_of_2(group)
        acc = torch.empty(parts * group * width, dtype=torch.float32, device=device)
        stats = torch.empty(parts * 2 * padded, dtype=torch.float32, device=device)
        arrivals = launch.counters(device, batch * kv_heads)
    half_padded, padded_width = max(triton.next_power_of_2(width // 2), 16), max(triton.next_power_of_2(width), 16)
    per_part = triton.next_power_of_2(group) * padded_width // (32 * c.num_warps)  # registers of a thread
    chunk = min(max(COMBINED_REGISTERS // max(per_part, 1), 1), c.splits, MAX_CHUNK)
    _attention_decode_kernel[(kv_heads, batch, c.splits)](
        x, out, k_cache, v_cache, tables, seq_lens, *fused, acc, stats, arrivals, eps, scale, k_scale, v_scale,
        x.stride(0), tables.stride(0), k_cache.stride(0), k_cache.stride(1), group, kv_heads, width, half_padded,
        padded_width, block_size, c.tile, c.splits, 1 << (chunk.bit_length() - 1), fused[0] is not None, ROWS, dot,
        precision, (k_scale, v_scale) != (1.0, 1.0), not launch.INTERPRETED, sinks, window, together,
        **launch.options(device, num_warps=c.num_warps, num_stages=c.num_stages, early=True),
    )  # fmt: skip
    return out


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: int = 0,
    window: int = 0,
    config: DecodeConfig | None = None,
) -> Tensor:
    """`paged_attention` of q [B, H, D], one token per request."""
    q = q.contiguous()
    out = torch.empty_like(q)
    heads = q.shape[1]
    return _launch(
        q, out, k_cache, v_cache, block_tables, seq_lens, heads, scale, k_scale, v_scale, 0.0, config, sinks=sinks,
        window=window,
    )  # fmt: skip


def decode_fused(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    num_q_heads: int,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: int = 0,
    window: int = 0,
    together: int = 1,
    config: DecodeConfig | None = None,
) -> Tensor:
    """`qkv_rope_append` and attention of qkv [B, (H + 2 Hkv) * D] -> [B, H * D].

    A slot that is not -1 is that of the request's last position. `together` as in `qkv_attention_triton`. Tables,
    lengths, slots and older keys are read before waiting (`launch.py`): a LATE kernel must have come after what wrote
    them, and before this one.
    """
    out = torch.empty((qkv.shape[0], num_q_heads * k_cache.shape[3]), dtype=qkv.dtype, device=qkv.device)
    return _launch(
        qkv, out, k_cache, v_cache, block_tables, seq_lens, num_q_heads, scale, k_scale, v_scale, eps, config,
        (cos, sin, q_norm_weight, k_norm_weight, slot_mapping), sinks, window, together,
    )  # fmt: skip


def aot_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Decode steps of the reference geometries, with the choices of an H200 for tables of 512 and 32768 tokens."""
    lens, slots = meta.tensor(1, dtype=torch.int32), meta.tensor(1, dtype=torch.int64)
    for name, heads, width in (("moe", (32, 4), 128), ("smollm2", (9, 3), 64)):
        norm = meta.tensor(width) if name == "moe" else None
        turn = meta.tensor(1, width // 2, dtype=torch.float32)
        for kv, dtype, length in itertools.product(
            (torch.float8_e4m3fn, torch.bfloat16, torch.float32), (torch.bfloat16, torch.float32), (512, 32768)
        ):
            cache = meta.tensor(4096, 16, heads[1], width, dtype=kv)
            tables = meta.tensor(1, length // 16, dtype=torch.int32)
            qkv = meta.tensor(1, (heads[0] + 2 * heads[1]) * width, dtype=dtype)
            config = decode_config(1, heads[1], length, torch.float32 in (kv, dtype), 132)
            yield (
                f"{name}-{length}-{dtype}-{kv}".replace("torch.", ""),
                partial(decode_fused, qkv, turn, turn, norm, norm, 1e-6, cache, cache, slots, tables, lens,
                        num_q_heads=heads[0], scale=0.1, config=config),
            )  # fmt: skip
    cache, tables = meta.tensor(4096, 16, 8, 128, dtype=torch.float8_e4m3fn), meta.tensor(1, 32, dtype=torch.int32)
    qkv, turn = meta.tensor(1, 48 * 128), meta.tensor(1, 64, dtype=torch.float32)
    fused = partial(decode_fused, qkv, turn, turn, None, None, 1e-6, cache, cache, slots, tables, lens, num_q_heads=32)
    yield "window", partial(fused, scale=0.1, sinks=4, window=1024, config=decode_config(1, 8, 1028, False, 132))
    cache, tables = meta.tensor(4096, 16, 3, 64), meta.tensor(8, 64, dtype=torch.int32)
    qkv, turn = meta.tensor(8, 15 * 64), meta.tensor(8, 32, dtype=torch.float32)
    lens, slots = meta.tensor(8, dtype=torch.int32), meta.tensor(8, dtype=torch.int64)
    fused = partial(decode_fused, qkv, turn, turn, None, None, 1e-6, cache, cache, slots, tables, lens, num_q_heads=9)
    yield "together", partial(fused, scale=0.1, together=8, config=decode_config(8, 3, 1024, False, 132, 8))
    cache, q, tables = meta.tensor(4096, 16, 4, 128), meta.tensor(1, 32, 128), meta.tensor(1, 64, dtype=torch.int32)
    yield "unfused", partial(decode, q, cache, cache, tables, lens, scale=0.1, config=DecodeConfig(64, 16))
