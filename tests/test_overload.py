"""The scheduling benchmark: every part measures a running engine, and its verdict is that of the numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strata_lab.bench import overload
from tests.checkpoints import write_checkpoint


def test_every_part_is_measured_judged_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[str, int, dict[str, Any]]] = []

    def watched(name: str, part: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def run(engine: Any, sizes: overload.Sizes) -> dict[str, Any]:
            runs.append((name, sizes.probes, part(engine, sizes)))
            return runs[-1][2]

        return run

    for name, part in list(overload.PARTS.items()):
        monkeypatch.setitem(overload.PARTS, name, watched(name, part))
    model = write_checkpoint(tmp_path / "model", "llama", max_position_embeddings=8192)[0]
    sizes = ["--seconds", "0.8", "--probes", "3", "--rounds", "1", "--turns", "1", "--long-tokens", "200"]
    code = overload.main(["--model", str(model), *sizes, "--results", str(tmp_path)])
    records = json.loads((tmp_path / "scheduling_cpu.json").read_text())
    assert [r["name"] for r in records] == [f"scheduling/{part}" for part in overload.PARTS]
    metrics = {r["name"].partition("/")[2]: r["metrics"] for r in records}
    for name, (metric, limit) in overload.BARS.items():
        m = metrics[name.partition(",")[0]]
        assert m[f"bar_{metric}"] == limit
        assert m[metric] > 0
        assert m["good"] <= (m[metric] <= limit)
    order = [(name, probes) for name, probes, _ in runs]
    warm = {name: [probes for other, probes in order if other == name] for name in overload.PARTS}
    assert warm == {name: [2, 3] if name in overload.WARMED else [3] for name in overload.PARTS}
    for name, _, found in [run for run in runs if run[1] == 3]:
        assert found.items() <= metrics[name].items(), "the record is of the second run"
        waits = [key.removesuffix("_worst_ms") for key in found if key.endswith("_worst_ms") and name != "long"]
        assert all(found[f"{w}_median_ms"] <= found[f"{w}_p95_ms"] <= found[f"{w}_worst_ms"] for w in waits)
    assert code == (0 if all(m["good"] for m in metrics.values()) else 1)
    storm = metrics["storm"]
    assert storm["refused"] > storm["accepted"] > 0
    assert storm["most_waiting"] <= storm["max_waiting"]
    assert metrics["urgent"]["batch_tokens"] > 0
    assert metrics["turn"]["cached_tokens"] >= overload.TURN_TOKENS["cpu"]
    assert metrics["tables"]["scattered_ratio"] > 0
    assert "scheduling/storm" in capsys.readouterr().out
    overload.main(["--model", str(model), "--parts", "blocks", "--results", str(tmp_path)])
    again = json.loads((tmp_path / "scheduling_cpu.json").read_text())
    others = [r for r in records if r["name"] != "scheduling/blocks"]
    assert [r for r in again if r["name"] != "scheduling/blocks"] == others


def test_a_missed_bar_is_no_good() -> None:
    assert list(overload.verdicts("blocks", {"us_per_block": 1.5})) == [("us_per_block", 1.0, False)]
    assert [kept for *_, kept in overload.verdicts("storm", {"latency_ratio": 1.3, "recovery_s": 2.1})] == [True, False]
