"""The interference benchmark: real gaps from a running engine, and what its settings are called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strata_lab.bench import interference
from strata_lab.engine import LLMEngine
from tests.checkpoints import write_checkpoint


def test_both_settings_are_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_checkpoint(tmp_path / "model", "llama", max_position_embeddings=8192)[0])
    arguments = ["--model", model, "--prompt-tokens", "300", "--streams", "2", "--rounds", "1", "--results", tmp_path]
    assert interference.main([str(a) for a in arguments]) == 0
    mixed, split = json.loads((tmp_path / "interference.json").read_text())
    assert (mixed["conditions"]["pd_split"], split["conditions"]["pd_split"]) == (False, True)
    assert mixed["spread"]["runs"] == 2
    for record in (mixed, split):
        m = record["metrics"]
        assert 0 < m["median_ms"] <= m["p99_ms"] <= m["worst_ms"]
        assert m["ttft_ms"] > 0
        assert m["calm_ms"] > 0
    assert "its first token after" in capsys.readouterr().out


def test_running_requests_end_with_the_measurement(tmp_path: Path) -> None:
    model = str(write_checkpoint(tmp_path / "model", "llama", max_position_embeddings=8192)[0])
    with LLMEngine(model, device="cpu", max_num_seqs=4, max_model_len=6000) as engine:
        interference.disturb(engine, 2, 100)
        engine.generate([[1, 2, 3]])
        assert engine.stats().num_running == 0
        assert engine.stats().kv_blocks_used == 0
