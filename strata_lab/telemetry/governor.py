"""The thermal governor: reads the card's sensors and makes the engine do a little less before the card gets too hot.

What to do is `telemetry/heat.py`'s decision; this carries it out, in the thread of a `Monitor`: it tells the pacer how
much to rest, and the engine, at its safe point, how many seats there are. Whatever changes goes out as a
`GovernorEvent`. Clocks, power limits and fans are never touched; an event names the command that a user could run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from strata_lab.events import GovernorEvent, HardwareEvent
from strata_lab.telemetry.heat import Controller, Decision
from strata_lab.telemetry.monitor import INTERVAL_S, Monitor, Source
from strata_lab.telemetry.pacing import Pacer

ADVISED_POWER = 0.8  # of the limit in force: about a tenth of the speed of a decode step, far more of the heat
REPORTED_SHARE = 0.02  # a change of the idle share below this is no event

T = TypeVar("T")


class Governed(Protocol):
    """What a governor steers: the engine's loop."""

    @property
    def num_running(self) -> int:
        """Requests that run."""
        ...

    @property
    def seats(self) -> int:
        """Most requests that may run now."""
        ...

    def reseat(self, seats: int, governor: Any) -> None:
        """Change that between two steps, unless another governor is in charge by then."""
        ...


class NoGovernor:
    """`thermal_governor="off"`: steps run one after another."""

    policy = "off"
    idle_share = 0.0

    def run(self, step: Callable[[], T]) -> T:
        """One step."""
        return step()

    def start(self, engine: Governed, report: Callable[[GovernorEvent], Any]) -> None:
        """Nothing to start."""

    def stop(self) -> None:
        """Nothing to stop."""

    def join(self) -> None:
        """Nothing to wait for."""


class Governor:
    """Keeps a card below its limits.

    Args:
        policy: "pace", "shrink" or "precise"; see `telemetry/heat.py`.
        seats: the setting of `max_num_seqs`.
        source: makes what is read; called when it starts.
        drain: waits until the device has finished what is queued.
        interval_s: time between two readings.
    """

    def __init__(
        self, policy: str, seats: int, source: Callable[[], Source], drain: Callable[[], None],
        interval_s: float = INTERVAL_S,
    ) -> None:  # fmt: skip
        self.policy, self.seats = policy, seats
        self.pacer = Pacer(drain)
        self._controller = Controller(policy, seats)
        self._source, self._interval_s = source, interval_s
        self._monitor: Monitor | None = None
        self._engine: Governed | None = None
        self._report: Callable[[GovernorEvent], Any] = lambda event: None
        self._told: tuple[float, int, str] | None = None

    @property
    def idle_share(self) -> float:
        """Share of the time in which it rests now."""
        return self.pacer.idle_share

    def run(self, step: Callable[[], T]) -> T:
        """One step, and the rest that is due."""
        return self.pacer.run(step)

    def start(self, engine: Governed, report: Callable[[GovernorEvent], Any]) -> None:
        """Begin to read and to govern; does nothing if it does already.

        Args:
            engine: what to steer.
            report: takes an event whenever something changes.
        """
        if self._monitor is None:
            self._engine, self._report = engine, report
            self._monitor = Monitor(self._source(), self.observe, self._interval_s)
            self._monitor.start()

    def stop(self) -> None:
        """Govern no more; returns at once. Seats are the business of whoever takes over."""
        self.pacer.stop()
        if self._monitor is not None:
            self._monitor.stop()

    def join(self) -> None:
        """After `stop`, wait until it steers no more; not in a thread that it may be waiting for."""
        if self._monitor is not None:
            self._monitor.join()

    def observe(self, reading: HardwareEvent) -> None:
        """Decide by a reading and carry it out; called in the monitor's thread."""
        assert self._engine is not None, "start comes first"
        if reading.note:
            decision = Decision(0.0, self.seats, "no sensor", "none", None, None, None, reading.note)
        else:
            decision = self._controller.observe(reading, self._engine.num_running)
        self.pacer.idle_share = decision.idle_share
        if decision.seats != self._engine.seats:
            try:
                self._engine.reseat(decision.seats, self)
            except RuntimeError:  # the engine was closed meanwhile
                self.stop()
                return
        self._tell(self._event(decision, advice(reading)))
        if reading.note:
            self.stop()

    def _event(self, d: Decision, command: str) -> GovernorEvent:
        return GovernorEvent(
            t_s=time.perf_counter(),
            policy=self.policy,
            action=d.action,
            idle_share=d.idle_share,
            max_num_seqs=d.seats,
            sensor=d.sensor,
            temperature_c=d.temperature_c,
            predicted_c=d.predicted_c,
            target_c=d.target_c,
            reason=d.reason,
            advice=command if d.idle_share or d.seats < self.seats else "",
        )

    def _tell(self, event: GovernorEvent) -> None:
        """Report what differs from the last event; the first one always."""
        if self._told is not None:
            share, seats, action = self._told
            ended = event.idle_share == 0.0 and share > 0.0
            same = abs(event.idle_share - share) < REPORTED_SHARE and event.max_num_seqs == seats and not ended
            if same and (event.action == action or event.action != "no sensor"):
                return
        self._told = event.idle_share, event.max_num_seqs, event.action
        self._report(event)


def advice(reading: HardwareEvent) -> str:
    """The command that lowers a card's power limit, for the user to run; empty where no limit is known."""
    if reading.power_limit_w is None:
        return ""
    index = reading.device.partition(":")[2] or "0"
    return f"sudo nvidia-smi -i {index} -pl {round(reading.power_limit_w * ADVISED_POWER)}"
