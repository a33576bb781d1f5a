"""Rotary position embedding in the half-split convention of Hugging Face's Llama.

Contract: x [T, H, D] with D even, cos and sin [T, D/2] of the tokens' positions; the result is a fresh tensor like x.
Dimension i turns with dimension i + D/2 (not with its neighbour: GGUF's interleaved rows are un-permuted by the
loader). Rotation in float32 at least. Bytes moved: x read and written once. The fused composition rotates inside
`qkv_rope_append`; the CPU operator shares its arithmetic, so that fusing changes no bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from strata_lab.kernels.cpu import build
from strata_lab.kernels.spec import Case, KernelSpec


def rope_ref(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, H, D] by the angles of cos and sin [T, D/2]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second = x.to(wide).chunk(2, dim=-1)  # [T, H, D/2] each
    cos, sin = cos.to(wide)[:, None, :], sin.to(wide)[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rope_cpu(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The C++ operator, float32."""
    return build.load().rope(x, cos, sin)


@build.fakes
def _register_fake(namespace: str) -> None:
    @torch.library.register_fake(f"{namespace}::rope")
    def rope_fake(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x.new_empty(x.shape)


def rotation(positions: Tensor, head_dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Plain (unscaled) cos and sin tables [T, D/2], float32, of integer positions [T]; for cases and tests."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim)
    angles = positions.double()[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def _cases() -> Iterator[Case]:
    for name, shape in (("one-token", (1, 9, 64)), ("odd", (5, 3, 80)), ("pair", (3, 1, 2)), ("wide", (2, 2, 128))):
        yield Case(name, functools.partial(_inputs, shape))


def _inputs(shape: tuple[int, int, int], device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(shape[0])
    cos, sin = rotation(torch.arange(shape[0], device=device) * 37, shape[2])
    return {"x": torch.randn(shape, generator=generator).to(device), "cos": cos, "sin": sin}


def _bytes_moved(x: Tensor, cos: Tensor, sin: Tensor) -> int:
    return 2 * x.numel() * x.element_size() + 2 * cos.numel() * cos.element_size()


def _flops(x: Tensor, cos: Tensor, sin: Tensor) -> int:
    return 3 * x.numel()  # two products and one sum per element


SPEC = KernelSpec(
    name="rope",
    ref=rope_ref,
    cases=_cases,
    tolerance={torch.float32: (2e-6, 1e-6), torch.bfloat16: (8e-3, 8e-3)},
    bytes_moved=_bytes_moved,
    flops=_flops,
)
