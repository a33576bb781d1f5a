"""The measurement of what HTTP costs counts every token of both sides."""

from __future__ import annotations

from pathlib import Path

from strata_lab.bench.http_overhead import STREAM_TOKENS, measure
from strata_lab.bench.tiny_model import write_tiny_model


def test_every_batch_has_its_shares_and_the_many_streams_their_health(tmp_path: Path) -> None:
    records = measure(str(write_tiny_model(tmp_path)), rounds={1: 2, 3: 2}, tokens=8, streams=20)
    one, three, many = records
    for record, batch in ((one, 1), (three, 3)):
        figures = record.metrics
        assert record.conditions["batch"] == batch and record.spread is not None and record.spread.runs == 2
        assert record.spread.min <= figures["share_of_engine"] <= record.spread.max
        assert figures["share_low"] <= figures["share_of_engine"] <= figures["share_high"]
        assert figures["output_tok_s"] > 0 and figures["server_cpu_us_per_token"] > 0
        assert figures["tokens_per_piece"] >= 1
        assert 0 < figures["client_share_of_machine"] < 1 and figures["client_cpu_us_per_token"] > 0
    assert one.metrics["step_share"] > 0 and one.metrics["step_ms"] > 0
    assert many.conditions["output_tokens"] == STREAM_TOKENS
    assert many.metrics["num_health"] >= 1 and many.metrics["health_p99_ms"] <= many.metrics["health_max_ms"]


def test_a_model_without_a_tokenizer_streams_its_token_ids() -> None:
    two, many = measure("moe-small", rounds={2: 1}, tokens=8, streams=2, device="cpu", weight_format="int8")
    assert two.conditions["toggles"]["weight_format"] == "int8"
    assert 1 <= two.metrics["tokens_per_piece"] <= 8
    assert many.metrics["output_tok_s"] > 0
