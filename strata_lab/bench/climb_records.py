"""What a climb measured, as records: stage by stage while it goes on, all of them when it is whole.

A climb takes minutes and may be cut. So after every stage what there is goes into a file of its own, whose name and
records say that it is unfinished; the whole climb's file is written once, at the end.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from strata_lab.bench.climb_plan import SEVERAL, SINGLE, Course, capturing_note, figure
from strata_lab.bench.harness import Environment, Record, Spread, check_mbu, write_results
from strata_lab.bench.measure import Run
from strata_lab.telemetry.bandwidth import Bandwidth, ceiling

BASELINE, EVERYTHING = "baseline", "everything"
LOOPING_SHARE = 0.5  # of a text's tokens: where more of one text loops, guessing it right is no gain


@dataclass
class Measured:
    """A stage while the climb goes on; runs of the same setting in the next stage's A/B/A are added to it.

    Attributes:
        name: of the stage.
        series: `SINGLE` or `SEVERAL`.
        optimizations: in force; empty where nothing could be measured.
        runs: so far.
        speedup: over the setting before.
        kept: whether the climb goes on from here.
        note: why there are no figures, or what they are.
        capturing: runs in which something was captured still, after as many as `settled_run` tries.
        stats: sizes of the engine's memory.
        top: the roofline's bandwidth, and with how many runs it was measured.
    """

    name: str
    series: str
    optimizations: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    speedup: float = 1.0
    kept: bool = True
    note: str = ""
    capturing: int = 0
    stats: dict[str, float] = field(default_factory=dict)
    top: tuple[Bandwidth, int] | None = None

    @property
    def guesses(self) -> bool:
        """Whether tokens are guessed in this setting."""
        return self.optimizations.get("speculative", "none") != "none"

    @property
    def looping(self) -> float:
        """Share of the output tokens behind the beginning of a loop, in the run where it is largest; 0 to 1."""
        return max((r.looping for r in self.runs), default=0.0)

    @property
    def guesses_loops(self) -> bool:
        """Whether tokens are guessed, and those of a text that goes round in circles for its greater part."""
        return self.guesses and any(r.most_looping > LOOPING_SHARE for r in self.runs)


class Records:
    """Makes records of stages.

    Args:
        model: its name.
        course: what was measured on.
        device: "cpu" or "cuda[:i]".
    """

    def __init__(self, model: str, course: Course, device: str) -> None:
        self.model, self.course, self.device = model, course, device
        self.environment = Environment.now(device)

    def of(self, done: Sequence[Measured]) -> list[Record]:
        """A record per stage. Raises `RooflineExceeded`."""
        baselines = {m.series: m for m in reversed(done) if m.name == BASELINE}
        return [self._record(m, baselines.get(m.series), done) for m in done]

    def _record(self, m: Measured, baseline: Measured | None, done: Sequence[Measured]) -> Record:
        workload = self.course.workloads[m.series]
        prompt_tokens = max((r.prompt_tokens for r in m.runs), default=workload.prompt_tokens)
        conditions = {
            "model": self.model,
            "weight_format": m.optimizations.get("weight_format"),
            "kv_cache_dtype": m.optimizations.get("kv_cache_dtype"),
            "batch": workload.concurrency,
            "prompt_tokens": prompt_tokens,
            "output_tokens": max(workload.output_tokens),
            "context": prompt_tokens + max(workload.output_tokens) // 2,
            "toggles": m.optimizations,
            "series": m.series,
            "stage": m.name,
            "kept": m.kept,
            **self.course.conditions,
        }
        figures = [figure(r, m.series) for r in m.runs]
        folder = self.course.letter or ("several" if m.series == SEVERAL else "")
        return self.environment.record(
            "/".join(part for part in ("climb", folder, m.name) if part),
            script=self.course.script,
            conditions=conditions,
            metrics=self._metrics(m, baseline, done) if m.runs else {},
            spread=Spread.of(figures) if figures else None,
            note=(m.note + capturing_note(m.capturing)).removeprefix("; "),
        )

    def _metrics(self, m: Measured, baseline: Measured | None, done: Sequence[Measured]) -> dict[str, Any]:
        middle = sorted(m.runs, key=lambda r: figure(r, m.series))[len(m.runs) // 2]
        ratio = _ratio_to_bf16(m, done)
        shared = {
            "output_tok_s": median(m.runs, m.series),
            "prefill_tok_s": statistics.median(r.prefill_tok_s for r in m.runs),
            "ttft_ms": middle.ttft_ms,
            "tpot_ms": middle.tpot_ms,
            "itl_p99_ms": middle.itl_p99_ms,
            "speedup_vs_before": m.speedup,
            "speedup_vs_baseline": median(m.runs, m.series) / median(baseline.runs, m.series) if baseline else 1.0,
            **({"looping_tokens": m.looping} if m.guesses else {}),
            **({} if ratio is None else {"ratio_to_bf16": ratio}),
            **m.stats,
        }
        if m.series != SINGLE:
            per_stream = None if middle.tpot_ms is None else 1e3 / middle.tpot_ms
            return shared | {"tok_s_per_stream": per_stream}
        return shared | {"tok_s_per_stream": shared["output_tok_s"], **self._roofline(m, middle)}

    def _roofline(self, m: Measured, middle: Run) -> dict[str, Any]:
        """Distance of the median run from the memory roofline; the rule holds for the fastest run too."""
        assert middle.read_bytes_s is not None
        assert middle.step_bytes is not None
        if m.top is None or m.top[1] != len(m.runs):
            # Measured anew for every stage: the ceiling must not come from a busier hour than the figure.
            m.top = ceiling(self.device, int(middle.step_bytes), fresh=True), len(m.runs)
        top, fastest = m.top[0], max(r.read_bytes_s or 0.0 for r in m.runs)
        check_mbu(m.name, fastest / top.bytes_s)
        return {
            "mbu": middle.read_bytes_s / top.bytes_s,
            "read_gb_s": middle.read_bytes_s / 1e9,
            "step_gb": middle.step_bytes / 1e9,
            "bandwidth_gb_s": top.bytes_s / 1e9,
            "bandwidth_level": top.level,
        }


def median(runs: Sequence[Run], series: str) -> float:
    """Of the main figures."""
    return statistics.median(figure(r, series) for r in runs)


def _ratio_to_bf16(m: Measured, done: Sequence[Measured]) -> float | None:
    """Of a weight format's figure to that of bf16 weights with all else equal; None where that was not measured."""
    if not m.name.startswith("weight_format="):
        return None
    wanted = m.optimizations | {"weight_format": "bf16"}
    bf16 = [x for x in done if x.series == m.series and x.optimizations == wanted and x.runs]
    return median(m.runs, m.series) / median(bf16[-1].runs, m.series) if bf16 else None


class Unfinished:
    """Keeps and tells what a climb has so far; to be called with all records after each stage.

    Args:
        results: file of the whole climb; until it is there, what there is stands in `<name>.unfinished.json` beside it,
            and every record's conditions say so.
        say: called with a line for each new record.
    """

    def __init__(self, results: Path, say: Callable[[str], object]) -> None:
        self.path, self.say = results.with_suffix(".unfinished.json"), say
        self._told: set[tuple[str, str]] = set()

    def __call__(self, records: Sequence[Record]) -> None:
        """Tell what is new, keep everything."""
        self.tell(records)
        marked = [replace(r, conditions={**r.conditions, "unfinished": True}) for r in records]
        write_results(self.path.stem, marked, self.path.parent)

    def tell(self, records: Sequence[Record]) -> None:
        """A line for each stage that was not told yet."""
        for record in records:
            stage = record.conditions["series"], record.conditions["stage"]
            if stage not in self._told:
                self._told.add(stage)
                self.say(line(record))

    def end(self) -> None:
        """The whole climb has its file."""
        self.path.unlink(missing_ok=True)


def line(record: Record) -> str:
    """A stage for people."""
    c, m = record.conditions, record.metrics
    head = f"{c['series']}: {c['stage']:26}"
    if not m:
        return f"{head} not measured: {record.note}"
    speedup = f"  {m['speedup_vs_before']:.2f} x" if "speedup_vs_before" in m else ""
    share = f"  {m['mbu']:.0%} of roofline" if "mbu" in m else ""
    return f"{head} {m['output_tok_s']:9.1f} tok/s{speedup}{share}{f'  ({record.note})' if record.note else ''}"
