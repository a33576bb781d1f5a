"""How anything here is measured and recorded: fingerprint, interleaving, spread, records, the roofline rule.

Every benchmark writes through `write_results`, so that every figure in `docs/results/` names its hardware,
versions, conditions and spread. It knows no engine and no workload.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from strata_lab.telemetry import hardware

REPOSITORY = Path(__file__).resolve().parents[2]
VERSIONED = ("torch", "triton", "transformers")
GIB = 1 << 30
QUIET_SHARE = 0.1  # of all cores: what a machine at rest uses for itself
QUIET_SAMPLE_S = 1.0
DISTURBED_SHARE = 0.1  # of all cores, that other programs may take during a run
RECORD_FIELDS = (
    "name", "date", "commit", "script", "hardware", "versions", "conditions", "metrics", "spread", "peer", "note",
)  # fmt: skip

T = TypeVar("T")


class RooflineExceeded(ValueError):
    """A figure claims more than the memory can deliver, so the measurement is wrong and is not recorded."""


@dataclass(frozen=True)
class Spread:
    """How repeated runs of one condition vary.

    Attributes:
        runs: how many.
        min, median, max: of the figure that the record is about.
    """

    runs: int
    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Spread of at least one value."""
        return cls(len(values), min(values), statistics.median(values), max(values))


@dataclass(frozen=True)
class Record:
    """One measured figure with everything needed to judge and repeat it.

    Attributes:
        name: what was measured.
        script: the command that measures it again.
        conditions: model, weight_format, kv_cache_dtype, batch, prompt_tokens, output_tokens, context, toggles.
        metrics: figures with units in their names; `mbu` is checked against the roofline.
        spread: of the main figure, None where it makes no sense.
        peer: None, or another engine's name, version and metrics from the same interleaved run.
        note: what a reader has to know beside the numbers.
        hardware: gpu or cpu, memory_gb, driver, clocks, temperature, threads, load_average.
        versions: python, torch, triton and what else took part.
        date: ISO 8601, UTC.
        commit: short hash, "-dirty" when files differ from it, "unknown" outside a checkout.
    """

    name: str
    script: str
    conditions: Mapping[str, Any]
    metrics: Mapping[str, Any]
    spread: Spread | None = None
    peer: Mapping[str, Any] | None = None
    note: str = ""
    hardware: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    date: str = ""
    commit: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, in the order of the results files."""
        d = asdict(self)
        return {key: d[key] for key in RECORD_FIELDS}


@dataclass(frozen=True)
class Environment:
    """Where and when something was measured; taken once per run, so all its records agree."""

    hardware: dict[str, Any]
    versions: dict[str, str]
    date: str
    commit: str

    @classmethod
    def now(cls, device: str = "cpu", threads: int | None = None) -> Environment:
        """Describe this machine, these packages and this commit.

        Args:
            device: "cpu" or "cuda[:i]".
            threads: CPU threads the measurement uses; None asks torch.
        """
        return cls(
            hardware=_hardware(device, threads),
            versions=_versions(),
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            commit=commit(),
        )

    def record(self, name: str, *, script: str, **parts: Any) -> Record:
        """A `Record` made here; the other parts are its fields. Raises `RooflineExceeded`."""
        made = Record(name=name, script=script, **vars(self), **parts)
        check_mbu(name, made.metrics.get("mbu"))
        return made


def check_mbu(name: str, mbu: float | None) -> None:
    """Raise `RooflineExceeded` if `mbu` is above 1; None (not measured) passes."""
    if mbu is not None and mbu > 1.0:
        raise RooflineExceeded(
            f"{name}: {mbu:.1%} of the memory roofline cannot be; the bytes are over-counted, or the bandwidth was "
            "measured on a busy machine: measure it again with ceiling(device, working_set_bytes, fresh=True)"
        )


def write_results(name: str, records: Iterable[Record], folder: Path | str | None = None) -> Path:
    """Write a list of records to `<folder>/<name>.json`, all or nothing, and return the path.

    Args:
        name: file name without ".json".
        records: at least one; each is checked against the roofline again.
        folder: None is `docs/results` of the checkout.
    """
    made = list(records)
    if not made:
        raise ValueError(f"results {name!r} need at least one record; a run that measured nothing leaves no file")
    for record in made:
        check_mbu(record.name, record.metrics.get("mbu"))
    path = results_path(name, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps([r.as_dict() for r in made], indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)
    return path


def results_path(name: str, folder: Path | str | None = None) -> Path:
    """Where `write_results` writes."""
    return (Path(folder) if folder is not None else REPOSITORY / "docs" / "results") / f"{name}.json"


def read_results(path: Path) -> list[Record]:
    """The records of a results file; none where there is no file."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return [Record(**(r | {"spread": None if r["spread"] is None else Spread(**r["spread"])})) for r in kept]


def join_results(
    name: str, records: Iterable[Record], folder: Path | str | None = None, key: Callable[[Record], Any] | None = None
) -> Path:
    """`write_results` for a run in pieces: records of the file that are not measured anew stay, before the new ones.

    Args:
        name, records, folder: as for `write_results`.
        key: of two records with the same one the later replaces the earlier; None: their name.
    """
    made, known = list(records), key or (lambda record: record.name)
    replaced = {known(record) for record in made}
    kept = [record for record in read_results(results_path(name, folder)) if known(record) not in replaced]
    return write_results(name, [*kept, *made], folder)


def interleave(variants: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Run every variant once per round, each round in the opposite order of the last one.

    Slow drift of the machine (heat, neighbours) then touches all variants alike: A B C, C B A, ...
    """
    results: dict[str, list[T]] = {name: [] for name in variants}
    for i in range(rounds):
        names = list(variants)[:: 1 if i % 2 == 0 else -1]
        for name in names:
            results[name].append(variants[name]())
    return results


def a_b_a(switch: Callable[[str], None], measure: Callable[[], T], rounds: int) -> tuple[list[T], list[T]]:
    """Measure before, after, before, ...: `rounds` times B with an A on either side of each; ends on A.

    Args:
        switch: called with "a" or "b" before each measurement.
        measure: one run of whatever is switched on.
        rounds: how many B runs; A is measured once more often.

    Returns:
        The A runs and the B runs, in order.
    """
    results: dict[str, list[T]] = {"a": [], "b": []}
    for side in ["a", *["b", "a"] * rounds]:
        switch(side)
        results[side].append(measure())
    return results["a"], results["b"]


def undisturbed(measure: Callable[[], T], most_share: float = DISTURBED_SHARE, tries: int = 2) -> tuple[T, float]:
    """A run during which other programs took at most `most_share` of all processors, or the calmest of `tries`.

    Returns the run and that share, 0 to 1; one run and 0 on systems that do not tell.
    """
    runs: list[tuple[float, T]] = []
    while len(runs) < tries:
        before, own = hardware.processor_times(), sum(os.times()[:2])
        result = measure()
        after, own = hardware.processor_times(), sum(os.times()[:2]) - own
        if before is None or after is None or after[1] <= before[1]:
            return result, 0.0
        total = after[1] - before[1]
        runs.append((max(0.0, total - (after[0] - before[0]) - own) / total, result))
        if runs[-1][0] <= most_share:
            break
    share, calmest = min(runs, key=lambda run: run[0])
    return calmest, share


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Between which of the values the median of what they were drawn from lies, whatever its distribution.

    The k-th smallest and the k-th largest value, with k from the binomial distribution of how many lie below a median.
    Fewer than six values cannot tell with 95% confidence; then their minimum and maximum, which is all they can say.
    """
    ordered, n = sorted(values), len(values)
    k, below = 0, 0.0  # below: chance that at most k values lie on one side
    while (below := below + math.comb(n, k) / 2**n) <= (1 - confidence) / 2:
        k += 1
    k = max(k - 1, 0)
    return ordered[k], ordered[-1 - k]


def wait_until_quiet(limit_s: float = 60.0) -> float:
    """Wait until other programs leave the processors alone; return the share they still used at the end, 0 to 1.

    Two programs that share few cores do not halve each other's speed but ruin it, because threads that wait for each
    other at a barrier burn the time that the other one needs. Systems that do not tell are taken to be quiet.
    """
    deadline = time.monotonic() + limit_s
    while True:
        before = hardware.processor_times()
        time.sleep(QUIET_SAMPLE_S)
        after = hardware.processor_times()
        if before is None or after is None or after[1] <= before[1]:
            return 0.0
        busy = 1.0 - (after[0] - before[0]) / (after[1] - before[1])
        if busy <= QUIET_SHARE or time.monotonic() > deadline:
            return max(0.0, busy)


def commit() -> str:
    """Short hash of the checkout, with "-dirty" if files differ from it, or "unknown"; `STRATA_COMMIT` knows better.

    The latter is for copies of a tree without its history.
    """
    if told := os.environ.get("STRATA_COMMIT", ""):
        return told
    head = _git("rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    return head + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*args: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *args]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""  # no git, or a folder it refuses to read
    return done.stdout.strip() if done.returncode == 0 else ""


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in VERSIONED:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "none"
    return found


def _hardware(device: str, threads: int | None) -> dict[str, Any]:
    cpu = hardware.cpu_info()
    if threads is None:
        import torch

        threads = torch.get_num_threads()
    shared = {"threads": threads, "load_average": hardware.load_average()}
    if not device.startswith("cuda"):
        return {
            "cpu": f"{cpu.name} ({', '.join(cpu.flags)})",
            "memory_gb": _gb(cpu.memory_bytes),
            "driver": None,
            "clocks": None if cpu.clock_mhz is None else {"cpu_mhz": cpu.clock_mhz, "governor": cpu.governor},
            "temperature": None,
            **shared,
        }
    import torch

    named = torch.cuda.get_device_properties(device)
    gpu = next((g for g in hardware.gpus() if g.name == named.name), None)
    return {
        "gpu": named.name,
        "memory_gb": _gb(named.total_memory),
        "driver": gpu.driver if gpu else None,
        "clocks": {"sm_mhz": gpu.reading.sm_mhz, "memory_mhz": gpu.reading.memory_mhz} if gpu else None,
        "temperature": gpu.reading.core_c if gpu else None,
        "power_w": gpu.reading.power_w if gpu else None,
        "throttle": list(gpu.reading.throttle) if gpu else None,
        **shared,
    }


def _gb(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else round(num_bytes / GIB, 1)
