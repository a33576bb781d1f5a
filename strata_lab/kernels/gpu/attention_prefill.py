"""Attention of prompt slices, or of slices and decodes together, over the paged cache.

A program takes one request, one KV head and `block` query rows, a row being one query head of one token: the heads of
a group lie side by side, so a tile of K and V that was loaded is used by all of them, and a short slice still fills
the rows of a product. Softmax runs over the tiles of the cache from the first on; nothing but the result is written.
The grid comes from shapes alone; programs past a request's queries leave at once. Bytes: q and the result once, K and
V once per block of rows (the L2 cache holds them in between).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata_lab.kernels.gpu import launch, meta
from strata_lab.kernels.gpu.attention_tiles import LOG2E, block_ids, hidden_tiles, is_seen, operand, place


@dataclass(frozen=True)
class PrefillConfig:
    """What may be tuned on a card.

    Attributes:
        block: query rows of a program, at least 16.
        tile: positions of the cache at a time; a multiple of the block size or a part of it.
        num_warps, num_stages: of a program.
    """

    block: int
    tile: int
    num_warps: int
    num_stages: int


@functools.cache
def prefill_config(rows: int, wide: bool, device: torch.device) -> PrefillConfig:
    """By the query rows of the longest request; `wide`: products are in float32.

    On compute capability 9.0 operands come from shared memory, elsewhere from registers: smaller tiles, or they spill.
    """
    if wide:
        return PrefillConfig(16, 32, 8, 1)
    if rows <= 16:
        return PrefillConfig(16, 64, 4, 3)
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    tile = 64 if hopper else 32
    return PrefillConfig(64, tile, 4, 2) if rows <= 64 else PrefillConfig(128, tile, 8, 2)


@triton.jit
def _attention_prefill_kernel(
    q_ptr, out_ptr, k_cache_ptr, v_cache_ptr, tables_ptr, seq_lens_ptr, starts_ptr, scale, k_scale, v_scale, tokens,
    num_requests, table_stride, block_stride, slot_stride, G: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    D_P: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q and out [T, HKV * G, D], contiguous. The requests of the grid are followed by one for the rows of nobody."""
    block, kv_head, request = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    launch.wait(PDL)
    launch.trigger(PDL)
    start = tl.load(starts_ptr + request)
    if request == num_requests:
        flat = tl.arange(0, triton.next_power_of_2(G * D))
        for token in range(start + block, tokens, tl.num_programs(0)):
            at = ((flat * 0 + token).to(tl.int64) * HKV + kv_head) * (G * D) + flat
            tl.store(out_ptr + at, tl.zeros_like(flat).to(out_ptr.dtype.element_ty), mask=flat < G * D)
        return
    q_len = tl.load(starts_ptr + request + 1) - start
    if block * BLOCK >= q_len * G:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    row = block * BLOCK + tl.arange(0, BLOCK)
    token = row // G
    position = seq_len - q_len + token  # the last one that the row sees
    cols = tl.arange(0, D_P)[None, :]
    at = ((start + token).to(tl.int64) * (HKV * G) + kv_head * G + row % G) * D
    inside = (token < q_len)[:, None] & (cols < D)
    q = tl.load(q_ptr + at[:, None] + cols, mask=inside, other=0.0).to(DOT)
    limit = seq_len - q_len + tl.minimum((block * BLOCK + BLOCK - 1) // G, q_len - 1) + 1
    table = tables_ptr + request * table_stride
    k_base, v_base = k_cache_ptr + kv_head * D + cols, v_cache_ptr + kv_head * D + cols
    tile = tl.arange(0, TILE)[:, None]
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, D_P], tl.float32)
    to_log2 = scale * k_scale * LOG2E
    oldest = seq_len - q_len + block * BLOCK // G - WINDOW + 1  # position in the window of the program's first query
    hidden = hidden_tiles(oldest, SINKS, WINDOW, TILE)
    for compact in range(0, limit - hidden * TILE, TILE):
        here = place(compact, hidden, SINKS, WINDOW, TILE)
        ids = block_ids(table, here, limit, BLOCK_SIZE, TILE)
        offset = ids.to(tl.int64) * block_stride + (here + tile) % BLOCK_SIZE * slot_stride
        # what no row may see is not even read: it may be NaN
        used = is_seen(here + tile, limit, oldest, SINKS, WINDOW) & (cols < D)
        k = tl.load(k_base + offset, mask=used, other=0.0).to(DOT)
        v = tl.load(v_base + offset, mask=used, other=0.0).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * to_log2
        until = position[:, None] + 1
        seen = is_seen(here + tl.arange(0, TILE)[None, :], until, until - WINDOW, SINKS, WINDOW)
        scores = tl.where(seen, scores, float("-inf"))  # [BLOCK, TILE]; without a window every row sees position 0
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        base = higher
        if WINDOW > 0:
            base = tl.where(higher == float("-inf"), 0.0, higher)  # a row may have seen nothing so far
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(DOT), v, acc * shrink[:, None], input_precision=PRECISION)
        highest = higher
    share = v_scale / tl.where(total > 0, total, 1.0)  # a request of no tokens gets zeros
    tl.store(out_ptr + at[:, None] + cols, (acc * share[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


def prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    max_q_len: int,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: int = 0,
    window: int = 0,
    config: PrefillConfig | None = None,
) -> Tensor:
    """`paged_attention` of q [T, H, D] for any query lengths."""
    tokens, heads, width = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    assert k_cache.stride() == v_cache.stride() and k_cache.stride()[2:] == (width, 1), k_cache.stride()
    q, batch, group = q.contiguous(), seq_lens.shape[0], heads // kv_heads
    out = torch.empty_like(q)
    dot, precision = operand(q.dtype, k_cache.dtype)
    c = config or prefill_config(max_q_len * group, dot == tl.float32, q.device)
    _attention_prefill_kernel[(triton.cdiv(max_q_len * group, c.block), kv_heads, batch + 1)](
        q, out, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q, scale, k_scale, v_scale, tokens, batch,
        block_tables.stride(0), k_cache.stride(0), k_cache.stride(1), group, kv_heads, width,
        max(triton.next_power_of_2(width), 16), block_size, c.block, c.tile, dot, precision, sinks, window,
        **launch.options(q.device, num_warps=c.num_warps, num_stages=c.num_stages),
    )  # fmt: skip
    return out


def aot_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """A long prompt, a short slice and decodes beside others, for the reference geometries."""
    lens, starts, tables = (
        meta.tensor(2, dtype=torch.int32),
        meta.tensor(3, dtype=torch.int32),
        meta.tensor(2, 128, dtype=torch.int32),
    )
    for name, heads, width in (("moe", (32, 4), 128), ("smollm2", (9, 3), 64)):
        for kv in (torch.float8_e4m3fn, torch.bfloat16, torch.float32):
            for dtype in (torch.bfloat16, torch.float32):
                for q_len in (2, 8, 2048):
                    cache, q = (
                        meta.tensor(4096, 16, heads[1], width, dtype=kv),
                        meta.tensor(2 * q_len, heads[0], width, dtype=dtype),
                    )
                    yield (
                        f"{name}-{q_len}-{dtype}-{kv}".replace("torch.", ""),
                        partial(prefill, q, cache, cache, tables, lens, starts, max_q_len=q_len, scale=0.1),
                    )
                    if q_len == 2048:
                        some = {"sinks": 4, "window": 1024}
                        call = partial(prefill, q, cache, cache, tables, lens, starts, max_q_len=q_len, scale=0.1)
                        yield f"window-{name}-{dtype}-{kv}".replace("torch.", ""), partial(call, **some)
