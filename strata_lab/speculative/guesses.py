"""How the guesses of a captured cycle are made: by a draft model that sees tokens, by one that sees states too, or by a
look-up in the text (`look_up.py`).

A draft of tokens begins each cycle with the last two, since it may have seen neither. A draft of states ends each cycle
instead: every row of the target's window gives it the token that was sampled there and the state it was sampled from,
and its own state behind what a request keeps waits for the next cycle (`follow_rows.py`). Its first guess then costs a
head, and each one behind it a step that goes on from its own states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from strata_lab.models.base import CausalLM
from strata_lab.request import Request
from strata_lab.run_ahead import decode_inputs
from strata_lab.runner import EagerStep, States
from strata_lab.speculative.feature_draft import FeatureDraft
from strata_lab.speculative.follow_rows import FollowRows, Place
from strata_lab.speculative.window_state import WindowState

Guess = Callable[[Tensor, Any, int], None]  # `DeviceSampling.greedy` or `drawn`
Make = Callable[[], None]  # guesses of a cycle that has been opened, into its report
Follow = Callable[[States], None]  # of a window that was sampled from these states of rows; nothing has moved yet


class Guesses(Protocol):
    """Makes the guesses of cycles. What it does to the device is captured."""

    @property
    def model(self) -> CausalLM:
        """Layers and head of the draft."""
        ...

    def empty(self, state: WindowState) -> Any:
        """What it keeps from cycle to cycle beside `state`."""
        ...

    def begin(self, kept: Any, requests: Sequence[Request]) -> None:
        """Requests begin to fly, in the first rows."""
        ...

    def cycle(self, state: WindowState, kept: Any, window: Any, num_drafts: int, guess: Guess) -> tuple[Make, Follow]:
        """What a cycle of so many guesses does, on inputs made here: it may make none while it is captured."""
        ...


class TokenGuesses:
    """`Guesses` of a draft model that sees tokens."""

    def __init__(self, step: EagerStep) -> None:
        self.step, self.model = step, step.model

    def empty(self, state: WindowState) -> None:
        """Nothing."""

    def begin(self, kept: None, requests: Sequence[Request]) -> None:
        """Nothing."""

    def cycle(self, state: WindowState, kept: None, window: Any, num_drafts: int, guess: Guess) -> tuple[Make, Follow]:
        """A step per guess."""
        first, following = replace(decode_inputs(state.pairs), apart=True, together=2), decode_inputs(state.drafts)
        num_seqs = state.base.input_ids.shape[0]

        def make() -> None:
            guess(self.step.every_row(first)[num_seqs:], state.drafts, 0)
            for step in range(1, num_drafts):
                guess(self.step.every_row(following), state.drafts, step)

        return make, lambda states: None


class FeatureGuesses:
    """`Guesses` of a draft model that sees the target's states.

    Args:
        draft: knows the requests' states on the host.
        place: puts the rows that follow a window in their places, on this device.
    """

    def __init__(self, draft: FeatureDraft, place: Place) -> None:
        self.draft, self.step, self.place = draft, draft.features, place
        self.model = draft.features.model

    def empty(self, state: WindowState) -> FollowRows:
        """Own states, and the rows that follow a window."""
        return FollowRows.empty(state, self.step.no_states(state.base.input_ids.shape[0]))

    def begin(self, kept: FollowRows, requests: Sequence[Request]) -> None:
        """Their own states, as `FeatureDraft.fly` has left them."""
        kept.own[: len(requests)] = torch.stack([self.draft.own[request] for request in requests])

    def cycle(
        self, state: WindowState, kept: FollowRows, window: Any, num_drafts: int, guess: Guess
    ) -> tuple[Make, Follow]:
        """The head alone, then a step per guess; afterwards a step over all that was sampled."""
        rows: Any = kept.first(window.input_ids.shape[0])
        following = decode_inputs(state.drafts)
        behind = replace(decode_inputs(rows), apart=True, together=1 + num_drafts)

        def make() -> None:
            own = kept.own
            guess(self.model.logits(own), state.drafts, 0)
            for step in range(1, num_drafts):
                own = self.step.further(following, own)
                guess(self.model.logits(own), state.drafts, step)

        def follow(states: States) -> None:
            self.place(state, window, rows)
            torch.index_select(self.step.hidden(behind, states), 0, rows.kept, out=rows.own)

        return make, follow
