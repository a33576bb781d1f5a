"""Whatever is switched and whoever is disturbed, every request says what it says alone in an engine of plenty.

The pool holds a third of what the requests want, so that they are preempted all the time; what must have happened in a
run (evictions, swaps, slices, hits, guesses that came true) is asserted, or its equality would prove nothing. Engines
are driven step by step in the test's thread, so that a failure can be repeated.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import strata_lab.scheduler as scheduler_module
from strata_lab.admission import SplitPrefill
from strata_lab.config import toggles
from strata_lab.engine import LLMEngine
from strata_lab.events import StepEvent
from strata_lab.graph_runner import CapturedStep
from strata_lab.resolve import Resolver
from strata_lab.sampling_params import SamplingParams
from strata_lab.speculative.ngram import NgramDrafter
from strata_lab.speculative.speculator import Speculator
from tests.checkpoints import write_checkpoint

SIZE, BLOCKS, LONGEST = 8, 18, 96
SMALL_BUDGET = 9
COMMON = [7 + 3 * i % 60 for i in range(24)]  # what half of the prompts begin with


@dataclasses.dataclass(frozen=True)
class Wish:
    """A request and the step before which it arrives."""

    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int
    arrival: int


def _wish(index: int) -> Wish:
    begin = COMMON if index % 2 else []
    own = [3 + (index * 37 + i * 11) % 90 for i in range(4 + 5 * index % 17)]
    again = [20 + index, 50, 61 + index % 3, 33] * 3  # for drafters, who need something that repeats itself
    params = SamplingParams(temperature=0, max_tokens=18 + 7 * index % 23, ignore_eos=True)
    return Wish((*begin, *own, *again), params, (0, 0, 1, 0, 2)[index % 5], 3 * index if index > 5 else 0)


WISHES = [_wish(i) for i in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama on disk."""
    return write_checkpoint(tmp_path_factory.mktemp("matrix"), "llama")[0]


@pytest.fixture(scope="module")
def expected(folder) -> list[tuple[int, ...]]:
    """What each says alone, one after the other, with nothing switched on that could disturb it."""
    with LLMEngine(folder, device="cpu", dtype="float32", prefix_cache=False, cuda_graph=False) as engine:
        outputs = [engine.generate([list(w.prompt)], w.params)[0] for w in WISHES]
        assert engine.stats().num_preemptions == engine.stats().prefix_hit_tokens == 0
    return [o.token_ids for o in outputs]


@pytest.fixture(scope="module")
def engine(folder):
    """One engine for all tests here, whose pool is a share of very little memory."""
    with pytest.MonkeyPatch.context() as patch:
        block_bytes = 2 * 2 * SIZE * 16 * 2 * 4  # replaced below by the model's own

        def budget(resolver: Resolver, resolved: Any, current: Any) -> int:
            return int(resolved.gpu_memory_utilization * 20 * block_bytes) + 1

        patch.setattr(Resolver, "_memory_budget", budget)
        patch.setattr(scheduler_module, "GROWTH_BLOCKS", 0)  # no room to grow is kept, so that it runs out
        with LLMEngine(folder, device="cpu", dtype="float32", num_kv_blocks=1, block_size=SIZE) as probe:
            block_bytes = probe.stats().kv_bytes
        with LLMEngine(
            folder, device="cpu", dtype="float32", block_size=SIZE, max_model_len=LONGEST, max_num_seqs=6
        ) as made:
            assert made.stats().kv_blocks_total == BLOCKS
            yield made


def serve(engine: LLMEngine, wishes: list[Wish], changes: dict[int, dict[str, Any]]) -> list[tuple[int, ...]]:
    """Tokens of each wish; `changes` are applied before the steps that they name."""
    names: dict[str, Wish] = {}
    step = 0
    while len(names) < len(wishes) or engine.stats().num_running + engine.stats().num_waiting:
        for index, wish in enumerate(wishes):
            if wish.arrival == step:
                name = engine.add_request(list(wish.prompt), wish.params, priority=wish.priority)
                names[name] = wishes[index]
        if step in changes:
            report = engine.apply(**changes[step])
            assert report.ok, report
        engine.step()
        step += 1
        assert step < 3000, "does not end"
    outputs = [engine.output(name) for name in names]
    for name in names:
        engine.forget(name)
    assert {o.finish_reason for o in outputs} == {"length"}, outputs
    by_prompt = {tuple(o.prompt_token_ids): o.token_ids for o in outputs}
    return [by_prompt[wish.prompt] for wish in wishes]


# -- the matrix -------------------------------------------------------------------------------------------------------

FACTORS: dict[str, tuple[Any, Any]] = {
    "preemption": ("recompute", "swap"), "max_num_batched_tokens": (512, SMALL_BUDGET), "prefix_cache": (False, True),
    "scheduling_policy": ("fcfs", "priority"), "pd_split": (False, True), "cuda_graph": (False, True),
    "speculative": ("none", "ngram"), "live changes": (False, True),
}  # fmt: skip
LIVE = {
    10: {"max_num_seqs": 2}, 22: {"max_num_seqs": 6, "max_num_batched_tokens": 30}, 30: {"fused_kernels": False},
    38: {"gpu_memory_utilization": 0.7}, 52: {"continuous_batching": False}, 60: {"gpu_memory_utilization": 0.9},
    66: {"continuous_batching": True, "max_passes": 0}, 80: {"fused_kernels": True, "max_num_seqs": 3},
}  # fmt: skip


def _meetings(row: tuple[int, ...]) -> set[Any]:
    return set(itertools.combinations(enumerate(row), 3))


def covering() -> list[tuple[int, ...]]:
    """Rows of 0 and 1 in which every three factors meet in each of their eight ways; greedy, in a fixed order."""
    rows = list(itertools.product((0, 1), repeat=len(FACTORS)))
    open_, chosen = set().union(*map(_meetings, rows)), []
    while open_:
        best = max(rows, key=lambda row: len(_meetings(row) & open_))
        open_ -= _meetings(best)
        chosen.append(best)
    return chosen


SETTINGS = [{name: FACTORS[name][bit] for name, bit in zip(FACTORS, row, strict=True)} for row in covering()]


def test_every_three_features_meet_in_each_of_their_eight_ways() -> None:
    met = Counter(m for s in SETTINGS for m in itertools.combinations(sorted(s.items()), 3))
    assert len(met) == 56 * 8
    assert len(SETTINGS) < 24


def _drafts_always(engine: LLMEngine) -> None:
    """Guesses whenever there is evidence: whether they pay is not the question here."""
    loop = engine._loop
    loop.parts = dataclasses.replace(loop.parts, speculation=Speculator(NgramDrafter(), None, 4))


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_every_combination_says_what_an_undisturbed_engine_says(setting: dict[str, Any], engine, expected) -> None:
    toggled = {name: value for name, value in setting.items() if name != "live changes"}
    report = engine.apply(**toggled, max_num_seqs=6, max_passes=4, fused_kernels=True, continuous_batching=True)
    assert report.ok, report
    engine.reset_prefix_cache()
    if setting["speculative"] == "ngram":
        _drafts_always(engine)
    loop, before, cursor = engine._loop, engine.stats(), engine.events.cursor
    assert isinstance(loop.parts.runner.step, CapturedStep) == setting["cuda_graph"]
    assert isinstance(loop.scheduler.prefill, SplitPrefill) == setting["pd_split"]

    assert serve(engine, WISHES, LIVE if setting["live changes"] else {}) == expected

    after = engine.stats()
    did = {f.name: getattr(after, f.name) - getattr(before, f.name) for f in dataclasses.fields(after)
           if isinstance(getattr(after, f.name), int)}  # fmt: skip
    steps = [e for e in engine.events.since(cursor)[0] if isinstance(e, StepEvent)]
    assert did["num_preemptions"] >= 3
    assert max(e.kv_blocks_used for e in steps) >= 0.9 * BLOCKS
    if setting["preemption"] == "swap":
        assert did["num_swapped_out"] > 0
        assert did["num_swapped_in"] > 0
    else:
        assert did["num_recomputed_tokens"] > 0
        assert did["num_swapped_out"] == 0
    if setting["max_num_batched_tokens"] == SMALL_BUDGET and not setting["live changes"]:
        assert max(e.num_prefill_tokens + e.num_decode_tokens for e in steps) <= SMALL_BUDGET < len(COMMON)
    assert (did["prefix_hit_tokens"] > 0) == setting["prefix_cache"]
    assert any(e.num_prefill_tokens and e.num_decode_tokens for e in steps) != setting["pd_split"]
    drafted = setting["speculative"] == "ngram" and not setting["live changes"]  # a change asks the policy again
    assert did["num_drafted_tokens"] > 0 if drafted else True
    assert did["num_accepted_tokens"] > 0 if drafted else True
    assert (after.kv_blocks_used, after.swap_blocks_used, after.num_waiting_tokens) == (0, 0, 0)
    loop.scheduler.blocks.check()


# -- changes at any time ----------------------------------------------------------------------------------------------

NUMBERS: dict[str, st.SearchStrategy[Any]] = {
    "max_num_seqs": st.integers(1, 8), "max_num_batched_tokens": st.sampled_from([1, 5, 16, 64, 512]),
    "max_passes": st.integers(0, 4), "num_draft_tokens": st.integers(1, 5), "max_waiting": st.integers(16, 32),
    "max_waiting_tokens": st.integers(2048, 4096), "max_model_len": st.integers(LONGEST - 1, LONGEST),
    "gpu_memory_utilization": st.floats(0.6, 1.0), "watermark": st.sampled_from([0.0, 0.05, 0.3]),
    "watermark_high": st.sampled_from([0.0, 0.5]),
}  # fmt: skip
ALL_PAGES = st.sampled_from([0, LONGEST // SIZE, 500]).map(lambda pages: {"sparse_pages": pages})
NEEDS_ANOTHER_MODEL = {("speculative", "draft")}


def one_change() -> st.SearchStrategy[dict[str, Any]]:
    """One lossless toggle and one of its values, or so many pages that nothing is left out."""
    made = [ALL_PAGES]
    for toggle in toggles():
        if not toggle.lossless:
            continue
        values = (False, True) if toggle.kind == "bool" else toggle.choices
        values = [v for v in values if (toggle.name, v) not in NEEDS_ANOTHER_MODEL]
        strategy = st.sampled_from(values) if values else NUMBERS[toggle.name]
        made.append(strategy.map(lambda value, name=toggle.name: {name: value}))
    return st.one_of(made)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, len(WISHES) - 1), st.integers(-1, 2)),
        st.tuples(st.just("steps"), st.integers(1, 25), st.just(0)),
        st.tuples(st.just("apply"), one_change(), st.just(0)),
    ),
    min_size=10,
    max_size=40,
)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
@given(actions=ACTIONS)
def test_random_changes_during_random_traffic_change_no_text(actions: list[Any], engine, expected) -> None:
    sent: dict[str, int] = {}
    for action, value, priority in actions:
        if action == "add":
            wish = WISHES[value]
            sent[engine.add_request(list(wish.prompt), wish.params, priority=priority)] = value
        elif action == "steps":
            for _ in range(value):
                engine.step()
        else:
            before = engine.optimizations
            for name, result in engine.apply(**value).results.items():
                assert result.status == "refused" or getattr(engine.optimizations, name) == value[name]
                assert result.status != "refused" or (engine.optimizations == before and "try" in result.reason)
    while engine.stats().num_running + engine.stats().num_waiting:
        engine.step()
    for name, value in sent.items():
        assert (engine.output(name).token_ids, engine.output(name).finish_reason) == (expected[value], "length")
        engine.forget(name)
    assert (engine.stats().kv_blocks_used, engine.stats().swap_blocks_used) == (0, 0)
    engine._loop.scheduler.blocks.check()
