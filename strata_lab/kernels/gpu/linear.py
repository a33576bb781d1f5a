"""The product with a weight on a GPU: contract of `kernels/linear.py`, five ways to do it by the number of rows of x.

    1                         weight straight from memory into CUDA cores: all that matters is bytes (gemv.py;
                              integer codes with groups: gemv_int.py)
    2 to 16                   the same into tensor cores (gemv_mma.py); float32 x and odd widths: gemv.py, gemm.py; 2
                              of short bf16 rows that are gated: gemv.py
    rows <= gemm.MAX_ROWS     tensor cores through `tl.dot`, weight converted in registers (gemm.py)
    more                      weight expanded once, then cuBLAS (gemm_dense.py)

All take bfloat16, float16 or float32 activations and accumulate in float32. With float32 activations nothing is rounded
to less. A 16-bit x times the norm's weight is rounded to the dtype of x by all but gemv.py, and weights with scales per
group by `dot` and `dense`. An int4 weight without minima has codes about 8: w = scale * (code - 8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from strata_lab.kernels.gpu import gemm, gemm_dense, gemv, gemv_config, gemv_int, gemv_mma, meta
from strata_lab.kernels.linear import linear_ref
from strata_lab.quant.base import LinearWeight

Config = gemv.GemvConfig | gemv_int.IntConfig | gemv_mma.MmaConfig | gemm.DotConfig


def linear_triton(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    residual: Tensor | None = None,
    silu_mul: bool = False,
    config: Config | None = None,
) -> Tensor:
    """See `kernels.linear.linear`: x [T, K] -> [T, N], gated [T, N/2], in the dtype of x.

    `config` picks the kernel and how it cuts the product up (default: by the shape); results differ in rounding only.
    """
    outputs = weight.shape[0] // 2 if silu_mul else weight.shape[0]
    if weight.format == "fp32":
        parts = {"norm_weight": norm_weight, "norm_eps": norm_eps, "residual": residual, "silu_mul": silu_mul}
        return linear_ref(x.float(), weight, bias, **parts).to(x.dtype)
    out = torch.empty(x.shape[0], outputs, dtype=x.dtype, device=x.device)
    _into(out, x, weight, bias, norm_weight, norm_eps, residual, silu_mul, config)
    return out


def lm_head_triton(
    x: Tensor, weight: LinearWeight, norm_weight: Tensor, norm_eps: float, *, config: Config | None = None
) -> Tensor:
    """Logits float32 [S, V] of the normalized rows x [S, K], not rounded to the dtype of x."""
    if weight.format == "fp32":
        return linear_ref(x.float(), weight, norm_weight=norm_weight, norm_eps=norm_eps)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    _into(out, x, weight, None, norm_weight, norm_eps, None, False, config)
    return out


def _into(
    out: Tensor,
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    residual: Tensor | None,
    silu_mul: bool,
    config: Config | None,
) -> None:
    assert weight.layout == "rows", weight.layout
    if x.shape[0] == 0:
        return
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    arguments = (x, weight, bias, norm_weight, norm_eps, residual, silu_mul, out)
    if isinstance(config, gemv.GemvConfig):
        gemv.gemv(*arguments, config)
    elif isinstance(config, gemv_int.IntConfig):
        gemv_int.gemv_int(*arguments, config)
    elif isinstance(config, gemm.DotConfig):
        gemm.dot(*arguments, config)
    elif isinstance(config, gemv_mma.MmaConfig):
        gemv_mma.gemv_mma(*arguments, config)
    elif gemv_int.supports(x, weight):
        gemv_int.gemv_int(*arguments)
    elif gemv_config.is_narrow(weight, x.shape[0], silu_mul, x.dtype):
        gemv.gemv(*arguments)
    elif x.shape[0] > 1 and gemv_mma.supports(x, weight, norm_weight):
        gemv_mma.gemv_mma(*arguments)
    elif x.shape[0] <= gemv.MAX_ROWS:
        gemv.gemv(*arguments)
    elif x.shape[0] <= gemm.MAX_ROWS:
        gemm.dot(*arguments)
    else:
        gemm_dense.dense(*arguments)


_SHAPES = {  # name: (N, K, norm, gated, rows of x) of the reference geometries
    "qkv-moe": (5120, 2560, True, False, (1, 2, 4, 16, 128)),
    "qkv-dense": (6144, 2560, True, False, (1,)),
    "o": (2560, 4096, False, False, (1, 4, 16)),
    "gate-up": (2 * 9728, 2560, True, True, (1, 4, 16, 128)),
    "down": (2560, 9728, False, False, (1, 4, 16, 64)),
    "smollm-qkv": (960, 576, True, False, (1, 16)),
    "smollm-gate-up": (2 * 1536, 576, True, True, (1, 4)),
    "smollm-down": (576, 1536, False, False, (1, 4)),
    "odd": (20, 72, True, False, (1, 9)),
}


def aot_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every format and kernel on the shapes of the reference models, and the heads."""
    for name in ("bf16", "fp8", "int8", "int4"):
        for shape, (n, k, norm, gated, rows) in _SHAPES.items():
            for t in rows:
                yield f"{name}-{shape}-{t}", _aot_call(name, n, k, t, norm, gated, torch.bfloat16)
        for t in (2, 16, 256):
            yield f"{name}-float32-{t}", _aot_call(name, 5120, 2560, t, True, False, torch.float32)
        for t in (1, 16):
            yield f"{name}-head-{t}", _aot_head(name, 151936, 2560, t)
    for shape, t in (("qkv-moe", 1), ("gate-up", 1), ("down", 1), ("qkv-moe", 8), ("gate-up", 16), ("down", 16)):
        n, k, norm, gated, _ = _SHAPES[shape]
        for name in ("int4g128", "int8row"):  # what an engine makes
            yield f"{name}-{shape}-{t}", _aot_call(name, n, k, t, norm, gated, torch.bfloat16)


def _aot_call(name: str, n: int, k: int, t: int, norm: bool, gated: bool, dtype: torch.dtype) -> Callable[[], Any]:
    def call() -> Tensor:
        x = meta.tensor(t, k, dtype=dtype)
        norm_weight = meta.tensor(k, dtype=dtype) if norm else None
        residual = None if norm else meta.tensor(t, n, dtype=dtype)
        weight = meta.weight(name, n, k)
        return linear_triton(x, weight, norm_weight=norm_weight, norm_eps=1e-6, residual=residual, silu_mul=gated)

    return call


def _aot_head(name: str, n: int, k: int, t: int) -> Callable[[], Any]:
    def call() -> Tensor:
        x = meta.tensor(t, k)
        return lm_head_triton(x, meta.weight(name, n, k), meta.tensor(k), 1e-6)

    return call
