"""What a climb does: its stages, and what they are measured on, how long that is and the engine it needs.

A workload of an article is used as published on a GPU. On a CPU it is shortened to what the machine does in a few
minutes, judged by one short run with everything off; the factor is part of every record. Cold starts are measured here
too, because they are engines of their own. Nothing is switched here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from strata_lab.bench.harness import Environment, Record, Spread
from strata_lab.bench.measure import Run, run, settled_run
from strata_lab.bench.workloads import ARTICLE_WORKLOADS, Workload, article, single_stream, uneven
from strata_lab.config import DEFAULT_MODEL, EngineConfig, Optimizations, toggles
from strata_lab.settings import ConfigError

SINGLE, SEVERAL = "single stream", "several streams"
# The order of the source articles where they overlap: capture, then fusion, then bytes. A toggle that is not named
# here (and is not a number) follows by itself, so a new one appears by existing.
ORDER: tuple[tuple[str, Any], ...] = (
    ("cuda_graph", True), ("fused_kernels", True), ("weight_format", "fp8"), ("weight_format", "int8"),
    ("weight_format", "int4"), ("kv_cache_dtype", "fp8"), ("speculative", "ngram"),
)  # fmt: skip
GPU_ONLY = {("weight_format", "fp8")}  # no CPU multiplies by 8-bit floats
NEEDS_SEVERAL = {"pd_split", "continuous_batching", "scheduling_policy"}  # says nothing with one stream
SCALES = (1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125)  # of an article's workload, for slow machines
CPU_BUDGET_S = 160.0  # of runs: with loading, converting and waiting for quiet a climb stays below five minutes
COLD_STARTS_B = 3  # article B gives its figure over three
MIN_TOKENS = 8  # of a run: fewer have no decode rate worth its name
SLACK_TOKENS = 64  # room behind the longest request: steps that are queued ahead need blocks too
TOKENS_PER_CHARACTER = 3  # at most: a character outside of the vocabulary is spelled in bytes

# No steps of a climb: what they are worth shows on a hot card, in a full pool, or not as speed.
NOT_A_STAGE = ("thermal_governor", "preemption", "batch_invariant")


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
    rest = [t for t in known.values() if t.kind in ("bool", "choice") and t.name not in (*dict(ORDER), *NOT_A_STAGE)]
    derived = [Stage(t.name, v) for t in rest for v in (t.choices[1:] or (True,))]
    return sorted(named + derived, key=lambda stage: stage.several)


def num_runs(num_stages: int, rounds: int) -> int:
    """Most measured runs of stages and the check of everything: B `rounds` times, A on either side of each."""
    return (num_stages + 1) * (2 * rounds + 1)


def how_much(num_stages: int, rounds: int) -> str:
    """A line for people about how much there is to do."""
    most = num_runs(num_stages, rounds)
    each = 2 * rounds + 1
    return (
        f"{num_stages} stages and a check of everything: at most {most} runs, {each} for each, and those that warm up"
    )


@dataclass(frozen=True)
class Course:
    """What a climb is measured on.

    Attributes:
        single: with one stream, or None.
        several: with several, or None. One alone takes all stages.
        letter: "A", "B" or "C" for an article's workload, "" for the default mixes.
        scale: what an article's workload was shortened by.
        script: the command that measures it again.
    """

    single: Workload | None
    several: Workload | None
    letter: str = ""
    scale: float = 1.0
    script: str = "strata climb"

    @property
    def workloads(self) -> dict[str, Workload]:
        """Series to workload."""
        found = {SINGLE: self.single, SEVERAL: self.several}
        return {series: workload for series, workload in found.items() if workload is not None}

    @property
    def conditions(self) -> dict[str, Any]:
        """What the records say beside the lengths."""
        return {"workload": self.letter, "scale": self.scale} if self.letter else {}


def default_course(model: str, tokens: int, prompt_tokens: int, streams: int) -> Course:
    """One stream, and several of uneven length."""
    if tokens < MIN_TOKENS:
        raise ConfigError(f"tokens={tokens} must be at least {MIN_TOKENS} for a decode rate; try 64")
    several = uneven(streams, max(8, prompt_tokens // 4), tokens)
    return Course(single_stream(prompt_tokens, tokens), several, script=_script(model))


def article_course(model: str, letter: str, scale: float) -> Course:
    """An article's workload, with one stream or several as it is."""
    workload = article(letter, scale)
    script = _script(model, "--workload", letter, "--scale", f"{scale:g}")
    crowd = workload.concurrency > 1
    return Course(None if crowd else workload, workload if crowd else None, letter, scale, script)


def check_article(letter: str, scale: float | None) -> None:
    """Raise `ConfigError` for a letter or scale that does not exist."""
    if letter not in ARTICLE_WORKLOADS:
        raise ConfigError(f"workload={letter!r} must be one of {', '.join(ARTICLE_WORKLOADS)}; try 'A'")
    if scale is not None and not SCALES[-1] <= scale <= 1.0:
        raise ConfigError(f"scale={scale:g} must be from {SCALES[-1]} to 1; try 0.125")


def check_free(options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an engine option that is a toggle which the climb itself sets."""
    for t in toggles():
        if t.kind in ("bool", "choice") and t.name in options:
            raise ConfigError(
                f"{t.name}={options[t.name]!r} cannot be fixed in a climb, which measures it; leave it out"
            )


def _script(model: str, *words: str) -> str:
    chosen = [] if model == DEFAULT_MODEL else ["--model", model]
    return " ".join(["strata climb", *chosen, *words])


# -- the engine it needs ----------------------------------------------------------------------------------------------


def longest(workload: Workload) -> int:
    """Tokens of the longest request, prompt and output; an upper bound where prompts are cut by characters."""
    characters = workload.prompt_characters
    prompt = workload.prompt_tokens if characters is None else TOKENS_PER_CHARACTER * characters
    return max(prompt, workload.prompt_tokens) + max(workload.output_tokens)


def pool_blocks(course: Course, block_size: int | None) -> int:
    """KV blocks that hold all streams of every workload; None is the engine's default block size.

    A pool as large as the memory allows would leave none for building the next weight format beside the one in use.
    """
    size = EngineConfig().block_size if block_size is None else block_size
    return max(w.concurrency * -(-(longest(w) + SLACK_TOKENS) // size) for w in course.workloads.values())


def check_room(engine: Any, workload: Workload) -> None:
    """Raise `ConfigError` if the engine cannot hold the workload's streams at the same time."""
    if (reason := _too_small(engine, workload)) is not None:
        raise ConfigError(reason)


def _too_small(engine: Any, workload: Workload) -> str | None:
    prompts = workload.prompts(engine.tokenizer, engine.model_config.vocab_size)
    lengths = [len(p) + n for p, n in zip(prompts, workload.output_tokens, strict=True)]
    limit, size, blocks = engine.optimizations.max_model_len, engine.config.block_size, engine.stats().kv_blocks_total
    if limit is not None and max(lengths) > limit:
        return f"{workload.doc}: {max(lengths)} tokens a request, and max_model_len is {limit}; try a smaller --scale"
    needed = sum(sorted((-(-n // size) for n in lengths), reverse=True)[: workload.concurrency])
    if needed > blocks:
        return (
            f"{workload.doc}: its streams need {needed} KV blocks and the pool has {blocks}; try num_kv_blocks={needed}"
        )
    return None


def fitting_scale(engine: Any, letter: str, num_runs: int) -> float:
    """The scale for this machine: 1.0 on a GPU, else the largest of `SCALES` whose runs fit into `CPU_BUDGET_S`."""
    if engine.device.type == "cuda":
        return 1.0
    smallest = article(letter, SCALES[-1])
    check_room(engine, smallest)
    run(engine, smallest)  # the first one finds nothing warm
    start_s = time.perf_counter()
    run(engine, smallest)
    full_s = (time.perf_counter() - start_s) / SCALES[-1]
    affordable = [s for s in SCALES if full_s * s * num_runs <= CPU_BUDGET_S]
    return next((s for s in affordable if _too_small(engine, article(letter, s)) is None), SCALES[-1])


def figure(measured: Run, series: str) -> float:
    """The main figure of a run, tok/s: decode rate of one stream, or everything over the whole time of a crowd."""
    if series == SINGLE:
        assert measured.decode_tok_s is not None, "a run of fewer than three tokens has no decode rate"
        return measured.decode_tok_s
    return measured.total_tok_s


def capturing_note(runs: int) -> str:
    """To be added to a note; empty for no runs."""
    return f"; something was captured in {runs} of the runs, as in those before them" if runs else ""


# -- cold starts ------------------------------------------------------------------------------------------------------


def cold_starts(make: Callable[[], Any], course: Course, count: int) -> Record:
    """Make an engine, run the workload until nothing is captured, at least twice, and close it, `count` times.

    Args:
        make: a new engine with the settings to measure.
        course: its first series is what is run.
        count: how often.

    Returns:
        A record whose figure is the last run's, since those before it pay for captures.
    """
    series, workload = next(iter(course.workloads.items()))
    loads, firsts, lasts, capturing = [], [], [], 0
    for _ in range(count):
        start_s = time.perf_counter()
        with make() as engine:
            loads.append(time.perf_counter() - start_s)
            firsts.append(run(engine, workload))
            last, settled = settled_run(engine, workload)
            lasts.append(last)
            capturing += not settled
            settings, model, device = engine.optimizations, engine.config.model, str(engine.device)
    spread = Spread.of([figure(r, series) for r in lasts])
    first_ttft, load = Spread.of([r.ttft_ms for r in firsts]), Spread.of(loads)
    conditions = {
        "model": model, "weight_format": settings.weight_format, "kv_cache_dtype": settings.kv_cache_dtype,
        "batch": workload.concurrency, "prompt_tokens": firsts[0].prompt_tokens,
        "output_tokens": max(workload.output_tokens), "toggles": settings.as_dict(), "series": "cold starts",
        "stage": "cold starts", "kept": True, **course.conditions,
    }  # fmt: skip
    metrics = {
        "output_tok_s": spread.median,
        "first_output_tok_s": Spread.of([figure(r, series) for r in firsts]).median,
        "first_ttft_ms": first_ttft.median,
        "first_ttft_ms_each": [r.ttft_ms for r in firsts],
        "ttft_ms": Spread.of([r.ttft_ms for r in lasts]).median,
        "load_s": load.median,
        "load_s_each": loads,
    }
    note = "each in a new engine of the same process, so compiled kernels and the checkpoint's pages are warm"
    note += capturing_note(capturing)
    environment = Environment.now(device)
    name = f"climb/{course.letter}/cold_starts" if course.letter else "climb/cold_starts"
    return environment.record(
        name, script=course.script, conditions=conditions, metrics=metrics, spread=spread, note=note
    )


def best_of(records: list[Record]) -> Optimizations:
    """The toggles of the last stage that was kept."""
    kept = [r for r in records if r.conditions["kept"] and r.metrics]
    return Optimizations(**kept[-1].conditions["toggles"])
