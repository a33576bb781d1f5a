"""The command line that measurements of the open page share (`page_cost.py`, `page_leak.py`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from strata_lab.bench.harness import Record, write_results
from strata_lab.bench.lab_page import why_no_browser
from strata_lab.config import DEFAULT_MODEL


def page_parser(script: str, description: str | None, name: str) -> argparse.ArgumentParser:
    """A parser with what all of them take; `name` is that of the results file."""
    parser = argparse.ArgumentParser(
        prog=script, description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="anything the engine loads")
    parser.add_argument("--name", default=name, help="results file")
    parser.add_argument("--results", help="folder of the results file (default: docs/results)")
    return parser


def measured(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    measure: Callable[[argparse.Namespace], list[Record]],
) -> int:
    """Measure, print the figures, write the results file; 2 where there is no browser."""
    options = parser.parse_args(arguments)
    if reason := why_no_browser():
        sys.stderr.write(f"the page cannot be opened: {reason}\n")
        return 2
    records = measure(options)
    for record in records:
        figures = ", ".join(
            f"{name} {value:.4g}" for name, value in record.metrics.items() if isinstance(value, int | float)
        )
        sys.stdout.write(f"{record.name:20} {figures}\n")
    write_results(options.name, records, options.results)
    return 0
