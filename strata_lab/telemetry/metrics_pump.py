"""Reads an engine's event log off the hot path and adds up what metrics want of it.

A thread wakes every `READ_EVERY_S` seconds and takes what is new, so that a log of 8192 events lasts between two
scrapes at any speed; it waits on a clock and not on the log, whose every event would wake it. It knows no Prometheus.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata_lab.events import Event, RequestEvent, SettingEvent, StepEvent
from strata_lab.telemetry.achieved import DecodeReads
from strata_lab.telemetry.bandwidth import known_ceiling

if TYPE_CHECKING:
    from strata_lab.engine import LLMEngine

READ_EVERY_S = 0.5
MBU_WINDOW_S = 10.0

# Upper bounds in seconds. From what a small model on a GPU does to what a long prompt on a CPU does.
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
ITL_S = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1.0,
    2.5,
)
E2E_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Histogram:
    """Counts of values by upper bound.

    Attributes:
        bounds: ascending upper bounds, inclusive.
        total: sum of all values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.total = tuple(bounds), 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it), the last one "+Inf"."""
        rows, below = [], 0
        for bound, count in zip((*map(str, map(float, self.bounds)), "+Inf"), self._counts, strict=True):
            below += count
            rows.append((bound, float(below)))
        return rows


@dataclass(frozen=True)
class Report:
    """What has been added up.

    Attributes:
        histograms: (name, help, counts).
        step_s: part of a step to seconds.
        steps: "decode", "prefill" or "mixed" to steps.
        changes: toggle to changes in force.
        bytes_moved: by all steps.
        lost: events that were overwritten before they were read.
        mbu: of the decode steps of the last `MBU_WINDOW_S`; None without any, or without a measured bandwidth.
    """

    histograms: list[tuple[str, str, Histogram]]
    step_s: dict[str, float]
    steps: dict[str, int]
    changes: dict[str, int]
    bytes_moved: int
    lost: int
    mbu: float | None


class MetricsPump:
    """Adds up the events of one engine, which it does not keep alive."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine, self._events = weakref.ref(engine), engine.events
        self._bandwidth_bytes_s = _bandwidth(engine)
        self._cursor = self._lost = self._bytes = 0
        self._lock = threading.Lock()
        self._gone = threading.Event()
        weakref.finalize(engine, self._gone.set)
        self._last_s: dict[str, float] = {}  # request to the time of its latest token
        self._reads = DecodeReads(MBU_WINDOW_S)
        self._step_s: defaultdict[str, float] = defaultdict(float)
        self._steps, self._changes = Counter[str](), Counter[str]()
        self._ttft, self._itl, self._tpot, self._e2e, self._step = map(Histogram, (TTFT_S, ITL_S, ITL_S, E2E_S, ITL_S))
        self._prompt, self._output, self._batch = map(Histogram, (TOKENS, TOKENS, STEP_TOKENS))

    def start(self) -> None:
        """Begin to read; the thread ends with the engine."""
        threading.Thread(target=self._run, name="strata-metrics", daemon=True).start()

    def _run(self) -> None:
        while not self._gone.wait(READ_EVERY_S):
            self.drain()
            engine = self._engine()
            if engine is None or engine.closed:
                return
            del engine

    def drain(self) -> None:
        """Take in what is new in the log."""
        with self._lock:
            events, self._cursor, lost = self._events.since(self._cursor)
            self._lost += lost
            for event in events:
                self._take(event)

    def report(self) -> Report:
        """Everything so far, up to this moment."""
        self.drain()
        with self._lock:
            return Report(
                histograms=[
                    ("vllm:time_to_first_token_seconds", "Arrival to first token, of requests that ended.", self._ttft),
                    ("vllm:inter_token_latency_seconds", "Between two tokens of a request.", self._itl),
                    (
                        "vllm:request_time_per_output_token_seconds", "Mean gap of a request that ended.", self._tpot,
                    ),
                    ("vllm:e2e_request_latency_seconds", "Arrival to end of a request.", self._e2e),
                    ("vllm:request_prompt_tokens", "Tokens of a request's prompt.", self._prompt),
                    ("vllm:request_generation_tokens", "Tokens that a request generated.", self._output),
                    ("vllm:iteration_tokens_total", "Tokens computed in a step.", self._batch),
                    ("strata:step_duration_seconds", "Wall time of a step.", self._step),
                ],
                step_s=dict(self._step_s), steps=dict(self._steps), changes=dict(self._changes),
                bytes_moved=self._bytes, lost=self._lost, mbu=self._reads.mbu(self._bandwidth_bytes_s),
            )  # fmt: skip

    def _take(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            self._take_step(event)
        elif isinstance(event, RequestEvent):
            self._take_end(event)
        elif isinstance(event, SettingEvent):
            self._changes.update(event.changes.keys())

    def _take_step(self, step: StepEvent) -> None:
        for token in step.tokens:
            before = self._last_s.get(token.request_id)
            if before is not None and step.t_s > before and token.token_id >= 0:  # tokens of one step have one gap
                self._itl.add(step.t_s - before)
            self._last_s[token.request_id] = step.t_s
        kind = "decode" if not step.num_prefill_tokens else "mixed" if step.num_decode_tokens else "prefill"
        self._steps[kind] += 1
        parts = {"schedule": step.schedule_ms, "forward": step.forward_ms, "sample": step.sample_ms,
                 "commit": step.commit_ms}  # fmt: skip
        parts["other"] = max(0.0, step.duration_ms - sum(parts.values()))
        for part, ms in parts.items():
            self._step_s[part] += ms / 1e3
        self._step.add(step.duration_ms / 1e3)
        self._batch.add(step.num_prefill_tokens + step.num_decode_tokens)
        self._bytes += step.bytes_moved
        self._reads.feed(step)

    def _take_end(self, end: RequestEvent) -> None:
        self._last_s.pop(end.request_id, None)
        self._e2e.add(end.e2e_ms / 1e3)
        self._prompt.add(end.num_prompt_tokens)
        self._output.add(end.num_output_tokens)
        if end.ttft_ms is not None:
            self._ttft.add(end.ttft_ms / 1e3)
            if end.num_output_tokens > 1:
                self._tpot.add((end.e2e_ms - end.ttft_ms) / 1e3 / (end.num_output_tokens - 1))


def _bandwidth(engine: LLMEngine) -> float | None:
    """Bytes per second that this machine was measured to read; a scrape measures nothing itself."""
    if engine.ceilings is not None:
        return engine.ceilings.bytes_s
    known = known_ceiling(str(engine.device), engine.stats().bytes_per_step)
    return None if known is None else known.bytes_s
