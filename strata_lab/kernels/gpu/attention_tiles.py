"""Parts of the attention kernels: finding a position's block, adding up parts, number formats."""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: RUF005 (Triton knows no unpacking in a tuple)
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from strata_lab.kernels.gpu import launch

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def block_ids(table_ptr, first, limit, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Blocks of the positions first : first + TILE as [TILE, 1]; scalar loads, so nothing passes shared memory."""
    rows = tl.arange(0, TILE)[:, None]
    ids = tl.zeros([TILE, 1], tl.int32)
    for j in tl.static_range((TILE + BLOCK_SIZE - 1) // BLOCK_SIZE):
        start = first + j * BLOCK_SIZE
        block = tl.load(table_ptr + start // BLOCK_SIZE, mask=start < limit, other=0)
        ids = tl.where(rows // BLOCK_SIZE == j, block, ids)
    return ids


@triton.jit
def is_seen(position, limit, oldest, SINKS: tl.constexpr, WINDOW: tl.constexpr):
    """Whether positions are seen: before `limit` and, with a window, sinks or not before `oldest`."""
    seen = position < limit
    if WINDOW > 0:
        seen = seen & ((position < SINKS) | (position >= oldest))
    return seen


@triton.jit
def hidden_tiles(oldest, SINKS: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """How many tiles behind those of the sinks are seen by no query; `oldest`: first position of the first window."""
    if WINDOW == 0:
        return 0
    return tl.maximum(tl.maximum(oldest, 0) // TILE - (SINKS + TILE - 1) // TILE, 0)


@triton.jit
def place(here, hidden, SINKS: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Position of the tile that is the one at `here` when `hidden` tiles behind the sinks are left out."""
    if WINDOW == 0:
        return here
    return tl.where(here < (SINKS + TILE - 1) // TILE * TILE, here, here + hidden * TILE)


@triton.jit
def held(x, ON: tl.constexpr):
    """x, unchanged. What is done with it is not moved up to its load, where it would wait for it."""
    if ON:
        BITS: tl.constexpr = x.dtype.primitive_bitwidth
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=32 // BITS)
    return x


@triton.jit
def load_tile(
    k_ptr, v_ptr, ids, first, limit, oldest, block_stride, slot_stride, D: tl.constexpr, HALF_P: tl.constexpr,
    D_P: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Both halves of K [TILE, HALF_P] and V [TILE, D_P]; zeros where nothing is seen, whatever lies there."""
    HALF: tl.constexpr = D // 2
    rows = tl.arange(0, TILE)[:, None]
    at = ids.to(tl.int64) * block_stride + (first + rows) % BLOCK_SIZE * slot_stride
    seen = is_seen(first + rows, limit, oldest, SINKS, WINDOW)
    half = tl.arange(0, HALF_P)[None, :]
    first_half = tl.load(k_ptr + at + half, mask=seen & (half < HALF), other=0.0)
    second_half = tl.load(k_ptr + at + half + HALF, mask=seen & (half < HALF), other=0.0)
    cols = tl.arange(0, D_P)[None, :]
    return first_half, second_half, tl.load(v_ptr + at + cols, mask=seen & (cols < D), other=0.0)


@triton.jit
def attend(
    q_first, q_second, k_first, k_second, v, first, limit, oldest, to_log2, highest, total, acc, TILE: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Softmax goes on over one tile: new maxima, sums [ROWS] and weighted values [ROWS, D_P]."""
    scores = tl.dot(q_first, tl.trans(k_first.to(DOT)), input_precision=PRECISION)
    scores = tl.dot(q_second, tl.trans(k_second.to(DOT)), scores, input_precision=PRECISION)
    seen = is_seen(first + tl.arange(0, TILE)[None, :], limit, oldest, SINKS, WINDOW)
    scores = tl.where(seen, scores * to_log2, float("-inf"))  # [ROWS, TILE]
    higher = tl.maximum(highest, tl.max(scores, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen so far: a request of one token, or of none
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(highest - base)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(DOT), v.to(DOT), acc * shrink[:, None], input_precision=PRECISION)
    return higher, total, acc


@triton.jit
def combine(
    acc_ptr, stats_ptr, out_ptr, active, v_scale, G: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Add up the parts of one request and KV head, always from the first to the last. Past L1: others wrote them."""
    ROWS_P: tl.constexpr = triton.next_power_of_2(G)
    rows = tl.arange(0, ROWS_P)
    cols = tl.arange(0, D_P)
    top = tl.full([ROWS_P], float("-inf"), tl.float32)
    total = tl.zeros([ROWS_P], tl.float32)
    acc = tl.zeros([ROWS_P, D_P], tl.float32)
    at = rows[:, None] * D + cols[None, :]
    inside = (rows[:, None] < G) & (cols[None, :] < D)
    for start in range(0, active, CHUNK):
        values, maxima, sums = (), (), ()  # all loads of a chunk before the first use; nothing passes between threads
        for i in tl.static_range(CHUNK):
            there = start + i < active
            stat = stats_ptr + (start + i) * (2 * ROWS_P) + rows
            acc_at = acc_ptr + (start + i) * (G * D) + at
            values = values + (tl.load(acc_at, mask=inside & there, other=0.0, cache_modifier=".cg"),)
            maxima = maxima + (tl.load(stat, mask=there, other=float("-inf"), cache_modifier=".cg"),)
            sums = sums + (tl.load(stat + ROWS_P, mask=there, other=0.0, cache_modifier=".cg"),)
        higher = top
        for i in tl.static_range(CHUNK):
            higher = tl.maximum(higher, maxima[i])
        shrink = tl.exp2(top - higher)
        total = total * shrink
        acc = acc * shrink[:, None]
        for i in tl.static_range(CHUNK):
            factor = tl.exp2(maxima[i] - higher)
            total += sums[i] * factor
            acc += values[i] * factor[:, None]
        top = higher
    out = acc * (v_scale / total)[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def operand(x: torch.dtype, cache: torch.dtype) -> tuple[Any, str]:
    """What tl.dot multiplies, and its precision: narrow only where every cached number is exact in it.

    float8 goes to float16 in one instruction, to bfloat16 in three; q beyond 65504 would overflow in it.
    """
    if launch.INTERPRETED or x == torch.float32 or cache == torch.float32:
        return tl.float32, "ieee" if launch.INTERPRETED else "tf32x3"
    if cache == torch.bfloat16:
        return (tl.bfloat16, "tf32") if x == torch.bfloat16 else (tl.float32, "tf32x3")
    return tl.float16, "tf32"
