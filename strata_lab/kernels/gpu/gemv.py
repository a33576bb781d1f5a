"""Products of a few activation rows with a quantized weight, on CUDA cores: most of a decode step at batch 1.

A program owns `pieces` tiles of `rows` weight rows and all columns, in chunks. A tile is one 16-byte load per thread,
and the tiles of the first `preload` chunks are requested before `launch.wait`: they cross the bus while the kernel
before this one still runs. A thread meets all its rows with the same columns of x, which it loads (from the cache) for
itself; where a chunk is no wider than a warp nothing is exchanged through shared memory and there is no barrier at all.

The norm costs no pass of its own: y = rsqrt(mean(x^2) + eps) * sum_k w[n, k] * (x[k] * norm[k]), both sums at once.
Integer codes become floats by their bits alone: a code u of b bits in the mantissa of a number in [1, 2) reads
1 + u / 2^b, and scale * u + min is undone per group, with the sum of x over the group: 2-3 instructions per weight.

Bytes moved: the weight once, x once per row tile from the cache, the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from strata_lab.kernels.gpu import launch
from strata_lab.quant.base import LinearWeight

LOAD_BYTES = 16  # what one thread asks for at once
MAX_ROWS = 4  # of x; more are multiplied on tensor cores


@dataclass(frozen=True)
class GemvConfig:
    """How a product is cut up.

    Attributes:
        rows: weight rows of a tile, a power of two.
        chunk: columns of a tile, a power of two.
        pieces: tiles of rows a program owns; even for a gated product (half gate, half up).
        preload: chunks requested before waiting for the previous kernel.
    """

    rows: int
    chunk: int
    pieces: int
    preload: int


@triton.jit
def _codes(w, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """What a weight tile's bits say: a tuple of float32 tiles (int4: the low and the high nibbles)."""
    if FORMAT == "int8":
        if ASM:  # byte ^ 0x80 to the top of the mantissa of 1.0
            v = tl.inline_asm_elementwise(
                """{
                .reg .b32 w, t;
                xor.b32 w, $4, 0x80808080;
                shl.b32 t, w, 15;
                lop3.b32 $0, t, 0x007f8000, 0x3f800000, 0xea;
                shl.b32 t, w, 7;
                lop3.b32 $1, t, 0x007f8000, 0x3f800000, 0xea;
                shr.b32 t, w, 1;
                lop3.b32 $2, t, 0x007f8000, 0x3f800000, 0xea;
                shr.b32 t, w, 9;
                lop3.b32 $3, t, 0x007f8000, 0x3f800000, 0xea;
                }""",
                "=f,=f,=f,=f,r",
                [w],
                dtype=tl.float32,
                is_pure=True,
                pack=4,
            )
        else:
            v = (w.to(tl.float32) + 128.0) / 256.0 + 1.0
        return (v,)
    elif FORMAT == "int4":
        if ASM:
            lo, hi = tl.inline_asm_elementwise(
                """{
                .reg .b32 t;
                shl.b32 t, $8, 19;
                lop3.b32 $0, t, 0x00780000, 0x3f800000, 0xea;
                shl.b32 t, $8, 11;
                lop3.b32 $1, t, 0x00780000, 0x3f800000, 0xea;
                shl.b32 t, $8, 3;
                lop3.b32 $2, t, 0x00780000, 0x3f800000, 0xea;
                shr.b32 t, $8, 5;
                lop3.b32 $3, t, 0x00780000, 0x3f800000, 0xea;
                shl.b32 t, $8, 15;
                lop3.b32 $4, t, 0x00780000, 0x3f800000, 0xea;
                shl.b32 t, $8, 7;
                lop3.b32 $5, t, 0x00780000, 0x3f800000, 0xea;
                shr.b32 t, $8, 1;
                lop3.b32 $6, t, 0x00780000, 0x3f800000, 0xea;
                shr.b32 t, $8, 9;
                lop3.b32 $7, t, 0x00780000, 0x3f800000, 0xea;
                }""",
                "=f,=f,=f,=f,=f,=f,=f,=f,r",
                [w],
                dtype=(tl.float32, tl.float32),
                is_pure=True,
                pack=4,
            )
        else:
            lo = (w & 15).to(tl.float32) / 16.0 + 1.0
            hi = (w >> 4).to(tl.float32) / 16.0 + 1.0
        return (lo, hi)
    else:
        return (w.to(tl.float32),)


@triton.jit
def _per_lane(tile, VEC: tl.constexpr):
    """[rows, lanes * VEC] -> [rows, lanes]: each thread sums what it holds."""
    return tl.sum(tl.reshape(tile, [tile.shape[0], tile.shape[1] // VEC, VEC]), axis=2)


@triton.jit
def _weight_tile(ptr, rows, C: tl.constexpr, STRIDE: tl.constexpr, SIZE: tl.constexpr):
    """Elements C*SIZE.. of the rows; beyond the end zeros."""
    at = C * SIZE + tl.arange(0, SIZE)[None, :]
    if (C + 1) * SIZE <= STRIDE:
        return tl.load(ptr + rows * STRIDE + at, cache_modifier=".cg")
    else:
        return tl.load(ptr + rows * STRIDE + at, mask=at < STRIDE, other=0.0, cache_modifier=".cg")


@triton.jit
def _group_tile(ptr, rows, C: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, K: tl.constexpr, G: tl.constexpr):
    """One group value per lane, float16 [rows, lanes]."""
    COUNT: tl.constexpr = (K + G - 1) // G
    at = (C * CHUNK + tl.arange(0, LANES)[None, :] * (CHUNK // LANES)) // G
    if (C + 1) * CHUNK <= K:
        return tl.load(ptr + rows * COUNT + at)
    else:
        return tl.load(ptr + rows * COUNT + at, mask=at < COUNT, other=0.0)


@triton.jit
def _x_tile(ptr, C: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, K: tl.constexpr,
            HALVES: tl.constexpr):  # fmt: skip
    """Columns of chunk C as the weight tile has them, repeated for its rows; beyond K zeros."""
    j = tl.arange(0, CHUNK // HALVES)
    if HALVES == 2:
        j = j // 16 * 32 + j % 16 + HALF * 16
    at = C * CHUNK + tl.broadcast_to(j[None, :], [ROWS, CHUNK // HALVES])
    if (C + 1) * CHUNK <= K:
        return tl.load(ptr + at)
    else:
        return tl.load(ptr + at, mask=at < K, other=0.0)


@triton.jit
def gemv_kernel(
    x_ptr, w_ptr, scale_ptr, min_ptr, bias_ptr, norm_ptr, residual_ptr, out_ptr, N, eps,
    T: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, VEC: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PIECES: tl.constexpr, PRELOAD: tl.constexpr, SILU: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i: `PIECES` tiles of output rows (gated: half as many, gate and up) for all T rows of x."""
    HALVES: tl.constexpr = 2 if FORMAT == "int4" else 1
    GROUPED: tl.constexpr = GROUP > 0
    LANES: tl.constexpr = CHUNK // (VEC * HALVES)
    CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    STRIDE: tl.constexpr = (K + 31) // 32 * 16 if FORMAT == "int4" else K  # elements of a row of the weight
    OUTS: tl.constexpr = PIECES // 2 if SILU else PIECES
    UNIT: tl.constexpr = 16.0 if FORMAT == "int4" else 256.0  # codes are read as 1 + code / UNIT ...
    BASE: tl.constexpr = 1.0 if FORMAT == "int4" else 1.5  # ... so that code 0 reads as this
    outputs = N // 2 if SILU else N

    first = tl.program_id(0) * (OUTS * ROWS) + tl.arange(0, ROWS)[:, None]
    rows = ()
    for p in tl.static_range(PIECES):
        row = tl.minimum(first + (p % OUTS) * ROWS, outputs - 1)  # what is beyond the last row is not stored
        rows += ((row + (p // OUTS) * outputs).to(tl.int64),)

    w, scale, low = (), (), ()
    for c in tl.static_range(PRELOAD):
        for p in tl.static_range(PIECES):
            w += (_weight_tile(w_ptr, rows[p], c, STRIDE, CHUNK // HALVES),)
            if GROUPED:
                scale += (_group_tile(scale_ptr, rows[p], c, CHUNK, LANES, K, GROUP),)
            if min_ptr is not None:
                low += (_group_tile(min_ptr, rows[p], c, CHUNK, LANES, K, GROUP),)
    lane0 = tl.broadcast_to(tl.arange(0, LANES)[None, :], [ROWS, LANES])
    launch.wait(PDL)
    launch.trigger(PDL)

    acc, square = (), ()
    for _ in tl.static_range(PIECES * T):
        acc += (tl.zeros([ROWS, LANES], tl.float32),)
    for _ in tl.static_range(T):
        square += (tl.zeros([ROWS, LANES], tl.float32),)
    for c in tl.static_range(CHUNKS):
        if c + PRELOAD < CHUNKS:
            for p in tl.static_range(PIECES):
                w += (_weight_tile(w_ptr, rows[p], c + PRELOAD, STRIDE, CHUNK // HALVES),)
                if GROUPED:
                    scale += (_group_tile(scale_ptr, rows[p], c + PRELOAD, CHUNK, LANES, K, GROUP),)
                if min_ptr is not None:
                    low += (_group_tile(min_ptr, rows[p], c + PRELOAD, CHUNK, LANES, K, GROUP),)
        xs, sums, squares = (), (), ()
        for t in tl.static_range(T):
            total = tl.zeros([ROWS, LANES], tl.float32)
            sq = square[t]
            for h in tl.static_range(HALVES):
                x = _x_tile(x_ptr + t * K, c, h, ROWS, CHUNK, K, HALVES).to(tl.float32)
                if norm_ptr is not None:
                    sq += _per_lane(x * x, VEC)
                    x *= _x_tile(norm_ptr, c, h, ROWS, CHUNK, K, HALVES).to(tl.float32)
                if GROUPED:
                    total += _per_lane(x, VEC)
                xs += (x,)
            sums += (total,)
            squares += (sq,)
        square = squares
        new = ()
        for p in tl.static_range(PIECES):
            codes = _codes(w[c * PIECES + p], FORMAT, ASM)
            if GROUPED:
                s = scale[c * PIECES + p].to(tl.float32) * UNIT
                base = -BASE * s
                if min_ptr is not None:
                    base += low[c * PIECES + p].to(tl.float32)
            for t in tl.static_range(T):
                part = _per_lane(codes[0] * xs[t * HALVES], VEC)
                if HALVES == 2:
                    part += _per_lane(codes[1] * xs[t * HALVES + 1], VEC)
                if GROUPED:
                    new += (acc[p * T + t] + (s * part + base * sums[t]),)
                else:
                    new += (acc[p * T + t] + part,)
        acc = new

    for t in tl.static_range(T):
        y = ()
        for p in tl.static_range(PIECES):
            v = tl.sum(acc[p * T + t], axis=1, keep_dims=True)
            if norm_ptr is not None:
                v *= tl.rsqrt(tl.sum(square[t], axis=1, keep_dims=True) / K + eps)
            v = tl.broadcast_to(v, [ROWS, LANES])
            if scale_ptr is not None and not GROUPED:
                v *= tl.load(scale_ptr + rows[p] + lane0 * 0)
            if bias_ptr is not None:
                v += tl.load(bias_ptr + rows[p] + lane0 * 0).to(tl.float32)
            y += (v,)
        for p in tl.static_range(OUTS):
            v = y[p]
            if SILU:
                v = v / (1.0 + tl.exp(-v)) * y[p + OUTS]
            at = t * outputs + rows[p] + lane0 * 0
            if residual_ptr is not None:
                v += tl.load(residual_ptr + at).to(tl.float32)
            mine = (lane0 == 0) & (first + p * ROWS < outputs)
            tl.store(out_ptr + at, v.to(out_ptr.dtype.element_ty), mask=mine)


def default_config(weight: LinearWeight, t: int, silu_mul: bool) -> GemvConfig:
    """Tiles for `t` rows of x. Tunable: every valid configuration is right."""
    k = weight.shape[1]
    per_load = LOAD_BYTES * (2 if weight.format == "int4" else 1) // weight.data.element_size()
    chunk = 32 * per_load
    chunks = -(-k // chunk)
    pieces = max(1, min(4, 20 // chunks))
    return GemvConfig(4, chunk, max(pieces, 2) if silu_mul else pieces, min(chunks, 5))


def gemv(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    residual: Tensor | None,
    silu_mul: bool,
    out: Tensor,
    config: GemvConfig | None = None,
) -> None:
    """`linear_triton` for a few contiguous rows x [T, K] into `out`, whose dtype the result is rounded to."""
    t, k = x.shape
    n = weight.shape[0]
    config = config or default_config(weight, t, silu_mul)
    vec = LOAD_BYTES // weight.data.element_size()
    lanes = config.chunk // (vec * (2 if weight.format == "int4" else 1))
    warps = max(1, config.rows * lanes // 32)
    outs = config.rows * config.pieces // (2 if silu_mul else 1)
    grid = (-(-(n // 2 if silu_mul else n) // outs),)
    gemv_kernel[grid](
        x, weight.data, weight.scales, weight.mins, bias, norm_weight, residual, out, n, norm_eps,
        T=t, K=k, FORMAT=weight.format, GROUP=weight.group_size, VEC=vec,
        ROWS=config.rows, CHUNK=config.chunk, PIECES=config.pieces, PRELOAD=min(config.preload, -(-k // config.chunk)),
        SILU=silu_mul, ASM=not launch.INTERPRETED, **launch.options(x.device, num_warps=warps),
    )  # fmt: skip
