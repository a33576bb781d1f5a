"""`strata roofline` and `strata memcheck`: arithmetic about a model and a card, before anything is loaded."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from strata_lab.cli.terminal import AsJson, plain_errors, show

ALARM = 1  # exit code: a figure that cannot be
CardOption = Annotated[
    str, typer.Option("--card", help="rtx4090-48g, rtx4090, rtx3090, rtx5090, a100, h100, h200, l4, or cpu (measured).")
]
ModelArgument = Annotated[str, typer.Argument(help="A known name, a preset, a .gguf file or a model folder.")]


def model_geometry(model: str) -> tuple[str, Any, str]:
    """(name, geometry, stored format) of a model, without reading its weights."""
    from strata_lab.models.loader import open_model

    opened = open_model(model)
    try:
        return model, opened.config, opened.stored_format
    finally:
        opened.close()


@plain_errors
def roofline(
    model: ModelArgument,
    card: CardOption = "rtx4090-48g",
    context: Annotated[list[int] | None, typer.Option(help="Cached tokens of a stream; repeatable.")] = None,
    batch: Annotated[int, typer.Option(help="Streams at the same time.")] = 1,
    kv_cache_dtype: Annotated[str, typer.Option(help="Format of the cache: bf16, fp8 or fp32.")] = "bf16",
    weight_format: Annotated[str, typer.Option(help="Format in which the articles' figures are judged.")] = "fp8",
    measured: Annotated[
        float | None, typer.Option(help="A figure of your own, tok/s of all streams, to hold against the ceiling.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Bytes per token, the ceiling of a card, what the articles' figures would need; exit code 1 above 100%."""
    from strata_lab.bench.roofline_report import CONTEXTS, report, tables
    from strata_lab.telemetry.cards import card as find_card

    chosen = find_card(card)
    name, config, _ = model_geometry(model)
    made = report(
        name, config, chosen, contexts=context or CONTEXTS, batch=batch, kv_cache_dtype=kv_cache_dtype,
        need_format=weight_format, measured_tok_s=measured,
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(made.as_dict(), ensure_ascii=False))
    else:
        for table in tables(made):
            show(table)
        for note in made.notes:
            typer.echo(f"note: {note}")
        if not made.projections:
            typer.echo("note: no results file has a measurement in one of these formats, so there is no projection")
        for alarm in made.alarms:
            typer.secho(f"ALARM: {alarm}", fg=typer.colors.RED, bold=True)
    if measured is not None and any(a.startswith("the given") for a in made.alarms):
        raise typer.Exit(ALARM)
