"""What a step costs by the number of its tokens: measured when drafting begins, corrected by every step. Torch-free.

Two curves, since a step of plain decodes and one that verifies drafts may run differently (on a GPU the first is queued
ahead of the host). A change of pace that hits all steps alike (a longer context, a warmer processor, another program)
goes into one common factor at once; a point of a curve moves slowly. What steps with drafts take
beyond expectation goes into a factor of their own: were it taken for a change of pace, plain steps would seem slower,
and drafts would seem to pay the more the longer they took. Nothing is known beyond the largest step that was measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import product

MEASURED_TOKENS = (1, 4, 8, 2, 6, 16, 3, 5, 7, 9, 12, 24, 32, 48, 64)  # the most telling first: time may not last
PACE_SHARE = 0.1  # of a step's surprise that moves the factor of its curve: of plain steps the common one
COMMON_SHARE = 0.02  # of the surprise of a step with drafts that moves the common factor
POINT_SHARE = 0.03  # and the step's own point
OUTLIER = 2.0  # a step that is off by more is taken as off by this much


class Curve:
    """Milliseconds by number of tokens: linear between known points, and beyond the last as between the last two."""

    def __init__(self, points: Mapping[int, float]) -> None:
        assert points, "a curve needs a point"
        self._tokens = sorted(points)
        self._ms = [points[n] for n in self._tokens]

    def ms(self, num_tokens: int) -> float:
        """What a step of that many tokens takes."""
        tokens, ms = self._tokens, self._ms
        right = bisect_left(tokens, num_tokens)
        if right < len(tokens) and tokens[right] == num_tokens:
            return ms[right]
        if len(tokens) == 1:
            return ms[0]
        right = min(max(right, 1), len(tokens) - 1)
        slope = (ms[right] - ms[right - 1]) / (tokens[right] - tokens[right - 1])
        return max(0.0, ms[right - 1] + slope * (num_tokens - tokens[right - 1]))

    @property
    def last(self) -> int:
        """The largest known number of tokens."""
        return self._tokens[-1]

    def scale(self, num_tokens: int, factor: float) -> None:
        """Move the point of `num_tokens`, which becomes a known one, by a factor."""
        at = bisect_left(self._tokens, num_tokens)
        value = self.ms(num_tokens) * factor
        if at < len(self._tokens) and self._tokens[at] == num_tokens:
            self._ms[at] = value
        else:
            self._tokens.insert(at, num_tokens)
            self._ms.insert(at, value)

    def points(self) -> dict[int, float]:
        """The known points."""
        return dict(zip(self._tokens, self._ms, strict=True))


class StepCosts:
    """Costs of steps without and with drafts.

    Args:
        plain: milliseconds by number of requests that decode.
        window: milliseconds by number of tokens, drafts included, of a step that verifies.
        most_tokens: of a step with drafts that is to be planned; 0 is the largest of `window`. More where it is known
            that the curve goes on as it does between its last points.
    """

    def __init__(self, plain: Mapping[int, float], window: Mapping[int, float], most_tokens: int = 0) -> None:
        self._plain, self._window = Curve(plain), Curve(window)
        self.most_tokens = most_tokens or self._window.last
        self.pace = self.window_pace = 1.0

    def plain_ms(self, num_requests: int) -> float:
        """A step that gives each a token."""
        return self._plain.ms(num_requests) * self.pace

    def window_ms(self, num_tokens: int) -> float:
        """A step that verifies."""
        return self._window.ms(num_tokens) * self.pace * self.window_pace

    def best_gain(self, num_requests: int, most: int, chance: float, draft_ms: Callable[[int], float]) -> float:
        """How much faster than plain steps those with drafts could be, if each guess came true with `chance`.

        The curve is straight between known points, so one of these or an end is the best number of tokens. 0 where no
        step with so many tokens is known.

        Args:
            num_requests: that decode.
            most: drafts for each at most.
            chance: 0.0 to 1.0, whatever came before it.
            draft_ms: what the drafter takes for so many guesses per request.
        """
        least, end = num_requests + 1, min(num_requests * (1 + most), self.most_tokens)
        if least > end:
            return 0.0
        sizes = {least, end, *(n for n in self._window.points() if least < n < end)}
        rates = (
            (num_requests + chance * (n - num_requests))
            / (self.window_ms(n) + draft_ms(-(-(n - num_requests) // num_requests)))
            for n in sizes
        )
        return max(rates) * self.plain_ms(num_requests) / num_requests

    def observe(self, num_tokens: int, with_drafts: bool, ms: float) -> None:
        """A step of decodes took `ms`."""
        curve = self._window if with_drafts else self._plain
        expected = self.window_ms(num_tokens) if with_drafts else self.plain_ms(num_tokens)
        if ms <= 0 or expected <= 0:
            return
        surprise = min(max(ms / expected, 1 / OUTLIER), OUTLIER)
        if with_drafts:
            self.window_pace *= surprise**PACE_SHARE
            self.pace *= surprise**COMMON_SHARE
        else:
            self.pace *= surprise**PACE_SHARE
        curve.scale(num_tokens, surprise**POINT_SHARE)

    def points(self) -> dict[str, dict[int, float]]:
        """The two curves at the present pace, "plain" and "window": number of tokens to milliseconds."""
        return {
            "plain": {n: self.plain_ms(n) for n in self._plain.points()},
            "window": {n: self.window_ms(n) for n in self._window.points()},
        }


def measure(
    timers: Sequence[Callable[[int], float]],
    clock_s: Callable[[], float],
    budget_s: float,
    sizes: Sequence[int] = MEASURED_TOKENS,
    repeats: int = 3,
) -> list[dict[int, float]]:
    """Points of several curves: the best of `repeats` calls of each timer per size, for as long as `budget_s` lasts.

    The timers take turns, so that what disturbs one disturbs all. At least the first two sizes are measured. Fewer
    tokens never take longer: what says otherwise was disturbed, and gets the time of the larger size.
    """
    curves: list[dict[int, float]] = [{} for _ in timers]
    end_s = clock_s() + budget_s
    for size, _ in product(sizes, range(repeats)):
        if clock_s() > end_s and len(curves[0]) >= 2:
            break
        for points, time_ms in zip(curves, timers, strict=True):
            points[size] = min(points.get(size, float("inf")), time_ms(size))
    return [{size: min(ms for n, ms in points.items() if n >= size) for size in points} for points in curves]
