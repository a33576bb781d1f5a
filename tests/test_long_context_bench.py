"""What the long-context benchmark measures: pages as their definition has them, and what is read and held."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from strata_lab.bench import long_context
from strata_lab.bench.result_tables import long_context_speed_table
from strata_lab.kernels.paged_attention import paged_attention_ref, paged_inputs
from tests.checkpoints import write_checkpoint


def test_every_token_of_a_text_is_read_as_one_of_an_answer() -> None:
    """A token that sees no more than so many blocks sees all; behind them another choice is another result."""
    inputs = paged_inputs([(120, 120)], (4, 2, 16), poison=0.0)
    inputs["block_tables"] = torch.arange(8, dtype=torch.int32)[None]  # as a text is laid out there: in order
    dense = paged_attention_ref(**inputs)
    found = {n: long_context.attention(f"pages:{n}", 1e4)(**inputs) for n in (4, 8)}
    torch.testing.assert_close(found[8], dense, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[4][:64], dense[:64], rtol=1e-5, atol=1e-6)
    assert ((found[4] - dense)[64:].abs().amax(dim=(1, 2)) > 1e-3).all()


def test_a_window_bounds_what_is_held_and_pages_only_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "m", "llama")[0]
    few = {"all": long_context.OFF, "window/16": long_context.OFF | {"kv_window": 16},
           "pages/4": long_context.OFF | {"sparse_pages": 4}}  # fmt: skip
    monkeypatch.setattr(long_context, "SPEEDS", few)
    monkeypatch.setattr(long_context, "ROUNDS", 2)
    monkeypatch.setattr(long_context, "DECODED", 12)
    arguments = ["--model", str(folder), "--part", "speed", "--speed-length", "100", "--results", str(tmp_path)]
    assert long_context.main(arguments) == 0
    records = json.loads((tmp_path / "long_context_speed_cpu.json").read_text())
    m = {r["name"].removeprefix("speed/"): r["metrics"] for r in records}
    assert m["window/16"]["kv_blocks_held"] < m["pages/4"]["kv_blocks_held"] == m["all"]["kv_blocks_held"] == 7
    token = (m["all"]["read_bytes_per_token"] - m["pages/4"]["read_bytes_per_token"]) / (100 + 12 / 2 - 64 - 6)
    assert token == pytest.approx(m["all"]["kv_bytes_held"] / (7 * 16), rel=0.05), "64 tokens and a share of bounds"
    table, first = long_context_speed_table(records)
    assert first is records[0] and table.count("\n| ") == 1 + len(few)
