"""What a long prompt does to those who are being answered: gaps between tokens, with and without `pd_split`.

`python -m strata_lab.bench.interference` lets some streams decode, sends one long prompt, and looks at the longest
waits of the running streams from then until the newcomer's first token, and at how long that took. Settings alternate
(A/B/A), all in one engine; times come from the engine's own events.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from strata_lab.bench.harness import Environment, Record, Spread, write_results
from strata_lab.config import DEFAULT_MODEL
from strata_lab.events import StepEvent
from strata_lab.sampling_params import SamplingParams

SCRIPT = "python -m strata_lab.bench.interference"
STREAMS, PROMPT_TOKENS, STEADY_TOKENS, TAIL_TOKENS = 4, 2048, 24, 24
ROUNDS = 3
POLL_S, TIMEOUT_S = 0.002, 300.0


@dataclass(frozen=True)
class Disturbance:
    """One long prompt among running streams.

    Attributes:
        calm_ms: median time between two tokens of a stream before the prompt came.
        worst_ms: longest of those times until the prompt's first token.
        p99_ms, median_ms: of the same times.
        ttft_ms: the prompt's time to first token.
        worst_after_ms: when the longest ended, since the prompt was sent.
    """

    calm_ms: float
    worst_ms: float
    p99_ms: float
    median_ms: float
    ttft_ms: float
    worst_after_ms: float


def disturb(engine: Any, streams: int, prompt_tokens: int) -> Disturbance:
    """Measure one prompt of `prompt_tokens` among `streams` running requests; all end before it returns."""
    vocab = engine.model_config.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=100_000, ignore_eos=True)
    engine.reset_prefix_cache()  # the prompt of the run before is the same
    cursor = engine.events.cursor
    engine.start()
    running = [engine.add_request([(11 + 97 * s + 31 * i) % vocab for i in range(16)], params) for s in range(streams)]
    try:
        _wait(engine, cursor, lambda tokens: all(len(tokens.get(r, ())) >= STEADY_TOKENS for r in running))
        long = [(5 + 29 * i) % vocab for i in range(prompt_tokens)]
        sent = time.perf_counter()
        newcomer = engine.add_request(long, SamplingParams(temperature=0.0, max_tokens=TAIL_TOKENS, ignore_eos=True))
        tokens = _wait(engine, cursor, lambda tokens: len(tokens.get(newcomer, ())) >= TAIL_TOKENS)
    finally:
        for request in running:
            engine.abort(request)
    first = tokens[newcomer][0]
    gaps = [(b, b - a) for r in running for a, b in itertools.pairwise(tokens[r])]
    calm = [gap for at, gap in gaps if at < sent]
    disturbed = [(gap, at) for at, gap in gaps if sent <= at <= first + statistics.median(calm)]
    worst, at = max(disturbed, default=(max(calm), sent))
    during = sorted(gap for gap, _ in disturbed) or calm
    return Disturbance(
        calm_ms=statistics.median(calm) * 1e3,
        worst_ms=worst * 1e3,
        p99_ms=during[int(0.99 * (len(during) - 1))] * 1e3,
        median_ms=statistics.median(during) * 1e3,
        ttft_ms=(first - sent) * 1e3,
        worst_after_ms=(at - sent) * 1e3,
    )


def _wait(engine: Any, cursor: int, enough: Any) -> dict[str, list[float]]:
    """Times of the tokens of each request since `cursor`, as soon as they are `enough`."""
    deadline = time.perf_counter() + TIMEOUT_S
    while time.perf_counter() < deadline:
        events, _, lost = engine.events.since(cursor)
        times: dict[str, list[float]] = {}
        for event in events:
            if isinstance(event, StepEvent):
                for token in event.tokens:
                    if token.token_id >= 0:
                        times.setdefault(token.request_id, []).append(event.t_s)
        if enough(times):
            return times
        if lost:
            raise RuntimeError(f"{lost} events were lost: the prompt takes more steps than the event buffer holds")
        time.sleep(POLL_S)
    raise RuntimeError(f"nothing came for {TIMEOUT_S:.0f} s; try a shorter --prompt-tokens")


def measure(
    model: str, streams: int, prompt_tokens: int, rounds: int, **options: Any
) -> list[Record]:  # fmt: skip
    """Without, with, and without again, `rounds` times each; a record per setting."""
    from strata_lab.engine import LLMEngine

    length = prompt_tokens + 4096
    found: dict[bool, list[Disturbance]] = {False: [], True: []}
    with LLMEngine(model, max_num_seqs=streams + 1, max_model_len=length, **options) as engine:
        environment = Environment.now(engine.device.type)
        for split in (False, True):
            engine.apply(pd_split=split)
            disturb(engine, streams, prompt_tokens)  # compiles and captures
        for split in (False, True, False):
            engine.apply(pd_split=split)
            found[split] += [disturb(engine, streams, prompt_tokens) for _ in range(rounds)]
        toggles = engine.optimizations.as_dict()
        engine.apply(pd_split=True)
        lane = engine.parts.lane
        conditions = {"model": model, "streams": streams, "prompt_tokens": prompt_tokens, "toggles": toggles}
        conditions["lane_multiprocessors"] = None if lane is None else lane.multiprocessors
    return [
        environment.record(
            f"interference/{'pd_split' if split else 'mixed'}", script=SCRIPT,
            conditions=conditions | {"pd_split": split},
            metrics={
                name: statistics.median(getattr(d, name) for d in runs)
                for name in ("calm_ms", "worst_ms", "p99_ms", "median_ms", "ttft_ms", "worst_after_ms")
            },
            spread=Spread.of([d.worst_ms for d in runs]), note="the spread is of worst_ms",
        )
        for split, runs in found.items()
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog=SCRIPT, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a preset, or anything the engine loads")
    parser.add_argument("--streams", type=int, default=STREAMS, help="requests that decode meanwhile")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--weights", help="format; default: as stored")
    parser.add_argument("--batched-tokens", type=int, default=512, help="max_num_batched_tokens")
    parser.add_argument("--name", default="interference", help="results file")
    parser.add_argument("--results", help="folder of the results file (default: docs/results)")
    options = parser.parse_args(arguments)
    extra = {"weight_format": options.weights} if options.weights else {}
    records = measure(
        options.model, options.streams, options.prompt_tokens, options.rounds,
        max_num_batched_tokens=options.batched_tokens, **extra,
    )  # fmt: skip
    for record in records:
        m = record.metrics
        sys.stdout.write(
            f"{record.name:24} between tokens: calm {m['calm_ms']:.2f} ms; while the prompt is read median "
            f"{m['median_ms']:.2f}, p99 {m['p99_ms']:.2f}, worst {m['worst_ms']:.2f}; its first token after "
            f"{m['ttft_ms']:.0f} ms\n"
        )
    write_results(options.name, records, options.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
