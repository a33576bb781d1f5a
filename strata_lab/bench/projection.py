"""From a measured card to another one: what a figure in the results files would be there, between two assumptions.

A decode step takes the time of its bytes and some time that no byte explains (launches, waits, ramps). Which of the two
shrinks with a slower memory is not known, so a projection is a range between

    same share     the other card reaches the same part of its bandwidth   (the unexplained time grows with the bytes')
    same overhead  the other card has the same unexplained time            (its clocks, driver and host are as fast)

widened by the spread of the measurement. It is arithmetic on a measurement and never a measurement.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata_lab.bench.harness import REPOSITORY
from strata_lab.telemetry.cards import Card

ASSUMPTIONS = (
    "decode is bound by memory on both cards; between the same share of the bandwidth and the same time that no byte "
    "explains; kernels exist and are as good there"
)


@dataclass(frozen=True)
class Projection:
    """What a measured figure stands for on another card.

    Attributes:
        low_tok_s, high_tok_s: the range, all streams together.
        tok_s: its geometric middle.
        measured_tok_s: what was measured.
        measured_on: hardware of the measurement.
        model, weight_format, batch: its conditions.
        source: "file: record name".
        same_model: whether it is the model asked for; otherwise only its share of the bandwidth was taken over.
    """

    low_tok_s: float
    tok_s: float
    high_tok_s: float
    measured_tok_s: float
    measured_on: str
    model: str
    weight_format: str
    batch: int
    source: str
    same_model: bool


def results(folder: Path | None = None) -> list[tuple[str, dict[str, Any]]]:
    """(file name, record) of every decode measurement of the checkout that knows its bytes; none outside a checkout."""
    found = []
    for path in sorted((folder or REPOSITORY / "docs" / "results").glob("*.json")):
        records = json.loads(path.read_text(encoding="utf-8"))
        for r in records if isinstance(records, list) else ():
            m = r.get("metrics", {})
            if m.get("mbu") and m.get("step_gb") and m.get("output_tok_s") and r["conditions"].get("model"):
                found.append((path.name, r))
    return found


def nearest(
    records: Iterable[tuple[str, Mapping[str, Any]]], on_cpu: bool, model: str, weight_format: str, batch: int,
    step_bytes: float,
) -> tuple[str, Mapping[str, Any]] | None:  # fmt: skip
    """The measurement most like what is asked for: kind of device, then model, format, batch and bytes per step."""

    def distance(entry: tuple[str, Mapping[str, Any]]) -> tuple[Any, ...]:
        c, m = entry[1]["conditions"], entry[1]["metrics"]
        return (
            c["model"] != model,
            c["weight_format"] != weight_format,
            abs(math.log(c["batch"] / batch)),
            abs(math.log(m["step_gb"] * 1e9 / step_bytes)),
            -m["output_tok_s"],  # the best of equal ones
        )

    alike = [e for e in records if ("cpu" in e[1]["hardware"]) == on_cpu]
    return min(alike, key=distance, default=None)


def project(entry: tuple[str, Mapping[str, Any]], card: Card, model: str, step_bytes: float, batch: int) -> Projection:
    """Carry a measurement over to `card` for a step of `step_bytes` that makes `batch` tokens."""
    file, record = entry
    c, m, spread = record["conditions"], record["metrics"], record["spread"]
    measured_s = c["batch"] / m["output_tok_s"]
    overhead_s = measured_s * (1.0 - m["mbu"])
    floor_s = step_bytes / card.read_bytes_s
    ends = sorted((batch * m["mbu"] / floor_s, batch / (floor_s + overhead_s)))
    down, up = (spread["min"] / spread["median"], spread["max"] / spread["median"]) if spread else (1.0, 1.0)
    low, high = ends[0] * down, ends[1] * up
    hardware = record["hardware"]
    return Projection(
        low_tok_s=low,
        tok_s=math.sqrt(low * high),
        high_tok_s=min(high, batch / floor_s),
        measured_tok_s=m["output_tok_s"],
        measured_on=hardware.get("gpu") or hardware["cpu"].partition(" (avx2")[0],
        model=c["model"],
        weight_format=c["weight_format"],
        batch=c["batch"],
        source=f"{file}: {record['name']}",
        same_model=c["model"] == model,
    )
