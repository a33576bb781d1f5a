"""Everything at once: random use of a scheduler, with its invariants checked after every call."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import strata_lab.scheduler as scheduler_module
from strata_lab.admission import (
    ContinuousAdmission,
    FirstComeFirstServed,
    HighestPriorityFirst,
    MixedPrefill,
    SplitPrefill,
    StaticAdmission,
    Watermark,
)
from strata_lab.block_manager import BlockManager
from strata_lab.kv_retention import SinksAndWindow, TopPages
from strata_lab.preemption import Recompute, SwapToHost
from strata_lab.prefix_cache import NoPrefixCache, PrefixCache
from strata_lab.request import Request, RequestState
from strata_lab.sampling_params import RequestError, SamplingParams
from tests.fake_model import make, names, request, undisturbed


class SchedulerMachine(RuleBasedStateMachine):
    """Random use of one scheduler; whatever happens, every request that ends by itself has its undisturbed text."""

    @initialize(
        num_blocks=st.integers(6, 14), budget=st.integers(1, 20), seats=st.integers(1, 6), growth=st.integers(0, 2),
        cached=st.booleans(), swap=st.sampled_from([None, 2, 7, 40]),
        kept=st.sampled_from([None, None, SinksAndWindow(2, 5), SinksAndWindow(0, 9), TopPages(4, 3)]),
    )  # fmt: skip
    def start(
        self, num_blocks: int, budget: int, seats: int, growth: int, cached: bool, swap: int | None,
        kept: SinksAndWindow | TopPages | None,
    ) -> None:  # fmt: skip
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(scheduler_module, "GROWTH_BLOCKS", growth)  # the laws hold for any; 0 evicts the most
        self.scheduler, self.model = make(
            num_blocks, 3, max_num_batched_tokens=budget, max_num_seqs=seats, max_model_len=40, max_waiting=8,
            cached=cached, preemption=preemption(swap), retention=kept,
        )  # fmt: skip
        self.added: list[Request] = []

    @rule(
        prompt=st.integers(1, 24), max_tokens=st.integers(1, 24), priority=st.sampled_from([0, 0, 0, 1, -1]),
        text=st.sampled_from("ab"), shared=st.integers(0, 24), timeout_s=st.sampled_from([None, None, 0.5, 5.0, 20.0]),
    )  # fmt: skip
    def add(self, prompt: int, max_tokens: int, priority: int, text: str, shared: int, timeout_s: float | None) -> None:
        name = f"r{len(self.added)}"
        new = request(name, prompt, max_tokens, priority, text=text, shared=shared, timeout_s=timeout_s)
        new.arrival_s = self.model.now_s
        blocks, slots = self.scheduler.blocks, min(prompt + max_tokens, 40) - 1
        fits = min(-(-slots // 3), blocks.retention.most_blocks(3, 1)) <= blocks.num_blocks
        if fits and len(self.scheduler.waiting) < 8:
            self.scheduler.add(new)
            self.added.append(new)
        else:
            with pytest.raises(RequestError):
                self.scheduler.add(new)

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            late = [r for r in self.added if not r.finished and (r.deadline_s or 1e9) <= self.model.now_s]
            assert sorted(names(self.scheduler.expire(self.model.now_s))) == sorted(names(late))
            assert {r.finish_reason for r in late} <= {"timeout"}
            running_before = len(self.scheduler.running)
            fcfs = isinstance(self.scheduler.waiting.order, FirstComeFirstServed)
            highest = max((r.priority for r in (*self.scheduler.running, *self.scheduler.waiting)), default=0)
            work, static = self.scheduler.has_work, isinstance(self.scheduler.admission, StaticAdmission)
            most_senior = self.scheduler.running[0] if running_before else None
            outputs = {r.request_id: r.output_token_ids for r in self.added}
            batch = self.scheduler.schedule()
            assert bool(batch.items) == work
            assert batch.num_tokens == sum(i.num_tokens for i in batch.items) <= self.scheduler.max_num_batched_tokens
            assert len(self.scheduler.running) <= max(self.scheduler.max_num_seqs, running_before)
            if fcfs:  # who is displaced with others that share its blocks may find room again
                assert not {r.request_id for r in batch.preempted} & set(names(batch.items))
            assert most_senior not in batch.preempted or (not fcfs and most_senior.priority < highest)
            if (static and running_before) or (batch.preempted and fcfs):
                assert len(self.scheduler.running) == running_before - len(batch.preempted)
            if isinstance(self.scheduler.prefill, SplitPrefill):
                assert not (batch.num_decode_tokens and batch.num_prefill_tokens)
            for item in batch.items:
                assert item.start == item.request.num_computed_tokens
                assert len(item.block_table) * 3 >= item.start + item.num_tokens > item.start
            self.model.commit(batch, self.model.forward(batch))
            for r in self.added:
                assert r.output_token_ids[: len(outputs[r.request_id])] == outputs[r.request_id]

    @precondition(lambda self: self.added)
    @rule(data=st.data(), same=st.integers(0, 30), own=st.integers(0, 4), max_tokens=st.integers(1, 12))
    def fork(self, data: st.DataObject, same: int, own: int, max_tokens: int) -> None:
        parent = data.draw(st.sampled_from(self.added))
        tokens = [*parent.token_ids[:same], *range(own)] or [1]
        params = SamplingParams(max_tokens=max_tokens)
        child = Request(f"r{len(self.added)}", tokens, params, priority=parent.priority, arrival_s=self.model.now_s)
        if self.scheduler.why_never_fits(child):
            with pytest.raises(RequestError):
                self.scheduler.fork(parent, child)
            return
        free, seats = self.scheduler.blocks.num_free, len(self.scheduler.running)
        shared = self.scheduler.fork(parent, child)
        self.added.append(child)
        assert shared == child.num_computed_tokens < child.num_tokens
        assert (child.state is RequestState.RUNNING) == (shared > 0) == (len(self.scheduler.running) > seats)
        assert free - self.scheduler.blocks.num_free == (shared % 3 > 0)
        assert tokens[:shared] == parent.token_ids[:shared]

    @rule(swap=st.sampled_from([None, 2, 7, 40]))
    def switch_preemption(self, swap: int | None) -> None:
        self.scheduler.configure(preemption=preemption(swap))
        self.model.host.clear()

    @precondition(lambda self: self.scheduler.running)
    @rule(mid_way=st.booleans())
    def a_held_batch_goes_beside_the_steps(self, mid_way: bool) -> None:
        batch = self.scheduler.schedule()
        sampled = self.model.forward(batch)
        self.scheduler.hold(batch)
        beside = self.scheduler.schedule(decodes_only=True)
        assert not set(names(beside.items)) & set(names(batch.items))
        self.model.commit(beside, self.model.forward(beside))
        if mid_way:
            self.scheduler.abort(batch.items[0].request.request_id)
        self.scheduler.release(batch)
        self.model.commit(batch, sampled)

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
        prefill=st.sampled_from([MixedPrefill(), SplitPrefill(3), SplitPrefill(7, decode_steps=3)]),
        lookahead=st.integers(0, 9),
        order=st.sampled_from([FirstComeFirstServed, HighestPriorityFirst]),
        passes=st.sampled_from([0, 1, 5]),
        marks=st.sampled_from([(0.0, 0.0), (0.2, 0.2), (0.0, 0.6), (0.3, 0.9)]),
    )
    def configure(
        self, seats: int, budget: int, admission: type[Any], prefill: Any, lookahead: int, order: type[Any],
        passes: int, marks: tuple[float, float],
    ) -> None:  # fmt: skip
        self.scheduler.configure(
            max_num_seqs=seats, max_num_batched_tokens=budget, admission=admission(), prefill=prefill,
            lookahead=lookahead, order=order(), max_passes=passes, watermark=Watermark(*marks),
        )  # fmt: skip

    @rule(cached=st.booleans())
    def switch_the_prefix_cache(self, cached: bool) -> None:
        self.scheduler.blocks.use_prefixes(PrefixCache(3) if cached else NoPrefixCache())

    @rule()
    def drop_the_prefixes(self) -> None:
        self.scheduler.blocks.drop_prefixes()

    def pool(self, num_blocks: int, cached: bool) -> BlockManager:
        return BlockManager(num_blocks, 3, PrefixCache(3) if cached else None, self.scheduler.blocks.retention)

    @rule(num_blocks=st.integers(4, 16), cached=st.booleans())
    def replace_pool(self, num_blocks: int, cached: bool) -> None:
        for misfit in self.scheduler.reset_blocks(self.pool(num_blocks, cached)):
            self.scheduler.finish(misfit, "error", self.scheduler.why_never_fits(misfit))
        self.model.reset()

    @rule(num_blocks=st.integers(4, 16), cached=st.booleans())
    def move_into_another_pool(self, num_blocks: int, cached: bool) -> None:
        moves, misfits = self.scheduler.move_blocks(self.pool(num_blocks, cached))
        for misfit in misfits:
            self.scheduler.finish(misfit, "error", self.scheduler.why_never_fits(misfit))
        self.model.take_from_old_pool(moves)

    @invariant()
    def host_memory_is_of_those_who_were_preempted(self) -> None:
        host = self.scheduler.preemption
        if isinstance(host, SwapToHost):
            host.check()
            kept = {r.request_id: host.saved(r.request_id) for r in self.added if host.saved(r.request_id)}
            preempted = {r.request_id: r for r in self.scheduler.waiting if r.state is RequestState.PREEMPTED}
            assert kept.keys() <= preempted.keys()
            assert all(0 < n < preempted[name].num_tokens for name, n in kept.items())
            assert host.num_used == sum(-(-n // 3) for n in kept.values()) <= host.num_blocks

    @invariant()
    def nothing_is_lost(self) -> None:
        scheduler = self.scheduler
        scheduler.blocks.check()
        live = [r.request_id for r in (*scheduler.running, *scheduler.waiting)]
        assert sorted(live) == sorted(r.request_id for r in self.added if not r.finished)
        assert scheduler.has_work == bool(live)
        held = {r.request_id: len(scheduler.blocks.table(r.request_id)) for r in self.added}
        assert scheduler.blocks.num_used == len({b for r in self.added for b in scheduler.blocks.held(r.request_id)})
        assert all(r.num_passed <= 5 for r in self.added)
        assert scheduler.waiting.num_tokens == sum(r.num_tokens for r in scheduler.waiting)
        assert [r.priority for r in scheduler.running] == sorted((r.priority for r in scheduler.running), reverse=True)
        if isinstance(scheduler.waiting.order, HighestPriorityFirst):
            waiting = [r.priority for r in scheduler.waiting]
            assert waiting == sorted(waiting, reverse=True)
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
            expected = undisturbed(r, 40, self.scheduler.blocks.retention)
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


def preemption(host_blocks: int | None) -> Recompute | SwapToHost:
    return Recompute() if host_blocks is None else SwapToHost(host_blocks)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
