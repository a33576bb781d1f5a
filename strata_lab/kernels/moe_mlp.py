"""The experts of a mixture: sum over the chosen ones of weight * down(silu(gate(x)) * up(x)).

x [T, hidden] is not changed; the result is a new one like it. Bytes moved at small batch: every distinct expert once.
Few tokens gather their experts' weights; many tokens visit every expert, with a share of 0 for those routed elsewhere.
Neither way asks the host which experts were chosen, so a CUDA graph can hold both.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from strata_lab.kernels.linear import linear
from strata_lab.kernels.router_topk import router_topk_ref
from strata_lab.kernels.spec import Case, KernelSpec
from strata_lab.quant import get_format
from strata_lab.quant.base import LinearWeight


def moe_mlp_ref(x: Tensor, gate_up: LinearWeight, down: LinearWeight, weights: Tensor, expert_ids: Tensor) -> Tensor:
    """Sum over the chosen experts of weight * down(silu(gate(x)) * up(x)).

    Args:
        x: [T, hidden].
        gate_up: [E * 2I, hidden], gate rows first within an expert.
        down: [E * hidden, I].
        weights: [T, top_k] float32.
        expert_ids: [T, top_k] int64.

    Returns:
        [T, hidden] in the dtype of x.
    """
    num_tokens, top_k = expert_ids.shape
    num_experts = down.shape[0] // x.shape[1]
    if num_tokens * top_k <= num_experts:
        return _gathered(x, gate_up, down, weights, expert_ids, num_experts)
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(num_experts):
        share = (weights * (expert_ids == expert)).sum(dim=-1, keepdim=True)  # [T, 1], 0 for tokens routed elsewhere
        wide, narrow = (_expert_matrix(w, expert, num_experts) for w in (gate_up, down))
        out += share * _expert(x.float(), wide, narrow)
    return out.to(x.dtype)


def _expert(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up.t()).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up) @ down.t()


def _expert_matrix(weight: LinearWeight, expert: int, num_experts: int) -> Tensor:
    rows = weight.shape[0] // num_experts
    return get_format(weight.format).dequantize(weight.rows(expert * rows, (expert + 1) * rows))


def _gathered(
    x: Tensor, gate_up: LinearWeight, down: LinearWeight, weights: Tensor, expert_ids: Tensor, num_experts: int
) -> Tensor:
    wide, narrow = (_gather(w, expert_ids.reshape(-1), num_experts) for w in (gate_up, down))  # [T*k, rows, K]
    rows = x.float().repeat_interleave(expert_ids.shape[1], dim=0)[:, :, None]  # [T*k, hidden, 1]
    gate, up = torch.bmm(wide, rows).chunk(2, dim=1)
    y = torch.bmm(narrow, torch.nn.functional.silu(gate) * up)  # [T*k, hidden, 1]
    y = y.view(*expert_ids.shape, x.shape[1]) * weights[:, :, None]
    return y.sum(dim=1).to(x.dtype)


def _gather(weight: LinearWeight, experts: Tensor, num_experts: int) -> Tensor:
    """Dequantized matrices of the given experts, [len(experts), rows, K]."""
    rows, columns = weight.shape[0] // num_experts, weight.shape[1]
    count = experts.shape[0]

    def pick(t: Tensor) -> Tensor:
        return t.view(num_experts, -1, *t.shape[1:])[experts].reshape(-1, *t.shape[1:])

    picked = LinearWeight(
        weight.format, (count * rows, columns), pick(weight.data),
        None if weight.scales is None else pick(weight.scales),
        None if weight.mins is None else pick(weight.mins), weight.group_size,
    )  # fmt: skip
    return get_format(weight.format).dequantize(picked).view(count, rows, columns)


def moe_mlp_cpu(x: Tensor, gate_up: LinearWeight, down: LinearWeight, weights: Tensor, expert_ids: Tensor) -> Tensor:
    """`moe_mlp_ref` through the CPU's linear kernel: one gate/up+SiLU and one down product per distinct expert."""
    num_experts = down.shape[0] // x.shape[1]
    wide, narrow = gate_up.shape[0] // num_experts, down.shape[0] // num_experts
    out = torch.zeros_like(x)
    for expert in expert_ids.unique().tolist():
        token, slot = torch.where(expert_ids == expert)
        h = linear(x[token], gate_up.rows(expert * wide, (expert + 1) * wide), silu_mul=True)
        y = linear(h, down.rows(expert * narrow, (expert + 1) * narrow))
        out.index_add_(0, token, y * weights[token, slot, None])
    return out


def _cases() -> Iterator[Case]:
    for tokens, experts, top_k, name in (
        (1, 8, 2, "one-token"),
        (3, 4, 2, "more-slots-than-experts"),
        (9, 8, 3, "many"),
    ):
        yield Case(name, functools.partial(_inputs, tokens, experts, top_k))


def _inputs(tokens: int, experts: int, top_k: int, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(tokens)
    hidden, width = 32, 16

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    weights, expert_ids = router_topk_ref(rand(tokens, hidden), rand(experts, hidden), top_k, True)
    fp32 = get_format("fp32")
    gate_up, down = fp32.quantize(rand(experts * 2 * width, hidden)), fp32.quantize(rand(experts * hidden, width))
    return {"x": rand(tokens, hidden), "gate_up": gate_up, "down": down, "weights": weights, "expert_ids": expert_ids}


def _bytes_moved(x: Tensor, gate_up: LinearWeight, down: LinearWeight, weights: Tensor, expert_ids: Tensor) -> int:
    share = expert_ids.unique().numel() * x.shape[1] / down.shape[0]
    return int((gate_up.nbytes + down.nbytes) * share) + 2 * x.numel() * x.element_size()


def _flops(x: Tensor, gate_up: LinearWeight, down: LinearWeight, weights: Tensor, expert_ids: Tensor) -> int:
    num_experts = down.shape[0] // x.shape[1]
    per_expert = (gate_up.shape[0] * gate_up.shape[1] + down.shape[0] * down.shape[1]) // num_experts
    return 2 * expert_ids.numel() * per_expert


SPEC = KernelSpec(
    name="moe_mlp",
    ref=moe_mlp_ref,
    cases=_cases,
    tolerance={torch.float32: (1e-4, 1e-5)},
    bytes_moved=_bytes_moved,
    flops=_flops,
)
