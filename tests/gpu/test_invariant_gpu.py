"""Batch-invariant mode on a card: log probabilities to the last bit, whatever a request is computed beside."""

from __future__ import annotations

from typing import Any

import pytest

from strata_lab.engine import LLMEngine
from strata_lab.sampling_params import SamplingParams
from tests.checkpoints import write_checkpoint
from tests.test_batch_invariant import MATES, TEXT, prompt, said

pytestmark = pytest.mark.gpu
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)
BASE: dict[str, Any] = {
    "device": "cuda", "max_model_len": 128, "max_num_seqs": 32, "block_size": 8, "num_kv_blocks": 512,
    "batch_invariant": True,
}  # fmt: skip
COMPANIES: tuple[dict[str, Any], ...] = (
    {}, {"cuda_graph": False}, {"max_num_batched_tokens": 16}, {"max_num_batched_tokens": 3}, {"pd_split": True},
)  # fmt: skip


def crowded(engine: LLMEngine) -> list[Any]:
    mates = [prompt(i, 3 + i) for i in range(1, MATES + 1)]
    return said(engine.generate([*mates[:9], TEXT, *mates[9:]], PARAMS)[9])


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def folder(request, tmp_path_factory) -> Any:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)[0]


@pytest.mark.parametrize("weight_format", ["bf16", "fp8", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_log_probabilities_are_the_same_bits_in_any_company(folder: Any, dtype: str, weight_format: str) -> None:
    options = BASE | {"dtype": dtype, "weight_format": weight_format}
    with LLMEngine(folder, **options) as engine:
        expected = said(engine.generate([TEXT], PARAMS)[0])
    for company in COMPANIES:
        with LLMEngine(folder, **options | company) as engine:
            assert crowded(engine) == expected, company


def test_a_recomputed_request_and_a_cached_prefix_give_the_same_bits(folder: Any) -> None:
    with LLMEngine(folder, **BASE) as engine:
        expected = said(engine.generate([TEXT], PARAMS)[0])
    with LLMEngine(folder, **BASE, prefix_cache=False) as engine:
        name = engine.add_request(TEXT, PARAMS)
        for step in range(200):
            if step == 9:
                engine._loop.settle()
                engine._loop.scheduler._preempt(engine._loop.scheduler.running[0])
            if engine.step() is None:
                break
        assert said(engine.output(name)) == expected
    with LLMEngine(folder, **BASE) as engine:
        engine.generate([TEXT[:30] + prompt(99, 9)], PARAMS)
        again = engine.generate([TEXT], PARAMS)[0]
        assert (again.num_cached_tokens, said(again)) == (24, expected)


def test_without_the_mode_the_batch_does_change_bits(folder: Any) -> None:
    """The inverse: otherwise there would be nothing to test above."""
    with LLMEngine(folder, **BASE | {"batch_invariant": False, "prefix_cache": False}) as engine:
        assert said(engine.generate([TEXT], PARAMS)[0]) != crowded(engine)


def test_pages_keep_their_tokens_captured_and_ahead_of_the_host(folder: Any) -> None:
    """The choice of blocks inside a graph that feeds its own tokens back, in a pool that preempts."""
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    some = {"device": "cuda", "dtype": "float32", "max_model_len": 128, "block_size": 8, "sparse_pages": 5}
    texts = [prompt(i, 30 + 7 * i) for i in range(4)]
    with LLMEngine(folder, **some, num_kv_blocks=512, cuda_graph=False, prefix_cache=False) as engine:
        alone = [engine.generate([t], greedy)[0].token_ids for t in texts]
        assert engine.apply(sparse_pages=0).ok
        assert [engine.generate([t], greedy)[0].token_ids for t in texts] != alone, "the choice is seen in the tokens"
    with LLMEngine(folder, **some, num_kv_blocks=40, max_num_batched_tokens=16) as engine:
        assert [o.token_ids for o in engine.generate(texts, greedy)] == alone
        assert engine.stats().kv_blocks_used == 0


def test_a_window_keeps_its_tokens_captured_and_ahead_of_the_host(folder: Any) -> None:
    """Sinks and a window through the decode kernel, running ahead, while blocks behind the window are given away."""
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    some = {"device": "cuda", "dtype": "float32", "max_model_len": 128, "block_size": 8, "kv_window": 20, "kv_sinks": 3}
    texts = [prompt(i, 30 + 7 * i) for i in range(4)]
    with LLMEngine(folder, **some, num_kv_blocks=512, cuda_graph=False, prefix_cache=False) as engine:
        alone = [engine.generate([t], greedy)[0].token_ids for t in texts]
    with LLMEngine(folder, **some, num_kv_blocks=40, max_num_batched_tokens=16) as engine:
        assert [o.token_ids for o in engine.generate(texts, greedy)] == alone
        assert engine.stats().kv_blocks_used == 0
