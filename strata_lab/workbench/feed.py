"""The pump: reads engine events by cursor, several times a second, and pushes what changed to the widgets.

It only reads; changing the engine is `session.py`'s business. A slow page or a slow kernel costs the engine nothing,
because events wait in a ring buffer and pushes are coalesced by the widgets.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from strata_lab.events import Event, ProgressEvent, SentEvent, SettingEvent, StateEvent, StepEvent
from strata_lab.telemetry import bandwidth
from strata_lab.workbench.causes import Ceiling
from strata_lab.workbench.details import Context, PoolDetail
from strata_lab.workbench.experts import ExpertsDetail
from strata_lab.workbench.ladder import Ladder
from strata_lab.workbench.lanes import Lane, Lanes
from strata_lab.workbench.meter import WINDOW_S, RateMeter, Sample
from strata_lab.workbench.panels import Panels, facts, marker_label, toggle_data, values
from strata_lab.workbench.recording import Recorder, Replay
from strata_widgets.rate_chart import pack_samples

PERIOD_S = 0.1
SHARED_PERIOD_S = 0.2  # where the engine computes on the processors that draw the page: drawing takes its time
STATE_EVERY_S = 0.25  # between two pictures of all requests
EXPERTS_EVERY_S = 0.5  # between two readings of the experts' counts
KEPT_S = 60.0  # what the chart shows
MAX_MARKERS = 50
SNAPSHOT_EVERY_S = 2.0  # how long a view that opened late may lack text
SETTLE_AFTER_S = 0.4  # a request without a token for this long is looked up: it may have ended without an event


class Feed:
    """One engine's events on one set of widgets.

    Args:
        engine: an `LLMEngine`, or anything with its `events`, `stats`, `snapshot`, `output`, `optimizations` and
            `explain`.
        panels: where to push.

    Attributes:
        rebuilding: whether a change that rebuilds is going on.
        context: what the panels of details share.
        recorder: where everything is written too, if anywhere.
    """

    def __init__(self, engine: Any, panels: Panels) -> None:
        self.engine, self.panels = engine, panels
        self.rebuilding = False
        self.context = Context(engine, panels.names)
        self.recorder: Recorder | None = None
        self._period_s = SHARED_PERIOD_S if str(engine.device) == "cpu" else PERIOD_S
        self._origin_s = time.perf_counter()
        self._cursor = engine.events.cursor
        self._lock = threading.Lock()  # lanes and meter: the pump and `open` touch them
        self._lanes, self._meter, self._ladder = Lanes(panels.names), RateMeter(), Ladder()
        self._ladder.set(engine.optimizations.as_dict(), "start", self._origin_s)
        self._ceiling_for = -1  # bytes of a step that `context.ceiling` is the bandwidth for
        self._given_ladder = False  # records are shown, not what is toggled
        self._state_due_s = self._experts_due_s = 0.0
        self._prompts_until_s = 0.0  # samples up to here cover prompt tokens
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
            before = self._lanes.shown
            self._lanes.open(lanes)
            for lane in before:  # its text stays with whoever holds the lane; the engine need not keep it as well
                if lane.sent_s is not None and lane not in self._lanes.shown:
                    self.engine.forget(lane.request_id)
            self._quiet = False
            if self.recorder is not None:
                for lane in lanes:
                    self.recorder.write(SentEvent(lane.sent_s or 0.0, lane.request_id, lane.title, lane.prompt))

    def mark(self, label: str) -> None:
        """Put a marker on the chart, now."""
        with self._lock:
            self._markers.append({"t": time.perf_counter() - self._origin_s, "label": label})

    def record(self, recorder: Recorder) -> Recorder:
        """Write everything there too; raises `RuntimeError` while another recorder runs."""
        with self._lock:
            if self.recorder is not None and not self.recorder.stopped:
                recorder.stop()
                raise RuntimeError(f"{self.recorder.path} is being recorded; stop it before another begins")
            self.recorder = recorder
        return recorder

    def ceiling_measured(self) -> None:
        """The bandwidth was measured just now."""
        self._ceiling_for = -1
        self.show_settings()

    def show_ladder(self, data: dict[str, Any]) -> None:
        """Show a climb that was measured before, in place of what is toggled."""
        with self._lock:
            self._given_ladder = True
        self.panels.climb.push(**data, can_restart=True)

    def restart_ladder(self) -> None:
        """Begin the live climb anew."""
        with self._lock:
            self._given_ladder = False
            self._ladder.restart()
            self.panels.climb.push(**self._ladder.data(), can_restart=True)

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
        if stats.bytes_per_step != self._ceiling_for:  # looking it up reads files
            self._ceiling_for = stats.bytes_per_step
            self.context.ceiling = ceiling_of(self.engine, stats.bytes_per_step)

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
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
            changed = [event for event in [*events, *self._asked(now_s, bool(events))] if self._take(event)]
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
            if (
                sample is not None
                and self._ladder.feed(sample, now_s < self._prompts_until_s)
                and not self._given_ladder
            ):
                self.panels.climb.push(**self._ladder.data(), can_restart=True)
            self.context.idle = not busy
            if not (quiet and self._quiet):
                self._push(now_s, sample, last=quiet)
            self._quiet = quiet
            self.panels.details.push(self.context, now_s)
        if lost or changed:
            self._lost += lost
            self.show_settings()
        self._push_state(busy)

    def _asked(self, now_s: float, has_news: bool) -> list[Event]:
        """What the engine tells only when it is asked, where it is due: not more often than it can be looked at."""
        found: list[Event | None] = []
        is_open = self.panels.details.is_open
        if now_s >= self._state_due_s and (has_news or not self._quiet or is_open(PoolDetail.name)):
            self._state_due_s = now_s + STATE_EVERY_S
            found.append(self.engine.snapshot())
        if now_s >= self._experts_due_s and is_open(ExpertsDetail.name):
            self._experts_due_s = now_s + EXPERTS_EVERY_S
            found.append(self.engine.experts())
        return [event for event in found if event is not None]

    def _take(self, event: Event) -> bool:
        """Take in one event; whether settings changed."""
        self.panels.details.take(event)
        if self.recorder is not None:
            self.recorder.write(event)
        if isinstance(event, StepEvent):
            self._step = event
            if event.num_prefill_tokens:
                self._prompts_until_s = event.t_s + WINDOW_S
            for draft in event.drafts:
                self._lanes.feed_draft(draft)
            self._meter.feed(event)
            for token in event.tokens:
                self._lanes.feed(token, event.t_s)
        elif isinstance(event, SettingEvent) and event.changes:  # else it only counts its experts, or stops to
            label = marker_label(event.changes)
            self._markers.append({"t": event.t_s - self._origin_s, "label": label})
            self._ladder.set(self.engine.optimizations.as_dict(), label, event.t_s)
        elif isinstance(event, StateEvent):
            self._lanes.feed_state(event)
        elif isinstance(event, SentEvent):
            self._lanes.open([Lane(event.request_id, event.title, event.prompt, event.t_s)], replaces=False)
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
        text: dict[str, Any] = {"lanes": self._lanes.data(self._meter.stream)}
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
        num_unfinished = len(self._lanes.unfinished())
        self.panels.prompt.push(num_unfinished=num_unfinished)
        self.panels.loads.push(num_unfinished=num_unfinished)


def ceiling_of(engine: Any, step_bytes: int) -> Ceiling:
    """The bandwidth measured on the engine's device for steps of that size; unknown where it was never measured."""
    if isinstance(engine, Replay):
        return engine.ceiling
    known = bandwidth.known_ceiling(str(engine.device), step_bytes)
    return Ceiling() if known is None else Ceiling(known.bytes_s, known.level, known.reader)
