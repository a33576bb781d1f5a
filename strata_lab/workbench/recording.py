"""A session as a file, and a file as a session: every engine event with its time, one JSON object per line.

The first line says what was recorded and in which version of this format; the others are events. `Replay` stands where
an engine stands and lets the events happen again at their pace, so that slides, documents and tests of the page show
real figures without an engine. It computes nothing and cannot be changed.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO, get_args

from strata_lab.apply import Fallback
from strata_lab.events import (
    Draft,
    Event,
    EventLog,
    RequestView,
    SentEvent,
    SettingEvent,
    StateEvent,
    StepEvent,
    TokenEvent,
)
from strata_lab.request import RequestOutput
from strata_lab.workbench.causes import Ceiling

VERSION = 1
_KINDS: dict[str, Any] = {one.__name__: one for one in get_args(Event)}
_NESTED: dict[str, Any] = {"tokens": TokenEvent, "drafts": Draft, "requests": RequestView}


def encode(event: Event, origin_s: float) -> str:
    """One line; times count from `origin_s`."""
    data = {f.name: getattr(event, f.name) for f in fields(event)} | {"t_s": event.t_s - origin_s}
    for name in _NESTED.keys() & data.keys():
        data[name] = [asdict(one) for one in data[name]]
    return json.dumps({"kind": type(event).__name__, **data}, ensure_ascii=False, default=str)


def decode(data: dict[str, Any], origin_s: float) -> Event:
    """The event of a line whose times count from `origin_s`."""
    values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in data.items() if n != "kind"}
    for name in _NESTED.keys() & values.keys():
        values[name] = tuple(_nested(_NESTED[name], one) for one in values[name])
    values["t_s"] += origin_s
    event: Event = _KINDS[data["kind"]](**values)
    return event


def _nested(kind: Any, data: dict[str, Any]) -> Any:
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in data.items()})


class Recorder:
    """Writes events to a file.

    Args:
        path: of the file, which is replaced.
        engine: what is recorded.
        model: its name.
        ceiling: measured bandwidth.

    Attributes:
        path: of the file.
        stopped: whether nothing is written any more.
    """

    def __init__(self, path: str | Path, engine: Any, model: str, ceiling: Ceiling) -> None:
        self.path = Path(path)
        self.stopped = False
        self._lock = threading.Lock()
        self._origin_s = time.perf_counter()
        head = {
            "strata_recording": VERSION,
            "model": model,
            "device": str(engine.device),
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "optimizations": engine.optimizations.as_dict(),
            "effects": engine.explain(),
            "fallbacks": [[fallback.feature, fallback.reason] for fallback in engine.fallbacks],
            "stats": asdict(engine.stats()),
            "num_experts": engine.model_config.num_experts,
            "ceiling": asdict(ceiling),
        }
        self._file: TextIO = self.path.open("w", encoding="utf-8")
        self._file.write(json.dumps(head, ensure_ascii=False) + "\n")

    def write(self, event: Event) -> None:
        """Add an event; nothing happens once it is stopped."""
        with self._lock:
            if not self.stopped:
                self._file.write(encode(event, self._origin_s) + "\n")

    def stop(self) -> None:
        """Finish the file. Safe to repeat."""
        with self._lock:
            if not self.stopped:
                self.stopped = True
                self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@dataclass
class _Request:
    """What a recording knows of one request."""

    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    seen_s: float = 0.0


class Settings(dict[str, Any]):
    """Toggles in force, as the recording says."""

    def as_dict(self) -> dict[str, Any]:
        """Name to value."""
        return dict(self)


class Replay:
    """A recording in the place of an engine: it has events, stats and texts, and refuses everything else.

    Args:
        path: of the file.

    Raises:
        ValueError: the file is no recording, is damaged, or is of another version; the line is named.

    Attributes:
        ceiling: bandwidth that was known when it was made.
        badge: what the header says.
        finished: set when the last event has happened.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._head = head = self._read_head()
        self.config = SimpleNamespace(model=head["model"])
        self.model_config = SimpleNamespace(num_experts=head.get("num_experts", 0))
        self.device: str = head["device"]
        self.tokenizer = None
        self.optimizations = Settings(head["optimizations"])
        self.fallbacks = tuple(Fallback(*pair) for pair in head["fallbacks"])
        self.ceiling = Ceiling(**head["ceiling"])
        self.badge = f"Recording of {head['made'][:10]}"
        self.events = EventLog()
        self.closed = False
        self.finished = threading.Event()
        self._stats = dict(head["stats"], num_running=0, num_waiting=0)
        self._requests: dict[str, _Request] = {}
        self._state: StateEvent | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="strata-replay", daemon=True)
        for _ in self._events(0.0):  # damage is told now, not in the middle of a talk
            pass

    # -- what the workbench asks of an engine -------------------------------------------------------------------

    def start(self) -> None:
        """Let the recording begin; does nothing if it has."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Stop. Safe to repeat."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.closed = True

    def stats(self) -> Any:
        """Counters as of the last event."""
        with self._lock:
            return SimpleNamespace(**self._stats)

    def snapshot(self) -> StateEvent | None:
        """The last picture of all requests; None before the first."""
        return self._state

    def watch_experts(self, on: bool = True) -> None:
        """What was counted comes with the recording."""

    def experts(self) -> None:
        """It comes as an event."""

    def explain(self) -> dict[str, str]:
        """What each toggle did on the machine that was recorded."""
        effects: dict[str, str] = self._head["effects"]
        return effects

    def output(self, request_id: str) -> RequestOutput:
        """Text of a request so far; raises `KeyError` for one that has not come yet."""
        with self._lock:
            r = self._requests[request_id]
            return RequestOutput(request_id, "", (), r.text, tuple(range(r.num_tokens)), r.finish_reason, error=r.error)

    def abort(self, request_id: str) -> bool:
        """A recording cannot be changed."""
        return False

    def apply(self, **changes: Any) -> Any:
        """A recording cannot be changed: raises `RuntimeError`."""
        raise RuntimeError(f"this is a recording, {', '.join(changes)} cannot be changed; make a Workbench of a model")

    # -- the recording ------------------------------------------------------------------------------------------

    def _read_head(self) -> dict[str, Any]:
        with self.path.open(encoding="utf-8") as file:
            line = file.readline()
        try:
            head: dict[str, Any] = json.loads(line)
            version = head["strata_recording"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self.path} is no recording; make one with Workbench.record(path)") from None
        if version != VERSION:
            raise ValueError(f"{self.path} is a recording of version {version}, this reads {VERSION}; record it again")
        return head

    def _events(self, origin_s: float) -> Iterator[Event]:
        with self.path.open(encoding="utf-8") as file:
            next(file)
            for number, line in enumerate(file, start=2):
                try:
                    yield decode(json.loads(line), origin_s)
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"{self.path}, line {number}: no event ({error}); record it again") from error

    def _run(self) -> None:
        origin_s = time.perf_counter()
        for event in self._events(origin_s):
            if self._stop.wait(max(0.0, event.t_s - time.perf_counter())):
                return
            with self._lock:
                self._book(event)
            self.events.append(event)
        with self._lock:
            for request in self._requests.values():
                request.finish_reason = request.finish_reason or "abort"
            self._stats |= {"num_running": 0, "num_waiting": 0}
        self.finished.set()

    def _book(self, event: Event) -> None:
        if isinstance(event, SentEvent):
            self._requests[event.request_id] = _Request(seen_s=event.t_s)
        elif isinstance(event, SettingEvent):
            self.optimizations.update(event.changes)
        elif isinstance(event, StateEvent):
            self._state = event
            alive = {view.request_id for view in event.requests}
            for request_id, request in self._requests.items():
                if request_id not in alive and request.seen_s < event.t_s:
                    request.finish_reason = request.finish_reason or "abort"
            waiting = sum(view.state in ("waiting", "preempted") for view in event.requests)
            self._stats |= {"num_running": len(alive) - waiting, "num_waiting": waiting}
        elif isinstance(event, StepEvent):
            for name in ("num_running", "num_waiting", "kv_blocks_used", "kv_blocks_total"):
                self._stats[name] = getattr(event, name)
            for token in event.tokens:
                self._book_token(token, event.t_s)

    def _book_token(self, token: TokenEvent, t_s: float) -> None:
        request = self._requests.setdefault(token.request_id, _Request())
        request.text += token.text
        request.num_tokens = token.index + 1
        request.seen_s = t_s
        request.finish_reason, request.error = token.finish_reason or request.finish_reason, token.error
