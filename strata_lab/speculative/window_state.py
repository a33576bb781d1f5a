"""What a captured cycle of drafting and verifying keeps on the device: requests, their drafts, and the rows of both.

A cycle of k drafts begins with `open_window`, which lays out the rows of both models from where each request is; the
draft model then fills in its guesses, one after the other, the target samples a token behind every row, and
`close_window` keeps those that a request gets and moves it on. So cycle after cycle can be replayed without the host.

Rows lie step by step: row j * B + b is the j-th of request b, so that a cycle of fewer drafts uses a beginning of the
same memory, and the guesses of a step are where the next one reads them. The functions here are the reference; those
of a GPU are `kernels/gpu/window_state.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strata_lab.device_sampling import DecodeState, DeviceSampling

# Of a request, alike in all its rows.
PARAMETERS = ("inverse_temperature", "top_k", "top_p", "min_p", "seed_keys")


@dataclass
class WindowState:
    """B requests and room for `most` drafts of each, at fixed addresses.

    Attributes:
        base: where each request is: the token to feed, its position, as in a plain decode step [B]; length 0 pads.
        previous_ids: [B] int64, the token before it.
        pairs: of the draft model's first step, the rows of these two tokens [2B].
        drafts: of its other steps [B]; the block tables are those of its own pool.
        rows: tables and parameters of the target's rows [(1 + most) * B]; its first B are `base`'s.
        draft_tables: [(1 + most) * B, width] int32, of the draft model's pool; the first are those of `pairs`.
        report: [2, 1 + most, B] int64: tokens fed (the first row: `base`'s when the cycle began), tokens sampled.
        block_size: tokens of a block, in both pools.
    """

    base: DecodeState
    previous_ids: Tensor
    pairs: DecodeState
    drafts: DecodeState
    rows: DecodeState
    draft_tables: Tensor
    report: Tensor
    block_size: int

    @classmethod
    def empty(
        cls, sampling: DeviceSampling, draft_sampling: DeviceSampling, num_seqs: int, widths: tuple[int, int],
        most: int, block_size: int, to_target: Tensor,
    ) -> WindowState:  # fmt: skip
        """All padding.

        Args:
            sampling, draft_sampling: of the target's tokens and of the draft model's.
            num_seqs: B.
            widths: blocks of a table of the target's pool and of the draft model's.
            most: drafts of a request.
            block_size: tokens of a block.
            to_target: [Vd] int64, the target's token for each of the draft model's.
        """
        rows = sampling.state((1 + most) * num_seqs, widths[0], 1)
        base, pairs = sampling.state(num_seqs, widths[0], 1), draft_sampling.state(2 * num_seqs, widths[1], 1)
        drafts = draft_sampling.state(num_seqs, widths[1], most)
        report = torch.zeros(2, 1 + most, num_seqs, dtype=torch.int64, device=base.input_ids.device)
        tables = pairs.block_tables.new_zeros((1 + most) * num_seqs, widths[1])
        pairs.block_tables, drafts.block_tables = tables[: 2 * num_seqs], tables[:num_seqs]
        base.block_tables = rows.block_tables[:num_seqs]
        for name in PARAMETERS:
            setattr(base, name, getattr(rows, name)[:num_seqs])
            setattr(drafts, name, getattr(base, name))
        drafts.out_tokens, drafts.to_target = report[0, 1:], to_target
        return cls(base, torch.zeros_like(base.input_ids), pairs, drafts, rows, tables, report, block_size)

    def window(self, sampling: DeviceSampling, num_drafts: int) -> DecodeState:
        """The target's rows of a cycle of so many drafts, with numbers of their own: sampling leaves them changed."""
        num_rows = (1 + num_drafts) * self.base.input_ids.shape[0]
        state = sampling.state(num_rows, self.rows.block_tables.shape[1], 1)
        for name in ("block_tables", *PARAMETERS):
            setattr(state, name, getattr(self.rows, name)[:num_rows])
        state.out_tokens = self.report[1].view(1, -1)[:, :num_rows]
        return state

    def spread(self) -> None:
        """Bring what `base` has been given, and the tables of `drafts`, to the other rows of each request."""
        num_seqs = self.base.input_ids.shape[0]
        for tables in (self.rows.block_tables, self.draft_tables):
            by_step = tables.view(-1, num_seqs, tables.shape[1])
            by_step[1:] = by_step[:1]
        for name in PARAMETERS:
            by_step = getattr(self.rows, name).view(-1, num_seqs)
            by_step[1:] = by_step[:1]


@dataclass(frozen=True)
class WindowOps:
    """`open_window` and `close_window` of a device."""

    open: Callable[[WindowState, Any], None]
    close: Callable[[WindowState, Any], None]


def place(state: Any, row: Tensor, position: Tensor, seen: Tensor, block_size: int) -> None:
    """Put rows of requests at positions, where `seen` and there is a slot; else they pad."""
    width = state.block_tables.shape[1]
    blocks = state.block_tables[row, (position // block_size).clamp(0, width - 1)].long()
    state.positions.copy_(torch.where(seen, position, 0))
    state.seq_lens.copy_(torch.where(seen, position + 1, 0))
    state.slot_mapping.copy_(torch.where(seen, blocks * block_size + position % block_size, -1))


def capacity_of(state: DecodeState, block_size: int) -> Tensor:
    """Tokens for which a request has places: [B]."""
    return state.max_seq_lens.clamp(max=state.block_tables.shape[1] * block_size)


def open_window(state: WindowState, window: DecodeState) -> None:
    """Lay out the rows of a cycle; `window` are the target's."""
    base, size = state.base, state.block_size
    num_seqs = base.input_ids.shape[0]
    live = base.seq_lens > 0

    def row_of(tensor: Tensor, num_rows: int) -> Tensor:
        return tensor.repeat(num_rows // num_seqs)

    def step_of(num_rows: int) -> Tensor:
        return torch.arange(num_rows, device=live.device) // num_seqs

    index = torch.arange(num_seqs, device=live.device)
    num_rows = window.input_ids.shape[0]
    position = row_of(base.positions, num_rows) + step_of(num_rows)
    seen = row_of(live, num_rows) & (position < row_of(capacity_of(base, size), num_rows))
    place(window, row_of(index, num_rows), position, seen, size)
    window.output_positions.copy_(row_of(base.output_positions, num_rows) + step_of(num_rows))
    state.report[0, 0] = torch.where(live, base.input_ids, 0)

    drafted = live & (base.positions < capacity_of(state.drafts, size))
    both = drafted.repeat(2)
    place(state.pairs, index.repeat(2), base.positions.repeat(2) - 1 + step_of(2 * num_seqs), both, size)
    state.pairs.input_ids.copy_(torch.where(both, torch.cat([state.previous_ids, base.input_ids]), 0))
    place(state.drafts, index, base.positions, drafted, size)
    state.drafts.output_positions.copy_(base.output_positions)


def accepted_of(state: WindowState, num_rows: int) -> Tensor:
    """How many guesses of each request came true, of a window of so many rows that the target has sampled: [B]."""
    base, fed, sampled = state.base, state.report[0, :num_rows], state.report[1, :num_rows]
    step = torch.arange(1, num_rows, device=fed.device)[:, None]
    same = (sampled[:-1] == fed[1:]) & (base.positions + step < capacity_of(base, state.block_size))
    return same.long().cumprod(0).sum(0)


def close_window(state: WindowState, window: DecodeState) -> None:
    """Move each request on: behind its drafts up to the first that differs from the token sampled before it."""
    base, size = state.base, state.block_size
    num_rows = window.input_ids.shape[0] // base.input_ids.shape[0]
    sampled, accepted = state.report[1, :num_rows], accepted_of(state, num_rows)
    live, capacity = base.seq_lens > 0, capacity_of(base, size)
    before = torch.where(accepted > 0, sampled.gather(0, (accepted - 1).clamp(min=0)[None])[0], base.input_ids)
    last = sampled.gather(0, accepted[None])[0]
    position = base.positions + accepted + 1
    more = position < capacity
    state.previous_ids.copy_(torch.where(live, before, state.previous_ids))
    base.input_ids.copy_(torch.where(live, last.clamp(min=0), base.input_ids))
    base.positions.copy_(torch.where(live & more, position, base.positions))
    base.seq_lens.copy_(torch.where(live & more, position + 1, 0))
    base.output_positions.copy_(torch.where(live, base.output_positions + accepted + 1, base.output_positions))


TORCH_WINDOWS = WindowOps(open_window, close_window)
