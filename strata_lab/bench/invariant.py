"""What the batch-invariant mode costs: decode and prefill with it off and on, in turn, in one engine.

`python -m strata_lab.bench.invariant [--model ...]` on a CPU. Decode is one stream and eight; prefill is one prompt.
Where the mode has no effect (`LLMEngine.explain`) the record says so, and the figures show what is noise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from strata_lab.bench.harness import Environment, Record, Spread, interleave, write_results
from strata_lab.bench.measure import run
from strata_lab.bench.workloads import Workload, batch, single_stream
from strata_lab.config import DEFAULT_MODEL

SCRIPT = "python -m strata_lab.bench.invariant"
MODELS = (DEFAULT_MODEL, "qwen3.8-flash@0.05")
STREAMS, PROMPT, TOKENS, ROUNDS = 8, 128, 32, 3


def rates(engine: Any, workload: Workload, on: bool) -> tuple[float, float]:
    """Decode and prefill tokens a second of a workload."""
    engine.apply(batch_invariant=on)
    found = run(engine, workload)
    return found.decode_tok_s or 0.0, found.prefill_tok_s


def measure(model: str) -> Iterator[Record]:
    """A record for decode at batch 1, at batch 8, and prefill."""
    from strata_lab.engine import LLMEngine

    environment = Environment.now("cpu")
    workloads = {"batch1": single_stream(PROMPT, TOKENS), "batch8": batch(STREAMS, PROMPT // 4, TOKENS)}
    with LLMEngine(model, device="cpu", max_model_len=2 * PROMPT, max_num_seqs=STREAMS) as engine:
        effect = engine.explain()["batch_invariant"]
        note = effect if effect.startswith("No effect") else ""
        found = {}
        for name, workload in workloads.items():
            variants = {side: partial(rates, engine, workload, side == "on") for side in ("off", "on")}
            rates(engine, workload, on=False)  # captures are made the first time
            rates(engine, workload, on=True)
            found[name] = interleave(variants, ROUNDS)
        settings = engine.optimizations
    figures = {f"decode_{n}": {s: [r[0] for r in runs[s]] for s in runs} for n, runs in found.items()}
    figures["prefill"] = {s: [r[1] for r in found["batch1"][s]] for s in found["batch1"]}
    for name, sides in figures.items():
        off, on = (statistics.median(sides[s]) for s in ("off", "on"))
        conditions = {"model": model, "weight_format": settings.weight_format, "prompt_tokens": PROMPT,
                      "batch": STREAMS if name == "decode_batch8" else 1, "output_tokens": TOKENS}  # fmt: skip
        metrics = {"off_tok_s": off, "on_tok_s": on, "on_over_off": on / off}
        yield environment.record(
            f"batch_invariant/{model}/{name}", script=SCRIPT, conditions=conditions, metrics=metrics,
            spread=Spread.of(sides["on"]), note=note,
        )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog=SCRIPT, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--name", default="batch_invariant_cpu", help="results file")
    parser.add_argument("--results", help="folder of the results file (default: docs/results)")
    options = parser.parse_args(arguments)
    records: list[Record] = []
    for model in options.models:
        for record in measure(model):
            records.append(record)
            m = record.metrics
            sys.stdout.write(f"{record.name:52} off {m['off_tok_s']:7.1f} on {m['on_tok_s']:7.1f} tok/s\n")
            sys.stdout.flush()
            write_results(options.name, records, options.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
