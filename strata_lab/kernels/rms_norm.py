"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

Contract: x [..., D] of any float dtype and any strides, weight [D]; the result is a fresh tensor of x's shape and
dtype. Sums are float32 at least. Rows do not know of each other, so a row's result is bitwise the same whatever is
normalized beside it. Bytes moved: x read once, y written once, the weight once. It does not add a residual: the
linear operator has that as an epilogue, and takes the norm as a prologue.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from strata_lab.kernels.cpu.build import fakes
from strata_lab.kernels.spec import Case, KernelSpec


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize x [..., D] by its root mean square and multiply by weight [D]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normalized = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normalized * weight.to(wide.dtype)).to(x.dtype)


def rms_norm_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm_ref` in C++ for float32 on the CPU."""
    return torch.ops.strata.rms_norm(x, weight, eps)


@fakes
def _register_fake(namespace: str) -> None:
    @torch.library.register_fake(f"{namespace}::rms_norm")
    def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _cases() -> Iterator[Case]:
    for name, shape in (("one-row", (1, 576)), ("odd", (5, 123)), ("tiny", (3, 1)), ("heads", (2, 3, 80))):
        yield Case(name, functools.partial(_inputs, shape, 1.0))
    yield Case("large-values", functools.partial(_inputs, (4, 64), 1e4))
    yield Case("small-values", functools.partial(_inputs, (4, 64), 1e-4))


def _inputs(shape: tuple[int, ...], magnitude: float, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * magnitude
    weight = 1 + 0.1 * torch.randn(shape[-1], generator=generator)
    return {"x": x.to(device), "weight": weight.to(device), "eps": 1e-5}


def _bytes_moved(x: Tensor, weight: Tensor, eps: float) -> int:
    return 2 * x.numel() * x.element_size() + weight.numel() * weight.element_size()


def _flops(x: Tensor, weight: Tensor, eps: float) -> int:
    return 4 * x.numel()  # square, add to the sum, times the factor, times the weight


SPEC = KernelSpec(
    name="rms_norm",
    ref=rms_norm_ref,
    cases=_cases,
    tolerance={torch.float32: (2e-6, 1e-7), torch.bfloat16: (8e-3, 1e-3)},
    bytes_moved=_bytes_moved,
    flops=_flops,
)
