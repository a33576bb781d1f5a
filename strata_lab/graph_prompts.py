"""Captured steps that read prompts, alone or beside decodes, for devices whose grids are fixed: a GPU.

Launched one by one, the some hundred kernels of such a step take the host longer than the card needs for a few hundred
tokens. A capture is made for a number of tokens and of requests, each rounded up: how the tokens are shared between the
requests is read at every replay, rows that only pad write nowhere and attend to nothing. Logits are not part of it,
since only few rows need them. The first step of a shape runs uncaptured, since many shapes are met once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from strata_lab.capture import Recorder, captured_width, fill, idle_rows, latest
from strata_lab.runner import EagerStep, States, StepInputs

# Tokens of a step. The operators choose their kernels at 16 and 128 rows, so no size lies on both sides of these. Few
# sizes, since each stops the engine for a tenth of a second when it is captured; up to 128 rows it is the weights that
# take the time, and requests without a token cost programs that leave at once.
PROMPT_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
PROMPT_REQUESTS = (1, 8, 32, 128)
TABLE_WIDTH = 256  # blocks; a wider table costs a prompt nothing, so few widths will do
MAX_PROMPT_CAPTURES = 48


@dataclass
class _Shape:
    """Steps of one shape: what they are copied into and, once captured, what replays them and their rows' states."""

    inputs: StepInputs
    met: bool = False
    replay: Callable[[], None] | None = None
    states: States = ()


class CapturedPrompts:
    """Hidden states of steps with prompts; the captures used last are kept.

    Args:
        eager: the step that is captured.
        recorder: how this device captures.
        tell: is told why prompts run uncaptured from then on, should that come to be.
    """

    def __init__(self, eager: EagerStep, recorder: Recorder, tell: Callable[[str], None]) -> None:
        self.eager, self.recorder, self._tell = eager, recorder, tell
        self._shapes: OrderedDict[tuple[int, int, int], _Shape] = OrderedDict()
        self._refused = False

    def hidden(self, inputs: StepInputs) -> States:
        """As `EagerStep.hidden`; valid until the next step."""
        key = None if self._refused or inputs.embedded is not None else _sizes(inputs)
        if key is None:
            return self.eager.hidden(inputs)
        shape = latest(self._shapes, key, self._empty, MAX_PROMPT_CAPTURES)
        num_tokens = inputs.input_ids.shape[0]
        if not shape.met:  # padded as a replay is, so that kernels are compiled for these sizes only
            shape.met = True
            _fill(shape.inputs, inputs)
            return _first(num_tokens, self.eager.hidden(shape.inputs))
        try:
            replay, states = self._captured(shape)
        except RuntimeError as error:  # memory is short, or an operator put in place cannot be captured
            self._refused = True
            self._shapes.clear()  # what they hold may be what is short
            self._tell(f"prompts run uncaptured from now on: {str(error).splitlines()[0]}")
            return self.eager.hidden(inputs)
        _fill(shape.inputs, inputs)
        replay()
        return _first(num_tokens, states)

    def _empty(self, num_tokens: int, num_seqs: int, width: int) -> _Shape:
        return _Shape(idle_rows(num_tokens, num_seqs, width, self.eager.model.rotary[0].device))

    def _captured(self, shape: _Shape) -> tuple[Callable[[], None], States]:
        """What replays steps of a shape, and where their states are."""
        if shape.replay is None:
            device, inputs = self.eager.model.rotary[0].device, shape.inputs
            inputs.slot_mapping.fill_(-1)  # a capture runs its work: nothing is written, and no expert counted
            shape.replay, shape.states = self.recorder.record(lambda: self.eager.hidden(inputs), device)
        return shape.replay, shape.states


def padded(inputs: StepInputs) -> StepInputs:
    """The step as a capture of its shape would run it, since kernels are compiled for these sizes only.

    The rows that are added come last; a step that is larger than all shapes stays as it is.
    """
    sizes = _sizes(inputs)
    if sizes is None:
        return inputs
    made = idle_rows(*sizes, inputs.input_ids.device)
    _fill(made, inputs)
    return made


def _sizes(inputs: StepInputs) -> tuple[int, int, int] | None:
    """Tokens, requests and table width of the capture for a step; None where there is none."""
    num_seqs, width = inputs.block_tables.shape
    tokens = next((n for n in PROMPT_TOKENS if n >= inputs.input_ids.shape[0]), 0)
    requests = next((n for n in PROMPT_REQUESTS if n >= num_seqs), 0)
    return (tokens, requests, max(TABLE_WIDTH, captured_width(width))) if tokens and requests else None


def _first(num_tokens: int, states: States) -> States:
    return tuple(rows[:num_tokens] for rows in states)


def _fill(static: StepInputs, inputs: StepInputs) -> None:
    """As `fill`; the rows that only pad are alike, so that in a mixture they take the same experts, and nobody's."""
    num_tokens, num_seqs = inputs.input_ids.shape[0], inputs.seq_lens.shape[0]
    static.input_ids[num_tokens:].zero_()
    static.positions[num_tokens:].zero_()
    fill(static, inputs)
    static.cu_seqlens_q[: num_seqs + 1].copy_(inputs.cu_seqlens_q)
    static.cu_seqlens_q[num_seqs + 1 :].fill_(num_tokens)  # requests without a token
