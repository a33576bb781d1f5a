"""Shows what `speculation.py` measured: a table and the bars, as functions of the records alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Rec = Mapping[str, Any]
FLOOR = 0.97  # net speed with the policy on, on any text at any batch size
COPIES = {"cpu": 1.3, "gpu": 2.0}  # net speed of a look-up on texts that copy, batch 1


def net_records(records: Sequence[Rec]) -> list[Rec]:
    """Those that say how fast it was."""
    return [r for r in records if "net" in r["metrics"]]


def by_workload(records: Sequence[Rec]) -> dict[tuple[str, str], dict[int, Rec]]:
    """(drafter, workload) to batch size to record, in the order of the records."""
    rows: dict[tuple[str, str], dict[int, Rec]] = {}
    for r in net_records(records):
        c = r["conditions"]
        rows.setdefault((c["drafter"], c["workload"]), {})[c["batch"]] = r
    return rows


def sizes(records: Sequence[Rec]) -> list[int]:
    """Batch sizes that were measured, ascending."""
    return sorted({r["conditions"]["batch"] for r in net_records(records)})


def acceptance(record: Rec) -> str:
    """Share of true guesses by place in the window: of those verified there."""
    m = record["metrics"]
    shares = zip(m["accepted_by_position"], m["drafted_by_position"], strict=True)
    return " ".join(f"{100 * a / d:.0f}" for a, d in shares) or "none"


def text_table(records: Sequence[Rec]) -> Any:
    """A `rich` table: net speed by batch size, and what came true of the guesses at the smallest."""
    from rich.table import Table

    batches = sizes(records)
    table = Table(
        title="tokens per second with drafts over those without, median of groups of requests", title_justify="left"
    )
    table.add_column("text", no_wrap=True)
    for batch in batches:
        table.add_column(f"x{batch}", justify="right")
    for head in ("tok/s alone", "tokens/step", "accepted by place, %", "steps with drafts"):
        table.add_column(head, justify="right")
    for (drafter, workload), cells in by_workload(records).items():
        first = cells[min(cells)]
        m = first["metrics"]
        table.add_row(
            f"{workload} ({drafter})",
            *(_cell(cells.get(batch)) for batch in batches),
            f"{m['plain_tok_s']:.0f} -> {m['output_tok_s']:.0f}",
            f"{m['tokens_per_step']:.2f}",
            acceptance(first),
            f"{m['drafted_steps']:.0%}",
        )
    return table


def _cell(record: Rec | None) -> str:
    if record is None:
        return ""
    return f"{record['metrics']['net']:.2f}{' loop' if record['metrics']['loops'] else ''}"


def verdict_lines(records: Sequence[Rec]) -> Iterator[str]:
    """One line per bar: what was asked, what came out, whether it is reached."""
    nets = net_records(records)
    if nets:
        gpu = "gpu" if "gpu" in nets[0]["hardware"] else "cpu"
        copying = [r["metrics"]["net"] for r in nets if r["conditions"]["copies"] and r["conditions"]["batch"] == 1]
        if copying:
            mean = math.prod(copying) ** (1 / len(copying))
            yield _verdict(f"texts that copy, alone: at least {COPIES[gpu]}", f"{mean:.2f}", mean >= COPIES[gpu])
        low = [r for r in nets if r["metrics"]["net"] < FLOOR]
        names = ", ".join(f"{_place(r)} {r['metrics']['net']:.3f}" for r in low)
        worst = min(r["metrics"]["net"] for r in nets)
        yield _verdict(
            f"nowhere below {FLOOR} ({len(nets)} of text and batch size)", names or f"lowest {worst:.3f}", not low
        )
        idle = [r["metrics"]["net"] for r in nets if not r["metrics"]["drafted_steps"]]
        if idle:
            found = f"{min(idle):.2f} to {max(idle):.2f}"
            yield f"beside   where no step had drafts ({len(idle)} of them; what looking costs, and noise): {found}"
        loops = [r for r in nets if r["conditions"]["loops"]]
        flagged = sum(r["metrics"]["loops"] for r in loops)
        others = sum(r["metrics"]["loops"] for r in nets if not r["conditions"]["loops"])
        if loops:
            texts = f"{flagged} of {sum(r['metrics']['texts'] for r in loops)} made to loop, {others} of the others"
            yield _verdict(
                "loops are flagged, and none is among the texts that count", texts, flagged > 0 and not others
            )
    checked = [r for r in records if r["name"].endswith("/greedy")]
    if checked:
        texts, different = (sum(r["metrics"][key] for r in checked) for key in ("texts", "different_texts"))
        yield _verdict("greedy texts are those without drafts", f"{texts - different} of {texts}", not different)


def _place(record: Rec) -> str:
    """Text and batch size, and whether anything was drafted there."""
    drafted = "" if record["metrics"]["drafted_steps"] else " without drafts"
    return f"{record['conditions']['workload']} x{record['conditions']['batch']}{drafted}"


def _verdict(bar: str, found: str, reached: bool) -> str:
    return f"{'reached' if reached else 'MISSED '}  {bar}: {found}"
