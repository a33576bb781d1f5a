"""The two ends of a captured cycle of drafting and verifying, a program per request: see `speculative/window_state.py`.

Both move a few hundred bytes; what counts is that each is one kernel. A program reads all that it needs of its request
before it writes, and nothing of another's.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from strata_lab.kernels.gpu.decode_state import DecodeState
from strata_lab.kernels.gpu.launch import options, trigger, wait
from strata_lab.speculative.window_state import WindowOps, WindowState


@triton.jit
def put(
    positions, seq_lens, slot_mapping, at, position, seen, tables, row, width, mask, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    """Store rows of request `row` at positions; those that are not seen pad."""
    column = tl.minimum(tl.maximum(position // BLOCK_SIZE, 0), width - 1)
    block = tl.load(tables + row * width + column, mask=seen, other=0).to(tl.int64)
    tl.store(positions + at, tl.where(seen, position, 0), mask=mask)
    tl.store(seq_lens + at, tl.where(seen, position + 1, 0).to(tl.int32), mask=mask)
    tl.store(slot_mapping + at, tl.where(seen, block * BLOCK_SIZE + position % BLOCK_SIZE, -1), mask=mask)


@triton.jit
def accepted_in(
    fed, sampled, row, num_seqs, position, capacity, ROWS: tl.constexpr, ROWS_POW2: tl.constexpr
):  # fmt: skip
    """The sampled tokens of request `row`, and how many of its guesses came true."""
    step = tl.arange(0, ROWS_POW2)
    here = tl.load(sampled + step * num_seqs + row, mask=step < ROWS, other=0)
    guess = tl.load(fed + (step + 1) * num_seqs + row, mask=step + 1 < ROWS, other=0)
    differs = (here != guess) | (step + 1 >= ROWS) | (position + step + 1 >= capacity)
    return here, tl.min(tl.where(differs, step, ROWS - 1))


@triton.jit
def _open_kernel(
    input_ids, previous_ids, positions, seq_lens, max_seq_lens, tables, output_positions, report,
    row_positions, row_lens, row_slots, row_outputs,
    pair_ids, pair_positions, pair_lens, pair_slots, draft_tables, draft_max,
    draft_positions, draft_lens, draft_slots, draft_outputs, width, draft_width,
    ROWS: tl.constexpr, ROWS_POW2: tl.constexpr, BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, num_seqs = tl.program_id(0), tl.num_programs(0)
    wait(PDL)
    trigger(PDL)
    live = tl.load(seq_lens + row) > 0
    position, output = tl.load(positions + row), tl.load(output_positions + row)
    token, before = tl.load(input_ids + row), tl.load(previous_ids + row)
    tl.store(report + row, tl.where(live, token, 0))

    step = tl.arange(0, ROWS_POW2)
    at, mask, here = step * num_seqs + row, step < ROWS, position + step
    capacity = tl.minimum(tl.load(max_seq_lens + row), width * BLOCK_SIZE)
    seen = live & mask & (here < capacity)
    put(row_positions, row_lens, row_slots, at, here, seen, tables, row, width, mask, BLOCK_SIZE)
    tl.store(row_outputs + at, output + step, mask=mask)

    drafted = live & (position < tl.minimum(tl.load(draft_max + row), draft_width * BLOCK_SIZE))
    two = tl.arange(0, 2)
    at, here, seen = two * num_seqs + row, position - 1 + two, (two >= 0) & drafted
    put(pair_positions, pair_lens, pair_slots, at, here, seen, draft_tables, row, draft_width, two >= 0, BLOCK_SIZE)
    tl.store(pair_ids + at, tl.where(seen, tl.where(two == 0, before, token), 0))
    one = tl.arange(0, 1)
    at, here, seen = one + row, position + one, (one == 0) & drafted
    put(draft_positions, draft_lens, draft_slots, at, here, seen, draft_tables, row, draft_width, one == 0, BLOCK_SIZE)
    tl.store(draft_outputs + row, output)


@triton.jit
def _close_kernel(
    input_ids, previous_ids, positions, seq_lens, max_seq_lens, output_positions, fed, sampled, width,
    ROWS: tl.constexpr, ROWS_POW2: tl.constexpr, BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, num_seqs = tl.program_id(0), tl.num_programs(0)
    wait(PDL)
    trigger(PDL)
    live = tl.load(seq_lens + row) > 0
    position, output, token = tl.load(positions + row), tl.load(output_positions + row), tl.load(input_ids + row)
    capacity = tl.minimum(tl.load(max_seq_lens + row), width * BLOCK_SIZE)
    step = tl.arange(0, ROWS_POW2)
    here, accepted = accepted_in(fed, sampled, row, num_seqs, position, capacity, ROWS, ROWS_POW2)
    last = tl.sum(tl.where(step == accepted, here, 0))
    before = tl.where(accepted > 0, tl.sum(tl.where(step == accepted - 1, here, 0)), token)
    position += accepted + 1
    more = position < capacity
    tl.debug_barrier()  # every warp has read before one of them writes
    tl.store(previous_ids + row, before, mask=live)
    tl.store(input_ids + row, tl.maximum(last, 0), mask=live)
    tl.store(positions + row, position, mask=live & more)
    tl.store(seq_lens + row, tl.where(more, position + 1, 0).to(tl.int32), mask=live)
    tl.store(output_positions + row, output + accepted + 1, mask=live)


def open_window(state: WindowState, window: DecodeState) -> None:
    """`window_state.open_window`."""
    base, pairs, drafts = state.base, state.pairs, state.drafts
    num_seqs, rows = base.input_ids.shape[0], window.input_ids.shape[0] // base.input_ids.shape[0]
    _open_kernel[(num_seqs,)](
        base.input_ids, state.previous_ids, base.positions, base.seq_lens, base.max_seq_lens, base.block_tables,
        base.output_positions, state.report, window.positions, window.seq_lens, window.slot_mapping,
        window.output_positions, pairs.input_ids, pairs.positions, pairs.seq_lens, pairs.slot_mapping,
        drafts.block_tables, drafts.max_seq_lens, drafts.positions, drafts.seq_lens, drafts.slot_mapping,
        drafts.output_positions, base.block_tables.shape[1], drafts.block_tables.shape[1], ROWS=rows,
        ROWS_POW2=triton.next_power_of_2(rows), BLOCK_SIZE=state.block_size,
        **options(base.input_ids.device, num_warps=1),
    )  # fmt: skip


def close_window(state: WindowState, window: DecodeState) -> None:
    """`window_state.close_window`."""
    base = state.base
    num_seqs, rows = base.input_ids.shape[0], window.input_ids.shape[0] // base.input_ids.shape[0]
    _close_kernel[(num_seqs,)](
        base.input_ids, state.previous_ids, base.positions, base.seq_lens, base.max_seq_lens, base.output_positions,
        state.report[0], state.report[1], base.block_tables.shape[1], ROWS=rows,
        ROWS_POW2=triton.next_power_of_2(rows), BLOCK_SIZE=state.block_size,
        **options(base.input_ids.device, num_warps=1),
    )  # fmt: skip


WINDOWS = WindowOps(open_window, close_window)


class Meta:
    """States on no device."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def state(self, num_seqs: int, table_width: int, steps: int) -> DecodeState:
        """As of `DeviceSampling`."""
        return DecodeState.empty(num_seqs, table_width, steps, 16, self.vocab_size, "meta")


def aot_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Cycles of one and of four requests."""
    target, draft = Meta(49152), Meta(8192)
    to_target = torch.empty(8192, dtype=torch.int64, device="meta")
    for num_seqs, drafts in ((1, 4), (4, 8)):
        state = WindowState.empty(target, draft, num_seqs, (64, 64), 8, 16, to_target)
        window = state.window(target, drafts)
        yield f"open_B{num_seqs}", partial(open_window, state, window)
        yield f"close_B{num_seqs}", partial(close_window, state, window)
