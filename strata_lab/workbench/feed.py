"""The pump: reads engine events by cursor, ten times a second, and pushes what changed to the widgets.

It only reads; changing the engine is `session.py`'s business. A slow page or a slow kernel costs the engine nothing,
because events wait in a ring buffer and pushes are coalesced by the widgets.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from strata_lab.events import ProgressEvent, SettingEvent, StepEvent
from strata_lab.workbench.lanes import Lane, Lanes
from strata_lab.workbench.meter import RateMeter, Sample
from strata_lab.workbench.panels import Panels, facts, marker_label, toggle_data, values
from strata_widgets.rate_chart import pack_samples

PERIOD_S = 0.1
KEPT_S = 60.0  # what the chart shows
MAX_MARKERS = 50
SNAPSHOT_EVERY_S = 2.0  # how long a view that opened late may lack text
SETTLE_AFTER_S = 0.4  # a request without a token for this long is looked up: it may have ended without an event


class Feed:
    """One engine's events on one set of widgets.

    Args:
        engine: an `LLMEngine`, or anything with its `events`, `stats`, `output`, `optimizations` and `explain`.
        panels: where to push.
    """

    def __init__(self, engine: Any, panels: Panels) -> None:
        self.engine, self.panels = engine, panels
        self.rebuilding = False
        self._origin_s = time.perf_counter()
        self._cursor = engine.events.cursor
        self._lock = threading.Lock()  # lanes and meter: the pump and `open` touch them
        self._lanes, self._meter = Lanes(), RateMeter()
        self._samples: deque[Sample] = deque()
        self._markers: deque[dict[str, Any]] = deque(maxlen=MAX_MARKERS)
        self._step: Any = engine.stats()
        self._lost = 0
        self._task, self._fraction, self._drop_task = "", -1.0, False
        self._snapshot_due_s = 0.0
        self._quiet = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="strata-workbench", daemon=True)

    def start(self) -> None:
        """Begin to pump."""
        self.show_settings()
        self._thread.start()

    def stop(self) -> None:
        """Stop pumping and push the last state, before the engine is closed. Safe to repeat."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
            if not self.engine.closed:
                self.tick()

    def open(self, lanes: list[Lane], send: Callable[[], None]) -> None:
        """Send new requests and show them; when `send` raises, what is on screen stays."""
        with self._lock:  # no event is read meanwhile, so no token comes before its lane
            send()
            self._lanes.open(lanes)
            self._quiet = False

    def unfinished(self) -> list[Lane]:
        """Requests on screen that have not ended."""
        with self._lock:
            return self._lanes.unfinished()

    def change_ended(self) -> None:
        """A change of settings is over, however it went: its progress is no longer shown."""
        self.rebuilding, self._drop_task = False, True

    def show_settings(self) -> None:
        """Push the settings in force and what they mean here."""
        settings, stats = self.engine.optimizations.as_dict(), self.engine.stats()
        self.panels.toggles.push(toggles=toggle_data(settings, self.engine.explain()))
        notes = [f"{fallback.feature}: {fallback.reason}" for fallback in self.engine.fallbacks]
        if self._lost:
            notes.append(f"{self._lost} events were dropped before they were read; speeds of that time are too low")
        self.panels.header.push(facts=facts(str(self.engine.device), settings, stats), notes=notes)

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            try:
                self.tick()
            except Exception as error:
                if self.engine.closed:
                    break
                self.panels.header.push(problem=f"The panel could not be updated: {type(error).__name__}: {error}")

    def tick(self) -> None:
        """Read what is new and push it."""
        drop_task, self._drop_task = self._drop_task, False  # read first: its last events are then among these
        events, self._cursor, lost = self.engine.events.since(self._cursor)
        now_s = time.perf_counter()
        with self._lock:
            changed = [event for event in events if self._take(event)]
            if drop_task:
                self._task, self._fraction = "", -1.0
            if not events and not self._quiet:
                self._step = self.engine.stats()  # requests that are aborted free their blocks without a step
            self._settle(now_s)
            busy = bool(self._lanes.unfinished()) or self._step.num_running + self._step.num_waiting > 0
            quiet = not events and not busy
            if quiet:
                self._meter.idle()
            sample = self._meter.sample(now_s)
            if not (quiet and self._quiet):
                self._push(now_s, sample, last=quiet)
            self._quiet = quiet
        if lost or changed:
            self._lost += lost
            self.show_settings()
        self._push_state(busy)

    def _take(self, event: Any) -> bool:
        """Take in one event; whether settings changed."""
        if isinstance(event, StepEvent):
            self._step = event
            self._meter.feed(event)
            for token in event.tokens:
                self._lanes.feed(token, event.t_s)
        elif isinstance(event, SettingEvent):
            self._markers.append({"t": event.t_s - self._origin_s, "label": marker_label(event.changes)})
        elif isinstance(event, ProgressEvent):
            done = event.fraction >= 1.0
            self._task, self._fraction = ("", -1.0) if done else (event.task, event.fraction)
        return isinstance(event, SettingEvent)

    def _settle(self, now_s: float) -> None:
        """Ask the engine about requests that went silent: aborted and failed ones end without a step."""
        idle = self._step.num_running + self._step.num_waiting == 0
        for lane in self._lanes.shown:
            ended = lane.finish_reason is not None
            silent = idle or now_s - max(lane.last_s or 0.0, lane.sent_s or 0.0) > SETTLE_AFTER_S
            if lane.has_gap if ended else silent:
                try:
                    lane.settle(self.engine.output(lane.request_id))
                except KeyError:  # its caller has fetched it, and took the rest of the text along
                    lane.has_gap = False
                    lane.end(lane.finish_reason or "abort")

    def _push(self, now_s: float, sample: Sample | None, *, last: bool) -> None:
        lanes = self._lanes.shown
        first_tokens = [lane for lane in lanes if lane.ttft_ms is not None]
        latest = max(first_tokens, key=lambda lane: lane.sent_s or 0.0, default=None)
        state: dict[str, Any] = {
            "values": values(sample, self._step, latest.ttft_ms if latest else None),
            "markers": list(self._markers),
        }
        news: list[Sample] = [] if sample is None else [sample]
        self._samples.extend(news)
        text: dict[str, Any] = {"lanes": [lane.as_dict(self._meter.stream(lane.request_id)) for lane in lanes]}
        pieces = self._lanes.pieces()
        if last or now_s >= self._snapshot_due_s:
            self._snapshot_due_s = now_s + SNAPSHOT_EVERY_S
            while self._samples and self._samples[0].t_s < self._samples[-1].t_s - KEPT_S:
                self._samples.popleft()
            state["history"] = self._pack(list(self._samples))
            text["snapshot"] = self._lanes.snapshot()
        self.panels.chart.push({"samples": 1} if news else None, [self._pack(news)] if news else [], **state)
        self.panels.stream.push({"append": pieces} if pieces else None, **text)

    def _pack(self, samples: list[Sample]) -> bytes:
        rows = ((s.t_s - self._origin_s, s.output_tok_s, s.tok_s_per_stream, s.num_generating) for s in samples)
        return pack_samples(rows)

    def _push_state(self, busy: bool) -> None:
        state = "rebuilding" if self.rebuilding else "generating" if busy else "ready"
        self.panels.header.push(state=state, task=self._task, fraction=self._fraction, problem="")
        self.panels.prompt.push(num_unfinished=len(self._lanes.unfinished()))
