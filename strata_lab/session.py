"""The caller's side of a request: prompt text in, text and token events out.

The engine thread pushes tokens into a `Session`; callers read its queue. Nothing here touches tensors, so a slow
reader costs the engine nothing.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from strata_lab.choices import together
from strata_lab.detokenizer import Detokenizer
from strata_lab.events import TokenEvent
from strata_lab.request import Request, RequestOutput, TokenLogprobs
from strata_lab.sampling_params import RequestError, SamplingParams

ASYNC_POLL_S = 0.25  # how long an abandoned asyncio reader may keep its helper thread


class Inbox(Protocol):
    """Where one reader gets the events of many requests; the engine thread calls it and must never wait in it."""

    def put(self, event: TokenEvent) -> None:
        """Keep an event."""
        ...

    def flush(self) -> None:
        """A step is over: whoever reads may look now."""
        ...


class Session:
    """One request with its text; the first of several for a prompt also speaks for the others.

    Args:
        request: the scheduler's view.
        prompt: the text that was given, "" for token ids.
        detokenizer: None when the model has no tokenizer; the text is then empty.
        asked: the parameters that were given; the request's own may ask for more.
        first: the session of the prompt's first text, where this is another.
        inbox: gets the events in place of the session's own queue.

    Attributes:
        choice: which of the texts of the prompt this is.
        group: the sessions of all of them, on the first; on another, itself alone.
        not_begun: those of them that wait until the prompt is computed, on the first.
        on_done: called with the request when its text is complete.
    """

    def __init__(
        self,
        request: Request,
        prompt: str,
        detokenizer: Detokenizer | None,
        asked: SamplingParams,
        first: Session | None = None,
        inbox: Inbox | None = None,
    ) -> None:
        self.request, self.prompt, self.asked, self.inbox = request, prompt, asked, inbox
        self.followed = inbox is not None
        self.choice = 0 if first is None else len(first.group)
        self.group: list[Session] = [self]
        self.not_begun: list[Session] = []
        self._detokenizer = detokenizer
        self._queue: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue() if first is None else first._queue
        self._ended = False
        self.on_done: Callable[[Request], None] | None = None
        if first is not None:
            first.group.append(self)
            first.not_begun.append(self)

    @property
    def finished(self) -> bool:
        """Whether every text of it has ended."""
        return all(session.request.finished for session in self.group)

    def take_not_begun(self) -> list[Session]:
        """Those of `not_begun` that still shall, once."""
        if not self.not_begun:
            return []
        waiting, self.not_begun = self.not_begun, []
        return [session for session in waiting if not session.request.finished]

    def check_new(self, sessions: Mapping[str, Session]) -> None:
        """Refuse an id that is in use."""
        for session in self.group:
            if (name := session.request.request_id) in sessions:
                raise RequestError(f"request_id={name!r} is in use; leave it out to get a fresh one")

    def accept(
        self,
        token_id: int,
        logprobs: TokenLogprobs | None,
        error: str | None,
        now_s: float,
        max_model_len: int,
        drafted: bool = False,
    ) -> TokenEvent:
        """Record a sampled token; the event says whether the request is to end and why (`finish_reason`)."""
        request = self.request
        index = request.num_output_tokens
        if error is not None:
            text = self._flush()
            return TokenEvent(request.request_id, -1, text, index, "error", error, choice=self.choice, drafted=drafted)
        request.append(token_id, now_s)
        if logprobs is not None:
            request.logprobs.append(logprobs)
        text = self._detokenizer.push(token_id) if self._detokenizer else ""
        reason = self._finish_reason(token_id, max_model_len)
        if reason is not None:
            text += self._flush()
        return TokenEvent(request.request_id, token_id, text, index, reason, choice=self.choice, drafted=drafted)

    def _finish_reason(self, token_id: int, max_model_len: int) -> str | None:
        request, text = self.request, self._detokenizer
        if token_id in request.stop_ids:
            request.stop_reason = token_id if token_id in request.params.stop_token_ids else None
            return "stop"
        if text is not None and text.stopped:
            request.stop_reason = text.stop_string
            return "stop"
        full = request.num_output_tokens >= request.params.max_tokens
        return "length" if full or request.num_tokens >= max_model_len else None

    def _flush(self) -> str:
        return self._detokenizer.flush() if self._detokenizer and not self._detokenizer.stopped else ""

    def deliver(self, event: TokenEvent) -> None:
        """Hand an event to whoever follows."""
        self._ended = self._ended or event.finish_reason is not None
        if self.on_done is not None and event.finish_reason in ("stop", "length"):
            self.on_done(self.request)
        (self.inbox or self._queue).put(event)

    def end(self) -> None:
        """Deliver the end of a request that ended without a token: aborted or failed."""
        if not self._ended:
            r = self.request
            text, index = self._flush(), r.num_output_tokens
            self.deliver(TokenEvent(r.request_id, -1, text, index, r.finish_reason, r.error, choice=self.choice))

    def next_event(self) -> TokenEvent:
        """Wait for the next event; the last one of each text has a `finish_reason`. One reader at a time."""
        self.followed = True
        return self._queue.get()

    def poll_event(self, timeout_s: float) -> TokenEvent | None:
        """The next event, or None after `timeout_s`."""
        self.followed = True
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def output(self) -> RequestOutput:
        """Everything so far, with the other texts of the prompt; with `best_of`, the best ones so far."""
        outputs = [session._alone() for session in self.group]
        return together(outputs, self.asked) if len(outputs) > 1 else outputs[0]

    def _alone(self) -> RequestOutput:
        text = self._detokenizer.text if self._detokenizer else ""
        return RequestOutput.of(self.request, self.prompt, text, self.choice)


def collect(
    sessions: Sequence[Session], queue: Callable[[Sequence[Session]], int], progress: bool
) -> list[RequestOutput]:
    """Queue requests, wait for them and return their outputs in order.

    Args:
        sessions: one per prompt.
        queue: queues the first of the sessions it is given and says how many; may wait until there is room for one.
        progress: show a bar.
    """
    from tqdm.auto import tqdm

    with tqdm(total=len(sessions), desc="requests", unit="req", disable=not progress) as bar:
        queued = ended = 0
        while queued < len(sessions):
            queued += queue(sessions[queued:])
            while ended < len(sessions) and sessions[ended].finished:
                ended += 1
                bar.update()
        for index, session in enumerate(sessions):
            for _ in session.group:
                while session.next_event().finish_reason is None:
                    pass
            if index >= ended:
                bar.update()
    return [session.output() for session in sessions]


class TokenStream:
    """A session's events as an iterator and an async iterator; `close`, or dropping it, aborts the request.

    With several texts of the prompt their events come as they happen; `TokenEvent.choice` says whose each is.

    Args:
        session: whose events.
        release: called once, however the reader leaves.
    """

    def __init__(self, session: Session, release: Callable[[], Any]) -> None:
        self._session, self._release, self._done = session, release, False
        self._num_open = len(session.group)  # texts that have not ended

    @property
    def request_id(self) -> str:
        """The engine's name for the request."""
        return self._session.request.request_id

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> TokenEvent:
        if self._done:
            raise StopIteration
        try:
            event = self._session.next_event()
        except BaseException:  # an interrupt, for example: nobody will read the rest
            self.close()
            raise
        return self._passed_on(event)

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._done:
            raise StopAsyncIteration
        try:
            while (event := await asyncio.to_thread(self._session.poll_event, ASYNC_POLL_S)) is None:
                pass
        except BaseException:  # cancelled
            self.close()
            raise
        return self._passed_on(event)

    def _passed_on(self, event: TokenEvent) -> TokenEvent:
        self._num_open -= event.finish_reason is not None
        if not self._num_open:
            self.close()
        return event

    def close(self) -> None:
        """Stop reading; an unfinished request is aborted. Safe to repeat."""
        if not self._done:
            self._done = True
            self._release()

    async def aclose(self) -> None:
        """`close` under the name that asyncio uses."""
        self.close()

    def __del__(self) -> None:
        self.close()
