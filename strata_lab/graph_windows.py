"""Captured steps that verify drafts: several tokens of a request, each of which needs its logits.

On a CPU how the tokens are shared between requests is read at every replay; on a GPU, whose grids are fixed, the rows
stand as requests of one token. Nothing here knows who guessed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from torch import Tensor

from strata_lab.capture import Capture, Recorder, captured_width, fill, idle_rows, latest, verifies
from strata_lab.runner import EagerStep, StepInputs

MAX_WINDOW_TOKENS = 16  # of a captured step that verifies drafts
# Rows captured where one capture serves every sharing of them; few sizes, as each compiles kernels of its own.
WINDOW_ROWS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MAX_WINDOW_CAPTURES = 24


class CapturedWindows:
    """Steps that verify drafts, replayed: one capture per (requests, tokens, block-table width).

    How the tokens are shared between the requests is read at every replay. Few tokens only: with more, what a replay
    saves is a small part of the step, and its results take half a megabyte per token on the default model. The captures
    used last are kept.
    """

    def __init__(self, eager: EagerStep, recorder: Recorder) -> None:
        self.eager, self.recorder = eager, recorder
        self._captures: OrderedDict[tuple[int, int, int], Capture] = OrderedDict()

    def takes(self, inputs: StepInputs) -> bool:
        """Whether a step is one of verification alone, and small enough."""
        return verifies(inputs) and inputs.input_ids.shape[0] <= MAX_WINDOW_TOKENS

    def __call__(self, inputs: StepInputs) -> Tensor:
        """[T, V] float32; valid until the next step."""
        num_seqs, width = inputs.block_tables.shape
        key = num_seqs, inputs.input_ids.shape[0], captured_width(width)
        capture = latest(self._captures, key, self._capture, MAX_WINDOW_CAPTURES)
        fill(capture.inputs, inputs)
        capture.inputs.cu_seqlens_q.copy_(inputs.cu_seqlens_q)
        capture.replay()
        self.eager.states = capture.states
        return capture.logits

    def _capture(self, num_seqs: int, num_tokens: int, width: int) -> Capture:
        device = self.eager.model.rotary[0].device
        inputs = idle_rows(num_tokens, num_seqs, width, device)
        replay, rows = self.recorder.record(lambda: self.eager.rows(inputs), device)
        return Capture(replay, inputs, *rows)


class CapturedRows:
    """Steps that verify drafts, where the grids of a capture are fixed: one capture per (rows, block-table width).

    Every row stands as a request of one token that sees what lies before it (`StepInputs.apart`), so a capture serves
    any number of requests and any sharing of its rows between them. The captures used last are kept.
    """

    def __init__(self, eager: EagerStep, recorder: Recorder) -> None:
        self.eager, self.recorder = eager, recorder
        self._captures: OrderedDict[tuple[int, int], Capture] = OrderedDict()

    def takes(self, inputs: StepInputs) -> bool:
        """Whether a step is one of verification alone, small enough to be bound by the memory that weights cross."""
        return verifies(inputs) and inputs.input_ids.shape[0] <= WINDOW_ROWS[-1]

    def __call__(self, inputs: StepInputs) -> Tensor:
        """[T, V] float32; valid until the next step."""
        num_rows, width = inputs.input_ids.shape[0], inputs.block_tables.shape[1]
        key = next(rows for rows in WINDOW_ROWS if rows >= num_rows), captured_width(width)
        capture = latest(self._captures, key, self._capture, MAX_WINDOW_CAPTURES)
        fill(capture.inputs, inputs.one_by_one())
        capture.replay()
        self.eager.states = capture.states
        return capture.logits[:num_rows]

    def _capture(self, num_rows: int, width: int) -> Capture:
        device = self.eager.model.rotary[0].device
        inputs = replace(StepInputs.idle(num_rows, width, device), apart=True)
        replay, rows = self.recorder.record(lambda: self.eager.rows(inputs), device)
        return Capture(replay, inputs, *rows)
