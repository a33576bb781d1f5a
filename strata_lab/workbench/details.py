"""The panels of details: each takes events while it is open, and nothing at all while it is closed.

A detail is a widget with the few lines that turn events into its traits. `Details` opens and closes them, and hands
them events; when to do so is `feed.py`'s business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from strata_lab.events import Event, GovernorEvent, HardwareEvent, SettingEvent, StateEvent, StepEvent
from strata_lab.workbench.causes import GAUGE_NUMBERS, SHARE_TIP, Ceiling, RooflineMeter, cause_data, split_step
from strata_lab.workbench.names import Names
from strata_lab.workbench.pool import lane_data, lane_totals, map_data
from strata_lab.workbench.recording import Replay
from strata_lab.workbench.sensors import Sensors, no_sensors
from strata_widgets import BatchLanes, BlockMap, HardwareStrip, RooflineGauge, StepTimeline
from strata_widgets._base import StrataWidget
from strata_widgets.step_timeline import pack_steps

KEPT_STEPS = 240
SNAPSHOT_EVERY_S = 2.0  # how long a view that opened late may lack steps
UNMEASURED = "The bandwidth of this machine is not measured yet, so the forward pass is one block."


@dataclass
class Context:
    """What details share.

    Attributes:
        engine: whose events they are.
        names: of requests.
        ceiling: measured bandwidth for what a step reads now.
        idle: whether the engine has nothing to do.
        measuring: whether the bandwidth is being measured.
    """

    engine: Any
    names: Names
    ceiling: Ceiling = field(default_factory=Ceiling)
    idle: bool = True
    measuring: bool = False


class Detail(Protocol):
    """One panel.

    Attributes:
        name, title, tip: of its button.
        widgets: what it puts on the page, side by side.
    """

    name: str
    title: str
    tip: str

    @property
    def widgets(self) -> tuple[StrataWidget, ...]:
        """What it puts on the page."""
        ...

    def take(self, event: Event) -> None:
        """Take in an event."""
        ...

    def push(self, context: Context, now_s: float) -> None:
        """Send what has changed; called at every tick while it is open."""
        ...


class CausesDetail:
    """Timeline and roofline gauge."""

    name, title, tip = (
        "causes",
        "Causes",
        "Milliseconds of each step by cause, and the distance from the memory's limit.",
    )

    def __init__(self) -> None:
        self.timeline = StepTimeline(causes=cause_data(Ceiling()))
        self.gauge = RooflineGauge(numbers=GAUGE_NUMBERS, values=[None] * len(GAUGE_NUMBERS), share_tip=SHARE_TIP)
        self.widgets = (self.timeline, self.gauge)
        self._meter = RooflineMeter()
        self._new: list[StepEvent] = []
        self._rows: deque[tuple[float, ...]] = deque(maxlen=KEPT_STEPS)
        self._due_s = 0.0

    def take(self, event: Event) -> None:
        """Take in an event."""
        if isinstance(event, StepEvent):
            self._meter.feed(event)
            self._new.append(event)
        elif isinstance(event, SettingEvent):
            self._meter.forget()

    def push(self, context: Context, now_s: float) -> None:
        """Send new steps, and the gauge's reading."""
        ceiling = context.ceiling
        rows = [split_step(step, ceiling) for step in self._new]
        self._new.clear()
        self._rows.extend(rows)
        state: dict[str, Any] = {"note": "" if ceiling.bytes_s else UNMEASURED, "causes": cause_data(ceiling)}
        if context.idle or now_s >= self._due_s:
            self._due_s = now_s + SNAPSHOT_EVERY_S
            state["history"] = pack_steps(self._rows)
        self.timeline.push({"steps": len(rows)} if rows else None, [pack_steps(rows)] if rows else [], **state)
        unknown = ceiling.bytes_s is None
        note = f"Limit: {ceiling.level} of this machine, {ceiling.reader}." if ceiling.reader else ""
        if unknown:
            note = "The limit is not measured on this machine yet. "
            note += "It takes about ten seconds." if context.idle else "Stop the streams to measure it."
        self.gauge.push(
            **self._meter.reading(ceiling),
            can_measure=unknown and context.idle and not context.measuring,
            busy=context.measuring,
            note=note,
        )


class PoolDetail:
    """KV block map and batch lanes: both are pictures of the same moment."""

    name, title = "blocks", "KV blocks and batch"
    tip = "Which blocks of the KV pool belong to whom; who prefills, decodes, waits, was set aside or preempted."

    def __init__(self) -> None:
        self.map, self.lanes = BlockMap(), BatchLanes()
        self.widgets = (self.map, self.lanes)
        self._state: StateEvent | None = None
        self._preempted = 0

    def take(self, event: Event) -> None:
        """Take in an event."""
        if isinstance(event, StateEvent):
            self._state = event
        elif isinstance(event, StepEvent):
            self._preempted += event.num_preempted

    def push(self, context: Context, now_s: float) -> None:
        """Send the latest picture."""
        state, self._state = self._state, None
        if state is not None:
            self.map.push(**map_data(state, context.names))
            self.lanes.push(**lane_data(state, context.names), totals=lane_totals(state, self._preempted))


class HardwareDetail:
    """Sensors, read once a second unless the governor reports them."""

    name, title, tip = "hardware", "Hardware", "Temperature, power, clocks and load, in the order in which to look."

    def __init__(self) -> None:
        self.strip = HardwareStrip(**no_sensors())
        self.widgets = (self.strip,)
        self._sensors = Sensors()
        self._reported: HardwareEvent | None = None
        self._governor: GovernorEvent | None = None

    def take(self, event: Event) -> None:
        """Take in an event."""
        if isinstance(event, HardwareEvent):
            self._reported = event
        elif isinstance(event, GovernorEvent):
            self._governor = event

    def push(self, context: Context, now_s: float) -> None:
        """Send readings that are due."""
        device = None if isinstance(context.engine, Replay) else str(context.engine.device)
        readings = self._sensors.due(now_s, device, self._reported, self._governor)
        if readings is not None:
            self.strip.push(**readings)


class Details:
    """Opens, closes and feeds panels of details.

    Args:
        all_details: in the order of their buttons.
        changed: called with the open ones when that has changed.
    """

    def __init__(self, all_details: Sequence[Detail], changed: Callable[[list[Detail]], None]) -> None:
        self.all = {detail.name: detail for detail in all_details}
        self._changed = changed
        self._open: dict[str, Detail] = {}

    @property
    def open_names(self) -> list[str]:
        """Those that are open, in the order of their buttons."""
        return [name for name in self.all if name in self._open]

    def set_open(self, name: str, is_open: bool) -> None:
        """Open or close one.

        Raises:
            ValueError: there is none of that name.
        """
        if name not in self.all:
            raise ValueError(f"there is no panel {name!r}; there are {', '.join(self.all)}")
        opened = dict(self._open)
        if is_open:
            opened[name] = self.all[name]
        else:
            opened.pop(name, None)
        self._open = opened  # replaced whole: the pump may be going through the old one
        self._changed([self.all[n] for n in self.open_names])

    def is_open(self, name: str) -> bool:
        """Whether it is open."""
        return name in self._open

    def take(self, event: Event) -> None:
        """Hand an event to those that are open."""
        for detail in self._open.values():
            detail.take(event)

    def push(self, context: Context, now_s: float) -> None:
        """Let those that are open send what they have."""
        for detail in self._open.values():
            detail.push(context, now_s)
