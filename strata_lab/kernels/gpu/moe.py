"""A mixture of experts in Triton: routing, the experts, and the whole MLP half of a layer with norm and residual.

Contracts: `kernels/router_topk.py` and `kernels/moe_mlp.py`. Three regimes, chosen by the number of tokens alone:

* one token: logits -> gate/up+SiLU -> down with the sum over experts and the residual (`moe_one.py`);
* up to `DECODE_TOKENS`: logits -> selection and plan -> gate/up+SiLU -> down -> combine (`moe_decode.py`);
* more: norm -> logits -> selection -> sort by expert -> two grouped products -> combine (`moe_grouped.py`).

Bytes at small batch: every distinct expert once. Of the reference geometry in FP8 a token reads 8 experts x 7.9 MB.
Nothing is asked of the host, so a CUDA graph can hold all of it. Weights in fp32 take the plain torch composition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata_lab.kernels.gpu import meta
from strata_lab.kernels.gpu.elementwise import rms_norm_triton
from strata_lab.kernels.gpu.moe_config import CONFIGS, DECODE_TOKENS, MoeConfig, config_name
from strata_lab.kernels.gpu.moe_step import Step, as_rows, count_choices, empty_routing, route_logits, select
from strata_lab.kernels.moe_block import moe_block_ref
from strata_lab.kernels.moe_mlp import moe_mlp_ref
from strata_lab.quant.base import LinearWeight


def router_topk_triton(x: Tensor, router: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """`router_topk_ref`: x [T, hidden], router [E, hidden] -> weights [T, top_k] float32 and ids [T, top_k] int64."""
    x = as_rows(x)
    weights, ids = empty_routing(x, top_k, torch.int64)
    if x.shape[0] == 0:
        return weights, ids
    select(route_logits(x, router), weights, ids, normalize)
    return weights, ids


def moe_mlp_triton(
    x: Tensor, gate_up: LinearWeight, down: LinearWeight, weights: Tensor, expert_ids: Tensor,
    *, config: MoeConfig | None = None,
) -> Tensor:  # fmt: skip
    """`moe_mlp_ref`: the chosen experts of x [T, hidden], added up by weight -> [T, hidden]."""
    if gate_up.format == "fp32":
        return moe_mlp_ref(x, gate_up, down, weights, expert_ids)
    if x.shape[0] == 0:
        return torch.empty_like(x)
    step = Step(as_rows(x), gate_up, down, expert_ids.shape[1], config or config_of(gate_up))
    weights, expert_ids = weights.contiguous(), expert_ids.contiguous()
    if step.tokens > DECODE_TOKENS:
        return step.grouped(step.x, weights, expert_ids, None)
    if step.tokens == 1:
        return step.decode("ids", weights, expert_ids)
    return step.decode("plan", weights, expert_ids, plan=step.planned(expert_ids))


def moe_block_triton(
    x: Tensor, norm_weight: Tensor, eps: float, router: Tensor, gate_up: LinearWeight, down: LinearWeight,
    *, top_k: int, normalize: bool, config: MoeConfig | None = None, tally: Any = None,
) -> Tensor:  # fmt: skip
    """x + experts(rms_norm(x)) of x [T, hidden]: norm, routing, experts and residual of one layer.

    The norm is rounded to x's dtype, as the norm operator does it.
    """
    if gate_up.format == "fp32":
        return moe_block_ref(x, norm_weight, eps, router, gate_up, down, top_k=top_k, normalize=normalize, tally=tally)
    if x.shape[0] == 0:
        return torch.empty_like(x)
    x = as_rows(x)
    step = Step(x, gate_up, down, top_k, config or config_of(gate_up))
    weights, ids = empty_routing(x, top_k, torch.int32)
    if step.tokens > DECODE_TOKENS:
        h = rms_norm_triton(x, norm_weight, eps)
        select(route_logits(h, router), weights, ids, normalize)
        if tally is not None:
            tally.ids(ids)
        return step.grouped(h, weights, ids, x)
    logits = step.norm_logits(norm_weight, eps, router)
    if tally is not None:
        tally.logits(logits, top_k)
    if step.tokens == 1 and step.config.fuse_down:
        return step.decode("logits", weights, ids, logits=logits, normalize=normalize, residual=x)
    plan = step.empty_plan()
    select(logits, weights, ids, normalize, plan, step.config.pairs)
    return step.decode("plan", weights, ids, plan=plan, residual=x)


def config_of(weight: LinearWeight) -> MoeConfig:
    """What experts like these run with."""
    return CONFIGS[config_name(weight)]


def aot_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The reference geometry at the batch sizes that take different kernels."""
    for name in ("fp8", "bf16", "int8", "int4", "int4g128", "int8row", "fp8g128"):
        for tokens in (1, 8, 16, 512) if name == "fp8" else (1, 8, 512):
            yield f"block-{name}-{tokens}", partial(_meta_block, name, tokens, torch.bfloat16)
    for name, tokens in (("fp8", 1), ("fp8", 8), ("fp8", 512), ("int8row", 1), ("int8row", 8)):
        yield f"block-{name}-{tokens}-float32", partial(_meta_block, name, tokens, torch.float32)
    for tokens in (1, 8):
        yield f"mlp-fp8-{tokens}", partial(_meta_mlp, tokens)
    yield "router-512", partial(_meta_router, 512)
    yield "count-8", partial(_meta_count, 8)


_EXPERTS, _TOP_K, _HIDDEN, _WIDTH = 64, 8, 2560, 1024  # `qwen3.8-flash`


def _meta_experts(name: str) -> tuple[LinearWeight, LinearWeight]:
    return meta.weight(name, _EXPERTS * 2 * _WIDTH, _HIDDEN), meta.weight(name, _EXPERTS * _HIDDEN, _WIDTH)


def _meta_block(name: str, tokens: int, dtype: torch.dtype) -> Tensor:
    x, router = meta.tensor(tokens, _HIDDEN, dtype=dtype), meta.tensor(_EXPERTS, _HIDDEN, dtype=dtype)
    norm = meta.tensor(_HIDDEN, dtype=dtype)
    return moe_block_triton(x, norm, 1e-6, router, *_meta_experts(name), top_k=_TOP_K, normalize=True)


def _meta_mlp(tokens: int) -> Tensor:
    weights = meta.tensor(tokens, _TOP_K, dtype=torch.float32)
    ids = meta.tensor(tokens, _TOP_K, dtype=torch.int64)
    return moe_mlp_triton(meta.tensor(tokens, _HIDDEN, dtype=torch.bfloat16), *_meta_experts("fp8"), weights, ids)


def _meta_router(tokens: int) -> tuple[Tensor, Tensor]:
    x, router = (meta.tensor(rows, _HIDDEN, dtype=torch.bfloat16) for rows in (tokens, _EXPERTS))
    return router_topk_triton(x, router, _TOP_K, True)


def _meta_count(tokens: int) -> None:
    logits, slots = meta.tensor(tokens, _EXPERTS, dtype=torch.float32), meta.tensor(tokens, dtype=torch.int64)
    count_choices(logits, slots, meta.tensor(_EXPERTS, dtype=torch.int64), _TOP_K)
