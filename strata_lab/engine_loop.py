"""The loop: schedule -> run -> commit, in one thread, with one safe point between two steps.

`LLMEngine` is what people call; this is what it calls. Other threads queue requests, aborts and swaps under one lock,
which is never held while the model runs. There is no second decode loop anywhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from strata_lab.block_manager import BlockManager
from strata_lab.build import Parts
from strata_lab.config import changed_fields
from strata_lab.desk import Desk, EngineClosedError
from strata_lab.events import EventLog, SettingEvent, StateEvent, StepEvent, TokenEvent
from strata_lab.kernel_lab import changed_ops
from strata_lab.model_config import ModelConfig
from strata_lab.prefill_lane import PrefillLane
from strata_lab.request import Request
from strata_lab.runner import StepResult
from strata_lab.sampler import SampledTokens
from strata_lab.scheduler import ScheduledBatch, Scheduler
from strata_lab.snapshot import snapshot
from strata_lab.stats import EngineStats
from strata_lab.telemetry.governor import Governor


class EngineLoop(Desk):
    """Owns the scheduler, the sessions and the thread.

    Args:
        parts: what to run on.
        scheduler: with a pool that matches `parts.kv`.
        config: geometry, for the byte counts.
        events: where steps are reported.
    """

    def __init__(self, parts: Parts, scheduler: Scheduler, config: ModelConfig, events: EventLog) -> None:
        super().__init__(scheduler, config, events)
        self.parts = parts
        self._captures = self.captures  # when the step before ended

    # -- called by any thread -----------------------------------------------------------------------------------

    def swap(self, parts: Parts, new_blocks: Callable[[Parts], BlockManager], build_ms: float) -> float:
        """Put new parts in force between two steps and wait for it; returns the standstill in milliseconds.

        Raises `ConfigError`, with nothing changed, where a live request could not go on under them.
        """
        took_ms = 0.0

        def change() -> None:
            nonlocal took_ms
            took_ms = self.put_in_force(parts, new_blocks, build_ms)

        self.between_steps(change)
        return took_ms

    def stats(self) -> EngineStats:
        """Counters and memory, as of now."""
        with self._lock:
            self.check_open()
            return EngineStats.of(self.parts, self.scheduler, self._accounts)

    def snapshot(self) -> StateEvent:
        """Where every unfinished request is, and whose the blocks are."""
        with self._lock:
            self.check_open()
            return snapshot(self.scheduler)

    @property
    def captures(self) -> int:
        """Grows while a step captures, by the runner or for guesses."""
        return self.parts.runner.captures + self.parts.speculation.captures

    # -- what a governor steers -----------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return len(self.scheduler.running)

    @property
    def seats(self) -> int:
        """Most requests that may run now."""
        return self.scheduler.max_num_seqs

    def reseat(self, seats: int, governor: Governor) -> None:
        """Change that between two steps, unless another governor is in charge by then."""

        def change() -> None:
            if self.parts.governor is governor:
                self.scheduler.configure(max_num_seqs=seats)

        self.between_steps(change)

    # -- one step -----------------------------------------------------------------------------------------------

    def step(self) -> StepEvent | None:
        """Run one step in the calling thread; None when there is nothing to do.

        Raises `RuntimeError` when the background thread owns the steps.
        """
        self.check_open()
        if self._thread is not None and threading.current_thread() is not self._thread:
            raise RuntimeError("the background loop runs the steps; use generate() or stream(), or do not call start()")
        lane, start = self.parts.lane, time.perf_counter()
        if lane is not None and lane.done:
            return self._land(lane)
        with self._lock:
            for request in self.scheduler.expire(start):
                self._end(self._sessions[request.request_id])
        captures = self._captures
        self.parts.speculation.prepare(self._running)
        with self._lock:
            batch = self.scheduler.schedule(decodes_only=lane is not None and lane.busy)
            if not self._moved(batch):
                return None
            if lane is not None and batch.items and not batch.num_decode_tokens:  # prompts go beside the decode steps
                self.scheduler.hold(batch)
                lane.submit(batch)
                batch = self.scheduler.schedule(decodes_only=True)
                if not self._moved(batch):
                    return None
        if not batch.items:
            return self._land(lane) if lane is not None and lane.busy else None
        scheduled = time.perf_counter()
        try:
            result = self.parts.runner.run(batch)
        except Exception as error:  # whatever it is, it ends these requests and not the engine
            self._fail([item.request for item in batch.items], error)
            return None
        times = start, scheduled, time.perf_counter()
        self._captures = self.captures
        return self._deliver(batch, result, times, captured=self._captures > captures)

    def _running(self) -> list[Request]:
        with self._lock:
            return list(self.scheduler.running)

    def _moved(self, batch: ScheduledBatch) -> bool:
        """Queue the copies of blocks that come before a batch; if that fails it ends their requests and the batch's."""
        if batch.has_moves:
            try:
                self.parts.host_blocks.perform(batch)
            except Exception as error:
                others = self.scheduler.after_failed_moves(batch)
                self._fail([*others, *(item.request for item in batch.items)], error)
                return False
        return True

    def _land(self, lane: PrefillLane) -> StepEvent | None:
        """Wait for the prompts that are computed beside the decode steps, and book them."""
        batch, submitted = lane.batch, lane.submitted_s
        try:
            result = lane.result()
        except Exception as error:
            with self._lock:
                self.scheduler.release(batch)
            self._fail([item.request for item in batch.items], error)
            return None
        with self._lock:
            self.scheduler.release(batch)
        return self._deliver(batch, result, (submitted, submitted, time.perf_counter()))

    def _deliver(
        self, batch: ScheduledBatch, result: StepResult, times: tuple[float, float, float], *, captured: bool = False
    ) -> StepEvent:
        """Book a computed batch and hand its tokens out; `captured`: something was captured in its time."""
        self.parts.speculation.hear(batch, result)
        with self._lock:
            for request, entries in result.prompt_logprobs:
                request.prompt_logprobs += entries
            tokens = self._commit(batch, result.tokens, times[2])
            ms = result.forward_ms if result.queued else (times[2] - times[0]) * 1e3
            ms_known = None if captured else ms
            windows, change = self.parts.speculation.observe(batch, result.tokens.counts, ms_known, result.began)
            event = self._accounts.book(batch, tokens, result, times, self.parts, self.scheduler, windows)
            if change is not None:
                self.events.append(change)
            self.events.append(event)  # before the tokens go out: who has the last token can see its step
            for token in tokens:
                session = self._sessions[token.request_id]
                if token.finish_reason is not None:
                    self.events.append(self._accounts.book_end(session.request))
                session.deliver(token)
        return event

    def _commit(self, batch: ScheduledBatch, sampled: SampledTokens, now_s: float) -> tuple[TokenEvent, ...]:
        ended = {item.request.request_id for item in batch.items if item.request.finished}  # while the model ran
        self.scheduler.commit(batch)
        events: list[TokenEvent] = []
        for (item, drafted), token_id, logprobs, error in zip(
            batch.takers(sampled.counts), sampled.token_ids, sampled.logprobs, sampled.errors, strict=True
        ):
            request = item.request
            if request.request_id in ended:
                continue
            session = self._sessions[request.request_id]
            for other in session.take_not_begun():  # the prompt is computed, and still there
                self.scheduler.fork(request, other.request)
            event = session.accept(token_id, logprobs, error, now_s, self.scheduler.max_model_len, drafted)
            reason = event.finish_reason
            if item.drafts and (reason is not None or not drafted) and error is None:
                self.scheduler.commit_drafts(request)
            if reason is not None:
                ended.add(request.request_id)  # drafts behind its last token came true for nobody
                self.scheduler.finish(request, reason, event.error)
            events.append(event)
        return tuple(events)

    def _fail(self, requests: Iterable[Request], error: Exception) -> None:
        message = f"the step failed: {type(error).__name__}: {error}"
        with self._lock:
            for request in requests:
                if not request.finished:
                    self.scheduler.finish(request, "error", message)
                    self._end(self._sessions[request.request_id])

    def settle(self) -> None:
        """Wait for what was queued ahead of the host, and for the prompt lane."""
        self.parts.runner.settle()
        if self.parts.lane is not None and self.parts.lane.busy:
            self._land(self.parts.lane)

    def put_in_force(self, parts: Parts, new_blocks: Callable[[Parts], BlockManager], build_ms: float) -> float:
        """`swap`, where no step is in flight already."""
        started = time.perf_counter()
        before, opt = self.parts, parts.optimizations
        self.settle()
        limits = {"max_model_len": parts.max_model_len}
        new_pool = parts.kv is not before.kv
        if not new_pool and parts.retention != before.retention:
            self.scheduler.check_keep(parts.retention)
        self.scheduler.configure(
            max_num_seqs=opt.max_num_seqs,
            max_num_batched_tokens=opt.max_num_batched_tokens,
            admission=parts.admission,
            prefill=parts.prefill,
            lookahead=parts.runner.lookahead,
            order=parts.order,
            max_passes=opt.max_passes,
            max_waiting=opt.max_waiting,
            max_waiting_tokens=opt.max_waiting_tokens,
            preemption=parts.preemption,
            watermark=parts.watermark,
            **({} if new_pool else limits),  # a new limit is judged by the pool it comes with
        )
        if new_pool:
            for request in self._new_pool(before, parts, new_blocks(parts)):
                self.scheduler.finish(request, "error", self.scheduler.why_never_fits(request))
                self._end(self._sessions[request.request_id])
        elif parts.prefixes is not before.prefixes:
            if parts.weights is not before.weights:
                self.scheduler.blocks.drop_prefixes()  # also what requests that go on have computed with the old ones
            self.scheduler.blocks.use_prefixes(parts.prefixes)
        if not new_pool and (parts.retention, parts.basis) != (before.retention, before.basis):
            self.scheduler.keep(parts.retention, parts.basis)
        self.parts = parts
        self._captures = self.captures
        if before.governor is not parts.governor:
            before.governor.stop()
            if self._thread is not None:
                parts.governor.start(self, self.events.append)
        if before.lane is not None:
            before.lane.close()  # every setting that has one makes its own
        now = time.perf_counter()
        took_ms = (now - started) * 1e3
        changes = {**changed_fields(before.optimizations, opt), **changed_ops(before.swapped, parts.swapped)}
        self.events.append(SettingEvent(now, changes, build_ms, took_ms))
        return took_ms

    def _new_pool(self, before: Parts, parts: Parts, blocks: BlockManager) -> list[Request]:
        """Go over to another pool, with what the old one holds where that means the same; who can never be served."""
        same = parts.weights is before.weights and parts.kv.kv_format == before.kv.kv_format
        if not same or (parts.retention, parts.basis) != (before.retention, before.basis):
            return self.scheduler.reset_blocks(blocks, parts.max_model_len)
        moves, doomed = self.scheduler.move_blocks(blocks, parts.max_model_len)
        parts.kv.take_from(before.kv, moves)
        return doomed

    # -- life ---------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the background thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the background thread; does nothing if it runs."""
        with self._lock:
            self.check_open()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="strata-engine", daemon=True)
                self._thread.start()
                self.parts.governor.start(self, self.events.append)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self._swaps or self.scheduler.has_work)
                if self._stopping:
                    return
                self._run_swaps()
            try:
                self.parts.governor.run(self.step)
            except Exception as error:  # in booking, a mistake of ours: nobody waits for a text that never comes
                with self._lock:
                    requests = [session.request for session in self._sessions.values()]
                self._fail(requests, error)
            self._flush()

    def close(self) -> None:
        """Stop the thread and end all requests. Safe to repeat."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self.parts.governor.stop()
        if self._thread is not None:
            self._thread.join()
        self.parts.runner.settle()
        if self.parts.lane is not None:
            self.parts.lane.close()
        with self._lock:
            self.closed = True
            for _, done in self._swaps:
                done.set_exception(EngineClosedError("the engine was closed before the change took effect"))
            self._swaps.clear()
            for request_id in list(self._sessions):
                self.abort(request_id)
            self._room.notify_all()  # who waits for room finds the engine closed
        self.parts.governor.join()
