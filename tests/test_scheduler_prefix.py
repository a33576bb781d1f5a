"""Laws of the prefix cache under the scheduler: what is found is not computed, and no text changes."""

from __future__ import annotations

import pytest

from strata_lab.admission import SplitPrefill, StaticAdmission
from strata_lab.block_manager import BlockManager
from strata_lab.prefix_cache import NoPrefixCache, PrefixCache
from strata_lab.request import Request
from tests.fake_model import make, names, request, slices, undisturbed


def turn(name: str, before: Request, more: int, max_tokens: int = 4) -> Request:
    """The next turn of a conversation: all that was said, and more."""
    new = request(name, more, max_tokens)
    new.prompt_token_ids = before.token_ids + new.prompt_token_ids
    new.token_ids = list(new.prompt_token_ids)
    return new


def test_the_second_turn_computes_only_what_is_new() -> None:
    scheduler, model = make(cached=True)
    first = request("first", prompt=20, max_tokens=8)
    scheduler.add(first)
    model.drain()
    second = turn("second", first, more=5)
    scheduler.add(second)
    batch = model.step()
    # 28 tokens of the first turn, of which the last was never fed back: six full blocks of 4.
    assert slices(batch) == [("second", 24, 9)]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 24)
    model.drain()
    assert second.output_token_ids == undisturbed(second, 256)
    assert (scheduler.blocks.num_hit_tokens, scheduler.blocks.num_asked_tokens) == (24, 20 + 33)


def test_a_common_beginning_is_computed_once_and_held_once() -> None:
    scheduler, model = make(num_blocks=16, cached=True, max_num_batched_tokens=200)
    requests = [request(f"r{i}", 30, 3, text="system", shared=28) for i in range(6)]
    scheduler.add(requests[0])
    model.step()
    for r in requests[1:]:
        scheduler.add(r)
    batch = model.step()
    # 8 blocks for the first and one more for each of the others; without sharing, two of the six would fit.
    assert slices(batch)[1:] == [(f"r{i}", 28, 2) for i in range(1, 6)]
    assert scheduler.blocks.num_used <= 8 + 5
    model.drain()
    assert [r.output_token_ids for r in requests] == [undisturbed(r, 256) for r in requests]
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9], ids=str)
def test_the_last_token_of_a_prompt_is_always_computed(length: int) -> None:
    scheduler, model = make(cached=True)
    for name in "ab":
        scheduler.add(request(name, length, 2, text="same", shared=length))
        batch = model.step()
        assert batch.items[0].samples
        model.drain()
    assert slices(batch) == [("b", (length - 1) // 4 * 4, length - (length - 1) // 4 * 4)]


def test_a_prompt_is_found_slice_by_slice_while_it_is_still_computed() -> None:
    scheduler, model = make(cached=True, max_num_batched_tokens=8)
    scheduler.add(request("a", 20, 2, text="long", shared=20))
    model.step()
    scheduler.add(request("b", 20, 2, text="long", shared=20))
    model.step(), model.step()
    assert scheduler.running[1].num_cached_tokens == 16
    model.drain()


def test_a_preempted_request_finds_its_own_blocks_again_if_they_are_still_there() -> None:
    scheduler, model = make(num_blocks=11, cached=True)
    old, new = request("old", 16, 17), request("new", 8, 12)
    for r in (old, new):
        scheduler.add(r)
    seen = model.drain()
    preempted = [r for batch in seen for r in batch.preempted]
    computed = sum(b.num_tokens for b in seen)
    assert names(preempted) and set(names(preempted)) == {"new"}
    # All that was computed is each text once, what evictions threw away, and less what was found again.
    texts = sum(r.num_tokens - 1 for r in (old, new))
    assert computed == texts + scheduler.num_recomputed_tokens - scheduler.blocks.num_hit_tokens
    assert scheduler.blocks.num_hit_tokens > 0
    assert new.num_cached_tokens == 0, "its own tokens are no saving of the prompt"
    assert [r.output_token_ids for r in (old, new)] == [undisturbed(r, 256) for r in (old, new)]


def test_blocks_that_live_requests_share_cost_a_newcomer_nothing() -> None:
    """Of 12 blocks `a` owns 8 and may take 2 more; `b` will never need more than 8, of which 7 are `a`'s."""

    def admitted(cached: bool) -> list[str]:
        scheduler, model = make(num_blocks=12, cached=cached)
        scheduler.add(request("a", 30, 19, text="system", shared=28))
        model.step()
        scheduler.add(request("b", 30, 2, text="system", shared=28))
        return names(model.step().items)

    assert (admitted(True), admitted(False)) == (["a", "b"], ["a"])


def test_whoever_shares_everything_with_another_does_not_block_a_senior() -> None:
    """Evicting one of two that share all their blocks frees none: both go, and the senior gets its block."""
    scheduler, model = make(num_blocks=64, cached=True)
    scheduler.add(request("senior", 8, 40))
    scheduler.add(request("a", 9, 30, text="t", shared=9))
    model.step()
    scheduler.add(request("b", 9, 30, text="t", shared=9))
    model.step()
    a, b = scheduler.running[1:]
    scheduler.blocks.free("b"), scheduler.blocks.free("a")
    a.num_computed_tokens = b.num_computed_tokens = 0
    for r in (a, b):  # as if a static batch had admitted them, before their first slice
        assert scheduler.blocks.attach(r.request_id, r.token_ids) == 8
        r.num_computed_tokens = 8
    scheduler.blocks.grow("someone else", 4 * scheduler.blocks.num_free)
    while not (batch := model.step()).preempted:
        assert len(batch.items) < 3
    assert set(names(batch.preempted)) == {"a", "b"}
    assert names(batch.items) == ["senior"]


def test_a_static_batch_and_split_prefill_find_prefixes_too() -> None:
    for options in ({"admission": StaticAdmission()}, {"prefill": SplitPrefill(3)}):
        scheduler, model = make(cached=True, **options)
        requests = [request(f"r{i}", 14, 5, text="s", shared=12) for i in range(3)]
        scheduler.add(requests[0])
        model.drain()
        for r in requests[1:]:
            scheduler.add(r)
        model.drain()
        assert [r.num_cached_tokens for r in requests] == [0, 12, 12]
        assert [r.output_token_ids for r in requests] == [undisturbed(r, 256) for r in requests]


def test_what_is_computed_beside_the_steps_is_found_when_it_has_landed() -> None:
    scheduler, model = make(cached=True)
    scheduler.add(request("a", 12, 4, text="s", shared=12))
    held = scheduler.schedule()
    scheduler.hold(held)
    assert scheduler.schedule(decodes_only=True).items == []
    scheduler.add(request("b", 12, 4, text="s", shared=12))
    assert scheduler.blocks.find("b", next(iter(scheduler.waiting)).token_ids) == []
    sampled = model.forward(held)
    scheduler.release(held)
    model.commit(held, sampled)
    model.step()
    assert scheduler.running[1].num_cached_tokens == 8
    model.drain()


def test_what_ended_in_an_error_is_not_found() -> None:
    scheduler, model = make(cached=True)
    bad = request("bad", 12, 4, text="s", shared=12)
    scheduler.add(bad)
    model.step()
    scheduler.finish(bad, "error", "NaN logits")
    scheduler.add(request("next", 12, 4, text="s", shared=12))
    assert slices(model.step()) == [("next", 0, 12)]


def test_the_cache_is_switched_and_dropped_under_running_requests() -> None:
    scheduler, model = make(num_blocks=20, cached=True)
    requests = [request(f"r{i}", 10, 20, text="s", shared=9) for i in range(9)]
    changes = [lambda b: b.use_prefixes(NoPrefixCache()), lambda b: b.use_prefixes(PrefixCache(4)),
               lambda b: b.drop_prefixes()]  # fmt: skip
    for i, r in enumerate(requests):
        scheduler.add(r)
        model.step()
        changes[i % 3](scheduler.blocks)
        scheduler.blocks.check()
    model.drain()
    assert [r.output_token_ids for r in requests] == [undisturbed(r, 256) for r in requests]


def test_a_new_pool_starts_empty_and_its_counters_go_on() -> None:
    scheduler, model = make(cached=True)
    for name in "ab":
        scheduler.add(request(name, 12, 4, text="s", shared=12))
        model.drain()
    assert scheduler.blocks.num_hit_tokens == 8
    scheduler.reset_blocks(BlockManager(32, 4, PrefixCache(4)))
    model.reset()
    scheduler.add(request("c", 12, 4, text="s", shared=12))
    assert slices(model.step()) == [("c", 0, 12)]
    assert (scheduler.blocks.num_hit_tokens, scheduler.blocks.num_asked_tokens) == (8, 36)
