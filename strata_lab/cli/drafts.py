"""`strata train-draft`: parse, call, print (see `cli/__init__.py`)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from strata_lab.cli.options import given, recipe_flags, with_flags
from strata_lab.cli.terminal import AsJson, bar, plain_errors, show
from strata_lab.speculative.train.settings import Recipe

MIB = 1 << 20


@with_flags(recipe_flags())
@plain_errors
def train_draft(
    out: Annotated[Path, typer.Option(help="The new folder; it must not exist.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what an interrupted call left.")] = False,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Train a small model that guesses what the target says, for --speculative draft; Ctrl+C keeps what was learned."""
    chosen: dict[str, Any] = given(options)
    recipe = Recipe(**chosen | {"data": tuple(chosen.get("data", ()))})
    from strata_lab.speculative.train import recipe as training

    with bar() as progress:
        done = training.train_draft(recipe, out, resume=resume, progress=progress)
    if as_json:
        measured = {"before": done.before.as_dict(), "after": done.after.as_dict()}
        facts = {"folder": str(done.folder), "bytes": done.nbytes, "course": dataclasses.asdict(done.course)}
        typer.echo(json.dumps(facts | measured))
        return
    from rich.table import Table

    table = Table(
        "guess", "true before", "true", "tokens per step", title=f"{done.folder}, {done.nbytes / MIB:.1f} MiB"
    )
    rows = zip(done.before.by_position, done.after.by_position, done.after.tokens_per_step, strict=True)
    for place, (before, after, tokens) in enumerate(rows, 1):
        table.add_row(str(place), f"{before:.1%}", f"{after:.1%}", f"{tokens:.2f}")
    show(table)
    typer.echo(f"next: strata generate --model {recipe.target} --speculative draft --draft-model {done.folder} 'Hello'")
