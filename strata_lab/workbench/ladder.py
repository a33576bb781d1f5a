"""The climb as it is toggled: speed of every setting that was in force, over clean seconds. No engine, no widget.

A second counts when its sample covers no change, when the number of streams was the same in all of it, and only against
seconds with as many streams. A setting that comes back adds to its own column: switching on, off and on again is A/B/A.
"""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata_lab.bench.climb_report import ARTICLE_CLIMB, ARTICLE_HARDWARE
from strata_lab.workbench.meter import WINDOW_S, Sample

MIN_SECONDS = 2  # before a column is shown
MAX_STAGES = 8
KEPT_SECONDS = 600  # of a stage and a number of streams; a page may stay open for days
SETTLE_S = WINDOW_S + 0.2  # after a change, until a sample is all its own
CLAIMS = [{"label": label, "detail": f"{label} {sub}".strip(), "value": value} for value, label, sub in ARTICLE_CLIMB]
CLAIMS_NOTE = f"Claimed for another model on an {ARTICLE_HARDWARE}. Nothing of it was measured here: compare ratios."


@dataclass
class Stage:
    """One setting.

    Attributes:
        label: the change that led to it.
        seconds: number of streams to the tok/s per stream of each clean second, the latest `KEPT_SECONDS`.
    """

    label: str
    seconds: dict[int, deque[float]] = field(default_factory=dict)


class Ladder:
    """Stages of a live climb."""

    def __init__(self) -> None:
        self.stages: dict[str, Stage] = {}
        self._now: Stage | None = None
        self._clean_from_s = float("-inf")
        self._next_s = float("-inf")
        self._streams = self._shown = 0  # streams now, and in the last clean second

    def set(self, settings: Mapping[str, Any], label: str, now_s: float) -> None:
        """These settings are in force from now on."""
        key = json.dumps(dict(settings), sort_keys=True, default=str)
        self._now = self.stages.pop(key, None) or Stage(label)
        self.stages[key] = self._now
        self._clean_from_s = now_s + SETTLE_S

    def restart(self) -> None:
        """Forget all columns but the present setting, which begins anew."""
        if self._now is not None:
            key = next(k for k, stage in self.stages.items() if stage is self._now)
            self._now = Stage("start")
            self.stages = {key: self._now}

    def feed(self, sample: Sample, busy_prompts: bool) -> bool:
        """Take in a sample of speed; whether a column changed. Samples while prompts are computed do not count."""
        if sample.num_generating != self._streams or busy_prompts:
            self._streams = sample.num_generating
            self._clean_from_s = max(self._clean_from_s, sample.t_s + SETTLE_S)
        if self._now is None or not self._streams or sample.t_s < max(self._clean_from_s, self._next_s):
            return False
        self._next_s = sample.t_s + WINDOW_S
        self._shown = self._streams
        self._now.seconds.setdefault(self._streams, deque(maxlen=KEPT_SECONDS)).append(sample.tok_s_per_stream)
        return True

    def data(self) -> dict[str, Any]:
        """What `ClimbChart` takes: stages with as many streams as ran last, and how they were measured."""
        found = [(stage, stage.seconds.get(self._shown, ())) for stage in self.stages.values()]
        shown = [(stage, rates) for stage, rates in found if len(rates) >= MIN_SECONDS][-MAX_STAGES:]
        medians = [statistics.median(rates) for _, rates in shown]
        stages = [
            {
                "label": stage.label,
                "low": min(rates),
                "median": medians[i],
                "high": max(rates),
                "before": medians[i] / medians[i - 1] if i else None,
                "baseline": medians[i] / medians[0] if i else None,
                "kept": True,
                "tip": f"Median, slowest and fastest of {len(rates)} clean seconds of tok/s per stream.",
            }
            for i, (stage, rates) in enumerate(shown)
        ]
        streams = f"{self._shown} stream{'' if self._shown == 1 else 's'}"
        source = f"Toggled live on this machine, {streams}; × is against the first column." if stages else ""  # noqa: RUF001
        return {"stages": stages, "unit": "tok/s per stream", "source": source}


def stages_of(records: str | Path | Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What `ClimbChart` takes, from the records of `strata climb` or a results file of theirs.

    Raises:
        ValueError: there is no stage of a single stream in them.
    """
    given: Sequence[Mapping[str, Any]]
    given = json.loads(Path(records).read_text("utf-8")) if isinstance(records, str | Path) else records
    single = [r for r in given if r.get("conditions", {}).get("series") == "single stream" and r.get("spread")]
    if not single:
        raise ValueError(
            "there is no measured stage of a single stream in these records; write some with `strata climb`"
        )
    stages = [
        {
            "label": r["conditions"]["stage"].replace("=", " "),
            "low": r["spread"]["min"],
            "median": r["spread"]["median"],
            "high": r["spread"]["max"],
            "before": r["metrics"].get("speedup_vs_before"),
            "baseline": r["metrics"].get("speedup_vs_baseline"),
            "kept": r["conditions"]["kept"],
            "tip": f"Median, slowest and fastest of {r['spread']['runs']} runs, A/B/A. {r['note']}".strip(),
        }
        for r in single
    ]
    first = single[0]
    cpu = first["hardware"].get("gpu") or first["hardware"].get("cpu") or "unknown hardware"
    source = f"strata climb, {first['conditions']['model']}, {cpu.split(' (')[0]}, {first['date'][:10]}, one stream."
    return {"stages": stages, "unit": "tok/s, one stream", "source": source}
