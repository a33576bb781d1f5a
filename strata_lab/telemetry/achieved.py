"""What decode steps have read lately: the one sum behind the gauge of the workbench and the metric of the server.

It loads no torch, so that a page can be shown before it is there.
"""

from __future__ import annotations

from collections import deque

from strata_lab.events import StepEvent


def mbu(step_bytes: float, step_s: float, bandwidth_bytes_s: float) -> float:
    """Achieved over measured bandwidth; 1.0 is the roofline."""
    return step_bytes / (step_s * bandwidth_bytes_s)


def roofline_tok_s(step_bytes: float, bandwidth_bytes_s: float, batch: float = 1) -> float:
    """Most tokens per second, all streams together, if a step only read its bytes."""
    return batch * bandwidth_bytes_s / step_bytes


class DecodeReads:
    """Bytes, tokens and time of the decode steps of a sliding window.

    A step with prompt tokens is bound by arithmetic and left out.

    Args:
        window_s: how far it looks back from the latest step, seconds.
    """

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._steps: deque[StepEvent] = deque()

    def feed(self, step: StepEvent) -> None:
        """Take in a step."""
        if step.num_decode_tokens and not step.num_prefill_tokens:
            self._steps.append(step)
        while self._steps and self._steps[0].t_s < step.t_s - self.window_s:
            self._steps.popleft()

    def forget(self) -> None:
        """Begin anew, because a setting has changed what a step reads."""
        self._steps.clear()

    @property
    def num_steps(self) -> int:
        """Steps in the window."""
        return len(self._steps)

    @property
    def seconds(self) -> float:
        """Their wall time."""
        return sum(step.duration_ms for step in self._steps) / 1e3

    @property
    def nbytes(self) -> int:
        """Bytes that they had to read."""
        return sum(step.bytes_moved for step in self._steps)

    @property
    def num_tokens(self) -> int:
        """Tokens that they computed."""
        return sum(step.num_decode_tokens for step in self._steps)

    def mbu(self, bandwidth_bytes_s: float | None) -> float | None:
        """Achieved over measured bandwidth; None without steps or where the bandwidth was not measured."""
        seconds = self.seconds
        return mbu(self.nbytes, seconds, bandwidth_bytes_s) if seconds and bandwidth_bytes_s else None
