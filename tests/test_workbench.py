"""The workbench between an engine and its widgets, against an engine that only makes up text (`fake_engine.py`)."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from strata_lab.config import TOPICS, toggles
from strata_lab.events import EventLog, ProgressEvent, StepEvent, TokenEvent
from strata_lab.sampling_params import RequestError
from strata_lab.settings import ConfigError
from strata_lab.workbench import Workbench, session
from strata_lab.workbench.meter import RateMeter
from strata_widgets._base import StrataWidget
from strata_widgets.rate_chart import SAMPLE
from tests.fake_engine import PATIENCE_S, FakeEngine, eventually


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()


@pytest.fixture
def bench(engine: FakeEngine) -> Iterator[Workbench]:
    bench = Workbench(engine, name="test")
    yield bench
    bench.retire()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, float, dict[str, Any]]]:
    """Everything the widgets send: who, when, what."""
    messages: list[tuple[Any, float, dict[str, Any]]] = []

    def record(self: Any, message: dict[str, Any], buffers: Any = None) -> None:
        messages.append((self, time.monotonic(), message))

    monkeypatch.setattr(StrataWidget, "_send", record)
    return messages


def click(bench: Workbench, name: str, value: Any) -> None:
    bench.panels.toggles._handle_custom_msg({"kind": "set", "name": name, "value": value}, [])


def ask(bench: Workbench, prompt: str, **fields: Any) -> None:
    bench.panels.prompt._handle_custom_msg({"kind": "generate", "fields": {"prompt": prompt, **fields}}, [])


def shown(bench: Workbench, name: str) -> Any:
    return next(toggle["value"] for toggle in bench.panels.toggles.toggles if toggle["name"] == name)


# -- text and speed ---------------------------------------------------------------------------------------------------


def test_the_panel_shows_the_text_that_the_engine_made(bench: Workbench, engine: FakeEngine) -> None:
    run = bench.generate("Hello", num_streams=3, max_tokens=40)
    assert run.wait(PATIENCE_S)
    eventually(lambda: [lane["state"] for lane in bench.panels.stream.lanes] == ["done"] * 3)
    texts = {lane.request_id: engine.output(lane.request_id).text for lane in run.lanes}
    eventually(lambda: {lane["id"]: lane["text"] for lane in bench.panels.stream.snapshot} == texts)
    assert run.num_tokens == 120
    assert bench.panels.stream.lanes[0]["note"] == "reached its length"
    assert bench.panels.header.state == "ready"


def test_a_flood_of_tokens_is_pushed_at_most_twenty_times_a_second(sent: list[Any]) -> None:
    engine = FakeEngine(steps_per_s=2000)
    bench = Workbench(engine, name="flood")
    sent.clear()
    started = time.monotonic()
    run = bench.generate("Hello", num_streams=16, max_tokens=800)
    assert run.wait(PATIENCE_S)
    eventually(lambda: bench.panels.stream.lanes[0]["state"] == "done")
    seconds = time.monotonic() - started
    bench.close()
    for widget in bench.panels.all:
        assert sum(who is widget for who, _, _ in sent) <= 20 * seconds + 4, type(widget).__name__
    pieces: dict[str, str] = {}
    for who, _, message in list(sent):
        for record in message["content"]["records"] if message["method"] == "custom" else []:
            for piece in record["append"] if who is bench.panels.stream else []:
                assert len(pieces.get(piece["id"], "")) == piece["start"]
                pieces[piece["id"]] = pieces.get(piece["id"], "") + piece["text"]
    assert pieces == {lane.request_id: engine.output(lane.request_id).text for lane in run.lanes}
    bench.retire()
    engine.close()


def test_requests_made_elsewhere_get_a_lane_too(bench: Workbench, engine: FakeEngine) -> None:
    engine.add_request("from another cell", request_id="mine")
    eventually(lambda: [lane["id"] for lane in bench.panels.stream.lanes] == ["mine"])
    engine.abort("mine")
    eventually(lambda: bench.panels.stream.lanes[0]["note"] == "stopped")


def test_lost_events_are_counted_and_the_text_is_whole_in_the_end(engine: FakeEngine) -> None:
    engine.events = EventLog(capacity=2)
    engine.steps_per_s = 500.0
    bench = Workbench(engine, name="slow reader")
    run = bench.generate("Hello", max_tokens=200)
    assert run.wait(PATIENCE_S)
    eventually(lambda: not run.lanes[0].has_gap)
    assert run.texts == [engine.output(run.lanes[0].request_id).text]
    eventually(lambda: any("events were dropped" in note for note in bench.panels.header.notes))
    eventually(lambda: bench.panels.stream.snapshot[0]["text"] == run.texts[0])
    bench.retire()


def test_samples_stop_when_nothing_runs(bench: Workbench) -> None:
    assert bench.generate("Hello", max_tokens=300).wait(PATIENCE_S)
    eventually(lambda: bench.panels.chart.values[1] is None)
    eventually(lambda: len(bench.panels.chart.history) > 2 * SAMPLE.size)
    history = bench.panels.chart.history
    samples = list(SAMPLE.iter_unpack(history))
    assert all(later[0] > earlier[0] for earlier, later in itertools.pairwise(samples))
    time.sleep(0.3)
    assert bench.panels.chart.history == history


def steps(streams: int, interval_s: float, count: int, start_s: float = 100.0) -> Iterator[StepEvent]:
    for i in range(count):
        tokens = tuple(TokenEvent(f"r{k}", 5, "x", i) for k in range(streams))
        t_s = start_s + interval_s * i
        yield StepEvent(i, t_s, 1.0, 0, 1.0, 0, 0, 0, streams, streams, 0, 0, 1, 9, 0, tokens)


def test_total_and_per_stream_speed_are_counted_from_tokens() -> None:
    meter = RateMeter()
    for step in steps(streams=4, interval_s=0.05, count=60):
        meter.feed(step)
    sample = meter.sample(100 + 0.05 * 59)
    assert sample is not None
    assert sample.output_tok_s == pytest.approx(80.0, rel=0.06)  # one step more or less in the window
    assert sample.tok_s_per_stream == pytest.approx(20.0)
    assert sample.num_generating == 4


def test_a_stream_with_one_token_has_no_speed_and_an_idle_engine_no_sample() -> None:
    meter = RateMeter()
    assert meter.sample(100.0) is None
    meter.feed(next(steps(streams=1, interval_s=1.0, count=1)))
    assert meter.sample(100.1) is None, "too early to tell"
    sample = meter.sample(100.5)
    assert sample is not None
    assert sample.num_generating == 0
    assert math.isnan(sample.tok_s_per_stream)
    meter.idle()
    assert meter.sample(101.0) is None


def test_a_stream_slower_than_the_window_still_has_a_speed() -> None:
    meter = RateMeter()
    for step in steps(streams=1, interval_s=2.0, count=3):
        meter.feed(step)
    assert meter.stream("r0") == pytest.approx(0.5)
    sample = meter.sample(105.5)
    assert sample is not None
    assert sample.tok_s_per_stream == pytest.approx(0.5)


# -- settings ---------------------------------------------------------------------------------------------------------


def test_every_toggle_of_the_config_has_a_control(bench: Workbench) -> None:
    shown = bench.panels.toggles.toggles
    assert sorted(toggle["name"] for toggle in shown) == sorted(toggle.name for toggle in toggles())
    assert list(dict.fromkeys(toggle["topic"] for toggle in shown)) == list(TOPICS)


def test_a_click_changes_the_engine_and_marks_the_chart(bench: Workbench, engine: FakeEngine) -> None:
    run = bench.generate("Hello", max_tokens=2000)
    click(bench, "cuda_graph", False)
    eventually(lambda: shown(bench, "cuda_graph") is False)
    assert engine.log == [{"cuda_graph": False}]
    assert bench.panels.toggles.busy == {}
    assert bench.panels.toggles.answers["cuda_graph"]["text"].startswith("Now off, applied")
    eventually(lambda: [marker["label"] for marker in bench.panels.chart.markers] == ["cuda_graph off"])
    assert not run.finished, "the stream goes on"


def test_a_handler_returns_at_once_and_the_panel_is_busy_meanwhile(bench: Workbench, engine: FakeEngine) -> None:
    engine.build_s = 0.6
    started = time.monotonic()
    click(bench, "weight_format", "int4")
    click(bench, "weight_format", "bf16")  # a second click on a busy toggle changes nothing
    assert time.monotonic() - started < 0.2
    eventually(lambda: bench.panels.toggles.busy == {"weight_format": "int4"})
    assert shown(bench, "weight_format") == "int8"
    eventually(lambda: bench.panels.header.state == "rebuilding" and bench.panels.header.task == "building")
    eventually(lambda: shown(bench, "weight_format") == "int4")
    eventually(lambda: bench.panels.header.state == "ready" and bench.panels.header.task == "")
    assert engine.log == [{"weight_format": "int4"}]


def test_a_refused_change_keeps_the_value_and_says_why(bench: Workbench) -> None:
    click(bench, "weight_format", "fp8")
    eventually(lambda: "weight_format" in bench.panels.toggles.answers)
    answer = bench.panels.toggles.answers["weight_format"]
    assert answer["status"] == "refused"
    assert answer["text"] == "Refused, still int8: weight_format='fp8' needs a CUDA device; try 'int8'"
    assert shown(bench, "weight_format") == "int8"
    click(bench, "max_num_seqs", 0)
    eventually(lambda: "max_num_seqs" in bench.panels.toggles.answers)
    assert "must be at least 1" in bench.panels.toggles.answers["max_num_seqs"]["text"]


def test_a_change_that_breaks_is_told_in_words(bench: Workbench, engine: FakeEngine, monkeypatch: Any) -> None:
    def broken(**_: Any) -> None:
        engine.events.append(ProgressEvent(time.perf_counter(), "compiling", 0.5))
        time.sleep(0.3)
        raise OSError("no space left")

    monkeypatch.setattr(engine, "apply", broken)
    click(bench, "cuda_graph", False)
    eventually(lambda: "cuda_graph" in bench.panels.toggles.answers)
    assert "no space left" in bench.panels.toggles.answers["cuda_graph"]["text"]
    eventually(lambda: bench.panels.header.task == "")
    assert bench.panels.toggles.busy == {}
    assert shown(bench, "cuda_graph") is True
    with pytest.raises(OSError, match="no space left"):
        bench.apply(cuda_graph=False)


def test_changes_made_by_code_show_in_the_panel(bench: Workbench, engine: FakeEngine) -> None:
    assert bench.apply(cuda_graph=False).ok
    eventually(lambda: shown(bench, "cuda_graph") is False)
    engine.apply(max_num_seqs=3)
    eventually(lambda: shown(bench, "max_num_seqs") == 3)


# -- prompts ----------------------------------------------------------------------------------------------------------


def test_a_bad_prompt_is_answered_in_words_and_nothing_is_lost(bench: Workbench) -> None:
    bench.panels.prompt.prompt = "this is too long"
    assert bench.generate("good", max_tokens=5).wait(PATIENCE_S)
    before = [lane["id"] for lane in bench.panels.stream.lanes]
    cases = {
        "this is too long": "max_model_len is 2048",
        " ": "the prompt is empty",
    }
    for prompt, words in cases.items():
        number = bench.panels.prompt.answer.get("number")
        ask(bench, prompt, num_streams=2)
        eventually(lambda number=number: bench.panels.prompt.answer.get("number") != number)
        assert bench.panels.prompt.answer["ok"] is False
        assert words in bench.panels.prompt.answer["text"]
    for fields in ({"num_streams": 17}, {"num_streams": "2x"}, {"max_tokens": 0}, {"temperature": -1}):
        number = bench.panels.prompt.answer["number"]
        ask(bench, "good", **fields)
        eventually(lambda number=number: bench.panels.prompt.answer["number"] != number)
        assert next(iter(fields)).removeprefix("num_") in bench.panels.prompt.answer["text"]
    assert [lane["id"] for lane in bench.panels.stream.lanes] == before
    assert bench.panels.prompt.prompt == "this is too long"


def test_generate_from_the_panel_and_stop(bench: Workbench, engine: FakeEngine) -> None:
    ask(bench, "Hello", num_streams=2, max_tokens=100000)
    eventually(lambda: bench.panels.prompt.num_unfinished == 2)
    assert bench.panels.prompt.answer["ok"] is True
    eventually(lambda: bench.panels.stream.lanes[1]["num_tokens"] > 3)
    bench.panels.prompt._handle_custom_msg({"kind": "stop"}, [])
    eventually(lambda: [lane["note"] for lane in bench.panels.stream.lanes] == ["stopped", "stopped"])
    eventually(lambda: bench.panels.prompt.num_unfinished == 0 and bench.panels.header.state == "ready")
    assert {r.finish_reason for r in engine.requests.values()} == {"abort"}


def test_new_streams_join_those_that_run_and_take_the_place_of_those_that_ended(bench: Workbench) -> None:
    first = bench.generate("first", max_tokens=5)
    assert first.wait(PATIENCE_S)
    second = bench.generate("second", max_tokens=100000)
    third = bench.generate("third", max_tokens=100000)
    ids = [lane.request_id for lane in [*third.lanes, *second.lanes]]
    eventually(lambda: [lane["id"] for lane in bench.panels.stream.lanes] == ids)
    bench.stop()


def test_a_cell_can_wait_without_blocking_the_panel(bench: Workbench) -> None:
    run = bench.generate("Hello", max_tokens=100)
    assert asyncio.run(run.until(num_tokens=10, timeout_s=PATIENCE_S))
    assert run.num_tokens >= 10
    assert asyncio.run(run.until(timeout_s=PATIENCE_S))
    assert run.finished
    assert not asyncio.run(bench.generate("Hello", max_tokens=100000).until(timeout_s=0.1))


# -- life -------------------------------------------------------------------------------------------------------------


def test_loading_is_shown_and_the_cell_returns_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    go, engine = threading.Event(), FakeEngine(model="smollm2-135m")

    def load(model: str, options: dict[str, Any], on_progress: Callable[[str, float], None]) -> FakeEngine:
        on_progress("reading weights", 0.25)
        assert go.wait(PATIENCE_S)
        return engine

    monkeypatch.setattr(session, "_load_engine", load)
    bench = Workbench("smollm2-135m", name="loading", device="cpu")
    eventually(lambda: bench.panels.header.task == "reading weights" and bench.panels.header.fraction == 0.25)
    assert bench.panels.header.state == "loading"
    assert bench.panels.prompt.enabled is False
    with pytest.raises(TimeoutError, match="still loading"):
        bench.wait_ready(0.01)
    click(bench, "cuda_graph", False)
    eventually(lambda: "loading" in bench.panels.toggles.answers.get("cuda_graph", {}).get("text", ""))
    go.set()
    assert bench.engine is engine
    eventually(lambda: bench.panels.header.state == "ready" and bench.panels.prompt.enabled)
    bench.retire()
    assert engine.closed, "it was loaded here, so it is closed here"


def test_a_model_that_cannot_be_loaded_is_told_in_the_panel_and_to_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> None:
        raise ValueError("no file 'x.gguf'; try 'smollm2-135m'")

    monkeypatch.setattr(session, "_load_engine", load)
    bench = Workbench("x.gguf", name="missing")
    with pytest.raises(ValueError, match=r"no file 'x\.gguf'"):
        bench.wait_ready(PATIENCE_S)
    eventually(lambda: bench.panels.header.state == "failed")
    assert "no file 'x.gguf'" in bench.panels.header.problem
    bench.retire()


def test_an_engine_that_arrives_after_close_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    go, engine = threading.Event(), FakeEngine()
    monkeypatch.setattr(session, "_load_engine", lambda *_: go.wait(PATIENCE_S) and engine)
    bench = Workbench("smollm2-135m", name="late")
    bench.retire()
    go.set()
    eventually(lambda: engine.closed)
    with pytest.raises(RuntimeError, match="was closed"):
        bench.wait_ready(PATIENCE_S)


def test_wrong_options_are_errors_of_the_cell(engine: FakeEngine) -> None:
    with pytest.raises(ConfigError, match="did you mean 'device'"):
        Workbench("smollm2-135m", devise="cpu")
    with pytest.raises(ValueError, match="use apply"):
        Workbench(engine, device="cpu")


def test_closing_keeps_the_panel_and_leaves_a_given_engine_alone(bench: Workbench, engine: FakeEngine) -> None:
    bench.generate("Hello", max_tokens=100000)
    bench.close()
    bench.close()
    assert not engine.closed
    assert engine.stats().num_running == 0, "its requests are ended"
    assert bench.panels.header.state == "closed"
    assert bench.panels.prompt.enabled is False
    assert bench.panels.header.comm is not None
    with pytest.raises(RuntimeError, match="was closed"):
        bench.generate("Hello")
    click(bench, "cuda_graph", False)  # a click on a closed panel is harmless


def test_a_prompt_of_a_wrong_kind_is_refused(bench: Workbench) -> None:
    with pytest.raises(RequestError, match="from 1 to 16"):
        bench.generate("Hello", num_streams=0)


def test_running_the_cell_again_closes_the_previous_one_of_the_same_name(engine: FakeEngine) -> None:
    first, other = Workbench(engine, name="a"), Workbench(engine, name="b")
    second = Workbench(engine, name="a")
    assert first.closed
    assert first.panels.header.comm is None, "its widgets are gone from the page"
    assert not other.closed
    second.retire()
    other.retire()


def test_an_engine_that_outlives_its_workbench_takes_requests_of_the_next(engine: FakeEngine) -> None:
    for _ in range(2):
        bench = Workbench(engine, name="again")
        assert bench.generate("Hello", max_tokens=3).wait(PATIENCE_S)
        bench.retire()
    assert len(engine.requests) == 2, "no request took the name of another"


def test_ten_runs_of_the_cell_return_threads_and_memory_to_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_load_engine", lambda *_: FakeEngine())
    kept: list[weakref.ref[Any]] = []

    def run_cell() -> None:
        bench = Workbench("smollm2-135m", name="again")
        bench.generate("Hello", num_streams=4, max_tokens=100000)
        click(bench, "cuda_graph", False)
        eventually(lambda: shown(bench, "cuda_graph") is False)
        kept.extend([weakref.ref(bench), weakref.ref(bench.engine), weakref.ref(bench.panels.chart)])

    run_cell()  # warm: caches and lazy imports
    session._open["again"].retire()
    threads = threading.active_count()
    tracemalloc.start()
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(10):
        run_cell()
    session._open["again"].retire()
    eventually(lambda: threading.active_count() <= threads)
    eventually(lambda: gc.collect() >= 0 and all(ref() is None for ref in kept), "nothing refers to closed benches")
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 300_000, f"{grown} bytes stay"


def test_the_saved_output_is_the_widget_and_a_stable_text(bench: Workbench) -> None:
    data = bench._repr_mimebundle_()
    assert data["text/plain"] == "Workbench('fake')"
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == bench.panels.box.model_id
