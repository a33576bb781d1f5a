"""`strata roofline`: bytes per token of a model, what a card could do at best, what the articles' figures would need.

Arithmetic only (`telemetry/roofline.py`, `telemetry/cards.py`), with one projection from a measured record. A share
above 100% cannot be and is an alarm: somebody counts bytes that are not read, or tokens that were not made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from strata_lab.bench.projection import ASSUMPTIONS, Projection, nearest, project, results
from strata_lab.model_config import ModelConfig
from strata_lab.quant import engine_granularity
from strata_lab.settings import ConfigError, check_whole
from strata_lab.telemetry.cards import READ_SHARE, Card
from strata_lab.telemetry.roofline import StepCost, forecast

FORMATS = ("bf16", "fp8", "int8", "int4")
CONTEXTS = (512, 2048, 8192)
LADDER = (58, 80, 95, 130, 150, 240)  # tok/s, the articles' claim
LADDER_STREAMS = 4  # article A measures with 4 prompts at a time


@dataclass(frozen=True)
class Ceiling:
    """The best that one format can do.

    Attributes:
        weight_format: of the weights.
        stored_gb: weights in memory, GB.
        fits: whether they fit into the card with the cache of the largest context.
        context: cached tokens of each stream.
        step_gb: read per step, GB.
        tok_s: most tokens per second, all streams together.
        bound: "memory" or "arithmetic".
    """

    weight_format: str
    stored_gb: float
    fits: bool
    context: int
    step_gb: float
    tok_s: float
    bound: str


@dataclass(frozen=True)
class Need:
    """What a figure would need.

    Attributes:
        tok_s: the figure.
        one_stream, several_streams: share of the ceiling, as a rate of one stream and as one of several together.
    """

    tok_s: float
    one_stream: float
    several_streams: float


@dataclass(frozen=True)
class Report:
    """Everything that is shown.

    Attributes:
        ceilings: by format and context.
        needs: of the articles' figures and of one given, in `need_format` at the first context.
        projections: from the nearest measurement, one per format that was measured.
        alarms: sentences about figures above 100%.
        notes: assumptions.
    """

    model: str
    card: Card
    batch: int
    kv_cache_dtype: str
    need_format: str
    ceilings: list[Ceiling]
    needs: list[Need]
    projections: list[Projection]
    alarms: list[str]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def report(
    model: str, config: ModelConfig, card: Card, *, contexts: Sequence[int] = CONTEXTS, batch: int = 1,
    kv_cache_dtype: str = "bf16", need_format: str = "fp8", measured_tok_s: float | None = None,
) -> Report:  # fmt: skip
    """Make the report.

    Args:
        model: its name, to find measurements of it.
        config: its geometry.
        card: from `telemetry.cards`.
        contexts: cached tokens per stream.
        batch: streams.
        kv_cache_dtype: of the cache.
        need_format: weight format in which the figures' needs are counted.
        measured_tok_s: a figure of the user's own, of `batch` streams, to hold against the ceiling.

    Raises:
        ConfigError: a number or a format is wrong.
    """
    check_whole("batch", batch, 1, 1)
    for context in contexts:
        check_whole("context", context, 1, 512)
    if need_format not in FORMATS:
        raise ConfigError(f"weight_format={need_format!r} must be one of {', '.join(FORMATS)}; try 'fp8'")
    if not contexts:
        raise ConfigError("contexts=() must name at least one; try 512")
    device = "cpu" if card.key == "cpu" else "cuda"
    costs = {f: forecast(config, f, kv_cache_dtype, engine_granularity(f, device)) for f in FORMATS}
    flops = costs["bf16"].weight_bytes(1)  # per token: 2 bytes a weight there, and 2 operations a weight everywhere
    ceilings = [_ceiling(card, f, costs[f], flops, batch, c, max(contexts)) for f in FORMATS for c in contexts]

    def best(streams: int) -> float:
        return _ceiling(card, need_format, costs[need_format], flops, streams, contexts[0], contexts[0]).tok_s

    needs = [Need(n, n / best(1), n / best(LADDER_STREAMS)) for n in LADDER]
    alarms = [
        f"{n.tok_s:g} tok/s would need {n.one_stream:.0%} of what {card.name} can read, as one stream in "
        f"{need_format}: that cannot be"
        for n in needs
        if n.one_stream > 1
    ]
    if measured_tok_s is not None and measured_tok_s > best(batch):
        alarms.append(
            f"the given {measured_tok_s:g} tok/s are {measured_tok_s / best(batch):.0%} of the ceiling in "
            f"{need_format} at batch {batch}: that cannot be; the tokens are over-counted, or model, format or card is "
            "another"
        )
    notes = [_bandwidth_note(card), f"projections: {ASSUMPTIONS}"]
    if card.tensor_tflops and "int4" not in card.tensor_tflops:
        notes.append("int4 is dequantized and multiplied at the speed of bf16")
    return Report(
        model, card, batch, kv_cache_dtype, need_format, ceilings, needs,
        _projections(model, card, costs, batch, contexts[0]), alarms, notes,
    )  # fmt: skip


def _ceiling(
    card: Card, weight_format: str, cost: StepCost, flops: int, batch: int, context: int, longest: int
) -> Ceiling:
    step_bytes = cost.step_bytes(batch, batch * context)
    memory_tok_s = batch * card.read_bytes_s / step_bytes
    rate = card.tensor_tflops.get(weight_format) or card.tensor_tflops.get("bf16")
    compute_tok_s = rate * 1e12 / flops if rate else float("inf")
    return Ceiling(
        weight_format=weight_format,
        stored_gb=cost.stored_bytes / 1e9,
        fits=cost.stored_bytes + batch * longest * cost.kv_token_bytes <= card.memory_bytes,
        context=context,
        step_gb=step_bytes / 1e9,
        tok_s=min(memory_tok_s, compute_tok_s),
        bound="memory" if memory_tok_s <= compute_tok_s else "arithmetic",
    )


def _projections(model: str, card: Card, costs: dict[str, StepCost], batch: int, context: int) -> list[Projection]:
    made, measured = [], results()
    for weight_format, cost in costs.items():
        step_bytes = cost.step_bytes(batch, batch * context)
        entry = nearest(measured, card.key == "cpu", model, weight_format, batch, step_bytes)
        if entry is not None and entry[1]["conditions"]["weight_format"] == weight_format:
            made.append(project(entry, card, model, step_bytes, batch))
    return made


def _bandwidth_note(card: Card) -> str:
    if card.measured:
        return f"{card.bandwidth_bytes_s / 1e9:.1f} GB/s, measured on this machine"
    return (
        f"{card.bandwidth_bytes_s / 1e9:.0f} GB/s by the data sheet, of which {READ_SHARE:.1%} are taken as readable, "
        "as measured on an H200 (docs/cards.md)"
    )


def tables(made: Report) -> list[Any]:
    """`rich` tables: ceilings, the articles' figures, projections."""
    from rich.table import Table
    from rich.text import Text

    streams = "1 stream" if made.batch == 1 else f"{made.batch} streams in total"
    top = Table(title=f"{made.model} on {made.card.name}, {streams}, {made.kv_cache_dtype} cache: the ceiling")
    for head in ("weights", "stored GB", "fits", "context", "read GB per step", "at most tok/s", "bound by"):
        top.add_column(head, justify="left" if head in ("weights", "fits", "bound by") else "right")
    for c in made.ceilings:
        fits = Text("yes") if c.fits else Text("no", style="bold red")
        cells = (f"{c.stored_gb:.2f}", fits, str(c.context), f"{c.step_gb:.3f}", f"{c.tok_s:.0f}", c.bound)
        top.add_row(c.weight_format, *cells)
    title = f"What the articles' figures would need of this ceiling ({made.need_format}, first context)"
    ladder = Table("tok/s (their claim)", "as one stream", f"as {LADDER_STREAMS} streams in total", title=title)
    for n in made.needs:
        shares = [Text(f"{s:.0%}", style="bold red" if s > 1 else "") for s in (n.one_stream, n.several_streams)]
        ladder.add_row(f"{n.tok_s:g}", *shares)
    shown = [top, ladder]
    if made.projections:
        heads = ("weights", "projected tok/s", "from", "measured tok/s", "on", "record")
        table = Table(*heads, title=f"PROJECTED to {made.card.name}, {streams}: not measured there")
        for p in made.projections:
            origin = f"{p.model} x{p.batch}" + ("" if p.same_model else " (another model)")
            middle = f"{p.tok_s:.0f} ({p.low_tok_s:.0f} to {p.high_tok_s:.0f})"
            table.add_row(p.weight_format, middle, origin, f"{p.measured_tok_s:.0f}", p.measured_on, p.source)
        shown.append(table)
    return shown
