"""Captured cycles of drafting and verifying: which there are, what each computes, and what it costs.

A cycle of k drafts is k guesses (`guesses.py`), the target's step over the last token and the drafts, sampling, and
the two ends of `window_state.py`. Cycles of any number of drafts work on one state, so that each cycle of a flight may
have another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from strata_lab.graph_runner import Recorder, free_bytes
from strata_lab.run_ahead import RunAhead, decode_inputs
from strata_lab.speculative.costs import StepCosts
from strata_lab.speculative.guesses import Guesses
from strata_lab.speculative.window_state import WindowOps, WindowState

DRAFTS = (1, 2, 3, 5, 7)  # of a captured cycle: the target's rows are one more, and few sizes compile few kernels
MIN_WIDTH = 64  # blocks of a captured table: a longer text captures all of them again


@dataclass
class Captured:
    """A state, and what replays a cycle on it, by number of drafts and whether a request has a temperature."""

    state: WindowState
    replays: dict[tuple[int, bool], Callable[[], None]] = field(default_factory=dict)


class Cycles:
    """Captures cycles, and keeps them.

    Args:
        ahead: has the target.
        guesses: who guesses.
        windows: the ends of a cycle on this device.
        recorder: how this device captures.
        most: drafts of a request and step.

    Attributes:
        drafts: numbers of drafts that are captured.
        capture_bytes: device memory that the captures took.
    """

    def __init__(self, ahead: RunAhead, guesses: Guesses, windows: WindowOps, recorder: Recorder, most: int) -> None:
        self.ahead, self.guesses = ahead, guesses
        self.windows, self.recorder = windows, recorder
        self.drafts = tuple(count for count in DRAFTS if count <= most)
        self.capture_bytes = 0
        self._captures: dict[tuple[int, int, int], Captured] = {}

    def captured(self, num_seqs: int, width: int, draft_width: int, *, drawn: bool) -> Captured:
        """A state with cycles of every number of drafts."""
        key = num_seqs, width, draft_width
        if key not in self._captures:
            widths, most = (width, draft_width), self.drafts[-1]
            made = self.guesses.state(self.ahead.sampling, num_seqs, widths, most, self.ahead.block_size)
            self._captures[key] = Captured(made)
        captured = self._captures[key]
        missing = [count for count in self.drafts if (count, drawn) not in captured.replays]
        if missing:
            task = f"capturing drafts for {num_seqs} up to {width * self.ahead.block_size} tokens"
            before = free_bytes(self.ahead.device)
            captured.state.base.seq_lens.zero_()  # a capture runs its work once: rows that pad write nowhere
            for done, count in enumerate(missing):
                self.ahead.progress(task, done / len(missing))
                captured.replays[count, drawn] = self._capture(captured.state, count, drawn)
            self.capture_bytes += max(0, before - free_bytes(self.ahead.device))
            self.ahead.progress(task, 1.0)
        return captured

    def _capture(self, state: WindowState, num_drafts: int, drawn: bool) -> Callable[[], None]:
        target = self.ahead.sampling
        sample = target.drawn if drawn else target.greedy
        window = state.window(target, num_drafts)
        fed = state.report[0].view(-1)[: window.input_ids.shape[0]]
        guess = self.guesses.work(state, num_drafts, drawn)
        verified = replace(decode_inputs(window), input_ids=fed, apart=True)

        def work() -> Tensor:
            self.windows.open(state, window)
            guess()
            sample(self.ahead.eager.every_row(verified), window, 0)
            self.windows.close(state, window)
            return state.report

        return self.recorder.record(work, self.ahead.device)[0]

    @torch.inference_mode()
    def costs(self) -> StepCosts:
        """Milliseconds of a plain step of one request, and of a cycle by its tokens; captures what it times."""
        captured = self.captured(1, MIN_WIDTH, MIN_WIDTH, drawn=False)
        windows = {1 + count: self.ahead.best_ms(captured.replays[count, False]) for count in self.drafts}
        return StepCosts({1: self.ahead.step_ms(self.recorder, MIN_WIDTH)}, windows)
