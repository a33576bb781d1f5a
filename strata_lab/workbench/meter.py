"""Speed from events: tokens per second in total and per stream, over a sliding second.

Every figure comes from the tokens of real `StepEvent`s and their times; nothing is smoothed, extrapolated or guessed.
The two speeds are never mixed: total grows with the number of streams, speed per stream falls with it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from strata_lab.events import StepEvent

WINDOW_S = 1.0
MIN_ELAPSED_S = 0.25  # a total over less than this says more about the first step than about speed
FORGET_S = 10.0  # a stream without a token for this long is not generating

TOTAL_FORMULA = (
    "Tokens of all streams in the last second, divided by that second "
    "(by the time since the engine became busy, while that is shorter)."
)
STREAM_FORMULA = (
    "Mean over the generating streams of (tokens − 1) / (time from first to last token), "  # noqa: RUF001
    "over each stream's tokens of the last second."
)


@dataclass(frozen=True, slots=True)
class Sample:
    """Speed at one moment.

    Attributes:
        t_s: `time.perf_counter()`, seconds.
        output_tok_s: tokens of all streams per second.
        tok_s_per_stream: mean speed of one stream; NaN when no stream has two tokens yet.
        num_generating: streams in that mean.
    """

    t_s: float
    output_tok_s: float
    tok_s_per_stream: float
    num_generating: int


def pace(times: deque[float]) -> float:
    """Tokens per second of one stream from the times of its tokens; NaN with fewer than two."""
    if len(times) < 2 or times[-1] <= times[0]:
        return math.nan
    return (len(times) - 1) / (times[-1] - times[0])


class RateMeter:
    """Turns steps into samples of speed."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()  # time of every token in the window
        self._streams: dict[str, deque[float]] = {}  # per request: token times in the window, at least its last two
        self._busy_since_s: float | None = None

    def feed(self, step: StepEvent) -> None:
        """Take in one step."""
        if self._busy_since_s is None:
            self._busy_since_s = step.t_s - step.duration_ms / 1e3
        for token in step.tokens:
            if token.token_id < 0:
                continue
            self._recent.append(step.t_s)
            times = self._streams.setdefault(token.request_id, deque())
            times.append(step.t_s)
            if token.finish_reason is not None:
                del self._streams[token.request_id]
        if step.num_running == step.num_waiting == 0:
            self._busy_since_s = None

    def sample(self, now_s: float) -> Sample | None:
        """Speed at `now_s`; None when the engine has nothing to do or has only just begun."""
        while self._recent and self._recent[0] <= now_s - WINDOW_S:
            self._recent.popleft()
        for request_id, times in list(self._streams.items()):
            while len(times) > 2 and times[0] <= now_s - WINDOW_S:
                times.popleft()
            if times[-1] < now_s - FORGET_S:
                del self._streams[request_id]
        if self._busy_since_s is None or now_s - self._busy_since_s < MIN_ELAPSED_S:
            return None
        speeds = [speed for times in self._streams.values() if not math.isnan(speed := pace(times))]
        return Sample(
            t_s=now_s,
            output_tok_s=len(self._recent) / min(WINDOW_S, now_s - self._busy_since_s),
            tok_s_per_stream=sum(speeds) / len(speeds) if speeds else math.nan,
            num_generating=len(speeds),
        )

    def stream(self, request_id: str) -> float | None:
        """Speed of one stream over its last second; None when it is not known."""
        speed = pace(self._streams.get(request_id, deque()))
        return None if math.isnan(speed) else speed

    def idle(self) -> None:
        """The engine has nothing to do (requests can end without a step)."""
        self._busy_since_s = None
        self._streams.clear()
