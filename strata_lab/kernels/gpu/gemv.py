"""Products of a few activation rows with a quantized weight, on CUDA cores: most of a decode step at batch 1.

A program owns `pieces` tiles of `rows` weight rows and all columns, in chunks. A tile is one 16-byte load per thread,
and the tiles of the first `preload` chunks are requested before `launch.wait`: they cross the bus while the kernel
before this one still runs. A thread meets all its rows with the same columns of x, which it loads (from the cache) for
itself; where a chunk is no wider than a warp nothing passes through shared memory and there is no barrier at all.

The norm costs no pass of its own: y = rsqrt(mean(x^2) + eps) * sum_k w[n, k] * (x[k] * norm[k]), both sums at once.
Integer codes become floats by their bits alone: a code u of b bits in the mantissa of a number in [1, 2) reads
1 + u / 2^b, and scale * u + min is undone per group, with the sum of x over the group: 2-3 instructions per weight.

Bytes moved: the weight once, x once per row tile from the cache, the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata_lab.kernels.gpu import launch
from strata_lab.kernels.gpu.gemv_config import LOAD_BYTES, GemvConfig, columns_per_load, default_config
from strata_lab.kernels.gpu.gemv_math import codes_as_floats, half_fma, int_dot, now, per_lane, planes, rounded
from strata_lab.quant.base import LinearWeight

MAX_ROWS = 4  # of x; more are multiplied on tensor cores
HALF_CHAIN = 8  # products of e4m3 codes that are added up in float16


@triton.jit
def weight_tile(ptr, rows, C: tl.constexpr, STRIDE: tl.constexpr, SIZE: tl.constexpr):
    """Elements C*SIZE.. of the rows; beyond the end zeros."""
    at = C * SIZE + tl.arange(0, SIZE)[None, :]
    if (C + 1) * SIZE <= STRIDE:
        return tl.load(ptr + rows * STRIDE + at, cache_modifier=".cg")
    else:
        return tl.load(ptr + rows * STRIDE + at, mask=at < STRIDE, other=0.0, cache_modifier=".cg")


@triton.jit
def group_tile(ptr, rows, C: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, K: tl.constexpr, G: tl.constexpr):
    """One group value per lane, float16 [rows, lanes]."""
    COUNT: tl.constexpr = (K + G - 1) // G
    at = (C * CHUNK + tl.arange(0, LANES)[None, :] * (CHUNK // LANES)) // G
    if (C + 1) * CHUNK <= K:
        return tl.load(ptr + rows * COUNT + at)
    else:
        return tl.load(ptr + rows * COUNT + at, mask=at < COUNT, other=0.0)


@triton.jit
def columns(ptr, C: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, K: tl.constexpr,
             HALVES: tl.constexpr):  # fmt: skip
    """Columns of chunk C of a row as the weight tile has them: [rows, columns], with ROWS 0 [columns].

    Beyond K zeros.
    """
    at = tl.arange(0, CHUNK // HALVES)
    if HALVES == 2:
        at = at // 16 * 32 + at % 16 + HALF * 16
    at += C * CHUNK
    if ROWS > 0:
        at = tl.broadcast_to(at[None, :], [ROWS, CHUNK // HALVES])
    if (C + 1) * CHUNK <= K:
        return tl.load(ptr + at)
    else:
        return tl.load(ptr + at, mask=at < K, other=0.0)


@triton.jit
def gemv_kernel(
    x_ptr, w_ptr, scale_ptr, min_ptr, bias_ptr, norm_ptr, residual_ptr, out_ptr, N, eps,
    T: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, VEC: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PIECES: tl.constexpr, PRELOAD: tl.constexpr, SILU: tl.constexpr,
    SHARE: tl.constexpr, HALF: tl.constexpr, INT: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i: `PIECES` tiles of output rows (gated: half as many, gate and up) for all T rows of x."""
    HALVES: tl.constexpr = 2 if FORMAT == "int4" else 1
    GROUPED: tl.constexpr = GROUP > 0
    LANES: tl.constexpr = CHUNK // (VEC * HALVES)
    CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    STRIDE: tl.constexpr = (K + 31) // 32 * 16 if FORMAT == "int4" else K  # elements of a row of the weight
    OUTS: tl.constexpr = PIECES // 2 if SILU else PIECES
    CODED: tl.constexpr = FORMAT == "int8" or FORMAT == "int4"  # read by their bits, with what is to be undone
    UNIT: tl.constexpr = 16.0 if FORMAT == "int4" else 256.0  # codes are read as 1 + code / UNIT ...
    ABOUT: tl.constexpr = 8.0 if FORMAT == "int4" and min_ptr is None else 0.0  # the int4 code that means 0
    BASE: tl.constexpr = 1.0 + ABOUT / 16.0 if FORMAT == "int4" else 1.5  # ... so that what means 0 reads as this
    PEAK: tl.constexpr = 8.0  # of x in float16: HALF products of up to 448 * PEAK stay below 65504
    outputs = N // 2 if SILU else N

    first = tl.program_id(0) * (OUTS * ROWS) + tl.arange(0, ROWS)[:, None]
    rows = ()
    for p in tl.static_range(PIECES):
        row = tl.minimum(first + (p % OUTS) * ROWS, outputs - 1)  # what is beyond the last row is not stored
        rows += ((row + (p // OUTS) * outputs).to(tl.int64),)

    w, scale, low = (), (), ()
    for c in tl.static_range(PRELOAD):
        for p in tl.static_range(PIECES):
            w += (weight_tile(w_ptr, rows[p], c, STRIDE, CHUNK // HALVES),)
            if GROUPED:
                scale += (group_tile(scale_ptr, rows[p], c, CHUNK, LANES, K, GROUP),)
            if min_ptr is not None:
                low += (group_tile(min_ptr, rows[p], c, CHUNK, LANES, K, GROUP),)
    gains = ()  # shared: in time; else they would take too many registers
    if SHARE and norm_ptr is not None:
        for i in tl.static_range(CHUNKS * HALVES):
            gains += (columns(norm_ptr, i // HALVES, i % HALVES, 0, CHUNK, K, HALVES),)
    lane0 = tl.broadcast_to(tl.arange(0, LANES)[None, :], [ROWS, LANES])
    row_scale, bias, rest = (), (), ()
    for p in tl.static_range(PIECES):
        if scale_ptr is not None and not GROUPED:
            row_scale += (tl.load(scale_ptr + rows[p] + lane0 * 0),)
        if bias_ptr is not None:
            bias += (tl.load(bias_ptr + rows[p] + lane0 * 0),)
    launch.wait(PDL)
    launch.trigger(PDL)
    if residual_ptr is not None:
        for i in tl.static_range(T * OUTS):
            rest += (tl.load(residual_ptr + i // OUTS * outputs + rows[i % OUTS] + lane0 * 0),)

    acc, square, shared, inverse = (), (), (), ()
    for _ in tl.static_range(PIECES * T):
        acc += (tl.zeros([ROWS, LANES], tl.float32),)
    for t in tl.static_range(T):
        sq = tl.zeros([CHUNK // HALVES] if SHARE else [ROWS, LANES], tl.float32)
        if SHARE:
            raw = ()
            for i in tl.static_range(CHUNKS * HALVES):
                raw += (columns(x_ptr + t * K, i // HALVES, i % HALVES, 0, CHUNK, K, HALVES),)
            peak = tl.zeros([CHUNK // HALVES], tl.float32)
            for i in tl.static_range(CHUNKS * HALVES):
                x = raw[i].to(tl.float32)
                if norm_ptr is not None:
                    sq += x * x
                    x *= gains[i].to(tl.float32)
                peak = tl.maximum(peak, tl.abs(x))
                shared += (x,)
            if HALF > 0:
                inverse += (PEAK / tl.maximum(tl.max(peak), 1e-30),)
        square += (sq,)
    halves = ()
    for c in tl.static_range(CHUNKS):
        if c + PRELOAD < CHUNKS:
            for p in tl.static_range(PIECES):
                w += (weight_tile(w_ptr, rows[p], c + PRELOAD, STRIDE, CHUNK // HALVES),)
                if GROUPED:
                    scale += (group_tile(scale_ptr, rows[p], c + PRELOAD, CHUNK, LANES, K, GROUP),)
                if min_ptr is not None:
                    low += (group_tile(min_ptr, rows[p], c + PRELOAD, CHUNK, LANES, K, GROUP),)
        if norm_ptr is not None and not SHARE:
            gains = ()
            for h in tl.static_range(HALVES):
                gains += (columns(norm_ptr, c, h, ROWS, CHUNK, K, HALVES).to(tl.float32),)
        xs, sums, squares, units = (), (), (), ()
        for t in tl.static_range(T):
            total = tl.zeros([ROWS, LANES], tl.float32)
            sq = square[t]
            if INT:
                count = tl.zeros([LANES], tl.int32)
                x = shared[(t * CHUNKS + c) * HALVES]
                amax = tl.max(tl.reshape(tl.abs(x), [LANES, VEC]), axis=1)
                if HALVES == 2:
                    x1 = shared[(t * CHUNKS + c) * HALVES + 1]
                    amax = tl.maximum(amax, tl.max(tl.reshape(tl.abs(x1), [LANES, VEC]), axis=1))
            for h in tl.static_range(HALVES):
                if SHARE:
                    x = shared[(t * CHUNKS + c) * HALVES + h]
                    if HALF > 0:
                        x = (x * inverse[t]).to(tl.float16)
                    if INT:
                        x, unit = rounded(x, amax)
                        count += tl.sum(tl.reshape(x.to(tl.int32), [LANES, VEC]), axis=1)
                    x = tl.broadcast_to(x[None, :], [ROWS, CHUNK // HALVES])
                else:
                    x = columns(x_ptr + t * K, c, h, ROWS, CHUNK, K, HALVES).to(tl.float32)
                    if norm_ptr is not None:
                        sq += per_lane(x * x, VEC)
                        x *= gains[h]
                if INT:
                    xs += planes(x, ASM)
                else:
                    xs += (x,)
                    if CODED:
                        total += per_lane(x, VEC)
            if INT:
                units += (tl.broadcast_to(unit[None, :], [ROWS, LANES]),)
                if min_ptr is not None or ABOUT > 0:
                    total = tl.broadcast_to(count.to(tl.float32)[None, :], [ROWS, LANES])
            sums += (total,)
            squares += (sq,)
        square = squares
        new = ()
        if HALF > 0:
            for i in tl.static_range(PIECES * T):
                before = tl.zeros([ROWS, CHUNK], tl.float16) if c % HALF == 0 else halves[i]
                new += (half_fma(w[c * PIECES + i // T], xs[i % T], before, ASM),)
            halves = new
            if c % HALF == HALF - 1 or c == CHUNKS - 1:
                new = ()
                for i in tl.static_range(PIECES * T):
                    new += (now(acc[i] + per_lane(halves[i].to(tl.float32), VEC), ASM),)
                acc = new
        elif INT:
            for p in tl.static_range(PIECES):
                s = scale[c * PIECES + p].to(tl.float32) if GROUPED else 1.0
                for t in tl.static_range(T):
                    x0, x1 = xs[2 * HALVES * t], xs[2 * HALVES * t + 1]
                    x2, x3 = xs[2 * HALVES * (t + 1) - 2], xs[2 * HALVES * (t + 1) - 1]  # int8: the same again
                    part = s * int_dot(w[c * PIECES + p], x0, x1, x2, x3, FORMAT, ASM).to(tl.float32)
                    if min_ptr is not None:
                        part += low[c * PIECES + p].to(tl.float32) * sums[t]
                    if ABOUT > 0:
                        part -= ABOUT * s * sums[t]
                    new += (now(acc[p * T + t] + part * units[t], ASM),)
            acc = new
        else:
            for p in tl.static_range(PIECES):
                codes = codes_as_floats(w[c * PIECES + p], FORMAT, ASM)
                s = scale[c * PIECES + p].to(tl.float32) if GROUPED else 1.0
                if CODED:
                    s *= UNIT
                    base = -BASE * s
                    if min_ptr is not None:
                        base += low[c * PIECES + p].to(tl.float32)
                for t in tl.static_range(T):
                    part = per_lane(codes[0] * xs[t * HALVES], VEC)
                    if HALVES == 2:
                        part += per_lane(codes[1] * xs[t * HALVES + 1], VEC)
                    part = s * part + base * sums[t] if CODED else s * part
                    new += (now(acc[p * T + t] + part, ASM),)
            acc = new

    for t in tl.static_range(T):
        y = ()
        for p in tl.static_range(PIECES):
            v = tl.sum(acc[p * T + t], axis=1, keep_dims=True)
            if HALF > 0:
                v /= inverse[t]
            if norm_ptr is not None:
                v *= tl.rsqrt((tl.sum(square[t]) if SHARE else tl.sum(square[t], axis=1, keep_dims=True)) / K + eps)
            v = tl.broadcast_to(v, [ROWS, LANES])
            if scale_ptr is not None and not GROUPED:
                v *= row_scale[p]
            if bias_ptr is not None:
                v += bias[p].to(tl.float32)
            y += (v,)
        for p in tl.static_range(OUTS):
            v = y[p]
            if SILU:
                v = v / (1.0 + tl.exp(-v)) * y[p + OUTS]
            at = t * outputs + rows[p] + lane0 * 0
            if residual_ptr is not None:
                v += rest[t * OUTS + p].to(tl.float32)
            mine = (lane0 == 0) & (first + p * ROWS < outputs)
            tl.store(out_ptr + at, v.to(out_ptr.dtype.element_ty), mask=mine)


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
    (t, k), n, codes = x.shape, weight.shape[0], weight.format
    if config is None:
        config = default_config(weight, t, norm_weight is not None, silu_mul, x.dtype)
    vec = LOAD_BYTES // weight.data.element_size()
    warps = max(1, config.rows * config.chunk // (32 * columns_per_load(weight)))
    outs = config.rows * config.pieces // (2 if silu_mul else 1)
    grid = (-(-(n // 2 if silu_mul else n) // outs),)
    narrow = config.share and x.dtype != torch.float32
    words = k % vec == 0 or codes == "int4"  # else rows start off the 16 bytes that `int_dot` relies on
    words = words and weight.data.data_ptr() % LOAD_BYTES == 0
    gemv_kernel[grid](
        x, weight.data, weight.scales, weight.mins, bias, norm_weight, residual, out, n, norm_eps,
        T=t, K=k, FORMAT=codes, GROUP=weight.group_size, VEC=vec,
        ROWS=config.rows, CHUNK=config.chunk, PIECES=config.pieces, PRELOAD=min(config.preload, -(-k // config.chunk)),
        SILU=silu_mul, SHARE=config.share,
        HALF=HALF_CHAIN if narrow and codes == "fp8" and weight.group_size == 0 else 0,
        INT=narrow and words and codes in ("int8", "int4"), ASM=not launch.INTERPRETED,
        **launch.options(x.device, num_warps=warps, early=True),
    )  # fmt: skip
