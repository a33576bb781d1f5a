"""The stress benchmark: its model says what it computes, it fills the pool, and it notices what goes wrong."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from strata_lab.bench import stress
from strata_lab.bench.counting_model import VOCABULARY, CountingModel
from strata_lab.engine import LLMEngine


def texts(count: int) -> list[list[int]]:
    numbers = random.Random(2)
    return [[numbers.randrange(VOCABULARY) for _ in range(numbers.randrange(40, 300))] for _ in range(count)]


def test_an_answer_depends_on_every_part_of_the_text() -> None:
    """Two blocks exchanged, or one block that is another's: nearly every answer becomes another one."""
    model, numbers = CountingModel(1, 512), random.Random(3)
    noticed = asked = 0
    for text in texts(60):
        right = model.answer(text, 60)
        if len(right) < 20:
            continue
        first, second = (8 * block for block in numbers.sample(range(len(text) // 8), 2))
        wrong = list(text)
        wrong[first : first + 8] = text[second : second + 8]
        asked += 1
        noticed += model.answer(wrong, len(right)) != right
    assert asked > 30
    assert noticed > 0.8 * asked


def test_a_full_pool_gives_every_answer_and_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stress, "LIVE", 100)
    monkeypatch.setattr(stress, "CHANGE_EVERY_S", 0.1)
    monkeypatch.setattr(stress, "BLOCKS", 300)
    monkeypatch.setattr(stress, "LEAST_USE", 0.8)  # the fewer blocks, the more of them one large request leaves idle
    assert stress.main(["--seconds", "3", "--results", str(tmp_path)]) == 0
    (record,) = json.loads((tmp_path / "stress_cpu.json").read_text())
    m = record["metrics"]
    assert (m["good"], m["num_wrong"], m["num_lost"], m["leaked_blocks"]) == (True, 0, 0, 0)
    assert m["num_requests"] == m["num_length"] + m.get("num_abort", 0) + m.get("num_timeout", 0) > 100
    assert m["block_use_p50"] >= 0.8
    assert m["num_preemptions"] > 0
    assert m["changes_applied"] > 5
    assert "changes_refused" not in m


def test_what_goes_wrong_is_noticed(tmp_path: Path) -> None:
    model = CountingModel(4, stress.CONTEXT)
    options: dict[str, Any] = {
        "block_size": 8,
        "num_kv_blocks": 200,
        "max_num_seqs": 8,
        "max_model_len": stress.CONTEXT,
    }
    with LLMEngine(model.write(tmp_path / "m"), device="cpu", dtype="float32", **options) as engine:
        run = stress.Stress(engine, model, 1, live=20)
        values = engine._loop.parts.kv._v
        take, steps = run._take, 0

        def spoiling(wait_s: float) -> None:
            nonlocal steps
            steps += 1
            values[:, steps % 200] = 0.0  # somebody's block
            take(wait_s)

        run._take = spoiling  # type: ignore[method-assign]
        found = run.run(1.0)
        assert found.num_wrong > 0
        assert not found.good
        assert "wrong from" in found.failures[0]
        engine._loop.scheduler.blocks.grow("forgotten", 9)
        run._settle()
        assert found.leaked_blocks == 2
