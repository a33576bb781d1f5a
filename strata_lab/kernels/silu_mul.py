"""Gated activation: silu(gate) * up, of a [T, 2I] tensor whose first half is the gate.

Contract: the result is a fresh [T, I] tensor of the input's dtype; float32 arithmetic at least. Bytes moved: the input
once, half of that written. On the CPU there is no own kernel: the linear operator has it as an epilogue, and
torch.compile fuses this one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from strata_lab.kernels.spec import Case, KernelSpec


def silu_mul_ref(gate_up: Tensor) -> Tensor:
    """silu(gate_up[:, :I]) * gate_up[:, I:], [T, 2I] -> [T, I]."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def _cases() -> Iterator[Case]:
    for name, shape in (("one-token", (1, 3072)), ("odd", (5, 246)), ("tiny", (3, 2))):
        yield Case(name, functools.partial(_inputs, shape))


def _inputs(shape: tuple[int, int], device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(shape[0])
    return {"gate_up": (4 * torch.randn(shape, generator=generator)).to(device)}


def _bytes_moved(gate_up: Tensor) -> int:
    return gate_up.numel() * gate_up.element_size() * 3 // 2


def _flops(gate_up: Tensor) -> int:
    return gate_up.numel() // 2 * 5  # exponential, add, divide, two products


SPEC = KernelSpec(
    name="silu_mul",
    ref=silu_mul_ref,
    impls={},
    cases=_cases,
    tolerance={torch.float32: (2e-6, 1e-7), torch.bfloat16: (8e-3, 1e-3)},
    bytes_moved=_bytes_moved,
    flops=_flops,
)
