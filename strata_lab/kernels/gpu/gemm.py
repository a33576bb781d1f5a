"""Products of up to `MAX_ROWS` activation rows with a quantized weight, on tensor cores.

The weight is the left operand, acc[n, t] = w[n, :] @ x[t, :]^T, so its codes are
converted in registers and go to the tensor cores from there. Row scales, norm (a factor per column of acc), bias, gate
and residual follow in the epilogue. Where N has too few tiles to fill the card, K is split: partial sums go to a
workspace and the program that arrives last adds them up in their order, so the result is the same in every run.

Bytes moved: the weight once per `block_t` rows of x (from the second time on from L2), x once per tile of the weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata_lab.kernels.gpu import launch
from strata_lab.kernels.gpu.elementwise import rms_norm_triton
from strata_lab.kernels.gpu.gemv_math import codes_as_floats, e4m3_as_bf16, prefetch
from strata_lab.quant.base import LinearWeight

MAX_ROWS = 128  # of x; from there on arithmetic is what takes time, and cuBLAS is better at it
FUSED_NORM_ROWS = 16  # beyond, every program would spend more on normalizing x than one small kernel before it
PREFETCH_LINES = 8  # of 128 bytes per weight row, requested before the kernel before has finished
MAX_COUNTERS = 1 << 14  # output tiles of a split product


@dataclass(frozen=True)
class DotConfig:
    """How a product is cut up; all powers of two but `split`.

    Attributes:
        block_n: weight rows of a tile (gated: gate rows, and as many up rows).
        block_t: rows of x of a tile.
        block_k: columns per step.
        split: programs that share the columns of a tile.
        num_warps: of a program.
        num_stages: tiles in flight.
    """

    block_n: int
    block_t: int
    block_k: int
    split: int
    num_warps: int
    num_stages: int


@triton.jit
def _scaled(codes, scale, low, UNIT: tl.constexpr, BASE: tl.constexpr, DOT: tl.constexpr):
    """Codes [rows, columns], read as BASE + code / UNIT, with scales and minima of groups [rows, groups], if any."""
    if scale is None:
        return ((codes - BASE) * UNIT).to(DOT)
    else:
        grouped = tl.reshape(codes, [codes.shape[0], scale.shape[1], codes.shape[1] // scale.shape[1]])
        factor = scale.to(tl.float32) * UNIT
        term = -BASE * factor
        if low is not None:
            term += low.to(tl.float32)
        return tl.reshape(grouped * factor[:, :, None] + term[:, :, None], codes.shape).to(DOT)


@triton.jit
def weights(w_ptr, scale_ptr, min_ptr, rows, k, K: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr,
             GROUP: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Columns k.. of the weight rows [block_n, 1]: (tile,), int4 (low nibbles, high nibbles)."""
    HALVES: tl.constexpr = 2 if FORMAT == "int4" else 1
    STRIDE: tl.constexpr = (K + 31) // 32 * 16 if FORMAT == "int4" else K
    at = k // HALVES + tl.arange(0, BLOCK_K // HALVES)[None, :]
    if K % BLOCK_K == 0:
        data = tl.load(w_ptr + rows * STRIDE + at)
    else:
        data = tl.load(w_ptr + rows * STRIDE + at, mask=at < STRIDE, other=0.0)
    scale, low = None, None
    if GROUP > 0:
        COUNT: tl.constexpr = (K + GROUP - 1) // GROUP
        GROUPS: tl.constexpr = BLOCK_K // GROUP if BLOCK_K > GROUP else 1  # of a step
        group = k // GROUP + tl.arange(0, GROUPS)[None, :]
        scale = tl.load(scale_ptr + rows * COUNT + group, mask=group < COUNT, other=0.0)
        if min_ptr is not None:
            low = tl.load(min_ptr + rows * COUNT + group, mask=group < COUNT, other=0.0)
    if FORMAT == "int4":
        codes = codes_as_floats(data, FORMAT, ASM)
        BASE: tl.constexpr = 1.5 if min_ptr is None else 1.0  # without minima codes are about 8
        return _scaled(codes[0], scale, low, 16.0, BASE, DOT), _scaled(codes[1], scale, low, 16.0, BASE, DOT)
    elif FORMAT == "int8":
        return (_scaled(codes_as_floats(data, FORMAT, ASM)[0], scale, low, 256.0, 1.5, DOT),)
    elif GROUP > 0:
        return (_scaled(data.to(tl.float32), scale, None, 1.0, 0.0, DOT),)
    elif FORMAT == "fp8" and ASM and tl.bfloat16 == DOT:
        return (e4m3_as_bf16(data),)
    else:
        return (data.to(DOT),)


@triton.jit
def _activations(ptr, rows, T, k, HALF: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, HALVES: tl.constexpr):
    """Columns k.. of x rows [block_t, 1] as `weights` has them; beyond T and K zeros."""
    j = tl.arange(0, BLOCK_K // HALVES)[None, :]
    if HALVES == 2:
        j = j // 16 * 32 + j % 16 + HALF * 16
    if K % BLOCK_K == 0:
        return tl.load(ptr + rows * K + k + j, mask=rows < T, other=0.0)
    else:
        return tl.load(ptr + rows * K + k + j, mask=(rows < T) & (k + j < K), other=0.0)


@triton.jit
def _product(acc, w, x, DOT: tl.constexpr):
    return tl.dot(w, tl.trans(x), acc, input_precision="tf32x3")  # says nothing about 16-bit operands


@triton.jit
def _finished(acc, rows, cols, square, scale_ptr, bias_ptr, K: tl.constexpr, eps, GROUP: tl.constexpr):
    """acc [block_n, block_t] with the norm, the scales of its rows and the bias."""
    if square is not None:
        acc *= tl.rsqrt(square / K + eps)[None, :]
    if scale_ptr is not None and GROUP == 0:
        acc *= tl.load(scale_ptr + rows)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + rows).to(tl.float32)
    return acc


@triton.jit
def dot_kernel(
    x_ptr, w_ptr, scale_ptr, min_ptr, bias_ptr, norm_ptr, residual_ptr, out_ptr, partial_ptr, counter_ptr, T, N, eps,
    K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, SILU: tl.constexpr, DOT: tl.constexpr,
    PREFETCH: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, j, s): output rows i*BLOCK_N.. for x rows j*BLOCK_T.., share s of the columns."""
    HALVES: tl.constexpr = 2 if FORMAT == "int4" else 1
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SHARE: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    outputs = N // 2 if SILU else N
    first = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    rows = tl.minimum(first, outputs - 1).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    share = tl.program_id(2)

    if PDL:  # its own first steps from memory to L2 while the kernel before this one still runs
        LINE: tl.constexpr = 128 * 8 // w_ptr.dtype.element_ty.primitive_bitwidth  # elements of a line of the cache
        WIDTH: tl.constexpr = (K + 31) // 32 * 16 if FORMAT == "int4" else K
        ahead = share * (SHARE * BLOCK_K // HALVES) + tl.arange(0, PREFETCH)[None, :] * LINE
        ahead = tl.minimum(ahead, WIDTH - 1)
        prefetch(w_ptr + rows * WIDTH + ahead)
        if SILU:
            prefetch(w_ptr + (rows + outputs) * WIDTH + ahead)
    launch.wait(PDL)
    launch.trigger(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    square = tl.zeros([BLOCK_T], tl.float32)
    for step in range(share * SHARE, min(share * SHARE + SHARE, STEPS)):
        k = step * BLOCK_K
        w = weights(w_ptr, scale_ptr, min_ptr, rows, k, K, BLOCK_K, FORMAT, GROUP, DOT, ASM)
        if SILU:
            u = weights(w_ptr, scale_ptr, min_ptr, rows + outputs, k, K, BLOCK_K, FORMAT, GROUP, DOT, ASM)
        for h in tl.static_range(HALVES):
            x = _activations(x_ptr, cols[:, None], T, k, h, K, BLOCK_K, HALVES)
            if norm_ptr is not None:
                x = x.to(tl.float32)
                square += tl.sum(x * x, axis=1)
                x *= _activations(norm_ptr, tl.zeros([1, 1], tl.int32), 1, k, h, K, BLOCK_K, HALVES).to(tl.float32)
            x = x.to(DOT)
            acc = _product(acc, w[h], x, DOT)
            if SILU:
                up = _product(up, u[h], x, DOT)

    last = True
    if SPLIT > 1:
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        SIZE: tl.constexpr = BLOCK_T * (BLOCK_N * (2 if SILU else 1) + 1)
        base = partial_ptr + tile.to(tl.int64) * (SPLIT * SIZE)
        inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        mine = base + share * SIZE
        tl.store(mine + tl.arange(0, BLOCK_T), square)
        tl.store(mine + BLOCK_T + inside, acc)
        if SILU:
            tl.store(mine + BLOCK_T + BLOCK_N * BLOCK_T + inside, up)
        tl.debug_barrier()  # the atomic of one thread must come after the stores of all
        last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
        if last:
            acc, up = tl.zeros_like(acc), tl.zeros_like(up)
            square = tl.zeros_like(square)
            for s in range(SPLIT):
                other = base + s * SIZE
                square += tl.load(other + tl.arange(0, BLOCK_T), cache_modifier=".cg")
                acc += tl.load(other + BLOCK_T + inside, cache_modifier=".cg")
                if SILU:
                    up += tl.load(other + BLOCK_T + BLOCK_N * BLOCK_T + inside, cache_modifier=".cg")
            tl.store(counter_ptr + tile, 0)  # as the next product expects it
    if last:
        norm = square if norm_ptr is not None else None
        y = _finished(acc, rows, cols, norm, scale_ptr, bias_ptr, K, eps, GROUP)
        if SILU:
            y = y / (1.0 + tl.exp(-y)) * _finished(up, rows + outputs, cols, norm, scale_ptr, bias_ptr, K, eps, GROUP)
        at = cols[None, :].to(tl.int64) * outputs + rows
        mask = (cols[None, :] < T) & (first < outputs)
        if residual_ptr is not None:
            y += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)


def default_config(weight: LinearWeight, t: int, dtype: torch.dtype, silu_mul: bool, sms: int) -> DotConfig:
    """Tiles for `t` rows of x. Tunable: every valid configuration is right."""
    n, k = weight.shape
    block_t = min(max(16, triton.next_power_of_2(t)), 64)  # 128 spills on sm_89 and sm_120
    block_k = 32 if dtype == torch.float32 else 64 if block_t > 32 or weight.data.element_size() > 1 else 128
    tiles = -(-(n // 2 if silu_mul else n) // 64)
    steps = -(-k // block_k)
    programs = sms * (2 if block_t <= 32 else 1)  # with more rows partial sums weigh as much as the weight
    split = max(1, min(programs // tiles, steps // 4, 8)) if tiles <= MAX_COUNTERS else 1
    warps = 8 if dtype == torch.float32 and weight.format == "int4" else 4  # four spill on sm_89
    return DotConfig(64, block_t, block_k, split, warps, 3)


def dot(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    residual: Tensor | None,
    silu_mul: bool,
    out: Tensor,
    config: DotConfig | None = None,
) -> None:
    """`linear_triton` for contiguous rows x [T, K] into `out`, whose dtype the result is rounded to."""
    t, k = x.shape
    n = weight.shape[0]
    sms = launch.num_sms(x.device) if x.is_cuda else launch.REFERENCE_SMS
    c = config or default_config(weight, t, x.dtype, silu_mul, sms)
    if norm_weight is not None and t > FUSED_NORM_ROWS:
        x, norm_weight = normalized(x, norm_weight, norm_eps), None
    tiles = (-(-(n // 2 if silu_mul else n) // c.block_n), -(-t // c.block_t))
    partial = counters = None
    if c.split > 1:
        assert tiles[0] * tiles[1] <= MAX_COUNTERS, (tiles, c)
        size = c.split * c.block_t * (c.block_n * (2 if silu_mul else 1) + 1)
        partial = torch.empty(tiles[0] * tiles[1] * size, dtype=torch.float32, device=x.device)
        counters = launch.counters(x.device, tiles[0] * tiles[1])
    dot_kernel[(*tiles, c.split)](
        x, weight.data, weight.scales, weight.mins, bias, norm_weight, residual, out, partial, counters, t, n, norm_eps,
        K=k, FORMAT=weight.format, GROUP=weight.group_size, BLOCK_N=c.block_n, BLOCK_T=c.block_t, BLOCK_K=c.block_k,
        SPLIT=c.split, SILU=silu_mul, DOT=launch.dot_dtype(x.dtype), PREFETCH=PREFETCH_LINES,
        ASM=not launch.INTERPRETED, **launch.options(x.device, num_warps=c.num_warps, num_stages=c.num_stages),
    )  # fmt: skip


def normalized(x: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """rms_norm of the rows of x, in the dtype of x (in the interpreter, which rounds wrongly, float32)."""
    return rms_norm_triton(x, norm_weight, eps, dtype=torch.float32 if launch.INTERPRETED else x.dtype)
