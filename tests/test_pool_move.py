"""Laws of a pool that changes its size: what fits goes on where it was, packed; only the rest is computed again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strata_lab.block_manager import BlockManager
from strata_lab.engine import LLMEngine
from strata_lab.pool_move import take_over
from strata_lab.prefix_cache import PrefixCache
from strata_lab.resolve import Resolver
from strata_lab.sampling_params import SamplingParams
from strata_lab.settings import ConfigError
from tests.checkpoints import write_checkpoint
from tests.fake_model import make, request, undisturbed


def test_what_is_held_is_packed_and_of_the_rest_the_latest_comes_along() -> None:
    old = BlockManager(20, 4, PrefixCache(4))
    for name, count in (("a", 9), ("gone", 12), ("b", 5)):
        old.grow(name, count)
    for name, count in (("first", 5), ("last", 4)):
        old.grow(name, count)
        old.commit(name, list(range(count)) if name == "first" else list(range(50, 54)), count)
    old.free("gone")
    old.free("first")
    old.free("last")
    tables = {name: list(old.table(name)) for name in ("a", "b")}
    new = BlockManager(6, 4, PrefixCache(4))
    moves = take_over(new, old)
    new.check()
    assert sorted(to for _, to in moves) == list(range(6))
    place = dict(moves)
    assert {name: new.table(name) for name in tables} == {n: [place[b] for b in t] for n, t in tables.items()}
    assert (new.num_used, new.num_idle, new.num_free) == (5, 1, 1)
    assert len(new.find("x", [*range(50, 54), 1])) == 1
    assert new.find("y", [*range(5), 1]) == []


def test_a_pool_that_holds_all_of_it_disturbs_nobody_and_a_smaller_one_those_that_would_be_evicted_first() -> None:
    scheduler, model = make(40, 4, cached=True)
    wanted = [request(f"r{i}", prompt=10 + i, max_tokens=30, priority=i == 1) for i in range(3)]
    for r in wanted:
        scheduler.add(r)
    for _ in range(6):
        model.step()
    used = scheduler.blocks.num_used
    for size in (used, 64):
        moves, misfits = scheduler.move_blocks(BlockManager(size, 4, PrefixCache(4)))
        model.take_from_old_pool(moves)
        scheduler.blocks.check()
        assert (len(moves), misfits, scheduler.num_preemptions) == (used, [], 0)
    moves, misfits = scheduler.move_blocks(BlockManager(12, 4, PrefixCache(4)))
    model.take_from_old_pool(moves)
    assert (scheduler.num_preemptions, misfits) == (1, [])
    assert wanted[0] in scheduler.waiting, "fewest computed tokens, and no priority"
    model.drain()
    assert [r.output_token_ids for r in wanted] == [undisturbed(r, 256) for r in wanted]


# -- the engine -------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One whose pool is a share of 40 blocks."""
    folder = write_checkpoint(tmp_path / "m", "llama")[0]
    with LLMEngine(folder, device="cpu", num_kv_blocks=1, block_size=8) as probe:
        block = probe.stats().kv_bytes
    monkeypatch.setattr(Resolver, "_memory_budget", lambda *a: int(a[1].gpu_memory_utilization * 40 * block) + 1)
    with LLMEngine(folder, device="cpu", block_size=8, max_model_len=96, max_num_seqs=6) as made:
        yield made


def served(engine: Any, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
    """Outputs, without the engine's own thread."""
    names = [engine.add_request(p, params) for p in prompts]
    while engine.step():
        pass
    return [engine.output(name) for name in names]


def test_the_pool_shrinks_and_grows_under_running_requests_that_compute_nothing_twice(engine: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [[5 + i, *range(40, 60)] for i in range(3)]
    expected = [served(engine, [p], params)[0].token_ids for p in prompts]
    engine.reset_prefix_cache()
    names = [engine.add_request(p, params) for p in prompts]
    for share in (0.45, 1.0, 0.6, 0.9):
        for _ in range(8):
            engine.step()
        assert engine.apply(gpu_memory_utilization=share).results["gpu_memory_utilization"].status == "rebuilt"
        assert engine.stats().kv_blocks_total == round(40 * share)
        assert engine.stats().num_running == 3
    while engine.step():
        pass
    assert [engine.output(name).token_ids for name in names] == expected
    stats = engine.stats()
    assert (stats.num_preemptions, stats.num_recomputed_tokens, stats.kv_blocks_used) == (0, 0, 0)
    engine.apply(gpu_memory_utilization=0.8)
    assert served(engine, prompts[:1], params)[0].num_cached_tokens > 0, "the prefix cache came along"


def test_another_number_format_is_another_content_and_computed_again(engine: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine.add_request([5, *range(40, 60)], params, request_id="r")
    for _ in range(8):
        engine.step()
    assert engine.apply(kv_cache_dtype="bf16").ok
    assert engine.stats().num_recomputed_tokens > 0


def test_on_a_card_a_pool_that_finds_no_room_beside_the_one_in_force_is_refused_with_a_share_that_does(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver, total, free = engine._builder, 100 << 30, 30 << 30
    monkeypatch.setattr(resolver, "device", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    in_force = SimpleNamespace(kv=SimpleNamespace(nbytes=50 << 30))
    resolver._check_beside(free, resolver.config.optimizations, in_force)
    with pytest.raises(ConfigError, match=r"=0.9 makes a KV pool of 50.00 GiB .* \(50.00 GiB\) .* 30.00 .*; try 0.70"):
        resolver._check_beside(50 << 30, resolver.config.optimizations, in_force)
