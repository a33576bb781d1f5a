"""What cycles of guesses cost: each number of them is run and replayed where the text is, and nothing is left over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from strata_lab.bench.cycle_costs import STEPS, costs, main, table
from strata_lab.engine import LLMEngine
from tests.speculative import test_ahead

folders = test_ahead.folders


@pytest.fixture
def engine(folders: list[Any]) -> Iterator[LLMEngine]:
    made, _, _ = test_ahead.engine(folders, draft=0, blocks=256)
    made._loop.scheduler.max_model_len = made._loop.parts.runner.max_model_len = 300
    with made:
        yield made


def test_each_cycle_is_timed_in_the_engine_and_bare(engine: LLMEngine) -> None:
    clock = iter(range(1, 100))

    def timed(replay: Any) -> float:
        with torch.inference_mode():
            replay()
        return float(next(clock))

    found = [cost for cost, _ in costs(engine, 20, timed)]
    assert [cost.guesses for cost in found] == [0, 1, 2, 3]
    assert [cost.tokens for cost in found] == [1, 2, 3, 4], "a target that drafts for itself"
    assert [cost.device_us for cost in found] == [0.5, 3, 5, 7], "a replay of plain steps holds two"
    assert all(cost.engine_us > 0 for cost in found)
    assert engine.stats().kv_blocks_used == 0 and engine.stats().num_running == 0
    assert len(table(found).splitlines()) == 5
    assert STEPS * 4 < 300 - 20


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "CUDA" in capsys.readouterr().err
