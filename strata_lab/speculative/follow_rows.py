"""The rows with which a draft of states follows a captured window of the target: where they lie, and which one counts.

Row j * B + b is the token that the target sampled behind row j of request b, at the position after that row's. Rows
behind the first guess that did not come true pad: their tokens are not the request's. The function here is the
reference; that of a GPU is `kernels/gpu/follow_rows.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from strata_lab.speculative.window_state import WindowState, accepted_of, capacity_of, place


@dataclass(frozen=True)
class FollowRows:
    """Rows of B requests and what is kept of them, at fixed addresses.

    Attributes:
        input_ids, positions, slot_mapping: [rows] int64; seq_lens: [rows] int32; block_tables: [rows, width] int32, of
            the draft's pool: a decode step in which each row stands as a request.
        kept: [B] int64, the row behind the last token that each request gets.
        own: [B, hidden], the draft's state there: what the next guess is made of.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    kept: Tensor
    own: Tensor

    @classmethod
    def empty(cls, state: WindowState, own: Tensor) -> FollowRows:
        """All padding, for as many rows as `state` has tables of the draft's pool."""
        numbers = torch.zeros(3, state.draft_tables.shape[0], dtype=torch.int64, device=own.device)
        kept = torch.arange(own.shape[0], device=own.device)
        input_ids, positions, slots = numbers
        return cls(input_ids, positions, slots, torch.zeros_like(slots).int(), state.draft_tables, kept, own)

    def first(self, count: int) -> FollowRows:
        """The first `count` rows, in the same memory."""
        names = ("input_ids", "positions", "slot_mapping", "seq_lens", "block_tables")
        return replace(self, **{name: getattr(self, name)[:count] for name in names})


Place = Callable[[WindowState, Any, FollowRows], None]


def place_rows(state: WindowState, window: Any, rows: FollowRows) -> None:
    """Put the rows in their places behind those of `window`, which the target has sampled and `state` is still at."""
    base, count = state.base, window.input_ids.shape[0]
    num_seqs = base.input_ids.shape[0]
    accepted = accepted_of(state, count // num_seqs)
    step = torch.arange(count, device=accepted.device) // num_seqs
    index = torch.arange(num_seqs, device=accepted.device)
    position = base.positions.repeat(count // num_seqs) + 1 + step
    each = index.repeat(count // num_seqs)
    seen = (base.seq_lens > 0)[each] & (step <= accepted[each])
    seen &= position < capacity_of(state.drafts, state.block_size)[each]
    place(rows, each, position, seen, state.block_size)
    sampled = state.report[1].view(-1)[:count]
    rows.input_ids.copy_(torch.where(seen, sampled.clamp(min=0), 0))
    rows.kept.copy_(accepted * num_seqs + index)
