"""Where the milliseconds of a decode step go, by cause: from measured times and counted bytes, nothing else.

Three measurements meet here: every operator alone inside a CUDA graph (`bench/kernels.py`), the whole captured step
replayed without a host (`RunAhead.replay_ms`), and the step through the public API. With `t` an operator's time, `B`
its bytes and `R` the measured read bandwidth, each summed over the step:

    weights, kv    B / R of the operators that read them
    routing        B / R of a router that is part of a fused operator; t of one that is an operator
    sampling       t of the sampling
    launch, ramp   t - B / R of all others: launches, filling and draining the card, arithmetic that reading cannot hide
    overlap        whole step - sum of t: negative where operators overlap, positive where the gaps between them count
    host           API step - whole step

The parts add up to the API step, or to the whole step where the API was not measured; what was not measured is absent.
Bytes are those an operator has to move, so the activations of a product count as its weights (below 1% at batch 1).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from strata_lab.bench.evidence import (
    MAX_PROMPT_TOKENS,
    OUTPUT_TOKENS,
    REPLAYS,
    SLACK_TOKENS,
    bare_step,
    distinct_tokens,
)
from strata_lab.bench.harness import Environment, Record, Spread
from strata_lab.bench.measure import run
from strata_lab.bench.workloads import Workload
from strata_lab.config import EngineConfig

API_RUNS = 3
# First word of an operator's label -> what its bytes are. Others read nothing that counts: all their time is launch.
READS = {
    "linear": "weights", "lm_head": "weights", "embedding": "weights", "moe_block": "weights", "moe_mlp": "weights",
    "qkv_attention": "kv", "paged_attention": "kv", "sparse_attention": "kv", "page_bounds": "kv",
}  # fmt: skip
WHOLE_TIME = {"router_topk": "routing", "sample_greedy": "sampling", "sample_drawn": "sampling"}
NAMES = {
    "weights": "reading weights", "kv": "reading KV", "routing": "routing", "sampling": "sampling",
    "launch_ramp": "launch and ramp", "overlap": "whole step less its operators", "host": "host",
}  # fmt: skip


class Timed(Protocol):
    """What is needed of an operator (`kernels.Row`)."""

    @property
    def label(self) -> str:
        """Operator and shape."""
        ...

    @property
    def calls(self) -> int:
        """In a step."""
        ...

    @property
    def us(self) -> float:
        """Of one call."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of one call, router included."""
        ...

    @property
    def router_bytes(self) -> int:
        """Those of them that are a router's."""
        ...


@dataclass(frozen=True)
class Whole:
    """An engine's step as a whole.

    Attributes:
        bare_ms: captured, replayed without a host.
        api_tok_s: all streams together through `LLMEngine.generate`, of each run; empty where it was not measured.
        batch: streams.
        distinct: share of distinct tokens in a step of those runs: rows of random weights may fall into step, and then
            they route alike.
    """

    bare_ms: float
    api_tok_s: tuple[float, ...]
    batch: int
    distinct: float | None = None

    @property
    def api_ms(self) -> float | None:
        """Of a step in the median run; None where that was not measured."""
        return 1e3 * self.batch / statistics.median(self.api_tok_s) if self.api_tok_s else None


@dataclass(frozen=True)
class Causes:
    """A split step.

    Attributes:
        parts: cause (a key of `NAMES`) to milliseconds, in the order of `NAMES`.
        step_ms: what they add up to.
        bare_ms: the captured step.
    """

    parts: dict[str, float]
    step_ms: float
    bare_ms: float


def split(rows: Iterable[Timed], bytes_s: float, whole: Whole) -> Causes:
    """Split a step.

    Args:
        rows: its operators.
        bytes_s: measured read bandwidth.
        whole: the same step measured as a whole.
    """
    parts: dict[str, float] = {}

    def add(cause: str, ms: float) -> None:
        parts[cause] = parts.get(cause, 0.0) + ms

    operators_ms = 0.0
    for row in rows:
        operator, took_ms = row.label.split()[0], row.calls * row.us / 1e3
        operators_ms += took_ms
        if operator in WHOLE_TIME:
            add(WHOLE_TIME[operator], took_ms)
            continue
        reading_ms = 0.0
        for cause, nbytes in _reads(operator, row):
            ms = row.calls * nbytes / bytes_s * 1e3
            add(cause, ms)
            reading_ms += ms
        add("launch_ramp", took_ms - reading_ms)
    add("overlap", whole.bare_ms - operators_ms)
    if whole.api_ms is not None:
        add("host", whole.api_ms - whole.bare_ms)
    ordered = {cause: parts[cause] for cause in NAMES if cause in parts}
    return Causes(ordered, whole.bare_ms if whole.api_ms is None else whole.api_ms, whole.bare_ms)


def _reads(operator: str, row: Timed) -> Iterator[tuple[str, int]]:
    if operator in READS:
        yield READS[operator], row.nbytes - row.router_bytes
        if row.router_bytes:
            yield "routing", row.router_bytes


def table(causes: Causes, whole: Whole) -> Iterator[str]:
    """The split as lines of text."""
    total = "step through the API" if whole.api_ms is not None else "captured step"
    yield f"{'where the step goes':34}{'ms':>10}{'share':>10}"
    for cause, ms in causes.parts.items():
        yield f"{NAMES[cause]:34}{ms:10.4f}{ms / causes.step_ms:10.1%}"
    rate = 1e3 * whole.batch / causes.step_ms
    yield f"{total:34}{causes.step_ms:10.4f}{1:10.1%}   {rate:.1f} tok/s"
    if whole.api_ms is not None:
        low, high = min(whole.api_tok_s), max(whole.api_tok_s)
        runs = len(whole.api_tok_s)
        yield f"(captured step {whole.bare_ms:.4f} ms; through the API {low:.1f} to {high:.1f} tok/s in {runs} runs)"


def record(
    causes: Causes, whole: Whole, step_bytes: int, bytes_s: float, conditions: dict[str, Any], environment: Environment,
    script: str,
) -> Record:  # fmt: skip
    """One record for a results file.

    Raises:
        RooflineExceeded: the captured step is faster than its bytes can be read.
    """
    metrics: dict[str, Any] = {
        "step_ms": causes.step_ms,
        "captured_step_ms": causes.bare_ms,
        **{f"{cause}_ms": ms for cause, ms in causes.parts.items()},
        "step_bytes": step_bytes,
        "mbu": captured_mbu(whole, step_bytes, bytes_s),
        "bandwidth_gb_s": bytes_s / 1e9,
    }
    spread = None
    if whole.api_tok_s:
        spread = Spread.of(whole.api_tok_s)
        metrics |= {"output_tok_s": spread.median, "distinct_tokens": whole.distinct}
    note = "the _ms parts add up to step_ms; mbu is the captured step's; operators were timed alone in CUDA graphs"
    return environment.record(
        f"causes/{conditions['model']}/x{whole.batch}",
        script=script,
        conditions=conditions,
        metrics=metrics,
        spread=spread,
        note=note,
    )


def captured_mbu(whole: Whole, step_bytes: int, bytes_s: float) -> float:
    """Of the captured step; above 1.0 it was measured wrong."""
    return step_bytes / (whole.bare_ms / 1e3 * bytes_s)


# -- measuring an engine's step ---------------------------------------------------------------------------------------


def measure_wholes(
    model: str, weight_format: str, kv_format: str, batches: Iterable[int], context: int
) -> dict[int, Whole]:
    """Batch to its step, from one engine of a preset that is closed again. Needs a GPU."""
    from strata_lab.engine import LLMEngine

    sizes = list(batches)
    length = context + SLACK_TOKENS
    blocks = max(sizes) * -(-length // EngineConfig().block_size)
    with LLMEngine(
        model, device="cuda", weight_format=weight_format, kv_cache_dtype=kv_format, max_model_len=length,
        max_num_seqs=max(sizes), max_num_batched_tokens=2048, num_kv_blocks=blocks,
    ) as engine:  # fmt: skip
        return {batch: measure_whole(engine, batch, context) for batch in sizes}


def measure_whole(engine: Any, batch: int, context: int) -> Whole:
    """An engine's step at a batch and context: bare, and through the API where prompts of that length are affordable.

    Both are at `context` tokens in the middle of what is timed.
    """
    from strata_lab.run_ahead import SMALL_BATCH, STEPS_PER_REPLAY, WARM_UP_REPLAYS

    steps = (STEPS_PER_REPLAY if batch <= SMALL_BATCH else 1) * (WARM_UP_REPLAYS + REPLAYS // 2)
    bare_ms, _ = bare_step(engine, batch, max(1, context - steps))
    rates: list[float] = []
    prompt = context - OUTPUT_TOKENS // 2
    if prompt > 0 and batch * context <= MAX_PROMPT_TOKENS:
        workload = Workload("decode", "equal requests", prompt, (OUTPUT_TOKENS,) * batch, batch)
        run(engine, workload)  # captures what it needs
        measured = [run(engine, workload).decode_tok_s for _ in range(API_RUNS)]
        rates = [rate for rate in measured if rate is not None]
    return Whole(bare_ms, tuple(rates), batch, distinct_tokens(engine, batch) if rates else None)
