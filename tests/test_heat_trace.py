"""A recorded trace: every reading in every column, tokens where the load was, and none from what has no sensor."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest

from strata_lab.bench import heat_trace
from strata_lab.engine import LLMEngine
from strata_lab.events import HardwareEvent
from tests.checkpoints import write_checkpoint


class Card:
    """A source whose temperature rises by a degree a reading."""

    def __init__(self) -> None:
        self.core_c = 40.0

    def read(self) -> HardwareEvent:
        self.core_c += 1.0
        return HardwareEvent(
            t_s=time.perf_counter(), device="cuda:0", name="a card", core_c=self.core_c, core_limit_c=90.0
        )

    def close(self) -> None:
        pass


def test_a_trace_has_every_reading_and_the_rate_between_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = write_checkpoint(tmp_path, "llama")
    with LLMEngine(folder, device="cpu", max_num_seqs=2, max_model_len=128) as engine:
        monkeypatch.setattr(heat_trace, "PROMPT_TOKENS", 8)
        monkeypatch.setattr(heat_trace, "OUTPUT_TOKENS", 64)
        trace = heat_trace.record(engine, Card(), 2, load_s=0.6, rest_s=0.1, interval_s=0.02)
        total = engine.stats().num_output_tokens
    found = trace.metrics()
    count = len(trace.readings)
    assert count >= 3
    assert {len(found[name]) for name in ("t_s", "output_tok_s", *heat_trace.KEPT)} == {count}
    assert found["core_c"] == [41.0 + i for i in range(count)]
    assert found["core_limit_c"] == 90.0
    spans = [b - a for a, b in pairwise(found["t_s"])]
    told = sum(rate * span for rate, span in zip(found["output_tok_s"][1:], spans, strict=True))
    assert 0 < round(told) <= total


def test_what_tells_no_temperature_makes_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = write_checkpoint(tmp_path, "llama", max_position_embeddings=1024)
    options = ["--model", str(folder), "--seats", "1", "--load-s", "0.1", "--rest-s", "0.1"]
    assert heat_trace.main([*options, "--results", str(tmp_path)]) == 1
    assert "tells no temperature" in capsys.readouterr().err
    assert not (tmp_path / "heat_trace_gpu.json").exists()
