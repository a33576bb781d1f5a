"""`strata roofline` and `strata memcheck`: arithmetic about a model and a card, before anything is loaded."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from strata_lab.cli.options import config_flags, given, toggle_flags, with_flags
from strata_lab.cli.terminal import AsJson, plain_errors, show
from strata_lab.config import engine_config
from strata_lab.settings import ConfigError

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


@with_flags(toggle_flags(), config_flags(skip=["seed", "device", "capture"]))
@plain_errors
def memcheck(
    model: ModelArgument,
    card: Annotated[
        str | None,
        typer.Option("--card", help="A card as in `strata roofline`, cpu, or this machine's device by default."),
    ] = None,
    memory_gb: Annotated[float | None, typer.Option(help="Memory of the device in GiB, instead of a card's.")] = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Forecast memory before loading; exit code 1 where it does not fit, with the first setting to change."""
    from strata_lab.models.shipped import draft_for
    from strata_lab.speculative.forecast import draft_memory
    from strata_lab.telemetry.memcheck import GIB, Plan, check, rows

    wish = engine_config(model, **given(options))
    device, name, memory_bytes = _device(card, memory_gb)
    _, config, stored = model_geometry(model)
    toggled = wish.optimizations.as_dict()
    swap_gib = getattr(wish, "swap_space", None) or 0.0  # a setting only of engines that can swap
    draft = wish.draft_model or draft_for(model)
    drafted = 0
    if toggled["speculative"] == "draft" and draft is not None:
        drafted = draft_memory(
            draft, device, max_num_seqs=toggled["max_num_seqs"], block_size=wish.block_size,
            max_model_len=toggled["max_model_len"] or config.max_position,
        ).total_bytes  # fmt: skip
    plan = Plan(
        config=config,
        device=device,
        memory_bytes=memory_bytes,
        weight_format=toggled["weight_format"] or stored,
        kv_cache_dtype=toggled["kv_cache_dtype"] or ("bf16" if device == "cuda" else "fp32"),
        block_size=wish.block_size,
        num_kv_blocks=wish.num_kv_blocks,
        captures=toggled["cuda_graph"],
        draft_bytes=drafted,
        swap_bytes=int(swap_gib * GIB) if toggled.get("preemption") == "swap" else 0,
        **{
            n: toggled[n] for n in ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "max_model_len")
        },
    )
    made = check(plan)
    if as_json:
        typer.echo(json.dumps({"device": device, "card": name} | made.as_dict(), ensure_ascii=False))
    else:
        from rich.table import Table

        table = Table("part", "GiB", "", title=f"{model} as {plan.weight_format} on {name}, nothing is loaded")
        for part, size, text in rows(made):
            table.add_row(part, f"{size / GIB:.2f}", text)
        show(table)
        typer.echo(f"{made.verdict}: {made.reason}")
        if made.setting:
            flag = made.setting if made.setting == "model" else f"--{made.setting.replace('_', '-')}"
            when = "change first" if made.verdict == "too small" else "change first, if requests get that long"
            typer.echo(f"{when}: {flag} {made.value}")
    if made.verdict == "too small":
        raise typer.Exit(ALARM)


def _device(card: str | None, memory_gb: float | None) -> tuple[str, str, int]:
    """Kind of device, its name and its memory: a card of the table, or what is here."""
    from strata_lab.telemetry import cards, hardware

    here = hardware.gpus() if card is None else []
    if card not in (None, "cpu"):
        found = cards.card(str(card))
        device, name, memory = "cuda", found.name, found.memory_bytes
    elif here:
        device, name, memory = "cuda", here[0].name, here[0].memory_bytes
    else:
        cpu = hardware.cpu_info()
        device, name, memory = "cpu", cpu.name, cpu.available_memory_bytes or cpu.memory_bytes or 0
    if memory_gb is not None:
        if not 0 < memory_gb < 1e6:
            raise ConfigError(f"memory_gb={memory_gb:g} must be above 0, in GiB; try 48")
        memory = int(memory_gb * (1 << 30))
    return device, name, memory
