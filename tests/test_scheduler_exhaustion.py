"""Laws of an exhausted KV pool: who is evicted, who waits, who comes back, and that the text never changes."""

from __future__ import annotations

import random
from typing import Any

import pytest

import strata_lab.scheduler as scheduler_module
from strata_lab.admission import StaticAdmission
from strata_lab.request import Request, RequestState
from strata_lab.scheduler import GROWTH_BLOCKS, Scheduler
from tests.fake_model import FakeModel, exhausted, make, names, request, slices, undisturbed


def crowd(**options: Any) -> tuple[Scheduler, FakeModel, list[Request]]:
    """Six requests that grow to 11 blocks each in a pool of 24."""
    scheduler, model = make(num_blocks=24, **options)
    requests = [request(f"r{i}", prompt=5 + i, max_tokens=36) for i in range(6)]
    for r in requests:
        scheduler.add(r)
    return scheduler, model, requests


def test_preempted_requests_resume_with_identical_tokens() -> None:
    scheduler, model, requests = crowd()
    lost = sum(r.num_computed_tokens for r in requests)
    batches = model.drain()
    preempted = [r for batch in batches for r in batch.preempted]
    assert len(preempted) == scheduler.num_preemptions == sum(r.num_preemptions for r in requests) > 0
    assert scheduler.num_recomputed_tokens > lost == 0
    assert sum(b.num_tokens for b in batches) == scheduler.num_recomputed_tokens + sum(
        r.num_tokens - 1 for r in requests
    )
    assert [r.output_token_ids for r in requests] == [undisturbed(r, 256) for r in requests]


def test_the_victim_is_the_one_with_the_fewest_computed_tokens_of_the_lowest_priority() -> None:
    scheduler, _ = exhausted(("a", 4, 0), ("b", 12, 0), ("c", 8, 0), ("d", 11, 0), num_blocks=9)
    batch = scheduler.schedule()
    assert names(batch.preempted) == ["c"]
    assert names(batch.items) == ["a", "b", "d"]
    scheduler, _ = exhausted(("a", 4, 0), ("b", 12, -1), ("c", 8, 0), ("d", 11, -2), num_blocks=9)
    assert names(scheduler.schedule().preempted) == ["d"]


def test_of_equal_victims_the_latest_arrival_loses() -> None:
    scheduler, _ = exhausted(("a", 4, 0), ("b", 7, 0), ("c", 7, 0), num_blocks=5)
    assert names(scheduler.schedule().preempted) == ["c"]


def test_nobody_evicts_a_senior_and_who_finds_no_victim_waits_with_its_blocks() -> None:
    scheduler, model = exhausted(("a", 5, 0), ("b", 7, 0), ("c", 8, 0), num_blocks=6)
    first = model.step()  # c is at a block boundary; a and b are not
    assert (names(first.items), first.preempted) == (["a", "b"], [])
    assert len(scheduler.blocks.table("c")) == 2
    second = model.step()  # now b is at a boundary, and c is its junior
    assert (names(second.items), names(second.preempted)) == (["a", "b"], ["c"])


def test_a_junior_waits_for_a_senior_that_is_still_computing_its_prompt() -> None:
    """a arrived later with a higher priority; b stands at a block boundary and the pool is exhausted."""
    scheduler, model = make(max_num_batched_tokens=9)
    scheduler.add(request("b", prompt=4))
    model.step()
    scheduler.add(request("a", prompt=40, priority=1))
    assert slices(model.step()) == [("b", 4, 1), ("a", 0, 8)]
    scheduler.blocks.grow("someone else", 4 * scheduler.blocks.num_free)
    assert slices(model.step()) == [("b", 5, 1)]  # a has no block and evicts nobody who has a place in the step
    model.step(), model.step()
    batch = model.step()
    assert (slices(batch), names(batch.preempted)) == ([("a", 8, 8)], ["b"])


def test_a_place_in_the_step_protects_from_eviction() -> None:
    """With 2 places for 3 decodes the turn is c, then a at a block boundary: c has fewer tokens, but b is evicted."""
    scheduler, model = exhausted(("a", 7, 0), ("b", 9, 0), ("c", 5, 0), num_blocks=7)
    scheduler.configure(max_num_batched_tokens=2)
    assert names(model.step().items) == ["a", "b"]
    batch = model.step()
    assert (names(batch.items), names(batch.preempted)) == (["c", "a"], ["b"])


def test_who_owns_no_block_is_not_evicted() -> None:
    scheduler, model = make(admission=StaticAdmission(), max_num_batched_tokens=12)
    for name, prompt in (("a", 4), ("b", 8), ("c", 8)):
        scheduler.add(request(name, prompt=prompt))
    model.step()
    assert (names(scheduler.running), scheduler.blocks.table("c")) == (["a", "b", "c"], [])
    scheduler.blocks.grow("someone else", 4 * scheduler.blocks.num_free)
    assert names(model.step().preempted) == ["b"]


def test_a_slice_shrinks_to_the_room_in_the_pool() -> None:
    scheduler, model = make(max_num_batched_tokens=8)
    scheduler.add(request("a", prompt=40))
    model.step()
    scheduler.blocks.grow("someone else", 4 * (scheduler.blocks.num_free - 1))
    assert slices(model.step()) == [("a", 8, 4)]


def test_higher_priority_keeps_blocks_however_late_it_came() -> None:
    scheduler, _ = exhausted(("a", 11, 0), ("b", 4, 1), num_blocks=4)
    assert names(scheduler.running) == ["b", "a"]
    assert names(scheduler.schedule().preempted) == ["a"]


def test_a_preempted_request_loses_blocks_but_no_tokens_and_goes_to_the_front() -> None:
    scheduler, _ = exhausted(("a", 4, 0), ("b", 7, 0), num_blocks=3)
    scheduler.add(request("late"))
    b = scheduler.running[1]
    tokens = list(b.token_ids)
    scheduler.schedule()
    assert names(scheduler.waiting) == ["b", "late"]
    assert (b.state, b.num_computed_tokens, b.num_preemptions) == (RequestState.PREEMPTED, 0, 1)
    assert (b.token_ids, scheduler.blocks.table("b")) == (tokens, [])
    assert (scheduler.num_preemptions, scheduler.num_recomputed_tokens) == (1, 7)


def test_a_step_that_evicts_admits_nobody() -> None:
    _, model, _ = crowd()
    for batch in model.drain():
        if batch.preempted:
            assert all(item.start > 0 for item in batch.items)
            assert not {r.request_id for r in batch.preempted} & set(names(batch.items))


@pytest.mark.parametrize(("prompt_blocks", "admitted"), [(5, True), (6, False)])
def test_a_newcomer_is_admitted_only_if_everyone_can_still_grow(prompt_blocks: int, admitted: bool) -> None:
    """Of 10 blocks a owns 1 and may take 2 more, so b may have 7: those of its prompt and 2 to grow."""
    assert GROWTH_BLOCKS == 2
    scheduler, model = make(num_blocks=10)
    scheduler.add(request("a", prompt=3, max_tokens=30))
    model.step()
    scheduler.add(request("b", prompt=4 * prompt_blocks, max_tokens=16))
    assert ("b" in names(model.step().items)) == admitted


def test_room_for_growth_is_not_asked_for_those_who_will_not_grow() -> None:
    scheduler, model = make(num_blocks=4, max_num_seqs=4)
    for name in "abcd":
        scheduler.add(request(name, prompt=2, max_tokens=3))  # at most 4 slots: one block each, never more
    assert names(model.step().items) == ["a", "b", "c", "d"]
    assert scheduler.num_preemptions == 0


def test_room_for_growth_halves_the_recomputed_tokens_for_a_tenth_more_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trade of decision 0001, on fewer requests."""

    def cost(growth: int) -> tuple[int, int]:
        monkeypatch.setattr(scheduler_module, "GROWTH_BLOCKS", growth)
        rng = random.Random(1)
        scheduler, model = make(100, 16, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=1024)
        for i in range(60):
            scheduler.add(request(f"r{i}", prompt=rng.randint(8, 200), max_tokens=rng.randint(20, 300)))
        steps = 0
        while scheduler.has_work:
            batch = scheduler.schedule()
            model.commit(batch, {i.request.request_id: 1 for i in batch.items if i.samples})
            steps += 1
        return scheduler.num_recomputed_tokens, steps

    (recomputed_0, steps_0), (recomputed_2, steps_2) = cost(0), cost(GROWTH_BLOCKS)
    assert 0 < recomputed_2 < recomputed_0 / 2
    assert steps_2 < 1.1 * steps_0


def test_each_eviction_makes_the_next_admission_more_patient() -> None:
    def admitted_with(num_preemptions: int) -> bool:
        scheduler, model = make(num_blocks=12)
        scheduler.add(request("a", prompt=3, max_tokens=45))
        model.step()
        b = request("b", prompt=20, max_tokens=20)
        b.num_preemptions = num_preemptions
        scheduler.add(b)
        return "b" in names(model.step().items)

    # a owns 1 of 12 and may take 2 + n, b takes 5 + 2 + n: 9 + 2n of the 11 that are free.
    assert [admitted_with(n) for n in range(4)] == [True, True, False, False]


def test_a_pool_of_one_request_never_deadlocks() -> None:
    scheduler, model = make(num_blocks=3, block_size=2, max_num_batched_tokens=2)
    requests = [request(f"r{i}", prompt=1 + i, max_tokens=6 - i) for i in range(5)]
    for r in requests:
        scheduler.add(r)
    model.drain(limit=120)
    assert [r.output_token_ids for r in requests] == [undisturbed(r, 256) for r in requests]
