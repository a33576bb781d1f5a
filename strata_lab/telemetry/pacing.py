"""Idle slices between steps: how a card does less per second while every step computes what it always does.

The engine's loop hands each step to its governor's `run`; without one that is a plain call. A pacer lets steps run for
`SLICE_S`, waits until the device has nothing queued (a runner that works ahead of the host would otherwise use the
pause to catch up), and then rests in proportion. Slices are short against a cooler's time constant and long against a
step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

SLICE_S = 0.02
MAX_REST_S = 0.25  # at a time; the rest is owed, so that a long prompt does not stop everybody for seconds

T = TypeVar("T")


class Pacer:
    """Rests between steps.

    Args:
        drain: waits until the device has finished what is queued.

    Attributes:
        idle_share: share of the time to rest, 0.0 to below 1.0; may be set by any thread.
        rested_s: rested so far, seconds.
    """

    def __init__(self, drain: Callable[[], None]) -> None:
        self.idle_share = 0.0
        self.rested_s = 0.0
        self._drain = drain
        self._busy_s = 0.0
        self._stop = threading.Event()

    def run(self, step: Callable[[], T]) -> T:
        """One step, and the rest that is due."""
        share, started = self.idle_share, time.perf_counter()
        result = step()
        if share <= 0.0:
            self._busy_s = 0.0
            return result
        self._busy_s += time.perf_counter() - started
        if self._busy_s >= SLICE_S:
            self._rest(share)
        return result

    def _rest(self, share: float) -> None:
        started = time.perf_counter()
        self._drain()
        self._busy_s += time.perf_counter() - started
        ratio = share / (1.0 - share)
        rest_s = min(self._busy_s * ratio, MAX_REST_S)
        started = time.perf_counter()
        self._stop.wait(rest_s)
        took_s = time.perf_counter() - started
        self.rested_s += took_s
        self._busy_s -= took_s / ratio  # a pause that took longer than asked for is time in hand

    def stop(self) -> None:
        """End a rest at once, and rest no more."""
        self.idle_share = 0.0
        self._stop.set()
