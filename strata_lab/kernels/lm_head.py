"""From the last hidden state to logits: final norm and product with the head.

x [S, hidden], weight `LinearWeight` [V, hidden], norm_weight [hidden] -> [S, V] in float32 whatever x's dtype (float64
for a float64 x): rounding logits to bfloat16 would make ties of what is none. Bytes moved: the head once, the logits.
An operator of its own because of that dtype; the arithmetic is `linear` with a norm.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from strata_lab.kernels.linear import case_weight, linear, linear_ref
from strata_lab.kernels.spec import Case, KernelSpec
from strata_lab.quant import FORMATS
from strata_lab.quant.base import LinearWeight


def lm_head_ref(x: Tensor, weight: LinearWeight, norm_weight: Tensor, norm_eps: float) -> Tensor:
    """Plain torch; see the module for the contract."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return linear_ref(x.to(wide), weight, norm_weight=norm_weight.to(wide), norm_eps=norm_eps)


def lm_head_cpu(x: Tensor, weight: LinearWeight, norm_weight: Tensor, norm_eps: float) -> Tensor:
    """The CPU's product, which is in float32 anyway."""
    return linear(x, weight, norm_weight=norm_weight, norm_eps=norm_eps)


def _cases() -> Iterator[Case]:
    for name in FORMATS:
        yield Case(f"{name}-one-row", functools.partial(_inputs, name, 1, 48, 64))
        yield Case(f"{name}-rows", functools.partial(_inputs, name, 7, 72, 80))


def _inputs(name: str, t: int, n: int, k: int, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(t)
    x, w, norm = (torch.randn(*shape, generator=generator).to(device) for shape in ((t, k), (n, k), (k,)))
    return {"x": x, "weight": case_weight(name, w / k**0.5), "norm_weight": norm, "norm_eps": 1e-5}


def _bytes_moved(x: Tensor, weight: LinearWeight, norm_weight: Tensor, norm_eps: float) -> int:
    return weight.nbytes + x.numel() * x.element_size() + 4 * x.shape[0] * weight.shape[0]


def _flops(x: Tensor, weight: LinearWeight, norm_weight: Tensor, norm_eps: float) -> int:
    return 2 * x.shape[0] * weight.shape[0] * weight.shape[1]


SPEC = KernelSpec(
    name="lm_head",
    ref=lm_head_ref,
    cases=_cases,
    tolerance={torch.float32: (1e-5, 1e-5)},
    bytes_moved=_bytes_moved,
    flops=_flops,
)
