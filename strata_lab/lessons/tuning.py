"""Notebook 12: the climb in small, settings that change while streams run, and a machine that is slow on purpose."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from strata_lab.bench.climb_plan import Stage, plan
from strata_lab.config import toggles
from strata_lab.events import SettingEvent, StepEvent
from strata_lab.lessons.checks import Verdict, choice, number
from strata_lab.lessons.lesson import Lesson
from strata_lab.lessons.measuring import Compared, Trace, applying, decode_ms, in_turn
from strata_lab.lessons.theme import BLUE, GREY, ORANGE, figure
from strata_lab.sampling_params import SamplingParams
from strata_lab.telemetry.checks import Check

BASELINE = "everything off"
SEATS = (1, 2, 4, 8)
PROMPT_TOKENS = 8
WAIT_S, POLL_S = 20.0, 0.01
MOST_STEPS = 900  # with one number of seats: all fit into the event log, and their tokens into the notebook's pool
WINDOW_S = 0.25  # of a point of the live picture
MARKS = {"ok": "✔", "warn": "⚠", "fail": "✘"}


def stages(device_type: str) -> list[Stage]:
    """The large steps of `strata climb` on "cpu" or "cuda", in its order."""
    weights = ("weight_format", "fp8" if device_type == "cuda" else "int4")
    wanted = (("cuda_graph", True), ("fused_kernels", True), weights)
    return [stage for stage in plan(device_type) if (stage.toggle, stage.value) in wanted]


def climb(lesson: Lesson, rounds: int = 2) -> Compared:
    """Milliseconds per token of one stream from everything off upwards, each stage on top of those before it.

    The last stage, with all of them, is in force afterwards.
    """
    settings = {BASELINE: {t.name: t.off for t in toggles()}}
    for stage in stages(lesson.engine.device.type):
        settings[stage.name] = {**list(settings.values())[-1], stage.toggle: stage.value}
    sides = {label: _change(lesson.engine, wanted) for label, wanted in settings.items()}

    def measure() -> float:
        return decode_ms(lesson.engine, 0.15 * lesson.seconds, prompt_tokens=PROMPT_TOKENS)

    found = in_turn(sides, measure, rounds=rounds, unit="ms per token")
    list(sides.values())[-1]()
    return found


def _change(engine: Any, wanted: Mapping[str, Any]) -> Callable[[], None]:
    """Put settings in force, and only those that are not: weights are built anew no more often than they must."""

    def do() -> None:
        now = engine.optimizations.as_dict()
        applying(engine, stage={n: v for n, v in wanted.items() if v is not None and now[n] != v})["stage"]()

    return do


def gains(found: Compared) -> dict[str, float]:
    """Stage to how many times as fast it is as the one before; the first has none."""
    return {new: found.times_faster(new, old) for old, new in pairwise(found.rounds)}


def stairs(found: Compared) -> Any:
    """A column per stage, its best round with all rounds, and what it gained on the one before."""
    rates = {label: [1e3 / ms for ms in values] for label, values in found.rounds.items()}
    best = [max(values) for values in rates.values()]
    told = ["", *(f"{gain:.2f} times" for gain in gains(found).values())]
    made = figure("The climb, on this machine", y="tok/s, one stream")
    made.add_bar(
        x=list(rates), y=best, text=[f"{b:.0f}<br>{g}" for b, g in zip(best, told, strict=True)],
        textposition="inside", insidetextanchor="middle", marker_color=BLUE,
        hovertemplate="%{x}: %{y:.1f} tok/s<br>1000 / ms per token, best of its rounds<extra></extra>",
    )  # fmt: skip
    rounds = [(label, value) for label, values in rates.items() for value in values]
    made.add_scatter(
        x=[label for label, _ in rounds], y=[value for _, value in rounds],
        mode="markers", marker={"color": GREY, "size": 12, "symbol": "line-ew-open", "line": {"width": 2}},
        hovertemplate="%{x}: %{y:.1f} tok/s, one round<extra></extra>",
    )  # fmt: skip
    made.update_layout(showlegend=False)
    return made.update_yaxes(range=[0, 1.25 * max(best)])


@dataclass(frozen=True)
class Live:
    """Streams that ran while the number of seats was changed.

    Attributes:
        seen: what the engine did.
        rates: seats to tokens per second, all streams together, while nothing else changed.
    """

    seen: Trace
    rates: dict[int, float]

    @property
    def changes(self) -> list[SettingEvent]:
        """When settings took effect."""
        return [e for e in self.seen.events if isinstance(e, SettingEvent) and e.changes]


def more_seats(lesson: Lesson, seconds: float, seats: Sequence[int] = SEATS) -> Live:
    """As many requests as the last of `seats`, all sent at once; every `seconds`, or `MOST_STEPS`, more are let in.

    Raises:
        TimeoutError: the engine did not decode for so many together.
    """
    engine = lesson.engine
    engine.reset_prefix_cache()
    engine.apply(max_num_seqs=seats[0])
    params = SamplingParams(temperature=0.0, max_tokens=100_000, ignore_eos=True)
    vocabulary = engine.model_config.vocab_size
    with Trace(engine) as seen:
        engine.start()
        ids = [
            engine.add_request([(11 + 97 * i + 31 * j) % vocabulary for j in range(PROMPT_TOKENS)], params)
            for i in range(seats[-1])
        ]
        try:
            for count in seats:
                cursor = engine.events.cursor
                engine.apply(max_num_seqs=count)
                _let_run(engine, seconds)
                _wait_for(engine, cursor, count)
        finally:
            for request in ids:
                engine.forget(request)
    return Live(seen, _rates(seen, seats))


def _let_run(engine: Any, seconds: float) -> None:
    first, deadline = engine.stats().num_steps, time.monotonic() + seconds
    while time.monotonic() < deadline and engine.stats().num_steps - first < MOST_STEPS:
        time.sleep(POLL_S)


def _wait_for(engine: Any, cursor: int, count: int) -> None:
    """Until a step since `cursor` has decoded for `count` requests: a slow machine may need longer."""
    deadline = time.monotonic() + WAIT_S
    while not any(s.num_decode_tokens == count for s in engine.events.since(cursor)[0] if isinstance(s, StepEvent)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{count} requests did not decode together; switch continuous_batching on")
        time.sleep(POLL_S)


def _rates(seen: Trace, seats: Sequence[int]) -> dict[int, float]:
    """Seats to the rate of the steps that decoded for so many and nothing else."""
    found = {}
    for count in seats:
        steps = [s for s in seen.decode_steps if s.num_decode_tokens == count]
        seconds = sum(s.duration_ms for s in steps) / 1e3
        found[count] = sum(len(s.tokens) for s in steps) / seconds if seconds else 0.0
    return found


def live(found: Live) -> Any:
    """Tokens per second against time, and when a setting changed."""
    made = figure("The engine changes while it runs", x="seconds", y="tok/s, all streams together")
    start_s = found.seen.start_s
    points = _windows(found.seen.steps, start_s)
    made.add_scatter(
        x=[t for t, _ in points], y=[rate for _, rate in points], mode="lines", line={"color": BLUE, "shape": "hv"},
        name="tok/s", hovertemplate=f"%{{x:.2f}} s: %{{y:.0f}} tok/s<br>tokens of a window of {WINDOW_S} "
        "s<extra></extra>",
    )  # fmt: skip
    for event in found.changes:
        label = ", ".join(f"{name} {value}" for name, value in event.changes.items())
        made.add_vline(
            x=event.t_s - start_s, line={"color": ORANGE, "dash": "dot"}, annotation_text=label,
            annotation_textangle=-90, annotation_yanchor="top",
        )  # fmt: skip
    return made.update_yaxes(rangemode="tozero")


def _windows(steps: Sequence[StepEvent], start_s: float) -> list[tuple[float, float]]:
    counts: dict[int, int] = {}
    for step in steps:
        at = int((step.t_s - start_s) / WINDOW_S)
        counts[at] = counts.get(at, 0) + len(step.tokens)
    last = max(counts, default=0)
    return [(at * WINDOW_S, counts.get(at, 0) / WINDOW_S) for at in range(last)]


def slow_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """A right norm in plain torch: what somebody might leave behind in an engine."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight).to(x.dtype)


def findings(checks: Sequence[Check]) -> Any:
    """The doctor's lines: what is not well, with cause and remedy, then what is."""
    from IPython.display import Markdown

    wrong = [c for c in checks if c.verdict != "ok"]
    lines = [
        f"- {MARKS[c.verdict]} **{c.name}**: {c.value}" + (f"\n  - why: {c.cause}" if c.cause else "")
        + (f"\n  - what to do: {c.fix}" if c.fix else "")
        for c in wrong
    ]  # fmt: skip
    well = [f"- {MARKS['ok']} {c.name}: {c.value}" for c in checks if c.verdict == "ok"]
    return Markdown("\n".join([*(lines or ["Nothing is wrong."]), "", *well]))


class Checks:
    """The exercises.

    Args:
        climbed: the stages of the climb (`climb`).
        rates: seats to tokens per second of all streams.
    """

    def __init__(self, climbed: Compared, rates: Mapping[int, float]) -> None:
        self.climbed, self.rates = climbed, rates

    def product(self, answer: Any) -> Verdict:
        """What the stages' gains multiply to."""
        each, truth = list(gains(self.climbed).values()), 1.0
        for gain in each:
            truth *= gain
        return number(
            answer, truth, within=0.03,
            because=f"{' x '.join(f'{g:.2f}' for g in each)} = {truth:.2f}: each stage multiplies what those before "
            "it have reached.",
            hint="Gains of stages that follow each other multiply.",
            traps=((sum(g - 1 for g in each) + 1, "Percentages of different bases cannot be added."),),
        )  # fmt: skip

    @property
    def wanted(self) -> float:
        """Tokens per second that each stream shall have, in the second exercise: between two measured values."""
        each = sorted(rate / count for count, rate in self.rates.items())
        middle = len(each) // 2
        return round((each[middle - 1] + each[middle]) / 2, 1)

    def seats_for(self, answer: Any) -> Verdict:
        """Most of the measured seats at which every stream has `wanted` tok/s."""
        truth = max(count for count, rate in self.rates.items() if rate / count >= self.wanted)
        each = {count: rate / count for count, rate in self.rates.items()}
        return number(
            answer, truth, within=0.01,
            because=f"With {truth} seats each stream has {each[truth]:.1f} tok/s; with the next measured number it has "
            f"less than {self.wanted}.",
            hint="Divide the total of each stair of the live picture by its number of streams.",
        )  # fmt: skip

    def first_look(self, answer: Any) -> Verdict:
        """Where to look first when a machine slows down after a minute: "temperature", "model" or "prompt"."""
        return choice(
            answer, "temperature",
            because="What was fast when cold and is slow when warm has changed its clocks. The doctor looks at "
            "temperature, then power, then utilization, in that order.",
            hints={
                "model": "The same model was fast a minute ago.",
                "prompt": "A longer text costs something with every token, but no jump after a minute.",
            },
        )  # fmt: skip
