"""Show a climb: a text table for the terminal and one self-contained HTML page.

Both are functions of the records alone (`docs/results/climb.json`), so a page can be made again from a file. The page
loads nothing from anywhere and follows the reader's light or dark setting. It computes no figure of its own beyond
ratios of recorded ones; the articles' figures on it are labelled as their claim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from strata_lab.bench.climb_plan import SEVERAL, SINGLE
from strata_lab.bench.page import facts, page, section
from strata_lab.bench.svg import Column, columns, number
from strata_lab.config import toggles

HATCHED = "Hatched: taken back, as the table's notes say (slower than the stage before, or guesses of texts that loop)."
GHOST_LIMIT = 5  # times the tallest column up to which the roofline is drawn
ARTICLE_HARDWARE = "RTX 4090 48 GB"
# The source articles' climb, tok/s: their claim, with what each step switched on.
ARTICLE_CLIMB = (
    (58, "start", ""), (80, "CUDA graph", "fused"), (95, "PD split", ""), (130, "continuous", "batching, FP8 KV"),
    (150, "batch tokens", "512 to 768"), (240, "speculative", "decoding"),
)  # fmt: skip
# Article C's weight formats at batch 8, x over FP16 in total tokens per second: its claim, on the same card.
ARTICLE_FORMATS = {"fp8": 2.02, "int8": 1.86, "int4": 3.52}
FORMULAS = (
    ("decode tok/s", "tokens / seconds over the steps in which every stream decodes and nothing is prefilled"),
    ("prefill tok/s", "prompt tokens / time to first token (one request alone)"),
    ("total tok/s", "all output tokens / time from the first request to the last token, prefill included"),
    ("x before", "median of the runs with the toggle / median of the runs without it, in the same A/B/A"),
    ("x baseline", "median of the stage / median of the baseline"),
    ("x bf16", "median of a weight format / median of bf16 weights, all other toggles equal, in the same climb"),
    ("bytes per step", "all weights once + the KV cache of the context (experts: E (1 - (1 - k/E)^T) of E)"),
    ("roofline", "measured read bandwidth / bytes per step; % roofline = achieved bytes per second / bandwidth"),
)
FORMATS_NOTE = f"The article's are its claim, for another model on an {ARTICLE_HARDWARE}: nothing of it was measured."
Rec = Mapping[str, Any]


def split(records: Sequence[Rec]) -> tuple[list[Rec], list[Rec], list[Rec]]:
    """Single-stream stages, the direct check of everything, several-streams stages (with theirs, if there is one)."""
    single = [r for r in records if r["conditions"]["series"] == SINGLE]
    check = [r for r in single if _is_check(r)]
    several = [r for r in records if r["conditions"]["series"] == SEVERAL]
    return [r for r in single if r not in check], check, several


def _is_check(r: Rec) -> bool:
    return bool(r["conditions"]["stage"] == "everything")


def _main(records: Sequence[Rec]) -> tuple[list[Rec], list[Rec]]:
    """Stages and direct check of the series that the climb is about: one stream, unless only several were measured."""
    single, check, several = split(records)
    if single:
        return single, check
    return [r for r in several if not _is_check(r)], [r for r in several if _is_check(r)]


def text_table(records: Sequence[Rec]) -> Any:
    """A `rich` renderable: one table per series."""
    from rich.console import Group
    from rich.table import Table

    single, check, several = split(records)
    tables = []
    for title, rows in (("One stream", [*single, *check]), ("Several streams, all together", several)):
        if not rows:
            continue
        table = Table(title=f"{title}: {_conditions(rows[0])}", title_justify="left")
        heads = _heads(rows)
        for head in heads:
            table.add_column(head, justify="left" if head in ("stage", "note") else "right")
        for row in rows:
            table.add_row(*(_cell(row, head) for head in heads))
        tables.append(table)
    cold = [f"{text}\n" for text in map(_cold, records) if text]
    return Group(*tables, *cold, _hardware_line(records[0]))


def html_page(records: Sequence[Rec]) -> str:
    """The page as text."""
    single, check, several = split(records)
    stages, direct = _main(records)
    title = f"The climb: {stages[0]['conditions']['model']}"
    body = [
        f"<header><h1>{escape(title)}</h1><p class=lead>{_headline(stages, direct)}</p>{facts(records[0])}</header>"
    ]
    if single:
        chart = columns("decode", "tok/s", _columns(single, roofline=True))
        body.append(section("One stream, decode", _single_note(single), chart))
        note = "Reading the prompt is bound by arithmetic, not by memory, so it is its own chart."
        body.append(
            section("One stream, prefill", note, columns("prefill", "tok/s", _columns(single, "prefill_tok_s")))
        )
    if several:
        mix = "Not comparable with above." if single else HATCHED
        note = f"{_conditions(several[0])}; all streams added up, prefill included. {mix}"
        chart = columns("total", "tok/s", _columns([r for r in several if not _is_check(r)]))
        body.append(section("Several streams, in total", note, chart))
    body += [section("Cold starts", text, "") for text in map(_cold, records) if text]
    body += _formats(records)
    body.append(_articles(stages))
    if single:
        body.append(section("Every figure", _conditions(single[0]), _table([*single, *check])))
    if several:
        body.append(section("Every figure, several streams", _conditions(several[0]), _table(several)))
    formulas = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in FORMULAS)
    body.append(section("How it is computed", "", f"<dl>{formulas}</dl>"))
    return page(title, body)


# -- parts of the page ------------------------------------------------------------------------------------------


def _headline(stages: Sequence[Rec], check: Sequence[Rec]) -> str:
    first = stages[0]["metrics"]["output_tok_s"]
    last = next(r for r in reversed(stages) if r["conditions"]["kept"])["metrics"]["output_tok_s"]
    c = stages[0]["conditions"]
    what = "one stream" if c["series"] == SINGLE else f"{c['batch']} streams in total"
    text = f"<b>{number(first)}</b> to <b>{number(last)} tok/s</b>, {what}: <b>{last / first:.1f}x</b>"
    if check:
        text += f" ({check[0]['metrics']['speedup_vs_before']:.1f}x when both ends are measured side by side)"
    return text


def _single_note(single: Sequence[Rec]) -> str:
    dashed = "Dashed: what the memory allows at that stage's bytes per step (the roofline)."
    if not _roofline_fits(single):
        dashed = "The roofline is far above this chart; the table has the distance."
    return f"{_conditions(single[0])}. Whiskers: slowest and fastest run. {dashed} {HATCHED}"


def _roofline_fits(rows: Sequence[Rec]) -> bool:
    """Whether the roofline can be drawn without crushing the columns."""
    metrics = [r["metrics"] for r in rows if r["metrics"].get("mbu")]
    highest = max((m["output_tok_s"] / m["mbu"] for m in metrics), default=0.0)
    return highest <= GHOST_LIMIT * max((m["output_tok_s"] for m in metrics), default=0.0)


def _columns(rows: Sequence[Rec], metric: str = "output_tok_s", *, roofline: bool = False) -> list[Column]:
    made = []
    roofline = roofline and _roofline_fits(rows)
    for r in rows:
        label, _, sublabel = r["conditions"]["stage"].partition("=")
        value, mbu = r["metrics"].get(metric), r["metrics"].get("mbu")
        spread = r["spread"] if r["spread"] and metric == "output_tok_s" else {}
        detail = r["note"] if value is None else f"{number(value)} tok/s"
        if value is not None and spread:
            detail += f", {spread['runs']} runs {number(spread['min'])} to {number(spread['max'])}"
            detail += f", {mbu:.0%} of the roofline" if mbu else ""
            detail += "" if r["conditions"]["kept"] else f"; {r['note']}"
        made.append(
            Column(
                label=label.replace("_", " "),
                sublabel=sublabel if value is not None else f"{sublabel}: not here",
                value=value,
                low=spread.get("min"),
                high=spread.get("max"),
                ghost=value / mbu if roofline and mbu and value is not None else None,
                detail=detail,
                kind="measured" if r["conditions"]["kept"] else "lost",
            )
        )
    return made


def _articles(single: Sequence[Rec]) -> str:
    theirs = [Column(label, sub, value, kind="claim", detail="claim") for value, label, sub in ARTICLE_CLIMB]
    ours = [r for r in single if r["metrics"]]
    rows = []
    for i in range(max(len(ours), len(ARTICLE_CLIMB))):
        cells = ["", "", ""]
        if i < len(ours):
            m = ours[i]["metrics"]
            cells = [
                ours[i]["conditions"]["stage"] + ("" if ours[i]["conditions"]["kept"] else " (taken back)"),
                f"{m['speedup_vs_before']:.2f}x",
                f"{m['speedup_vs_baseline']:.2f}x",
            ]
        if i < len(ARTICLE_CLIMB):
            value, label, sub = ARTICLE_CLIMB[i]
            before = ARTICLE_CLIMB[max(0, i - 1)][0]
            cells += [f"{label} {sub}".strip(), f"{value / before:.2f}x", f"{value / ARTICLE_CLIMB[0][0]:.2f}x"]
        else:
            cells += ["", "", ""]
        rows.append("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>")
    table = (
        "<table class=ratios><thead><tr><th colspan=3>measured here</th><th colspan=3>articles' claim</th></tr>"
        "<tr><th>stage</th><th>x before</th><th>x baseline</th><th>stage</th><th>x before</th><th>x baseline</th></tr>"
        f"</thead><tbody>{''.join(rows)}</tbody></table>"
    )
    note = (
        f"The source articles' figures are their claim, for another model on an {ARTICLE_HARDWARE}. Nothing in this "
        "chart was measured here; compare ratios, not heights."
    )
    chart = columns("the articles' claim", "tok/s, claimed", theirs)
    return section(f"Beside it: the articles' climb, claimed on an {ARTICLE_HARDWARE}", note, chart + table)


def _formats(records: Sequence[Rec]) -> list[str]:
    """Article C's weight formats beside ours, where that workload was measured; a list of at most one section."""
    here = {r["conditions"]["weight_format"]: r for r in records if r["metrics"].get("ratio_to_bf16") is not None}
    if records[0]["conditions"].get("workload") != "C" or not here:
        return []
    rows = "".join(
        f"<tr><td>{name}</td><td>{_cell(here[name], 'x bf16') if name in here else ''}</td><td>{claim:.2f}</td></tr>"
        for name, claim in ARTICLE_FORMATS.items()
    )
    heads = "<tr><th>weights</th><th>x bf16, measured here</th><th>x FP16, article's claim</th></tr>"
    table = f"<table class=ratios><thead>{heads}</thead><tbody>{rows}</tbody></table>"
    note = f"Total tokens per second at batch {records[0]['conditions']['batch']}. {FORMATS_NOTE}"
    return [section("Weight formats", note, table)]


def _cold(r: Rec) -> str:
    """The cold starts as a sentence; empty for any other record."""
    if r["conditions"]["series"] != "cold starts":
        return ""
    m, s = r["metrics"], r["spread"]
    loads, firsts = m["load_s_each"], m["first_ttft_ms_each"]
    return (
        f"{s['runs']} cold starts ({r['note']}): loaded in {min(loads):.1f} to {max(loads):.1f} s, first token of the "
        f"first run after {min(firsts):.0f} to {max(firsts):.0f} ms; then {number(s['min'])} to "
        f"{number(s['max'])} tok/s"
    )


def _table(rows: Sequence[Rec]) -> str:
    """A row per record, its note in a row of its own: as a column it would push the figures off the page."""
    heads = [h for h in _heads(rows) if h != "note"]
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    body = ""
    for r in rows:
        body += "<tr>" + "".join(f"<td>{escape(_cell(r, h))}</td>" for h in heads) + "</tr>"
        if note := _cell(r, "note"):
            body += f"<tr class=note><td colspan={len(heads)}>{escape(note)}</td></tr>"
    return f"<table class=figures><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


# -- cells, shared by text and page -----------------------------------------------------------------------------


def _heads(rows: Sequence[Rec]) -> list[str]:
    single = rows[0]["conditions"]["series"] == SINGLE
    ratio = ["x bf16"] if any("ratio_to_bf16" in r["metrics"] for r in rows) else []
    loops = ["% looping"] if any("looping_tokens" in r["metrics"] for r in rows) else []
    rate = ["decode tok/s", "spread"] if single else ["total tok/s", "spread"]
    roof = ["% roofline", "read GB/s", "prefill tok/s"] if single else ["tok/s per stream"]
    return [
        "stage",
        *rate,
        "x before",
        "x baseline",
        *ratio,
        *roof,
        "TTFT ms",
        "TPOT ms",
        "ITL p99 ms",
        "weights GB",
        *loops,
        "lossless",
        "note",
    ]


def _cell(r: Rec, head: str) -> str:
    m, conditions, spread = r["metrics"], r["conditions"], r["spread"]
    if head == "stage":
        return conditions["stage"]
    if head == "note":
        return r["note"]
    if head == "lossless":
        lossless = {t.name: t.lossless for t in toggles()}.get(conditions["stage"].partition("=")[0])
        return {True: "yes", False: "no", None: ""}[lossless]
    if head == "spread":
        return f"{number(spread['min'])} to {number(spread['max'])} (n={spread['runs']})" if spread else ""
    key, form = _CELLS[head]
    return "" if m.get(key) is None else form.format(m[key])


_CELLS = {
    "decode tok/s": ("output_tok_s", "{:.1f}"),
    "total tok/s": ("output_tok_s", "{:.1f}"),
    "x before": ("speedup_vs_before", "{:.2f}"),
    "x bf16": ("ratio_to_bf16", "{:.2f}"),
    "x baseline": ("speedup_vs_baseline", "{:.2f}"),
    "% roofline": ("mbu", "{:.0%}"),
    "read GB/s": ("read_gb_s", "{:.1f}"),
    "prefill tok/s": ("prefill_tok_s", "{:.0f}"),
    "tok/s per stream": ("tok_s_per_stream", "{:.1f}"),
    "TTFT ms": ("ttft_ms", "{:.0f}"),
    "TPOT ms": ("tpot_ms", "{:.1f}"),
    "ITL p99 ms": ("itl_p99_ms", "{:.1f}"),
    "% looping": ("looping_tokens", "{:.0%}"),
    "weights GB": ("weight_gb", "{:.3f}"),
}


def _conditions(r: Rec) -> str:
    c = r["conditions"]
    article = ""
    if c.get("workload"):
        scale = c["scale"]
        shortened = "" if scale == 1.0 else f" shortened to {scale:g} of its length for this machine"
        article = f"workload {c['workload']} of the articles{shortened}, "
    return (
        f"{c['model']}, {article}{c['batch']} at a time, {c['prompt_tokens']} tokens in, up to {c['output_tokens']} "
        "out, greedy"
    )


def _hardware_line(r: Rec) -> str:
    hardware = r["hardware"]
    versions = ", ".join(f"{name} {version}" for name, version in r["versions"].items())
    return (
        f"{hardware.get('gpu') or hardware.get('cpu')}; {hardware['threads']} threads; load before "
        f"{hardware['load_average']}; {versions}; commit {r['commit']}; {r['date']}"
    )
