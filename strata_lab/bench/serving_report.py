"""Show a bench: a table for the terminal, one self-contained page; both are functions of the records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from strata_lab.bench import page
from strata_lab.bench.svg import Column, columns, number

Rec = Mapping[str, Any]
HEADS = (
    "workload", "tok/s in total", "slowest to fastest", "tok/s per stream", "requests/s", "TTFT ms p50/p99",
    "TPOT ms p50/p99", "ITL ms p50/p99", "E2E ms p50/p99", "errors", "note",
)  # fmt: skip
FORMULAS = (
    ("tok/s in total", "all output tokens over the time from the first request to the last token"),
    ("tok/s per stream", "1 / TPOT of the median request: what one reader sees"),
    ("TTFT", "from when a request is (or with a rate: should have been) sent to its first token"),
    ("TPOT", "time after the first token over the tokens after it, per request"),
    ("ITL", "between two tokens; empty for a server whose pieces are not tokens"),
    ("percentiles", "nearest rank, of the run with the median rate"),
)


def _row(r: Rec) -> list[str]:
    m, s = r["metrics"], r["spread"]
    spread = f"{number(s['min'])} to {number(s['max'])} (n={s['runs']})" if s else ""
    return [
        label(r),
        _one(m.get("output_tok_s")),
        spread,
        _one(m.get("tok_s_per_stream")),
        _one(m.get("requests_s")),
        *(_pair(m.get(name)) for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")),
        str(m["errors"]),
        "; ".join(text for text in (_extra(m), _heat(r), r["note"]) if text),
    ]


def label(r: Rec) -> str:
    """What was measured, in a few words."""
    c = r["conditions"]
    how = f"{c['rate']:g}/s" if c["rate"] else f"x{c['batch']}"
    side = f"{c['side']} " if c.get("side") else "cold " if c.get("cold_starts") else ""
    return f"{side}{c['workload']} {c['prompt_tokens']}/{c['output_tokens']} {how}"


def _one(value: float | None) -> str:
    return "" if value is None else number(value)


def _pair(value: Mapping[str, float] | None) -> str:
    return "" if not value else f"{number(value['p50'])}/{number(value['p99'])}"


def _extra(m: Mapping[str, Any]) -> str:
    parts = []
    if m.get("ratio_to_a") is not None:
        parts.append(f"{m['ratio_to_a']:.2f}x of A, which drifted to {m['drift_of_a']:.2f}x")
    if m.get("load_s_each"):
        loads = m["load_s_each"]
        parts.append(f"{len(loads)} cold starts, loaded in {min(loads):.1f} to {max(loads):.1f} s")
    return "; ".join(parts)


def _heat(r: Rec) -> str:
    during = r["hardware"].get("during") or {}
    return ", ".join(during.get("throttle") or ())


def text_table(records: Sequence[Rec]) -> Any:
    """A `rich` table."""
    from rich.table import Table

    c = records[0]["conditions"]
    table = Table(title=f"{c['model']} at {c['target']}", title_justify="left")
    for head in HEADS:
        table.add_column(head, justify="left" if head in ("workload", "note") else "right")
    for r in records:
        table.add_row(*_row(r))
    return table


def html_page(records: Sequence[Rec]) -> str:
    """The page as text."""
    c = records[0]["conditions"]
    title = f"Bench: {c['model']} at {c['target']}"
    body = [f"<header><h1>{escape(title)}</h1>{page.facts(records[0])}</header>"]
    for name, key, unit in (
        ("All streams together", "output_tok_s", "tok/s in total"),
        ("One stream", "tok_s_per_stream", "tok/s per stream"),
    ):  # fmt: skip
        body.append(page.section(name, "", columns(name, unit, [_column(r, key) for r in records])))
    body.append(page.section("Every figure", "", page.table(HEADS, [_row(r) for r in records])))
    toggles = c.get("toggles") or {}
    if toggles:
        rows = [[name, *(str(r["conditions"]["toggles"][name]) for r in records)] for name in toggles]
        body.append(page.section("Settings", "", page.table(["toggle", *map(label, records)], rows)))
    formulas = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in FORMULAS)
    body.append(page.section("How it is computed", "", f"<dl>{formulas}</dl>"))
    return page.page(title, body)


def _column(r: Rec, key: str) -> Column:
    spread = (r["spread"] or {}) if key == "output_tok_s" else {}
    what, _, how = label(r).rpartition(" ")
    return Column(what, how, r["metrics"].get(key), spread.get("min"), spread.get("max"))


def comparison_table(pairs: Sequence[Mapping[str, Any]]) -> Any:
    """A `rich` table of ratios."""
    from rich.table import Table

    table = Table("workload", "figure", "a", "b", "b / a", title=f"a: {pairs[0]['a']}   b: {pairs[0]['b']}")
    for pair in pairs:
        for name, cell in pair.items():
            if isinstance(cell, Mapping) and cell["ratio"] is not None:
                cells = (number(cell["a"]), number(cell["b"]), f"{cell['ratio']:.2f}")
                table.add_row(pair["name"].removeprefix("bench/"), name.replace("_", " "), *cells)
        apart = "apart" if pair["spreads_are_apart"] else "overlapping: the difference in tok/s may be chance"
        table.add_row("", "spreads", "", "", apart)
    return table
