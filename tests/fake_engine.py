"""An engine that makes up text but nothing else: real events, real times, the interface of `LLMEngine`.

For tests of what stands between an engine and a page. It generates words at a set pace in a thread of its own; its
toggles change that pace, so an effect can be seen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from strata_lab.apply import ApplyReport, FieldResult
from strata_lab.config import Optimizations
from strata_lab.events import EventLog, ProgressEvent, RequestView, SettingEvent, StateEvent, StepEvent, TokenEvent
from strata_lab.request import RequestOutput
from strata_lab.sampling_params import RequestError, SamplingParams
from strata_lab.settings import ConfigError

PATIENCE_S = 10.0  # of tests that wait for other threads
WORDS = ("the ", "sky ", "scatters ", "blue ", "light ", "<b>more</b> ", "than ", "red\n")


def _encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
    return [len(word) for word in text.split()]


@dataclass
class FakeRequest:
    request_id: str
    params: SamplingParams
    num_tokens: int = 0
    text: str = ""
    finish_reason: str | None = None


@dataclass
class FakeStats:
    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int = 512
    weight_bytes: int = 84_000_000
    kv_bytes: int = 512_000_000
    capture_bytes: int = 0
    bytes_per_step: int = 80_000_000
    kv_bytes_per_token: int = 23_040
    num_output_tokens: int = 0


@dataclass
class FakeEngine:
    steps_per_s: float = 200.0
    build_s: float = 0.0
    model: str = "fake"
    log: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.events = EventLog()
        self.optimizations = Optimizations(weight_format="int8", kv_cache_dtype="fp32", max_model_len=2048)
        self.config = SimpleNamespace(model=self.model, block_size=16)
        self.model_config = SimpleNamespace(vocab_size=1000, num_experts=0)
        self.tokenizer = SimpleNamespace(chat_template="{{ messages }}", encode=_encode)
        self.device, self.fallbacks, self.closed = "cpu", (), False
        self.requests: dict[str, FakeRequest] = {}
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._num_steps = 0

    # -- the interface of LLMEngine -----------------------------------------------------------------------------

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self.closed = True
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def add_request(self, prompt: Any, params: SamplingParams | None = None, *, request_id: str | None = None) -> str:
        if "too long" in str(prompt):
            raise RequestError("prompt has 9000 tokens but max_model_len is 2048; shorten it")
        request_id = request_id or f"r-{len(self.requests)}"
        with self._lock:
            self.requests[request_id] = FakeRequest(request_id, params or SamplingParams())
        return request_id

    def abort(self, request_id: str) -> bool:
        with self._lock:
            request = self.requests[request_id]
            running = request.finish_reason is None
            request.finish_reason = request.finish_reason or "abort"
            return running

    def output(self, request_id: str) -> RequestOutput:
        r = self.requests[request_id]
        return RequestOutput(request_id, "", (1,), r.text, tuple(range(r.num_tokens)), r.finish_reason)

    def apply(self, **changes: Any) -> ApplyReport:
        self.log.append(changes)
        started = time.perf_counter()
        try:
            after = self.optimizations.replace(changes)
            if after.weight_format == "fp8":
                raise ConfigError("weight_format='fp8' needs a CUDA device; try 'int8'")
            if after.max_model_len > 2048:
                raise ConfigError(f"max_model_len={after.max_model_len} is more than the 2048 of the pool; try 2048")
        except ConfigError as error:
            return ApplyReport({n: FieldResult("refused", getattr(self.optimizations, n), str(error)) for n in changes})
        if self.build_s:
            self.events.append(ProgressEvent(started, "building", 0.5))
            time.sleep(self.build_s)
            self.events.append(ProgressEvent(time.perf_counter(), "building", 1.0))
        build_ms = (time.perf_counter() - started) * 1e3
        with self._lock:
            self.optimizations = after
            self.events.append(SettingEvent(time.perf_counter(), dict(changes), build_ms, 0.1))
        return ApplyReport({n: FieldResult("applied", getattr(after, n)) for n in changes}, build_ms, 0.1)

    def explain(self) -> dict[str, str]:
        return {"cuda_graph": "The decode step is compiled."}

    def stats(self) -> FakeStats:
        running = len(self._running())
        return FakeStats(running, 0, 3 * running, num_output_tokens=sum(r.num_tokens for r in self.requests.values()))

    def snapshot(self) -> StateEvent:
        with self._lock:
            running = self._running()
            views = tuple(
                RequestView(
                    r.request_id, "decoding", 1, r.num_tokens, r.num_tokens, 0, 0, 0, tuple(range(3 * i, 3 * i + 3))
                )
                for i, r in enumerate(running)
            )
            return StateEvent(time.perf_counter(), views, 512, 16, ())

    def experts(self) -> None:
        return None

    # -- the made-up model --------------------------------------------------------------------------------------

    def _running(self) -> list[FakeRequest]:
        with self._lock:
            return [r for r in self.requests.values() if r.finish_reason is None]

    def step(self) -> StepEvent | None:
        with self._lock:
            tokens = tuple(self._token(r) for r in self._running())
            if not tokens:
                return None
            running = len(self._running())
            event = StepEvent(
                self._num_steps, time.perf_counter(), 1.0, 0.1, 0.7, 0.1, 0.1, 0, len(tokens), running, 0, 0,
                3 * running, 512, 80_000_000, tokens, 2_000_000,
            )  # fmt: skip
            self._num_steps += 1
            self.events.append(event)
            return event

    def _token(self, r: FakeRequest) -> TokenEvent:
        text, index = WORDS[r.num_tokens % len(WORDS)], r.num_tokens
        r.num_tokens += 1
        r.text += text
        if r.num_tokens >= r.params.max_tokens:
            r.finish_reason = "length"
        return TokenEvent(r.request_id, index, text, index, r.finish_reason)

    def _run(self) -> None:
        while not self._stop.is_set():
            if self.step() is None:
                self._stop.wait(0.005)
            else:
                self._stop.wait(1 / self.steps_per_s * (1.0 if self.optimizations.as_dict()["cuda_graph"] else 2.0))


def eventually(condition: Callable[[], Any], what: str = "") -> None:
    """Wait for something that other threads bring about."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.01)
