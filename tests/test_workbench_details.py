"""What the panels of details make of events, and what a recording keeps of them: no page, and mostly no engine."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata_lab.events import (
    Draft,
    GovernorEvent,
    HardwareEvent,
    RequestView,
    SettingEvent,
    SpeculationEvent,
    StateEvent,
    StepEvent,
    TokenEvent,
)
from strata_lab.sampling_params import SamplingParams
from strata_lab.workbench import Workbench
from strata_lab.workbench.causes import Ceiling, RooflineMeter, cause_data, split_step
from strata_lab.workbench.details import Context
from strata_lab.workbench.drafts import DraftsDetail
from strata_lab.workbench.frontier import RESULTS, frontier
from strata_lab.workbench.ladder import Ladder, stages_of
from strata_lab.workbench.loads import LONG_OUTPUT_TOKENS, NAMES, load_requests
from strata_lab.workbench.meter import Sample
from strata_lab.workbench.names import Names
from strata_lab.workbench.pool import lane_data, lane_totals, map_data
from strata_lab.workbench.recording import Replay, decode, encode
from strata_lab.workbench.sensors import Sensors
from strata_widgets.block_map import CACHED, FIRST_OWNER, FREE, MAX_CELLS, SHARED, count_cells, pack_cells
from strata_widgets.step_timeline import CAUSES, STEP, pack_steps
from tests.fake_engine import PATIENCE_S, FakeEngine, eventually

STEP_EVENT = StepEvent(
    step=7, t_s=10.0, duration_ms=20.0, schedule_ms=1.0, forward_ms=15.0, sample_ms=2.0, commit_ms=1.0,
    num_prefill_tokens=0, num_decode_tokens=4, num_running=4, num_waiting=1, num_preempted=0, kv_blocks_used=3,
    kv_blocks_total=8, bytes_moved=100_000_000, tokens=(), kv_bytes_moved=20_000_000,
)  # fmt: skip
CEILING = Ceiling(20e9, "memory", "sum")


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()


@pytest.fixture
def bench(engine: FakeEngine) -> Iterator[Workbench]:
    bench = Workbench(engine, name="details")
    yield bench
    bench.retire()


# -- causes -----------------------------------------------------------------------------------------------------------


def test_the_parts_of_a_step_add_up_to_it_and_reading_is_bytes_over_bandwidth() -> None:
    step, whole, prefill, decode_tokens, *parts = split_step(STEP_EVENT, CEILING)
    assert (step, whole, prefill, decode_tokens) == (7, 20.0, 0, 4)
    named = dict(zip(CAUSES, parts, strict=True))
    assert named == pytest.approx(
        {"schedule": 1, "weights": 4, "kv": 1, "compute": 10, "sample": 2, "commit": 1, "host": 1}
    )
    assert sum(parts) == pytest.approx(whole)


def test_nothing_is_split_where_the_bandwidth_is_unknown() -> None:
    parts = dict(zip(CAUSES, split_step(STEP_EVENT, Ceiling())[4:], strict=True))
    assert (parts["weights"], parts["kv"], parts["compute"]) == (0, 0, 15)
    label = {row["key"]: row["label"] for row in cause_data(Ceiling())}
    assert label["compute"] == "forward pass"
    assert [row["key"] for row in cause_data(CEILING)] == list(CAUSES)


def test_a_device_that_ran_ahead_does_not_make_a_step_longer_than_it_was() -> None:
    ahead = dataclasses.replace(STEP_EVENT, forward_ms=60.0)
    _, whole, _, _, *parts = split_step(ahead, CEILING)
    assert sum(parts) == pytest.approx(whole)


def test_the_gauge_is_bytes_over_time_over_bandwidth_of_decode_steps() -> None:
    meter = RooflineMeter()
    assert meter.reading(CEILING)["share"] is None
    meter.feed(dataclasses.replace(STEP_EVENT, num_prefill_tokens=512, bytes_moved=10**12))
    meter.feed(STEP_EVENT)
    reading = meter.reading(CEILING)
    assert reading["share"] == pytest.approx(0.25)  # 5 GB/s of 20
    assert reading["values"] == pytest.approx([5.0, 20.0, 100.0, 800.0])
    assert meter.reading(Ceiling())["values"] == [pytest.approx(5.0), None, pytest.approx(100.0), None]
    meter.forget()
    assert meter.reading(CEILING)["share"] is None


def test_steps_are_packed_as_the_page_reads_them() -> None:
    row = split_step(STEP_EVENT, CEILING)
    assert struct.unpack(f"<{len(row)}d", pack_steps([row])) == row
    assert len(pack_steps([row, row])) == 2 * STEP.size


# -- blocks and lanes -------------------------------------------------------------------------------------------------


def view(name: str, state: str = "decoding", blocks: tuple[int, ...] = ()) -> RequestView:
    return RequestView(name, state, 10, 5, 14, 0, 0, 0, blocks)


def test_every_block_is_counted_once_and_shown_as_what_it_is() -> None:
    tables, cached = [(0, 1), (1, 2, 3)], (5,)
    cells, per_cell = pack_cells(8, tables, cached)
    first, second = FIRST_OWNER, FIRST_OWNER + 1
    assert list(cells) == [first, SHARED, second, second, FREE, CACHED, FREE, FREE]
    assert per_cell == 1
    assert count_cells(8, tables, cached) == {"own": 3, "shared": 1, "cached": 1, "free": 3}


def test_a_pool_of_any_size_fits_on_the_map() -> None:
    cells, per_cell = pack_cells(10 * MAX_CELLS + 1, [(0, 10 * MAX_CELLS)], ())
    assert (len(cells), per_cell) == (-(-(10 * MAX_CELLS + 1) // 11), 11)
    assert cells[0] == cells[-1] == FIRST_OWNER
    assert set(cells[1:-1]) == {FREE}


def test_a_request_has_one_name_and_one_colour_in_every_panel() -> None:
    names = Names()
    names.give("b", "Stream 2")
    state = StateEvent(0.0, (view("a", blocks=(0,)), view("b", "waiting"), view("c", "preempted")), 8, 16, ())
    lanes, blocks = lane_data(state, names), map_data(state, names)
    assert [(r["title"], r["color"], r["state"]) for r in lanes["requests"]][:2] == [
        ("a", 1, "decoding"),
        ("Stream 2", 0, "waiting"),
    ]
    assert blocks["owners"] == [{"title": "a", "color": 1}]
    assert [row["value"] for row in lane_totals(state, 3)] == [1, 0, 1, 1, 3]


def test_speculation_is_counted_by_place() -> None:
    detail = DraftsDetail()
    context = Context(FakeEngine(), Names())
    detail.push(context, 0.0)
    assert detail.lanes.note
    drafts = (Draft("a", 0, (1, 2, 3), 2), Draft("b", 0, (4, 5), 0))
    detail.take(dataclasses.replace(STEP_EVENT, drafts=drafts))
    detail.push(context, 0.0)
    detail.lanes.flush()
    assert [(p["drafted"], p["accepted"]) for p in detail.lanes.by_position] == [(2, 1), (2, 1), (1, 0)]
    assert [row["value"] for row in detail.lanes.numbers] == ["40%", "2.00", "2"]
    assert detail.lanes.lanes[0]["rounds"] == [{"accepted": ["#1", "#2"], "rejected": ["#3"]}]
    assert detail.lanes.note == ""


def test_the_panel_says_why_drafting_is_off_for_all_and_for_a_kind_of_text() -> None:
    detail = DraftsDetail()
    context = Context(FakeEngine(), Names())
    kinds = (("prose", 0.04, 0.3, 0), ("code", 0.6, 0.8, 3))
    detail.take(SpeculationEvent(1.0, "ngram", "off", "it lost", kinds))
    detail.push(context, 0.0)
    detail.lanes.flush()
    assert detail.lanes.note == "Off: it lost."
    detail.take(
        dataclasses.replace(STEP_EVENT, drafts=(Draft("a", 0, (1, 2), 1, "code"), Draft("a", 2, (3,), 0, "prose")))
    )
    detail.take(SpeculationEvent(2.0, "ngram", "on", "it gains", kinds))
    detail.push(context, 1.0)
    detail.lanes.flush()
    assert detail.lanes.note == ""
    rows = {row["label"]: row for row in detail.lanes.numbers}
    assert (rows["code"]["value"], rows["prose"]["value"]) == ("50%", "0% off")
    assert "4%" in rows["prose"]["tip"]


def test_a_recording_gives_back_what_is_expected_of_each_kind_of_text() -> None:
    event = SpeculationEvent(3.0, "ngram", "off", "it lost", (("prose", 0.25, 0.5, 0), ("code", 0.5, 0.75, 2)))
    assert decode(json.loads(encode(event, 1.0)), 1.0) == event


# -- the climb --------------------------------------------------------------------------------------------------------


def seconds(ladder: Ladder, start_s: float, speeds: list[float], streams: int = 2) -> None:
    """A sample every tenth of a second, each second with a speed of its own."""
    for i in range(10 * len(speeds)):
        ladder.feed(Sample(start_s + i / 10, 0.0, speeds[i // 10], streams), False)


def test_a_setting_becomes_a_column_of_clean_seconds_and_one_that_returns_adds_to_it() -> None:
    ladder = Ladder()
    ladder.set({"cuda_graph": False}, "start", 0.0)
    seconds(ladder, 0.0, [1.0, 99.0, 40.0, 40.0, 44.0])
    ladder.set({"cuda_graph": True}, "cuda_graph on", 5.0)
    seconds(ladder, 5.0, [50.0, 60.0, 80.0, 80.0, 84.0])
    ladder.set({"cuda_graph": False}, "cuda_graph off", 10.0)
    seconds(ladder, 10.0, [60.0, 41.0, 42.0, 42.0])
    data = ladder.data()
    by_label = {stage["label"]: stage for stage in data["stages"]}
    assert set(by_label) == {"start", "cuda_graph on"}
    assert by_label["cuda_graph on"]["median"] == 80.0
    assert by_label["start"]["low"] >= 40.0, "seconds that cover a change do not count"
    assert "2 streams" in data["source"]


def test_seconds_with_another_number_of_streams_are_never_on_one_scale() -> None:
    ladder = Ladder()
    ladder.set({"a": 0}, "start", 0.0)
    seconds(ladder, 0.0, [40.0] * 5, streams=1)
    seconds(ladder, 5.0, [20.0] * 5, streams=4)
    assert [stage["median"] for stage in ladder.data()["stages"]] == [20.0]
    ladder.restart()
    assert ladder.data()["stages"] == []


def test_samples_that_cover_a_prompt_do_not_count() -> None:
    ladder = Ladder()
    ladder.set({"a": 0}, "start", 0.0)
    assert not any(ladder.feed(Sample(i / 10, 0.0, 40.0, 1), True) for i in range(100))


def test_a_climb_that_was_recorded_is_shown_with_its_spread() -> None:
    path = RESULTS / "climb_cpu.json"
    records = json.loads(path.read_text())
    data = stages_of(path)
    assert [s["label"] for s in data["stages"]][:2] == ["baseline", "cuda_graph on"]
    assert data["stages"][0]["median"] == records[0]["spread"]["median"]
    with pytest.raises(ValueError, match="strata climb"):
        stages_of([])


def test_only_what_nothing_else_beats_is_on_the_frontier() -> None:
    read = [json.loads((RESULTS / name).read_text()) for name in ("climb_cpu.json", "quality_cpu.json")]
    points = {p["label"]: p for p in frontier(*read)["points"]}
    assert points["bf16"]["y"] == 0.0
    assert points["bf16"]["best"]
    assert points["int8"]["x"] > points["bf16"]["x"]
    assert points["int8"]["best"]
    slow = [{**r, "metrics": {**r["metrics"], "output_tok_s": 1.0}} for r in read[0]]
    kept = [r for r in read[0] if r["conditions"]["weight_format"] == "bf16"]
    slow_int8 = [r for r in slow if r["conditions"]["weight_format"] == "int8"]
    beaten = {p["label"]: p["best"] for p in frontier([*kept, *slow_int8], read[1])["points"]}
    assert beaten == {"bf16": True, "int8": False}
    assert "make climb" in frontier([], [])["note"]


# -- sensors and loads ------------------------------------------------------------------------------------------------


def test_sensors_are_read_once_a_second_and_missing_ones_are_said_to_be_missing() -> None:
    sensors = Sensors()
    first = sensors.due(0.0, "cpu", None)
    assert first is not None
    assert [r["value"] for r in first["readings"] if r["label"] in ("power", "throttle")] == ["no sensor"] * 2
    assert sensors.due(0.5, "cpu", None) is None
    hot = HardwareEvent(t_s=1.0, device="cuda:0", name="card", core_c=91.0, throttle=("heat",))
    paces = GovernorEvent(
        t_s=1.0, policy="pace", action="pace", idle_share=0.1, max_num_seqs=8, sensor="core", temperature_c=91.0,
        predicted_c=92.0, target_c=80.0, reason="it rests.",
    )  # fmt: skip
    later = sensors.due(1.1, "cuda:0", hot, paces)
    assert later is not None
    assert (later["readings"][0]["value"], later["readings"][0]["tone"]) == ("91", "bad")
    assert later["note"] == "Governor pace: it rests."


@pytest.mark.parametrize("name", NAMES)
def test_a_load_is_what_its_workload_says(name: str, engine: FakeEngine) -> None:
    requests = load_requests(name, engine)
    assert len(requests) == {"A": 4, "B": 1, "C": 8, "long": 1, "users": 4}[name]
    assert all(r.params.ignore_eos for r in requests)
    if name == "long":
        assert len(requests[0].prompt) + LONG_OUTPUT_TOKENS < engine.optimizations.max_model_len


def test_a_load_from_the_panel_is_sent_answered_and_marked(bench: Workbench, engine: FakeEngine) -> None:
    bench.panels.loads._handle_custom_msg({"kind": "load", "name": "users"}, [])
    eventually(lambda: bench.panels.loads.answer.get("ok") is True)
    eventually(lambda: bench.panels.loads.num_unfinished == 4)
    eventually(lambda: [m["label"] for m in bench.panels.chart.markers] == ["4 users"])
    assert bench.panels.stream.lanes[0]["title"] == "4 users · 1"
    bench.panels.loads._handle_custom_msg({"kind": "stop"}, [])
    eventually(lambda: bench.panels.loads.num_unfinished == 0)
    with pytest.raises(ValueError, match="there are A, B"):
        bench.load("D")


# -- opening and closing ----------------------------------------------------------------------------------------------


def test_a_closed_panel_gets_nothing_and_an_opened_one_is_filled(bench: Workbench) -> None:
    details = bench.panels.details
    pool: Any = details.all["blocks"]
    run = bench.generate("Hello", num_streams=2, max_tokens=100_000)
    eventually(lambda: run.num_tokens > 20)
    assert details.open_names == ["causes"]
    assert pool.map.cells == b""
    bench.panels.details_bar._handle_custom_msg({"kind": "open", "name": "blocks", "open": True}, [])
    eventually(lambda: bench.panels.details_bar.shown == ["causes", "blocks"])
    eventually(lambda: [r["title"] for r in pool.lanes.requests] == ["Stream 1", "Stream 2"])
    assert list(pool.map.cells[:6]) == [FIRST_OWNER] * 3 + [FIRST_OWNER + 1] * 3
    assert len(bench.panels._open_drawers.children) == 2
    bench.fold()
    assert bench.panels._open_drawers.children == ()
    timeline = bench.panels.causes.timeline
    timeline.flush()
    before = timeline.history
    tokens = run.num_tokens
    eventually(lambda: run.num_tokens > tokens + 100)
    assert timeline.history == before
    with pytest.raises(ValueError, match="there are causes, blocks"):
        bench.open("nothing")
    bench.stop()


def test_the_engine_keeps_no_output_of_a_request_that_left_the_screen(bench: Workbench, engine: FakeEngine) -> None:
    engine.add_request("Somebody else's.", SamplingParams(max_tokens=1), request_id="theirs")
    runs = [bench.generate("Hello", num_streams=2, max_tokens=3)]
    for _ in range(3):
        assert runs[-1].wait(PATIENCE_S)
        runs.append(bench.generate("Hello again", num_streams=2, max_tokens=3))
    assert runs[-1].wait(PATIENCE_S)
    shown = {lane.request_id for lane in runs[-1].lanes}
    assert set(engine.requests) == {"theirs", *shown}
    assert [run.num_tokens for run in runs] == [6] * 4 and all(run.texts[0] for run in runs)


def test_lanes_tell_phase_and_acceptance(bench: Workbench, engine: FakeEngine) -> None:
    run = bench.generate("Hello", max_tokens=100_000)
    eventually(lambda: [lane["phase"] for lane in bench.panels.stream.lanes] == ["decoding"])
    request_id = run.lanes[0].request_id
    engine.events.append(dataclasses.replace(STEP_EVENT, drafts=(Draft(request_id, 0, (1, 2), 1),)))
    eventually(lambda: bench.panels.stream.lanes[0]["accepted"] == 0.0)
    bench.stop()


# -- recordings -------------------------------------------------------------------------------------------------------


def test_every_event_survives_being_written_and_read() -> None:
    token = TokenEvent("a", 5, "ä\n", 0, None, None, True)
    events = [
        dataclasses.replace(STEP_EVENT, tokens=(token,), drafts=(Draft("a", 0, (1, 2), 1),)),
        SettingEvent(11.0, {"cuda_graph": True}, 1.0, 0.1),
        StateEvent(12.0, (view("a", blocks=(1, 2)),), 8, 16, (3,)),
        HardwareEvent(t_s=13.0, device="cuda:0", name="card", core_c=50.0, throttle=("x",)),
    ]
    for event in events:
        assert decode(json.loads(encode(event, 10.0)), 10.0) == event


def test_a_recording_shows_the_same_text_again_without_an_engine(bench: Workbench, tmp_path: Path) -> None:
    path = tmp_path / "session.jsonl"
    with bench.record(path) as recorder:
        with pytest.raises(RuntimeError, match="is being recorded"):
            bench.record(tmp_path / "other.jsonl")
        run = bench.generate("Tell me <b>more</b>", num_streams=2, max_tokens=60)
        assert bench.apply(cuda_graph=False).ok
        assert run.wait(PATIENCE_S)
        eventually(lambda: [lane["state"] for lane in bench.panels.stream.lanes] == ["done"] * 2)
    assert recorder.stopped
    shown = Workbench.replay(path)
    assert shown.panels.toggles.enabled is False
    assert shown.panels.prompt.enabled is False
    assert shown.panels.header.badge.startswith("Recording of 20")
    assert shown.engine.finished.wait(PATIENCE_S)
    eventually(lambda: [lane["state"] for lane in shown.panels.stream.lanes] == ["done"] * 2)
    eventually(lambda: [text["text"] for text in shown.panels.stream.snapshot] == run.texts)
    assert [lane["prompt"] for lane in shown.panels.stream.lanes] == ["Tell me <b>more</b>"] * 2
    assert [m["label"] for m in shown.panels.chart.markers] == ["cuda_graph off"]
    eventually(lambda: len(shown.panels.causes.timeline.history) >= 60 * STEP.size)
    eventually(lambda: shown.panels.header.state == "ready")
    shown.retire()
    assert shown.panels.header.comm is None


def test_what_is_no_recording_is_refused_by_name_and_line(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    with pytest.raises(ValueError, match=r"notes\.txt is no recording"):
        Replay(path)
    path.write_text('{"strata_recording": 99}\n')
    with pytest.raises(ValueError, match="version 99, this reads 1"):
        Replay(path)


def test_a_damaged_recording_is_refused_before_it_plays(bench: Workbench, tmp_path: Path) -> None:
    path = tmp_path / "session.jsonl"
    with bench.record(path):
        pass
    path.write_text(path.read_text() + '{"kind": "StepEvent"}\n')
    number = len(path.read_text().splitlines())
    with pytest.raises(ValueError, match=f"line {number}: no event"):
        Replay(path)


def test_a_recording_cannot_be_changed(bench: Workbench, tmp_path: Path) -> None:
    with bench.record(tmp_path / "s.jsonl"):
        pass
    shown = Workbench.replay(tmp_path / "s.jsonl")
    with pytest.raises(RuntimeError, match="this is a recording"):
        shown.apply(cuda_graph=False)
    shown.retire()
