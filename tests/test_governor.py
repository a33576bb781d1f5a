"""Laws of the thermal governor: it acts before the limit, costs nothing when off, and changes no token.

Temperatures come from `thermal_model.ModelledCard`, which is a model, or are written by hand; `test_heat_replay.py` has
the recorded ones.
"""

from __future__ import annotations

import statistics
import threading
from typing import Any

import pytest

from strata_lab.engine import LLMEngine
from strata_lab.events import GovernorEvent, HardwareEvent
from strata_lab.sampling_params import SamplingParams
from strata_lab.telemetry import thermal_model
from strata_lab.telemetry.governor import Governor, NoGovernor, advice
from strata_lab.telemetry.heat import HYSTERESIS_C, MAX_IDLE, Controller, Predictor
from strata_lab.telemetry.monitor import NO_CPU_SENSOR, CpuSource
from strata_lab.telemetry.pacing import Pacer
from strata_lab.telemetry.thermal_model import FULL_TOK_S, LIMIT_C, ONSET_S, THROTTLED_TOK_S, ModelledCard
from tests.checkpoints import write_checkpoint

WAIT_S = 20.0
SEATS = 8


def drive(policy: str | None, seconds: int, seats: int = SEATS, **card: Any) -> tuple[list[float], list[float], Any]:
    """Rates and memory temperatures of every second, and the last decision."""
    model, controller = ModelledCard(**card), Controller(policy, seats) if policy else None
    rates, temperatures, decision = [], [], None
    for _ in range(seconds):
        if controller is not None:
            decision = controller.observe(model.reading(), seats)
        idle, share = (decision.idle_share, decision.seats / seats) if decision else (0.0, 1.0)
        rates.append(model.run(1.0, idle, share))
        temperatures.append(model.memory_c)
    return rates, temperatures, decision


# -- the model ----------------------------------------------------------------------------------------------------


def test_without_a_governor_the_modelled_card_falls_as_the_articles_say() -> None:
    rates, _, _ = drive(None, 600)
    onset = next(i for i, r in enumerate(rates) if r < FULL_TOK_S - 1)
    assert abs(onset - ONSET_S) <= 2
    assert set(map(round, rates[:onset])) == {round(FULL_TOK_S)}
    assert {round(r) for r in rates[onset + 1 :]} == {round(THROTTLED_TOK_S)}


def test_the_model_never_passes_for_a_measurement() -> None:
    assert "MODEL" in ModelledCard().reading().name
    assert thermal_model.__doc__ is not None and thermal_model.__doc__.startswith("A MODEL")


# -- the decision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["pace", "precise"])
def test_with_a_governor_the_card_never_slows_down_and_the_rate_is_steady(policy: str) -> None:
    rates, temperatures, _ = drive(policy, 900)
    late = rates[-600:]
    assert max(temperatures) < LIMIT_C
    assert (max(late) - min(late)) / statistics.mean(late) < 0.02
    assert statistics.mean(late) > 1.15 * THROTTLED_TOK_S


def test_shrink_takes_seats_and_leaves_those_who_stay_their_speed() -> None:
    _, temperatures, decision = drive("shrink", 900)
    assert max(temperatures) < LIMIT_C
    assert decision.seats < SEATS and decision.idle_share == 0.0


def test_with_one_seat_there_is_nothing_to_shrink_so_it_paces() -> None:
    _, temperatures, decision = drive("shrink", 600, seats=1)
    assert max(temperatures) < LIMIT_C
    assert decision.seats == 1 and decision.idle_share > 0.0


def observed(policy: str, excess_c: float, seconds: int, controller: Controller | None = None) -> Any:
    """Decision after a constant reading that is so far above the target."""
    made = controller or Controller(policy, SEATS)
    start = int(made._last_s or 0) + 1
    for t in range(start, start + seconds):
        reading = HardwareEvent(t_s=t, device="x", name="x", core_c=88 + excess_c, core_limit_c=90)
        decision = made.observe(reading, SEATS)
    return decision


def test_precise_takes_seats_only_when_all_pauses_are_used_up() -> None:
    controller = Controller("precise", SEATS)
    decisions = [observed("precise", 4, 1, controller) for _ in range(200)]
    assert [d for d in decisions if d.seats == SEATS and 0 < d.idle_share < MAX_IDLE]
    assert {d.idle_share for d in decisions if d.seats < SEATS} == {MAX_IDLE}
    assert decisions[-1].seats == 2, "a quarter of them stays"


def test_pace_never_takes_a_seat_and_never_more_than_half_the_time() -> None:
    decision = observed("pace", 30, 1000)
    assert (decision.idle_share, decision.seats) == (MAX_IDLE, SEATS)


def test_inside_the_hysteresis_nothing_moves_and_below_it_everything_is_given_back() -> None:
    controller = Controller("pace", SEATS)
    hot = observed("pace", 5, 20, controller).idle_share
    assert hot > 0
    observed("pace", -HYSTERESIS_C / 2, 30, controller)  # the slope has left the window
    settled = observed("pace", -HYSTERESIS_C / 2, 1, controller).idle_share
    assert observed("pace", -HYSTERESIS_C / 2, 60, controller).idle_share == settled > 0
    assert observed("pace", -20, 5, controller).action == "relax"
    assert observed("pace", -20, 200, controller).idle_share == 0.0


def test_a_lagging_sensor_is_seen_through() -> None:
    """Truth rises by 0.5 C/s; a sensor 8 s behind reads 4 C too low in the long run, and the prediction does not."""
    predictor, sensor = Predictor(8.0, look_ahead_s=0.0), 40.0
    for t in range(1, 101):
        truth = 40.0 + 0.5 * t
        sensor += (truth - sensor) * (1 - 2.718281828 ** (-1 / 8))
        predicted = predictor.predict(t, sensor)
    assert truth - sensor > 3.5
    assert abs(predicted - truth) < 0.6


def test_a_card_that_slows_down_below_its_limit_teaches_a_lower_target() -> None:
    """A consumer card whose memory is too hot does not tell; only the driver's word does."""
    controller = Controller("pace", SEATS)
    cool = HardwareEvent(t_s=1.0, device="x", name="x", core_c=70, core_limit_c=90)
    assert controller.observe(cool, 1).target_c == 88
    hot = HardwareEvent(t_s=2.0, device="x", name="x", core_c=70, core_limit_c=90, throttle=("hot: whatever",))
    decision = controller.observe(hot, 1)
    assert decision.target_c == 68 and decision.idle_share > 0
    power = HardwareEvent(t_s=2.0, device="x", name="x", core_c=70, core_limit_c=90, throttle=("power: the limit",))
    assert Controller("pace", SEATS).observe(power, 1).target_c == 88


def test_a_reading_without_temperature_changes_nothing() -> None:
    decision = Controller("pace", SEATS).observe(HardwareEvent(t_s=1.0, device="x", name="x"), 3)
    assert (decision.idle_share, decision.seats, decision.action, decision.sensor) == (0.0, SEATS, "none", "none")


# -- the pauses ---------------------------------------------------------------------------------------------------


class Clock:
    """Time that only passes when somebody works or rests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pacer: Pacer) -> None:
        self.now = 0.0
        monkeypatch.setattr("strata_lab.telemetry.pacing.time.perf_counter", lambda: self.now)
        monkeypatch.setattr(pacer._stop, "wait", self.rest)

    def rest(self, seconds: float) -> None:
        self.now += seconds

    def work(self, seconds: float) -> str:
        self.now += seconds
        return "done"


@pytest.mark.parametrize("step_s", [0.001, 0.0066, 0.05, 1.0])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_the_rest_is_the_share_that_was_asked_for(share: float, step_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    drained: list[int] = []
    pacer = Pacer(lambda: drained.append(1))
    clock = Clock(monkeypatch, pacer)
    pacer.idle_share = share
    count = round(20 / step_s) if step_s < 1 else 4000
    for _ in range(count):
        assert pacer.run(lambda: clock.work(min(step_s, 0.05) if step_s < 1 else 0.2)) == "done"
    assert abs(pacer.rested_s / clock.now - share) < 0.01
    assert drained, "it rests only behind an empty device"


def test_no_governor_adds_nothing_but_a_call() -> None:
    assert NoGovernor().run(lambda: "stepped") == "stepped"


# -- in an engine -------------------------------------------------------------------------------------------------


class Scripted(CpuSource):
    """A hot card, second by second as often as it is asked."""

    def __init__(self, core_c: float = 99.0) -> None:
        super().__init__("")
        self.core_c, self.t_s = core_c, 0.0

    def read(self) -> HardwareEvent:
        self.t_s += 1.0
        return HardwareEvent(
            t_s=self.t_s, device="cuda:1", name="scripted", core_c=self.core_c, core_limit_c=90, power_limit_w=450.0
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("governor"), "llama")[0]


def events(engine: LLMEngine, until: Any, cursor: int = 0) -> list[GovernorEvent]:
    """Governor events from `cursor` up to the first that `until` likes."""
    found = []
    while True:
        new, cursor, _ = engine.events.since(cursor)
        for event in new:
            if isinstance(event, GovernorEvent):
                found.append(event)
                if until(event):
                    return found
        assert engine.events.wait(cursor, WAIT_S), "no such event"


def test_a_hot_card_rests_and_shrinks_and_the_tokens_stay_the_same(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [[5, 9, 11 + i] for i in range(4)]
    with LLMEngine(folder, device="cpu", max_model_len=64) as engine:
        expected = [o.token_ids for o in engine.generate(prompts, params)]
    source = Scripted()
    monkeypatch.setattr("strata_lab.build.source_for", lambda device: source)
    monkeypatch.setattr("strata_lab.telemetry.governor.INTERVAL_S", 0.005)
    monkeypatch.setattr(Governor.__init__, "__defaults__", (0.005,))
    with LLMEngine(folder, device="cpu", max_model_len=64, max_num_seqs=4, thermal_governor="precise") as engine:
        results, enough = [], threading.Event()

        def load() -> None:
            while not enough.is_set():
                results.append([o.token_ids for o in engine.generate(prompts, params)])

        loader = threading.Thread(target=load)
        loader.start()
        try:
            found = events(engine, lambda e: e.max_num_seqs == 1)
        finally:
            enough.set()
            loader.join(WAIT_S)
        assert {tuple(r) for r in results} == {tuple(expected)}
        assert engine.optimizations.max_num_seqs == 4, "the setting is the user's"
        assert engine._loop.seats == 1
        assert [e.action for e in found if e.action == "pace"] and found[-1].action == "shrink"
        assert found[-1].idle_share == MAX_IDLE and found[-1].advice == "sudo nvidia-smi -i 1 -pl 360"
        cursor, source.core_c = engine.events.cursor, 30.0
        events(engine, lambda e: e.idle_share == 0.0 and e.max_num_seqs == 4, cursor)
        assert engine.apply(thermal_governor="off").results["thermal_governor"].status == "applied"
        assert engine._loop.seats == 4


def test_on_a_cpu_the_governor_says_that_there_is_no_sensor(folder) -> None:
    with LLMEngine(folder, device="cpu", max_model_len=64) as engine:
        engine.start()
        result = engine.apply(thermal_governor="pace").results["thermal_governor"]
        assert result.status == "applied" and result.reason.startswith("No effect here")
        (event,) = events(engine, lambda e: True)
        assert (event.action, event.reason) == ("no sensor", NO_CPU_SENSOR)
        assert [f.feature for f in engine.fallbacks if f.feature == "thermal_governor"]


def test_closing_ends_the_governor(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata_lab.build.source_for", lambda device: Scripted())
    with LLMEngine(folder, device="cpu", max_model_len=64, thermal_governor="shrink") as engine:
        engine.start()
        governor = engine._loop.parts.governor
    thread = governor._monitor._thread
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert "strata-monitor" not in {t.name for t in threading.enumerate()}


def test_advice_names_a_lower_limit_of_the_right_card() -> None:
    assert advice(HardwareEvent(t_s=0, device="cuda:2", name="x", power_limit_w=450.0)).endswith("-i 2 -pl 360")
    assert advice(HardwareEvent(t_s=0, device="cuda:2", name="x")) == ""
