"""Which experts a token takes, and the lists the expert kernels work from.

Up to `DECODE_TOKENS` tokens: `logits_kernel` has one program per (expert, token) with its router row in registers
before it waits, and norms the token on the way; one more program per token stores the norm. `select_kernel`, one
program, ranks each token's logits by comparing all with all (ties to the lower expert) and writes the plan of the step:
entries of up to `M` (token, slot) pairs that share an expert, the experts ascending. A step of one token needs no plan:
the expert kernels rank its E logits themselves with `best`, which saves a kernel on the critical path. More tokens take
`logits_dot_kernel` and the same selection without a plan. Bytes: the router once (0.3 MB of 64 x 2560) and the tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from strata_lab.kernels.gpu.launch import trigger, wait
from strata_lab.kernels.gpu.moe_half import PEAK
from strata_lab.kernels.gpu.moe_half_int4 import stored_place


@triton.jit
def logits_kernel(
    x_ptr, norm_ptr, router_ptr, logits_ptr, h_ptr, unit_ptr, x_stride, eps,
    HIDDEN: tl.constexpr, E: tl.constexpr, NORM: tl.constexpr, HALF: tl.constexpr, PAIRED: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """logits [T, E] float32 of x [T, HIDDEN]; with NORM those of its RMS norm, which goes to h [T, HIDDEN].

    With NORM there is a program more per token, which stores h: float32, or with HALF float16 and its unit [T];
    PAIRED: in the order that int4 codes meet it in.
    """
    expert, token = tl.program_id(0), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    inside = cols < HIDDEN
    row = tl.load(router_ptr + expert * HIDDEN + cols, mask=inside & (expert < E), other=0.0).to(tl.float32)
    if NORM:
        weight = tl.load(norm_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    trigger(PDL)
    x = tl.load(x_ptr + token.to(tl.int64) * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if NORM:  # rounded as the norm operator rounds, so that fused or not a token takes the same experts
        x *= tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps) * weight
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    if NORM and expert == E:
        if HALF:
            unit = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-30) * (1.0 / PEAK)
            tl.store(unit_ptr + token, unit)
            x /= unit
        place = stored_place(cols) if PAIRED else cols
        tl.store(h_ptr + token * HIDDEN + place, x, mask=inside)  # widened: who reads it often need not convert it
    else:
        tl.store(logits_ptr + token * E + expert, tl.sum(row * x, axis=0))


@triton.jit
def logits_dot_kernel(
    x_ptr, router_ptr, logits_ptr, T, x_stride,
    HIDDEN: tl.constexpr, E: tl.constexpr, E_BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """logits [T, E] of many tokens, BLOCK_T of them per program. float32 operands are multiplied as float32."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, E_BLOCK)
    k = tl.arange(0, BLOCK_K)
    wait(PDL)
    trigger(PDL)
    x_rows = x_ptr + token[None, :].to(tl.int64) * x_stride
    acc = tl.zeros((E_BLOCK, BLOCK_T), dtype=tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        cols = start + k
        inside = cols < HIDDEN
        w = tl.load(router_ptr + expert[:, None] * HIDDEN + cols, mask=(expert < E)[:, None] & inside, other=0.0)
        x = tl.load(x_rows + cols[:, None], mask=(token < T)[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(w.to(DOT), x.to(DOT), acc, input_precision="ieee")
    tl.store(logits_ptr + token[None, :] * E + expert[:, None], acc, mask=(token < T)[None, :] & (expert < E)[:, None])


@triton.jit
def best(logits_ptr, E: tl.constexpr, E_BLOCK: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr):
    """One token: rank [E_BLOCK] of each expert (0 is the best) and its weight; pads rank last with weight 0."""
    e = tl.arange(0, E_BLOCK)
    logit = _finite(tl.load(logits_ptr + e, mask=e < E, other=float("-inf")))
    other = tl.load(logits_ptr + e, mask=e < E, other=float("-inf"))
    # compared along the first axis, which a thread has to itself: no shuffles
    earlier = e[:, None] < e[None, :]
    ahead = _lowest(other)[:, None] > tl.where(earlier, _below(_lowest(logit))[None, :], _lowest(logit)[None, :])
    rank = tl.sum(ahead.to(tl.int32), axis=0)
    p = tl.exp(logit - tl.max(logit, axis=0))
    counted = tl.where(rank < TOP_K, p, 0.0) if NORMALIZE else p
    return rank, p / tl.sum(counted, axis=0)


@triton.jit
def _finite(logit):
    """NaN ranks last: whatever the activations, every slot must name an expert that exists."""
    return tl.where(logit == logit, logit, float("-inf"))


@triton.jit
def _lowest(logit):
    """NaN and -inf become the lowest number there is, which still has one below it."""
    return tl.where(logit > -3.4028234663852886e38, logit, -3.4028234663852886e38)


@triton.jit
def _below(logit):
    """The next lower float32: x > _below(y) is x >= y."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)  # -0 becomes +0
    return tl.where(bits > 0, bits - 1, tl.where(bits == 0, -2147483647, bits + 1)).to(tl.float32, bitcast=True)


@triton.jit
def select_kernel(
    logits_ptr, weights_ptr, ids_ptr, experts_ptr, pairs_ptr, count_ptr, T,
    E: tl.constexpr, E_BLOCK: tl.constexpr, T_BLOCK: tl.constexpr, J_BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr, PLAN: tl.constexpr, M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """weights and ids [T, TOP_K], best first, of logits [T, E]; with PLAN (one program) the plan as well."""
    token = tl.program_id(0) * T_BLOCK + tl.arange(0, T_BLOCK)
    e = tl.arange(0, E_BLOCK)
    wait(PDL)
    trigger(PDL)
    real = (token < T)[:, None] & (e < E)[None, :]
    logit = _finite(tl.load(logits_ptr + token[:, None] * E + e, mask=real, other=float("-inf")))  # [T, E]
    rank = tl.zeros((T_BLOCK, E_BLOCK), dtype=tl.int32)
    for start in range(0, E_BLOCK, J_BLOCK):  # not unrolled: all comparisons at once would spill
        j = start + tl.arange(0, J_BLOCK)
        known = (token < T)[None, :] & (j < E)[:, None]
        other = tl.load(logits_ptr + token[None, :] * E + j[:, None], mask=known, other=float("-inf"))
        earlier = j[:, None, None] < e[None, None, :]
        bound = tl.where(earlier, _below(_lowest(logit))[None, :, :], _lowest(logit)[None, :, :])
        ahead = _lowest(other)[:, :, None] > bound  # [J, T, E]
        rank += tl.sum(ahead.to(tl.int32), axis=0)
    chosen = (rank < TOP_K) & real
    logit = tl.where((token < T)[:, None], logit, 0.0)  # rows past the end divide by 1, not by 0
    p = tl.exp(logit - tl.max(logit, axis=1)[:, None])
    counted = tl.where(chosen | (token >= T)[:, None], p, 0.0) if NORMALIZE else p
    weight = p / tl.sum(counted, axis=1)[:, None]
    pair = token[:, None] * TOP_K + rank
    tl.store(weights_ptr + pair, weight, mask=chosen)
    tl.store(ids_ptr + pair, tl.broadcast_to(e[None, :], (T_BLOCK, E_BLOCK)), mask=chosen)
    if PLAN:
        _write_plan(chosen, pair, experts_ptr, pairs_ptr, count_ptr, E_BLOCK, M)


@triton.jit
def count_kernel(
    logits_ptr, slots_ptr, counts_ptr, E: tl.constexpr, E_BLOCK: tl.constexpr, TOP_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds one to counts [E] int64 for each expert that a token of logits [T, E] takes, unless its slot is negative."""
    token = tl.program_id(0)
    e = tl.arange(0, E_BLOCK)
    wait(PDL)
    trigger(PDL)
    rank, _ = best(logits_ptr + token * E, E, E_BLOCK, TOP_K, False)
    real = tl.load(slots_ptr + token) >= 0
    one = tl.full((E_BLOCK,), 1, dtype=tl.int64)
    tl.atomic_add(counts_ptr + e, one, mask=(rank < TOP_K) & (e < E) & real, sem="relaxed")


@triton.jit
def plan_kernel(
    ids_ptr, experts_ptr, pairs_ptr, count_ptr, T,
    E_BLOCK: tl.constexpr, T_BLOCK: tl.constexpr, TOP_K: tl.constexpr, M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The plan of given ids [T, TOP_K], which do not repeat within a token."""
    token = tl.arange(0, T_BLOCK)
    e = tl.arange(0, E_BLOCK)
    wait(PDL)
    trigger(PDL)
    slot = tl.full((T_BLOCK, E_BLOCK), -1, dtype=tl.int32)
    for s in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + s, mask=token < T, other=-1).to(tl.int32)
        slot = tl.where(expert[:, None] == e[None, :], s, slot)
    _write_plan(slot >= 0, token[:, None] * TOP_K + slot, experts_ptr, pairs_ptr, count_ptr, E_BLOCK, M)


@triton.jit
def _write_plan(chosen, pair, experts_ptr, pairs_ptr, count_ptr, E_BLOCK: tl.constexpr, M: tl.constexpr):
    """Entries: experts [n], pairs [n, M] (token * TOP_K + slot, or -1 where an expert's last entry is not full), n.

    Args:
        chosen: [T, E], whether the token takes the expert.
        pair: [T, E], number of that (token, slot).
        experts_ptr, pairs_ptr, count_ptr: int32.
        E_BLOCK: experts, rounded up.
        M: pairs of an entry.
    """
    e = tl.arange(0, E_BLOCK)
    hit = chosen.to(tl.int32)
    hits = tl.sum(hit, axis=0)
    entries = (hits + M - 1) // M
    first = tl.cumsum(entries, axis=0) - entries
    place = tl.cumsum(hit, axis=0) - hit  # how many earlier tokens take this expert
    tl.store(pairs_ptr + first[None, :] * M + place, pair, mask=chosen)
    expert = tl.broadcast_to(e[None, :], hit.shape)
    tl.store(experts_ptr + first[None, :] + place // M, expert, mask=chosen & (place % M == 0))
    for m in tl.static_range(1, M):
        tl.store(pairs_ptr + (first + entries - 1) * M + m, -1, mask=(hits % M != 0) & (hits % M <= m))
    tl.store(count_ptr, tl.sum(entries, axis=0))
