"""One run of a workload through an engine, read from the engine's own events.

The engine is used as everybody uses it, through `generate`; all times come from its events and outputs, so waiting
threads and printing cost nothing here. It keeps no records.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from strata_lab.bench.workloads import Workload
from strata_lab.events import StepEvent
from strata_lab.request import RequestOutput
from strata_lab.sampling_params import SamplingParams
from strata_lab.speculative.loops import MIN_TOKENS, loop_start

T = TypeVar("T")

# Whether a run counts in which something was captured. A card compiles for seconds, once; on a CPU it takes little
# longer than the step does, and what is seldom used is captured again: that is part of the cost.
COUNTS_CAPTURES = {"cpu": True, "cuda": False}
MOST_RUNS = 4  # of a workload until one captures nothing; a prompt's shape is captured when it is met again


class RunFailed(RuntimeError):
    """The engine ended a request with an error, or its events do not cover the run."""


@dataclass(frozen=True)
class Run:
    """Figures of one run. Decode and prefill are never mixed.

    Attributes:
        decode_tok_s: tokens per second, all streams together, over the steps in which every stream decodes and
            nothing is prefilled; None if there were fewer than two such steps.
        total_tok_s: all output tokens over the time from the first request to the last token, prefill included.
        prefill_tok_s: prompt tokens over time to first token, of the first request.
        ttft_ms: median time to first token.
        tpot_ms: median over requests of the mean time per token after the first; None for one-token outputs.
        itl_p99_ms: 99th percentile of the time between two tokens of a request; None for one-token outputs.
        read_bytes_s: bytes that those decode steps had to read, per second.
        step_bytes: bytes that one of them had to read, mean.
        prompt_tokens, output_tokens: longest prompt and output, as they came.
        looping: share of the output tokens that come after their text began to go round in circles, 0 to 1.
        most_looping: that share of the text where it is largest.
    """

    decode_tok_s: float | None
    total_tok_s: float
    prefill_tok_s: float
    ttft_ms: float
    tpot_ms: float | None
    itl_p99_ms: float | None
    read_bytes_s: float | None
    step_bytes: float | None
    prompt_tokens: int
    output_tokens: int
    looping: float = 0.0
    most_looping: float = 0.0


def run(engine: Any, workload: Workload) -> Run:
    """Send a workload to an engine and wait for its end; the prefix cache of earlier runs is dropped first.

    Args:
        engine: an open `LLMEngine`.
        workload: requests; greedy, the model's end token is ignored.

    Raises:
        RunFailed: a request ended in an error, or events were lost.
    """
    prompts = workload.prompts(engine.tokenizer, engine.model_config.vocab_size)
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in workload.output_tokens]
    engine.reset_prefix_cache()
    cursor = engine.events.cursor
    start_s = time.perf_counter()
    outputs = engine.generate(prompts, params)
    events, _, lost = engine.events.since(cursor)
    for output in outputs:
        if output.error is not None:
            raise RunFailed(f"{output.request_id}: {output.error}")
    if lost:
        raise RunFailed(f"{lost} events were lost: the run has more steps than the event buffer, measure fewer tokens")
    steps = [e for e in events if isinstance(e, StepEvent)]
    return summarize(steps, outputs, start_s, min(workload.concurrency, len(prompts)))


def until_none_captured(measure: Callable[[], T], captures: Callable[[], int], most: int) -> list[tuple[T, int]]:
    """Measure again until nothing was captured meanwhile, at most `most` times; each result with what was captured."""
    found: list[tuple[T, int]] = []
    while len(found) < most and (not found or found[-1][1]):
        before = captures()
        result = measure()
        found.append((result, captures() - before))
    return found


def settled_run(engine: Any, workload: Workload) -> tuple[Run, bool]:
    """A run without captures in it, where they do not count (`COUNTS_CAPTURES`); those that had some are dropped.

    Returns:
        The last of at most `MOST_RUNS` runs, and whether it captured nothing that does not count.
    """
    most = 1 if COUNTS_CAPTURES[engine.device.type] else MOST_RUNS
    last, captured = until_none_captured(lambda: run(engine, workload), lambda: engine._loop.captures, most)[-1]
    return last, most == 1 or not captured


def summarize(steps: Sequence[StepEvent], outputs: Sequence[RequestOutput], start_s: float, concurrency: int) -> Run:
    """Figures of a run.

    Args:
        steps: its events, in order.
        outputs: its requests, in order.
        start_s: when the first request was sent, on the events' clock.
        concurrency: how many requests decode together in a full step.
    """
    times: dict[str, list[float]] = {o.request_id: [] for o in outputs}
    for step in steps:
        for token in step.tokens:
            if token.token_id >= 0 and token.request_id in times:
                times[token.request_id].append(step.t_s)
    gaps = sorted(b - a for t in times.values() for a, b in itertools.pairwise(t))
    per_token = [o.tpot_ms for o in outputs if o.tpot_ms is not None]
    first = [o.ttft_ms for o in outputs if o.ttft_ms is not None]
    window = full_decode_steps(steps, concurrency)
    looping = [_looping_tokens(o.token_ids) for o in outputs]
    elapsed = window[-1].t_s - window[0].t_s if len(window) > 1 else 0.0
    read = sum(s.bytes_moved for s in window[1:])
    produced = sum(len(s.tokens) for s in window[1:])
    return Run(
        decode_tok_s=produced / elapsed if elapsed else None,
        total_tok_s=sum(map(len, times.values())) / (steps[-1].t_s - start_s),
        prefill_tok_s=len(outputs[0].prompt_token_ids) / first[0] * 1e3,
        ttft_ms=statistics.median(first),
        tpot_ms=statistics.median(per_token) if per_token else None,
        itl_p99_ms=gaps[int(0.99 * (len(gaps) - 1))] * 1e3 if gaps else None,
        read_bytes_s=read / elapsed if elapsed else None,
        step_bytes=read / (len(window) - 1) if elapsed else None,
        prompt_tokens=max(len(o.prompt_token_ids) for o in outputs),
        output_tokens=max(len(o.token_ids) for o in outputs),
        looping=sum(looping) / max(1, sum(len(o.token_ids) for o in outputs)),
        most_looping=max(n / max(1, len(o.token_ids)) for n, o in zip(looping, outputs, strict=True)),
    )


def _looping_tokens(token_ids: Sequence[int]) -> int:
    """Tokens behind the beginning of a loop; of a short text half must repeat, so that its greater part is found."""
    least = min(MIN_TOKENS, len(token_ids) // 2)
    return len(token_ids) - loop_start(token_ids, least) if least >= 3 else 0


def full_decode_steps(steps: Sequence[StepEvent], concurrency: int) -> list[StepEvent]:
    """The longest stretch of steps in which every stream decodes, preceded by the step that marks its start."""
    best: tuple[int, int] = (0, 0)
    begin = 0
    for i, step in enumerate(steps):
        if step.num_prefill_tokens or step.num_decode_tokens < concurrency:
            begin = i + 1
        elif i + 1 - begin > best[1] - best[0]:
            best = (begin, i + 1)
    return list(steps[max(0, best[0] - 1) : best[1]])
