"""What other threads do to a running loop: queue, follow and abort requests, and ask for a moment between two steps.

Everything here holds the one lock for microseconds, or waits for the loop to reach its safe point. No step runs here.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from strata_lab.events import EventLog
from strata_lab.model_config import ModelConfig
from strata_lab.scheduler import Scheduler
from strata_lab.session import Inbox, Session
from strata_lab.stats import StepAccounts

MAX_KEPT_OUTPUTS = 1024  # finished requests whose output nobody has fetched
PATIENT_SHARE = 0.5  # of the waiting queue, for those who wait for room in it


class EngineClosedError(RuntimeError):
    """The engine was closed; make a new one."""


class Desk:
    """Owns the requests of an engine and the lock that guards them.

    Args:
        scheduler: who serves them.
        config: geometry, for the byte counts.
        events: where their ends are reported.
    """

    def __init__(self, scheduler: Scheduler, config: ModelConfig, events: EventLog) -> None:
        self.scheduler, self.config, self.events = scheduler, config, events
        self.closed = False
        self._lock = threading.RLock()  # scheduler and sessions
        self._wake = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)  # told after a step while somebody waits for room in the queue
        self._num_patient = 0  # how many do
        self._swaps: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._sessions: dict[str, Session] = {}
        self._inboxes: weakref.WeakSet[Inbox] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._accounts = StepAccounts(config)

    def add(self, session: Session) -> None:
        """Queue a request; raises `RequestError` if it cannot be taken."""
        with self._wake:
            self.check_open()
            session.check_new(self._sessions)
            self.scheduler.add(session.request)
            self._sessions.update((one.request.request_id, one) for one in session.group)
            if session.inbox is not None and session.inbox not in self._inboxes:
                self._inboxes = weakref.WeakSet((*self._inboxes, session.inbox))  # the loop may be reading the old one
            self._drop_old_outputs()
            self._wake.notify_all()

    def add_patiently(self, sessions: Sequence[Session]) -> int:
        """Queue the first of these, as many as there is room for and at least one, so that they begin together.

        Half of the queue is left to those who do not wait. Waits until there is room; with `start`.

        Returns:
            How many were queued.
        """
        with self._lock:
            self.check_open()
            while not self.scheduler.has_room(sessions[0].request, PATIENT_SHARE):
                self._num_patient += 1
                try:
                    self._room.wait()
                finally:
                    self._num_patient -= 1
                self.check_open()  # before another look: a closed engine has no scheduler
            num_queued = 0
            while num_queued < len(sessions) and self.scheduler.has_room(sessions[num_queued].request, PATIENT_SHARE):
                self.add(sessions[num_queued])
                num_queued += 1
            return num_queued

    def check_servable(self, sessions: Iterable[Session]) -> None:
        """Raise `RequestError` where one of these could never be served; how many others wait does not matter."""
        with self._lock:
            self.check_open()
            for session in sessions:
                self.scheduler.check_new(session.request)

    def abort(self, request_id: str) -> bool:
        """End a request and its other texts now, in any state. False if it is unknown or has ended."""
        with self._lock:
            session = self._sessions.get(request_id)
            if session is None or session.finished:
                return False
            for one in session.group:
                if not one.request.finished:
                    if self.scheduler.abort(one.request.request_id) is None:  # it has not begun
                        one.request.finish("abort")
                    self._end(one)
        self._flush()
        return True

    def _flush(self) -> None:
        """Tell those who read many requests at once that there are events, once for all of them; and who waits."""
        if self._num_patient:
            with self._room:
                self._room.notify_all()
        for inbox in self._inboxes:
            inbox.flush()

    def session(self, request_id: str) -> Session:
        """A known request; raises `KeyError` otherwise."""
        with self._lock:
            if request_id not in self._sessions:
                raise KeyError(f"no request {request_id!r}; its output may have been fetched already")
            return self._sessions[request_id]

    def forget(self, request_id: str) -> None:
        """Drop a request's output; an unfinished one is aborted."""
        with self._lock:
            self.abort(request_id)
            session = self._sessions.get(request_id)
            for one in session.group if session else ():
                self._sessions.pop(one.request.request_id, None)

    def _drop_old_outputs(self) -> None:
        if len(self._sessions) > 2 * MAX_KEPT_OUTPUTS:  # amortized: a sweep per MAX_KEPT_OUTPUTS requests
            done = [i for i, s in self._sessions.items() if s.finished and not s.followed]
            for request_id in done[:-MAX_KEPT_OUTPUTS]:
                del self._sessions[request_id]

    def _end(self, session: Session) -> None:
        """Book a request that has ended without a token, and tell whoever follows; what waits for it ends too."""
        self.events.append(self._accounts.book_end(session.request))
        session.end()
        for other in session.take_not_begun():
            other.request.finish(session.request.finish_reason or "abort", session.request.error)
            self._end(other)

    # -- the safe point -----------------------------------------------------------------------------------------

    def between_steps(self, change: Callable[[], None]) -> None:
        """Run `change` where no step is in flight, and wait for it; its exceptions come out here."""
        done: Future[None] = Future()
        with self._wake:
            self.check_open()
            if self._thread is None:
                change()
                return
            self._swaps.append((change, done))
            self._wake.notify_all()
        done.result()

    def _run_swaps(self) -> None:
        while self._swaps:
            change, done = self._swaps.popleft()
            try:
                change()
                done.set_result(None)
            except Exception as error:  # belongs to the caller of `between_steps`
                done.set_exception(error)

    def check_open(self) -> None:
        """Raise `EngineClosedError` after `close`."""
        if self.closed or self._stopping:
            raise EngineClosedError("this engine was closed; make a new one with LLMEngine(...)")
