"""The climb: from everything off to everything on, one toggle at a time, measured on this machine.

Every stage is measured as A/B/A (before, after, before again) inside one engine that `apply` switches, so slow drift
of the machine cancels and the switch itself is exercised. Toggles that act on one request are measured with a single
stream; toggles that act on a crowd (continuous batching) with several, and the two are never on one scale. A stage
that loses in every run is shown and taken back, so the ladder goes on from the best so far.

Nothing is projected here: a stage that this machine cannot do is a record without figures that says why.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from strata_lab.bench.harness import Environment, Record, Spread, a_b_a, check_mbu, wait_until_quiet
from strata_lab.bench.measure import Run, run
from strata_lab.bench.workloads import Workload, single_stream, uneven
from strata_lab.config import DEFAULT_MODEL, ConfigError, Optimizations, toggles
from strata_lab.telemetry.bandwidth import ceiling

SCRIPT = "strata climb"
BASELINE, EVERYTHING = "baseline", "everything"
# The order of the source articles where they overlap: capture, then fusion, then bytes. A toggle that is not named
# here (and is not a number) follows by itself, so a new one appears by existing.
ORDER: tuple[tuple[str, Any], ...] = (
    ("cuda_graph", True), ("fused_kernels", True), ("weight_format", "fp8"), ("weight_format", "int8"),
    ("weight_format", "int4"), ("kv_cache_dtype", "fp8"),
)  # fmt: skip
GPU_ONLY = {("weight_format", "fp8")}  # no CPU multiplies by 8-bit floats
NEEDS_SEVERAL = {"pd_split", "continuous_batching"}  # says nothing with one stream
WARM_UP_TOKENS = 4
MIN_TOKENS = 8
QUIET_LIMIT_S = 5.0  # how long a stage waits for other programs to end; a desktop is never quite still

ProgressFn = Callable[[str, float], None]


@dataclass(frozen=True)
class Stage:
    """One toggle going to one value."""

    toggle: str
    value: Any

    @property
    def name(self) -> str:
        """For tables and charts, for example "weight_format=int8"."""
        return f"{self.toggle}={'on' if self.value is True else self.value}"

    @property
    def several(self) -> bool:
        """Whether it is measured with several streams."""
        return self.toggle in NEEDS_SEVERAL


def plan(device_type: str) -> list[Stage]:
    """Stages for "cpu" or "cuda": single-stream ones first, derived from `config.toggles()`."""
    known = {t.name: t for t in toggles()}
    named = [Stage(n, v) for n, v in ORDER if n in known and (device_type == "cuda" or (n, v) not in GPU_ONLY)]
    rest = [t for t in known.values() if t.kind in ("bool", "choice") and t.name not in dict(ORDER)]
    derived = [Stage(t.name, v) for t in rest for v in (t.choices[1:] or (True,))]
    return sorted(named + derived, key=lambda stage: stage.several)


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
        single: what is measured with one stream.
        several: what is measured with several; its concurrency becomes `max_num_seqs`.
        stages: what to switch on, in order; None is `plan()`.
        rounds: how often each stage is measured after; before is measured once more.
        progress: called with what is being measured and the fraction done.
    """

    def __init__(
        self,
        engine: Any,
        single: Workload,
        several: Workload,
        *,
        stages: list[Stage] | None = None,
        rounds: int = 1,
        progress: ProgressFn | None = None,
    ) -> None:
        self.engine, self.rounds = engine, rounds
        self.stages = plan(engine.device.type) if stages is None else stages
        self.workloads = {"single stream": single, "several streams": several}
        self.progress = progress or (lambda task, fraction: None)
        self.device = str(engine.device)
        self.done: list[_Measured] = []
        self._steps = self._step = 0

    def records(self) -> list[Record]:
        """Run the whole climb. Takes minutes; Ctrl+C stops it between two runs."""
        environment = Environment.now(self.device)
        self._steps = (len(self.stages) + 1) * (2 * self.rounds + 1)
        for stage in (s for s in self.stages if not s.several):
            self._climb_one(stage, "single stream")
        self._everything()
        several = [s for s in self.stages if s.several]
        if several:
            with self._crowd():
                for stage in several:
                    self._climb_one(stage, "several streams")
        self.progress("done", 1.0)
        baselines = {m.series: m for m in reversed(self.done) if m.name == BASELINE}
        return [self._record(environment, m, baselines.get(m.series)) for m in self.done]

    def _climb_one(self, stage: Stage, series: str) -> None:
        before = {stage.toggle: getattr(self.engine.optimizations, stage.toggle)}
        try:
            a, b = self._compare(stage.name, series, before, {stage.toggle: stage.value})
        except _NoEffect as no_effect:
            self._switch(before)
            self.done.append(_Measured(stage.name, series, {}, kept=False, note=str(no_effect)))
            return
        previous = next((m for m in reversed(self.done) if m.series == series and m.kept), None)
        if previous is None:
            a.name, a.note = BASELINE, "everything off" if series == "single stream" else "the single-stream end of it"
            self.done.append(a)
        else:
            previous.runs += a.runs
        b.kept = max(figure(r, series) for r in b.runs) >= min(figure(r, series) for r in a.runs)
        if b.kept:
            self._switch({stage.toggle: stage.value})
        else:
            b.note = "slower in every run: taken back"
        self.done.append(b)

    def _everything(self) -> None:
        """A direct A/B/A of the end against the start, as a check on the product of the stages."""
        best = self.engine.optimizations.as_dict()
        changed = [t for t in toggles() if t.kind in ("bool", "choice") and best[t.name] != t.off]
        changed = [t for t in changed if t.name not in NEEDS_SEVERAL]
        if not changed:
            return
        on = {t.name: best[t.name] for t in changed}
        _, b = self._compare(EVERYTHING, "single stream", {t.name: t.off for t in changed}, on)
        self._switch(on)
        b.note = "all kept stages together, measured directly against the baseline"
        self.done.append(b)

    def _compare(
        self, name: str, series: str, before: dict[str, Any], after: dict[str, Any]
    ) -> tuple[_Measured, _Measured]:
        """Both sides of one A/B/A; the engine is left with `before` in force."""
        sides = {"a": _Measured(name, series, before), "b": _Measured(name, series, after)}

        def switch(side: str) -> None:
            self._switch(before if side == "a" else after)
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

    def _switch(self, changes: dict[str, Any]) -> None:
        """Put settings in force and warm them up; raises `_NoEffect` if that changes nothing here."""
        current = self.engine.optimizations
        wanted = {name: value for name, value in changes.items() if getattr(current, name) != value}
        if not wanted:
            return
        for result in self.engine.apply(**wanted).results.values():
            if result.status in ("refused", "unchanged") or result.reason.startswith("No effect"):
                raise _NoEffect(result.reason or "it was in force already")
        run(self.engine, single_stream(self.workloads["single stream"].prompt_tokens, WARM_UP_TOKENS))

    @contextmanager
    def _crowd(self) -> Iterator[None]:
        size = self.engine.optimizations.max_num_seqs
        self.engine.apply(max_num_seqs=self.workloads["several streams"].concurrency)
        try:
            yield
        finally:
            self.engine.apply(max_num_seqs=size)

    def _record(self, environment: Environment, m: _Measured, baseline: _Measured | None) -> Record:
        workload = self.workloads[m.series]
        conditions = {
            "model": self.engine.config.model,
            "weight_format": m.optimizations.get("weight_format"),
            "kv_cache_dtype": m.optimizations.get("kv_cache_dtype"),
            "batch": workload.concurrency,
            "prompt_tokens": workload.prompt_tokens,
            "output_tokens": max(workload.output_tokens),
            "context": workload.prompt_tokens + max(workload.output_tokens) // 2,
            "toggles": m.optimizations,
            "series": m.series,
            "stage": m.name,
            "kept": m.kept,
        }
        figures = [figure(r, m.series) for r in m.runs]
        return environment.record(
            f"climb/{m.name}" if m.series == "single stream" else f"climb/several/{m.name}",
            script=SCRIPT,
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
            **m.stats,
        }
        if m.series != "single stream":
            per_stream = None if middle.tpot_ms is None else 1e3 / middle.tpot_ms
            return shared | {"tok_s_per_stream": per_stream}
        return shared | {"tok_s_per_stream": shared["output_tok_s"], **self._roofline(m.name, m.runs, middle)}

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


def figure(run: Run, series: str) -> float:
    """The main figure of a run, tok/s: decode rate of one stream, or everything over the whole time of a crowd."""
    if series == "single stream":
        assert run.decode_tok_s is not None, "a run of fewer than three tokens has no decode rate"
        return run.decode_tok_s
    return run.total_tok_s


def _median(runs: list[Run], series: str) -> float:
    return statistics.median(figure(r, series) for r in runs)


def climb(
    model: str = DEFAULT_MODEL,
    *,
    tokens: int = 64,
    prompt_tokens: int = 128,
    streams: int = 4,
    rounds: int = 2,
    progress: ProgressFn | None = None,
    **options: Any,
) -> list[Record]:
    """Climb with one engine and return a record per stage.

    Args:
        model: as `LLMEngine` takes it.
        tokens: output tokens of a run, at least 8.
        prompt_tokens: prompt tokens of a run.
        streams: concurrent requests of the several-streams part.
        rounds: B runs per stage.
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
    if tokens < MIN_TOKENS:
        raise ConfigError(f"tokens={tokens} must be at least {MIN_TOKENS} for a decode rate; try 64")
    with LLMEngine(model, optimizations=Optimizations.none(), **options) as engine:
        several = uneven(streams, max(8, prompt_tokens // 4), tokens)
        return Climb(engine, single_stream(prompt_tokens, tokens), several, rounds=rounds, progress=progress).records()
