"""Plain torch, one row at a time: the operators of the batch-invariant mode where nothing better is there.

torch's products choose their way of adding up by the number of rows, and its vector loops compute what is left at the
end of a tensor with other instructions. So a row's result depends on how many rows lie beside it, in the last bits.
Here every row is computed alone, in fresh memory, with shapes that depend on nothing but the row: a function of that
row, to the last bit. Contracts: `kernels/<op>.py`. Slow, and meant to be obviously right: it serves models that the C++
operators cannot serve, and the routing of mixtures on a CPU, which is torch's everywhere. Lengths are read on the host,
so `paged_attention_by_row` cannot be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from strata_lab.kernels import lm_head, moe_block, moe_mlp, qkv_attention, rms_norm, silu_mul
from strata_lab.kernels.linear import linear, linear_ref
from strata_lab.kernels.paged_attention import paged_attention_ref
from strata_lab.kernels.qkv_rope_append import qkv_rope_append_ref
from strata_lab.kernels.router_topk import router_topk_ref
from strata_lab.quant import get_format
from strata_lab.quant.base import PANEL_ROWS, LinearWeight


def _alone(row: Callable[[int], Tensor], count: int, empty: Callable[[], Tensor]) -> Tensor:
    """The rows `row(0)`, `row(1)`, ... of shape [1, ...] stacked; `empty()` where there are none."""
    return torch.cat([row(t) for t in range(count)]) if count else empty()


def _own(x: Tensor, t: int) -> Tensor:
    """Row t as [1, ...] in memory of its own: a product may go another way for another alignment."""
    return x[t : t + 1].clone(memory_format=torch.contiguous_format)


def rms_norm_by_row(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm_ref` of every [D] by itself."""
    rows = x.reshape(-1, x.shape[-1])
    return _alone(lambda t: rms_norm.rms_norm_ref(_own(rows, t), weight, eps), len(rows), lambda: rows).view(x.shape)


def silu_mul_by_row(gate: Tensor, up: Tensor) -> Tensor:
    """`silu_mul_ref` of every row by itself."""
    return _alone(
        lambda t: silu_mul.silu_mul_ref(_own(gate, t), _own(up, t)), len(gate), lambda: torch.empty_like(gate)
    )


def linear_by_row(x: Tensor, weight: LinearWeight, bias: Tensor | None = None, **options: Any) -> Tensor:
    """`linear` of every row by itself; the C++ operator, whose rows are independent already, as it is."""
    odd = options.get("silu_mul", False) and weight.shape[0] % (2 * PANEL_ROWS) != 0
    if weight.layout == "panels" and not odd:
        return linear(x, weight, bias, **options)
    residual = options.pop("residual", None)
    product: Callable[..., Tensor] = linear
    if weight.layout == "rows":  # expanded once, not once a row
        expanded = get_format(weight.format).dequantize(weight).to(x.dtype)
        product, weight = linear_ref, LinearWeight("fp32", weight.shape, expanded)

    def row(t: int) -> Tensor:
        own = None if residual is None else _own(residual, t)
        return product(_own(x, t), weight, bias, residual=own, **options)

    return _alone(row, len(x), lambda: linear_ref(x, weight, bias, residual=residual, **options))


def lm_head_by_row(x: Tensor, weight: LinearWeight, norm_weight: Tensor, norm_eps: float) -> Tensor:
    """`lm_head_ref` of every row by itself."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if not len(x):
        return lm_head.lm_head_ref(x, weight, norm_weight, norm_eps)
    return linear_by_row(x.to(wide), weight, norm_weight=norm_weight.to(wide), norm_eps=norm_eps)


def paged_attention_by_row(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor,
    *, max_q_len: int, **options: Any,
) -> Tensor:  # fmt: skip
    """`paged_attention_ref` of every query by itself, over the blocks up to its own position and no others."""
    out = torch.zeros_like(q)
    starts, lengths, size = cu_seqlens_q.tolist(), seq_lens.tolist(), k_cache.shape[1]
    one = cu_seqlens_q.new_tensor([0, 1])
    for b, length in enumerate(lengths):
        for t in range(starts[b], starts[b + 1]):
            seen = length - (starts[b + 1] - t) + 1
            if seen > 0:
                table = block_tables[b : b + 1, : -(-seen // size)]
                own = (_own(q, t), k_cache, v_cache, table, seq_lens.new_tensor([seen]), one)
                out[t] = paged_attention_ref(*own, max_q_len=1, **options)[0]
    return out


def qkv_rope_append_by_row(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_norm_weight: Tensor | None, k_norm_weight: Tensor | None, eps: float,
    k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *sizes: Any,
) -> Tensor:  # fmt: skip
    """`qkv_rope_append_ref` of every row by itself; `sizes`: heads and scales."""

    def row(t: int) -> Tensor:
        here = (_own(qkv, t), _own(cos, t), _own(sin, t), q_norm_weight, k_norm_weight, eps)
        return qkv_rope_append_ref(*here, k_cache, v_cache, slot_mapping[t : t + 1], *sizes)

    everything = (qkv, cos, sin, q_norm_weight, k_norm_weight, eps, k_cache, v_cache, slot_mapping, *sizes)
    return _alone(row, len(qkv), lambda: qkv_rope_append_ref(*everything))


qkv_attention_by_row = qkv_attention.composed(qkv_rope_append_by_row, paged_attention_by_row)


def router_topk_by_row(x: Tensor, router: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """`router_topk_ref` of every row by itself."""
    if not len(x):
        return router_topk_ref(x, router, top_k, normalize)
    rows = [router_topk_ref(_own(x, t), router, top_k, normalize) for t in range(len(x))]
    return torch.cat([weights for weights, _ in rows]), torch.cat([ids for _, ids in rows])


def moe_mlp_by_row(x: Tensor, gate_up: LinearWeight, down: LinearWeight, weights: Tensor, expert_ids: Tensor) -> Tensor:
    """`moe_mlp_ref` of every row by itself."""

    def row(t: int) -> Tensor:
        return moe_mlp.moe_mlp_ref(_own(x, t), gate_up, down, weights[t : t + 1], expert_ids[t : t + 1])

    return _alone(row, len(x), lambda: torch.empty_like(x))


moe_block_by_row = moe_block.composed(rms_norm_by_row, moe_mlp_by_row, router_topk_by_row)
# An expert's product is the C++ operator's, and a token adds its experts up in ascending order whoever else takes them.
moe_block_routed_by_row = moe_block.composed(rms_norm.rms_norm_cpu, moe_mlp.moe_mlp_cpu, router_topk_by_row)
