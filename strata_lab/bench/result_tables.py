"""Tables of results for the documents: records in, Markdown out, and the record whose conditions hold for the table.

`readme_table.py` puts them there; those of GPUs are `gpu_tables.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strata_lab.bench.speculation_report import acceptance, by_workload, net_records, sizes, verdict_lines

Rec = Mapping[str, Any]
PARTS = {  # of `overload.py`: what a reader wants to know of each
    "storm": "five times the load: median latency of what is taken, over that at capacity",
    "urgent": "urgent requests among batch work: p95 of the time to first token, over that in an idle engine",
    "long": "a long prompt arrives: p99 gap of running streams with `pd_split`, over that without",
    "turn": "second turn of a conversation: time to first token, over that of the first",
    "blocks": "a block given out and taken back, microseconds",
}
AFTER = {"recovery_s": "the same storm, after its end: seconds until a first token takes no more than twice its time"}
BAR = "bar_"


def spread(record: Rec) -> str:
    """Slowest and fastest run and how many there were."""
    s = record["spread"]
    return f"{s['min']:.1f} to {s['max']:.1f} (n={s['runs']})" if s else ""


def long_context_table(records: Sequence[Rec]) -> tuple[str, Rec]:
    """What a window costs on two texts, with positions kept and rotated; and a record whose conditions hold for it."""
    windows = [r for r in records if "kv_window" in r["conditions"]]

    def row(r: Rec) -> str:
        c = r["conditions"]
        return f"{c['kv_sinks']}, {c['kv_window']}" + (" rotated" if r["name"].endswith(":rotated") else "")

    return _quality_table(windows, "sinks, window", row), windows[0]


def pages_table(records: Sequence[Rec]) -> tuple[str, Rec]:
    """What a choice of blocks costs on two texts."""
    pages = [r for r in records if "sparse_pages" in r["conditions"]]
    size = pages[0]["conditions"]["block_size"]
    return _quality_table(pages, f"blocks of {size}", lambda r: str(r["conditions"]["sparse_pages"])), pages[0]


def _quality_table(records: Sequence[Rec], what: str, name: Callable[[Rec], str]) -> str:
    c, m = records[0]["conditions"], records[0]["metrics"]
    head = (
        f"{c['model']}, texts of {m['evaluation_tokens'] + 1} and {m['unseen_tokens'] + 1} tokens, perplexity "
        f"{m['evaluation_reference']:.2f} and {m['unseen_reference']:.2f} with full attention:"
    )
    lines = [head, "", f"| {what} | perplexity | KL |", "|---|---|---|"]
    for r in records:
        m = r["metrics"]
        lines.append(
            f"| {name(r)} | {m['evaluation_perplexity']:.2f}, {m['unseen_perplexity']:.2f} | "
            f"{m['evaluation_kl']:.3f}, {m['unseen_kl']:.3f} |"
        )
    return "\n".join(lines)


def long_context_speed_table(records: Sequence[Rec]) -> tuple[str, Rec]:
    """A decode step behind a long prompt, with all of it, windows, and a choice of blocks."""
    c = records[0]["conditions"]
    lines = [f"{c['model']} behind {c['context']} tokens, KV in {c['kv_cache_dtype']}, batch 1:", "",
             "| attended | ms a step | MB read | blocks held |", "|---|---:|---:|---:|"]  # fmt: skip
    for r in records:
        m = r["metrics"]
        what = r["name"].partition("/")[2].replace("/", " ")
        lines.append(f"| {what} | {m['step_ms']:.1f} | {m['read_bytes_per_token'] / 1e6:.0f} | {m['kv_blocks_held']} |")
    return "\n".join(lines), records[0]


def scheduling_table(records: Sequence[Rec]) -> tuple[str, Rec]:
    """Every bar of the scheduling benchmark with what was measured."""
    lines = ["| what | measured | at most | kept |", "|---|---:|---:|---|"]
    for r in records:
        part, m = r["name"].partition("/")[2], r["metrics"]
        for key in (key for key in m if key.startswith(BAR)):
            name = key.removeprefix(BAR)
            kept = "yes" if m[name] <= m[key] else "no"
            lines.append(f"| {AFTER.get(name, PARTS[part])} | {m[name]:.2f} | {m[key]:g} | {kept} |")
    return "\n".join(lines), records[0]


def http_table(records: Sequence[Rec]) -> tuple[str, Rec]:
    """What HTTP costs by streams, and how long /health takes while many run."""
    heads = ["streams", "engine, tok/s", "over HTTP", "share of the engine (95% interval)", "share by steps"]
    heads += ["server, us a token", "client, us a token"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---:|" * len(heads)]
    for r in records:
        m = r["metrics"]
        if "engine_tok_s" in m:
            lines.append(
                f"| {r['conditions']['batch']} | {m['engine_tok_s']:.0f} | {m['output_tok_s']:.0f} | "
                f"{m['share_of_engine']:.1%} ({m['share_low']:.1%} to {m['share_high']:.1%}) | {m['step_share']:.1%} | "
                f"{m['server_cpu_us_per_token']:.0f} | {m['client_cpu_us_per_token']:.0f} |"
            )
        else:
            health = (
                f"While {r['conditions']['batch']} streams run, `/health` answers within {m['health_p99_ms']:.0f} ms "
                f"at the 99th percentile and {m['health_max_ms']:.0f} ms at most ({m['num_health']} asked)."
            )
            lines += ["", health]
    return "\n".join(lines), records[0]


def page_table(records: Sequence[Rec]) -> tuple[str, Rec]:
    """What the open page costs the engine, how soon a switch takes effect, and how long the start takes."""
    by_name = {r["name"].partition("/")[2]: r for r in records}
    lines = ["| what | measured | bar |", "|---|---:|---:|"]
    sides = {
        "pump": "widgets and pump, no page",
        "folded": "the page as it opens in a browser",
        "page": "every panel open in a browser",
    }
    for side, what in sides.items():
        r = by_name[side]
        m, s = r["metrics"], r["spread"]
        lines.append(
            f"| speed with {what}, over that without | {m['share_of_headless']:.1%} ({s['min']:.1%} to {s['max']:.1%}, "
            f"n={s['runs']}) | 95% |"
        )
    m = by_name["switch"]["metrics"]
    found = f"{m['effect_p50_ms']:.0f} and {m['effect_p95_ms']:.0f} ms"
    lines.append(f"| from a click to its effect while 8 streams run, median and 95th percentile | {found} | 1000 ms |")
    took_s = by_name["start"]["metrics"]["first_token_s"]
    lines.append(f"| from `make lab` to the first text on the page | {took_s:.0f} s | 40 s |")
    return "\n".join(lines), records[0]


def leak_table(records: Sequence[Rec]) -> tuple[str, Rec]:
    """Readings of the watched page: first, last, and what they change by in a minute."""
    m = records[0]["metrics"]
    names = [key.removeprefix("first_") for key in m if key.startswith("first_")]
    head = f"{m['minutes']:.0f} minutes, {m['output_tokens']} tokens, {m['num_readings']} readings after a collection:"
    lines = [head, "", "| | first | last | a minute |", "|---|---:|---:|---:|"]
    for name in names:
        first, last, change = m[f"first_{name}"], m[f"last_{name}"], m[f"{name}_per_minute"]
        form = ".1f" if name.endswith("_mb") else ".0f"
        lines.append(f"| {name.replace('_', ' ')} | {first:{form}} | {last:{form}} | {change:+.2f} |")
    return "\n".join(lines), records[0]


def quality_table(records: Sequence[Rec]) -> tuple[str, Rec]:
    """What each format and method costs in perplexity and KL, on two texts."""
    lines = ["| method | format | perplexity, our text | perplexity, unseen text | mean KL, unseen | top-1, unseen |"]
    lines.append("|---|---|---:|---:|---:|---:|")
    for r in records:
        c, m = r["conditions"], r["metrics"]
        lines.append(
            f"| {c['method']} | {c['weights']} {c['granularity']} | {m['evaluation_relative']:+.2%} | "
            f"{m['unseen_relative']:+.2%} | {m['unseen_kl']:.4f} | {m['unseen_top1']:.1%} |"
        )
    m, model = records[0]["metrics"], records[0]["conditions"]["model"]
    note = (
        f"{model} beside what its file stores (which is 4 bits already), {m['evaluation_tokens']} tokens of the text "
        f"on which the methods were developed and {m['unseen_tokens']} of another; embedding and head as stored. "
        '"kv" rounds keys and values only.'
    )
    return "\n".join([note, "", *lines]), records[0]


def speculation_bars(records: Sequence[Rec]) -> tuple[str, Rec]:
    """What was asked of drafts and what came out."""
    return "\n".join(f"- {line}" for line in verdict_lines(records)), net_records(records)[0]


def speculation_table(records: Sequence[Rec]) -> tuple[str, Rec]:
    """Speed with drafts over that without, by text and batch size, and the bars."""
    batches = sizes(records)
    heads = [
        "text",
        "task",
        "tok/s alone",
        *(f"x{batch}" for batch in batches),
        "tokens per step",
        "accepted by place, %",
    ]
    lines = ["| " + " | ".join(heads) + " |", "|---|---|" + "---:|" * (len(heads) - 2)]
    drafters = dict.fromkeys(drafter for drafter, _ in by_workload(records))
    for (drafter, workload), cells in by_workload(records).items():
        label = workload if len(drafters) == 1 else f"{workload}, {drafter}"
        first = cells[min(cells)]
        m = first["metrics"]
        nets = [f"{cells[batch]['metrics']['net']:.2f}" if batch in cells else "" for batch in batches]
        figures = [f"{m['plain_tok_s']:.0f} to {m['output_tok_s']:.0f}", *nets, f"{m['tokens_per_step']:.2f}"]
        lines.append("| " + " | ".join([label, first["conditions"]["task"], *figures, acceptance(first)]) + " |")
    c = next(iter(by_workload(records).values()))[batches[0]]["conditions"]
    note = (
        f"{c['model']}, weights in {c['weight_format']}, drafts: {', '.join(drafters)}, up to {c['num_draft_tokens']} "
        "per step as the policy sees fit; tokens per second over those of the same texts without drafts, so many "
        "together. Behind a place that is named: where its figure lies with 95%."
    )
    bars, first = speculation_bars(records)
    return "\n".join([note, "", *lines, "", bars]), first
