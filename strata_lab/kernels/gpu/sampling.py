"""Sampling at the end of a captured decode step: logits become tokens, and tokens the next step's inputs.

`sample_greedy` is one kernel that reads each logit once (600 KB a row at 151,936 tokens, from the L2 cache, where
the LM head has just written them): programs reduce their part to one integer key, and the last one of a row to arrive
takes the smallest key and advances the row. `sample_drawn` is for batches with a temperature (`sampling_draw.py`).

Rows do not look at each other, keys are unique integers, and so the result is the same in any batch and any order of
arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata_lab.kernels.gpu.decode_state import (
    GREEDY_CHUNK,
    DecodeState,
    advance,
    is_best,
    key_ids,
    sort_keys,
    upcoming,
)
from strata_lab.kernels.gpu.launch import options, trigger, wait
from strata_lab.kernels.gpu.sampling_draw import sample_drawn

__all__ = ["DecodeState", "sample_drawn", "sample_greedy"]


@dataclass(frozen=True)
class GreedyConfig:
    """Logits of one program (a power of two from `GREEDY_CHUNK`) and its warps."""

    chunk: int = GREEDY_CHUNK
    num_warps: int = 4


def greedy_config(num_seqs: int) -> GreedyConfig:
    """Many programs for one row, whose latency counts; fewer each for many rows, which fill the card anyway."""
    if num_seqs <= 2:
        return GreedyConfig(GREEDY_CHUNK, 4)
    return GreedyConfig(2 * GREEDY_CHUNK, 4) if num_seqs <= 8 else GreedyConfig(4 * GREEDY_CHUNK, 4)


@triton.jit(do_not_specialize=["table_width", "step"])
def _greedy_kernel(
    logits, stride, partials, arrivals,
    input_ids, positions, seq_lens, slot_mapping, block_tables, max_seq_lens, output_positions, out_tokens, to_target,
    table_width, step,
    V: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, PARTS_POW2: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    ids = part * CHUNK + tl.arange(0, CHUNK)
    wait(PDL)
    trigger(PDL)
    # .cg: read where other multiprocessors wrote, past the L1 cache
    x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < V, other=float("-inf"), cache_modifier=".cg")
    position, slot, seq_len, drawn = upcoming(
        positions, seq_lens, block_tables, max_seq_lens, output_positions, row, table_width, BLOCK_SIZE
    )
    tl.store(partials + row * PARTS + part, tl.min(sort_keys(x, ids)))
    if tl.atomic_add(arrivals + row, 1, sem="acq_rel") == PARTS - 1:
        parts = tl.arange(0, PARTS_POW2)
        last = 0x7FFFFFFFFFFFFFFF
        keys = tl.load(partials + row * PARTS + parts, mask=parts < PARTS, other=last, cache_modifier=".cg")
        best = tl.min(keys)
        tl.store(arrivals + row, 0)
        token = tl.where(is_best(best), key_ids(best), -2)
        advance(
            token, position, slot, seq_len, drawn, row, step,
            input_ids, positions, seq_lens, slot_mapping, output_positions, out_tokens, to_target,
        )  # fmt: skip


def sample_greedy(logits: Tensor, state: DecodeState, step: int, config: GreedyConfig | None = None) -> None:
    """The most likely token of every row, then the state of the next step.

    Args:
        logits: [B, V] float32, rows contiguous. The lowest id wins a tie; a row with NaN or all -inf gets -2.
        state: advanced in place.
        step: row of `state.out_tokens` to write.
        config: for tuning.
    """
    num_seqs, vocab_size = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, (logits.dtype, logits.stride())
    assert (num_seqs, vocab_size) == (state.input_ids.shape[0], state.vocab_size), logits.shape
    assert 0 <= step < state.out_tokens.shape[0], step
    config = config or greedy_config(num_seqs)
    assert config.chunk >= GREEDY_CHUNK, config
    parts = triton.cdiv(vocab_size, config.chunk)
    _greedy_kernel[(num_seqs, parts)](
        logits,
        logits.stride(0),
        state.scratch.partials,
        state.scratch.arrivals,
        *state.row_pointers(),
        state.block_tables.shape[1],
        step,
        V=vocab_size,
        BLOCK_SIZE=state.block_size,
        CHUNK=config.chunk,
        PARTS=parts,
        PARTS_POW2=triton.next_power_of_2(parts),
        **options(logits.device, num_warps=config.num_warps),
    )


def aot_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Both samplers at the reference vocabularies."""
    for vocab_size, num_seqs in ((151936, 1), (151936, 8), (151936, 16), (49152, 1), (320, 3)):
        state = DecodeState.empty(num_seqs, 64, 4, 16, vocab_size, "meta")
        logits = torch.empty(num_seqs, vocab_size, device="meta")
        name = f"V{vocab_size}_B{num_seqs}"
        yield f"greedy_{name}", lambda logits=logits, state=state: sample_greedy(logits, state, 0)  # type: ignore[misc]
        yield f"drawn_{name}", lambda logits=logits, state=state: sample_drawn(logits, state, 0)  # type: ignore[misc]
