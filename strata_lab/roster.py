"""Every unfinished request, where it is and what it holds; the part of the scheduler that chooses nothing.

A request is here from `add` until it ends, in the waiting queue or among those that run. Whoever ends it (the caller, a
deadline, an error, its last token) does so in any state, and its blocks are free at once, or as soon as the prompt lane
has stopped writing to them. Torch-free.
"""

from __future__ import annotations

import heapq
from typing import Any

from strata_lab.admission import (
    Admission,
    FirstComeFirstServed,
    MixedPrefill,
    PrefillPolicy,
    QueueOrder,
    Seniority,
    Watermark,
)
from strata_lab.batch import Pairs, ScheduledBatch
from strata_lab.block_manager import BlockManager
from strata_lab.capacity import why_never_fits
from strata_lab.kv_retention import Retention
from strata_lab.pool_move import take_over
from strata_lab.preemption import Preemption, Recompute
from strata_lab.request import Request, RequestState
from strata_lab.sampling_params import RequestError
from strata_lab.settings import ConfigError, check_names, check_whole
from strata_lab.waiting_queue import MAX_WAITING, MAX_WAITING_TOKENS, WaitingQueue

MAX_EVICTIONS = 3  # of one request, while there are others of its priority to evict (decision 0011)
# The numbers `configure` takes: smallest legal value, and one that works.
_LIMITS = {
    "max_num_seqs": (1, 16),
    "max_num_batched_tokens": (1, 512),
    "max_model_len": (2, 2048),
    "max_waiting": (1, 64),
    "max_waiting_tokens": (1, MAX_WAITING_TOKENS),
    "max_passes": (0, 4),
    "lookahead": (0, 8),
}


class Roster:
    """Owns the requests and the block tables. One thread calls it.

    Attributes:
        waiting: requests without blocks, next to be admitted first.
        running: requests with a place, most senior first.
        blocks: the block tables.
        num_preemptions: evictions so far.
        num_recomputed_tokens: computed tokens that evictions threw away, to be computed again unless the prefix cache
            still has them.
        num_swapped_out, num_swapped_in: blocks copied to host memory and back.
        preemption: what becomes of the blocks of a preempted request.
        watermark: how much of the pool newcomers leave alone.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_waiting: int
    max_waiting_tokens: int
    max_passes: int
    lookahead: int
    admission: Admission
    prefill: PrefillPolicy
    preemption: Preemption

    def __init__(self, block_manager: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int,
                 max_model_len: int, admission: Admission, max_waiting: int = MAX_WAITING,
                 max_waiting_tokens: int = MAX_WAITING_TOKENS, max_passes: int = 0, lookahead: int = 0,
                 prefill: PrefillPolicy | None = None, order: QueueOrder | None = None,
                 preemption: Preemption | None = None, watermark: Watermark | None = None) -> None:  # fmt: skip
        self.blocks = block_manager
        self.waiting = WaitingQueue(order or FirstComeFirstServed())
        self.running: list[Request] = []
        self.num_preemptions = self.num_recomputed_tokens = self._num_added = 0
        self.num_swapped_out = self.num_swapped_in = 0
        self.preemption, self.watermark = preemption or Recompute(), watermark or Watermark()
        self._requests: dict[str, Request] = {}
        self._seniority: dict[str, Seniority] = {}
        self._deadlines: list[tuple[float, int, str]] = []  # a heap; entries of requests that have ended stay a while
        self._held: set[str] = set()  # computed elsewhere right now
        self._parting: list[str] = []  # ended while held: their blocks are still written to
        self._copies: dict[str, tuple[int, int]] = {}  # by the fork that needs it; the next step makes them
        self.configure(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
                       max_model_len=max_model_len, max_waiting=max_waiting, max_waiting_tokens=max_waiting_tokens,
                       max_passes=max_passes, lookahead=lookahead, admission=admission,
                       prefill=prefill or MixedPrefill())  # fmt: skip

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    def configure(
        self, *, order: QueueOrder | None = None, preemption: Preemption | None = None,
        watermark: Watermark | None = None, **changes: Any,
    ) -> None:  # fmt: skip
        """Change any setting that the constructor takes by name.

        In force from the next step; no request is lost. With fewer seats than running requests nobody is admitted
        until enough have ended. With a budget below the number of decodes they take turns. What another `preemption`
        object kept is computed again. Raises
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
        if order is not None:
            self.waiting.reorder(order)
        if watermark is not None and watermark != self.watermark:  # the same keeps what it knows
            watermark.num_closures += self.watermark.num_closures
            self.watermark = watermark
        if preemption is not None and preemption is not self.preemption:
            self.num_recomputed_tokens += self.preemption.clear()
            self.preemption = preemption

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises `QueueFull` at the bounds of the queue, and `RequestError` for an id in use, an empty prompt and a
        request that can never be served.
        """
        self.check_new(request)
        self.waiting.check_room(request, self.max_waiting, self.max_waiting_tokens)
        self._register(request)
        self.waiting.push(request, self._rank(request))

    def has_room(self, request: Request, share: float = 1.0) -> bool:
        """Whether the queue would take a newcomer if its bounds were `share` of what they are."""
        most, most_tokens = int(share * self.max_waiting), int(share * self.max_waiting_tokens)
        return self.waiting.why_no_room(request, max(1, most), most_tokens) is None

    def check_new(self, request: Request) -> None:
        """Raise `RequestError` for an id in use, an empty prompt and a request that can never be served."""
        if request.request_id in self._requests or request.request_id in self._held:
            raise RequestError(f"request_id={request.request_id!r} is in use; try another, or wait until it has ended")
        if request.num_tokens == 0:
            raise RequestError(f"request {request.request_id!r} has an empty prompt; try at least one token")
        if reason := self.why_never_fits(request):
            raise RequestError(reason)

    def _register(self, request: Request) -> None:
        self._seniority[request.request_id] = (-request.priority, self._num_added)
        self._requests[request.request_id] = request
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, self._num_added, request.request_id))
        self._num_added += 1

    def abort(self, request_id: str) -> Request | None:
        """End a request in whatever state it is; None if there is no unfinished one of that name."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, "abort")
        return request

    def expire(self, now_s: float) -> list[Request]:
        """End every request whose deadline has passed, in whatever state it is, and return them."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, number, request_id = heapq.heappop(self._deadlines)
            if self._seniority.get(request_id, (0, -1))[1] == number:  # the name may be another request's by now
                expired.append(self._requests[request_id])
                self.finish(expired[-1], "timeout")
        return expired

    def finish(self, request: Request, reason: str, error: str | None = None) -> None:
        """End a request and free its blocks; after an error nobody finds what it has computed."""
        (self.running if request.state is RequestState.RUNNING else self.waiting).remove(request)
        if request.request_id in self._held:
            self._parting.append(request.request_id)
        else:
            self.blocks.free(request.request_id, suspect=reason == "error")
        self._copies.pop(request.request_id, None)
        self.preemption.drop(request.request_id)
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
            request = item.request
            if request.state is RequestState.RUNNING:
                self._book(request, item.start + item.num_tokens - len(item.drafts))

    def commit_drafts(self, request: Request) -> None:
        """Record that all its tokens but the last are computed: those since `commit` were drafts of the step."""
        self._book(request, request.num_tokens - 1)

    def _book(self, request: Request, computed: int) -> None:
        request.num_computed_tokens = computed
        self.blocks.commit(request.request_id, request.token_ids, computed, request.num_prompt_tokens)

    def reset_blocks(self, block_manager: BlockManager, max_model_len: int | None = None) -> list[Request]:
        """Take a new pool, and the `max_model_len` that goes with it; what runs is preempted and will be recomputed.

        Returns the requests that the new pool can never hold. They are still queued: the caller ends each one with
        `finish(request, "error", why_never_fits(request))` before the next step.
        """
        length = self._checked_length(max_model_len)
        for request in list(self.running):
            self._preempt(request, keep=False)
        return self._new_pool(block_manager, length)

    def move_blocks(
        self, block_manager: BlockManager, max_model_len: int | None = None
    ) -> tuple[list[tuple[int, int]], list[Request]]:
        """`reset_blocks` for a pool of the same format: what it can hold of the old one goes on, packed.

        Only where it is too small for all are requests preempted, as for want of blocks. Returns the copies to be made
        before the next step, (old block, new block), and what `reset_blocks` returns.
        """
        length = self._checked_length(max_model_len)
        for request_id in list(self._copies):  # forks whose first copy was still to come
            self._preempt(self._requests[request_id], keep=False)
        while self.blocks.num_used > block_manager.num_blocks:
            self._preempt(min(reversed(self.running), key=dearness), keep=False)
        moves = take_over(block_manager, self.blocks)
        return moves, self._new_pool(block_manager, length)

    def _checked_length(self, max_model_len: int | None) -> int:
        length = self.max_model_len if max_model_len is None else max_model_len
        check_whole("max_model_len", length, *_LIMITS["max_model_len"])
        assert not self._held, self._held
        return length

    def _new_pool(self, block_manager: BlockManager, max_model_len: int) -> list[Request]:
        self.num_recomputed_tokens += self.preemption.clear()
        block_manager.num_asked_tokens += self.blocks.num_asked_tokens  # they count for the life of the engine
        block_manager.num_hit_tokens += self.blocks.num_hit_tokens
        self.blocks, self.max_model_len = block_manager, max_model_len
        return [request for request in self._requests.values() if self.why_never_fits(request)]

    def check_keep(self, retention: Retention) -> None:
        """Raise `ConfigError` where an unfinished request could not be served if attention saw `retention`."""
        for request in self._requests.values():
            if reason := why_never_fits(request, self.blocks, self.max_model_len, retention):
                raise ConfigError(f"attention cannot change while a live request needs what it frees: {reason}")

    def keep(self, retention: Retention, basis: bytes) -> None:
        """Compute attention in another way from now on; what runs is preempted and will be recomputed in it.

        `basis` tells it from other ways, for the prefix cache.
        """
        assert not self._held, self._held
        self.num_recomputed_tokens += self.preemption.clear()  # what host memory keeps was computed in the old way
        for request in list(self.running):
            self._preempt(request, keep=False)
        self.blocks.keep(retention, basis)

    def why_never_fits(self, request: Request, max_model_len: int | None = None) -> str | None:
        """Why a request can never be served with this pool and `max_model_len` (ours if None); None if it can be."""
        return why_never_fits(request, self.blocks, max_model_len or self.max_model_len)

    def _preempt(self, request: Request, *, keep: bool = True) -> None:
        """Take a running request's blocks; it keeps its tokens and waits.

        With `keep` the `preemption` may copy the blocks first; not what was computed with weights of the past, and not
        what a window has made holes in.
        """
        self.running.remove(request)
        request_id, computed, kept = request.request_id, request.num_computed_tokens, 0
        if keep and computed and not self.blocks.is_stale(request_id):
            table = () if self.blocks.has_holes(request_id) else self.blocks.table(request_id)
            kept = self.preemption.save(request_id, table, computed, self.blocks.block_size)
        if not kept:
            self._copies.pop(request_id, None)
        self.blocks.free(request_id)
        request.move_to(RequestState.PREEMPTED)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.num_recomputed_tokens += computed - kept
        request.num_computed_tokens = 0
        self.waiting.push(request, self._rank(request))

    def _take_moves(self) -> tuple[Pairs, Pairs, Pairs]:
        """The moves that the step just built needs, as in `ScheduledBatch`; nearly every step needs none."""
        if not self._copies and not self.preemption.has_moves:
            return (), (), ()
        copies = list(self._copies.values())
        self._copies.clear()
        out, back = self.preemption.take_moves()
        self.num_swapped_out += len(out)
        self.num_swapped_in += len(back)
        return copies, out, back

    def after_failed_moves(self, batch: ScheduledBatch) -> list[Request]:
        """The running requests whose blocks the moves of a batch did not fill: the caller ends each with an error.

        What host memory was to keep is forgotten, and computed again.
        """
        self.num_recomputed_tokens += self.preemption.clear()
        unfilled = {block for _, block in (*batch.copies, *batch.swap_in)}
        return [r for r in self.running if not unfilled.isdisjoint(self.blocks.table(r.request_id))]

    def _num_shared(self, parent: Request, child: Request) -> int:
        """Tokens of a new child that a parent has computed for it."""
        if parent.state is not RequestState.RUNNING or self.blocks.has_holes(parent.request_id):
            return 0
        most = min(parent.num_computed_tokens, child.num_tokens - 1)
        if parent.token_ids[:most] != child.token_ids[:most]:
            most = next(i for i in range(most) if parent.token_ids[i] != child.token_ids[i])
        if parent.num_prompt_tokens != child.num_prompt_tokens:  # answers may be computed otherwise than prompts
            most = min(most, self.blocks.retention.sure(min(parent.num_prompt_tokens, child.num_prompt_tokens)))
        if parent.request_id in self._held:  # its last block is being written
            most -= most % self.blocks.block_size
        return most

    def _rank(self, request: Request) -> Seniority:
        return self._seniority[request.request_id]


def dearness(request: Request) -> tuple[int, bool, int]:
    """Who is evicted first has the smallest."""
    return request.priority, request.num_preemptions >= MAX_EVICTIONS, request.num_computed_tokens
