"""Other weights while requests run: beside the old ones, in their place, or refused with the numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from strata_lab import build, weight_exchange
from strata_lab.engine import LLMEngine
from strata_lab.sampling_params import SamplingParams
from tests.checkpoints import write_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6]]


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def model(request: Any, tmp_path_factory: Any) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("exchange") / request.param, request.param)[0])


def engine(model: str) -> LLMEngine:
    return LLMEngine(model, device="cpu", weight_format="bf16", num_kv_blocks=64)


def free(monkeypatch: pytest.MonkeyPatch, made: LLMEngine, share: float) -> None:
    """Let only `share` of what int8 weights need be free."""
    needed = made._builder.weight_nbytes("int8") + weight_exchange.conversion_nbytes(made.model_config)
    monkeypatch.setattr(weight_exchange, "free_nbytes", lambda device: int(needed * share))


def test_old_weights_go_before_new_ones_come_and_requests_go_on(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLMEngine(model, device="cpu", weight_format="int8", num_kv_blocks=64) as made:
        expected = [list(o.token_ids) for o in made.generate(PROMPTS, GREEDY)]
    with engine(model) as made:
        free(monkeypatch, made, 0.99)
        old, real, seen = made._loop.parts.weights, build.load_weights, []

        def load(*arguments: Any) -> Any:
            seen.append(old.nbytes)
            return real(*arguments)

        monkeypatch.setattr(build, "load_weights", load)
        stream = made.stream(PROMPTS[0], GREEDY)
        got = [next(stream) for _ in range(3)]
        report = made.apply(weight_format="int8")
        assert report.ok
        assert report.results["weight_format"].status == "rebuilt"
        assert report.swap_ms > 0
        assert seen == [0]
        got += list(stream)
        assert len(got) == 40
        assert made.stats().num_preemptions == 0
        assert [list(o.token_ids) for o in made.generate(PROMPTS, GREEDY)] == expected


def test_with_room_for_both_the_engine_does_not_stand_still(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(model) as made:
        free(monkeypatch, made, 1.0)
        old = made._loop.parts.weights
        assert made.apply(weight_format="int8").ok
        assert old.nbytes > 0


def test_what_cannot_fit_is_refused_with_the_numbers(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(model) as made:
        before = [list(o.token_ids) for o in made.generate(PROMPTS, GREEDY)]
        monkeypatch.setattr(weight_exchange, "free_nbytes", lambda device: 1000)
        monkeypatch.setattr(made._builder, "weight_nbytes", lambda fmt: {"fp32": 9 << 30}.get(fmt, 1 << 20))
        report = made.apply(weight_format="fp32")
        assert report.results["weight_format"].status == "refused"
        assert re.search(r"needs 9\.\d\d GiB .* lower gpu_memory_utilization", report.results["weight_format"].reason)
        assert "try weight_format=" in report.results["weight_format"].reason
        assert made.optimizations.weight_format == "bf16"
        assert [list(o.token_ids) for o in made.generate(PROMPTS, GREEDY)] == before


def test_old_weights_come_back_where_new_ones_cannot_be_loaded(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(model) as made:
        before = [list(o.token_ids) for o in made.generate(PROMPTS, GREEDY)]
        free(monkeypatch, made, 0.99)
        real, calls = build.load_weights, []

        def load(*arguments: Any) -> Any:
            calls.append(arguments[0].weight_format)
            if len(calls) == 1:
                raise MemoryError("no room")
            return real(*arguments)

        monkeypatch.setattr(build, "load_weights", load)
        stream = made.stream(PROMPTS[0], GREEDY)
        first = next(stream)
        report = made.apply(weight_format="int8")
        assert report.results["weight_format"].status == "refused"
        assert "no room" in report.results["weight_format"].reason
        assert calls == ["int8", "bf16"]
        assert [first.token_id, *(e.token_id for e in stream)] == before[0]
        assert [list(o.token_ids) for o in made.generate(PROMPTS, GREEDY)] == before


def test_without_any_weights_the_engine_says_so(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(model) as made:
        free(monkeypatch, made, 0.99)

        def fail(*arguments: Any) -> Any:
            raise MemoryError("no room at all")

        monkeypatch.setattr(build, "load_weights", fail)
        made.start()
        assert not made.apply(weight_format="int8").ok
        answer = made.generate([PROMPTS[0]], GREEDY)[0]
        assert answer.finish_reason == "error"
        assert "no weights" in (answer.error or "")
        assert Path(model).is_dir()
