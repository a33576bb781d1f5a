"""Products of many activation rows (prefill): the weight is expanded once to the dtype of x, then cuBLAS.

Bytes moved: the weight once and its expanded form twice, which hundreds of rows outweigh.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata_lab.kernels.gpu import launch
from strata_lab.kernels.gpu.gemm import normalized, weights
from strata_lab.quant.base import LinearWeight


@triton.jit
def expand_kernel(w_ptr, scale_ptr, min_ptr, out_ptr, N, K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Program (i, j): a tile of the weight in the dtype of `out`, [N, K]."""
    HALVES: tl.constexpr = 2 if FORMAT == "int4" else 1
    first = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    rows = tl.minimum(first, N - 1).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K
    w = weights(w_ptr, scale_ptr, min_ptr, rows, k, K, BLOCK_K, FORMAT, GROUP, tl.float32, ASM)
    launch.wait(PDL)  # the buffer may still be read by the kernel before
    launch.trigger(PDL)
    for h in tl.static_range(HALVES):
        y = w[h]
        if GROUP == 0 and scale_ptr is not None:
            y *= tl.load(scale_ptr + rows)
        j = tl.arange(0, BLOCK_K // HALVES)[None, :]
        if HALVES == 2:
            j = j // 16 * 32 + j % 16 + h * 16
        tl.store(out_ptr + rows * K + k + j, y.to(out_ptr.dtype.element_ty), mask=(first < N) & (k + j < K))


@triton.jit
def epilogue_kernel(y_ptr, bias_ptr, residual_ptr, out_ptr, N, SILU: tl.constexpr, BLOCK: tl.constexpr,
                    PDL: tl.constexpr):  # fmt: skip
    """Program (t, j): columns j*BLOCK.. of row t of a product y [T, N]."""
    launch.wait(PDL)
    launch.trigger(PDL)
    outputs = N // 2 if SILU else N
    t = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < outputs
    y = tl.load(y_ptr + t * N + at, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        up = tl.load(y_ptr + t * N + outputs + at, mask=mask, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            up += tl.load(bias_ptr + outputs + at, mask=mask, other=0.0).to(tl.float32)
        y = y / (1.0 + tl.exp(-y)) * up
    if residual_ptr is not None:
        y += tl.load(residual_ptr + t * outputs + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * outputs + at, y.to(out_ptr.dtype.element_ty), mask=mask)


def dense(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    residual: Tensor | None,
    silu_mul: bool,
    out: Tensor,
) -> None:
    """`linear_triton` for contiguous rows x [T, K] into `out`, whose dtype the result is rounded to."""
    if norm_weight is not None:
        x = normalized(x, norm_weight, norm_eps)
    w = expanded(weight, x.dtype)
    if bias is None and residual is None and not silu_mul and out.dtype == x.dtype:
        torch.mm(x, w.T, out=out)
        return
    y = torch.mm(x, w.T, out_dtype=out.dtype) if x.is_cuda and x.dtype != out.dtype else torch.mm(x, w.T)
    block = 1024
    epilogue_kernel[(x.shape[0], -(-out.shape[1] // block))](
        y, bias, residual, out, weight.shape[0], SILU=silu_mul, BLOCK=block, **launch.options(x.device)
    )


def expanded(weight: LinearWeight, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in a float dtype."""
    if weight.data.dtype == dtype:
        return weight.data
    n, k = weight.shape
    out = torch.empty(n, k, dtype=dtype, device=weight.data.device)
    block_n, block_k = 16, 256
    expand_kernel[(-(-n // block_n), -(-k // block_k))](
        weight.data, weight.scales, weight.mins, out, n, K=k, FORMAT=weight.format, GROUP=weight.group_size,
        BLOCK_N=block_n, BLOCK_K=block_k, ASM=not launch.INTERPRETED, **launch.options(out.device),
    )  # fmt: skip
    return out
