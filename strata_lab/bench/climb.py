"""The climb: from everything off to everything on, one toggle at a time, measured on this machine.

Every stage is measured as A/B/A (before, after, before again) inside one engine that `apply` switches, so slow drift
of the machine cancels and the switch itself is exercised. Toggles that act on one request are measured with a single
stream; toggles that act on a crowd (continuous batching) with several, and the two are never on one scale. A workload
of the articles has one stream or several, so all its stages are of one series. A stage that loses in every run is shown
and taken back, so the ladder goes on from the best so far. So is one that guesses the tokens of texts which go round in
circles: its figure is flagged and never part of the end.

On a GPU a run in which something was captured is dropped and made anew. The last run of a stage that was taken back is
of the setting in force, so it is the first A of the next stage.

Nothing is projected here: a stage that this machine cannot do is a record without figures that says why.

`python -m strata_lab.bench.climb` is `strata climb` for a machine with the core's packages alone; it prints and keeps
every stage as it ends.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
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
    check_free,
    check_room,
    cold_starts,
    default_course,
    figure,
    fitting_scale,
    how_much,
    num_runs,
    plan,
    pool_blocks,
)
from strata_lab.bench.climb_records import BASELINE, EVERYTHING, Measured, Records, Unfinished, median
from strata_lab.bench.harness import Record, a_b_a, wait_until_quiet, write_results
from strata_lab.bench.measure import Run, run, settled_run
from strata_lab.bench.workloads import ARTICLE_WORKLOADS, Workload
from strata_lab.config import DEFAULT_MODEL, Optimizations, toggles
from strata_lab.settings import ConfigError

SCRIPT = "python -m strata_lab.bench.climb"
WARM_UP_TOKENS = 4
QUIET_LIMIT_S = 5.0  # how long a stage waits for other programs to end; a desktop is never quite still

ProgressFn = Callable[[str, float], None]
StageFn = Callable[[list[Record]], None]
SayFn = Callable[[str], object]


class _NoEffect(Exception):
    """A setting cannot be measured on this machine; the message says why."""


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
        stage_done: called with all records so far after each stage.
        say: called at the start with a line about how much there is to do.
    """

    def __init__(
        self,
        engine: Any,
        course: Course,
        *,
        stages: list[Stage] | None = None,
        rounds: int = 1,
        progress: ProgressFn | None = None,
        stage_done: StageFn | None = None,
        say: SayFn | None = None,
    ) -> None:
        self.engine, self.course, self.rounds = engine, course, rounds
        self.stages = plan(engine.device.type) if stages is None else stages
        self.workloads = course.workloads
        self.progress, self.stage_done = progress or (lambda task, fraction: None), stage_done
        self.say = say or (lambda text: None)
        self.device = str(engine.device)
        self.done: list[Measured] = []
        self._steps = self._step = 0
        self._last: tuple[tuple[str, Optimizations], Run] | None = None  # what was measured last
        self._warm: set[tuple[str, Optimizations]] = set()  # what ran since weights or pool were made
        self._without_captures: set[tuple[str, Optimizations]] = set()  # what loses nothing with the weights

    def records(self) -> list[Record]:
        """Run the whole climb. Takes minutes; Ctrl+C stops it between two runs."""
        records = Records(self.engine.config.model, self.course, self.device)
        parts = self._parts()
        self._steps = num_runs(sum(map(len, parts.values())), self.rounds)
        self.say(how_much(sum(map(len, parts.values())), self.rounds))
        for i, (series, stages) in enumerate(parts.items()):
            with self._seats() if series == SEVERAL else nullcontext():
                for stage in stages:
                    self._climb_one(stage, series)
                    self._tell(records)
                if i == 0:
                    self._everything(series)
                    self._tell(records)
        self.progress("done", 1.0)
        return records.of(self.done)

    def _tell(self, records: Records) -> None:
        if self.stage_done is not None and self.done:
            self.stage_done(records.of(self.done))

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
            with suppress(_NoEffect):  # going back has no effect either
                self._switch(before, series)
            self.done.append(Measured(stage.name, series, {}, kept=False, note=str(no_effect)))
            return
        previous = next((m for m in reversed(self.done) if m.series == series and m.kept), None)
        if previous is None:
            second = any(m.series != series for m in self.done)
            a.name, a.note = BASELINE, "the single-stream end of it" if second else "everything off"
            place = next((i for i, m in enumerate(self.done) if m.series == series), len(self.done))
            self.done.insert(place, a)  # before stages that had no effect
        else:
            previous.runs += [r for r in a.runs if not any(r is known for known in previous.runs)]
            previous.capturing += a.capturing
        if max(figure(r, series) for r in b.runs) < min(figure(r, series) for r in a.runs):
            b.kept, b.note = False, "slower in every run: taken back"
        self._flag_loops(b)
        if b.kept:
            self._switch({stage.toggle: stage.value}, series)
        self.done.append(b)

    def _flag_loops(self, stage: Measured) -> None:
        """Guesses of texts that repeat themselves are no record."""
        if stage.guesses_loops:
            stage.kept = False
            stage.note = f"texts go round in circles ({stage.looping:.0%} of the tokens): no record, taken back"

    def _everything(self, series: str) -> None:
        """The start directly between two runs of the end, which needs no switch: a check on the stages' product."""
        best = self.engine.optimizations.as_dict()
        changed = [t for t in toggles() if t.kind in ("bool", "choice") and best[t.name] != t.off]
        if not changed:
            return
        on = {t.name: best[t.name] for t in changed}
        end, start = self._compare(EVERYTHING, series, on, {t.name: t.off for t in changed})
        end.speedup = 1 / start.speedup
        end.note = "all kept stages together, measured directly against the baseline"
        self._flag_loops(end)
        self.done.append(end)

    def _compare(
        self, name: str, series: str, before: dict[str, Any], after: dict[str, Any]
    ) -> tuple[Measured, Measured]:
        """Both sides of one A/B/A; the engine is left with `before` in force."""
        sides = {"a": Measured(name, series, before), "b": Measured(name, series, after)}

        in_force, begun = "a", False

        def switch(side: str) -> None:
            nonlocal in_force
            in_force = side
            self._switch(before if side == "a" else after, series)
            stats = self.engine.stats()
            sides[side].optimizations = self.engine.optimizations.as_dict()
            sides[side].stats = {"weight_gb": stats.weight_bytes / 1e9, "kv_pool_gb": stats.kv_bytes / 1e9}

        def measure() -> Run:
            nonlocal begun
            self.progress(f"{series}: {name}", min(1.0, self._step / self._steps))
            self._step += 1
            first, begun = not begun, True
            setting = (series, self.engine.optimizations)
            if first and self._last is not None and self._last[0] == setting:
                return self._last[1]
            measured, settled = settled_run(self.engine, self.workloads[series])
            sides[in_force].capturing += not settled
            self._last = setting, measured
            return measured

        wait_until_quiet(QUIET_LIMIT_S)
        sides["a"].runs, sides["b"].runs = a_b_a(switch, measure, self.rounds)
        sides["b"].speedup = median(sides["b"].runs, series) / median(sides["a"].runs, series)
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
            captures = self.engine._loop.captures
            run(self.engine, self._warm_up(series, setting))
            self._warm.add(setting)
            if self.engine._loop.captures == captures:
                self._without_captures.add(setting)

    def _warm_up(self, series: str, setting: tuple[str, Optimizations]) -> Workload:
        """A few tokens of every stream; all of the workload where a GPU compiles or captures what it meets."""
        workload = self.workloads[series]
        if self.engine.device.type == "cuda" and setting not in self._warm | self._without_captures:
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
    stage_done: StageFn | None = None,
    say: SayFn | None = None,
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
        stage_done: called with all records so far after each stage (`climb_records.Unfinished`).
        say: called at the start with a line about how much there is to do.
        **options: more engine options, for example `device` or `block_size`.

    Raises:
        ConfigError: an option is unknown or wrong, or is a toggle that the climb itself sets.
    """
    from strata_lab.engine import LLMEngine

    check_free(options)
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
            runs = num_runs(len(plan(engine.device.type)), rounds)
            course = article_course(model, workload, fitting_scale(engine, workload, runs))
        for each in course.workloads.values():
            check_room(engine, each)
        whole = Climb(engine, course, rounds=rounds, progress=progress, stage_done=stage_done, say=say)
        records = whole.records()
    count = cold if cold is not None else COLD_STARTS_B if workload == "B" else 0
    if count:

        def again() -> Any:
            return LLMEngine(model, optimizations=best_of(records), **options)

        records.append(cold_starts(again, course, count))
    return records


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 2 for a mistake."""
    parser = argparse.ArgumentParser(prog=SCRIPT, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as `strata climb` takes it")
    parser.add_argument("--workload", choices=tuple(ARTICLE_WORKLOADS), help="of an article")
    parser.add_argument("--scale", type=float, help="shortens it; default: 1 on a GPU, what takes minutes on a CPU")
    parser.add_argument("--rounds", type=int, default=2, help="runs after each change")
    parser.add_argument("--cold", type=int, help="new engines measured at the end; default: 3 for B")
    parser.add_argument("--device", help="cpu or cuda; default: what is there")
    parser.add_argument("--results", type=Path, default=Path("climb.json"), help="file for the records")
    parser.add_argument("--html", type=Path, help="file for the page")
    options = parser.parse_args(arguments)
    names = ("workload", "scale", "cold", "device")
    chosen = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    kept = Unfinished(options.results, _say)
    try:
        records = climb(options.model, rounds=options.rounds, stage_done=kept, say=_say, **chosen)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    path = write_results(options.results.stem, records, options.results.parent)
    kept.end()
    kept.tell(records)
    if options.html is not None:
        from strata_lab.bench.climb_report import html_page

        options.html.write_text(html_page([r.as_dict() for r in records]), encoding="utf-8")
    _say(str(path))
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
