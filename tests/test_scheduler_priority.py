"""Laws of priorities, deadlines and overload: who goes first, who makes room, what is refused, that nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

import strata_lab.roster as roster_module
import strata_lab.scheduler as scheduler_module
from strata_lab.admission import (
    QUEUE_ORDERS,
    FirstComeFirstServed,
    HighestPriorityFirst,
    MixedPrefill,
    PrefillPolicy,
    QueueOrder,
    SplitPrefill,
    StaticAdmission,
)
from strata_lab.config import toggles
from strata_lab.preemption import SwapToHost
from strata_lab.request import Request, RequestState
from strata_lab.sampling_params import SamplingParams
from strata_lab.scheduler import MAX_EVICTIONS, QueueFull, Scheduler
from strata_lab.settings import ConfigError
from tests.fake_model import FakeModel, exhausted, make, names, request, slices, undisturbed


def urgent(**options: object) -> tuple[Scheduler, FakeModel]:
    """A scheduler in which priority orders the queue."""
    return make(order=HighestPriorityFirst(), **options)


# -- the order of the queue -------------------------------------------------------------------------------------------


def test_every_policy_of_the_toggle_is_an_order() -> None:
    (choices,) = [t.choices for t in toggles() if t.name == "scheduling_policy"]
    assert tuple(QUEUE_ORDERS) == choices


def test_the_highest_priority_is_admitted_first_and_equals_in_order_of_arrival() -> None:
    scheduler, model = urgent(max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 2), ("c", 1), ("d", 2), ("e", -1)):
        scheduler.add(request(name, max_tokens=1, priority=priority))
    assert names(scheduler.waiting) == ["b", "d", "c", "a", "e"]
    assert [names(b.items) for b in model.drain()] == [["b"], ["d"], ["c"], ["a"], ["e"]]


def test_first_come_first_served_admits_in_order_of_arrival_whatever_the_priority() -> None:
    scheduler, model = make(max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 2), ("c", 1)):
        scheduler.add(request(name, max_tokens=1, priority=priority))
    assert [names(b.items) for b in model.drain()] == [["a"], ["b"], ["c"]]


def test_a_change_of_policy_reorders_those_who_wait_and_back() -> None:
    scheduler, _ = exhausted(("run", 4, 0), ("out", 7, 0), num_blocks=3)
    scheduler.schedule()
    for name, priority in (("a", 0), ("b", 2), ("c", 0)):
        scheduler.add(request(name, priority=priority))
    assert names(scheduler.waiting) == ["out", "a", "b", "c"]
    scheduler.configure(order=HighestPriorityFirst())
    assert names(scheduler.waiting) == ["b", "out", "a", "c"], "preempted work is before new work of its priority"
    scheduler.configure(order=FirstComeFirstServed())
    assert names(scheduler.waiting) == ["out", "a", "b", "c"]


# -- taking a place ---------------------------------------------------------------------------------------------------


def test_a_higher_priority_takes_the_seat_of_the_lowest_with_the_fewest_tokens() -> None:
    scheduler, model = urgent(max_num_seqs=3)
    for name, prompt, priority in (("a", 9, 0), ("b", 5, 0), ("c", 4, 1)):
        scheduler.add(request(name, prompt, max_tokens=20, priority=priority))
    model.step()
    scheduler.add(request("now", 4, max_tokens=2, priority=2))
    batch = model.step()
    assert (names(batch.preempted), slices(batch)) == (["b"], [("c", 4, 1), ("a", 9, 1), ("now", 0, 4)])
    ended = [names(b.items) for b in model.drain()]
    assert "b" in ended[-1]


def test_a_higher_priority_takes_the_blocks_it_needs_and_no_more_requests_than_that() -> None:
    scheduler, model = urgent(num_blocks=13)
    for name, prompt in (("a", 8), ("b", 12), ("c", 10)):
        scheduler.add(request(name, prompt, max_tokens=6))
    model.step()
    assert len(scheduler.running) == 3
    scheduler.add(request("now", 12, max_tokens=2, priority=1))
    batch = model.step()
    assert names(batch.preempted) == ["a"]
    assert "now" in names(batch.items)


def test_nobody_makes_room_for_an_equal_or_in_vain() -> None:
    scheduler, model = urgent(max_num_seqs=2, num_blocks=8)
    scheduler.add(request("a", 16, max_tokens=10, priority=1))
    scheduler.add(request("b", 4, max_tokens=4))
    model.step()
    scheduler.add(request("equal", 4, priority=0))
    assert model.step().preempted == []
    scheduler.add(request("large", 20, max_tokens=8, priority=1))  # 5 + 2 blocks: without `b` there would be 4 - 2
    assert model.step().preempted == []
    model.drain()


def test_under_first_come_first_served_nobody_makes_room() -> None:
    scheduler, model = make(max_num_seqs=1)
    scheduler.add(request("a", max_tokens=5))
    model.step()
    scheduler.add(request("b", priority=9, max_tokens=1))
    assert [names(b.items) for b in model.drain()] == [["a"]] * 4 + [["b"]]


def test_a_higher_priority_goes_before_a_long_prompt_that_is_being_computed() -> None:
    scheduler, model = urgent(num_blocks=256, max_num_batched_tokens=8)
    scheduler.add(request("long", 100, max_tokens=2))
    model.step()
    scheduler.add(request("now", 6, max_tokens=1, priority=1))
    assert slices(model.step()) == [("now", 0, 6), ("long", 8, 2)]


def test_a_static_batch_and_held_requests_are_left_alone() -> None:
    scheduler, model = urgent(max_num_seqs=1, admission=StaticAdmission())
    scheduler.add(request("a", max_tokens=3))
    model.step()
    scheduler.add(request("b", priority=1, max_tokens=1))
    assert [names(b.items) for b in model.drain()] == [["a"], ["a"], ["b"]]
    scheduler, model = urgent(max_num_seqs=1)
    scheduler.add(request("a", max_tokens=3))
    held = scheduler.schedule()
    scheduler.hold(held)
    scheduler.add(request("b", priority=1, max_tokens=1))
    assert scheduler.schedule().items == []
    sampled = model.forward(held)
    scheduler.release(held)
    model.commit(held, sampled)
    assert names(model.step().preempted) == ["a"]
    model.drain()


def test_a_place_is_taken_only_in_a_step_that_can_use_it() -> None:
    """While prompts are computed beside the decodes, no other prompt can start: nobody is preempted for it yet."""
    scheduler, model = urgent(max_num_seqs=1, prefill=SplitPrefill(8, decode_steps=3))
    scheduler.add(request("a", max_tokens=9))
    model.step()
    scheduler.add(request("b", priority=1, max_tokens=1))
    for _ in range(2):
        batch = scheduler.schedule(decodes_only=True)
        assert (names(batch.items), batch.preempted) == (["a"], [])
        model.commit(batch, model.forward(batch))
    batch = model.step()
    assert (names(batch.items), names(batch.preempted)) == (["b"], ["a"])


# -- repeated preemption ----------------------------------------------------------------------------------------------


def test_who_was_evicted_often_is_spared_while_there_are_others_of_its_priority() -> None:
    scheduler, _ = exhausted(("a", 4, 0), ("b", 12, 0), ("c", 8, 0), ("d", 11, 0), num_blocks=9)
    scheduler.running[2].num_preemptions = MAX_EVICTIONS
    assert names(scheduler.schedule().preempted) == ["d"]
    scheduler, _ = exhausted(("a", 4, 0), ("b", 11, 0), ("c", 7, 0), num_blocks=6)
    for r in scheduler.running:
        r.num_preemptions = MAX_EVICTIONS
    assert names(scheduler.schedule().preempted) == ["c"], "somebody must go"


def test_priority_comes_before_the_number_of_evictions() -> None:
    scheduler, _ = exhausted(("a", 4, 1), ("b", 11, 1), ("c", 11, 0), num_blocks=7)
    scheduler.running[2].num_preemptions = 9
    assert names(scheduler.schedule().preempted) == ["c"]


def test_the_cap_lowers_the_most_evictions_of_one_request(monkeypatch: pytest.MonkeyPatch) -> None:

    def most_evictions(cap: int) -> int:
        monkeypatch.setattr(roster_module, "MAX_EVICTIONS", cap)
        monkeypatch.setattr(scheduler_module, "GROWTH_BLOCKS", 0)  # evicts the most
        worst = 0
        for seed in range(4):
            rng = random.Random(seed)
            scheduler, model = make(60, 4, max_num_seqs=16)
            requests = [request(f"r{i}", rng.randint(4, 40), rng.randint(20, 120)) for i in range(40)]
            for r in requests:
                scheduler.add(r)
            model.drain()
            worst = max(worst, *(r.num_preemptions for r in requests))
        return worst

    assert MAX_EVICTIONS <= most_evictions(MAX_EVICTIONS) < most_evictions(10**9)


# -- standing aside ---------------------------------------------------------------------------------------------------


def passing(max_passes: int, **options: object) -> tuple[Scheduler, FakeModel]:
    """`runs` holds 7 of 12 blocks for 9 steps; `long` needs 9 and waits, `s0` to `s5` need 2 each."""
    scheduler, model = make(num_blocks=12, max_passes=max_passes, **options)
    scheduler.add(request("runs", 20, max_tokens=9))
    model.step()
    scheduler.add(request("long", 30, max_tokens=6))
    for i in range(6):
        scheduler.add(request(f"s{i}", 3, max_tokens=4))
    return scheduler, model


def test_short_requests_go_before_a_long_one_that_waits_for_blocks() -> None:
    scheduler, model = passing(max_passes=4)
    assert names(model.step().items) == ["runs", "s0", "s1"]
    order = list(dict.fromkeys(name for batch in model.drain() for name in names(batch.items)))
    assert order == ["runs", "s0", "s1", "s2", "s3", "long", "s4", "s5"], "four, and then nobody"
    assert scheduler.num_preemptions == 0, "they are let go before it only if they fit to their end"


def test_without_passes_the_order_of_the_queue_is_kept() -> None:
    _, model = passing(max_passes=0)
    order = list(dict.fromkeys(name for batch in model.drain() for name in names(batch.items)))
    assert order == ["runs", "long", *(f"s{i}" for i in range(6))]


def test_nobody_of_lower_priority_goes_before() -> None:
    scheduler, model = make(num_blocks=12, max_passes=4, order=HighestPriorityFirst())
    scheduler.add(request("runs", 20, max_tokens=9, priority=2))
    model.step()
    scheduler.add(request("long", 30, max_tokens=6, priority=1))
    scheduler.add(request("low", 3, max_tokens=4))
    assert names(model.step().items) == ["runs"]
    scheduler.add(request("equal", 3, max_tokens=4, priority=1))
    assert names(model.step().items) == ["runs", "equal"]
    model.drain()


def test_standing_aside_halves_the_time_of_short_requests_and_bounds_that_of_long_ones() -> None:
    """The trade of decision 0011, on fewer requests: mean steps from arrival to end."""

    def means(max_passes: int) -> tuple[float, float]:
        rng = random.Random(0)
        scheduler, model = make(140, 16, max_num_batched_tokens=256, max_num_seqs=16, max_model_len=2048,
                                max_passes=max_passes)  # fmt: skip
        wait = [request(f"long{i}", rng.randint(300, 600), rng.randint(200, 400)) if rng.random() < 0.3
                else request(f"short{i}", rng.randint(8, 60), rng.randint(10, 60)) for i in range(100)]  # fmt: skip
        took: dict[str, list[float]] = {"long": [], "short": []}
        todo = list(wait)
        while scheduler.has_work or todo:
            while todo and len(scheduler.waiting) < 30:
                todo[0].arrival_s = model.now_s
                scheduler.add(todo.pop(0))
            batch = scheduler.schedule()
            model.commit(batch, {i.request.request_id: 1 for i in batch.items if i.samples})
            for r in (i.request for i in batch.items if i.request.finished):
                took[r.request_id.rstrip("0123456789")].append(model.now_s - r.arrival_s)
        return sum(took["short"]) / len(took["short"]), sum(took["long"]) / len(took["long"])

    (short_0, long_0), (short_4, long_4) = means(0), means(4)
    assert short_4 < 0.6 * short_0
    assert long_4 < 1.5 * long_0


# -- deadlines --------------------------------------------------------------------------------------------------------


def test_a_deadline_ends_a_request_in_every_state_and_frees_its_blocks() -> None:
    scheduler, model = exhausted(("free", 4, 0), ("none", 7, 0), num_blocks=3)
    for name in ("free", "none"):
        scheduler.abort(name)
    scheduler.blocks.free("someone else")
    scheduler.configure(max_num_seqs=2)
    for name in ("decodes", "evicted", "waits"):
        scheduler.add(request(name, timeout_s=10.0))
    scheduler.add(request("patient", timeout_s=11.0))
    model.step()
    evicted = scheduler.running[1]
    scheduler._preempt(evicted)
    states = {r.request_id: r.state for r in (*scheduler.running, *scheduler.waiting)}
    assert set(states.values()) == {RequestState.RUNNING, RequestState.PREEMPTED, RequestState.WAITING}
    assert scheduler.expire(9.99) == []
    assert sorted(names(scheduler.expire(10.0))) == ["decodes", "evicted", "waits"]
    assert (evicted.finish_reason, evicted.num_output_tokens) == ("timeout", 1)
    assert (scheduler.blocks.num_used, names(scheduler.waiting)) == (0, ["patient"])
    model.drain()


def test_a_deadline_does_not_end_another_request_of_the_same_name() -> None:
    scheduler, model = make()
    scheduler.add(request("a", max_tokens=1, timeout_s=5.0))
    model.drain()
    scheduler.add(request("a", max_tokens=1))
    assert scheduler.expire(6.0) == []
    assert names(scheduler.waiting) == ["a"]


def test_a_request_that_is_computed_beside_the_steps_keeps_its_blocks_until_it_has_landed() -> None:
    scheduler, model = make()
    scheduler.add(request("a", timeout_s=1.0))
    held = scheduler.schedule()
    scheduler.hold(held)
    assert names(scheduler.expire(2.0)) == ["a"]
    assert scheduler.blocks.num_used == 1
    model.forward(held)
    scheduler.release(held)
    scheduler.commit(held)
    assert (scheduler.blocks.num_used, scheduler.has_work) == (0, False)


# -- urgent prompts ---------------------------------------------------------------------------------------------------


def busy(prefill: PrefillPolicy, order: QueueOrder) -> tuple[Scheduler, FakeModel]:
    """Two that decode and a long prompt that has begun, all of no priority."""
    scheduler, model = make(200, 4, max_num_batched_tokens=40, prefill=prefill, order=order)
    for name in ("a", "b"):
        scheduler.add(request(name, prompt=4, max_tokens=60))
    model.step()
    scheduler.add(request("long", prompt=150, max_tokens=4))
    while not scheduler.running[-1].num_computed_tokens or len(scheduler.running) < 3:
        model.step()
    return scheduler, model


@pytest.mark.parametrize(
    "policy",
    [MixedPrefill, partial(SplitPrefill, 8), partial(SplitPrefill, 8, decode_steps=3)],
    ids=["mixed", "split", "split after 3"],
)
def test_an_urgent_prompt_takes_the_next_step_whole_and_no_lower_prompt_makes_it_longer(
    policy: Callable[[], PrefillPolicy],
) -> None:
    prefill = policy()
    scheduler, model = busy(prefill, HighestPriorityFirst())
    scheduler.add(request("now", prompt=30, max_tokens=4, priority=1))
    step = model.step()
    assert ("now", 0, 30) in slices(step)
    assert "long" not in names(step.items)
    assert [n for n in names(step.items) if n != "now"] == (["a", "b"] if isinstance(prefill, MixedPrefill) else [])
    assert "long" in {n for _ in range(8) for n in names(model.step().items)}, "then the others go on"
    model.drain()


def test_an_urgent_prompt_longer_than_a_step_goes_on_until_it_is_computed() -> None:
    scheduler, model = busy(SplitPrefill(8), HighestPriorityFirst())
    scheduler.add(request("now", prompt=100, max_tokens=4, priority=1))
    assert [slices(model.step()) for _ in range(3)] == [[("now", 0, 40)], [("now", 40, 40)], [("now", 80, 20)]]
    model.drain()


@pytest.mark.parametrize(
    ("order", "priority"), [(FirstComeFirstServed(), 1), (HighestPriorityFirst(), 0)], ids=["fcfs", "equal"]
)
def test_a_prompt_that_outranks_nobody_waits_for_its_turn(order: QueueOrder, priority: int) -> None:
    scheduler, model = busy(SplitPrefill(8), order)
    scheduler.add(request("next", prompt=6, max_tokens=4, priority=priority))
    steps = [model.step() for _ in range(4)]
    assert all(s.num_prefill_tokens <= 8 for s in steps)
    assert any(s.num_decode_tokens for s in steps[:2])
    model.drain()


def test_an_urgent_request_that_cannot_start_yet_does_not_hold_the_prompts_of_others() -> None:
    """It outranks those who decode, but one of its own priority holds the blocks that it needs."""
    scheduler, model = make(24, 4, max_num_batched_tokens=40, prefill=SplitPrefill(8), order=HighestPriorityFirst())
    scheduler.add(request("peer", prompt=40, max_tokens=20, priority=1))
    model.step()
    scheduler.add(request("a", prompt=4, max_tokens=20))
    while not scheduler.running[-1].num_output_tokens:
        model.step()
    scheduler.finish(scheduler.running[0], "abort")
    scheduler.blocks.grow("someone", 40)
    scheduler.add(request("low", prompt=16, max_tokens=2))
    model.step()
    scheduler.add(request("big", prompt=60, max_tokens=4, priority=1))
    assert "low" in {n for _ in range(4) for n in names(model.step().items)}
    scheduler.blocks.free("someone")
    model.drain()
    assert scheduler.blocks.num_used == 0


def test_one_step_may_take_blocks_to_host_memory_and_bring_those_of_another_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler_module, "GROWTH_BLOCKS", 0)
    scheduler, model = make(10, 4, order=HighestPriorityFirst(), preemption=SwapToHost(40))
    first, second = request("first", 16, 20, priority=1), request("second", 14, 20, priority=1)
    scheduler.add(first)
    scheduler.add(second)
    while second.state is not RequestState.PREEMPTED:
        model.step()
    low = Request("low", first.token_ids[:8], SamplingParams(max_tokens=12), priority=0, arrival_s=0.0)
    assert scheduler.fork(first, low) > 0
    model.step()
    scheduler.configure(max_num_seqs=1)
    scheduler.abort("first")
    batch = model.step()
    assert (names(batch.preempted), names(batch.items)) == (["low"], ["second"])
    assert batch.swap_out
    assert batch.swap_in
    model.drain()
    assert [r.output_token_ids for r in (low, second)] == [undisturbed(r, 256) for r in (low, second)]


# -- overload ---------------------------------------------------------------------------------------------------------


def test_the_queue_is_bounded_by_tokens_too_and_the_error_names_the_numbers() -> None:
    scheduler, _ = make(max_waiting_tokens=30)
    scheduler.add(request("a", prompt=20))
    scheduler.add(request("b", prompt=10))
    message = r"2 requests with 30 tokens wait, 4 more would exceed max_waiting_tokens=30; .* max_waiting_tokens=34"
    with pytest.raises(QueueFull, match=message):
        scheduler.add(request("c", prompt=4))
    scheduler.schedule()
    scheduler.add(request("c", prompt=40))  # an empty queue takes any that the pool can hold
    with pytest.raises(ConfigError, match="max_waiting_tokens=0 must be a whole number of at least 1"):
        scheduler.configure(max_waiting_tokens=0)


@pytest.mark.parametrize("order", QUEUE_ORDERS.values(), ids=list(QUEUE_ORDERS))
@pytest.mark.parametrize("cached", [False, True], ids=["plain", "cached"])
def test_at_five_times_the_capacity_nothing_is_lost_and_the_queue_stays_bounded(order: type, cached: bool) -> None:
    """Five requests arrive for each that can be served, and then none: all that was accepted ends well or in time."""
    rng = random.Random(3)
    scheduler, model = make(48, 4, max_num_seqs=6, max_waiting=12, max_waiting_tokens=300, order=order(), cached=cached)
    accepted: list[Request] = []
    refused = 0
    for index in range(400):
        new = request(
            f"r{index}", rng.randint(1, 60), rng.randint(1, 24), rng.choice([0, 0, 0, 3]), text=rng.choice("ab"),
            shared=rng.randint(0, 40), timeout_s=rng.choice([None, 40.0]),
        )  # fmt: skip
        new.arrival_s = model.now_s
        try:
            scheduler.add(new)
            accepted.append(new)
        except QueueFull:
            refused += 1
        if index % 2:
            scheduler.expire(model.now_s)
            model.step()
            scheduler.blocks.check()
        assert len(scheduler.waiting) <= 12 + 6, "the bound, and those who ran and were preempted"
    while scheduler.has_work:
        scheduler.expire(model.now_s)
        if scheduler.has_work:
            model.step()
    assert refused > 100
    assert {r.finish_reason for r in accepted} == {"length", "timeout"}
    assert scheduler.blocks.num_used == 0
    for r in accepted:
        assert r.output_token_ids == undisturbed(r, 256)[: r.num_output_tokens]
        assert r.finish_reason == "timeout" or r.output_token_ids == undisturbed(r, 256)


def test_urgent_requests_under_a_load_of_others_start_as_if_they_were_alone() -> None:
    """Steps until the first token: with priority as in an idle engine, first come first served many more."""

    def waits(order: type) -> list[float]:
        rng = random.Random(1)
        scheduler, model = make(200, 4, max_num_seqs=8, max_num_batched_tokens=32, order=order())
        wanted: list[Request] = []
        for step in range(300):
            while len(scheduler.waiting) < 20:
                scheduler.add(request(f"bulk{step}.{len(scheduler.waiting)}", rng.randint(8, 60), rng.randint(8, 40)))
            if step % 10 == 0:
                wanted.append(request(f"now{step}", 12, 4, priority=5))
                wanted[-1].arrival_s = model.now_s
                scheduler.add(wanted[-1])
            model.step()
        return sorted(r.first_token_s - r.arrival_s for r in wanted if r.first_token_s is not None)

    first, priority = waits(FirstComeFirstServed), waits(HighestPriorityFirst)
    assert priority[int(0.95 * len(priority))] <= 2.0, "an idle engine takes one step"
    assert len(priority) == 30
    assert first[len(first) // 2] > 10 * priority[len(priority) // 2]
