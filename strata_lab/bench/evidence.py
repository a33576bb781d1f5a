"""The engine on a GPU, cell by cell: tokens per second by format, batch and context, beside the bare replay.

`python -m strata_lab.bench.evidence [--model ...] [--weights ...] [--batch ...] [--context ...]` loads each model and
format once and measures every (batch, context): through `LLMEngine.generate` where prompts of that length are
affordable, and always the captured step alone. Greedy decoding of random weights may fall into step, and a batch whose
rows say the same routes alike; so the number of distinct tokens a step is part of each record. A cell that is measured
again replaces what the results file has of it; the rest stays.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from strata_lab.bench.harness import GIB, Environment, Record, Spread, join_results, read_results
from strata_lab.bench.measure import Run, run
from strata_lab.bench.workloads import Workload
from strata_lab.config import WEIGHT_FORMATS
from strata_lab.models.presets import PRESETS
from strata_lab.telemetry.bandwidth import ceiling

SCRIPT = "python -m strata_lab.bench.evidence"
OUTPUT_TOKENS = 160
RUNS = 3
REPLAYS = 40
TTFT_PROMPTS = (512, 2048, 8192)
FIRST_TOKEN_WARM_UP, FIRST_TOKEN_RUNS = 3, 7
MAX_PROMPT_TOKENS = 40_000  # of all requests of a run together: beyond that only the bare step is measured
SLACK_TOKENS = 1024  # room behind the context for what is generated


def cells(
    model: str,
    weight_format: str,
    kv_format: str,
    batches: Sequence[int],
    contexts: Sequence[int],
    prompts: Sequence[int],
    runs: int,
) -> Iterator[Record]:
    """Measure one model in one format; a record per (batch, context) as soon as it is there."""
    import torch

    from strata_lab.engine import LLMEngine

    environment, bandwidth = Environment.now("cuda"), ceiling("cuda")
    torch.cuda.reset_peak_memory_stats()
    length = max(*contexts, *prompts, 0) + SLACK_TOKENS
    with LLMEngine(
        model, device="cuda", weight_format=weight_format, kv_cache_dtype=kv_format, max_model_len=length,
        max_num_seqs=max(batches), max_num_batched_tokens=2048,
    ) as engine:  # fmt: skip
        fallbacks = [str(f) for f in engine.fallbacks]
        if prompts:
            yield first_tokens(engine, environment, prompts, runs)
        for context in contexts:
            for batch in batches:
                yield cell(engine, environment, bandwidth.bytes_s, batch, context, runs, fallbacks)
    gc.collect()
    torch.cuda.empty_cache()


def first_tokens(engine: Any, environment: Environment, prompts: Sequence[int], runs: int) -> Record:
    """Time to first token of one request alone, by prompt length: the median, and all of them in their order."""
    metrics: dict[str, Any] = {}
    every: dict[str, list[float]] = {}
    opt = engine.optimizations
    for tokens in prompts:
        workload = Workload("prompt", "one prompt", tokens, (4,))
        for _ in range(FIRST_TOKEN_WARM_UP):  # compiles, then captures
            run(engine, workload)
        every[str(tokens)] = [run(engine, workload).ttft_ms for _ in range(max(runs, FIRST_TOKEN_RUNS))]
        metrics[f"ttft_ms_{tokens}"] = statistics.median(every[str(tokens)])
    metrics["every_ms"] = every
    conditions = {
        "model": engine.config.model, "weight_format": opt.weight_format, "kv_cache_dtype": opt.kv_cache_dtype,
        "batch": 1, "toggles": opt.as_dict(),
    }  # fmt: skip
    return environment.record("ttft", script=SCRIPT, conditions=conditions, metrics=metrics)


def cell(
    engine: Any, environment: Environment, bandwidth: float, batch: int, context: int, runs: int, fallbacks: list[str]
) -> Record:
    """One (batch, context): the bare step, and through the public API where the prompts are affordable."""
    import torch

    step_ms, bare_distinct = bare_step(engine, batch, context)
    stats = engine.stats()
    opt = engine.optimizations
    step_bytes = engine.parts.weights.bytes_read(engine.model_config, batch)
    step_bytes += batch * (context + REPLAYS) * stats.kv_bytes_per_token
    metrics: dict[str, Any] = {
        "step_ms": step_ms, "raw_tok_s": 1e3 * batch / step_ms, "step_gb": step_bytes / 1e9,
        "mbu_raw": step_bytes / (step_ms / 1e3 * bandwidth), "read_bandwidth_tb_s": bandwidth / 1e12,
        "roofline_tok_s": batch * bandwidth / step_bytes,
    }  # fmt: skip
    spread = None
    if batch * context <= MAX_PROMPT_TOKENS:
        workload = Workload("decode", "equal requests", context - OUTPUT_TOKENS // 2, (OUTPUT_TOKENS,) * batch, batch)
        measured: list[Run] = [run(engine, workload) for _ in range(runs + 1)][1:]
        spread = Spread.of([r.decode_tok_s or 0.0 for r in measured])
        metrics |= {
            "output_tok_s": spread.median, "tok_s_per_stream": spread.median / batch,
            "share_of_raw": spread.median / metrics["raw_tok_s"], "mbu": spread.median / metrics["roofline_tok_s"],
            "ttft_ms": statistics.median(r.ttft_ms for r in measured),
        }  # fmt: skip
    metrics["peak_memory_gb"] = torch.cuda.max_memory_reserved() / GIB
    conditions = {
        "model": engine.config.model, "weight_format": opt.weight_format, "kv_cache_dtype": opt.kv_cache_dtype,
        "batch": batch, "context": context, "output_tokens": OUTPUT_TOKENS, "toggles": opt.as_dict(),
        "distinct_tokens": distinct_tokens(engine, batch), "distinct_tokens_raw": bare_distinct,
    }  # fmt: skip
    note = "; ".join(fallbacks)
    return environment.record("decode", script=SCRIPT, conditions=conditions, metrics=metrics, spread=spread, note=note)


def bare_step(engine: Any, batch: int, context: int) -> tuple[float, float]:
    """The captured greedy step at this batch and context, replayed with no host in between, over a random cache.

    Returns:
        milliseconds of a step, and the share of rows whose token differed at the end.
    """
    from strata_lab.batch import ScheduledRequest
    from strata_lab.request import Request
    from strata_lab.run_ahead import STEPS_PER_REPLAY, WARM_UP_REPLAYS
    from strata_lab.sampling_params import SamplingParams

    size, pool = engine.config.block_size, engine.stats().kv_blocks_total
    needed = -(-(context + (WARM_UP_REPLAYS + REPLAYS) * STEPS_PER_REPLAY + 1) // size)
    items = []
    for row in range(batch):
        tokens = [(7 + 31 * (i + 97 * row)) % engine.model_config.vocab_size for i in range(context + 1)]
        request = Request(f"bare-{row}", tokens, SamplingParams(temperature=0.0, max_tokens=SLACK_TOKENS), seed=0)
        blocks = [(row * needed + i) % pool for i in range(needed)]
        items.append(ScheduledRequest(request, context, 1, blocks))
    measured: list[tuple[float, int]] = []

    def measure(scheduler: Any) -> None:
        randomize(engine.parts.kv, sorted({b for item in items for b in item.block_table}), engine.device)
        measured.append(engine.parts.runner.replay_ms(items, REPLAYS))
        scheduler.blocks.drop_prefixes()  # these blocks hold nobody's text any more

    engine.between_steps(measure)
    step_ms, distinct = measured[0]
    return step_ms, distinct / batch


def randomize(kv: Any, blocks: list[int], device: Any) -> None:
    """Normal numbers into blocks of every layer: what nobody wrote may be NaN, and then all rows say the same."""
    import torch

    index = torch.tensor(blocks, device=device)
    first = kv.layer(0).k
    noise = torch.randn(len(blocks), *first.shape[1:], device=device).to(first.dtype)
    for layer in range(len(kv.scales)):
        for cache in (kv.layer(layer).k, kv.layer(layer).v):
            cache.view(torch.uint8)[index] = noise.view(torch.uint8)


def distinct_tokens(engine: Any, batch: int) -> float | None:
    """Distinct tokens of the latest full step over its rows, 1.0 where all differ; None before any."""
    from strata_lab.events import StepEvent

    events, _, _ = engine.events.since(0)
    full = [
        e.tokens for e in events if isinstance(e, StepEvent) and len(e.tokens) == batch and not e.num_prefill_tokens
    ]
    return len({t.token_id for t in full[-1]}) / batch if full else None


def row(record: Record) -> str:
    """One line for the terminal."""
    c, m = record.conditions, record.metrics
    head = f"{c['model']:22} {c['weight_format']:5} kv {c['kv_cache_dtype']:5} batch {c['batch']:3}"
    if record.name == "ttft":
        waits = (
            f"{tokens} tokens {m[f'ttft_ms_{tokens}']:.1f} ms ({min(ms):.1f} to {max(ms):.1f})"
            for tokens, ms in m["every_ms"].items()
        )
        return f"{head}  time to first token: {', '.join(waits)}"
    api = "" if "output_tok_s" not in m else f"  API {m['output_tok_s']:8.1f} tok/s = {m['share_of_raw']:.1%} of bare"
    return (
        f"{head} context {c['context']:6}  bare {m['raw_tok_s']:8.1f} tok/s {m['step_ms']:.3f} ms "
        f"{m['mbu_raw']:.1%} of roofline{api}"
    )


def place(record: Record) -> tuple[Any, ...]:
    """What a record is about: a later one of the same place replaces it in the file."""
    names = ("model", "weight_format", "kv_cache_dtype", "batch", "context")
    return record.name, *(record.conditions.get(name) for name in names)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog=SCRIPT, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", nargs="+", default=list(PRESETS)[:2], help="presets, or anything the engine loads")
    parser.add_argument("--weights", nargs="+", default=["fp8"], choices=WEIGHT_FORMATS)
    parser.add_argument("--kv", default="fp8", choices=("bf16", "fp8"))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--context", nargs="+", type=int, default=[512])
    parser.add_argument(
        "--prompts", nargs="*", type=int, default=list(TTFT_PROMPTS), help="lengths for the first token"
    )
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--name", default="evidence_gpu", help="results file")
    parser.add_argument("--results", help="folder of the results file (default: docs/results)")
    parser.add_argument("--add", nargs="+", type=Path, help="results files of other runs to add, instead of measuring")
    options = parser.parse_args(arguments)
    if options.add:
        for path in options.add:
            join_results(options.name, read_results(path), options.results, place)
        return 0
    import torch

    if not torch.cuda.is_available():
        print("this benchmark needs an NVIDIA GPU and torch sees none; on a CPU try `strata climb`", file=sys.stderr)
        return 2
    for model in options.model:
        for weights in options.weights:
            for record in cells(
                model, weights, options.kv, options.batch, options.context, options.prompts, options.runs
            ):
                print(row(record), flush=True)
                join_results(options.name, [record], options.results, place)  # survives an interruption
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
