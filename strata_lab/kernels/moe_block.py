"""The mixture-of-experts half of a layer: x + experts(rms_norm(x)), from residual stream to residual stream.

Contract: `rms_norm`, `router_topk`, `moe_mlp` and the residual in a row; x [T, hidden] is not changed, the result is a
new one like it. Bytes moved: the router, and every distinct expert once. As one operator the norm is applied where x is
read, and the weighted sum and the residual where the result is written. What is built in also takes a `tally`, which is
told the experts chosen (`expert_counts.py`); the contract does not ask for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from strata_lab.kernels import moe_mlp, rms_norm, router_topk
from strata_lab.kernels.spec import Case, KernelSpec
from strata_lab.quant import get_format
from strata_lab.quant.base import LinearWeight


def composed(
    norm: Callable[..., Tensor],
    experts: Callable[..., Tensor],
    route: Callable[..., tuple[Tensor, Tensor]] = router_topk.router_topk_ref,
) -> Callable[..., Tensor]:
    """The operator, made of others."""

    def run(
        x: Tensor,
        norm_weight: Tensor,
        eps: float,
        router: Tensor,
        gate_up: LinearWeight,
        down: LinearWeight,
        *,
        top_k: int,
        normalize: bool,
        tally: Any = None,
    ) -> Tensor:
        """See the module."""
        h = norm(x, norm_weight, eps)
        weights, expert_ids = route(h, router, top_k, normalize)
        if tally is not None:
            tally.ids(expert_ids)
        return x + experts(h, gate_up, down, weights, expert_ids)

    return run


moe_block_ref = composed(rms_norm.rms_norm_ref, moe_mlp.moe_mlp_ref)
moe_block_cpu = composed(rms_norm.rms_norm_cpu, moe_mlp.moe_mlp_cpu)


def _cases() -> Iterator[Case]:
    for name, tokens, experts, top_k, normalize in (
        ("one-token", 1, 8, 2, True),
        ("few", 5, 4, 2, False),
        ("many", 19, 8, 3, True),
    ):
        yield Case(name, functools.partial(_inputs, tokens, experts, top_k, normalize))


def _inputs(tokens: int, experts: int, top_k: int, normalize: bool, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(tokens)
    hidden, width = 32, 16

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    fp32 = get_format("fp32")
    return {
        "x": rand(tokens, hidden), "norm_weight": rand(hidden), "eps": 1e-6, "router": rand(experts, hidden),
        "gate_up": fp32.quantize(rand(experts * 2 * width, hidden)),
        "down": fp32.quantize(rand(experts * hidden, width)), "top_k": top_k, "normalize": normalize,
    }  # fmt: skip


def _chosen(x: Tensor, norm_weight: Tensor, eps: float, router: Tensor, top_k: int, normalize: bool) -> Tensor:
    return router_topk.router_topk_ref(rms_norm.rms_norm_ref(x, norm_weight, eps), router, top_k, normalize)[1]


def _bytes_moved(
    x: Tensor, norm_weight: Tensor, eps: float, router: Tensor, gate_up: LinearWeight, down: LinearWeight, *,
    top_k: int, normalize: bool,
) -> int:  # fmt: skip
    distinct = _chosen(x, norm_weight, eps, router, top_k, normalize).unique().numel()
    experts = (gate_up.nbytes + down.nbytes) * distinct // router.shape[0]
    return experts + router.numel() * router.element_size() + 2 * x.numel() * x.element_size()


def _flops(
    x: Tensor, norm_weight: Tensor, eps: float, router: Tensor, gate_up: LinearWeight, down: LinearWeight, *,
    top_k: int, normalize: bool,
) -> int:  # fmt: skip
    per_expert = (gate_up.shape[0] * gate_up.shape[1] + down.shape[0] * down.shape[1]) // router.shape[0]
    return 2 * x.shape[0] * (router.numel() + top_k * per_expert)


SPEC = KernelSpec(
    name="moe_block",
    ref=moe_block_ref,
    cases=_cases,
    tolerance={torch.float32: (1e-4, 2e-5)},
    bytes_moved=_bytes_moved,
    flops=_flops,
)
