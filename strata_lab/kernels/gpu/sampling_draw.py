"""Draws on the device: the tokens of `strata_lab.sampling_draw.draw`, at the end of a captured decode step.

Four kernels, each a few microseconds because the logits (600 KB a row at 151,936 tokens) stay in the L2 cache:

1. `_peaks`: the first key (`sort_keys`) of every block of up to 64 logits.
2. `_rank`: each program counts for its own blocks how many other blocks come first; the key of the 256th block is a
   threshold that at least 256 tokens pass, and hardly more. The same program adds the weights of its logits.
3. `_collect`: keys up to the threshold, in any order.
4. `_draw`: one program a row puts them in order by counting, filters, draws and advances the row.

Weights are whole numbers in float64 (`WEIGHT_ONE`), so sums are exact in any order; only a last bit of `exp` may
differ from torch's on another device, which moves one token's share by 2^-34.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata_lab.kernels.gpu.decode_state import (
    DecodeState,
    advance,
    is_best,
    key_ids,
    key_values,
    sort_keys,
    uniform,
    upcoming,
)
from strata_lab.kernels.gpu.launch import options, trigger, wait
from strata_lab.sampling_draw import HEAD


@dataclass(frozen=True)
class DrawConfig:
    """Warps of the kernels that read the logits and of the one that draws; comparisons at a time.

    Attributes:
        num_warps: of `_peaks`, `_rank` and `_collect`.
        draw_warps: of `_draw`.
        rank_tile: pairs of blocks that `_rank` compares at a time.
        draw_tile: keys that `_draw` compares with 256 others at a time.
    """

    num_warps: int = 4
    draw_warps: int = 8
    rank_tile: int = 4096
    draw_tile: int = 32


@triton.jit
def _load_logits(logits, stride, row, ids, V: tl.constexpr):
    # .cg: read where other multiprocessors wrote, past the L1 cache
    return tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < V, other=float("-inf"), cache_modifier=".cg")


@triton.jit
def _weights(x, best_key, inverse_temperature):
    """exp((x - best) / temperature) in whole parts of 2^-34, float64: `sampling_draw.weights`."""
    best = tl.minimum(key_values(best_key), 3.4028234663852886e38).to(tl.float64)  # so that +inf has a difference
    gap = tl.minimum(x.to(tl.float64) - best, 0.0) * inverse_temperature
    whole = 4503599627370496.0  # 2^52: adding it leaves no bits for a fraction, rounding half to even
    return (tl.exp(gap) * 17179869184.0 + whole) - whole


@triton.jit
def _peaks_kernel(
    logits, stride, peaks,
    V: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, NUM_BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    ids = part * CHUNK + tl.arange(0, CHUNK)
    wait(PDL)
    trigger(PDL)
    keys = sort_keys(_load_logits(logits, stride, row, ids, V), ids)
    OWN: tl.constexpr = CHUNK // BLOCK
    if BLOCK > 1:
        keys = tl.min(tl.reshape(keys, (OWN, BLOCK)), axis=1)
    blocks = part * OWN + tl.arange(0, OWN)
    tl.store(peaks + row * NUM_BLOCKS + blocks, keys, mask=blocks < NUM_BLOCKS)


@triton.jit
def _rank_kernel(
    logits, stride, seq_lens, inverse_temperatures, peaks, best, thresholds, sums,
    V: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, NUM_BLOCKS: tl.constexpr, PARTS: tl.constexpr,
    WANTED: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    ids = part * CHUNK + tl.arange(0, CHUNK)
    x = _load_logits(logits, stride, row, ids, V)  # complete since `_peaks` started to run
    inverse_temperature = tl.load(inverse_temperatures + row)
    wait(PDL)
    trigger(PDL)
    OWN: tl.constexpr = CHUNK // BLOCK
    blocks = part * OWN + tl.arange(0, OWN)
    last = 0x7FFFFFFFFFFFFFFF
    own = tl.load(peaks + row * NUM_BLOCKS + blocks, mask=blocks < NUM_BLOCKS, other=last)
    before = tl.zeros((OWN, TILE), tl.int32)
    first = tl.full((TILE,), last, tl.int64)
    for start in range(0, NUM_BLOCKS, TILE):
        others = start + tl.arange(0, TILE)
        other = tl.load(peaks + row * NUM_BLOCKS + others, mask=others < NUM_BLOCKS, other=last)
        first = tl.minimum(first, other)
        before += (other[None, :] < own[:, None]).to(tl.int32)
    best_key = tl.min(first)
    if part == 0:
        tl.store(best + row, best_key)
    if (inverse_temperature > 0) & (tl.load(seq_lens + row) > 0):
        rank = tl.sum(before, axis=1)
        tl.store(thresholds + row + rank * 0, own, mask=(rank == WANTED - 1) & (blocks < NUM_BLOCKS))  # one of all
        tl.store(sums + row * PARTS + part, tl.sum(_weights(x, best_key, inverse_temperature)))


@triton.jit
def _collect_kernel(
    logits, stride, seq_lens, inverse_temperatures, thresholds, candidates, num_candidates,
    V: tl.constexpr, CHUNK: tl.constexpr, CAPACITY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    ids = part * CHUNK + tl.arange(0, CHUNK)
    keys = sort_keys(_load_logits(logits, stride, row, ids, V), ids)
    drawn = (tl.load(inverse_temperatures + row) > 0) & (tl.load(seq_lens + row) > 0)
    wait(PDL)
    trigger(PDL)
    if drawn:
        keep = ((keys <= tl.load(thresholds + row)) & (ids < V)).to(tl.int32)
        count = tl.sum(keep)
        if count > 0:
            place = tl.atomic_add(num_candidates + row, count, sem="relaxed") + tl.cumsum(keep, 0) - 1
            tl.store(candidates + row.to(tl.int64) * CAPACITY + place, keys, mask=keep > 0)


@triton.jit
def _drawn_token(
    key, valid, best_key, everything, inverse_temperature, top_k, top_p, min_p, chance,
    V: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """`sampling_draw.draw` of one row from its first LENGTH keys in order; `chance` is its uniform number."""
    rank = tl.arange(0, key.shape[0])
    weight = tl.where(valid, _weights(key_values(key), best_key, inverse_temperature), 0.0)
    reach = tl.cumsum(weight, 0)  # weight of a token and all before it
    total = tl.where(top_k < V, tl.sum(tl.where(rank < top_k, weight, 0.0)), everything)
    num_top_p = tl.sum((valid & (reach < top_p * total)).to(tl.int64)) + 1
    num_min_p = tl.sum((valid & (weight >= min_p * 17179869184.0)).to(tl.int64))
    num_min_p = tl.where(num_min_p == LENGTH, V, num_min_p)  # perhaps more than the head holds
    kept = tl.maximum(tl.minimum(tl.minimum(num_top_p, num_min_p), top_k), 1)
    in_head = kept <= LENGTH
    kept_weight = tl.where(in_head, tl.sum(tl.where(rank < kept, weight, 0.0)), total)
    target = tl.floor(chance * kept_weight)
    index = tl.sum((valid & (reach <= target)).to(tl.int64))
    unfiltered = (top_p == 1.0) & (min_p == 0.0)
    known = (in_head | (unfiltered & (index < LENGTH))) & ((top_k <= LENGTH) | (top_k >= V))
    token = tl.sum(tl.where(rank == tl.minimum(index, LENGTH - 1), key_ids(key), 0))
    return tl.where(known, token, -1)


@triton.jit(do_not_specialize=["table_width", "step"])
def _draw_kernel(
    best, sums, candidates, num_candidates, head,
    inverse_temperatures, top_ks, top_ps, min_ps, seed_keys,
    input_ids, positions, seq_lens, slot_mapping, block_tables, max_seq_lens, output_positions, out_tokens, to_target,
    table_width, step,
    V: tl.constexpr, BLOCK_SIZE: tl.constexpr, CAPACITY: tl.constexpr, PARTS: tl.constexpr, PARTS_POW2: tl.constexpr,
    LENGTH: tl.constexpr, HEAD_SIZE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    inverse_temperature, top_k = tl.load(inverse_temperatures + row), tl.load(top_ks + row)
    top_k = tl.where(top_k <= 0, V, top_k)
    top_p, min_p = tl.load(top_ps + row), tl.load(min_ps + row)
    seed_key = tl.load(seed_keys + row)
    wait(PDL)
    trigger(PDL)
    position, slot, seq_len, drawn = upcoming(
        positions, seq_lens, block_tables, max_seq_lens, output_positions, row, table_width, BLOCK_SIZE
    )
    chance = uniform(seed_key, drawn)
    best_key = tl.load(best + row)
    count = tl.load(num_candidates + row)  # 0 for a greedy row
    token = key_ids(best_key)
    ranks = tl.arange(0, HEAD_SIZE)
    last = 0x7FFFFFFFFFFFFFFF
    candidates += row.to(tl.int64) * CAPACITY
    for start in range(0, count, HEAD_SIZE):
        own = tl.load(candidates + start + ranks, mask=start + ranks < count, other=last)
        before = tl.zeros((HEAD_SIZE, TILE), tl.int32)
        for other_start in range(0, count, TILE):
            others = other_start + tl.arange(0, TILE)
            other = tl.load(candidates + others, mask=others < count, other=last)
            before += (other[None, :] < own[:, None]).to(tl.int32)
        rank = tl.sum(before, axis=1)
        tl.store(head + row * HEAD_SIZE + rank, own, mask=(start + ranks < count) & (rank < HEAD_SIZE))
    tl.debug_barrier()  # all of the head is there, and all warps have read the count
    tl.store(num_candidates + row, 0)
    if count > 0:
        valid = ranks < LENGTH
        key = tl.load(head + row * HEAD_SIZE + ranks, mask=valid, other=last)
        parts = tl.arange(0, PARTS_POW2)
        everything = tl.sum(tl.load(sums + row * PARTS + parts, mask=parts < PARTS, other=0.0))
        token = _drawn_token(
            key, valid, best_key, everything, inverse_temperature, top_k, top_p, min_p, chance, V, LENGTH
        )
    token = tl.where(is_best(best_key), token, -2)
    advance(
        token, position, slot, seq_len, drawn, row, step,
        input_ids, positions, seq_lens, slot_mapping, output_positions, out_tokens, to_target,
    )  # fmt: skip


def sample_drawn(logits: Tensor, state: DecodeState, step: int, config: DrawConfig | None = None) -> None:
    """A token for every row, drawn where it has a temperature, then the state of the next step.

    A drawn token is the one that `Sampler` draws for the same seed, position and parameters. `UNRESOLVED` where the
    first `HEAD` tokens do not settle it, which includes a top_k that is on and above `HEAD`.

    Args:
        logits: [B, V] float32, rows contiguous. A row with NaN or all -inf gets -2.
        state: advanced in place.
        step: row of `state.out_tokens` to write.
        config: for tuning.
    """
    num_seqs, vocab_size = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, (logits.dtype, logits.stride())
    assert (num_seqs, vocab_size) == (state.input_ids.shape[0], state.vocab_size), logits.shape
    assert 0 <= step < state.out_tokens.shape[0], step
    config, scratch = config or DrawConfig(), state.scratch
    num_blocks, parts = scratch.peaks.shape[1], scratch.sums.shape[1]
    grid, stride, chunk, block = (num_seqs, parts), logits.stride(0), scratch.chunk, scratch.block
    launch = options(logits.device, num_warps=config.num_warps)
    of_row = state.seq_lens, state.inverse_temperature
    _peaks_kernel[grid](
        logits, stride, scratch.peaks, V=vocab_size, BLOCK=block, CHUNK=chunk, NUM_BLOCKS=num_blocks, **launch
    )
    _rank_kernel[grid](
        logits, stride, *of_row, scratch.peaks, scratch.best, scratch.thresholds, scratch.sums,
        V=vocab_size, BLOCK=block, CHUNK=chunk, NUM_BLOCKS=num_blocks, PARTS=parts,
        WANTED=min(HEAD, num_blocks), TILE=max(1, config.rank_tile * block // chunk), **launch,
    )  # fmt: skip
    _collect_kernel[grid](
        logits, stride, *of_row, scratch.thresholds, scratch.candidates, scratch.num_candidates,
        V=vocab_size, CHUNK=chunk, CAPACITY=scratch.candidates.shape[1], **launch,
    )  # fmt: skip
    _draw_kernel[(num_seqs,)](
        scratch.best, scratch.sums, scratch.candidates, scratch.num_candidates, scratch.head,
        state.inverse_temperature, state.top_k, state.top_p, state.min_p, state.seed_keys,
        *state.row_pointers(), state.block_tables.shape[1], step,
        V=vocab_size, BLOCK_SIZE=state.block_size, CAPACITY=scratch.candidates.shape[1],
        PARTS=parts, PARTS_POW2=triton.next_power_of_2(parts), LENGTH=min(HEAD, vocab_size), HEAD_SIZE=HEAD,
        TILE=config.draw_tile, **options(logits.device, num_warps=config.draw_warps),
    )  # fmt: skip
