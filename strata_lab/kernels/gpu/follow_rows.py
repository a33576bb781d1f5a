"""The rows with which a draft of states follows a window, a program per request: see `speculative/follow_rows.py`."""

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
from strata_lab.kernels.gpu.window_state import Meta, accepted_in, put
from strata_lab.speculative.follow_rows import FollowRows
from strata_lab.speculative.window_state import WindowState


@triton.jit
def _follow_kernel(
    positions, seq_lens, max_seq_lens, fed, sampled, draft_max,
    row_ids, row_positions, row_lens, row_slots, tables, kept, width, draft_width,
    ROWS: tl.constexpr, ROWS_POW2: tl.constexpr, BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, num_seqs = tl.program_id(0), tl.num_programs(0)
    wait(PDL)
    trigger(PDL)
    live, position = tl.load(seq_lens + row) > 0, tl.load(positions + row)
    capacity = tl.minimum(tl.load(max_seq_lens + row), width * BLOCK_SIZE)
    token, accepted = accepted_in(fed, sampled, row, num_seqs, position, capacity, ROWS, ROWS_POW2)
    step = tl.arange(0, ROWS_POW2)
    at, mask, here = step * num_seqs + row, step < ROWS, position + 1 + step
    drafted = tl.minimum(tl.load(draft_max + row), draft_width * BLOCK_SIZE)
    seen = live & mask & (step <= accepted) & (here < drafted)
    put(row_positions, row_lens, row_slots, at, here, seen, tables, row, draft_width, mask, BLOCK_SIZE)
    tl.store(row_ids + at, tl.where(seen, tl.maximum(token, 0), 0), mask=mask)
    tl.store(kept + row, accepted * num_seqs + row)


def place_rows(state: WindowState, window: DecodeState, rows: FollowRows) -> None:
    """`speculative.follow_rows.place_rows`."""
    base, drafts = state.base, state.drafts
    num_seqs, count = base.input_ids.shape[0], window.input_ids.shape[0] // base.input_ids.shape[0]
    _follow_kernel[(num_seqs,)](
        base.positions, base.seq_lens, base.max_seq_lens, state.report[0], state.report[1], drafts.max_seq_lens,
        rows.input_ids, rows.positions, rows.seq_lens, rows.slot_mapping, rows.block_tables, rows.kept,
        base.block_tables.shape[1], drafts.block_tables.shape[1], ROWS=count, ROWS_POW2=triton.next_power_of_2(count),
        BLOCK_SIZE=state.block_size, **options(base.input_ids.device, num_warps=1),
    )  # fmt: skip


def aot_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Cycles of one and of four requests."""
    target, draft = Meta(49152), Meta(8192)
    to_target = torch.empty(8192, dtype=torch.int64, device="meta")
    for num_seqs, drafts in ((1, 4), (4, 8)):
        state = WindowState.empty(target, draft, num_seqs, (64, 64), 8, 16, to_target)
        window, own = state.window(target, drafts), torch.empty(num_seqs, 576, device="meta")
        rows = FollowRows.empty(state, own).first(window.input_ids.shape[0])
        yield f"follow_B{num_seqs}", partial(place_rows, state, window, rows)
