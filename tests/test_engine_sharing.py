"""Laws of the engine with a prefix cache, priorities and deadlines: what is saved, and that no text changes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from strata_lab.config import Optimizations
from strata_lab.engine import LLMEngine
from strata_lab.prefix_cache import PrefixCache
from strata_lab.sampling_params import RequestError, SamplingParams
from tests.checkpoints import write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SIZE = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama on disk."""
    return write_checkpoint(tmp_path_factory.mktemp("sharing"), "llama")[0]


def make(folder, **options: Any) -> LLMEngine:
    defaults = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "block_size": SIZE, "cuda_graph": False}
    return LLMEngine(folder, **(defaults | options))


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 90, (length,), generator=generator).tolist()


def conversation(engine: LLMEngine, turns: int = 3) -> list[Any]:
    """Outputs of turns that each repeat all that was said."""
    said, outputs = prompt(1, 21), []
    for turn in range(turns):
        outputs += engine.generate([said], GREEDY)
        said = [*said, *outputs[-1].token_ids, *prompt(turn + 2, 5)]
    return outputs


def test_a_conversation_computes_each_turn_once_and_says_the_same(folder) -> None:
    with make(folder, prefix_cache=False) as engine:
        expected = conversation(engine)
        assert [o.num_cached_tokens for o in expected] == [0, 0, 0]
        assert engine.stats().prefix_asked_tokens == 0
    with make(folder) as engine:
        outputs = conversation(engine)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
        # Turns of 21, 38 and 55 tokens; of each 12 more but the last were computed: 32 of them in the first, 49 then.
        assert [o.num_cached_tokens for o in outputs] == [0, 32, 48]
        stats = engine.stats()
        assert (stats.prefix_hit_tokens, stats.prefix_asked_tokens) == (80, 21 + 38 + 55)
        assert stats.prefix_hit_rate == 80 / 114
        assert stats.kv_blocks_used == 0 and stats.kv_blocks_cached == (55 + 11) // SIZE
        assert stats.kv_fragmentation == 0.0


def test_requests_in_flight_share_a_common_beginning_and_say_what_they_say_alone(folder) -> None:
    prompts = [prompt(1, 40) + prompt(10 + i, 6) for i in range(5)]
    with make(folder, prefix_cache=False) as engine:
        expected = [engine.generate([p], GREEDY)[0].token_ids for p in prompts]
    with make(folder, pd_split=True) as engine:
        engine.generate([prompts[0]], GREEDY)
        outputs = engine.generate(prompts, GREEDY)
        assert [o.token_ids for o in outputs] == expected
        assert [o.num_cached_tokens for o in outputs] == [40] * 5


def test_after_a_change_of_weights_nothing_computed_with_the_old_ones_is_found(folder) -> None:
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with make(folder, weight_format="int8") as engine:
        expected = engine.generate([prompt(1, 30)], GREEDY)[0].token_ids
    with make(folder, weight_format="fp32") as engine:
        other = engine.generate([prompt(1, 30)], GREEDY)[0]
        stream = engine.stream(prompt(1, 30), long)  # goes on under the new weights, over a cache of the old ones
        next(stream)
        assert engine.apply(weight_format="int8").ok
        for _ in range(40):
            next(stream)
        first, second = (engine.generate([prompt(1, 30)], GREEDY)[0] for _ in range(2))
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 24)
        assert first.token_ids == second.token_ids == expected
        stream.close()
    assert other.num_cached_tokens == 0


def test_a_new_pool_and_a_reset_start_empty_and_other_settings_keep_what_is_known(folder) -> None:
    def cached(engine: LLMEngine) -> int:
        return engine.generate([prompt(1, 30)], GREEDY)[0].num_cached_tokens

    with make(folder) as engine:
        assert [cached(engine), cached(engine)] == [0, 24]
        changed = {"fused_kernels": False, "max_num_seqs": 3, "pd_split": True, "continuous_batching": False,
                   "scheduling_policy": "priority"}  # fmt: skip
        for name, value in changed.items():
            assert engine.apply(**{name: value}).ok
            assert cached(engine) == 24, name
        assert engine.apply(kv_cache_dtype="bf16").ok
        assert [cached(engine), cached(engine)] == [0, 24]
        engine.reset_prefix_cache()
        assert [cached(engine), cached(engine)] == [0, 24]
        assert engine.apply(prefix_cache=False).results["prefix_cache"].status == "applied"
        assert [cached(engine), cached(engine), engine.stats().kv_blocks_cached] == [0, 0, 0]
        assert engine.apply(prefix_cache=True).ok
        assert [cached(engine), cached(engine)] == [0, 24]
        assert engine.stats().prefix_hit_tokens == 24 * 9


def test_a_sampled_text_is_the_same_behind_a_cached_beginning(folder) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=20, ignore_eos=True, logprobs=1)
    with make(folder) as engine:
        first, second = (engine.generate([prompt(3, 33)], params)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert first.token_ids == second.token_ids
    for a, b in zip(first.logprobs, second.logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_everything_off_has_no_cache(folder) -> None:
    assert not Optimizations.none().as_dict()["prefix_cache"]
    with make(folder, optimizations=Optimizations.none()) as engine:
        assert not isinstance(engine._loop.scheduler.blocks.prefixes, PrefixCache)


# -- deadlines --------------------------------------------------------------------------------------------------------


def test_a_request_past_its_deadline_ends_with_what_it_has(folder) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, timeout_s=1e-9)
    with make(folder) as engine:
        output = engine.generate(["some words"], params)[0]
        assert (output.finish_reason, output.text, output.token_ids) == ("timeout", "", ())
        stream = engine.stream("some words", SamplingParams(max_tokens=200, ignore_eos=True, timeout_s=3600))
        next(stream)
        request = engine._loop.session(stream.request_id).request
        assert request.deadline_s is not None
        engine._loop.scheduler._deadlines[0] = (0.0, *engine._loop.scheduler._deadlines[0][1:])
        events = list(stream)
        assert (events[-1].finish_reason, events[-1].token_id) == ("timeout", -1)
        assert engine.stats().kv_blocks_used == 0
        assert engine.generate(["some words"], GREEDY)[0].finish_reason == "length"


@pytest.mark.parametrize("value", [0, -1, True, "5", float("nan")])
def test_a_bad_deadline_says_what_works(value: Any) -> None:
    with pytest.raises(RequestError, match=r"timeout_s=.* must be a number in \(0, 1e\+09\]; try 30"):
        SamplingParams(timeout_s=value)


# -- priorities -------------------------------------------------------------------------------------------------------


def test_an_urgent_request_starts_in_the_place_of_another_which_then_goes_on_unchanged(folder) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with make(folder, max_num_seqs=1) as engine:
        expected = [engine.generate([prompt(i, 9)], params)[0].token_ids for i in range(2)]
    with make(folder, max_num_seqs=1, scheduling_policy="priority") as engine:
        slow = engine.add_request(prompt(0, 9), params)
        for _ in range(20):
            engine.step()
        urgent = engine.add_request(prompt(1, 9), params, priority=1)
        event = engine.step()
        assert event is not None
        assert (event.num_preempted, [t.request_id for t in event.tokens]) == (1, [urgent])
        while engine.step():
            pass
        outputs = [engine.output(name) for name in (slow, urgent)]
        assert [o.token_ids for o in outputs] == expected
        assert engine.stats().num_preemptions == 1
        assert engine.stats().prefix_hit_tokens > 0, "what was preempted is found again"


def test_the_second_turn_starts_in_a_fraction_of_the_time_of_the_first(tmp_path: Path) -> None:
    """The bar on the default model is 20%; this model is so small that a step's fixed cost is most of it."""
    folder = write_checkpoint(tmp_path / "model", "llama", max_position_embeddings=4096)[0]
    with make(folder, max_model_len=2048, max_num_batched_tokens=2048) as engine:
        engine.generate([prompt(9, 600)], GREEDY)  # warm
        engine.reset_prefix_cache()
        times = []
        for _ in range(3):
            said = prompt(int(time.perf_counter() * 1e6) % 10**6, 1500)
            first = engine.generate([said], GREEDY)[0]
            second = engine.generate([[*said, *first.token_ids, 5, 6, 7]], GREEDY)[0]
            assert second.num_cached_tokens >= 1500 // SIZE * SIZE
            assert first.ttft_ms is not None and second.ttft_ms is not None
            times.append(second.ttft_ms / first.ttft_ms)
    assert min(times) < 0.5
