"""Quality against speed, from results files that were measured; nothing is measured or guessed here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strata_lab.events import Event
from strata_lab.workbench.details import Context
from strata_widgets import QualityChart

RESULTS = Path(__file__).resolve().parent.parent.parent / "docs" / "results"  # of a checkout; an installation has none
NOTHING = (
    "No results file with both was found. Measure quality with `python -m strata_lab.bench.quality` and speed with "
    "`make climb`."
)
Rec = Mapping[str, Any]


def frontier(climb: Sequence[Rec], quality: Sequence[Rec]) -> dict[str, Any]:
    """The traits of `QualityChart`: each weight format that was measured for speed and for quality, same model.

    Speed is the single stream of the climb; quality is the mean KL divergence to the checkpoint's own logits on text
    that no calibration saw, of plain rounding in the variant that the climb's engine makes (groups of 32).
    """
    speeds = {
        r["conditions"]["weight_format"]: r
        for r in climb
        if r["conditions"]["series"] == "single stream" and r["conditions"]["stage"].startswith("weight_format")
    }
    points = []
    for r in quality:
        c = r["conditions"]
        speed = speeds.get(c.get("weights"))
        if (
            speed is None
            or c["method"] != "rtn"
            or c["granularity"] != "group32"
            or c["model"] != speed["conditions"]["model"]
        ):
            continue
        tok_s, loss = speed["metrics"]["output_tok_s"], r["metrics"]["unseen_kl"]
        tip = f"{tok_s:.1f} tok/s ({speed['script']}, {speed['date'][:10]}); "
        tip += f"{loss:.4f} nats ({r['script']}, {r['date'][:10]})"
        points.append({"label": c["weights"], "x": tok_s, "y": loss, "tip": tip})
    points += _source(climb)
    for point in points:
        point["best"] = not any(_beats(other, point) for other in points)
    note = "From climb_cpu.json and quality_cpu.json in docs/results: formats for which both were measured."
    labels = {"x_label": "tok/s, one stream", "y_label": "KL to the checkpoint, nats per token"}
    return {"points": points, **labels, "note": note if points else NOTHING}


def _source(climb: Sequence[Rec]) -> list[dict[str, Any]]:
    """The checkpoint's own format just before the first other one: it loses nothing by definition."""
    single = [r for r in climb if r["conditions"]["series"] == "single stream" and r["conditions"]["kept"]]
    plain = [r for r in single if r["conditions"]["weight_format"] == "bf16" and r["metrics"]]
    if not plain:
        return []
    best = max(plain, key=lambda r: r["metrics"]["output_tok_s"])
    tok_s = best["metrics"]["output_tok_s"]
    tip = f"{tok_s:.1f} tok/s ({best['script']}, {best['date'][:10]}); 0 by definition, it is the checkpoint"
    return [{"label": "bf16", "x": tok_s, "y": 0.0, "tip": tip}]


def _beats(one: Rec, other: Rec) -> bool:
    return one["x"] >= other["x"] and one["y"] <= other["y"] and (one["x"] > other["x"] or one["y"] < other["y"])


def _read(name: str) -> list[Rec]:
    try:
        records: list[Rec] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    except OSError:
        return []
    return records


class QualityDetail:
    """Read once, when it is first opened."""

    name, title, tip = "quality", "Quality and speed", "What each weight format costs in quality and gives in speed."

    def __init__(self) -> None:
        self.chart = QualityChart(note=NOTHING)
        self.widgets = (self.chart,)
        self._shown = False

    def take(self, event: Event) -> None:
        """Nothing here comes from events."""

    def push(self, context: Context, now_s: float) -> None:
        """Send the points, the first time."""
        if not self._shown:
            self._shown = True
            self.chart.push(**frontier(_read("climb_cpu.json"), _read("quality_cpu.json")))
