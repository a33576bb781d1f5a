"""Gated activation of the unfused composition: silu(gate) * up.

Contract: gate and up are float tensors of one shape; the result is a fresh one of their dtype; float32 arithmetic at
least. Bytes moved: both read once, the result written. The fused composition has it as an epilogue of `linear`; the CPU
operator shares that epilogue's arithmetic, so that fusing changes no bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from strata_lab.kernels.cpu import build
from strata_lab.kernels.spec import Case, KernelSpec


def silu_mul_ref(gate: Tensor, up: Tensor) -> Tensor:
    """Plain torch; see the module for the contract."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (torch.nn.functional.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def silu_mul_cpu(gate: Tensor, up: Tensor) -> Tensor:
    """The C++ operator, float32."""
    return build.load().silu_mul(gate, up)


@build.fakes
def _register_fake(namespace: str) -> None:
    @torch.library.register_fake(f"{namespace}::silu_mul")
    def silu_mul_fake(gate: Tensor, up: Tensor) -> Tensor:
        return torch.empty_like(gate)


def _cases() -> Iterator[Case]:
    for name, shape in (("one-token", (1, 1536)), ("odd", (5, 123)), ("tiny", (3, 1))):
        yield Case(name, functools.partial(_inputs, shape))


def _inputs(shape: tuple[int, int], device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(shape[0])
    return {name: (4 * torch.randn(shape, generator=generator)).to(device) for name in ("gate", "up")}


def _bytes_moved(gate: Tensor, up: Tensor) -> int:
    return 3 * gate.numel() * gate.element_size()


def _flops(gate: Tensor, up: Tensor) -> int:
    return gate.numel() * 5  # exponential, add, divide, two products


SPEC = KernelSpec(
    name="silu_mul",
    ref=silu_mul_ref,
    cases=_cases,
    tolerance={torch.float32: (2e-6, 1e-7), torch.bfloat16: (8e-3, 1e-3)},
    bytes_moved=_bytes_moved,
    flops=_flops,
)
