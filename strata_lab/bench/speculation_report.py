"""Shows what `speculation.py` measured: a table and the bars, as functions of the records alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from strata_lab.bench.drafted_texts import TEXT_KINDS

Rec = Mapping[str, Any]
FLOOR = 0.97  # net speed with the policy on, on any text at any batch size
COPIES = {"cpu": 1.3, "gpu": 2.0}  # net speed of a look-up on texts that copy, batch 1


def net_records(records: Sequence[Rec]) -> list[Rec]:
    """Those that say how fast it was, in the order of the kinds of text and ascending batch size."""
    names = [kind.name for kind in TEXT_KINDS]
    nets = [r for r in records if "net" in r["metrics"]]
    return sorted(nets, key=lambda r: (names.index(r["conditions"]["workload"]), r["conditions"]["batch"]))


def by_workload(records: Sequence[Rec]) -> dict[tuple[str, str], dict[int, Rec]]:
    """(drafter, workload) to batch size to record, in the order of `net_records`."""
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
        title="tokens per second with drafts over those without, and where they lie with 95%", title_justify="left"
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
    return f"{record['metrics']['net']:.2f} ({interval_text(record)}){' loop' if record['metrics']['loops'] else ''}"


def interval_text(record: Rec) -> str:
    """Where the net speed lies."""
    low, high = intervals(record)[0]
    return f"{low:.2f} to {high:.2f}"


def intervals(record: Rec) -> tuple[tuple[float, float], tuple[float, float]]:
    """Where the net speed lies, and that of the median pair."""
    return record["metrics"]["net_interval"], record["metrics"]["net_of_median_pair_interval"]


def against_floor(record: Rec) -> str:
    """Whether a place is surely below the floor, surely not, or neither: "missed", "reached" or "undecided".

    Both count: all tokens over all time, and the median pair, of which a few long disturbances are no part.
    """
    both = intervals(record)
    if any(high < FLOOR for _, high in both):
        return "missed"
    return "reached" if all(low >= FLOOR for low, _ in both) else "undecided"


def verdict_lines(records: Sequence[Rec]) -> Iterator[str]:
    """One line per bar: what was asked, what came out, whether it is reached."""
    nets = net_records(records)
    if nets:
        gpu = "gpu" if "gpu" in nets[0]["hardware"] else "cpu"
        copying = [r["metrics"]["net"] for r in nets if r["conditions"]["copies"] and r["conditions"]["batch"] == 1]
        if copying:
            mean = math.prod(copying) ** (1 / len(copying))
            yield _verdict(f"texts that copy, alone, {COPIES[gpu]} times", f"{mean:.2f}", mean >= COPIES[gpu])
        found: dict[str, list[Rec]] = {"missed": [], "undecided": [], "reached": []}
        for r in nets:
            found[against_floor(r)].append(r)
        counts = f"{len(found['reached'])} of {len(nets)} places surely"
        missed = ", ".join(map(_place, found["missed"]))
        sure = "" if missed or not found["undecided"] else "not shown for all; "
        yield _verdict(
            f"everywhere at least {FLOOR} times", f"{sure}{counts}" + (f"; below: {missed}" if missed else ""),
            not found["missed"] and not found["undecided"],
        )  # fmt: skip
        if found["undecided"]:
            yield f"undecided  at {FLOOR}: {', '.join(map(_place, found['undecided']))}"
        idle = [r["metrics"]["net"] for r in nets if not r["metrics"]["drafted_steps"]]
        if idle:
            yield (
                f"beside   where no step had drafts ({len(idle)} of them; what the policy costs, and noise): "
                f"{min(idle):.3f} to {max(idle):.3f}"
            )
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
    """Text and batch size, how fast it was, and whether anything was drafted there."""
    drafted = "" if record["metrics"]["drafted_steps"] else ", no drafts"
    name = f"{record['conditions']['workload']} x{record['conditions']['batch']}"
    return f"{name} {record['metrics']['net']:.3f} ({interval_text(record)}{drafted})"


def _verdict(bar: str, found: str, reached: bool) -> str:
    return f"{'reached' if reached else 'MISSED '}  {bar}: {found}"
