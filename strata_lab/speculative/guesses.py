"""How the guesses of a captured cycle are made: by a draft model, or by a look-up in the text (`look_up.py`).

A draft of tokens begins each cycle with the last two, since it may have seen neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from strata_lab.models.base import CausalLM
from strata_lab.request import Request
from strata_lab.run_ahead import decode_inputs
from strata_lab.runner import EagerStep
from strata_lab.speculative.window_state import WindowState

Guess = Callable[[Tensor, Any, int], None]  # `DeviceSampling.greedy` or `drawn`
Make = Callable[[], None]  # guesses of a cycle that has been opened, into its report
Follow = Callable[[], None]  # of a window that was sampled; nothing has moved yet


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
        first, following = replace(decode_inputs(state.pairs), apart=True), decode_inputs(state.drafts)
        num_seqs = state.base.input_ids.shape[0]

        def make() -> None:
            guess(self.step.every_row(first)[num_seqs:], state.drafts, 0)
            for step in range(1, num_drafts):
                guess(self.step.every_row(following), state.drafts, step)

        return make, _nothing


def _nothing() -> None:
    pass
