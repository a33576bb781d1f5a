"""The scheduling benchmark: every part measures a running engine, and its verdict is that of the numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strata_lab.bench import overload
from tests.checkpoints import write_checkpoint


def test_every_part_is_measured_judged_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert code == (0 if all(m["good"] for m in metrics.values()) else 1)
    storm = metrics["storm"]
    assert storm["refused"] > storm["accepted"] > 0
    assert storm["most_waiting"] <= storm["max_waiting"]
    assert metrics["urgent"]["batch_tokens"] > 0
    assert metrics["turn"]["cached_tokens"] >= overload.TURN_TOKENS
    assert metrics["tables"]["scattered_ratio"] > 0
    assert "scheduling/storm" in capsys.readouterr().out
    overload.main(["--model", str(model), "--parts", "blocks", "--results", str(tmp_path)])
    again = json.loads((tmp_path / "scheduling_cpu.json").read_text())
    others = [r for r in records if r["name"] != "scheduling/blocks"]
    assert [r for r in again if r["name"] != "scheduling/blocks"] == others


def test_a_missed_bar_is_no_good() -> None:
    assert list(overload.verdicts("blocks", {"us_per_block": 1.5})) == [("us_per_block", 1.0, False)]
    assert [kept for *_, kept in overload.verdicts("storm", {"latency_ratio": 1.3, "recovery_s": 2.1})] == [True, False]
