"""Brings token events from the engine thread to asyncio: one wake-up per engine step, whatever the number of streams.

A `Reply` is what one HTTP request waits for: the events of all its answers. Nothing here knows HTTP or JSON. The engine
thread appends to a deque and wakes the loop; it never waits for a reader.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from strata_lab.choices import choice_ids
from strata_lab.events import TokenEvent
from strata_lab.request import RequestOutput
from strata_lab.sampling_params import SamplingParams
from strata_lab.session import Session

COMPLETIONS_KEPT = 64  # ended requests from which the speed of service is taken
Events = list[tuple[int, TokenEvent]]  # (number of the answer, event)


class Engine(Protocol):
    """What the bridge needs of `LLMEngine`."""

    def follow(
        self, prompt: Sequence[int] | None, params: SamplingParams, inbox: Any, *, request_id: str | None,
        priority: int, prompt_embeds: Any,
    ) -> Session:  # fmt: skip
        """Queue a request whose events go to `inbox`."""
        ...

    def abort(self, request_id: str) -> bool:
        """End a request; its text so far is kept."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop a request; an unfinished one is aborted."""
        ...


class Bridge:
    """The server's inbox; all but `put` and `flush` is called in the event loop.

    Args:
        loop: where the readers are.
        max_backlog: events a reply may leave unread before it is ended.

    Attributes:
        num_live: requests that have not ended.
        num_overruns: replies that were ended because nobody read them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, max_backlog: int) -> None:
        self._loop, self._max_backlog = loop, max_backlog
        self._pending: deque[TokenEvent] = deque()
        self._woken = False
        self._routes: dict[str, tuple[Reply, int]] = {}
        self._ended_s: deque[float] = deque(maxlen=COMPLETIONS_KEPT)
        self._idle: list[asyncio.Future[None]] = []
        self.num_overruns = 0

    # -- the engine thread --------------------------------------------------------------------------------------

    def put(self, event: TokenEvent) -> None:
        """Keep an event until the step is over."""
        self._pending.append(event)

    def flush(self) -> None:
        """Wake the loop, unless it is awake already."""
        if self._pending and not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop was closed: nobody reads any more
                self._pending.clear()

    # -- the event loop -----------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._routes)

    def _deliver(self) -> None:
        self._woken = False  # before the deque is read: what is put from now on wakes again
        touched: dict[Reply, None] = {}
        while self._pending:
            event = self._pending.popleft()
            if (route := self._routes.get(event.request_id)) is None:
                continue
            reply, number = route
            if event.finish_reason is not None:
                self._ended_s.append(time.monotonic())
                self.unroute(event.request_id)
            if reply.accept(number, event):
                touched[reply] = None
        for reply in touched:
            if len(reply.unread) > self._max_backlog:
                self.num_overruns += 1
                reply.overrun = True
                reply.close()
            reply.wake()

    def route(self, request_id: str, reply: Reply, number: int) -> None:
        """Where a request's events go; before it is queued, since they may come at once."""
        self._routes[request_id] = (reply, number)

    def unroute(self, request_id: str) -> bool:
        """Forget a route; False if the request had ended."""
        if request_id not in self._routes:
            return False
        del self._routes[request_id]
        self._tell_idle()
        return True

    def _tell_idle(self) -> None:
        if not self._routes:
            for waiter in self._idle:
                if not waiter.done():
                    waiter.set_result(None)
            self._idle.clear()

    async def idle(self) -> None:
        """Wait until no request is live."""
        if self._routes:
            waiter = self._loop.create_future()
            self._idle.append(waiter)
            await waiter

    def abort_all(self) -> int:
        """End every live request, and tell its reader; how many there were."""
        names = list(self._routes)
        for reply, _ in list(self._routes.values()):
            reply.abort()
        return len(names)

    def requests_s(self) -> float | None:
        """Measured requests that end per second, lately; None before two have."""
        if len(self._ended_s) < 2:
            return None
        return len(self._ended_s) / max(time.monotonic() - self._ended_s[0], 1e-3)

    def first_end_s(self, tok_s: float) -> float | None:
        """Seconds until a live request ends at the latest, if all go on at `tok_s` together; None without any."""
        left = [
            session.request.params.max_tokens - session.request.num_output_tokens
            for reply in {reply: None for reply, _ in self._routes.values()}
            for session in reply.sessions
        ]
        return min(left) * len(left) / tok_s if left and tok_s > 0 else None


class Reply:
    """The answers of one HTTP request, as they come. One reader.

    Args:
        bridge: carries the events.
        engine: serves the requests.
        name: begins the requests' ids.
        whole: the reader wants nothing before the end, so it is woken only then.

    Attributes:
        firsts: the first session of each prompt, in order.
        sessions: one per text, in order of prompts; with `best_of` more than there are answers.
        unread: events that nobody has taken.
        overrun: ended because the reader was too slow.
        closed: nobody reads any more.
    """

    def __init__(self, bridge: Bridge, engine: Engine, name: str, whole: bool) -> None:
        self._bridge, self._engine, self._whole = bridge, engine, whole
        self.name = name
        self.firsts: list[Session] = []
        self.sessions: list[Session] = []
        self.unread: Events = []
        self.overrun = self.closed = False
        self._open = 0
        self._waiter: asyncio.Future[None] | None = None
        self._at_once: Callable[[Events], bool] | None = None

    def add(self, prompt: Any, params: SamplingParams, priority: int) -> None:
        """Queue the texts of one more prompt: token ids, or rows of embeddings.

        Raises `RequestError`; what was added before is then still there until `close`.
        """
        request_id, number = f"{self.name}-{len(self.firsts)}", len(self.sessions)
        names = choice_ids(request_id, params.num_choices)
        for i, name in enumerate(names):
            self._bridge.route(name, self, number + i)
        try:
            ids, rows = (prompt, None) if isinstance(prompt, list) else (None, prompt)
            session = self._engine.follow(
                ids, params, self._bridge, request_id=request_id, priority=priority, prompt_embeds=rows
            )
        except BaseException:
            for name in names:
                self._bridge.unroute(name)
            raise
        self.firsts.append(session)
        self.sessions += session.group
        self._open += len(session.group)

    def outputs(self) -> list[RequestOutput]:
        """The answers so far, in order of prompts; with `best_of`, the best ones."""
        return [output for first in self.firsts for output in first.output().outputs]

    @property
    def finished(self) -> bool:
        """Whether every answer has ended and its end was accepted."""
        return self._open == 0

    def accept(self, number: int, event: TokenEvent) -> bool:
        """Take an event; whether the reader should be woken."""
        if event.finish_reason is not None:
            self._open -= 1
        if self._whole:
            return self._open == 0
        self.unread.append((number, event))
        return True

    def wake(self) -> None:
        """Let the reader have what there is."""
        if self._at_once is not None and self.unread and not self.closed:
            taken, self.unread = self.unread, []
            if not self._at_once(taken):
                self.unread = taken
            elif not self.finished:
                return
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def events(self, at_once: Callable[[Events], bool] | None = None) -> Events:
        """What has come since the last call, at least one; empty when all answers have ended or nobody reads.

        Args:
            at_once: is offered what comes while this waits, in the callback that brings it; what it takes is not
                returned here. It must not raise.
        """
        while not self.unread and not self.finished and not self.closed:
            self._waiter, self._at_once = asyncio.get_running_loop().create_future(), at_once
            try:
                await self._waiter
            finally:
                self._at_once = None
        taken, self.unread = self.unread, []
        return [] if self.closed else taken

    def abort(self) -> None:
        """End what still runs; the reader gets the ends."""
        for session in self.firsts:
            self._engine.abort(session.request.request_id)

    def close(self) -> None:
        """Abort what still runs and forget the rest. Safe to repeat."""
        if self.closed:
            return
        self.closed = True
        for session in self.sessions:
            self._bridge.unroute(session.request.request_id)
        for session in self.firsts:
            self._engine.forget(session.request.request_id)
        self.wake()
