"""Laws of the scheduler, checked with a fake model whose answers come only from what the block tables lead to.

`FakeModel` keeps a KV pool in which a slot holds a token id. It writes the tokens of each scheduled slice through the
block table and derives the next token from what it *reads back* through it, so a wrong table, a block with two owners,
a stale slot or a skipped token changes the text. Free slots are poisoned before every step.
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import strata_lab.scheduler as scheduler_module
from strata_lab.batch import ScheduledBatch
from strata_lab.block_manager import BlockManager
from strata_lab.config import ConfigError
from strata_lab.request import Request, RequestError, RequestState, SamplingParams
from strata_lab.scheduler import GROWTH_BLOCKS, MAX_WAITING, ContinuousAdmission, QueueFull, Scheduler, StaticAdmission

POISON = -1


def next_token(tokens: Iterable[int]) -> int:
    return zlib.crc32(repr(list(tokens)).encode()) % 1000


def undisturbed(request: Request, max_model_len: int) -> list[int]:
    """What a request alone on an endless machine generates."""
    tokens = list(request.prompt_token_ids)
    while len(tokens) - request.num_prompt_tokens < request.params.max_tokens and len(tokens) < max_model_len:
        tokens.append(next_token(tokens))
    return tokens[request.num_prompt_tokens :]


class FakeModel:
    """Runs batches of one scheduler and finishes requests as the engine does."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.now_s = 0.0
        self.reset()

    def reset(self) -> None:
        blocks = self.scheduler.blocks
        self.kv = [[POISON] * blocks.block_size for _ in range(blocks.num_blocks)]

    def step(self) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        sampled = self.forward(batch)
        self.commit(batch, sampled)
        return batch

    def forward(self, batch: ScheduledBatch) -> dict[str, int]:
        size = self.scheduler.blocks.block_size
        owned = {b for r in self.scheduler.running for b in self.scheduler.blocks.table(r.request_id)}
        for block in set(range(len(self.kv))) - owned:
            self.kv[block] = [POISON] * size
        for item in batch.items:
            for position in range(item.start, item.start + item.num_tokens):
                self.kv[item.block_table[position // size]][position % size] = item.request.token_ids[position]
        sampled = {}
        for item in batch.items:
            if item.samples:
                length = item.start + item.num_tokens
                sampled[item.request.request_id] = next_token(
                    self.kv[item.block_table[p // size]][p % size] for p in range(length)
                )
        return sampled

    def commit(self, batch: ScheduledBatch, sampled: dict[str, int]) -> None:
        self.now_s += 1.0
        self.scheduler.commit(batch)
        for item in batch.items:
            request = item.request
            if request.request_id not in sampled or request.finished:
                continue
            request.append(sampled[request.request_id], self.now_s)
            full = request.num_output_tokens >= request.params.max_tokens
            if full or request.num_tokens >= self.scheduler.max_model_len:
                self.scheduler.finish(request, "length")

    def drain(self, limit: int = 10_000) -> list[ScheduledBatch]:
        batches = []
        while self.scheduler.has_work:
            assert len(batches) < limit, "does not drain"
            batches.append(self.step())
        return batches


def make(num_blocks: int = 64, block_size: int = 4, **options: Any) -> tuple[Scheduler, FakeModel]:
    settings_ = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "admission": ContinuousAdmission(),
        **options,
    }
    scheduler = Scheduler(BlockManager(num_blocks, block_size), **settings_)
    return scheduler, FakeModel(scheduler)


def request(name: str, prompt: int = 4, max_tokens: int = 8, priority: int = 0) -> Request:
    ids = [zlib.crc32(f"{name}{i}".encode()) % 1000 for i in range(prompt)]
    return Request(name, ids, SamplingParams(max_tokens=max_tokens), priority=priority)


def names(items: Iterable[Any]) -> list[str]:
    return [(item if isinstance(item, Request) else item.request).request_id for item in items]


def slices(batch: ScheduledBatch) -> list[tuple[str, int, int]]:
    return [(i.request.request_id, i.start, i.num_tokens) for i in batch.items]


# -- one request ------------------------------------------------------------------------------------------------------


def test_a_request_goes_through_prefill_then_one_token_per_step() -> None:
    scheduler, model = make()
    a = request("a", prompt=6, max_tokens=3)
    scheduler.add(a)
    first, second, third = model.drain()
    assert (slices(first), first.is_decode_only, first.items[0].samples) == ([("a", 0, 6)], False, True)
    assert (slices(second), second.is_decode_only, second.num_tokens) == ([("a", 6, 1)], True, 1)
    assert slices(third) == [("a", 7, 1)]
    assert (a.state, a.finish_reason, a.output_token_ids) == (RequestState.FINISHED, "length", undisturbed(a, 256))
    assert scheduler.blocks.num_free == 64


def test_a_prompt_longer_than_the_budget_is_sliced_and_only_the_last_slice_samples() -> None:
    scheduler, model = make(max_num_batched_tokens=5)
    a = request("a", prompt=12, max_tokens=1)
    scheduler.add(a)
    batches = model.drain()
    assert [slices(b) for b in batches] == [[("a", 0, 5)], [("a", 5, 5)], [("a", 10, 2)]]
    assert [b.items[0].samples for b in batches] == [False, False, True]
    assert [(b.num_prefill_tokens, b.num_decode_tokens) for b in batches] == [(5, 0), (5, 0), (2, 0)]
    assert a.output_token_ids == undisturbed(a, 256)


def test_whether_an_item_samples_is_fixed_when_the_step_is_built() -> None:
    scheduler, model = make()
    scheduler.add(request("a"))
    batch = model.step()  # the token is appended by now
    assert batch.items[0].samples
    assert scheduler.running[0].is_decoding


@pytest.mark.parametrize(("prompt", "blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)], ids=str)
def test_the_table_covers_exactly_the_tokens_of_the_step(prompt: int, blocks: int) -> None:
    """Blocks of 4: the prompt fills ceil(prompt / 4); the token sampled from it takes its slot one step later."""
    scheduler, model = make()
    scheduler.add(request("a", prompt=prompt, max_tokens=12))
    model.step()
    assert len(scheduler.blocks.table("a")) == blocks
    for written in range(prompt + 1, prompt + 6):
        model.step()
        assert len(scheduler.blocks.table("a")) == -(-written // 4)


@pytest.mark.parametrize(("prompt", "max_tokens"), [(4, 13), (1, 16), (15, 2), (16, 1)], ids=str)
def test_the_last_token_needs_no_slot(prompt: int, max_tokens: int) -> None:
    """prompt + max_tokens - 1 = 16 slots = all 4 blocks of 4: it fits; one more token does not."""
    scheduler, model = make(num_blocks=4)
    a = request("a", prompt=prompt, max_tokens=max_tokens)
    scheduler.add(a)
    model.drain()
    assert a.output_token_ids == undisturbed(a, 256)
    with pytest.raises(RequestError, match="may need 5 KV blocks of 4 tokens and the pool has 4"):
        scheduler.add(request("b", prompt=prompt, max_tokens=max_tokens + 1))


def test_max_model_len_bounds_the_slots_a_request_can_need() -> None:
    scheduler, model = make(num_blocks=4, max_model_len=17)
    a = request("a", prompt=16, max_tokens=500)
    b = request("b", prompt=2, max_tokens=500)
    scheduler.add(a)
    scheduler.add(b)
    model.drain()
    assert (a.num_output_tokens, b.num_output_tokens) == (1, 15)
    assert (a.output_token_ids, b.output_token_ids) == (undisturbed(a, 17), undisturbed(b, 17))


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_prompt_without_room_for_a_token_is_refused_with_the_numbers() -> None:
    scheduler, _ = make(max_model_len=16)
    with pytest.raises(
        RequestError, match=r"'a' has 16 tokens .* max_model_len=16; try at most 15 .* max_model_len=17"
    ):
        scheduler.add(request("a", prompt=16))
    scheduler.add(request("b", prompt=15))


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fix"), [(10, 100, "max_tokens=7"), (20, 5, "max_tokens=1 and a prompt 4 tokens shorter")]
)
def test_a_request_larger_than_the_pool_is_refused_with_numbers_that_work(
    prompt: int, max_tokens: int, fix: str
) -> None:
    scheduler, model = make(num_blocks=4)
    needed = -(-(prompt + max_tokens - 1) // 4)
    with pytest.raises(RequestError) as error:
        scheduler.add(request("a", prompt=prompt, max_tokens=max_tokens))
    assert f"may need {needed} KV blocks of 4 tokens and the pool has 4; try {fix}, or num_kv_blocks={needed}" in str(
        error.value
    )
    assert not scheduler.has_work
    scheduler.add(request("a", prompt=min(prompt, 16), max_tokens=7 if prompt == 10 else 1))
    model.drain()


def test_the_queue_is_bounded_and_the_error_names_the_numbers() -> None:
    scheduler, _ = make(max_waiting=2)
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    with pytest.raises(QueueFull, match=r"2 requests wait and max_waiting=2; try again later, or max_waiting=4"):
        scheduler.add(request("c"))
    scheduler.schedule()  # both are admitted
    scheduler.add(request("c"))
    assert make()[0].max_waiting == MAX_WAITING == 1024


def test_an_id_in_use_and_an_empty_prompt_are_refused() -> None:
    scheduler, model = make()
    scheduler.add(request("a"))
    with pytest.raises(RequestError, match="request_id='a' is in use; try another"):
        scheduler.add(request("a"))
    with pytest.raises(RequestError, match="'b' has an empty prompt; try at least one token"):
        scheduler.add(request("b", prompt=0))
    model.drain()
    scheduler.add(request("a"))


# -- sharing a step ---------------------------------------------------------------------------------------------------


def test_decodes_come_first_and_prompts_fill_the_rest_in_order_of_arrival() -> None:
    scheduler, model = make(max_num_batched_tokens=10)
    scheduler.add(request("a", prompt=4))
    scheduler.add(request("b", prompt=4))
    model.step()
    scheduler.add(request("c", prompt=13))
    scheduler.add(request("d", prompt=6))
    assert [slices(model.step()) for _ in range(3)] == [
        [("a", 4, 1), ("b", 4, 1), ("c", 0, 8)],
        [("a", 5, 1), ("b", 5, 1), ("c", 8, 5), ("d", 0, 3)],
        [("a", 6, 1), ("b", 6, 1), ("c", 13, 1), ("d", 3, 3)],
    ]


def test_decodes_never_wait_for_prompts() -> None:
    scheduler, model = make(num_blocks=256, max_num_batched_tokens=8)
    old = [request(f"old{i}", prompt=2, max_tokens=30) for i in range(4)]
    for r in old:
        scheduler.add(r)
    while not all(r.is_decoding for r in old):
        model.step()
    for i in range(4):
        scheduler.add(request(f"new{i}", prompt=50, max_tokens=2))
    for _ in range(20):
        assert set(names(model.step().items)) >= {"old0", "old1", "old2", "old3"}


def test_at_most_max_num_seqs_run() -> None:
    scheduler, model = make(max_num_seqs=3)
    for i in range(7):
        scheduler.add(request(f"r{i}", max_tokens=2 + i))
    sizes = [len(batch.items) for batch in model.drain()]
    assert max(sizes) == 3


def test_a_step_without_budget_left_admits_nobody() -> None:
    scheduler, model = make(max_num_batched_tokens=8)
    scheduler.add(request("a", prompt=8))
    scheduler.add(request("b"))
    model.step()
    assert (names(scheduler.running), names(scheduler.waiting)) == (["a"], ["b"])


def test_with_continuous_batching_a_newcomer_joins_a_running_batch() -> None:
    scheduler, model = make()
    scheduler.add(request("a"))
    model.step()
    scheduler.add(request("b"))
    assert names(model.step().items) == ["a", "b"]


def test_a_static_batch_admits_nobody_until_it_has_drained() -> None:
    scheduler, model = make(admission=StaticAdmission(), max_num_seqs=2)
    for name, max_tokens in (("a", 2), ("b", 5), ("c", 2)):
        scheduler.add(request(name, max_tokens=max_tokens))
    batches = [names(batch.items) for batch in model.drain()]
    assert batches == [["a", "b"], ["a", "b"], ["b"], ["b"], ["b"], ["c"], ["c"]]


def test_a_static_batch_takes_all_its_seats_even_when_its_prompts_need_several_steps() -> None:
    scheduler, model = make(admission=StaticAdmission(), max_num_batched_tokens=6, max_num_seqs=3)
    for name in "abcd":
        scheduler.add(request(name, prompt=6, max_tokens=9))
    model.step()
    assert names(scheduler.running) == ["a", "b", "c"]
    assert names(scheduler.waiting) == ["d"]
    model.step()
    assert slices(model.step()) == [("a", 7, 1), ("b", 5, 1), ("c", 0, 4)]


# -- exhaustion -------------------------------------------------------------------------------------------------------


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


def exhausted(*specs: tuple[str, int, int], num_blocks: int) -> tuple[Scheduler, FakeModel]:
    """Requests (name, prompt, priority) that all decode, in a pool of blocks of 4 with no block left."""
    scheduler, model = make(num_blocks=1000)
    for name, prompt, priority in specs:
        scheduler.add(request(name, prompt=prompt, max_tokens=4 * num_blocks - prompt, priority=priority))
    model.step()
    spare = scheduler.blocks.num_free - (num_blocks - scheduler.blocks.num_used)
    scheduler.blocks.grow("someone else", 4 * spare)
    assert scheduler.blocks.num_free == 0
    return scheduler, model


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


# -- abort, finish, commit --------------------------------------------------------------------------------------------


def test_abort_works_in_every_state_and_frees_the_blocks() -> None:
    scheduler, _ = exhausted(("a", 4, 0), ("b", 7, 0), num_blocks=3)
    scheduler.add(request("w"))
    scheduler.schedule()
    states = {r.request_id: r.state for r in (*scheduler.running, *scheduler.waiting)}
    assert states == {"a": RequestState.RUNNING, "b": RequestState.PREEMPTED, "w": RequestState.WAITING}
    for name in "abw":
        aborted = scheduler.abort(name)
        assert aborted is not None
        assert (aborted.request_id, aborted.finish_reason, aborted.finished) == (name, "abort", True)
        assert scheduler.blocks.table(name) == []
        assert scheduler.abort(name) is None
    assert scheduler.abort("stranger") is None
    assert (scheduler.has_work, list(scheduler.waiting), scheduler.running) == (False, [], [])


def test_an_abort_while_the_model_runs_leaves_the_others_alone() -> None:
    scheduler, model = make()
    a, b = request("a"), request("b")
    scheduler.add(a)
    scheduler.add(b)
    batch = scheduler.schedule()
    scheduler.abort("a")
    model.commit(batch, model.forward(batch))
    assert (a.num_computed_tokens, a.output_token_ids) == (0, [])
    model.drain()
    assert b.output_token_ids == undisturbed(b, 256)


def test_finish_records_reason_and_error() -> None:
    scheduler, model = make()
    a = request("a")
    scheduler.add(a)
    model.step()
    scheduler.finish(a, "error", "the logits are not numbers")
    assert (a.finish_reason, a.error) == ("error", "the logits are not numbers")
    assert (scheduler.running, scheduler.has_work, scheduler.blocks.num_free) == ([], False, 64)


def test_without_work_a_step_is_empty() -> None:
    scheduler, _ = make()
    batch = scheduler.schedule()
    assert (batch.items, batch.num_tokens, batch.is_decode_only) == ([], 0, False)


# -- settings ---------------------------------------------------------------------------------------------------------


def test_fewer_seats_let_those_who_run_finish() -> None:
    scheduler, model = make()
    for i in range(6):
        scheduler.add(request(f"r{i}", max_tokens=4 + i))
    model.step()
    scheduler.configure(max_num_seqs=2)
    scheduler.add(request("late"))
    seen = [names(batch.items) for batch in model.drain()]
    assert seen[0] == [f"r{i}" for i in range(6)]
    first = next(i for i, batch in enumerate(seen) if "late" in batch)
    assert len(seen[first]) == 2
    assert scheduler.num_preemptions == 0


def test_a_budget_below_the_number_of_decodes_serves_them_in_turns() -> None:
    scheduler, model = make()
    requests = [request(f"r{i}", max_tokens=20) for i in range(7)]
    for r in requests:
        scheduler.add(r)
    model.step()
    scheduler.configure(max_num_batched_tokens=3)
    scheduler.add(request("late"))
    turns = [names(model.step().items) for _ in range(14)]
    assert all(len(turn) == 3 for turn in turns)
    for r in requests:
        served = [i for i, turn in enumerate(turns) if r.request_id in turn]
        gaps = [b - a for a, b in itertools.pairwise(served)]
        assert served[0] <= 2
        assert max(gaps) <= 3  # ceil(7 / 3)
        assert len(served) == 6  # 14 steps of 3 places for 7 requests
    model.drain()
    assert [r.output_token_ids for r in requests] == [undisturbed(r, 256) for r in requests]


def test_switching_to_static_and_back_loses_nothing() -> None:
    scheduler, model = make()
    requests = [request(f"r{i}", max_tokens=5) for i in range(12)]
    for r in requests:
        scheduler.add(r)
    for admission in (StaticAdmission(), ContinuousAdmission()) * 3:
        model.step()
        scheduler.configure(admission=admission)
    model.drain()
    assert [r.output_token_ids for r in requests] == [undisturbed(r, 256) for r in requests]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, r"max_num_seqs=0 must be a whole number of at least 1; try 16"),
        ({"max_num_batched_tokens": 1.5}, r"max_num_batched_tokens=1.5 must be a whole number of at least 1; try 512"),
        ({"max_model_len": 1}, r"max_model_len=1 must be a whole number of at least 2; try 2048"),
        ({"max_waiting": True}, r"max_waiting=True must be a whole number of at least 1; try 64"),
        ({"max_num_sequences": 4}, r"unknown scheduler setting 'max_num_sequences'; did you mean 'max_num_seqs'\?"),
    ],
)
def test_a_bad_setting_is_refused_and_changes_nothing(changes: dict[str, Any], message: str) -> None:
    scheduler, _ = make()
    before = {k: v for k, v in vars(scheduler).items() if not k.startswith("_")}
    with pytest.raises(ConfigError, match=message):
        scheduler.configure(admission=StaticAdmission(), **changes)
    assert {k: v for k, v in vars(scheduler).items() if not k.startswith("_")} == before


def test_max_model_len_cannot_be_set_below_or_beyond_what_live_requests_can_bear() -> None:
    scheduler, model = make(num_blocks=4, max_model_len=17)
    scheduler.add(request("a", prompt=10, max_tokens=100))
    model.step()
    with pytest.raises(ConfigError, match=r"max_model_len=11 does not suit a live request: 'a'|'a' has 11 tokens"):
        scheduler.configure(max_model_len=11)
    with pytest.raises(ConfigError, match="may need 5 KV blocks of 4 tokens and the pool has 4"):
        scheduler.configure(max_model_len=18)
    assert scheduler.max_model_len == 17
    scheduler.configure(max_model_len=12)
    model.drain()


# -- a new pool -------------------------------------------------------------------------------------------------------


def test_a_new_pool_recomputes_what_ran_and_the_text_does_not_change() -> None:
    scheduler, model = make()
    requests = [request(f"r{i}", prompt=4 + i, max_tokens=12) for i in range(5)]
    for r in requests:
        scheduler.add(r)
    for _ in range(4):
        model.step()
    old, lost = scheduler.blocks, sum(r.num_computed_tokens for r in requests)
    assert scheduler.reset_blocks(BlockManager(40, 8)) == []
    model.reset()
    assert (old.num_free, scheduler.running, names(scheduler.waiting)) == (64, [], [f"r{i}" for i in range(5)])
    assert (scheduler.num_preemptions, scheduler.num_recomputed_tokens) == (5, lost)
    model.drain()
    assert [r.output_token_ids for r in requests] == [undisturbed(r, 256) for r in requests]


def test_a_new_pool_returns_the_requests_it_can_never_hold() -> None:
    scheduler, model = make()
    scheduler.add(request("large", prompt=20, max_tokens=30))
    scheduler.add(request("small", prompt=4, max_tokens=8))
    model.step()
    misfits = scheduler.reset_blocks(BlockManager(4, 4))
    model.reset()
    assert names(misfits) == ["large"]
    reason = scheduler.why_never_fits(misfits[0])
    assert reason is not None
    assert "'large' has 21 tokens and max_tokens=30: it may need 13 KV blocks of 4 tokens and the pool has 4" in reason
    scheduler.finish(misfits[0], "error", reason)
    model.drain()
    assert not scheduler.has_work


def test_a_new_pool_brings_its_max_model_len() -> None:
    scheduler, model = make(num_blocks=4, max_model_len=17)
    scheduler.add(request("a", prompt=10, max_tokens=100))
    model.step()
    assert scheduler.reset_blocks(BlockManager(20, 4), max_model_len=80) == []
    assert names(scheduler.reset_blocks(BlockManager(20, 4), max_model_len=11)) == ["a"]
    with pytest.raises(ConfigError, match="max_model_len=0"):
        scheduler.reset_blocks(BlockManager(20, 4), max_model_len=0)


# -- cost -------------------------------------------------------------------------------------------------------------


def test_a_step_of_64_decodes_is_scheduled_in_well_under_a_millisecond() -> None:
    scheduler, model = make(num_blocks=4096, block_size=16, max_num_seqs=64, max_num_batched_tokens=512)
    for i in range(64):
        scheduler.add(request(f"r{i}", prompt=8, max_tokens=200))
    model.step()
    best = float("inf")
    for _ in range(50):
        start = time.perf_counter()
        batch = scheduler.schedule()
        best = min(best, time.perf_counter() - start)
        model.commit(batch, dict.fromkeys(names(batch.items), 1))
    assert batch.is_decode_only
    assert len(batch.items) == 64
    assert best < 1e-3  # seconds; about 0.1 ms on an idle core


# -- everything at once -----------------------------------------------------------------------------------------------


class SchedulerMachine(RuleBasedStateMachine):
    """Random use of one scheduler; whatever happens, every request that ends by itself has its undisturbed text."""

    @initialize(
        num_blocks=st.integers(6, 14), budget=st.integers(1, 20), seats=st.integers(1, 6), growth=st.integers(0, 2)
    )
    def start(self, num_blocks: int, budget: int, seats: int, growth: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(scheduler_module, "GROWTH_BLOCKS", growth)  # the laws hold for any; 0 evicts the most
        self.scheduler, self.model = make(
            num_blocks, 3, max_num_batched_tokens=budget, max_num_seqs=seats, max_model_len=40, max_waiting=8
        )
        self.added: list[Request] = []

    @rule(prompt=st.integers(1, 24), max_tokens=st.integers(1, 24), priority=st.sampled_from([0, 0, 0, 1, -1]))
    def add(self, prompt: int, max_tokens: int, priority: int) -> None:
        new = request(f"r{len(self.added)}", prompt, max_tokens, priority)
        slots = min(prompt + max_tokens, 40) - 1
        fits = slots <= self.scheduler.blocks.num_blocks * self.scheduler.blocks.block_size
        if fits and len(self.scheduler.waiting) < 8:
            self.scheduler.add(new)
            self.added.append(new)
        else:
            with pytest.raises(RequestError):
                self.scheduler.add(new)

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            running_before = len(self.scheduler.running)
            work, static = self.scheduler.has_work, isinstance(self.scheduler.admission, StaticAdmission)
            most_senior = self.scheduler.running[0] if running_before else None
            outputs = {r.request_id: r.output_token_ids for r in self.added}
            batch = self.scheduler.schedule()
            assert bool(batch.items) == work
            assert batch.num_tokens == sum(i.num_tokens for i in batch.items) <= self.scheduler.max_num_batched_tokens
            assert len(self.scheduler.running) <= max(self.scheduler.max_num_seqs, running_before)
            assert not {r.request_id for r in batch.preempted} & set(names(batch.items))
            assert most_senior not in batch.preempted
            if (static and running_before) or batch.preempted:
                assert len(self.scheduler.running) == running_before - len(batch.preempted)
            for item in batch.items:
                assert item.start == item.request.num_computed_tokens
                assert len(item.block_table) * 3 >= item.start + item.num_tokens > item.start
            self.model.commit(batch, self.model.forward(batch))
            for r in self.added:
                assert r.output_token_ids[: len(outputs[r.request_id])] == outputs[r.request_id]

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(self.added))
        expected = None if victim.finished else victim
        assert self.scheduler.abort(victim.request_id) is expected

    @precondition(lambda self: self.scheduler.running)
    @rule()
    def abort_while_the_model_runs(self) -> None:
        batch = self.scheduler.schedule()
        self.scheduler.abort(batch.items[0].request.request_id)
        self.model.commit(batch, self.model.forward(batch))

    @rule(
        seats=st.integers(1, 6),
        budget=st.integers(1, 20),
        admission=st.sampled_from([ContinuousAdmission, StaticAdmission]),
    )
    def configure(self, seats: int, budget: int, admission: type[Any]) -> None:
        self.scheduler.configure(max_num_seqs=seats, max_num_batched_tokens=budget, admission=admission())

    @rule(num_blocks=st.integers(4, 16))
    def replace_pool(self, num_blocks: int) -> None:
        for misfit in self.scheduler.reset_blocks(BlockManager(num_blocks, 3)):
            self.scheduler.finish(misfit, "error", self.scheduler.why_never_fits(misfit))
        self.model.reset()

    @invariant()
    def nothing_is_lost(self) -> None:
        scheduler = self.scheduler
        scheduler.blocks.check()
        live = [r.request_id for r in (*scheduler.running, *scheduler.waiting)]
        assert sorted(live) == sorted(r.request_id for r in self.added if not r.finished)
        assert scheduler.has_work == bool(live)
        held = {r.request_id: len(scheduler.blocks.table(r.request_id)) for r in self.added}
        assert sum(held.values()) == scheduler.blocks.num_used
        for r in self.added:
            assert r.state is RequestState.RUNNING or (
                held[r.request_id],
                r.num_computed_tokens if not r.finished else 0,
            ) == (0, 0)
            assert held[r.request_id] * 3 >= r.num_computed_tokens or r.finished
        assert scheduler.num_preemptions == sum(r.num_preemptions for r in self.added)

    @invariant()
    def texts_are_undisturbed(self) -> None:
        for r in self.added:
            expected = undisturbed(r, 40)
            if r.finish_reason == "length":
                assert r.output_token_ids == expected
            assert r.output_token_ids == expected[: r.num_output_tokens]

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            self.patch.undo()
            left = [r for r in self.added if not r.finished]
            # Proof of progress: between two output tokens at most every token of every request is computed once.
            bound = sum(r.params.max_tokens for r in left) * sum(
                r.num_prompt_tokens + r.params.max_tokens for r in left
            )
            self.model.drain(limit=bound + 1)
            self.nothing_is_lost()
            self.texts_are_undisturbed()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
