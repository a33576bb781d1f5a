"""Laws of the thermal governor on a recorded trace: docs/results/heat_trace_gpu.json, an H200 that decodes for 50 s.

Recorded are times, temperatures, rates and the card's own limits. Where a test gives the card lower limits, only these
are invented. The recorded card does not cool down when something is held back; `tests/test_governor.py` closes that
loop with a model.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from strata_lab.bench.harness import Record, write_results
from strata_lab.bench.heat_replay import (
    Recording,
    forecast_errors,
    main,
    reached_s,
    read_recording,
    replay,
    time_constant_s,
    with_limits,
)
from strata_lab.bench.heat_trace import Trace
from strata_lab.events import GovernorEvent, HardwareEvent
from strata_lab.telemetry.governor import REPORTED_SHARE, Governor
from strata_lab.telemetry.heat import LOOK_AHEAD_S, MAX_IDLE, MIN_SEATS, WINDOW_S, Decision

SEATS = 8
POLICIES = ("pace", "shrink", "precise")
LOWERED = ({"memory_c": 52.0}, {"core_c": 46.0})  # limits that the recorded temperatures do reach
SOON_S = 2.0
SAMPLES = (slice(None), slice(0, None, 2), slice(1, None, 2))  # all readings, and every second one
SEAT = 1 / (SEATS * (1 - MIN_SEATS))  # seats are whole: a hair more held back can cost one


@pytest.fixture(scope="module")
def recording() -> Recording:
    return read_recording()


def held(decision: Decision) -> float:
    """How much is held back: all pauses count 1, all seats that may be taken count 1."""
    return decision.idle_share / MAX_IDLE + (SEATS - decision.seats) * SEAT


def turns(decisions: list[Decision]) -> int:
    """How often holding back more became holding back less, or the other way round."""
    steps = [b - a for a, b in pairwise(map(held, decisions)) if abs(b - a) > 1e-9]
    return sum((a > 0) != (b > 0) for a, b in pairwise(steps))


def first_s(readings: list[HardwareEvent], decisions: list[Decision]) -> float:
    """When anything is held back first."""
    return next(r.t_s for r, d in zip(readings, decisions, strict=True) if held(d) > 0)


def limit_s(readings: Any, limits: dict[str, float]) -> float:
    """When the recorded temperature reaches the lowered limit."""
    ((sensor, limit),) = limits.items()
    return next(r.t_s for r in readings if getattr(r, sensor) >= limit)


# -- at the card's own limits ---------------------------------------------------------------------------------------


class Replayed:
    """A source that reads the recording, and then says that it is over."""

    def __init__(self, readings: Any) -> None:
        self.left = list(readings)

    def read(self) -> HardwareEvent:
        return self.left.pop(0) if self.left else HardwareEvent(t_s=1e9, device="cuda:0", name="x", note="it is over")

    def close(self) -> None:
        pass


class Engine:
    """What a governor steers, with every seat taken."""

    def __init__(self) -> None:
        self.seats, self.asked = SEATS, []

    @property
    def num_running(self) -> int:
        return self.seats

    def reseat(self, seats: int, governor: Any) -> None:
        self.seats = seats
        self.asked.append(seats)


def governed(policy: str, readings: Any) -> tuple[list[GovernorEvent], list[int]]:
    """Events of a governor that reads the recording in its own thread, and the seats that it asked for."""
    engine, events = Engine(), []
    governor = Governor(policy, SEATS, lambda: Replayed(readings), lambda: None, interval_s=1e-4)
    governor.start(engine, events.append)
    governor.join()
    assert events[-1].action == "no sensor", "it ends with the recording"
    return events[:-1], engine.asked


@pytest.mark.parametrize("policy", POLICIES)
def test_a_card_far_from_its_limits_is_left_alone(policy: str, recording: Recording) -> None:
    for readings in (recording.readings[every] for every in SAMPLES):
        decisions = replay(readings, policy, SEATS)
        assert {(d.idle_share, d.seats, d.action) for d in decisions} == {(0.0, SEATS, "none")}
        events, asked = governed(policy, readings)
        assert [e.action for e in events] == ["none"] and asked == []


# -- at lower limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", LOWERED, ids=str)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("every", SAMPLES, ids=["all", "even", "odd"])
def test_it_acts_before_the_limit_and_turns_no_oftener_than_the_load(
    policy: str, limits: dict[str, float], every: slice, recording: Recording
) -> None:
    readings = with_limits(recording.readings, **limits)[every]
    decisions = replay(readings, policy, SEATS)
    begin, end = (recording.readings[i].t_s for i in (recording.loads[0][0], recording.load[1]))
    assert begin <= first_s(readings, decisions) < limit_s(recording.readings, limits)
    assert turns(decisions) <= 2 * len(recording.loads) - 1, "each load begins, and ends"
    late = [held(d) for r, d in zip(readings, decisions, strict=True) if r.t_s >= end + SOON_S]
    assert all(b <= a for a, b in pairwise(late)) and late[-1] < late[0], "at rest it only gives back"


@pytest.mark.parametrize("limits", LOWERED, ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_card_that_goes_on_resting_gets_everything_back(
    policy: str, limits: dict[str, float], recording: Recording
) -> None:
    """The rest that was recorded is short: its last reading is repeated here, which is a model of a card at rest."""
    readings = with_limits(recording.readings, **limits)
    last = readings[-1]
    readings += [replace(last, t_s=last.t_s + i) for i in range(1, 121)]
    assert held(replay(readings, policy, SEATS)[-1]) == 0.0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_forecast_that_was_too_high_is_taken_back_while_the_load_goes_on(policy: str, recording: Recording) -> None:
    """With a limit that no reading comes near, what the steep rise at the start made it hold back comes back."""
    readings = with_limits(recording.readings, memory_c=60.0)
    assert max(r.memory_c for r in readings) <= 60.0 - 8.0
    decisions = replay(readings, policy, SEATS)
    most = max(map(held, decisions))
    assert most > 0.0 and turns(decisions) == 1
    assert held(decisions[recording.load[1]]) < 0.1 * most + SEAT and held(decisions[-1]) == 0.0


@pytest.mark.parametrize("policy", POLICIES)
def test_readings_in_whole_degrees_do_not_make_it_flap(policy: str, recording: Recording) -> None:
    """A target (53 C) just above what memory settles at, 51 and 52 C by turns: forecasts fall on either side of it.

    What is held back then moves less than would be reported.
    """
    begin, end = (recording.readings[i].t_s for i in recording.load)
    for every in SAMPLES:
        readings = with_limits(recording.readings, memory_c=55.0)[every]
        told = zip(readings, replay(readings, policy, SEATS), strict=True)
        settled = [d for r, d in told if begin + WINDOW_S + SOON_S <= r.t_s <= end]
        assert {d.predicted_c > d.target_c for d in settled} == {True, False}
        assert max(map(held, settled)) - min(map(held, settled)) < REPORTED_SHARE


@pytest.mark.parametrize("policy", POLICIES)
def test_the_governor_carries_out_what_the_controller_decides(policy: str, recording: Recording) -> None:
    readings = with_limits(recording.readings, memory_c=52.0)
    decisions = replay(readings, policy, SEATS)
    events, asked = governed(policy, readings)
    if policy == "pace":
        assert asked == [] and max(e.idle_share for e in events) > MAX_IDLE - REPORTED_SHARE
    else:
        assert min(asked) == min(d.seats for d in decisions) < SEATS
    assert {e.sensor for e in events if e.action in ("pace", "shrink")} == {"memory"}
    assert all(e.advice == "sudo nvidia-smi -i 0 -pl 560" for e in events if e.idle_share)


# -- the forecast ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sensor", "settled_c", "worst_c"), [("core", 1.0, 10.0), ("memory", 3.0, 23.0)])
def test_the_forecast_errs_upwards_while_a_card_heats_and_is_right_once_it_has(
    sensor: str, settled_c: float, worst_c: float, recording: Recording
) -> None:
    """Bounds as measured: `worst_c` in the seconds after a load begins or ends, `settled_c` when these have left the
    window. This card's sensors follow within a second, so compensation for slow ones foretells too much; what it must
    not do is to foretell less than comes, or the governor is late.
    """
    errors = forecast_errors(recording.readings, sensor)
    begin, end = (recording.readings[i].t_s for i in recording.load)
    loaded = [e for e in errors if begin <= e[0] <= end - LOOK_AHEAD_S - 0.5]  # what comes is still under load
    assert min(error for _, error, _ in loaded) > -1.5
    assert min(unchanged for _, _, unchanged in loaded) < -1.5, "without a forecast it would be late"
    settled = [abs(error) for t, error, _ in loaded if t >= begin + WINDOW_S + SOON_S]
    assert len(settled) > 50 and max(settled) < settled_c
    assert worst_c - 2.0 < max(abs(error) for _, error, _ in errors) <= worst_c + 0.5


# -- missing readings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", LOWERED, ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_half_the_readings_decide_the_same(policy: str, limits: dict[str, float], recording: Recording) -> None:
    readings = with_limits(recording.readings, **limits)
    whole = replay(readings, policy, SEATS)
    for start in (0, 1):
        half = replay(readings[start::2], policy, SEATS)
        assert max(map(held, half)) == pytest.approx(max(map(held, whole)), abs=0.1 + SEAT)
        assert held(half[-1]) == pytest.approx(held(whole[-1]), abs=0.1 + SEAT)


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_sensor_of_memory_the_core_governs_as_with_one(policy: str, recording: Recording) -> None:
    readings = with_limits(recording.readings, core_c=46.0)
    blind = [replace(r, memory_c=None) for r in readings]
    assert list(map(held, replay(blind, policy, SEATS))) == list(map(held, replay(readings, policy, SEATS)))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sensor_that_is_silent_now_and_then_governs_still(policy: str, recording: Recording) -> None:
    """A hot memory that says nothing for a moment is not let go because the core is cool."""
    readings = with_limits(recording.readings, memory_c=52.0)
    gaps = [replace(r, memory_c=None) if i % 2 else r for i, r in enumerate(readings)]
    whole, gappy = replay(readings, policy, SEATS), replay(gaps, policy, SEATS)
    assert first_s(gaps, gappy) < limit_s(readings, {"memory_c": 52.0})
    end = recording.load[1]
    assert held(gappy[end]) == pytest.approx(held(whole[end]), abs=0.2)
    assert turns(gappy) <= 2 * len(recording.loads) - 1


def test_a_sensor_that_stays_silent_is_forgotten(recording: Recording) -> None:
    readings = with_limits(recording.readings, memory_c=52.0)
    gone_s = readings[recording.load[0]].t_s + 5.0
    gone = [r if r.t_s < gone_s else replace(r, memory_c=None) for r in readings]
    decisions = replay(gone, "pace", SEATS)
    after = [d for r, d in zip(gone, decisions, strict=True) if r.t_s > gone_s + WINDOW_S]
    assert {d.sensor for d in after} == {"core"} and held(after[-1]) == 0.0


# -- the file -------------------------------------------------------------------------------------------------------


class Counted:
    """An engine that has made ten tokens more whenever it is asked."""

    made = 0

    def stats(self) -> Counted:
        self.made += 10
        return self

    @property
    def num_output_tokens(self) -> int:
        return self.made


def test_what_was_written_is_read(tmp_path: Path) -> None:
    trace = Trace(Counted())
    given = [
        HardwareEvent(
            t_s=0.5 * i, device="cuda:0", name="a card", core_c=40 + i, memory_c=None, throttle=("hot: x",) * (i % 2),
            core_limit_c=90, power_limit_w=300.0, sm_mhz=1000 + i, gpu_percent=i, power_w=100.0 + i,
        )
        for i in range(5)
    ]  # fmt: skip
    for reading in given:
        trace.keep(reading)
    record = Record(name="heat_trace", script="x", conditions={}, metrics=trace.metrics(), hardware={"gpu": "a card"})
    found = read_recording(write_results("made", [record], tmp_path))
    assert list(found.readings) == given
    assert found.output_tok_s == (0.0, 20.0, 20.0, 20.0, 20.0) and found.load == (1, 4)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda r: r.clear(), "0 records named heat_trace"),
        (lambda r: r[0].update(name="climb"), "among ['climb']"),
        (lambda r: r[0].pop("spread"), "is no results file"),
        (lambda r: r[0]["metrics"].pop("memory_c"), "lacks memory_c"),
        (lambda r: r[0]["metrics"]["core_c"].pop(), "'core_c': 130"),
        (lambda r: r[0]["metrics"]["core_c"].__setitem__(3, None), "readings without core_c"),
        (lambda r: r[0]["metrics"]["t_s"].reverse(), "times have to rise"),
    ],
)
def test_a_wrong_file_is_refused_by_what_is_wrong(change: Any, told: str, tmp_path: Path) -> None:
    records = json.loads((Path(__file__).parents[1] / "docs/results/heat_trace_gpu.json").read_text(encoding="utf-8"))
    change(records)
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(records), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        read_recording(path)
    assert str(path) in str(error.value)


def test_no_file_and_no_json_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.json"
    assert main([str(path)]) == 1
    assert "does not exist; python -m strata_lab.bench.heat_trace" in capsys.readouterr().err
    path.write_text("no json", encoding="utf-8")
    with pytest.raises(ValueError, match="is no results file"):
        read_recording(path)


# -- its figures ----------------------------------------------------------------------------------------------------


def test_a_curve_is_found_again() -> None:
    """A made curve: 40 to 60 C with 5 s; 63.2% of the way after 5 s."""
    curve = [
        HardwareEvent(t_s=7 + t / 10, device="x", name="x", core_c=60 - 20 * 2.718281828 ** (-t / 50))
        for t in range(600)
    ]
    tau, off = time_constant_s(curve, "core")
    assert tau == pytest.approx(5.0, rel=0.02) and off < 0.1
    assert reached_s(curve, "core", 0.632) == pytest.approx(5.0, abs=0.15)


def test_the_command_tells_what_the_card_would_have_been_held_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "pace: at most 0.0% idle, 0.0% under load, at least 8 seats" in capsys.readouterr().out
    assert main(["--memory-limit", "52"]) == 0
    assert "pace: at most 50.0% idle" in capsys.readouterr().out
