"""What every report of a benchmark has: one self-contained HTML page, its sections, the facts of a record.

A page loads nothing from anywhere and follows the reader's light or dark setting. It knows no benchmark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from strata_lab.bench.svg import HATCH

STYLE = Path(__file__).with_name("report.css")


def page(title: str, body: Sequence[str]) -> str:
    """The page as text; `body` is HTML."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{escape(title)}</title>\n<style>\n{STYLE.read_text(encoding='utf-8')}</style>"
    content = "\n".join(body)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{HATCH}<main>\n{content}\n</main></body></html>\n'
    )


def section(title: str, note: str, content: str) -> str:
    """A section with a heading; `content` is HTML."""
    paragraph = f"<p>{escape(note)}</p>" if note else ""
    return f"<section><h2>{escape(title)}</h2>{paragraph}<div class=scroll>{content}</div></section>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts."""
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def facts(record: Mapping[str, Any]) -> str:
    """Where, when and with what a record was measured."""
    hardware, versions = record["hardware"], record["versions"]
    facts = {
        "hardware": hardware.get("gpu") or hardware.get("cpu"),
        "memory": f"{hardware['memory_gb']} GB",
        "CPU threads": hardware["threads"],
        "load before": hardware["load_average"],
        "driver": hardware["driver"],
        "clocks": hardware["clocks"] and ", ".join(f"{k} {v}" for k, v in hardware["clocks"].items() if v is not None),
        "temperature": hardware["temperature"] and f"{hardware['temperature']} C",
        "date": record["date"],
        "commit": record["commit"],
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "again with": record["script"],
    }
    cells = "".join(f"<div><dt>{k}</dt><dd>{escape(str(v))}</dd></div>" for k, v in facts.items() if v is not None)
    return f"<dl class=facts>{cells}</dl>"
