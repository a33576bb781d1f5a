"""Tables of results for documents beside the README: records in, Markdown out. `readme_table.py` puts them there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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


def long_context_table(records: Sequence[Rec]) -> str:
    """What a window costs on two texts, with positions kept and rotated; and what a choice of pages costs."""
    c, m = records[0]["conditions"], records[0]["metrics"]
    head = (
        f"{c['model']}, texts of {m['evaluation_tokens'] + 1} and {m['unseen_tokens'] + 1} tokens, perplexity "
        f"{m['evaluation_reference']:.2f} and {m['unseen_reference']:.2f} with full attention:"
    )
    lines = [head, "", "| sinks, window, or pages | perplexity | KL |", "|---|---|---|"]
    for r in records:
        m = r["metrics"]
        lines.append(
            f"| {_long_context_row(r)} | {m['evaluation_perplexity']:.2f}, {m['unseen_perplexity']:.2f} | "
            f"{m['evaluation_kl']:.3f}, {m['unseen_kl']:.3f} |"
        )
    return "\n".join(lines)


def _long_context_row(r: Rec) -> str:
    c = r["conditions"]
    if "sparse_pages" in c:
        return f"{c['sparse_pages']} pages of {c['block_size']}"
    return f"{c['kv_sinks']}, {c['kv_window']}" + (" rotated" if r["name"].endswith(":rotated") else "")


def scheduling_table(records: Sequence[Rec]) -> str:
    """Every bar of the scheduling benchmark with what was measured."""
    lines = ["| what | measured | at most | kept |", "|---|---:|---:|---|"]
    for r in records:
        part, m = r["name"].partition("/")[2], r["metrics"]
        for key in (key for key in m if key.startswith(BAR)):
            name = key.removeprefix(BAR)
            kept = "yes" if m[name] <= m[key] else "no"
            lines.append(f"| {AFTER.get(name, PARTS[part])} | {m[name]:.2f} | {m[key]:g} | {kept} |")
    return "\n".join(lines)
