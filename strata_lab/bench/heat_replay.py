"""A recorded heat trace as readings again: `python -m strata_lab.bench.heat_replay [FILE]`.

Reads what `bench/heat_trace.py` wrote, hands the thermal governor's controller the readings that the driver gave then,
and tells how fast the sensors followed the load, how far the forecast was off, and what would have been held back. The
card does not answer: it stays as hot as it was, whatever is decided, so how well it *would* be held is not shown here.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from strata_lab.bench.harness import read_results, results_path
from strata_lab.bench.heat_trace import KEPT, LIMITS
from strata_lab.bench.heat_trace import SCRIPT as RECORDER
from strata_lab.events import HardwareEvent
from strata_lab.telemetry.heat import LAG_S, LOOK_AHEAD_S, Controller, Decision, Predictor

SCRIPT = "python -m strata_lab.bench.heat_replay"
COLUMNS = ("t_s", "output_tok_s", *KEPT)
LOADED_SHARE = 0.5  # of the usual rate: an interval with less had a pause in it
PLATEAU_S = 10.0
FEWEST = 4  # readings for a curve of three unknowns
TAUS_S = [0.1 * 1.02**i for i in range(340)]  # 0.1 to 82 s


@dataclass(frozen=True)
class Recording:
    """Readings of a card, and what it did meanwhile.

    Attributes:
        readings: in order of time; `t_s` counts from the first one.
        output_tok_s: tokens per second since the reading before.
    """

    readings: tuple[HardwareEvent, ...]
    output_tok_s: tuple[float, ...]

    @property
    def loads(self) -> list[tuple[int, int]]:
        """First and last reading of every stretch in which the engine decoded without a pause."""
        least = LOADED_SHARE * statistics.median([rate for rate in self.output_tok_s if rate > 0] or [math.inf])
        stretches = groupby(range(len(self.readings)), key=lambda i: self.output_tok_s[i] >= least)
        found = [list(indices) for loaded, indices in stretches if loaded]
        return [(indices[0], indices[-1]) for indices in found]

    @property
    def load(self) -> tuple[int, int]:
        """The longest of `loads`. Raises ValueError where the engine made no token."""
        if not self.loads:
            raise ValueError(f"this trace has no load in it: record one with {RECORDER} --load-s 50")
        return max(self.loads, key=lambda span: span[1] - span[0])


def read_recording(path: Path | str | None = None) -> Recording:
    """The trace in a results file.

    Args:
        path: None is the one of the checkout, `docs/results/heat_trace_gpu.json`.

    Raises:
        ValueError: there is no such file, it is no results file, it has not exactly one trace, or a column is missing,
            has another length, lacks a core's temperature, or runs back in time.
    """
    file = Path(path) if path is not None else results_path("heat_trace_gpu")
    if not file.is_file():
        raise ValueError(f"{file} does not exist; {RECORDER} records a trace")
    try:
        records = read_results(file)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} is no results file ({error}); {RECORDER} writes one") from error
    traces = [record for record in records if record.name == "heat_trace"]
    if len(traces) != 1:
        names = sorted({record.name for record in records})
        raise ValueError(f"{file} has {len(traces)} records named heat_trace, not one, among {names}; {RECORDER} does")
    metrics, card = traces[0].metrics, traces[0].hardware.get("gpu", "a card")
    _check(metrics, file)
    columns = {name: metrics[name] for name in KEPT} | {"t_s": metrics["t_s"]}
    limits = {name: metrics[name] for name in LIMITS}
    return Recording(tuple(_reading(columns, i, card, limits) for i in range(len(metrics["t_s"]))),
                     tuple(metrics["output_tok_s"]))  # fmt: skip


def _check(metrics: Any, file: Path) -> None:
    """Raise ValueError unless the columns make a trace."""
    missing = [name for name in (*COLUMNS, *LIMITS) if name not in metrics]
    if missing:
        raise ValueError(f"{file} lacks {', '.join(missing)}; a trace has {', '.join((*COLUMNS, *LIMITS))}")
    lengths = {name: len(metrics[name]) for name in COLUMNS}
    if len(set(lengths.values())) != 1 or not lengths["t_s"]:
        raise ValueError(f"{file} has columns of {lengths} readings; all need the same number, at least 1")
    if None in metrics["core_c"]:
        raise ValueError(
            f"{file} has readings without core_c, by which nothing can be governed; {RECORDER} writes none"
        )
    for i, (before, after) in enumerate(pairwise(metrics["t_s"]), 1):
        if after <= before:
            raise ValueError(f"{file}: reading {i} is of {after:g} s, behind one of {before:g} s; times have to rise")


def _reading(columns: dict[str, list[Any]], i: int, card: str, limits: dict[str, Any]) -> HardwareEvent:
    values = {name: column[i] for name, column in columns.items()}
    return HardwareEvent(device="cuda:0", name=card, **values | {"throttle": tuple(values["throttle"])}, **limits)


def with_limits(
    readings: Sequence[HardwareEvent], core_c: float | None = None, memory_c: float | None = None
) -> list[HardwareEvent]:
    """The same temperatures on a card whose driver names other limits; None keeps the recorded one."""
    return [
        replace(
            reading,
            core_limit_c=reading.core_limit_c if core_c is None else core_c,
            memory_limit_c=reading.memory_limit_c if memory_c is None else memory_c,
        )
        for reading in readings
    ]


def replay(readings: Sequence[HardwareEvent], policy: str, seats: int) -> list[Decision]:
    """What the controller decides at each reading, with all seats taken."""
    controller = Controller(policy, seats)
    return [controller.observe(reading, seats) for reading in readings]


def forecast_errors(readings: Sequence[HardwareEvent], sensor: str) -> list[tuple[float, float, float]]:
    """Time, error of the forecast and of "it stays as it is", for each reading with one `LOOK_AHEAD_S` later.

    An error is what was foretold less what the sensor said then, degrees. The forecast means the temperature itself and
    the sensor may lag behind it, so an error can be the sensor's.
    """
    predictor = Predictor(LAG_S[sensor])
    told = [(r.t_s, float(getattr(r, f"{sensor}_c"))) for r in readings]
    found = []
    for i, (t_s, now_c) in enumerate(told):
        predicted = predictor.predict(t_s, now_c)
        later = next((c for t, c in told[i:] if t >= t_s + LOOK_AHEAD_S), None)
        if later is not None:
            found.append((t_s, predicted - later, now_c - later))
    return found


def reached_s(readings: Sequence[HardwareEvent], sensor: str, share: float) -> float:
    """Seconds from the first reading to the one that has gone `share` of the way to the mean of the last `PLATEAU_S`.

    With fewer seconds than twice that, the way goes to the last reading.
    """
    times, told = _series(readings, sensor)
    end = [c for t, c in zip(times, told, strict=True) if t >= times[-1] - PLATEAU_S]
    goal = statistics.mean(end) if times[-1] >= 2 * PLATEAU_S else told[-1]
    return next(t for t, c in zip(times, told, strict=True) if abs(c - told[0]) >= share * abs(goal - told[0]))


def time_constant_s(readings: Sequence[HardwareEvent], sensor: str) -> tuple[float, float]:
    """Time constant of the exponential nearest to the readings, and how far they are from it (root mean square)."""
    times, told = _series(readings, sensor)
    best = (math.inf, 0.0)
    for tau in TAUS_S:
        decay = [math.exp(-t / tau) for t in times]
        slope, offset = statistics.linear_regression(decay, told)
        off = statistics.fmean((offset + slope * d - c) ** 2 for d, c in zip(decay, told, strict=True))
        best = min(best, (off, tau))
    return best[1], math.sqrt(best[0])


def _series(readings: Sequence[HardwareEvent], sensor: str) -> tuple[list[float], list[float]]:
    return [r.t_s - readings[0].t_s for r in readings], [float(getattr(r, f"{sensor}_c")) for r in readings]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: 0 with the figures of a trace, 1 with what is wrong with the file."""
    parser = argparse.ArgumentParser(prog=SCRIPT, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?", help="default: docs/results/heat_trace_gpu.json")
    parser.add_argument("--core-limit", type=float, help="degrees, instead of the card's own")
    parser.add_argument("--memory-limit", type=float, help="degrees, instead of the card's own")
    parser.add_argument("--seats", type=int, default=8, help="max_num_seqs, all taken")
    given = parser.parse_args(arguments)
    try:
        recording = read_recording(given.file)
        first, last = recording.load
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    readings = with_limits(recording.readings, given.core_limit, given.memory_limit)
    for sensor in LAG_S:
        if any(getattr(r, f"{sensor}_c") is None for r in readings):
            sys.stdout.write(f"{sensor}: not told in every reading\n")
            continue
        sys.stdout.write(_sensor_lines(readings, sensor, first, last))
    rates = recording.output_tok_s[first : last + 1]
    fifth = max(1, len(rates) // 5)
    parts = [statistics.median(part) for part in (rates, rates[:fifth], rates[-fifth:])]
    sys.stdout.write("tok/s: median {:.0f}, first fifth {:.0f}, last fifth {:.0f}".format(*parts))
    sys.stdout.write(f"; single intervals {min(rates):.0f} to {max(rates):.0f}\n")
    for policy in ("pace", "shrink", "precise"):
        decisions = replay(readings, policy, given.seats)
        idle, seats = max(d.idle_share for d in decisions), min(d.seats for d in decisions)
        mean = statistics.fmean(d.idle_share for d in decisions[first : last + 1])
        nearest = max(
            d.predicted_c - d.target_c for d in decisions if d.predicted_c is not None and d.target_c is not None
        )
        sys.stdout.write(f"{policy}: at most {idle:.1%} idle, {mean:.1%} under load, at least {seats} seats; ")
        sys.stdout.write(f"forecast {nearest:+.1f} C from the target\n")
    return 0


def _sensor_lines(readings: Sequence[HardwareEvent], sensor: str, first: int, last: int) -> str:
    """What a trace shows of a sensor, given the first and last reading under load."""
    lines = []
    for word, part in (("up", readings[max(0, first - 1) : last + 1]), ("down", readings[last:])):
        if len(part) < FEWEST:
            continue
        tau, off = time_constant_s(part, sensor)
        ends = (getattr(part[0], f"{sensor}_c"), getattr(part[-1], f"{sensor}_c"))
        reached = [reached_s(part, sensor, share) for share in (0.632, 0.95)]
        lines.append(
            f"{sensor} {word} {ends[0]} to {ends[1]} C: 63% after {reached[0]:.1f} s, 95% after {reached[1]:.1f} s; "
            f"exponential {tau:.1f} s, off by {off:.1f} C"
        )
    errors = forecast_errors(readings, sensor)
    for name, column in (("forecast", 1), ("no change", 2)):
        sizes = [e[column] for e in errors]
        rms = math.sqrt(statistics.fmean(e * e for e in sizes))
        lines.append(f"{sensor} in {LOOK_AHEAD_S:g} s, {name}: {min(sizes):+.1f} to {max(sizes):+.1f} C, rms {rms:.1f}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
