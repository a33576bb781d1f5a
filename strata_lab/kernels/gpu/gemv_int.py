"""One activation row times an int4 or int8 weight with a scale per group, in integers: four products an instruction.

`codes_of` rounds x (times the norm's weight) once per step to 16 bits in blocks of 32 columns and cuts it into two
planes of bytes; the norm's factor goes into the blocks' units. `gemv_int` then needs about one instruction per weight
and no exchange between threads: a warp has rows of its own, requests all of them before it waits, and meets them with
planes that it reads as they lie. While the small kernel runs, the weights are already on their way. Loses about 2^-16
of x.

Bytes moved: the weight once, two bytes per column of x for each program, from the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata_lab.kernels.gpu import launch
from strata_lab.kernels.gpu.gemv import columns, group_tile, weight_tile
from strata_lab.kernels.gpu.gemv_config import HELD_REGISTERS, LOAD_BYTES, WARP
from strata_lab.kernels.gpu.gemv_math import int_dot, now, planes, rounded
from strata_lab.quant.base import LinearWeight

BLOCK = 32  # columns that share a unit
PREPARED = 512  # columns of a program of `codes_kernel`


@dataclass(frozen=True)
class IntConfig:
    """How a product is cut up.

    Attributes:
        rows: weight rows of a tile, a power of two.
        chunk: columns of a tile, a power of two from 32 (int8: 16) times a power of two of lanes.
        pieces: tiles of rows a program owns; even for a gated product (half gate, half up).
        preload: chunks requested before waiting for x.
    """

    rows: int
    chunk: int
    pieces: int
    preload: int


@triton.jit
def codes_kernel(
    x_ptr, norm_ptr, low_ptr, high_ptr, unit_ptr, sum_ptr, eps,
    K: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i: columns i*SIZE.. of x [K] as bytes low + 256 high, units and sums per 32; beyond K zeros."""
    cols = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = cols < K
    if norm_ptr is not None:
        gain = tl.load(norm_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    launch.wait(PDL)
    launch.trigger(PDL)
    x = tl.load(x_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0
    if norm_ptr is not None:
        all_cols = tl.arange(0, WIDTH)
        whole = tl.load(x_ptr + all_cols, mask=all_cols < K, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(whole * whole, axis=0) / K + eps)
        x *= gain
    q, unit = rounded(x, tl.max(tl.reshape(tl.abs(x), [SIZE // 32, 32]), axis=1))
    total = tl.sum(tl.reshape(q.to(tl.int32), [SIZE // 32, 32]), axis=1)
    block = tl.program_id(0) * (SIZE // 32) + tl.arange(0, SIZE // 32)
    real = block < (K + 31) // 32
    tl.store(unit_ptr + block, unit * factor, mask=real)
    tl.store(sum_ptr + block, total.to(tl.float32) * unit * factor, mask=real)
    low, high = planes(q, False)
    padded = cols < (K + 31) // 32 * 32
    tl.store(low_ptr + cols, low, mask=padded)
    tl.store(high_ptr + cols, high, mask=padded)


@triton.jit
def gemv_int_kernel(
    low_ptr, high_ptr, unit_ptr, sum_ptr, w_ptr, scale_ptr, min_ptr, bias_ptr, residual_ptr, out_ptr, N,
    K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    PIECES: tl.constexpr, PRELOAD: tl.constexpr, SILU: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i: `PIECES` tiles of output rows (gated: half as many, gate and up)."""
    HALVES: tl.constexpr = 2 if FORMAT == "int4" else 1
    COLS: tl.constexpr = 16 * HALVES  # of a lane
    LANES: tl.constexpr = CHUNK // COLS
    SIZE: tl.constexpr = LANES * 16  # bytes of a row in a chunk
    CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    STRIDE: tl.constexpr = (K + 31) // 32 * 16 if FORMAT == "int4" else K
    PADDED: tl.constexpr = (K + 31) // 32 * 32
    OUTS: tl.constexpr = PIECES // 2 if SILU else PIECES
    ABOUT: tl.constexpr = 8.0 if FORMAT == "int4" and min_ptr is None else 0.0  # the code that means 0
    outputs = N // 2 if SILU else N

    first = tl.program_id(0) * (OUTS * ROWS) + tl.arange(0, ROWS)[:, None]
    rows = ()
    for p in tl.static_range(PIECES):
        row = tl.minimum(first + (p % OUTS) * ROWS, outputs - 1)  # what is beyond the last row is not stored
        rows += ((row + (p // OUTS) * outputs).to(tl.int64),)
    w, scale, least = (), (), ()
    for c in tl.static_range(PRELOAD):
        for p in tl.static_range(PIECES):
            w += (weight_tile(w_ptr, rows[p], c, STRIDE, SIZE),)
            scale += (group_tile(scale_ptr, rows[p], c, CHUNK, LANES, K, GROUP),)
            if min_ptr is not None:
                least += (group_tile(min_ptr, rows[p], c, CHUNK, LANES, K, GROUP),)
    lane0 = tl.broadcast_to(tl.arange(0, LANES)[None, :], [ROWS, LANES])
    bias, rest = (), ()
    if bias_ptr is not None:
        for p in tl.static_range(PIECES):
            bias += (tl.load(bias_ptr + rows[p] + lane0 * 0),)
    launch.wait(PDL)
    launch.trigger(PDL)
    if residual_ptr is not None:
        for p in tl.static_range(OUTS):
            rest += (tl.load(residual_ptr + rows[p] + lane0 * 0),)

    acc = ()
    for _ in tl.static_range(PIECES):
        acc += (tl.zeros([ROWS, LANES], tl.float32),)
    for c in tl.static_range(CHUNKS):
        if c + PRELOAD < CHUNKS:
            for p in tl.static_range(PIECES):
                w += (weight_tile(w_ptr, rows[p], c + PRELOAD, STRIDE, SIZE),)
                scale += (group_tile(scale_ptr, rows[p], c + PRELOAD, CHUNK, LANES, K, GROUP),)
                if min_ptr is not None:
                    least += (group_tile(min_ptr, rows[p], c + PRELOAD, CHUNK, LANES, K, GROUP),)
        low = columns(low_ptr, c, 0, ROWS, CHUNK, PADDED, HALVES)
        high = columns(high_ptr, c, 0, ROWS, CHUNK, PADDED, HALVES)
        low1, high1 = low, high
        if HALVES == 2:
            low1 = columns(low_ptr, c, 1, ROWS, CHUNK, PADDED, HALVES)
            high1 = columns(high_ptr, c, 1, ROWS, CHUNK, PADDED, HALVES)
        blocks = ((c * LANES + tl.arange(0, LANES)) * COLS // 32)[None, :] + tl.zeros([ROWS, 1], tl.int32)
        unit = tl.load(unit_ptr + blocks, mask=blocks < PADDED // 32, other=0.0)
        if min_ptr is not None or ABOUT > 0:
            total = tl.load(sum_ptr + blocks, mask=blocks < PADDED // 32, other=0.0)
        new = ()
        for p in tl.static_range(PIECES):
            part = int_dot(w[c * PIECES + p], low, high, low1, high1, FORMAT, ASM).to(tl.float32) * unit
            if ABOUT > 0:
                part -= ABOUT * total
            part *= scale[c * PIECES + p].to(tl.float32)
            if min_ptr is not None:
                part += least[c * PIECES + p].to(tl.float32) * total
            new += (now(acc[p] + part, ASM),)
        acc = new

    y = ()
    for p in tl.static_range(PIECES):
        v = tl.broadcast_to(tl.sum(acc[p], axis=1, keep_dims=True), [ROWS, LANES])
        if bias_ptr is not None:
            v += bias[p].to(tl.float32)
        y += (v,)
    for p in tl.static_range(OUTS):
        v = y[p]
        if SILU:
            v = v / (1.0 + tl.exp(-v)) * y[p + OUTS]
        if residual_ptr is not None:
            v += rest[p].to(tl.float32)
        mine = (lane0 == 0) & (first + p * ROWS < outputs)
        tl.store(out_ptr + rows[p] + lane0 * 0, v.to(out_ptr.dtype.element_ty), mask=mine)


def default_config(weight: LinearWeight, silu_mul: bool) -> IntConfig:
    """Tunable: every valid configuration is right. Best, or nearly, of the reference models' products on an H200."""
    columns = _columns(weight)
    if silu_mul and weight.format == "int4":  # so many rows that a quarter of a warp to each leaves none idle
        return IntConfig(8, 8 * columns, 4, 4)
    lanes = WARP if weight.shape[1] > WARP * columns else 8
    pieces = 4 if weight.format == "int4" and weight.shape[1] <= 3 * WARP * columns else 2
    tile = 6 if weight.mins is not None else 5  # registers of a thread, with scales
    return IntConfig(4 * WARP // lanes, lanes * columns, pieces, HELD_REGISTERS // (tile * pieces))


def _columns(weight: LinearWeight) -> int:
    return LOAD_BYTES * (2 if weight.format == "int4" else 1)


def supports(x: Tensor, weight: LinearWeight) -> bool:
    """Whether `gemv_int` can do it: one row in 16 bits, groups that hold whole lanes, rows aligned to a load."""
    return (
        x.shape[0] == 1
        and x.dtype != torch.float32
        and weight.format in ("int4", "int8")
        and weight.group_size > 0
        and weight.group_size % _columns(weight) == 0
        and (weight.format == "int4" or weight.shape[1] % LOAD_BYTES == 0)
        and weight.data.data_ptr() % LOAD_BYTES == 0
    )


Codes = tuple[Tensor, Tensor, Tensor, Tensor]


def codes_of(x: Tensor, norm_weight: Tensor | None, eps: float) -> Codes:
    """x [1, K], times the norm's weight and factor if given: low bytes, high bytes, unit and sum per 32 columns."""
    k = x.shape[1]
    blocks = -(-k // BLOCK)
    low = torch.empty(blocks * BLOCK, dtype=torch.uint8, device=x.device)
    high = torch.empty(blocks * BLOCK, dtype=torch.int8, device=x.device)
    unit = torch.empty(blocks, dtype=torch.float32, device=x.device)
    total = torch.empty_like(unit)
    codes_kernel[(-(-k // PREPARED),)](
        x, norm_weight, low, high, unit, total, eps, K=k, WIDTH=triton.next_power_of_2(k), SIZE=PREPARED,
        **launch.options(x.device, early=True),
    )  # fmt: skip
    return low, high, unit, total


def gemv_int(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    residual: Tensor | None,
    silu_mul: bool,
    out: Tensor,
    config: IntConfig | None = None,
    codes: Codes | None = None,
) -> None:
    """`linear_triton` for one contiguous row x [1, K] into `out`, whose dtype the result is rounded to.

    `codes` are those of x, where they are known already.
    """
    assert supports(x, weight), (x.dtype, x.shape, weight.format, weight.shape, weight.group_size)
    n, k = weight.shape
    c = config or default_config(weight, silu_mul)
    outs = c.rows * c.pieces // (2 if silu_mul else 1)
    codes = codes or codes_of(x, norm_weight, norm_eps)
    gemv_int_kernel[(-(-(n // 2 if silu_mul else n) // outs),)](
        *codes, weight.data, weight.scales, weight.mins, bias, residual, out, n,
        K=k, FORMAT=weight.format, GROUP=weight.group_size, ROWS=c.rows, CHUNK=c.chunk, PIECES=c.pieces,
        PRELOAD=min(c.preload, -(-k // c.chunk)), SILU=silu_mul, ASM=not launch.INTERPRETED,
        **launch.options(x.device, num_warps=max(1, c.rows * c.chunk // (32 * _columns(weight))), early=True),
    )  # fmt: skip
