"""Who computes what in the next step: continuous batching, chunked prefill, priorities, preemption, forks.

A step has a budget of tokens. Requests that decode come first (one token each), then running prompts go on where they
stopped, then waiting requests are admitted; a prompt larger than the rest of the budget is sliced. A request simply
wants its `num_uncomputed_tokens`: prefill, chunk, decode and recompute are all that one number, and what the prefix
cache holds at its admission is computed already.

When the KV pool is exhausted (reasons and proof of progress: docs/decisions/0001-recompute-preemption.md):

1. *Seniority* is (higher priority, earlier arrival), fixed at `add`. A request may evict only a junior that has no
   place in the step being built yet: the one of lowest priority, then one evicted fewer than `MAX_EVICTIONS` times,
   then with the fewest computed tokens. So a newcomer never evicts an older request of its priority, and no two
   requests evict each other in turn.
2. A request that may evict nobody keeps its blocks and sits the step out: waiting is cheaper than recomputing.
3. An evicted request keeps its output and goes before all new ones (of its priority, where priority orders the queue).
   A step that evicts by rule 1 admits nobody.
4. A request is admitted when the free blocks hold all its tokens and `GROWTH_BLOCKS` more for everyone who will still
   grow, and one more each for every time it was evicted, so that it does not return only to be evicted again.

5. Prompts take whatever a step of decodes leaves, or, by the `prefill` policy, turns of their own.
6. With a `lookahead`, a step of decodes alone also gives each of them blocks for that many tokens more, while free
   blocks are plenty: what a runner needs that decodes ahead of the host.
7. Who waits in which order is the `order` policy's. Where that says that the first in the queue outranks a running
   request, it goes before that one's prompt, and takes its seat and blocks where none are free; a prompt that outranks
   all decodes waits for no turn, and no lower prompt makes its steps longer (decision 0011).
8. While the first in the queue waits for blocks, up to `max_passes` others of its priority may go before it that fit to
   their very end into what is free: a long request stands aside, and the short ones behind it finish meanwhile.
9. Blocks that an evicted request had may be kept in host memory by the `preemption` policy. When it is admitted again
   they are copied back, and count as computed (decision 0012).
10. A `fork` starts at once behind what its parent has computed, with a seat and blocks for it; else it waits as any
   other (decision 0012).
11. A newcomer that outranks nobody leaves the share of the pool free that the `watermark` says, which is more after the
    pool ran short (rule 1), until so much is free. Where nothing runs it need not (decision 0013).
12. A decode takes the drafts it was given along, as far as the budget and the blocks go that nobody else wants: a guess
   takes nobody's place (`speculative/window.py`).

Torch-free. It does not sample, does not know what ends a text, and does not touch device memory.
"""

from __future__ import annotations

from bisect import bisect, insort
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from strata_lab.batch import ScheduledBatch, ScheduledRequest
from strata_lab.block_manager import BlockManager
from strata_lab.capacity import most_slots
from strata_lab.request import Request, RequestState
from strata_lab.roster import MAX_EVICTIONS, Roster, dearness
from strata_lab.speculative.window import take_drafts
from strata_lab.waiting_queue import MAX_WAITING, QueueFull

__all__ = ["MAX_EVICTIONS", "MAX_WAITING", "QueueFull", "ScheduledBatch", "Scheduler", "most_slots"]

GROWTH_BLOCKS = 2  # halves the recomputed tokens against 1 for 4% more steps; figures in decision 0001
PASS_SCAN = 16  # requests behind the first that are looked at in a step


@dataclass(slots=True)
class _Step:
    """The step being built.

    Attributes:
        budget: what is left of it.
        num_running: requests that ran when it began.
        items: who has a place in it, by id.
        preempted: who lost its blocks for it.
        evicts: whether rule 1 was needed.
    """

    budget: int
    num_running: int
    items: dict[str, ScheduledRequest] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)
    evicts: bool = False


class Scheduler(Roster):
    """Chooses the steps of all requests.

    A step is `schedule`, a forward pass, `commit`, then one `Request.append` for each item that samples.
    """

    def __init__(self, block_manager: BlockManager, **settings: Any) -> None:
        super().__init__(block_manager, **settings)
        self._last_turn = (0, -1)  # seniority of the decode that was served last

    def schedule(self, decodes_only: bool = False) -> ScheduledBatch:
        """Choose the next step's tokens and give them their blocks.

        Empty only when there is no work, or with `decodes_only`, or when all of it is held.
        """
        step = _Step(self.max_num_batched_tokens, len(self.running))
        head = self.waiting.head
        if self.watermark.closed and (head is None or not head.num_preemptions):  # else it is free for those
            self.watermark.saw(self._spare(GROWTH_BLOCKS), self.blocks.num_blocks)
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self.running:
            if request.request_id not in self._held:
                (decodes if request.is_decoding else prefills).append(request)
        top = decodes[0] if decodes else None
        if len(decodes) > step.budget:  # they take turns, beginning behind the one served last
            turn = bisect(decodes, self._last_turn, key=self._rank)
            decodes = decodes[turn:] + decodes[:turn]
        with_decodes, most_prefill, pressing = True, 0, False
        if not decodes_only:
            has_prompts, pressing = bool(prefills or self.waiting), self._presses(top, prefills)
            with_decodes, most_prefill = self.prefill.turn(bool(decodes), has_prompts, step.budget, pressing)
            if most_prefill:
                self._displace(step, step.budget - (len(decodes) if with_decodes else 0))
            if pressing and not self._presses(top, prefills, step):
                pressing = False
                with_decodes, most_prefill = self.prefill.turn(bool(decodes), has_prompts, step.budget)
        num_decode_tokens = self._serve_decodes(decodes, step) if with_decodes else 0
        if most_prefill:
            held_back = max(0, step.budget - most_prefill)
            step.budget -= held_back
            for request in prefills:
                if pressing and top is not None and not self.waiting.order.outranks(request, top):
                    break
                self._admit(step, before=request)
                self._serve(request, step)
            self._admit(step, before=top if pressing else None)
            step.budget += held_back
        if not step.items:  # a turn of prompts that found no room for any
            num_decode_tokens = self._serve_decodes(decodes, step)
        assert step.items or decodes_only or self._held or not self.has_work, "a step must make progress"
        num_prefill_tokens = self.max_num_batched_tokens - step.budget - num_decode_tokens
        if self.lookahead and not num_prefill_tokens:
            for item in step.items.values():
                self._reserve(item)
        copies, out, back = self._take_moves()
        items = list(step.items.values())
        take_drafts(items, step.budget, self.blocks, len(self.running), self.max_model_len)
        return ScheduledBatch(items, step.preempted, num_decode_tokens, num_prefill_tokens, copies, out, back)

    def _serve_decodes(self, decodes: list[Request], step: _Step) -> int:
        """Serve them first in a step; how many got a place."""
        for request in decodes:
            self._serve(request, step)
        if step.items:
            self._last_turn = self._rank(next(reversed(step.items.values())).request)
        return len(step.items)

    def _serve(self, request: Request, step: _Step) -> None:
        """Give a running request a place in the step, with the tokens that it wants and budget and pool allow."""
        start, request_id = request.num_computed_tokens, request.request_id
        num_tokens = min(request.num_uncomputed_tokens, step.budget)
        if num_tokens == 0 or request.state is not RequestState.RUNNING:  # preempted for this step
            return
        while (room := self.blocks.room(request_id) - start) == 0:
            victim = self._victim(request, step)
            if victim is None:
                return
            self._preempt(victim)
            step.preempted.append(victim)
            step.evicts = True
            self.watermark.ran_short()
        num_tokens = min(num_tokens, room)
        table = self.blocks.grow(request_id, start + num_tokens)
        step.items[request_id] = ScheduledRequest(request, start, num_tokens, table)
        step.budget -= num_tokens

    def _reserve(self, item: ScheduledRequest) -> None:
        """Rule 6. Blocks that are short in supply are left alone; without them the runner does not run ahead."""
        most = most_slots(item.request, self.max_model_len)
        wanted = min(item.start + item.num_tokens + self.lookahead, most)
        missing = self.blocks.blocks_for(wanted) - len(item.block_table)
        if 0 < missing <= self.blocks.num_free - len(self.running):
            self.blocks.grow(item.request.request_id, wanted)

    # -- who makes room -------------------------------------------------------------------------------------------

    def _victim(self, request: Request, step: _Step) -> Request | None:
        """Whom `request` may evict (rule 1): one that holds a block which nobody shares, or one of several that do."""
        juniors = self.running[: self.running.index(request) : -1]  # most junior first, so that it loses a tie
        busy = step.items.keys() | self._held
        candidates = [r for r in juniors if r.request_id not in busy and self.blocks.table(r.request_id)]
        useful = [r for r in candidates if self.blocks.frees_any(r.request_id)]
        if not useful and self.blocks.frees_any(*(r.request_id for r in candidates)):
            useful = candidates
        return min(useful, key=dearness, default=None)

    def _displace(self, step: _Step, budget: int) -> None:
        """Rule 7: make room for the first in the queue, if those that it outranks hold enough.

        Args:
            step: nobody has a place in it yet.
            budget: tokens that its decodes leave.
        """
        head = self.waiting.head
        if head is None or not self.running or not self.waiting.order.outranks(head, self.running[-1]):
            return
        if not self.admission.may_admit(step.num_running, budget):
            return
        growth = GROWTH_BLOCKS + head.num_preemptions
        juniors: list[Request] = []
        others: list[Request] = []
        for request in reversed(self.running):  # most junior first, so that it loses a tie
            lower = request.request_id not in self._held and self.waiting.order.outranks(head, request)
            (juniors if lower else others).append(request)
        needed = sum(self._demand(r, growth) for r in others) + self._demand_of_waiting(head, growth)
        gain = sum(self.blocks.num_held(r.request_id) for r in juniors)  # at most: some may be shared with others
        if len(others) >= self.max_num_seqs or needed > self.blocks.num_free + gain:
            return  # it could not start even without all of them
        for victim in sorted(juniors, key=dearness):
            if self._fits(head):
                return
            self._preempt(victim)
            step.preempted.append(victim)

    def _presses(self, top: Request | None, prefills: list[Request], step: _Step | None = None) -> bool:
        """Rule 7: whether a prompt outranks `top`, the most senior decode; with `step`, one that it can serve."""
        outranks, head = self.waiting.order.outranks, self.waiting.head
        if top is None:
            return False
        if prefills and outranks(prefills[0], top):
            return True
        if head is None or not outranks(head, top):
            return False
        return step is None or (self.admission.may_admit(step.num_running, step.budget) and self._fits(head))

    def _fits(self, waiting: Request) -> bool:
        """Whether there is a seat and room for a request that waits (rule 4)."""
        growth = GROWTH_BLOCKS + waiting.num_preemptions
        has_seat = len(self.running) < self.max_num_seqs
        return has_seat and self._spare(growth) >= self._demand_of_waiting(waiting, growth)

    # -- who may start --------------------------------------------------------------------------------------------

    def _admit(self, step: _Step, before: Request | None = None) -> None:
        """Move requests from the queue into the step (rule 4); with `before`, only those that outrank it."""
        growth, spare = -1, 0
        while (head := self.waiting.head) is not None and len(self.running) < self.max_num_seqs and not step.evicts:
            if before is not None and not self.waiting.order.outranks(head, before):
                return
            if not self.admission.may_admit(step.num_running, step.budget):
                return
            if growth != GROWTH_BLOCKS + head.num_preemptions:
                growth = GROWTH_BLOCKS + head.num_preemptions
                spare = self._spare(growth)
            demand = self._demand_of_waiting(head, growth)
            if demand + self._left_alone(head) > spare:
                self._pass(head, spare, step)
                return
            spare -= demand
            self._start(head, step)

    def _left_alone(self, newcomer: Request) -> int:
        """Rule 11: spare blocks that a waiting request must leave."""
        known = newcomer.num_preemptions or not self.running
        if known or self.waiting.order.outranks(newcomer, self.running[-1]):
            return 0
        return self.watermark.blocks(self.blocks.num_blocks)

    def _pass(self, head: Request, spare: int, step: _Step) -> None:
        """Rule 8: let short requests go before the first, which does not fit into the `spare` blocks."""
        for request in list(islice(self.waiting, 1, 1 + PASS_SCAN)) if head.num_passed < self.max_passes else ():
            full = len(self.running) >= self.max_num_seqs or not self.admission.may_admit(step.num_running, step.budget)
            if full or head.num_passed >= self.max_passes:
                return
            demand = self._demand_of_waiting(request, self.blocks.num_blocks)  # all that it can ever take
            if request.priority >= head.priority and demand + self._left_alone(request) <= spare:
                spare -= demand
                head.num_passed += 1
                self._start(request, step)

    def _start(self, request: Request, step: _Step) -> None:
        """Take a waiting request into the step, with what the prefix cache holds of it."""
        self.waiting.remove(request)
        request.move_to(RequestState.RUNNING)
        insort(self.running, request, key=self._rank)
        # Where logits of the prompt are wanted, none of it may be skipped.
        num_cached = 0 if request.wants_prompt_rows else self.blocks.attach(request.request_id, request.token_ids)
        if request.num_preemptions:
            num_cached = self._bring_back(request, num_cached)
        else:
            request.num_cached_tokens = num_cached
        request.num_computed_tokens = num_cached
        self._serve(request, step)

    def _bring_back(self, request: Request, num_cached: int) -> int:
        """Rule 9, for a request whose first `num_cached` tokens the pool has; how many it has then."""
        request_id = request.request_id
        kept = self.preemption.saved(request_id)
        if kept <= num_cached:
            self.preemption.drop(request_id)
            return num_cached
        table = self.blocks.grow(request_id, kept)
        self.preemption.load(request_id, table, num_cached // self.blocks.block_size)
        return kept

    def fork(self, parent: Request, child: Request) -> int:
        """Take a new request that goes on from what a running one has computed (rule 10).

        The two share all blocks that are full; a block that both would write is copied for the child before the next
        step. The bounds of the queue are not asked: who wants `n` answers asks for its first.

        Args:
            parent: in whatever state; it is left as it is.
            child: new. As many tokens as it has in common with its parent are shared, but never its last one, which
                must be computed for its logits.

        Returns:
            How many tokens it need not compute; 0 where it waits for a seat or for blocks. What the prefix cache has by
            then is counted when it is admitted.

        Raises:
            RequestError: its name is in use, it is empty, or it can never be served. Nothing has changed.
        """
        self.check_new(child)
        self._register(child)
        shared = self._num_shared(parent, child)
        num_full = shared // self.blocks.block_size
        demand = self._demand(child, GROWTH_BLOCKS, num_full)
        if not shared or len(self.running) >= self.max_num_seqs or demand > self._spare(GROWTH_BLOCKS):
            self.waiting.push(child, self._rank(child))
            return 0
        child.move_to(RequestState.RUNNING)
        insort(self.running, child, key=self._rank)
        self.blocks.fork(parent.request_id, child.request_id, self.blocks.blocks_for(shared))
        if shared % self.blocks.block_size and (pair := self.blocks.writable(child.request_id, shared)):
            pending = {new: old for old, new in self._copies.values()}  # a copy of a copy that has yet to be made
            self._copies[child.request_id] = pending.get(pair[0], pair[0]), pair[1]
        child.num_computed_tokens = shared
        child.num_cached_tokens = min(shared, child.num_prompt_tokens)
        return shared

    def _spare(self, growth: int) -> int:
        """Free blocks that those who run will not take."""
        return self.blocks.num_free - sum(self._demand(r, growth) for r in self.running)

    def _demand(self, request: Request, growth: int, num_held: int | None = None) -> int:
        """Blocks a request will take: for its tokens so far and `growth` more, but no more than its end needs."""
        wanted = self.blocks.blocks_for(request.num_tokens) + growth
        most = self.blocks.blocks_for(most_slots(request, self.max_model_len))
        kept = self.blocks.retention.most_blocks(self.blocks.block_size, self.max_num_batched_tokens)
        kept = min(kept, self.blocks.num_blocks) - self.blocks.num_held(request.request_id)
        held = len(self.blocks.table(request.request_id)) if num_held is None else num_held
        return max(0, min(min(wanted, most) - held, kept))

    def _demand_of_waiting(self, request: Request, growth: int) -> int:
        """`_demand` of one that waits: blocks which somebody holds now cost it nothing, idle ones are taken."""
        skips = not request.wants_prompt_rows
        return self._demand(request, growth, self.blocks.num_shared(request.request_id, request.token_ids) * skips)
