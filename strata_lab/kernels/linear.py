"""The product with a weight matrix, and what stands before and after it.

    x' = rms_norm(x, norm_weight, norm_eps)            if norm_weight is given
    y  = x' @ dequantize(weight).T  (+ bias)
    y  = silu(y[:, :N/2]) * y[:, N/2:]                 if silu_mul
    y  = y + residual                                  if residual is given

x float32 [T, K], weight `LinearWeight` [N, K], bias [N], norm_weight [K], residual like the result; the result is a new
float32 [T, N] or, gated, [T, N/2]. No argument is changed or aliased.

Layout "rows" is plain torch on any device: the reference itself. Layout "panels" (see cpu/packing.py) is the CPU
operator, whose contract adds two things:

* int8 and int4 weights meet activations rounded to int8 in groups of 32 columns (scale = largest magnitude / 127),
  after the norm. Products within a group are exact integers. `linear_ref` rounds likewise (`round_activations`).
* A row of the result depends on its row of x alone, to the last bit, whatever T: sums run over the columns (float
  formats) or groups (integer formats) in their order, in every kernel. So builds for different instruction sets and
  different numbers of threads give the same bits too.

Bytes moved: the packed weight once per call (for every T, as it is unpacked in registers for 8 rows of x at a time and
then comes from the cache), x and the result. Fast because decode then waits for nothing but those bytes: no second pass
for norm, bias, gate or residual, and one parallel region per product. From `kFloatTileFrom` rows on (cpu/dot_float.h)
float weights are expanded once into cache-sized fp32 strips; integer weights stay integers at every T, whose products
are cheaper than fp32 ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from strata_lab.kernels.cpu import build
from strata_lab.kernels.cpu.packing import pack, unpack
from strata_lab.kernels.spec import Case, KernelSpec
from strata_lab.quant import FORMATS, get_format
from strata_lab.quant.base import PANEL_ROWS, LinearWeight

ACTIVATION_GROUP = 32  # columns of x that share a scale: the group of the weights
_SMALLEST_AMAX = 1e-36  # below it 127 / amax would overflow; such a group counts as zeros


def round_activations(x: Tensor) -> Tensor:
    """x [T, K] rounded to int8 codes in groups of 32 columns and back, as the integer kernels see it.

    Codes and scales are found in float32 as there, whatever the dtype of x; their product is in the dtype of x.
    """
    k = x.shape[1]
    groups = pad(x.float(), (0, -k % ACTIVATION_GROUP)).unflatten(1, (-1, ACTIVATION_GROUP))
    amax = groups.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(amax < _SMALLEST_AMAX, 0.0, 127.0 / amax)
    codes, scales = (groups * inverse).round(), amax / 127.0
    return (codes.to(x.dtype) * scales.to(x.dtype)).flatten(1)[:, :k]


def linear_ref(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    residual: Tensor | None = None,
    silu_mul: bool = False,
) -> Tensor:
    """The definition above in plain torch, in the dtype of x (float32, or float64 for tests)."""
    if norm_weight is not None:
        x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + norm_eps) * norm_weight
    if weight.layout == "panels" and weight.format in ("int8", "int4"):
        x = round_activations(x)
    y = x @ get_format(weight.format).dequantize(unpack(weight)).to(x.dtype).T
    if bias is not None:
        y = y + bias
    if silu_mul:
        gate, up = y.chunk(2, dim=-1)
        y = silu(gate) * up
    return y if residual is None else y + residual


def linear(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    residual: Tensor | None = None,
    silu_mul: bool = False,
) -> Tensor:
    """See the module. `ValueError` for shapes or dtypes that do not fit (layout "panels")."""
    if weight.layout == "rows":
        return linear_ref(
            x, weight, bias, norm_weight=norm_weight, norm_eps=norm_eps, residual=residual, silu_mul=silu_mul
        )
    op = torch.ops.strata.linear.default
    parts = (weight.data, weight.scales, weight.mins, weight.shape[0])
    if silu_mul and weight.shape[0] % (2 * PANEL_ROWS):  # gate and up would share a panel
        gate, up = op(x, *parts, bias, norm_weight, norm_eps, None, False).chunk(2, dim=-1)
        y = silu(gate) * up
        return y if residual is None else y + residual
    return op(x, *parts, bias, norm_weight, norm_eps, residual, silu_mul)


@build.fakes
def _register_fake(namespace: str) -> None:
    @torch.library.register_fake(f"{namespace}::linear")
    def _(
        x: Tensor,
        data: Tensor,
        scales: Tensor | None,
        mins: Tensor | None,
        n: int,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_eps: float,
        residual: Tensor | None,
        silu_mul: bool,
    ) -> Tensor:
        return x.new_empty((x.shape[0], n // 2 if silu_mul else n))


def _cases() -> Iterator[Case]:
    for name in FORMATS:
        yield Case(f"{name}-one-row", functools.partial(_inputs, name, 1, 48, 64, ()))
        yield Case(f"{name}-ragged", functools.partial(_inputs, name, 3, 20, 72, ("bias",)))
        yield Case(
            f"{name}-everything", functools.partial(_inputs, name, 9, 32, 96, ("bias", "norm", "residual", "gate"))
        )
        yield Case(f"{name}-many-rows", functools.partial(_inputs, name, 29, 40, 300, ("residual",)))


def case_weight(name: str, w: Tensor) -> LinearWeight:
    """w in format `name`, packed where the CPU kernels can be had: a case for the machine at hand."""
    weight = get_format(name).quantize(w)
    if w.device.type != "cpu":
        return weight
    try:
        return pack(weight)
    except build.CpuKernelsUnavailable:
        return weight


def _inputs(name: str, t: int, n: int, k: int, parts: tuple[str, ...], device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(t)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    inputs: dict[str, Any] = {"x": normal(t, k), "weight": case_weight(name, normal(n, k) / k**0.5)}
    if "bias" in parts:
        inputs["bias"] = normal(n)
    if "norm" in parts:
        inputs |= {"norm_weight": normal(k), "norm_eps": 1e-5}
    if "gate" in parts:
        inputs["silu_mul"] = True
    if "residual" in parts:
        inputs["residual"] = normal(t, n // 2 if "gate" in parts else n)
    return inputs


def _bytes_moved(x: Tensor, weight: LinearWeight, bias: Tensor | None = None, **options: Any) -> int:
    n = weight.shape[0] // (2 if options.get("silu_mul") else 1)
    extra = [t for t in (bias, options.get("norm_weight"), options.get("residual")) if t is not None]
    return weight.nbytes + 4 * (x.numel() + x.shape[0] * n + sum(t.numel() for t in extra))


def _flops(x: Tensor, weight: LinearWeight, *_: Any, **__: Any) -> int:
    return 2 * x.shape[0] * weight.shape[0] * weight.shape[1]


SPEC = KernelSpec(
    name="linear",
    ref=linear_ref,
    cases=_cases,
    tolerance={torch.float32: (1e-5, 1e-5)},
    bytes_moved=_bytes_moved,
    flops=_flops,
)
