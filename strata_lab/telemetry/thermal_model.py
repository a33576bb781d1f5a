"""A MODEL of a hot card, for tests and for explaining the governor. Nothing it gives out was measured.

It stands for the source articles' card (a 4090 with 48 GB), of which they say two things: 152 tok/s at the start, and
118 tok/s after 90 s, when its memory is too hot. Every other figure is an assumption, chosen once so that the model
without a governor does these two things; what it does with one is the model's consequence and nobody's claim.

    power          IDLE + (1 - IDLE) * busy share, as a part of full power; in it `SEATS_SHARE` follows the batch
    memory         first order: heads for AMBIENT_C + RISE_C * power with time constant MEMORY_S
    its sensor     first order behind it with SENSOR_S, and told in whole degrees
    slow-down      on at LIMIT_C, at THROTTLED of the speed, off RELEASE_C lower

RISE_C is solved from the rest: after `ONSET_S` at full speed memory shall be at LIMIT_C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from strata_lab.events import HardwareEvent

FULL_TOK_S, THROTTLED_TOK_S, ONSET_S = 152.0, 118.0, 90.0  # the articles' claim
AMBIENT_C, START_C = 30.0, 40.0
LIMIT_C, RELEASE_C = 104.0, 14.0
MEMORY_S, SENSOR_S, CORE_S = 30.0, 8.0, 12.0
IDLE = 0.2
SEATS_SHARE = 0.3
CORE_RISE_C = 42.0
_DECAY = math.exp(-ONSET_S / MEMORY_S)
RISE_C = (LIMIT_C - START_C * _DECAY) / (1.0 - _DECAY) - AMBIENT_C


@dataclass
class ModelledCard:
    """The card, at a time of its own.

    Attributes:
        t_s: seconds since the start.
        memory_c: what its memory really has; `reading` tells what the sensor says.
        throttled: whether it slows down now.
    """

    t_s: float = 0.0
    memory_c: float = START_C
    core_c: float = START_C
    throttled: bool = False
    _sensor_c: float = START_C

    def run(self, seconds: float, idle_share: float = 0.0, seats_share: float = 1.0, step_s: float = 0.1) -> float:
        """Let time pass; returns tokens per second over it.

        Args:
            seconds: how long.
            idle_share: share of the time in which it rests.
            seats_share: seats in use over seats at the start.
            step_s: step of the integration.
        """
        tokens = 0.0
        steps = max(1, round(seconds / step_s))
        for _ in range(steps):
            speed = THROTTLED_TOK_S / FULL_TOK_S if self.throttled else 1.0
            busy = (1.0 - idle_share) * speed
            power = IDLE + (1.0 - IDLE) * busy * (1.0 - SEATS_SHARE + SEATS_SHARE * seats_share)
            self.memory_c += step_s / MEMORY_S * (AMBIENT_C + RISE_C * power - self.memory_c)
            self.core_c += step_s / CORE_S * (AMBIENT_C + CORE_RISE_C * power - self.core_c)
            self._sensor_c += step_s / SENSOR_S * (self.memory_c - self._sensor_c)
            self.throttled = self.memory_c >= LIMIT_C - (RELEASE_C if self.throttled else 0.0)
            tokens += FULL_TOK_S * busy * seats_share * step_s
            self.t_s += step_s
        return tokens / (steps * step_s)

    def reading(self) -> HardwareEvent:
        """What its sensors would say, labelled as a model."""
        return HardwareEvent(
            t_s=self.t_s,
            device="model",
            name="MODEL of a 4090 48 GB, not measured",
            core_c=math.floor(self.core_c),
            memory_c=math.floor(self._sensor_c),
            core_limit_c=83.0,
            memory_limit_c=LIMIT_C,
            throttle=("hot: the driver lowers the clocks",) if self.throttled else (),
        )
