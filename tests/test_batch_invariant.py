"""Batch-invariant mode: log probabilities to the last bit, alone and in every company a request can be in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strata_lab import resolve
from strata_lab.engine import LLMEngine
from strata_lab.sampling_params import SamplingParams
from tests.checkpoints import write_checkpoint

PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=3)
MATES = 31
BASE: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": 96, "max_num_seqs": 32, "block_size": 8,
    "batch_invariant": True,
}  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "qwen3_moe", "llama by torch"])
def model(request, tmp_path_factory) -> tuple[Any, bool]:
    """A tiny model on disk, and whether plain torch computes it."""
    family = request.param.split()[0]
    return write_checkpoint(tmp_path_factory.mktemp(family), family)[0], "torch" in request.param


@pytest.fixture
def made(model, monkeypatch: pytest.MonkeyPatch):
    folder, plain = model
    if plain:
        monkeypatch.setattr(resolve, "why_no_cpu_kernels", lambda config, progress: "this test wants plain torch")
    return lambda **options: LLMEngine(folder, **BASE | options)


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


TEXT = prompt(0, 37)


def said(output: Any) -> list[tuple[int, float, tuple[tuple[int, float], ...]]]:
    """Tokens and log probabilities, which are compared with == : to the last bit."""
    return [(p.token_id, p.logprob, tuple(p.top.items())) for p in output.logprobs]


def alone(engine: LLMEngine) -> list[Any]:
    return said(engine.generate([TEXT], PARAMS)[0])


def crowded(engine: LLMEngine) -> list[Any]:
    """The text's output among `MATES` others of other lengths."""
    mates = [prompt(i, 3 + i) for i in range(1, MATES + 1)]
    return said(engine.generate([*mates[:9], TEXT, *mates[9:]], PARAMS)[9])


@pytest.fixture
def expected(made) -> list[Any]:
    with made() as engine:
        return alone(engine)


@pytest.mark.parametrize(
    "options",
    [{}, {"cuda_graph": False}, {"max_num_batched_tokens": 16}, {"pd_split": True}, {"max_num_batched_tokens": 3}],
    ids=str,
)  # fmt: skip
def test_log_probabilities_are_the_same_bits_in_any_company(options: dict[str, Any], made, expected) -> None:
    with made(**options) as engine:
        assert crowded(engine) == expected


def test_a_recomputed_request_and_a_cached_prefix_give_the_same_bits(made, expected) -> None:
    with made(prefix_cache=False) as engine:
        name = engine.add_request(TEXT, PARAMS)
        for step in range(100):
            if step == 5:
                engine._loop.scheduler._preempt(engine._loop.scheduler.running[0])
            if engine.step() is None:
                break
        assert engine.stats().num_preemptions == 1
        assert said(engine.output(name)) == expected
    with made() as engine:
        engine.generate([TEXT[:30] + prompt(99, 9)], PARAMS)
        again = engine.generate([TEXT], PARAMS)[0]
        assert (again.num_cached_tokens, said(again)) == (24, expected)


def test_what_was_computed_without_the_mode_is_not_found_with_it(made, expected) -> None:
    with made(batch_invariant=False) as engine:
        crowded(engine)
        answer = engine.apply(batch_invariant=True).results["batch_invariant"]
        output = engine.generate([TEXT], PARAMS)[0]
        anyway = answer.reason.startswith("No effect here: each C++ operator")
        assert output.num_cached_tokens == (32 if anyway else 0)
        assert said(output) == expected


def test_without_the_mode_results_differ_where_the_mode_has_an_effect(made, model) -> None:
    """The inverse. The C++ operators give a dense model the same bits anyway, and `explain` says so."""
    with made(batch_invariant=False, prefix_cache=False) as engine:
        differs = alone(engine) != crowded(engine)
        assert differs != engine.explain()["batch_invariant"].startswith("No effect here")
