"""Who makes the guesses of a captured cycle, between its two ends: a draft model's steps, or a look-up in the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from strata_lab.batch import ScheduledRequest
from strata_lab.device_sampling import DeviceSampling
from strata_lab.request import Request
from strata_lab.run_ahead import decode_inputs
from strata_lab.runner import EagerStep
from strata_lab.speculative.window_state import WindowOps, WindowState


class Guesses(Protocol):
    """Makes the guesses of a cycle on the device.

    Attributes:
        max_len: tokens whose positions its model knows; 0 where it has none.
    """

    max_len: int

    def state(
        self, target: DeviceSampling, num_seqs: int, widths: tuple[int, int], most: int, size: int
    ) -> WindowState:
        """An idle state for cycles of so many requests (`WindowState.empty`)."""
        ...

    def begin(self, state: WindowState, items: Sequence[ScheduledRequest]) -> None:
        """Other requests are in the state's rows now."""
        ...

    def work(self, state: WindowState, num_drafts: int, drawn: bool) -> Callable[[], None]:
        """What is captured, as a function: it writes `report[0, 1:1 + num_drafts]` between the two ends."""
        ...


class ModelGuesses:
    """`Guesses` of a draft model.

    Args:
        drafting: the draft model's step.
        sampling: of its tokens, as many as it has logits.
        to_target: the target's token for each of them; None where it is the same.
    """

    def __init__(self, drafting: EagerStep, sampling: DeviceSampling, to_target: Tensor | None) -> None:
        self.drafting, self.sampling = drafting, sampling
        table = drafting.model.rotary[0]
        ids = torch.arange(drafting.model.weights.head.shape[0], device=table.device)
        self.to_target: Tensor = ids if to_target is None else to_target
        self.max_len = table.shape[0]

    def state(
        self, target: DeviceSampling, num_seqs: int, widths: tuple[int, int], most: int, size: int
    ) -> WindowState:
        """An idle state."""
        return WindowState.empty(target, self.sampling, num_seqs, widths, most, size, self.to_target)

    def begin(self, state: WindowState, items: Sequence[ScheduledRequest]) -> None:
        """The token before the one that is fed."""
        before = [item.request.token_ids[item.start - 1] for item in items]
        state.previous_ids.copy_(torch.tensor(before + [0] * (state.previous_ids.shape[0] - len(items))))

    def work(self, state: WindowState, num_drafts: int, drawn: bool) -> Callable[[], None]:
        """One step after the other; the first computes two tokens of each request."""
        guess, num_seqs = self.sampling.drawn if drawn else self.sampling.greedy, state.base.input_ids.shape[0]
        first, following = replace(decode_inputs(state.pairs), apart=True), decode_inputs(state.drafts)

        def run() -> None:
            guess(self.drafting.every_row(first)[num_seqs:], state.drafts, 0)
            for step in range(1, num_drafts):
                guess(self.drafting.every_row(following), state.drafts, step)

        return run


class LookUpGuesses:
    """`Guesses` that copy from the request's own text, which lies on the device (`window_state.look_up`).

    Args:
        windows: of the device.
    """

    max_len = 0

    def __init__(self, windows: WindowOps) -> None:
        self.windows = windows

    def state(
        self, target: DeviceSampling, num_seqs: int, widths: tuple[int, int], most: int, size: int
    ) -> WindowState:
        """An idle state with room for texts as long as its block tables; the draft model's rows pad for ever."""
        nothing = torch.zeros(0, dtype=torch.int64)
        state = WindowState.empty(target, target, num_seqs, (widths[0], 1), most, size, nothing)
        slots = widths[0] * size
        state.history = torch.zeros(num_seqs, slots, dtype=torch.int32, device=state.report.device)
        return state

    def begin(self, state: WindowState, items: Sequence[ScheduledRequest]) -> None:
        """Their texts, up to the token that is fed."""
        assert state.history is not None
        for row, item in enumerate(items):
            text = torch.tensor(item.request.token_ids[: item.start + 1], dtype=torch.int32)
            state.history[row, : text.shape[0]].copy_(text)

    def work(self, state: WindowState, num_drafts: int, drawn: bool) -> Callable[[], None]:
        """One look-up."""
        return partial(self.windows.look_up, state, num_drafts)


class LookUp:
    """What the host knows of look-ups on the device: nothing. The part of a `Drafter` that `AheadDrafter` asks for."""

    name = "ngram"
    classes = (("any", 1),)

    def look(self, requests: Sequence[Request]) -> list[int]:
        """1 for each: whether there is anything to copy, the device finds out."""
        return [1] * len(requests)

    def fly(self, request: Request, num_tokens: int) -> list[int] | None:
        """No blocks are needed for guesses."""
        return []

    def land(self, request: Request) -> None:
        """Nothing is kept of a request."""

    def forget(self, request: Request) -> None:
        """Nothing is kept of a request."""
