"""What the commands of `strata` share: errors as one line, progress bars, tables."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from strata_lab.sampling_params import RequestError
from strata_lab.settings import ConfigError

FILE_WIDTH = 220  # columns of a table that goes into a file
USER_ERROR = 2  # exit code: like click's own usage errors
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def plain_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: mistakes of the user become one line on standard error and exit code 2."""

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except ValueError as error:
            if not isinstance(error, _user_errors()):
                raise
            fail(str(error))

    return guarded


def _user_errors() -> tuple[type[ValueError], ...]:
    from strata_lab.models.errors import CheckpointError  # here because it is not needed when all goes well
    from strata_lab.tokenizer import TokenizerError

    return ConfigError, RequestError, CheckpointError, TokenizerError


def fail(message: str, code: int = USER_ERROR) -> None:
    """Leave with one line on standard error."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)


@contextmanager
def bar() -> Iterator[Callable[[str, float], None]]:
    """A progress bar on standard error: call it with what is being done and the fraction done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:44}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)  # in a notebook's kernel, which takes no bar, a command is silent until it is done
    with Progress(*columns, console=console, transient=True, disable=console.is_jupyter) as progress:
        task = progress.add_task("loading", total=1.0)
        yield lambda text, fraction: progress.update(task, description=text, completed=fraction)


def show(renderable: Any) -> None:
    """Print a table; wide and without padding when standard output is no terminal, so that a file gets whole lines."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console().print(renderable)
        return
    console = Console(width=FILE_WIDTH, color_system=None, force_jupyter=False)
    with console.capture() as captured:
        console.print(renderable)
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def publish(records: list[Any], html: Path, results: Path, report: Any, as_json: bool) -> None:
    """Records of a benchmark as a page, a results file, and a table or JSON on standard output.

    `report`: a module with `html_page` and `text_table`, such as `bench/climb_report.py`.
    """
    from strata_lab.bench.harness import write_results

    data = [r.as_dict() for r in records]
    path = write_results(results.stem, records, results.parent)
    html.parent.mkdir(parents=True, exist_ok=True)
    html.write_text(report.html_page(data), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(data, ensure_ascii=False))
    else:
        show(report.text_table(data))
    typer.echo(f"page: {html}\nrecords: {path}", err=True)


def print_checks(checks: list[Any]) -> None:
    """Lines with `verdict`, `name`, `value`, `fix` and maybe `section` and `cause` as a table."""
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    table = Table(box=None, pad_edge=False)
    for head in ("", "check", "value", "cause: fix"):
        table.add_column(head, overflow="fold")
    section = ""
    for c in checks:
        if getattr(c, "section", "") != section:
            section = c.section
            table.add_row("", Text(section, style="bold"))
        table.add_row(Text(c.verdict, style=colours[c.verdict]), f"  {c.name}", Text(c.value), Text(_cause_and_fix(c)))
    show(table)


def _cause_and_fix(check: Any) -> str:
    return ": ".join(text for text in (getattr(check, "cause", ""), check.fix) if text)
