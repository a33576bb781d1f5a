"""Notebook 12: the climb in small, settings that change while streams run, and a machine that is slow on purpose."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from strata_lab.bench.climb import Climb
from strata_lab.bench.climb_plan import Course, Stage
from strata_lab.bench.harness import Record
from strata_lab.bench.workloads import single_stream
from strata_lab.events import SettingEvent, StepEvent
from strata_lab.lessons.checks import Verdict, choice, number
from strata_lab.lessons.lesson import Lesson
from strata_lab.lessons.measuring import Trace
from strata_lab.lessons.theme import BLUE, GREY, ORANGE, figure
from strata_lab.sampling_params import SamplingParams
from strata_lab.telemetry.checks import Check
from strata_lab.workbench.ladder import stages_of

SEATS = (1, 2, 4, 8)
PROMPT_TOKENS = 8
WINDOW_S = 0.25  # of a point of the live picture
POLL_S = 0.005
SETTLE_S = 0.1  # after a change: the newcomers' prompts are computed
MARKS = {"ok": "✔", "warn": "⚠", "fail": "✘"}


def stages(device_type: str) -> list[Stage]:
    """The large steps of the climb on "cpu" or "cuda"."""
    weights = "fp8" if device_type == "cuda" else "int8"
    return [Stage("cuda_graph", True), Stage("fused_kernels", True), Stage("weight_format", weights)]


def climb(lesson: Lesson, tokens: int) -> list[Record]:
    """One stage after the other, A/B/A, one stream of `tokens` tokens; everything has to be off before."""
    course = Course(single_stream(PROMPT_TOKENS, tokens), None)
    return Climb(lesson.engine, course, stages=stages(lesson.engine.device.type), roofline=False).records()


def ladder(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The stages as the workbench's climb shows them: label, low, median, high, before, baseline."""
    found: list[dict[str, Any]] = stages_of([r.as_dict() for r in records])["stages"]
    return found


def stairs(found: Sequence[Mapping[str, Any]]) -> Any:
    """A column per stage with its spread, and what it gained."""
    made = figure("The climb, on this machine", y="tok/s, one stream")
    gains = ["" if i == 0 else f"{s['before']:.2f} times" for i, s in enumerate(found)]
    median = [s["median"] for s in found]
    made.add_bar(
        x=[s["label"] for s in found], y=median, text=[f"{m:.0f}<br>{g}" for m, g in zip(median, gains, strict=True)],
        textposition="outside", cliponaxis=False,
        marker_color=[BLUE if s["kept"] else GREY for s in found[:-1]] + [ORANGE],
        error_y={
            "type": "data", "array": [s["high"] - s["median"] for s in found], "color": GREY,
            "arrayminus": [s["median"] - s["low"] for s in found],
        },
        hovertemplate="%{x}: %{y:.1f} tok/s<br>median of its runs, A/B/A; the line is slowest to "
        "fastest<extra></extra>",
    )  # fmt: skip
    return made.update_yaxes(range=[0, 1.25 * max(s["high"] for s in found)])


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
        return [e for e in self.seen.events if isinstance(e, SettingEvent)]


def more_seats(lesson: Lesson, seconds: float, seats: Sequence[int] = SEATS) -> Live:
    """As many requests as the last of `seats`, all sent at once; every `seconds` more of them are let in."""
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
                engine.apply(max_num_seqs=count)
                time.sleep(seconds)
        finally:
            for request in ids:
                engine.forget(request)
    return Live(seen, _rates(seen, seats))


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
        climbed: the stages of the climb (`ladder`), baseline first, everything last.
        rates: seats to tokens per second of all streams.
    """

    def __init__(self, climbed: Sequence[Mapping[str, Any]], rates: Mapping[int, float]) -> None:
        self.climbed, self.rates = climbed, rates

    def product(self, answer: Any) -> Verdict:
        """What the stages' gains multiply to."""
        kept = [s for s in self.climbed[1:-1] if s["kept"]]
        gains = [float(s["before"]) for s in kept]
        truth = 1.0
        for gain in gains:
            truth *= gain
        return number(
            answer, truth, within=0.05,
            because=f"{' x '.join(f'{g:.2f}' for g in gains)} = {truth:.2f}. Measured directly, everything together "
            f"gained {self.climbed[-1]['before']:.2f} times: stages were measured at different moments, so they need "
            "not agree.",
            hint="Gains of stages that follow each other multiply.",
            traps=((sum(g - 1 for g in gains) + 1, "Percentages of different bases cannot be added."),),
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
