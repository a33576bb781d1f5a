"""A mixture of experts in Triton: routing, the experts, and the whole MLP half of a layer with norm and residual.

Contracts: `kernels/router_topk.py` and `kernels/moe_mlp.py`. Three regimes, chosen by the number of tokens alone:

* one token: logits -> gate/up+SiLU -> down with the sum over experts and the residual, three kernels;
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
import triton
from torch import Tensor

from strata_lab.kernels.gpu import launch
from strata_lab.kernels.gpu.moe_config import (
    COLUMNS,
    COMPARED,
    CONFIGS,
    DECODE_TOKENS,
    ROUTE_TOKENS,
    WARP,
    MoeConfig,
)
from strata_lab.kernels.gpu.moe_decode import combine_kernel, down_one_kernel, expert_kernel
from strata_lab.kernels.gpu.moe_grouped import grouped_kernel, sort_kernel
from strata_lab.kernels.gpu.moe_route import (
    logits_dot_kernel,
    logits_kernel,
    norm_kernel,
    plan_kernel,
    select_kernel,
)
from strata_lab.kernels.moe_mlp import moe_mlp_ref
from strata_lab.kernels.rms_norm import rms_norm_ref
from strata_lab.kernels.router_topk import router_topk_ref
from strata_lab.quant.base import LinearWeight


def router_topk_triton(x: Tensor, router: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """`router_topk_ref`: x [T, hidden], router [E, hidden] -> weights [T, top_k] float32 and ids [T, top_k] int64."""
    x = _rows(x)
    weights, ids = _outputs(x, top_k, torch.int64)
    if x.shape[0] == 0:
        return weights, ids
    logits, _ = _logits(x, None, 0.0, router)
    _select(logits, weights, ids, normalize, None)
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
    step = _Step(_rows(x), gate_up, down, expert_ids.shape[1], config)
    weights, expert_ids = weights.contiguous(), expert_ids.contiguous()
    if step.tokens > DECODE_TOKENS:
        return step.grouped(step.x, weights, expert_ids, None)
    if step.tokens == 1:
        return step.decode("ids", weights, expert_ids, residual=None)
    plan = step.empty_plan()
    grid = triton.next_power_of_2(step.tokens)
    plan_kernel[(1,)](
        expert_ids, *plan, step.tokens, E_BLOCK=triton.next_power_of_2(step.experts), T_BLOCK=grid,
        TOP_K=step.top_k, M=step.config.pairs, **launch.options(x.device),
    )  # fmt: skip
    return step.decode("plan", weights, expert_ids, plan=plan, residual=None)


def moe_block_triton(
    x: Tensor, norm_weight: Tensor, eps: float, router: Tensor, gate_up: LinearWeight, down: LinearWeight,
    *, top_k: int, normalize: bool, config: MoeConfig | None = None,
) -> Tensor:  # fmt: skip
    """x + experts(rms_norm(x)) of x [T, hidden]: norm, routing, experts and residual of one layer.

    The norm is rounded to x's dtype, as the norm operator does it.
    """
    if gate_up.format == "fp32":
        h = rms_norm_ref(x, norm_weight, eps)
        return x + moe_mlp_ref(h, gate_up, down, *router_topk_ref(h, router, top_k, normalize))
    if x.shape[0] == 0:
        return torch.empty_like(x)
    x = _rows(x)
    step = _Step(x, gate_up, down, top_k, config)
    weights, ids = _outputs(x, top_k, torch.int32)
    if step.tokens > DECODE_TOKENS:
        h = _normalized(x, norm_weight, eps)
        logits, _ = _logits(h, None, 0.0, router)
        _select(logits, weights, ids, normalize, None)
        return step.grouped(h, weights, ids, x)
    logits, step.x = _logits(x, norm_weight, eps, router)
    if step.tokens == 1 and step.config.fuse_down:
        return step.decode("logits", weights, ids, logits=logits, normalize=normalize, residual=x)
    plan = step.empty_plan()
    _select(logits, weights, ids, normalize, plan, step.config.pairs)
    return step.decode("plan", weights, ids, plan=plan, residual=x)


class _Step:
    """One call of the experts: shapes, configuration and the launches that both routings share."""

    def __init__(
        self, x: Tensor, gate_up: LinearWeight, down: LinearWeight, top_k: int, config: MoeConfig | None
    ) -> None:
        assert gate_up.layout == down.layout == "rows" and gate_up.format == down.format, (gate_up.format, down.format)
        self.x, self.dtype, self.gate_up, self.down, self.top_k = x, x.dtype, gate_up, down, top_k
        self.tokens, self.hidden = x.shape
        self.experts, self.width = down.shape[0] // self.hidden, down.shape[1]
        self.pairs = self.tokens * top_k
        self.format = gate_up.format
        self.config = config or CONFIGS[self.format]
        self.chunk_codes = 8 if self.format == "bf16" else 16  # elements of `data` in 16 bytes
        # what h and y are kept in: bfloat16 loses nothing in range, float16 would
        self.inner = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.x.device)

    @property
    def max_entries(self) -> int:
        """Most entries that a plan can have."""
        m = self.config.pairs
        return min(self.pairs, (self.pairs + (m - 1) * self.experts) // m)

    def empty_plan(self) -> tuple[Tensor, Tensor, Tensor]:
        """Room for experts, pairs and count (see `moe_route`)."""
        entries = self.max_entries
        room = self.empty(entries * (1 + self.config.pairs) + 1, dtype=torch.int32)
        return room[:entries], room[entries:-1], room[-1:]

    def decode(
        self, source: str, weights: Tensor, ids: Tensor, *, residual: Tensor | None, logits: Tensor | None = None,
        plan: tuple[Tensor, Tensor, Tensor] | None = None, normalize: bool = True,
    ) -> Tensor:  # fmt: skip
        """Few tokens. `source` as in `expert_kernel`."""
        c = self.config
        h = self.empty(self.pairs, self.width, dtype=self.inner)
        out = self.empty(self.tokens, self.hidden, dtype=self.dtype)
        experts, pairs, count = plan or (ids, None, None)
        common = {
            "logits_ptr": logits, "experts_ptr": experts, "pairs_ptr": pairs, "count_ptr": count, "E": self.experts,
            "E_BLOCK": triton.next_power_of_2(self.experts), "TOP_K": self.top_k, "SOURCE": source,
            "M": 1 if plan is None else c.pairs, "FORMAT": self.format, "HOLD": c.hold,
        }  # fmt: skip
        tiles = c.gate_tiles if plan is None else c.shared_gate_tiles
        self._products(
            self.gate_up, self.x, h, self.width, tiles, c.gate_warps, c.gate_programs, GATED=True, **common
        )  # fmt: skip
        if self.tokens == 1 and source != "plan":
            self._down_one(h, out, weights, ids, logits, source, normalize, residual)
            return out
        y = self.empty(self.pairs, self.hidden, dtype=torch.float32)
        self._products(
            self.down, h, y, self.hidden, c.down_tiles, c.down_warps, c.down_programs, GATED=False, **common
        )  # fmt: skip
        self._combine(y, weights, out, residual)
        return out

    def _chunks(self, w: LinearWeight) -> tuple[int, int]:
        """Chunks of 16 bytes in a row of `w`, and the power of two to round them up to."""
        chunks = -(-w.shape[1] // COLUMNS[self.format])
        return chunks, triton.next_power_of_2(chunks)

    def _products(
        self, w: LinearWeight, x: Tensor, out: Tensor, rows: int, tiles: int, warps: int, programs: int, **rest: Any
    ) -> None:
        chunks, padded = self._chunks(w)
        single = rest["SOURCE"] != "plan"
        grid = (self.top_k if single else self.max_entries) * -(-rows // (tiles * warps))
        if not single:
            grid = min(grid, launch.num_sms(x.device) * programs)
        expert_kernel[(grid,)](
            x_ptr=x, data_ptr=w.data, scales_ptr=w.scales, mins_ptr=w.mins, out_ptr=out, x_stride=x.stride(0),
            ROWS=rows, K=w.shape[1], CHUNKS=chunks, Q=tiles, R=warps, C=min(WARP, padded), WIDTH=self.chunk_codes,
            **rest, **launch.options(x.device, num_warps=warps),
        )  # fmt: skip

    def _down_one(
        self, h: Tensor, out: Tensor, weights: Tensor, ids: Tensor, logits: Tensor | None, source: str,
        normalize: bool, residual: Tensor | None,
    ) -> None:  # fmt: skip
        w, c = self.down, self.config
        chunks, padded = self._chunks(w)
        span = min(c.one_warps * WARP, padded)
        slots = triton.next_power_of_2(self.top_k)
        down_one_kernel[(-(-self.hidden // c.one_rows),)](
            residual, h, w.data, w.scales, w.mins, logits, ids, weights, out, HIDDEN=self.hidden, K=w.shape[1],
            CHUNKS=chunks, SPAN=span, E=self.experts, E_BLOCK=triton.next_power_of_2(self.experts), TOP_K=self.top_k,
            SLOTS=slots, NORMALIZE=normalize, SOURCE=source, RESIDUAL=residual is not None, HOLD=c.hold, Q=c.one_rows,
            C=min(c.one_warps * WARP, slots * span), WIDTH=self.chunk_codes, FORMAT=self.format,
            **launch.options(h.device, num_warps=c.one_warps),
        )  # fmt: skip

    def _combine(self, y: Tensor, weights: Tensor, out: Tensor, residual: Tensor | None) -> None:
        block = 256
        combine_kernel[(self.tokens, -(-self.hidden // block))](
            residual, y, weights, out, 0 if residual is None else residual.stride(0), HIDDEN=self.hidden,
            TOP_K=self.top_k, RESIDUAL=residual is not None, BLOCK=block, **launch.options(y.device, num_warps=2),
        )  # fmt: skip

    def grouped(self, x: Tensor, weights: Tensor, ids: Tensor, residual: Tensor | None) -> Tensor:
        """Many tokens x [T, hidden], normalized already; `residual` is added to the result."""
        c, device = self.config, x.device
        order = self.empty(self.pairs, dtype=torch.int32)
        offsets = self.empty(self.experts + 1, dtype=torch.int32)
        sort_kernel[(self.experts,)](
            ids, order, offsets, self.pairs, E=self.experts, BLOCK=1024, **launch.options(device)
        )  # fmt: skip
        h = self.empty(self.pairs, self.width, dtype=self.inner)
        y = self.empty(self.pairs, self.hidden, dtype=self.inner)
        # a tile wider than an expert's share is mostly padding
        wide = x.dtype != torch.bfloat16  # split in two: twice the shared memory, more registers
        block_t = min(32 if wide else c.block_t, max(16, triton.next_power_of_2(self.pairs // self.experts)))
        tiles = -(-self.pairs // block_t) + self.experts
        warps, stages = (8, 2) if wide else (c.grouped_warps, c.grouped_stages)
        for w, source, out, rows in ((self.gate_up, x, h, self.width), (self.down, h, y, self.hidden)):
            grouped_kernel[(tiles, -(-rows // c.block_n))](
                source, w.data, w.scales, w.mins, order, offsets, out, source.stride(0), ROWS=rows, K=w.shape[1],
                E=self.experts, E_BLOCK=triton.next_power_of_2(self.experts), TOP_K=self.top_k,
                GATED=w is self.gate_up, BLOCK_N=c.block_n, BLOCK_T=block_t, BLOCK_K=c.block_k, FORMAT=w.format,
                DOT=launch.dot_dtype(torch.bfloat16),
                SPLIT=wide and not launch.INTERPRETED,
                **launch.options(device, num_warps=warps, num_stages=stages),
            )  # fmt: skip
        out = torch.empty_like(x)
        self._combine(y, weights, out, residual)
        return out


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _outputs(x: Tensor, top_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], top_k)
    weights = torch.empty(shape, dtype=torch.float32, device=x.device)
    return weights, torch.empty(shape, dtype=dtype, device=x.device)


def _normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    tokens, hidden = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    norm_kernel[(tokens,)](
        x, weight, out, x.stride(0), eps, HIDDEN=hidden, BLOCK=triton.next_power_of_2(hidden),
        **launch.options(x.device),
    )  # fmt: skip
    return out


def _logits(x: Tensor, norm_weight: Tensor | None, eps: float, router: Tensor) -> tuple[Tensor, Tensor]:
    """Router logits [T, E] float32 and what they are the logits of: x, or (few tokens only) its norm in float32."""
    tokens, hidden = x.shape
    experts = router.shape[0]
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    if tokens <= DECODE_TOKENS:
        h = None if norm_weight is None else torch.empty(x.shape, dtype=torch.float32, device=x.device)
        logits_kernel[(experts, tokens)](
            x, norm_weight, router, logits, h, x.stride(0), eps, HIDDEN=hidden, E=experts,
            NORM=norm_weight is not None, BLOCK=triton.next_power_of_2(hidden), **launch.options(x.device),
        )  # fmt: skip
        return logits, x if h is None else h
    widest = x.dtype if x.dtype == router.dtype else torch.float32
    logits_dot_kernel[(-(-tokens // ROUTE_TOKENS),)](
        x, router, logits, tokens, x.stride(0), HIDDEN=hidden, E=experts,
        E_BLOCK=max(16, triton.next_power_of_2(experts)), BLOCK_T=ROUTE_TOKENS, BLOCK_K=64,
        DOT=launch.dot_dtype(widest), **launch.options(x.device),
    )  # fmt: skip
    return logits, x


def _select(
    logits: Tensor, weights: Tensor, ids: Tensor, normalize: bool, plan: tuple[Tensor, ...] | None, m: int = 1
) -> None:
    tokens, experts = logits.shape
    e_block = triton.next_power_of_2(experts)
    t_block = min(ROUTE_TOKENS, triton.next_power_of_2(tokens))
    j_block = max(1, min(e_block, COMPARED // (t_block * e_block)))
    select_kernel[(-(-tokens // t_block),)](
        logits, weights, ids, *(plan or (None, None, None)), tokens, E=experts, E_BLOCK=e_block, T_BLOCK=t_block,
        J_BLOCK=j_block, TOP_K=weights.shape[1], NORMALIZE=normalize, PLAN=plan is not None, M=m,
        **launch.options(logits.device, num_warps=8),
    )  # fmt: skip


def aot_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The reference geometry at the batch sizes that take different kernels."""
    for name in ("fp8", "bf16", "int8", "int4"):
        for tokens in (1, 8, 16, 512) if name == "fp8" else (1, 8, 512):
            yield f"block-{name}-{tokens}", partial(_meta_block, name, tokens, torch.bfloat16)
    yield "block-fp8-1-float32", partial(_meta_block, "fp8", 1, torch.float32)
    yield "block-fp8-8-float32", partial(_meta_block, "fp8", 8, torch.float32)
    yield "block-fp8-512-float32", partial(_meta_block, "fp8", 512, torch.float32)
    for tokens in (1, 8):
        yield f"mlp-fp8-{tokens}", partial(_meta_mlp, tokens)
    yield "router-512", partial(_meta_router, 512)


_EXPERTS, _TOP_K, _HIDDEN, _WIDTH = 64, 8, 2560, 1024  # `qwen3.8-flash`


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _meta_weight(name: str, rows: int, columns: int) -> LinearWeight:
    data = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}[name]
    stored = _meta(rows, columns // 2 if name == "int4" else columns, dtype=data)
    if name == "bf16":
        return LinearWeight(name, (rows, columns), stored)
    if name == "fp8":
        return LinearWeight(name, (rows, columns), stored, _meta(rows, 1, dtype=torch.float32))
    scales = _meta(rows, columns // 32, dtype=torch.float16)
    return LinearWeight(name, (rows, columns), stored, scales, scales if name == "int4" else None, 32)


def _meta_experts(name: str) -> tuple[LinearWeight, LinearWeight]:
    return _meta_weight(name, _EXPERTS * 2 * _WIDTH, _HIDDEN), _meta_weight(name, _EXPERTS * _HIDDEN, _WIDTH)


def _meta_block(name: str, tokens: int, dtype: torch.dtype) -> Tensor:
    x, router = _meta(tokens, _HIDDEN, dtype=dtype), _meta(_EXPERTS, _HIDDEN, dtype=dtype)
    norm = _meta(_HIDDEN, dtype=dtype)
    return moe_block_triton(x, norm, 1e-6, router, *_meta_experts(name), top_k=_TOP_K, normalize=True)


def _meta_mlp(tokens: int) -> Tensor:
    weights = _meta(tokens, _TOP_K, dtype=torch.float32)
    ids = _meta(tokens, _TOP_K, dtype=torch.int64)
    return moe_mlp_triton(_meta(tokens, _HIDDEN, dtype=torch.bfloat16), *_meta_experts("fp8"), weights, ids)


def _meta_router(tokens: int) -> tuple[Tensor, Tensor]:
    x, router = (_meta(rows, _HIDDEN, dtype=torch.bfloat16) for rows in (tokens, _EXPERTS))
    return router_topk_triton(x, router, _TOP_K, True)
