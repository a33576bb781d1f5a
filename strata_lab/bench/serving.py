"""`strata bench`: workloads against an engine or a server, with percentiles, sweeps, cold starts and A/B/A.

What is sent is real text, each request another part of it. A warm-up comes before every cell and is not counted. Each
record carries what decides whether it may be held against another one (`comparable.py`), where it was measured, and
what the sensors said while it ran. Nothing is decided here about what is better.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strata_lab.bench.harness import Environment, Record, Spread, a_b_a
from strata_lab.bench.load import Ask, Reply, Target, metrics, send
from strata_lab.bench.workloads import ARTICLE_WORKLOADS, TEXT_FILE, Encoder, article
from strata_lab.events import HardwareEvent
from strata_lab.settings import ConfigError
from strata_lab.telemetry.monitor import Monitor

CHARACTERS_PER_TOKEN = 4  # of English text; only used to cut prompts for a server, which counts for itself
WARM_UP_TOKENS = 8
MIN_TEXT = 200  # characters; less text and all prompts would be alike

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Cell:
    """One condition to measure.

    Attributes:
        name: of the workload.
        requests: how many.
        prompt_tokens, output_tokens: of each.
        concurrency: how many at a time; None with a rate.
        rate: requests per second, at random moments; None with a concurrency.
        prompt_characters: cut prompts by characters instead.
    """

    name: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int | None = 1
    rate: float | None = None
    prompt_characters: int | None = None

    @property
    def label(self) -> str:
        """For tables."""
        how = f"{self.rate:g} requests/s" if self.rate else f"{self.concurrency} at a time"
        return f"{self.name}: {self.requests} x {self.prompt_tokens} in, {self.output_tokens} out, {how}"


def article_cells(letters: Sequence[str], scale: float = 1.0) -> list[Cell]:
    """The workloads of the source articles, shortened by `scale`; `ConfigError` for an unknown one."""
    made = []
    for letter in letters:
        if letter not in ARTICLE_WORKLOADS:
            raise ConfigError(f"workload={letter!r} must be one of {', '.join(ARTICLE_WORKLOADS)}; try 'A'")
        w = article(letter, scale)
        made.append(
            Cell(w.name, len(w.output_tokens), w.prompt_tokens, w.output_tokens[0], w.concurrency, None,
                 w.prompt_characters)
        )  # fmt: skip
    return made


def sweep(
    concurrencies: Sequence[int], prompt_tokens: Sequence[int], output_tokens: Sequence[int], rates: Sequence[float],
    requests: int | None,
) -> list[Cell]:  # fmt: skip
    """Every combination of lengths with every concurrency and every rate; without `requests`, twice the concurrency."""
    for name, values in (
        ("concurrency", concurrencies), ("prompt-tokens", prompt_tokens), ("output-tokens", output_tokens),
        ("rate", rates), ("requests", [] if requests is None else [requests]),
    ):  # fmt: skip
        for value in values:
            if value <= 0:
                raise ConfigError(f"{name}={value} must be above 0; try 4")
    made = []
    for prompt in prompt_tokens:
        for output in output_tokens:
            made += [Cell("sweep", requests or 2 * c, prompt, output, c) for c in concurrencies]
            made += [Cell("sweep", requests or 32, prompt, output, None, rate) for rate in rates]
    return made


class Prompts:
    """Prompts cut from a text, each request another part of it.

    Args:
        path: UTF-8 text; None is the one that comes with strata.
        encoder: the engine's tokenizer, or None for a server: prompts are then texts of about the right length.
        vocab_size: of a model without a tokenizer, which gets a fixed pattern of ids; None for a server.
    """

    def __init__(self, path: Path | None, encoder: Encoder | None, vocab_size: int | None) -> None:
        try:
            self.text = (path or TEXT_FILE).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"text={str(path)!r} cannot be read as UTF-8: {error}") from error
        if len(self.text) < MIN_TEXT:
            raise ConfigError(f"text={str(path)!r} has {len(self.text)} characters; give at least {MIN_TEXT}")
        self.encoder, self.vocab_size = encoder, vocab_size
        self.digest = hashlib.sha256(self.text.encode()).hexdigest()[:12]
        self._ids = encoder.encode(self.text, add_special_tokens=False) if encoder is not None else []

    def asks(self, cell: Cell) -> list[Ask]:
        """The requests of a cell."""
        return [Ask(self._prompt(cell, i), cell.output_tokens) for i in range(cell.requests)]

    def _prompt(self, cell: Cell, index: int) -> str | list[int]:
        if cell.prompt_characters is not None and (self.encoder is not None or self.vocab_size is None):
            text = _part(self.text, index, cell.requests, cell.prompt_characters)
            return text if self.encoder is None else self.encoder.encode(text, add_special_tokens=False)
        if self.encoder is not None:
            return _part(self._ids, index, cell.requests, cell.prompt_tokens)
        if self.vocab_size is None:
            return _part(self.text, index, cell.requests, cell.prompt_tokens * CHARACTERS_PER_TOKEN)
        return [(7 + 31 * i + 101 * index) % self.vocab_size for i in range(cell.prompt_tokens)]


def _part(source: Any, index: int, count: int, length: int) -> Any:
    """`length` items from a place of its own in a text that goes round."""
    start = index * len(source) // max(1, count)
    doubled = source[start:] + source[:start]
    while len(doubled) < length:
        doubled = doubled + source
    return doubled[:length]


@dataclass(frozen=True)
class Bench:
    """How to measure.

    Attributes:
        target: who answers.
        prompts: what is asked.
        device: "cpu" or "cuda", for the sensors and the environment; None for a server on another machine.
        runs: of every cell, after its warm-up.
        before: called before every run, to drop what earlier runs have left in caches.
        script: the command that measures it again.
        conditions: model, formats, toggles.
        seed: of the moments of a rate.
    """

    target: Target
    prompts: Prompts
    device: str | None
    runs: int
    before: Callable[[], Any]
    script: str
    conditions: Mapping[str, Any]
    seed: int = 0

    def run(self, cell: Cell) -> list[Reply]:
        """One run of a cell."""
        self.before()
        asks = self.prompts.asks(cell)
        return send(self.target, asks, concurrency=cell.concurrency, rate=cell.rate, seed=self.seed)

    def warm_up(self, cell: Cell) -> None:
        """As many requests as run at a time, a few tokens each; a target that cannot answer at all ends the bench."""
        few = replace(cell, requests=min(cell.requests, cell.concurrency or 1), output_tokens=WARM_UP_TOKENS)
        replies = send(self.target, self.prompts.asks(few), concurrency=few.requests)
        if all(r.error for r in replies):
            raise ConfigError(f"{self.target.name} answers no request of {cell.label}: {replies[0].error}")

    def measure(self, cell: Cell, environment: Environment) -> Record:
        """Warm up, then `runs` runs; the record's metrics are those of the run with the median rate."""
        self.warm_up(cell)
        return self.record(cell, environment, [self.observed(cell) for _ in range(self.runs)])

    def observed(self, cell: Cell) -> tuple[list[Reply], list[HardwareEvent]]:
        """A run, and what the sensors said meanwhile."""
        readings: list[HardwareEvent] = []
        monitor = Monitor.of(self.device, readings.append) if self.device is not None else None
        if monitor is not None:
            monitor.start()
        try:
            return self.run(cell), readings
        finally:
            if monitor is not None:
                monitor.stop()
                monitor.join()

    def record(
        self, cell: Cell, environment: Environment, runs: Sequence[tuple[list[Reply], list[HardwareEvent]]],
        **extra: Any,
    ) -> Record:  # fmt: skip
        """The record of some runs of a cell; `extra` are conditions of its own."""
        figures = sorted((metrics(replies) for replies, _ in runs), key=lambda m: m.get("output_tok_s") or 0.0)
        middle = figures[(len(figures) - 1) // 2]
        rates = [m["output_tok_s"] for m in figures if m.get("output_tok_s")]
        first_errors = list(dict.fromkeys(r.error for replies, _ in runs for r in replies if r.error))[:3]
        conditions = {
            **self.conditions, "target": self.target.name, "workload": cell.name, "requests": cell.requests,
            "batch": cell.concurrency, "rate": cell.rate, "prompt_tokens": cell.prompt_tokens,
            "prompt_characters": cell.prompt_characters, "output_tokens": cell.output_tokens,
            "text": self.prompts.digest, **extra,
        }  # fmt: skip
        seen = sensors([reading for _, readings in runs for reading in readings])
        made = environment.record(
            f"bench/{cell.name}",
            script=self.script,
            conditions=conditions,
            metrics=middle | {"output_tok_s_each": [m.get("output_tok_s") for m in figures]},
            spread=Spread.of(rates) if rates else None,
            note="; ".join(first_errors),
        )
        return replace(made, hardware=dict(made.hardware) | {"during": seen})


def sensors(readings: Sequence[HardwareEvent]) -> dict[str, Any] | None:
    """What the sensors said during a run: extremes, and everything that held clocks down; None without readings."""
    if not readings:
        return None

    def values(name: str) -> list[float]:
        return [v for r in readings if (v := getattr(r, name)) is not None]

    found: dict[str, Any] = {"readings": len(readings), "note": readings[-1].note}
    for name, pick in (
        ("core_c", max), ("memory_c", max), ("power_w", max), ("sm_mhz", min), ("memory_mhz", min),
        ("gpu_percent", min),
    ):  # fmt: skip
        seen = values(name)
        found[f"{name}_{pick.__name__}"] = pick(seen) if seen else None
    return found | {"throttle": sorted({word for r in readings for word in r.throttle})}


def bench(
    made: Bench, cells: Sequence[Cell], environment: Environment, progress: Progress = lambda text, done: None
) -> list[Record]:
    """A record per cell."""
    records = []
    for i, cell in enumerate(cells):
        progress(cell.label, i / len(cells))
        records.append(made.measure(cell, environment))
    return records


def versus(
    made: Bench, cell: Cell, environment: Environment, switch: Callable[[str], Mapping[str, Any]], rounds: int
) -> list[Record]:
    """Two settings of one engine, A B A B A: a record each, and the ratio in the second.

    Args:
        made: how to measure.
        cell: what.
        environment: where.
        switch: puts setting "a" or "b" in force and returns all toggles then in force.
        rounds: how many times B, with an A on either side of each.
    """
    in_force: dict[str, Mapping[str, Any]] = {}
    side = "a"

    def change(to: str) -> None:
        nonlocal side
        side, in_force[to] = to, switch(to)
        made.warm_up(cell)

    a_runs, b_runs = a_b_a(change, lambda: made.observed(cell), rounds)
    records = [
        made.record(cell, environment, runs, toggles=in_force[name], side=name.upper())
        for name, runs in (("a", a_runs), ("b", b_runs))
    ]
    rate_a, rate_b = (r.spread.median if r.spread else None for r in records)
    first, last = (metrics(runs[0]).get("output_tok_s") for runs in (a_runs[0], a_runs[-1]))
    figures = dict(records[1].metrics)
    figures["ratio_to_a"] = rate_b / rate_a if rate_a and rate_b else None
    figures["drift_of_a"] = last / first if first and last else None
    return [records[0], replace(records[1], metrics=figures)]


def cold_starts(
    make: Callable[[], tuple[Bench, Callable[[], None]]], cell: Cell, count: int, environment: Environment
) -> Record:
    """New engines, one after the other, each measured from its first request on: load time, first TTFT and rate.

    Args:
        make: loads an engine; returns its bench and what closes it.
        cell: what is sent.
        count: how many engines.
        environment: where.
    """
    runs, loads = [], []
    script: Bench | None = None
    for _ in range(count):
        started = time.perf_counter()
        made, close = make()
        loads.append(time.perf_counter() - started)
        try:
            runs.append(made.observed(cell))
            script = made
        finally:
            close()
    assert script is not None, "count is at least 1"
    record = script.record(cell, environment, runs, cold_starts=count)
    firsts = [min((r.ttft_ms for r in replies if r.times_s), default=None) for replies, _ in runs]
    return replace(record, metrics=dict(record.metrics) | {"load_s_each": loads, "first_ttft_ms_each": firsts})
