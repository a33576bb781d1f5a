"""One call of the expert kernels: shapes, configuration, buffers and launches that all routings share."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
from torch import Tensor

from strata_lab.kernels.gpu import launch
from strata_lab.kernels.gpu.moe_config import (
    COLUMNS,
    COMPARED,
    DECODE_TOKENS,
    ROUTE_TOKENS,
    SELECT_WARPS,
    WARP,
    MoeConfig,
)
from strata_lab.kernels.gpu.moe_decode import combine_kernel, expert_kernel
from strata_lab.kernels.gpu.moe_grouped import grouped_kernel, sort_kernel
from strata_lab.kernels.gpu.moe_half import GROUP
from strata_lab.kernels.gpu.moe_one import down_one_kernel
from strata_lab.kernels.gpu.moe_route import (
    count_kernel,
    logits_dot_kernel,
    logits_kernel,
    plan_kernel,
    select_kernel,
)
from strata_lab.quant.base import LinearWeight

Plan = tuple[Tensor, Tensor, Tensor]  # experts, pairs and count, see `moe_route`


@dataclasses.dataclass(frozen=True)
class Routed:
    """Who knows the experts of a step.

    Attributes:
        source: "logits", "ids" (both for one token only) or "plan".
        weights, ids: [T, top_k]; with "logits" not read.
        logits: [T, E] of "logits".
        normalize: whether weights made of logits add up to 1.
        plan: of "plan".
    """

    source: str
    weights: Tensor
    ids: Tensor
    logits: Tensor | None = None
    normalize: bool = True
    plan: Plan | None = None


class Step:
    """The experts of x [T, hidden]; `norm_logits` replaces x by its norm."""

    def __init__(self, x: Tensor, gate_up: LinearWeight, down: LinearWeight, top_k: int, config: MoeConfig) -> None:
        assert gate_up.layout == down.layout == "rows" and gate_up.format == down.format, (gate_up.format, down.format)
        self.x, self.dtype, self.gate_up, self.down, self.top_k, self.config = x, x.dtype, gate_up, down, top_k, config
        self.tokens, self.hidden = x.shape
        self.experts, self.width = down.shape[0] // self.hidden, down.shape[1]
        self.pairs = self.tokens * top_k
        self.format = gate_up.format
        self.chunk_codes = 8 if self.format == "bf16" else 16  # elements of `data` in 16 bytes
        # what h and y are kept in: bfloat16 loses nothing in range, float16 would
        self.inner = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
        self.unit: Tensor | None = None  # [T], of a float16 x; then the kernels multiply in float16

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Unwritten memory where x is."""
        return torch.empty(shape, dtype=dtype, device=self.x.device)

    def norm_logits(self, norm_weight: Tensor, eps: float, router: Tensor) -> Tensor:
        """Router logits [T, E] of the norm of x, for few tokens."""
        c = self.config
        rows = min(c.gate_tiles * c.gate_warps, c.shared_tiles * c.shared_warps)
        exact = self.format in ("fp8", "int8", "int4") and self.gate_up.mins is None and self.down.mins is None
        half = c.half and exact and self.dtype != torch.float32 and rows % GROUP == 0 and self._whole
        h = torch.empty(self.x.shape, dtype=torch.float16 if half else torch.float32, device=self.x.device)
        self.unit = self.empty(self.tokens, dtype=torch.float32) if half else None
        logits = few_logits(self.x, router, norm_weight, eps, h, self.unit, self.format == "int4")
        self.x = h
        return logits

    @property
    def _whole(self) -> bool:
        """Whether every thread holds 16 columns of a row in order, as `moe_half` needs: rows of whole wide tiles."""
        if launch.INTERPRETED:  # has no threads, but whole fours of int4's activations change places
            return self.format != "int4" or (self.hidden % 4 == 0 and self.width % 4 == 0)
        (_, across), (_, down) = self._chunks(self.gate_up), self._chunks(self.down)
        one = triton.next_power_of_2(self.top_k) * min(self.config.one_warps * WARP, down)
        aligned = self.hidden % COLUMNS[self.format] == 0 and self.width % COLUMNS[self.format] == 0
        return aligned and min(across, down) >= WARP and one >= self.config.one_warps * WARP

    @property
    def max_entries(self) -> int:
        """Most entries that a plan can have."""
        m = self.config.pairs
        return min(self.pairs, (self.pairs + (m - 1) * self.experts) // m)

    def empty_plan(self) -> Plan:
        """Room for a plan, in one allocation."""
        entries = self.max_entries
        room = self.empty(entries * (1 + self.config.pairs) + 1, dtype=torch.int32)
        return room[:entries], room[entries:-1], room[-1:]

    def planned(self, ids: Tensor) -> Plan:
        """The plan of given ids [T, top_k]."""
        plan = self.empty_plan()
        plan_kernel[(1,)](
            ids, *plan, self.tokens, E_BLOCK=triton.next_power_of_2(self.experts),
            T_BLOCK=triton.next_power_of_2(self.tokens), TOP_K=self.top_k, M=self.config.pairs,
            **launch.options(ids.device),
        )  # fmt: skip
        return plan

    def decode(
        self, source: str, weights: Tensor, ids: Tensor, *, residual: Tensor | None = None,
        logits: Tensor | None = None, plan: Plan | None = None, normalize: bool = True,
    ) -> Tensor:  # fmt: skip
        """All that follows the routing, for few tokens."""
        routed = Routed(source, weights, ids, logits, normalize, plan)
        h, units = self.hidden_units(routed)
        if self.tokens == 1 and source != "plan":
            return self.down_one(h, units, routed, residual)
        return self.combine(self.down_pairs(h, units, routed), weights, residual)

    def hidden_units(self, routed: Routed) -> tuple[Tensor, Tensor | None]:
        """h [pairs, width] = silu(gate x) * (up x), and if that is float16 its units [pairs, width / 8]."""
        c, half = self.config, self.unit is not None
        h = self.empty(self.pairs, self.width, dtype=torch.float16 if half else self.inner)
        units = self.empty(self.pairs, -(-self.width // GROUP), dtype=torch.float32) if half else None
        tiles, warps, programs, registers = (
            (c.gate_tiles, c.gate_warps, c.gate_programs, c.gate_registers)
            if routed.plan is None
            else (c.shared_tiles, c.shared_warps, c.shared_programs, c.shared_registers)
        )
        self._products(
            routed, self.gate_up, self.x, self.unit, h, units, self.width, tiles, warps, programs, registers
        )  # fmt: skip
        return h, units

    def down_pairs(self, h: Tensor, units: Tensor | None, routed: Routed) -> Tensor:
        """y [pairs, hidden] float32."""
        c = self.config
        y = self.empty(self.pairs, self.hidden, dtype=torch.float32)
        self._products(
            routed, self.down, h, units, y, None, self.hidden,
            c.down_tiles, c.down_warps, c.down_programs, c.down_registers,
        )  # fmt: skip
        return y

    def _chunks(self, w: LinearWeight) -> tuple[int, int]:
        """Chunks of 16 bytes in a row of `w`, and the power of two to round them up to."""
        chunks = -(-w.shape[1] // COLUMNS[self.format])
        return chunks, triton.next_power_of_2(chunks)

    def _options(self, warps: int, registers: int | None, early: bool) -> dict[str, Any]:
        """Limits of registers are made for what the configuration is made for: float32 products need more."""
        measured = self.gate_up.group_size == 0 or self.format != "fp8"  # scales of groups take registers
        limited = registers and measured and (self.unit is not None or not self.config.half)
        limited = limited and launch.has_measured_limits(self.x.device)
        options = launch.options(self.x.device, num_warps=warps, early=early)
        return options | ({"maxnreg": registers} if limited else {})

    def _products(
        self, routed: Routed, w: LinearWeight, x: Tensor, unit: Tensor | None, out: Tensor, out_unit: Tensor | None,
        rows: int, tiles: int, warps: int, programs: int, registers: int | None,
    ) -> None:  # fmt: skip
        chunks, padded = self._chunks(w)
        experts, pairs, count = routed.plan or (routed.ids, None, None)
        grid = (self.top_k if routed.plan is None else self.max_entries) * -(-rows // (tiles * warps))
        if programs:
            grid = min(grid, launch.num_sms(x.device) * programs)
        expert_kernel[(grid,)](
            x, unit, w.data, w.scales, w.mins, routed.logits, experts, pairs, count, out, out_unit, x.stride(0),
            ROWS=rows, K=w.shape[1], CHUNKS=chunks, E=self.experts, E_BLOCK=triton.next_power_of_2(self.experts),
            TOP_K=self.top_k, SOURCE=routed.source, GATED=w is self.gate_up, HOLD=self.config.hold,
            M=1 if routed.plan is None else self.config.pairs, Q=tiles, R=warps, C=min(WARP, padded),
            WIDTH=self.chunk_codes, FORMAT=self.format, GROUP=w.group_size, HALF=unit is not None,
            ASM=not launch.INTERPRETED,
            # LATE where gated: what follows reads the routing before it waits
            **self._options(warps, registers, early=w is self.down),
        )  # fmt: skip

    def down_one(self, h: Tensor, units: Tensor | None, routed: Routed, residual: Tensor | None) -> Tensor:
        """The result of one token [1, hidden]: down, the sum over its experts and the residual."""
        w, c = self.down, self.config
        out = self.empty(1, self.hidden, dtype=self.dtype)
        chunks, padded = self._chunks(w)
        span = min(c.one_warps * WARP, padded)
        slots = triton.next_power_of_2(self.top_k)
        q = c.one_rows if units is not None or not c.half else -(-c.one_rows // 2)  # float32 products need registers
        down_one_kernel[(-(-self.hidden // q),)](
            residual, h, units, w.data, w.scales, w.mins, routed.logits, routed.ids, routed.weights, out,
            HIDDEN=self.hidden, K=w.shape[1], CHUNKS=chunks, SPAN=span, E=self.experts,
            E_BLOCK=triton.next_power_of_2(self.experts), TOP_K=self.top_k, SLOTS=slots, NORMALIZE=routed.normalize,
            SOURCE=routed.source, RESIDUAL=residual is not None, HOLD=c.hold,
            LATE=c.one_late and w.scales is not None and w.group_size == 0, Q=q,
            C=min(c.one_warps * WARP, slots * span), WIDTH=self.chunk_codes, FORMAT=self.format, GROUP=w.group_size,
            HALF=units is not None, ASM=not launch.INTERPRETED,
            **self._options(c.one_warps, c.one_registers, early=True),
        )  # fmt: skip
        return out

    def combine(self, y: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        """Sums of y [pairs, hidden] by weight, plus the residual: [T, hidden]."""
        block = 256
        out = self.empty(self.tokens, self.hidden, dtype=self.dtype)
        combine_kernel[(self.tokens, -(-self.hidden // block))](
            residual, y, weights, out, 0 if residual is None else residual.stride(0), HIDDEN=self.hidden,
            TOP_K=self.top_k, RESIDUAL=residual is not None, BLOCK=block,
            **launch.options(y.device, num_warps=2, early=True),
        )  # fmt: skip
        return out

    def grouped(
        self, x: Tensor, weights: Tensor, ids: Tensor, residual: Tensor | None, block_t: int | None = None
    ) -> Tensor:
        """Many tokens x [T, hidden], normalized already; `residual` is added to the result.

        `block_t`: pairs of a tile; by their number if None.
        """
        c, device = self.config, x.device
        order = self.empty(self.pairs, dtype=torch.int32)
        offsets = self.empty(self.experts + 1, dtype=torch.int32)
        sort_kernel[(self.experts,)](
            ids, order, offsets, self.pairs, E=self.experts, BLOCK=1024, **launch.options(device)
        )  # fmt: skip
        h = self.empty(self.pairs, self.width, dtype=self.inner)
        y = self.empty(self.pairs, self.hidden, dtype=self.inner)
        # a tile wider than an expert's share is mostly padding
        terms = {torch.bfloat16: 1, torch.float16: 2}.get(x.dtype, 3)  # bfloat16 numbers that make an element of x
        wide = terms > 1  # more shared memory, more registers
        share = max(16, triton.next_power_of_2(self.pairs // self.experts))
        block_t = block_t or min(32 if wide else c.block_t, share)
        tiles = -(-self.pairs // block_t) + self.experts
        warps, stages = (8, 2) if wide else (c.grouped_warps, c.grouped_stages)
        for w, source, out, rows in ((self.gate_up, x, h, self.width), (self.down, h, y, self.hidden)):
            grouped_kernel[(tiles, -(-rows // c.block_n))](
                source, w.data, w.scales, w.mins, order, offsets, out, source.stride(0), ROWS=rows, K=w.shape[1],
                E=self.experts, E_BLOCK=triton.next_power_of_2(self.experts), TOP_K=self.top_k,
                GATED=w is self.gate_up, BLOCK_N=c.block_n, BLOCK_T=block_t, BLOCK_K=_step_columns(w, c.block_k, wide),
                FORMAT=w.format, GROUP=w.group_size, DOT=launch.dot_dtype(torch.bfloat16),
                TERMS=1 if launch.INTERPRETED else terms,
                **launch.options(device, num_warps=warps, num_stages=stages),
            )  # fmt: skip
        return self.combine(y, weights, residual)


def _step_columns(w: LinearWeight, block_k: int, wide: bool) -> int:
    """Columns of a step of a grouped product, which must not cross the end of a group; what needs registers: fewer."""
    narrow = w.mins is not None or (wide and w.group_size > 0)
    return min(block_k, 32 if narrow else w.group_size or block_k)


def as_rows(x: Tensor) -> Tensor:
    """x with adjacent columns."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_routing(x: Tensor, top_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for weights [T, top_k] float32 and ids [T, top_k]."""
    shape = (x.shape[0], top_k)
    weights = torch.empty(shape, dtype=torch.float32, device=x.device)
    return weights, torch.empty(shape, dtype=dtype, device=x.device)


def route_logits(x: Tensor, router: Tensor) -> Tensor:
    """Router logits [T, E] float32 of x as it is."""
    tokens, hidden = x.shape
    if tokens <= DECODE_TOKENS:
        return few_logits(x, router, None, 0.0, None, None)
    experts = router.shape[0]
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    widest = x.dtype if x.dtype == router.dtype else torch.float32
    logits_dot_kernel[(-(-tokens // ROUTE_TOKENS),)](
        x, router, logits, tokens, x.stride(0), HIDDEN=hidden, E=experts,
        E_BLOCK=max(16, triton.next_power_of_2(experts)), BLOCK_T=ROUTE_TOKENS, BLOCK_K=64,
        DOT=launch.dot_dtype(widest), **launch.options(x.device),
    )  # fmt: skip
    return logits


def few_logits(
    x: Tensor, router: Tensor, norm_weight: Tensor | None, eps: float, h: Tensor | None, unit: Tensor | None,
    paired: bool = False,
) -> Tensor:  # fmt: skip
    """Logits [T, E] of x or (with `norm_weight`) its norm, which is then stored in `h`, divided by `unit` if given.

    `paired`: with a unit, in the order that int4 codes meet it in.
    """
    tokens, hidden = x.shape
    experts, norm = router.shape[0], norm_weight is not None
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    logits_kernel[(experts + norm, tokens)](
        x, norm_weight, router, logits, h, unit, x.stride(0), eps, HIDDEN=hidden, E=experts, NORM=norm,
        HALF=unit is not None, PAIRED=paired and unit is not None, BLOCK=triton.next_power_of_2(hidden),
        **launch.options(x.device, early=True),
    )  # fmt: skip
    return logits


def select(
    logits: Tensor, weights: Tensor, ids: Tensor, normalize: bool, plan: Plan | None = None, m: int = 1,
    t_block: int | None = None,
) -> None:  # fmt: skip
    """Weights and ids of logits [T, E], and the plan with `m` pairs to an entry.

    `t_block`: tokens of a program; by their number if None.
    """
    tokens, experts = logits.shape
    e_block = triton.next_power_of_2(experts)
    t_block = t_block or min(ROUTE_TOKENS, triton.next_power_of_2(tokens))
    j_block = max(1, min(e_block, COMPARED // (t_block * e_block)))
    select_kernel[(-(-tokens // t_block),)](
        logits, weights, ids, *(plan or (None, None, None)), tokens, E=experts, E_BLOCK=e_block, T_BLOCK=t_block,
        J_BLOCK=j_block, TOP_K=weights.shape[1], NORMALIZE=normalize, PLAN=plan is not None, M=m,
        **launch.options(logits.device, num_warps=SELECT_WARPS, early=True),
    )  # fmt: skip


def count_choices(logits: Tensor, slots: Tensor, counts: Tensor, top_k: int) -> None:
    """Add to counts [E] int64 what tokens of logits [T, E] choose; one with a negative slot [T] chooses nothing."""
    tokens, experts = logits.shape
    count_kernel[(tokens,)](
        logits, slots, counts, E=experts, E_BLOCK=triton.next_power_of_2(experts), TOP_K=top_k,
        **launch.options(logits.device, early=True),
    )  # fmt: skip
