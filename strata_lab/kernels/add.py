"""The residual connection of the unfused composition: x + y, element by element.

x and y are float tensors of the same shape; the result is a new one. Bytes moved: both read once, the result written.
The fused composition adds the residual inside the product (`linear`, same order, same bits).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from strata_lab.kernels.cpu import build
from strata_lab.kernels.spec import Case, KernelSpec


def add_ref(x: Tensor, y: Tensor) -> Tensor:
    """Plain torch; see the module for the contract."""
    return x + y


def add_cpu(x: Tensor, y: Tensor) -> Tensor:
    """The C++ operator, float32."""
    return build.load().add(x, y)


@build.fakes
def _register_fake(namespace: str) -> None:
    @torch.library.register_fake(f"{namespace}::add")
    def add_fake(x: Tensor, y: Tensor) -> Tensor:
        return torch.empty_like(x)


def _cases() -> Iterator[Case]:
    for shape in ((1, 576), (3, 5), (300, 77)):
        yield Case("x".join(map(str, shape)), functools.partial(_inputs, shape))


def _inputs(shape: tuple[int, int], device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(shape[0])
    return {name: torch.randn(shape, generator=generator).to(device) for name in ("x", "y")}


SPEC = KernelSpec(
    name="add",
    ref=add_ref,
    cases=_cases,
    tolerance={torch.float32: (2e-7, 0.0), torch.bfloat16: (8e-3, 0.0)},
    bytes_moved=lambda x, y: 3 * x.numel() * x.element_size(),
    flops=lambda x, y: x.numel(),
)
