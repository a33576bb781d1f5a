"""Who computes what in the next step: continuous batching, chunked prefill, preemption by recompute.

A step has a budget of tokens. Requests that decode come first (one token each), then running prompts go on where they
stopped, then waiting requests are admitted; a prompt larger than the rest of the budget is sliced. A request simply
wants its `num_uncomputed_tokens`: prefill, chunk, decode and recompute are all that one number.

When the KV pool is exhausted (reasons and proof of progress: docs/decisions/0001-recompute-preemption.md):

1. *Seniority* is (higher priority, earlier arrival), fixed at `add`. A request may evict only a junior that has no
   place in the step being built yet: the one of lowest priority, then with the fewest computed tokens. So a newcomer
   never evicts an older request of its priority, and no two requests evict each other in turn.
2. A request that may evict nobody keeps its blocks and sits the step out: waiting is cheaper than recomputing.
3. An evicted request keeps its output and goes to the front of the queue. A step that evicts admits nobody.
4. A request is admitted when the free blocks hold all its tokens and `GROWTH_BLOCKS` more for everyone who will still
   grow, and one more each for every time it was evicted, so that it does not return only to be evicted again.

5. Prompts take whatever a step of decodes leaves, or, by the `prefill` policy, turns of their own.
6. With a `lookahead`, a step of decodes alone also gives each of them blocks for that many tokens more, while free
   blocks are plenty: what a runner needs that decodes ahead of the host.

Priority decides who keeps blocks, not who is admitted: the queue is first come, first served.
Torch-free. It does not sample, does not know what ends a text, and does not touch device memory.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from strata_lab.admission import Admission, MixedPrefill, PrefillPolicy
from strata_lab.batch import ScheduledBatch, ScheduledRequest
from strata_lab.block_manager import BlockManager
from strata_lab.config import ConfigError, check_names, check_whole
from strata_lab.request import Request, RequestError, RequestState

MAX_WAITING = 1024
GROWTH_BLOCKS = 2  # halves the recomputed tokens against 1 for 4% more steps; figures in decision 0001

# The numbers `configure` takes: smallest legal value, and one that works.
_LIMITS = {
    "max_num_seqs": (1, 16),
    "max_num_batched_tokens": (1, 512),
    "max_model_len": (2, 2048),
    "max_waiting": (1, 64),
    "lookahead": (0, 8),
}


class QueueFull(RequestError):
    """The waiting queue is at its bound; the request was not taken and may be sent again later."""


@dataclass(slots=True)
class _Step:
    """The step being built: what is left of its budget, who has a place in it (by id), who was evicted for it."""

    budget: int
    items: dict[str, ScheduledRequest] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)


class Scheduler:
    """Owns every unfinished request and the block tables. One thread calls it.

    A step is `schedule`, a forward pass, `commit`, then one `Request.append` for each item that samples.

    Attributes:
        waiting: requests without blocks, next to be admitted first.
        running: requests with a place, most senior first.
        blocks: the block tables.
        num_preemptions: evictions so far.
        num_recomputed_tokens: computed tokens that evictions threw away, to be computed again.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_waiting: int
    lookahead: int
    admission: Admission
    prefill: PrefillPolicy

    def __init__(self, block_manager: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int,
                 max_model_len: int, admission: Admission, max_waiting: int = MAX_WAITING,
                 lookahead: int = 0, prefill: PrefillPolicy | None = None) -> None:  # fmt: skip
        self.blocks = block_manager
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = self.num_recomputed_tokens = self._num_added = 0
        self._requests: dict[str, Request] = {}
        self._seniority: dict[str, tuple[int, int]] = {}  # smaller is more senior
        self._held: set[str] = set()  # computed elsewhere right now
        self._parting: list[str] = []  # ended while held: their blocks are still written to
        self._last_turn = (0, -1)  # seniority of the decode that was served last
        self.configure(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
                       max_model_len=max_model_len, max_waiting=max_waiting, lookahead=lookahead,
                       admission=admission, prefill=prefill or MixedPrefill())  # fmt: skip

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    def configure(self, **changes: Any) -> None:
        """Change any attribute that the constructor takes by name.

        In force from the next step; no request is lost. With fewer seats than running requests nobody is admitted
        until enough have ended. With a budget below the number of decodes they take turns. Raises
        `ConfigError`, with nothing changed, for unknown names, bad values, and a `max_model_len` that an unfinished
        request cannot be served under.
        """
        check_names(changes, [*_LIMITS, "admission", "prefill"], "scheduler setting")
        for name in changes.keys() & _LIMITS.keys():
            check_whole(name, changes[name], *_LIMITS[name])
        for request in self._requests.values() if "max_model_len" in changes else ():
            if reason := self.why_never_fits(request, changes["max_model_len"]):
                raise ConfigError(f"max_model_len={changes['max_model_len']} does not suit a live request: {reason}")
        for name, value in changes.items():
            setattr(self, name, value)

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises `QueueFull` at the bound of the queue, and `RequestError` for an id in use, an empty prompt and a request
        that can never be served.
        """
        if request.request_id in self._requests or request.request_id in self._held:
            raise RequestError(f"request_id={request.request_id!r} is in use; try another, or wait until it has ended")
        if request.num_tokens == 0:
            raise RequestError(f"request {request.request_id!r} has an empty prompt; try at least one token")
        if reason := self.why_never_fits(request):
            raise RequestError(reason)
        if len(self.waiting) >= self.max_waiting:
            now, bound = len(self.waiting), self.max_waiting
            raise QueueFull(f"{now} requests wait and max_waiting={bound}; try again later, or max_waiting={2 * bound}")
        self._seniority[request.request_id] = (-request.priority, self._num_added)
        self._num_added += 1
        self._requests[request.request_id] = request
        self.waiting.append(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request in whatever state it is; None if there is no unfinished one of that name."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, "abort")
        return request

    def finish(self, request: Request, reason: str, error: str | None = None) -> None:
        """End a request and free its blocks."""
        (self.running if request.state is RequestState.RUNNING else self.waiting).remove(request)
        if request.request_id in self._held:
            self._parting.append(request.request_id)
        else:
            self.blocks.free(request.request_id)
        del self._requests[request.request_id], self._seniority[request.request_id]
        request.finish(reason, error)

    def hold(self, batch: ScheduledBatch) -> None:
        """Leave the batch's requests alone, and their blocks theirs, while they are computed beside the steps."""
        self._held.update(item.request.request_id for item in batch.items)

    def release(self, batch: ScheduledBatch) -> None:
        """The end of `hold`; blocks of requests that ended meanwhile are free now."""
        self._held.difference_update(item.request.request_id for item in batch.items)
        for request_id in self._parting:
            self.blocks.free(request_id)
        self._parting.clear()

    def commit(self, batch: ScheduledBatch) -> None:
        """Record that a step was computed; requests that ended or lost their blocks meanwhile are left alone."""
        for item in batch.items:
            if item.request.state is RequestState.RUNNING:
                item.request.num_computed_tokens = item.start + item.num_tokens

    def reset_blocks(self, block_manager: BlockManager, max_model_len: int | None = None) -> list[Request]:
        """Take a new pool, and the `max_model_len` that goes with it; what runs is preempted and will be recomputed.

        Returns the requests that the new pool can never hold. They are still queued: the caller ends each one with
        `finish(request, "error", why_never_fits(request))` before the next step.
        """
        max_model_len = self.max_model_len if max_model_len is None else max_model_len
        check_whole("max_model_len", max_model_len, *_LIMITS["max_model_len"])
        assert not self._held, self._held
        for request in self.running[::-1]:  # the most senior ends at the front of the queue
            self._preempt(request)
        self.blocks, self.max_model_len = block_manager, max_model_len
        return [request for request in self._requests.values() if self.why_never_fits(request)]

    def why_never_fits(self, request: Request, max_model_len: int | None = None) -> str | None:
        """Why a request can never be served with this pool and `max_model_len` (ours if None); None if it can be."""
        limit, blocks, have = max_model_len or self.max_model_len, self.blocks, request.num_tokens
        if have >= limit:
            return (
                f"request {request.request_id!r} has {have} tokens and must have room for one more, but max_model_len="
                f"{limit}; try at most {limit - 1} tokens, or max_model_len={have + 1}"
            )
        needed, spare = blocks.blocks_for(most_slots(request, limit)), blocks.num_blocks * blocks.block_size - have
        if needed <= blocks.num_blocks:
            return None
        fix = (
            f"max_tokens={request.num_output_tokens + spare + 1}"
            if spare >= 0
            else f"max_tokens=1 and a prompt {-spare} tokens shorter"
        )
        return (
            f"request {request.request_id!r} has {have} tokens and max_tokens={request.params.max_tokens}: it may need "
            f"{needed} KV blocks of {blocks.block_size} tokens and the pool has {blocks.num_blocks}; try {fix}, or "
            f"num_kv_blocks={needed}"
        )

    def schedule(self, decodes_only: bool = False) -> ScheduledBatch:
        """Choose the next step's tokens and give them their blocks.

        Empty only when there is no work, or with `decodes_only`, or when all of it is held.
        """
        num_running, step = len(self.running), _Step(self.max_num_batched_tokens)
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self.running:
            if request.request_id not in self._held:
                (decodes if request.is_decoding else prefills).append(request)
        if len(decodes) > step.budget:  # they take turns, beginning behind the one served last
            turn = bisect(decodes, self._last_turn, key=self._rank)
            decodes = decodes[turn:] + decodes[:turn]
        with_decodes, most_prefill = True, 0
        if not decodes_only:
            with_decodes, most_prefill = self.prefill.turn(bool(decodes), bool(prefills or self.waiting), step.budget)
        num_decode_tokens = self._serve_decodes(decodes, step) if with_decodes else 0
        if most_prefill:
            held_back = max(0, step.budget - most_prefill)
            step.budget -= held_back
            for request in prefills:
                self._serve(request, step)
            if not step.preempted:
                self._admit(num_running, step)
            step.budget += held_back
        if not step.items:  # a turn of prompts that found no room for any
            num_decode_tokens = self._serve_decodes(decodes, step)
        assert step.items or decodes_only or self._held or not self.has_work, "a step must make progress"
        num_prefill_tokens = self.max_num_batched_tokens - step.budget - num_decode_tokens
        if self.lookahead and not num_prefill_tokens:
            for item in step.items.values():
                self._reserve(item)
        return ScheduledBatch(list(step.items.values()), step.preempted, num_decode_tokens, num_prefill_tokens)

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
        if num_tokens == 0 or request.state is not RequestState.RUNNING:  # evicted by one served before it
            return
        room = self.blocks.room(request_id) - start
        if room == 0:
            victim = self._victim(request, step)
            if victim is None:
                return
            self._preempt(victim)
            step.preempted.append(victim)
            room = self.blocks.room(request_id) - start
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

    def _victim(self, request: Request, step: _Step) -> Request | None:
        """Whom `request` may evict (rule 1); one victim has at least the one block that is missing."""
        juniors = self.running[: self.running.index(request) : -1]  # most junior first, so that it loses a tie
        busy = step.items.keys() | self._held
        candidates = [r for r in juniors if r.request_id not in busy and self.blocks.table(r.request_id)]
        return min(candidates, key=lambda r: (r.priority, r.num_computed_tokens), default=None)

    def _rank(self, request: Request) -> tuple[int, int]:
        return self._seniority[request.request_id]

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.blocks.free(request.request_id)
        request.move_to(RequestState.PREEMPTED)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.num_recomputed_tokens += request.num_computed_tokens
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)

    def _admit(self, num_running: int, step: _Step) -> None:
        """Move requests from the queue into the step (rule 4)."""
        growth, spare = -1, 0
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if not self.admission.may_admit(num_running, step.budget):
                return
            if growth != GROWTH_BLOCKS + request.num_preemptions:
                growth = GROWTH_BLOCKS + request.num_preemptions
                spare = self.blocks.num_free - sum(self._demand(r, growth) for r in self.running)
            spare -= self._demand(request, growth)
            if spare < 0:
                return
            self.waiting.popleft().move_to(RequestState.RUNNING)
            insort(self.running, request, key=self._rank)
            self._serve(request, step)

    def _demand(self, request: Request, growth: int) -> int:
        """Blocks a request will take: for its tokens so far and `growth` more, but no more than its end needs."""
        wanted = self.blocks.blocks_for(request.num_tokens) + growth
        most = self.blocks.blocks_for(most_slots(request, self.max_model_len))
        return max(0, min(wanted, most) - len(self.blocks.table(request.request_id)))


def most_slots(request: Request, max_model_len: int) -> int:
    """KV slots a request can ever fill: one per token but the last, which is never fed back."""
    return min(request.num_prompt_tokens + request.params.max_tokens, max_model_len) - 1
