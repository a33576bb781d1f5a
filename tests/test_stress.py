"""The stress benchmark: its model says what it computes, it fills the pool, and it notices what goes wrong."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

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


def test_every_weight_is_exact_in_bfloat16(tmp_path: Path) -> None:
    """So that asking for bf16 weights on a card asks for the same model, multiplied by the card's own operators."""
    folder = CountingModel(5, stress.CONTEXT).write(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    assert {name for name, w in weights.items() if w.any()} >= {"lm_head.weight", "model.embed_tokens.weight"}
    assert all(torch.equal(w, w.bfloat16().float()) for w in weights.values())


def test_nearly_every_answer_is_as_long_as_it_is_asked_for() -> None:
    """Long answers fill the pool; only where two tokens are as good as equal does one end early."""
    model = CountingModel(1, stress.CONTEXT)
    got = [len(model.answer(text, length)) for text, length in zip(texts(60), (10, 120, 250) * 20, strict=True)]
    assert sum(got) > 0.85 * 20 * (10 + 120 + 250)


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
    assert {"dtype": "float32", "weight_format": "bf16"}.items() <= record["conditions"].items()


def test_what_goes_wrong_is_noticed(tmp_path: Path) -> None:
    model = CountingModel(4, stress.CONTEXT)
    options: dict[str, Any] = {
        "block_size": 8,
        "num_kv_blocks": 200,
        "max_num_seqs": 8,
        "max_model_len": stress.CONTEXT,
    } | stress.EXACT
    with LLMEngine(model.write(tmp_path / "m"), device="cpu", **options) as engine:
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
