"""Routing of a mixture of experts: softmax over experts, then the best `top_k` of each token.

x [T, hidden], router [E, hidden] -> weights [T, top_k] float32 and expert ids [T, top_k] int64, best first; `normalize`
divides the chosen weights by their sum. float32 arithmetic at least. Bytes moved: x and the router once. Every backend
runs plain torch so far: the router is under 1% of a layer's bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from strata_lab.kernels.spec import Case, KernelSpec


def router_topk_ref(x: Tensor, router: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Plain torch; see the module for the contract."""
    wide = torch.promote_types(x.dtype, torch.float32)
    probs = torch.softmax(x.to(wide) @ router.to(wide).t(), dim=-1)
    weights, expert_ids = torch.topk(probs, top_k, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.float(), expert_ids


def _cases() -> Iterator[Case]:
    for tokens, experts, top_k, normalize in ((1, 64, 8, True), (5, 7, 3, False), (33, 8, 8, True)):
        yield Case(f"{tokens}-of-{experts}", functools.partial(_inputs, tokens, experts, top_k, normalize))


def _inputs(tokens: int, experts: int, top_k: int, normalize: bool, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(tokens)
    x, router = (torch.randn(rows, 40, generator=generator).to(device) for rows in (tokens, experts))
    return {"x": x, "router": router, "top_k": top_k, "normalize": normalize}


def _bytes_moved(x: Tensor, router: Tensor, top_k: int, normalize: bool) -> int:
    return x.numel() * x.element_size() + router.numel() * router.element_size() + x.shape[0] * top_k * 12


def _flops(x: Tensor, router: Tensor, top_k: int, normalize: bool) -> int:
    return 2 * x.shape[0] * router.numel()


SPEC = KernelSpec(
    name="router_topk",
    ref=router_topk_ref,
    cases=_cases,
    tolerance={torch.float32: (1e-5, 1e-6)},
    bytes_moved=_bytes_moved,
    flops=_flops,
)
