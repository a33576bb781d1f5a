"""Small operators, one kernel each: norm, rotation, gating, sums and lookups (what writes the cache: `kv_write.py`).

A fused decode step needs two of them (`embedding`, `take_rows`), the plain composition all. Each reads its inputs once
and writes its result once, 16 bytes a thread; at decode sizes that is a few KB, so what a launch costs is its latency:
rows are spread over programs, nothing loops. Contracts: `kernels/<op>.py`.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata_lab.kernels.gpu import kv_write, launch, meta
from strata_lab.kernels.gpu.kv_write import HEAD_BLOCK, kv_append_triton, qkv_rope_append_triton, rotated
from strata_lab.quant.base import LinearWeight

__all__ = [
    "add_triton", "embedding_triton", "kv_append_triton", "qkv_rope_append_triton", "rms_norm_triton", "rope_triton",
    "silu_mul_triton", "take_rows_triton",
]  # fmt: skip

FLAT_BLOCK = 1024  # elements of a program where rows do not matter
ROW_BLOCK = 512  # columns of a program that copies or dequantizes part of a row


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, eps, row_stride, col_stride, D: tl.constexpr, BLOCK: tl.constexpr,
                     PDL: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < D
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    launch.wait(PDL)
    launch.trigger(PDL)
    x = tl.load(x_ptr + row * row_stride + cols * col_stride, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / D + eps) * weight
    tl.store(out_ptr + row * D + cols, y.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, *, dtype: torch.dtype | None = None) -> Tensor:
    """`rms_norm_ref` for x [..., D]; one program a row. `dtype` of the result: that of x by default."""
    width = x.shape[-1]
    rows = x.reshape(-1, width)  # a view unless the strides forbid one
    out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(rows.shape[0],)](
        rows, weight, out, eps, rows.stride(0), rows.stride(1), width, block,
        **launch.options(x.device, num_warps=min(max(block // 512, 1), 8)),
    )  # fmt: skip
    return out


@triton.jit
def _rope_kernel(x_ptr, cos_ptr, sin_ptr, out_ptr, token_stride, head_stride, col_stride, H: tl.constexpr,
                 HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    inside = (heads < H) & (cols < HALF)
    launch.wait(PDL)
    launch.trigger(PDL)
    cos = tl.load(cos_ptr + token * HALF + cols, mask=cols < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * HALF + cols, mask=cols < HALF, other=0.0).to(tl.float32)
    x = x_ptr + token * token_stride + heads * head_stride + cols * col_stride
    first = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + HALF * col_stride, mask=inside, other=0.0).to(tl.float32)
    first, second = rotated(first, second, cos, sin)
    out = out_ptr + (token * H + heads) * (2 * HALF) + cols
    tl.store(out, first.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out + HALF, second.to(out_ptr.dtype.element_ty), mask=inside)


def rope_triton(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rope_ref` for x [T, H, D] of any strides, contiguous cos and sin [T, D/2]."""
    tokens, heads, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (tokens, triton.cdiv(heads, HEAD_BLOCK))
    _rope_kernel[grid](
        x, cos, sin, out, *x.stride(), heads, width // 2, HEAD_BLOCK, triton.next_power_of_2(width // 2),
        **launch.options(x.device, num_warps=1),
    )  # fmt: skip
    return out


@triton.jit
def _silu_mul_kernel(gate_ptr, up_ptr, out_ptr, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    launch.wait(PDL)
    launch.trigger(PDL)
    gate = tl.load(gate_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def _add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    launch.wait(PDL)
    launch.trigger(PDL)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x + y).to(out_ptr.dtype.element_ty), mask=at < n)


def _elementwise(kernel: Any, x: Tensor, y: Tensor) -> Tensor:
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    kernel[(triton.cdiv(x.numel(), FLAT_BLOCK),)](x, y, out, x.numel(), FLAT_BLOCK, **launch.options(x.device))
    return out


def silu_mul_triton(gate: Tensor, up: Tensor) -> Tensor:
    """`silu_mul_ref`."""
    return _elementwise(_silu_mul_kernel, gate, up)


def add_triton(x: Tensor, y: Tensor) -> Tensor:
    """`add_ref` for two tensors of one shape; the sum is rounded once, from float32."""
    return _elementwise(_add_kernel, x, y)


@triton.jit
def _take_rows_kernel(table_ptr, ids_ptr, out_ptr, C: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    launch.wait(PDL)
    launch.trigger(PDL)
    row = tl.load(ids_ptr + token).to(tl.int64)
    tl.store(out_ptr + token * C + cols, tl.load(table_ptr + row * C + cols, mask=cols < C), mask=cols < C)


def take_rows_triton(table: Tensor, ids: Tensor) -> Tensor:
    """`take_rows_ref` for a contiguous table [R, C]; ids outside it are not checked."""
    width = table.shape[1]
    out = torch.empty((ids.shape[0], width), dtype=table.dtype, device=table.device)
    block = min(triton.next_power_of_2(width), ROW_BLOCK)
    grid = (ids.shape[0], triton.cdiv(width, block))
    _take_rows_kernel[grid](table, ids, out, width, block, **launch.options(table.device, num_warps=1))
    return out


@triton.jit
def _embedding_kernel(
    ids_ptr, data_ptr, scales_ptr, mins_ptr, out_ptr, K: tl.constexpr, ROW: tl.constexpr, GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROW: stored elements of a row. GROUPS: scales of a row. PACKED: two 4-bit codes in a byte."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < K
    launch.wait(PDL)
    launch.trigger(PDL)
    row = tl.load(ids_ptr + token).to(tl.int64)
    if PACKED:  # byte j of 32 columns: column j in the low nibble, column j + 16 in the high one
        at = cols // 32 * 16 + cols % 16
        byte = tl.load(data_ptr + row * ROW + at, mask=inside, other=0).to(tl.int32)
        w = (byte >> (cols % 32 // 16 * 4) & 15).to(tl.float32)
        if mins_ptr is None:
            w -= 8.0
    else:
        w = tl.load(data_ptr + row * ROW + cols, mask=inside, other=0.0).to(tl.float32)
    if GROUPS > 0:
        group = row * GROUPS + (cols // GROUP_SIZE if GROUP_SIZE > 0 else cols * 0)
        w *= tl.load(scales_ptr + group, mask=inside, other=0.0).to(tl.float32)
        if mins_ptr is not None:
            w += tl.load(mins_ptr + group, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * K + cols, w, mask=inside)


def embedding_triton(ids: Tensor, weight: LinearWeight) -> Tensor:
    """`embedding_ref` for layout "rows": [T] ids -> [T, K] float32; ids outside the table are not checked."""
    assert weight.layout == "rows", weight.layout
    width, data, scales = weight.shape[1], weight.data, weight.scales
    out = torch.empty((ids.shape[0], width), dtype=torch.float32, device=data.device)
    grid = (ids.shape[0], triton.cdiv(width, ROW_BLOCK))
    _embedding_kernel[grid](
        ids, data, scales, weight.mins, out, width, data.shape[1], 0 if scales is None else scales.shape[1],
        weight.group_size, weight.format == "int4", ROW_BLOCK, **launch.options(data.device),
    )  # fmt: skip
    return out


def aot_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every operator at the widths of the reference geometries."""
    yield from kv_write.aot_cases()
    ids, turn, half = meta.tensor(1, dtype=torch.int64), meta.tensor(1, 64, dtype=torch.float32), torch.float16
    for dtype in (torch.bfloat16, torch.float32):
        name, x = str(dtype).removeprefix("torch."), meta.tensor(1, 2560, dtype=dtype)
        yield f"rms_norm-{name}", partial(rms_norm_triton, x, meta.tensor(2560), 1e-6)
        yield f"silu_mul-{name}", partial(silu_mul_triton, x, x)
        yield f"add-{name}", partial(add_triton, x, x)
        yield f"rope-{name}", partial(rope_triton, meta.tensor(1, 32, 128, dtype=dtype), turn, turn)
    yield "take_rows", partial(take_rows_triton, meta.tensor(32768, 64, dtype=torch.float32), ids)
    codes, scales = meta.tensor(151936, 2560, dtype=torch.float8_e4m3fn), meta.tensor(151936, 1, dtype=torch.float32)
    nibbles, fine = meta.tensor(49152, 288, dtype=torch.uint8), meta.tensor(49152, 18, dtype=half)
    for weight in (
        LinearWeight("fp8", (151936, 2560), codes, scales),
        LinearWeight("bf16", (151936, 2560), meta.tensor(151936, 2560)),
        LinearWeight("int8", (49152, 576), meta.tensor(49152, 576, dtype=torch.int8), fine, group_size=32),
        LinearWeight("int4", (49152, 576), nibbles, fine, fine, group_size=32),
    ):
        yield f"embedding-{weight.format}", partial(embedding_triton, ids, weight)
