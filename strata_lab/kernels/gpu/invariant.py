"""The operators of the batch-invariant mode on a GPU: one kernel and one configuration for every number of rows.

`linear.py`, `attention.py` and `moe.py` choose a kernel, and how it cuts its sums up, by the number of rows; so the
last bits of a row depend on its batch. Here nothing does:

    linear, lm_head   the norm in a kernel of its own (a program per row), then `gemm.dot` with tiles of `ROWS` rows and
                      the split of K that `ROWS` rows would take, from one row to a whole prompt
    attention         the ragged kernel of prompts for decodes too: a query goes through its keys in tiles of one size,
                      from position 0 on, never split
    mixture           routing by one program per expert and token, selection `ROUTE_TOKENS` tokens at a time, experts by
                      the grouped products with tiles of `ROWS` pairs

A row's place in a tile, the rows beside it and the padding behind it meet its numbers nowhere: a product has a sum of
its own for every pair of rows. What a later key adds to a query that does not see it is an exact zero. Norm, rotation,
cache write, gating and look-ups are those of the other mode: each row has a program, or an element, of its own.

It costs what the choices it gives up are worth: decodes at long contexts wait for one program per head and request, and
prompts read a weight once per `ROWS` rows from the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from strata_lab.kernels.by_row import linear_by_row, lm_head_by_row, moe_block_by_row, moe_mlp_by_row
from strata_lab.kernels.gpu import launch, meta
from strata_lab.kernels.gpu.attention_prefill import PrefillConfig, prefill
from strata_lab.kernels.gpu.attention_tiles import operand
from strata_lab.kernels.gpu.elementwise import rms_norm_triton
from strata_lab.kernels.gpu.gemm import MAX_COUNTERS, DotConfig, default_config, dot, normalized
from strata_lab.kernels.gpu.kv_write import qkv_rope_append_triton
from strata_lab.kernels.gpu.moe import config_of
from strata_lab.kernels.gpu.moe_config import ROUTE_TOKENS
from strata_lab.kernels.gpu.moe_step import Step, as_rows, empty_routing, few_logits, select
from strata_lab.quant.base import LinearWeight

ROWS = 16  # of a tile: what a decode step of up to 16 requests needs, and tensor cores at least
MOST_ROWS = 512  # of one launch, which bounds the memory for partial sums


def linear_config(weight: LinearWeight, dtype: torch.dtype, silu_mul: bool, device: torch.device) -> DotConfig:
    """How the product with a weight is cut up, whatever the number of rows."""
    sms = launch.num_sms(device) if device.type == "cuda" else launch.REFERENCE_SMS
    return default_config(weight, ROWS, dtype, silu_mul, sms)


def attention_config(wide: bool) -> PrefillConfig:
    """How attention is cut up; `wide`: products are in float32."""
    return PrefillConfig(ROWS, 32, 8, 1) if wide else PrefillConfig(ROWS, 64, 4, 3)


def linear_invariant(
    x: Tensor, weight: LinearWeight, bias: Tensor | None = None, *, norm_weight: Tensor | None = None,
    norm_eps: float = 0.0, residual: Tensor | None = None, silu_mul: bool = False,
) -> Tensor:  # fmt: skip
    """`linear_triton` with one order of sums."""
    if weight.format == "fp32":
        parts = {"norm_weight": norm_weight, "norm_eps": norm_eps, "residual": residual, "silu_mul": silu_mul}
        return linear_by_row(x.float(), weight, bias, **parts).to(x.dtype)
    outputs = weight.shape[0] // 2 if silu_mul else weight.shape[0]
    out = torch.empty(x.shape[0], outputs, dtype=x.dtype, device=x.device)
    _into(out, x, weight, bias, norm_weight, norm_eps, residual, silu_mul)
    return out


def lm_head_invariant(x: Tensor, weight: LinearWeight, norm_weight: Tensor, norm_eps: float) -> Tensor:
    """`lm_head_triton` with one order of sums."""
    if weight.format == "fp32":
        return lm_head_by_row(x.float(), weight, norm_weight, norm_eps)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    _into(out, x, weight, None, norm_weight, norm_eps, None, False)
    return out


def _into(
    out: Tensor, x: Tensor, weight: LinearWeight, bias: Tensor | None, norm_weight: Tensor | None, norm_eps: float,
    residual: Tensor | None, silu_mul: bool,
) -> None:  # fmt: skip
    config = linear_config(weight, x.dtype, silu_mul, x.device)
    x = x.contiguous() if norm_weight is None else normalized(x, norm_weight, norm_eps)
    residual = None if residual is None else residual.contiguous()
    across = -(-out.shape[1] // config.block_n)
    most = min(MOST_ROWS, max(MAX_COUNTERS // across, 1) * ROWS)
    for first in range(0, x.shape[0], most):
        rows = slice(first, first + most)
        rest = None if residual is None else residual[rows]
        dot(x[rows], weight, bias, None, 0.0, rest, silu_mul, out[rows], config)


def paged_attention_invariant(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor,
    **options: Any,
) -> Tensor:  # fmt: skip
    """`paged_attention_triton` with one order of sums."""
    config = attention_config(operand(q.dtype, k_cache.dtype)[0] == tl.float32)
    return prefill(q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q, config=config, **options)


def qkv_attention_invariant(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_norm_weight: Tensor | None, k_norm_weight: Tensor | None, eps: float,
    k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, block_tables: Tensor, seq_lens: Tensor,
    cu_seqlens_q: Tensor, *, num_q_heads: int, num_kv_heads: int, k_scale: float = 1.0, v_scale: float = 1.0,
    together: int = 1, **options: Any,
) -> Tensor:  # fmt: skip
    """`qkv_attention_triton` with one order of sums, always in two kernels, so that `together` tells nothing."""
    q = qkv_rope_append_triton(
        qkv, cos, sin, q_norm_weight, k_norm_weight, eps, k_cache, v_cache, slot_mapping, num_q_heads, num_kv_heads,
        k_scale, v_scale,
    )  # fmt: skip
    return paged_attention_invariant(
        q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q, k_scale=k_scale, v_scale=v_scale, **options
    ).view(qkv.shape[0], -1)


def router_topk_invariant(x: Tensor, router: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """`router_topk_triton` with one order of sums."""
    return _routed(as_rows(x), router, top_k, normalize, torch.int64)


def _routed(x: Tensor, router: Tensor, top_k: int, normalize: bool, ids_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weights, ids = empty_routing(x, top_k, ids_dtype)
    if x.shape[0]:
        select(few_logits(x, router, None, 0.0, None, None), weights, ids, normalize, t_block=ROUTE_TOKENS)
    return weights, ids


def moe_mlp_invariant(
    x: Tensor, gate_up: LinearWeight, down: LinearWeight, weights: Tensor, expert_ids: Tensor
) -> Tensor:
    """`moe_mlp_triton` with one order of sums."""
    if gate_up.format == "fp32":
        return moe_mlp_by_row(x, gate_up, down, weights, expert_ids)
    if x.shape[0] == 0:
        return torch.empty_like(x)
    step = Step(as_rows(x), gate_up, down, expert_ids.shape[1], config_of(gate_up))
    return step.grouped(step.x, weights.contiguous(), expert_ids.contiguous(), None, ROWS)


def moe_block_invariant(
    x: Tensor, norm_weight: Tensor, eps: float, router: Tensor, gate_up: LinearWeight, down: LinearWeight,
    *, top_k: int, normalize: bool, tally: Any = None,
) -> Tensor:  # fmt: skip
    """`moe_block_triton` with one order of sums."""
    if gate_up.format == "fp32":
        some = {"top_k": top_k, "normalize": normalize, "tally": tally}
        return moe_block_by_row(x, norm_weight, eps, router, gate_up, down, **some)
    if x.shape[0] == 0:
        return torch.empty_like(x)
    x = as_rows(x)
    h = rms_norm_triton(x, norm_weight, eps)
    weights, ids = _routed(h, router, top_k, normalize, torch.int32)
    if tally is not None:
        tally.ids(ids)
    return Step(x, gate_up, down, top_k, config_of(gate_up)).grouped(h, weights, ids, x, ROWS)


def aot_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Products, attention and experts at one row and at many, in the formats of the reference geometries."""
    for name in ("bf16", "fp8", "int8", "int4"):
        for t in (1, 300):
            x, residual = meta.tensor(t, 2560), meta.tensor(t, 2560)
            norm, gate, down = meta.tensor(2560), meta.weight(name, 2 * 9728, 2560), meta.weight(name, 2560, 9728)
            yield f"gate-up-{name}-{t}", partial(linear_invariant, x, gate, norm_weight=norm, silu_mul=True)
            wide = meta.tensor(t, 9728)
            yield f"down-{name}-{t}", partial(linear_invariant, wide, down, residual=residual)
    yield "head", partial(lm_head_invariant, meta.tensor(1, 2560), meta.weight("fp8", 151936, 2560), norm, 1e-6)
    lens, tables = meta.tensor(2, dtype=torch.int32), meta.tensor(2, 128, dtype=torch.int32)
    starts = meta.tensor(3, dtype=torch.int32)
    for kv in (torch.float8_e4m3fn, torch.bfloat16, torch.float32):
        cache = meta.tensor(4096, 16, 4, 128, dtype=kv)
        for q_len in (1, 512):
            q = meta.tensor(2 * q_len, 32, 128)
            call = partial(paged_attention_invariant, q, cache, cache, tables, lens, starts)
            yield f"attention-{q_len}-{kv}".replace("torch.", ""), partial(call, max_q_len=q_len, scale=0.1)
    for tokens in (1, 512):
        x, router, norm = meta.tensor(tokens, 2560), meta.tensor(64, 2560), meta.tensor(2560)
        experts = meta.weight("fp8", 64 * 2 * 1024, 2560), meta.weight("fp8", 64 * 2560, 1024)
        block = partial(moe_block_invariant, x, norm, 1e-6, router, *experts, top_k=8, normalize=True)
        yield f"moe-{tokens}", block
