"""How much a card has to do less so that it does not get too hot: readings in, a decision out. Pure arithmetic.

A card that reaches its limit cuts its clocks hard and holds them down for long; doing a little less beforehand costs
less. Sensors lag, those of memory by many seconds, so the controller does not wait for the reading to reach the target
but acts on what it will be. With a first-order sensor (lag L) on a first-order card (time constant C), a reading S that
changes by S' a second stands for a temperature that, after a look-ahead H, will be

    predicted = S + S' * (L + C * (1 - exp(-H / C)))

and S' is the least-squares slope over the last `WINDOW_S`, because readings come in whole degrees. What is taken is one
number, `relief`: it grows with every degree second above the target and shrinks again below target - `HYSTERESIS_C`;
between the two it stays. The policy says what relief means:

    pace     idle slices up to `MAX_IDLE` of the time; each step computes what it always does, so every bit stays
    shrink   fewer seats first, down to `MIN_SEATS` of those taken, then idle slices: who has a seat keeps its speed
    precise  idle slices first, and fewer seats only when those are used up: seats change which sums are computed
             together, and so may change the last bit of a logit; number formats are never changed (decision 0021)

It knows no engine, no thread and no driver; `telemetry/governor.py` does.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from strata_lab.events import HardwareEvent

MAX_IDLE = 0.5  # share of the time: a stream is never slower than half its speed
MIN_SEATS = 0.25  # of the requests that ran at most since it began to be too hot
MARGIN_C = 2.0  # the target is this far below the limit
HYSTERESIS_C = 1.5  # readings come in whole degrees: less would follow their rounding
GAIN = 0.008  # relief per degree and second above the target
RELAX = 0.5  # times as slowly back
WINDOW_S = 10.0
LOOK_AHEAD_S = 4.0
CARD_S = 30.0  # time constant of a cooler; only the order of magnitude matters
LAG_S = {"core": 1.0, "memory": 8.0}
DEFAULT_LIMIT_C = {"core": 83.0, "memory": 95.0}  # where the driver names none: usual values for consumer cards and HBM
NEAR_C = 5.0  # this far below the limit a card is called hot
LOWEST_TARGET_C = 55.0  # below this a card does not slow down for its own heat


def limit_c(reading: HardwareEvent, sensor: str) -> float:
    """From which temperature of a sensor ("core", "memory") on a card slows down: its driver's word, or the usual."""
    named = reading.core_limit_c if sensor == "core" else reading.memory_limit_c
    return named or DEFAULT_LIMIT_C[sensor]


class Predictor:
    """What a lagging sensor's reading will be. See the module docstring for the formula.

    Args:
        lag_s: time constant of the sensor.
        card_s: time constant of the card.
        look_ahead_s: how far ahead.
    """

    def __init__(self, lag_s: float, card_s: float = CARD_S, look_ahead_s: float = LOOK_AHEAD_S) -> None:
        self._reach_s = lag_s + card_s * (1.0 - math.exp(-look_ahead_s / card_s))
        self._readings: deque[tuple[float, float]] = deque()

    def predict(self, t_s: float, reading_c: float) -> float:
        """Take a reading at a time later than the last one, and return the prediction, degrees Celsius."""
        self._readings.append((t_s, reading_c))
        while self._readings[0][0] < t_s - WINDOW_S:
            self._readings.popleft()
        return reading_c + self._reach_s * self._slope()

    def _slope(self) -> float:
        """Degrees per second over the window, by least squares; 0 with one reading."""
        n = len(self._readings)
        t_mean = sum(t for t, _ in self._readings) / n
        c_mean = sum(c for _, c in self._readings) / n
        spread = sum((t - t_mean) ** 2 for t, _ in self._readings)
        return sum((t - t_mean) * (c - c_mean) for t, c in self._readings) / spread if spread else 0.0


@dataclass(frozen=True)
class Decision:
    """What to do until the next reading.

    Attributes:
        idle_share: share of the time to rest, 0.0 to `MAX_IDLE`.
        seats: most requests that may run.
        action: "pace", "shrink", "relax" or "none": what has changed; "no sensor" where nothing can be decided.
        sensor: which one decided, "none" without a reading.
        temperature_c, predicted_c, target_c: of that sensor.
        reason: a sentence for people.
    """

    idle_share: float
    seats: int
    action: str
    sensor: str
    temperature_c: float | None
    predicted_c: float | None
    target_c: float | None
    reason: str


class Controller:
    """Decides reading by reading.

    Args:
        policy: "pace", "shrink" or "precise".
        seats: the setting of `max_num_seqs`.
    """

    def __init__(self, policy: str, seats: int) -> None:
        self.policy, self.seats = policy, seats
        self.relief = 0.0
        self._predictors = {name: Predictor(lag) for name, lag in LAG_S.items()}
        self._told: dict[str, tuple[float, float, float]] = {}  # sensor: time, reading and prediction of its last word
        self._ceilings = {"core": math.inf, "memory": math.inf}  # learned from a card that slows down early
        self._crowd = 1  # most requests that ran since relief began
        self._last_s: float | None = None
        self._given = (0.0, seats)

    def observe(self, reading: HardwareEvent, num_running: int) -> Decision:
        """Take a reading, with the number of requests that run now."""
        found = self._hottest(reading)
        if found is None:
            return self._decide("none", None, None, None, "no temperature in this reading; what was decided stays")
        sensor, temperature, predicted, target = found
        elapsed = 0.0 if self._last_s is None else reading.t_s - self._last_s
        self._last_s = reading.t_s
        self._crowd = max(1, num_running, self._crowd if self.relief else 1)
        excess = predicted - target
        if excess > 0:
            self.relief = min(self._most_relief(), self.relief + GAIN * excess * elapsed)
        elif excess < -HYSTERESIS_C:
            self.relief = max(0.0, self.relief + RELAX * GAIN * (excess + HYSTERESIS_C) * elapsed)
        reason = f"{sensor} at {temperature:g} C, {predicted:.1f} C expected, held to {target:g} C"
        return self._decide(sensor, temperature, predicted, target, reason)

    def _hottest(self, reading: HardwareEvent) -> tuple[str, float, float, float] | None:
        """The sensor nearest to its target: name, reading, prediction, target."""
        slowed = any(word.startswith("hot") for word in reading.throttle)
        now = {"core": reading.core_c, "memory": reading.memory_c}
        if all(value is None for value in now.values()):
            return None
        found = []
        for sensor, said in now.items():
            if said is not None:
                self._told[sensor] = reading.t_s, said, self._predictors[sensor].predict(reading.t_s, said)
            told_s, value, predicted = self._told.get(sensor, (-math.inf, 0.0, 0.0))
            if told_s < reading.t_s - WINDOW_S:  # silent for less, it counts as it was: the cooler one lets nothing go
                continue
            target = min(limit_c(reading, sensor) - MARGIN_C, self._ceilings[sensor])
            found.append((sensor, value, predicted, target))
        nearest = max(found, key=lambda f: f[2] - f[3])
        if slowed and nearest[2] <= nearest[3]:  # it slows down for a heat that no sensor of ours shows: hold it lower
            sensor, value, predicted, _ = nearest
            self._ceilings[sensor] = max(LOWEST_TARGET_C, value - MARGIN_C)
            return sensor, value, predicted, self._ceilings[sensor]
        return nearest

    def _fewest(self) -> int:
        return max(1, math.ceil(MIN_SEATS * min(self.seats, self._crowd)))

    def _most_relief(self) -> float:
        return 1.0 if self.policy == "pace" or self._fewest() >= min(self.seats, self._crowd) else 2.0

    def _decide(
        self, sensor: str, temperature: float | None, predicted: float | None, target: float | None, reason: str
    ) -> Decision:
        idle, seats = self._meaning()
        idle_before, seats_before = self._given
        self._given = idle, seats
        if idle > idle_before:
            action = "pace"
        elif seats < seats_before:
            action = "shrink"
        else:
            action = "relax" if (idle, seats) != (idle_before, seats_before) else "none"
        return Decision(idle, seats, action, sensor, temperature, predicted, target, reason)

    def _meaning(self) -> tuple[float, int]:
        """Idle share and seats that the relief stands for under the policy."""
        first, second = min(self.relief, 1.0), max(0.0, self.relief - 1.0)
        if self._most_relief() == 1.0:
            return MAX_IDLE * first, self.seats
        fewer, idle = (first, second) if self.policy == "shrink" else (second, first)
        if not fewer:
            return MAX_IDLE * idle, self.seats
        crowd, fewest = min(self.seats, self._crowd), self._fewest()
        return MAX_IDLE * idle, fewest + math.floor((crowd - fewest) * (1.0 - fewer))
