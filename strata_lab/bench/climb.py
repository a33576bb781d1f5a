"""The climb: from everything off to everything on, one toggle at a time, measured on this machine.

Every stage is measured as A/B/A (before, after, before again) inside one engine that `apply` switches, so slow drift
of the machine cancels and the switch itself is exercised. Toggles that act on one request are measured with a single
stream; toggles that act on a crowd (continuous batching) with several, and the two are never on one scale. A workload
of the articles has one stream or several, so all its stages are of one series. A stage that loses in every run is shown
and taken back, so the ladder goes on from the best so far.

Nothing is projected here: a stage that this machine cannot do is a record without figures that says why.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from strata_lab.bench.climb_plan import (
    COLD_STARTS_B,
    SEVERAL,
    SINGLE,
    Course,
    Stage,
    article_course,
    best_of,
    check_article,
    check_room,
    cold_starts,
    default_course,
    figure,
    fitting_scale,
    plan,
    pool_blocks,
)
from strata_lab.bench.harness import Environment, Record, Spread, a_b_a, check_mbu, wait_until_quiet
from strata_lab.bench.measure import Run, run
from strata_lab.bench.workloads import Workload
from strata_lab.config import DEFAULT_MODEL, Optimizations, toggles
from strata_lab.settings import ConfigError
from strata_lab.telemetry.bandwidth import ceiling

BASELINE, EVERYTHING = "baseline", "everything"
WARM_UP_TOKENS = 4
QUIET_LIMIT_S = 5.0  # how long a stage waits for other programs to end; a desktop is never quite still

ProgressFn = Callable[[str, float], None]


class _NoEffect(Exception):
    """A setting cannot be measured on this machine; the message says why."""


@dataclass
class _Measured:
    """A stage while the climb goes on; runs of the same setting in the next stage's A/B/A are added to it."""

    name: str
    series: str
    optimizations: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    speedup: float = 1.0
    kept: bool = True
    note: str = ""
    stats: dict[str, float] = field(default_factory=dict)


class Climb:
    """One climb of one engine.

    Args:
        engine: with `Optimizations.none()` in force.
        course: what is measured with one stream and with several, whose concurrency becomes `max_num_seqs`. Where it
            has one of them, all stages are measured with that one, and with one stream those that need several are
            left out.
        stages: what to switch on, in order; None is `plan()`.
        rounds: how often each stage is measured after; before is measured once more.
        progress: called with what is being measured and the fraction done.
    """

    def __init__(
        self,
        engine: Any,
        course: Course,
        *,
        stages: list[Stage] | None = None,
        rounds: int = 1,
        progress: ProgressFn | None = None,
    ) -> None:
        self.engine, self.course, self.rounds = engine, course, rounds
        self.stages = plan(engine.device.type) if stages is None else stages
        self.workloads = course.workloads
        self.progress = progress or (lambda task, fraction: None)
        self.device = str(engine.device)
        self.done: list[_Measured] = []
        self._steps = self._step = 0
        self._warm: set[tuple[str, Optimizations]] = set()  # what ran since weights or pool were made

    def records(self) -> list[Record]:
        """Run the whole climb. Takes minutes; Ctrl+C stops it between two runs."""
        environment = Environment.now(self.device)
        parts = self._parts()
        self._steps = (sum(map(len, parts.values())) + 1) * (2 * self.rounds + 1)
        for i, (series, stages) in enumerate(parts.items()):
            with self._seats() if series == SEVERAL else nullcontext():
                for stage in stages:
                    self._climb_one(stage, series)
                if i == 0:
                    self._everything(series)
        self.progress("done", 1.0)
        baselines = {m.series: m for m in reversed(self.done) if m.name == BASELINE}
        return [self._record(environment, m, baselines.get(m.series)) for m in self.done]

    def _parts(self) -> dict[str, list[Stage]]:
        """Series to its stages."""
        if list(self.workloads) == [SEVERAL]:
            return {SEVERAL: self.stages}
        split = {SINGLE: [s for s in self.stages if not s.several], SEVERAL: [s for s in self.stages if s.several]}
        return {series: split[series] for series in self.workloads}

    def _climb_one(self, stage: Stage, series: str) -> None:
        before = {stage.toggle: getattr(self.engine.optimizations, stage.toggle)}
        try:
            a, b = self._compare(stage.name, series, before, {stage.toggle: stage.value})
        except _NoEffect as no_effect:
            self._switch(before, series)
            self.done.append(_Measured(stage.name, series, {}, kept=False, note=str(no_effect)))
            return
        previous = next((m for m in reversed(self.done) if m.series == series and m.kept), None)
        if previous is None:
            second = any(m.series != series for m in self.done)
            a.name, a.note = BASELINE, "the single-stream end of it" if second else "everything off"
            self.done.append(a)
        else:
            previous.runs += a.runs
        b.kept = max(figure(r, series) for r in b.runs) >= min(figure(r, series) for r in a.runs)
        if b.kept:
            self._switch({stage.toggle: stage.value}, series)
        else:
            b.note = "slower in every run: taken back"
        self.done.append(b)

    def _everything(self, series: str) -> None:
        """A direct A/B/A of the end against the start, as a check on the product of the stages."""
        best = self.engine.optimizations.as_dict()
        changed = [t for t in toggles() if t.kind in ("bool", "choice") and best[t.name] != t.off]
        if not changed:
            return
        on = {t.name: best[t.name] for t in changed}
        _, b = self._compare(EVERYTHING, series, {t.name: t.off for t in changed}, on)
        self._switch(on, series)
        b.note = "all kept stages together, measured directly against the baseline"
        self.done.append(b)

    def _compare(
        self, name: str, series: str, before: dict[str, Any], after: dict[str, Any]
    ) -> tuple[_Measured, _Measured]:
        """Both sides of one A/B/A; the engine is left with `before` in force."""
        sides = {"a": _Measured(name, series, before), "b": _Measured(name, series, after)}

        def switch(side: str) -> None:
            self._switch(before if side == "a" else after, series)
            stats = self.engine.stats()
            sides[side].optimizations = self.engine.optimizations.as_dict()
            sides[side].stats = {"weight_gb": stats.weight_bytes / 1e9, "kv_pool_gb": stats.kv_bytes / 1e9}

        def measure() -> Run:
            self.progress(f"{series}: {name}", min(1.0, self._step / self._steps))
            self._step += 1
            return run(self.engine, self.workloads[series])

        wait_until_quiet(QUIET_LIMIT_S)
        sides["a"].runs, sides["b"].runs = a_b_a(switch, measure, self.rounds)
        sides["b"].speedup = _median(sides["b"].runs, series) / _median(sides["a"].runs, series)
        return sides["a"], sides["b"]

    def _switch(self, changes: dict[str, Any], series: str) -> None:
        """Put settings in force and warm them up; raises `_NoEffect` if that changes nothing here."""
        current = self.engine.optimizations
        wanted = {name: value for name, value in changes.items() if getattr(current, name) != value}
        results = self.engine.apply(**wanted).results.values() if wanted else ()
        for result in results:
            if result.status in ("refused", "unchanged") or result.reason.startswith("No effect"):
                raise _NoEffect(result.reason or "it was in force already")
        if any(result.status == "rebuilt" for result in results):
            self._warm.clear()
        setting = (series, self.engine.optimizations)
        if wanted or setting not in self._warm:
            run(self.engine, self._warm_up(series, setting))
            self._warm.add(setting)

    def _warm_up(self, series: str, setting: tuple[str, Optimizations]) -> Workload:
        """A few tokens of every stream; all of the workload where a GPU captures each batch and length it meets."""
        workload = self.workloads[series]
        if self.engine.device.type == "cuda" and setting not in self._warm:
            return workload
        outputs = workload.output_tokens[: workload.concurrency]
        return replace(workload, output_tokens=tuple(min(n, WARM_UP_TOKENS) for n in outputs))

    @contextmanager
    def _seats(self) -> Iterator[None]:
        size = self.engine.optimizations.max_num_seqs
        self.engine.apply(max_num_seqs=self.workloads[SEVERAL].concurrency)
        try:
            yield
        finally:
            self.engine.apply(max_num_seqs=size)

    def _record(self, environment: Environment, m: _Measured, baseline: _Measured | None) -> Record:
        workload = self.workloads[m.series]
        prompt_tokens = max((r.prompt_tokens for r in m.runs), default=workload.prompt_tokens)
        conditions = {
            "model": self.engine.config.model,
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
        return environment.record(
            "/".join(part for part in ("climb", folder, m.name) if part),
            script=self.course.script,
            conditions=conditions,
            metrics=self._metrics(m, baseline) if m.runs else {},
            spread=Spread.of(figures) if figures else None,
            note=m.note,
        )

    def _metrics(self, m: _Measured, baseline: _Measured | None) -> dict[str, Any]:
        middle = sorted(m.runs, key=lambda r: figure(r, m.series))[len(m.runs) // 2]
        shared = {
            "output_tok_s": statistics.median(figure(r, m.series) for r in m.runs),
            "prefill_tok_s": statistics.median(r.prefill_tok_s for r in m.runs),
            "ttft_ms": middle.ttft_ms,
            "tpot_ms": middle.tpot_ms,
            "itl_p99_ms": middle.itl_p99_ms,
            "speedup_vs_before": m.speedup,
            "speedup_vs_baseline": _median(m.runs, m.series) / _median(baseline.runs, m.series) if baseline else 1.0,
            **({} if (ratio := self._ratio_to_bf16(m)) is None else {"ratio_to_bf16": ratio}),
            **m.stats,
        }
        if m.series != SINGLE:
            per_stream = None if middle.tpot_ms is None else 1e3 / middle.tpot_ms
            return shared | {"tok_s_per_stream": per_stream}
        return shared | {"tok_s_per_stream": shared["output_tok_s"], **self._roofline(m.name, m.runs, middle)}

    def _ratio_to_bf16(self, m: _Measured) -> float | None:
        """Of a weight format's figure to that of bf16 weights with all else equal; None where that was not measured."""
        if not m.name.startswith("weight_format="):
            return None
        wanted = m.optimizations | {"weight_format": "bf16"}
        bf16 = [x for x in self.done if x.series == m.series and x.optimizations == wanted and x.runs]
        return _median(m.runs, m.series) / _median(bf16[-1].runs, m.series) if bf16 else None

    def _roofline(self, name: str, runs: list[Run], middle: Run) -> dict[str, Any]:
        """Distance of the median run from the memory roofline; the rule holds for the fastest run too."""
        assert middle.read_bytes_s is not None
        assert middle.step_bytes is not None
        fastest = max(r.read_bytes_s or 0.0 for r in runs)
        # Measured anew for every stage: the ceiling must not come from a busier hour than the figure.
        top = ceiling(self.device, int(middle.step_bytes), fresh=True)
        check_mbu(name, fastest / top.bytes_s)
        return {
            "mbu": middle.read_bytes_s / top.bytes_s,
            "read_gb_s": middle.read_bytes_s / 1e9,
            "step_gb": middle.step_bytes / 1e9,
            "bandwidth_gb_s": top.bytes_s / 1e9,
            "bandwidth_level": top.level,
        }


def _median(runs: list[Run], series: str) -> float:
    return statistics.median(figure(r, series) for r in runs)


def climb(
    model: str = DEFAULT_MODEL,
    *,
    tokens: int = 64,
    prompt_tokens: int = 128,
    streams: int = 4,
    rounds: int = 2,
    workload: str | None = None,
    scale: float | None = None,
    cold: int | None = None,
    progress: ProgressFn | None = None,
    **options: Any,
) -> list[Record]:
    """Climb with one engine and return a record per stage, and one of the cold starts.

    Args:
        model: as `LLMEngine` takes it.
        tokens: output tokens of a run, at least 8.
        prompt_tokens: prompt tokens of a run.
        streams: concurrent requests of the several-streams part.
        rounds: B runs per stage.
        workload: "A", "B" or "C" measures an article's workload; `tokens`, `prompt_tokens` and `streams` are unused.
        scale: shortens that workload; None is 1.0 on a GPU and on a CPU what it does in a few minutes.
        cold: new engines whose first run is measured after the climb; None is 3 for B and otherwise 0.
        progress: called with a task and a fraction.
        **options: more engine options, for example `device` or `block_size`.

    Raises:
        ConfigError: an option is unknown or wrong, or is a toggle that the climb itself sets.
    """
    from strata_lab.engine import LLMEngine

    for t in toggles():
        if t.kind in ("bool", "choice") and t.name in options:
            raise ConfigError(
                f"{t.name}={options[t.name]!r} cannot be fixed in a climb, which measures it; leave it out"
            )
    course = default_course(model, tokens, prompt_tokens, streams)
    if workload is not None:
        check_article(workload, scale)
        course = article_course(model, workload, scale or 1.0)
    elif scale is not None:
        raise ConfigError(f"scale={scale:g} shortens a workload of the articles; add --workload A, B or C")
    if "num_kv_blocks" not in options and "gpu_memory_utilization" not in options:
        options["num_kv_blocks"] = pool_blocks(course, options.get("block_size"))
    with LLMEngine(model, optimizations=Optimizations.none(), **options) as engine:
        if workload is not None and scale is None:
            runs = (len(plan(engine.device.type)) + 1) * (2 * rounds + 1)
            course = article_course(model, workload, fitting_scale(engine, workload, runs))
        for each in course.workloads.values():
            check_room(engine, each)
        records = Climb(engine, course, rounds=rounds, progress=progress).records()
    count = cold if cold is not None else COLD_STARTS_B if workload == "B" else 0
    if count:

        def again() -> Any:
            return LLMEngine(model, optimizations=best_of(records), **options)

        records.append(cold_starts(again, course, count))
    return records
