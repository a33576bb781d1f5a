"""Captured cycles of drafting and verifying: which there are, what each computes, and what it costs.

A cycle of k drafts is k guesses (`guesses.py`), the target's step over the last token and the drafts,
sampling, and the two ends of `window_state.py`. A draft model of tokens begins with the last two of a request: where
every draft of the cycle before came true it has not seen the one before the last, elsewhere it writes what is there.
Cycles of any number of drafts work on one state, so that each cycle of a flight may have another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from strata_lab.capture import Recorder
from strata_lab.device_sampling import DeviceSampling
from strata_lab.run_ahead import RunAhead, decode_inputs
from strata_lab.speculative.costs import StepCosts
from strata_lab.speculative.guesses import Guesses
from strata_lab.speculative.timing import best_ms, queued_step_ms
from strata_lab.speculative.window_state import WindowOps, WindowState

REQUESTS = (1, 2, 4)  # of a captured cycle; with more, plain steps are better filled
DRAFTS = (1, 2, 3, 5, 7)  # of a captured cycle: the target's rows are one more, and few sizes compile few kernels
MIN_WIDTH = 64  # blocks of a captured table: a longer text captures all of them again


@dataclass
class Captured:
    """A state, what the drafts keep beside it, and what replays a cycle on them, by number of drafts and whether a
    request has a temperature.
    """

    state: WindowState
    kept: Any
    replays: dict[tuple[int, bool], Callable[[], None]] = field(default_factory=dict)


class Cycles:
    """Captures cycles, and keeps them.

    Args:
        ahead: has the target.
        guesses: makes the drafts.
        sampling: of the draft model's tokens, as many as it has logits.
        to_target: the target's token for each of them; None where it is the same.
        windows: the ends of a cycle on this device.
        recorder: how this device captures.
        most: drafts of a request and step.

    Attributes:
        drafts: numbers of drafts that are captured.
        max_draft_len: tokens whose positions the draft model knows.
    """

    def __init__(
        self, ahead: RunAhead, guesses: Guesses, sampling: DeviceSampling, to_target: Tensor | None,
        windows: WindowOps, recorder: Recorder, most: int,
    ) -> None:  # fmt: skip
        self.ahead, self.guesses, self.sampling = ahead, guesses, sampling
        self.windows, self.recorder = windows, recorder
        ids = torch.arange(guesses.model.weights.head.shape[0], device=ahead.device)
        self.to_target: Tensor = ids if to_target is None else to_target
        self.drafts = tuple(count for count in DRAFTS if count <= most)
        self.max_draft_len = guesses.model.rotary[0].shape[0]
        self._captures: dict[tuple[int, int, int], Captured] = {}

    def captured(self, num_seqs: int, width: int, draft_width: int, *, drawn: bool) -> Captured:
        """A state with cycles of every number of drafts."""
        key = num_seqs, width, draft_width
        if key not in self._captures:
            widths, most = (width, draft_width), self.drafts[-1]
            made = WindowState.empty(
                self.ahead.sampling, self.sampling, num_seqs, widths, most, self.ahead.block_size, self.to_target
            )
            self._captures[key] = Captured(made, self.guesses.empty(made))
        captured = self._captures[key]
        missing = [count for count in self.drafts if (count, drawn) not in captured.replays]
        if missing:
            task = f"capturing drafts for {num_seqs} up to {width * self.ahead.block_size} tokens"
            captured.state.base.seq_lens.zero_()  # a capture runs its work once: rows that pad write nowhere
            for done, count in enumerate(missing):
                self.ahead.progress(task, done / len(missing))
                captured.replays[count, drawn] = self._capture(captured, count, drawn)
            self.ahead.progress(task, 1.0)
        return captured

    def _capture(self, captured: Captured, num_drafts: int, drawn: bool) -> Callable[[], None]:
        state, target, draft = captured.state, self.ahead.sampling, self.sampling
        sample, guess = (target.drawn, draft.drawn) if drawn else (target.greedy, draft.greedy)
        window = state.window(target, num_drafts)
        fed = state.report[0].view(-1)[: window.input_ids.shape[0]]
        make, follow = self.guesses.cycle(state, captured.kept, window, num_drafts, guess)
        verified = replace(decode_inputs(window), input_ids=fed, apart=True, together=1 + num_drafts)

        def work() -> Tensor:
            self.windows.open(state, window)
            make()
            logits, states = self.ahead.eager.rows(verified)
            sample(logits, window, 0)
            follow(states)
            self.windows.close(state, window)
            return state.report

        return self.recorder.record(work, self.ahead.device)[0]

    @torch.inference_mode()
    def costs(self) -> StepCosts:
        """Milliseconds of a plain step of one request, and of a cycle by its tokens; captures what it times.

        Cycles of several requests are planned on the line through the last two: they draft in fewer steps than one
        request does for as many tokens, so they take less than it says, and their own times correct it.
        """
        captured = self.captured(1, MIN_WIDTH, MIN_WIDTH, drawn=False)
        windows = {1 + count: best_ms(captured.replays[count, False], self.ahead.clock) for count in self.drafts}
        most_tokens = REQUESTS[-1] * (1 + self.drafts[-1])
        return StepCosts({1: queued_step_ms(self.ahead, self.recorder, MIN_WIDTH)}, windows, most_tokens)
