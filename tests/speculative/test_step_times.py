"""What the policy is told of a step's time: the device's where steps are queued, nothing where something was captured.

The device has a clock of its own here: replays move it, and so does a capture, by a second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from strata_lab import run_ahead
from strata_lab.engine import LLMEngine
from strata_lab.speculative import ahead
from strata_lab.speculative.ahead import AheadDrafter
from strata_lab.speculative.policy import DraftPolicy
from strata_lab.speculative.speculator import DraftTimes, Speculator
from tests.checkpoints import write_checkpoint
from tests.speculative.test_ahead import GREEDY, steps_of
from tests.speculative.test_ahead import engine as drafting_engine
from tests.speculative.test_policy import decoding, policy
from tests.test_run_ahead import Replays, prompts
from tests.test_run_ahead import engine as queueing_engine

CAPTURE_MS, INPUTS_MS = 1000.0, 0.5
REPLAY_MS, CYCLE_MS = 2.0, 2.2  # a replay holds two plain steps
DRAWN = dataclasses.replace(GREEDY, temperature=1.0, seed=3, top_k=20)


class Device:
    """Its clock, in milliseconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def event(self) -> Event:
        return Event(self)

    def after(self, work: Callable[..., Any], ms: float) -> Callable[..., Any]:
        """`work` that takes so long."""

        def timed(*args: Any) -> Any:
            self.now += ms
            return work(*args)

        return timed


class Event:
    """An event of it."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        self.at = self.device.now

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at


class Timed(Replays):
    """Replays that take so long, and captures that take longer."""

    def __init__(self, device: Device, ms: float) -> None:
        super().__init__()
        self.device, self.ms = device, ms

    def record(self, work: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], None], Tensor]:
        self.device.now += CAPTURE_MS
        replay, result = super().record(work, device)
        return self.device.after(replay, self.ms), result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")[0]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    for module in (run_ahead, ahead):
        monkeypatch.setattr(module, "fill", made.after(module.fill, INPUTS_MS))
    return made


def told(made: LLMEngine) -> list[tuple[int, float | None]]:
    """Drafts and milliseconds of each step of decodes that the policy is told of from now on."""
    found: list[tuple[int, float | None]] = []
    speculation: Any = made._loop.parts.speculation
    inner = speculation.observe

    def observe(batch: Any, counts: Any, ms: float | None, began: bool) -> Any:
        if batch.num_decode_tokens:
            found.append((batch.num_draft_tokens, None if ms is None else round(ms, 6)))
        return inner(batch, counts, ms, began)

    speculation.observe = observe
    return found


def test_steps_that_arrive_together_take_what_the_device_took_for_each(folder: Any, device: Device) -> None:
    """The host waits for two of them and then for none; the first two have their inputs to wait for besides."""
    made, _ = queueing_engine(folder, ahead=True)
    made._loop.parts.runner.clock, made._loop.parts.runner.recorder = device.event, Timed(device, REPLAY_MS)
    found = told(made)
    with made:
        for _ in range(2):
            made.generate(prompts(1), dataclasses.replace(GREEDY, max_tokens=9))
    first = (REPLAY_MS + INPUTS_MS) / 2
    text = [first, first, *[REPLAY_MS / 2] * 6]
    assert [ms for _, ms in found] == [None, *text[1:], *text], "what was captured in the first step is in none"


def drafting(folder: Any, device: Device) -> tuple[LLMEngine, DraftPolicy]:
    """A target that drafts for itself, with a policy that has measured what cycles cost."""
    made, _, _ = drafting_engine([folder])
    runner = made._loop.parts.runner
    runner.ahead.clock, runner.ahead.recorder = device.event, Timed(device, REPLAY_MS)
    runner.cycles.recorder = Timed(device, CYCLE_MS)
    drafter: Any = AheadDrafter(runner.model)
    judge = DraftPolicy(runner.cycles.costs(), drafter.classes, 3)
    speculation = Speculator(drafter, judge, 3, runner=runner)
    made._loop.parts = dataclasses.replace(made._loop.parts, speculation=speculation)
    return made, judge


def test_a_cycle_takes_what_the_device_took_and_one_that_captures_tells_nothing(folder: Any, device: Device) -> None:
    made, judge = drafting(folder, device)
    found = told(made)
    with made:
        assert judge.costs.points()["window"] == pytest.approx(dict.fromkeys((2, 3, 4), CYCLE_MS))
        for count, params in ((1, GREEDY), (1, DRAWN), (1, DRAWN), (2, GREEDY), (2, GREEDY)):
            made.generate(prompts(count), params)
    windows = [ms for drafts, ms in found if drafts]
    assert set(windows) == {None, CYCLE_MS, CYCLE_MS + INPUTS_MS}
    assert windows.count(None) == 2, "drawn cycles and those of two requests"
    assert windows[0] == CYCLE_MS + INPUTS_MS, "what was captured to be timed is not captured again"
    assert max(ms or 0.0 for _, ms in found) < CAPTURE_MS
    assert judge.costs.window_ms(4) == pytest.approx(CYCLE_MS, rel=0.02)
    assert 0 < judge.switch_ms < INPUTS_MS, "what inputs take is told apart from what cycles do"


def test_a_target_that_pays_is_drafted_for_however_long_captures_take(folder: Any, device: Device) -> None:
    made, judge = drafting(folder, device)
    with made:
        for _ in range(3):
            made.generate(prompts(1), DRAWN)
            made.generate(prompts(1), GREEDY)
        steps = [step for step in steps_of(made) if step.num_decode_tokens]
    assert judge.state == "on" and "times the tokens" in judge.reason
    assert judge.net(1) > 1.2
    assert sum(bool(step.drafts) for step in steps) > 0.7 * len(steps)


class Working:
    """A drafter whose looks and guesses are work; it captures when it first guesses."""

    name, classes, costs_time, look_is_work = "working", (("any", 1),), True, True

    def __init__(self) -> None:
        self.now, self.captures, self.looks = 0.0, 0, 0

    def look(self, requests: Any) -> list[int]:
        self.looks += 1
        return [1] * len(requests)

    def draft(self, requests: Any, counts: Any) -> list[list[int]]:
        self.now += 0.002 if self.captures else 5.0
        self.captures = 1
        return [[5] * count for count in counts]


def worker(judge: DraftPolicy | None) -> tuple[Speculator, Working, DraftTimes]:
    drafter, times = Working(), DraftTimes(1.0)
    return Speculator(drafter, judge, 4, times, clock_s=lambda: drafter.now), drafter, times  # type: ignore[arg-type]


def test_guesses_for_which_something_is_captured_tell_nothing_of_their_time() -> None:
    speculator, drafter, times = worker(None)
    speculator.prepare(lambda: [decoding("a")])
    assert (drafter.captures, times.ms_per_draft) == (1, 1.0)
    for _ in range(40):
        speculator.prepare(lambda: [decoding("a")])
    assert times.ms_per_draft == pytest.approx(0.5, rel=0.01), "2 ms for 4 guesses"


@pytest.mark.parametrize(("acceptance", "looks"), [(0.0, False), (1.0, True)])
def test_texts_are_taken_in_only_where_guesses_are_wanted(acceptance: float, looks: bool) -> None:
    judge = policy()
    for kind in judge.acceptance.kinds:
        for _ in range(60):
            kind.add("a", 4, round(4 * acceptance))
    speculator, drafter, _ = worker(judge)
    for _ in range(10):
        speculator.prepare(lambda: [decoding("a")])
    assert (drafter.looks > 0) == looks
