"""May two results files be held against each other? Only if everything but the thing compared is the same.

What is compared is the target, its settings or the commit. Anything else that differs (the machine, the lengths, the
text) makes the ratio a statement about that instead, so it is refused, with the first difference named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strata_lab.settings import ConfigError

# In the order in which a difference is looked for.
MUST_MATCH = (
    "workload", "requests", "batch", "rate", "prompt_tokens", "prompt_characters", "output_tokens", "text", "model",
    "cold_starts",
)  # fmt: skip
HARDWARE = ("gpu", "cpu", "memory_gb", "driver", "threads")
FIGURES = (
    ("output_tok_s", None), ("tok_s_per_stream", None), ("ttft_ms", "p50"), ("ttft_ms", "p99"), ("tpot_ms", "p50"),
    ("itl_ms", "p99"), ("e2e_ms", "p50"),
)  # fmt: skip


def load(path: Path) -> list[dict[str, Any]]:
    """The records of a bench's results file; `ConfigError` for anything else."""
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
        benched = [r for r in records if r["name"].startswith("bench/")]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is no results file of strata bench: {error}") from error
    if not benched:
        raise ConfigError(f"{path} holds no record of strata bench; try the .json that `strata bench` wrote")
    return benched


def first_difference(a: Mapping[str, Any], b: Mapping[str, Any], despite: Sequence[str] = ()) -> str | None:
    """The first condition that differs between two records, with both values; None if they may be compared.

    Args:
        a, b: records.
        despite: names of conditions that may differ after all.
    """
    known = (*MUST_MATCH, *HARDWARE, "throttle")
    for name in despite:
        if name not in known:
            raise ConfigError(f"despite={name!r} must be one of {', '.join(known)}; try 'threads'")
    for part, names in (("conditions", MUST_MATCH), ("hardware", HARDWARE)):
        for name in names:
            here, there = a[part].get(name), b[part].get(name)
            if here != there and name not in despite:
                return f"{name}: {here!r} and {there!r}"
    throttled = [(r["hardware"].get("during") or {}).get("throttle") or [] for r in (a, b)]
    if throttled[0] != throttled[1] and "throttle" not in despite:
        return f"throttle: {throttled[0]!r} and {throttled[1]!r}"
    return None


def compare(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], despite: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Ratios b / a of every pair of records, in order; `ConfigError` names the first difference.

    Records are paired in the order of the files, as sweeps write them.
    """
    if len(a) != len(b):
        raise ConfigError(f"not comparable: {len(a)} records and {len(b)}; measure the same cells")
    pairs = []
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        difference = first_difference(x, y, despite)
        if difference is not None:
            raise ConfigError(f"not comparable: record {i} differs in {difference}")
        pairs.append(
            {"name": x["name"], "a": x["conditions"]["target"], "b": y["conditions"]["target"]} | _ratios(x, y)
        )
    return pairs


def _ratios(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, percentile in FIGURES:
        here, there = (_figure(r["metrics"].get(name), percentile) for r in (a, b))
        label = name if percentile is None else f"{name} {percentile}"
        found[label] = {"a": here, "b": there, "ratio": there / here if here and there else None}
    spreads = [r["spread"] for r in (a, b)]
    apart = all(spreads) and (spreads[0]["max"] < spreads[1]["min"] or spreads[1]["max"] < spreads[0]["min"])
    return found | {"spreads_are_apart": bool(apart)}


def _figure(value: Any, percentile: str | None) -> float | None:
    return value.get(percentile) if percentile is not None and isinstance(value, Mapping) else value
