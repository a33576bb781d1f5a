"""Sends answers, and notices when nobody listens any more: a reader that leaves frees its blocks at once.

These are ASGI responses of their own, since Starlette's start two tasks and a queue per stream. Nothing here knows what
the bytes say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator, Mapping
from types import coroutine
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from strata_lab.server.bridge import Events, Reply
from strata_lab.server.errors import ApiError
from strata_lab.server.writers import Writer, error_piece, failure

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class WholeAnswer(Response):
    """Waits for all answers of a reply and sends them as one document."""

    def __init__(self, reply: Reply, writer: Writer, headers: Mapping[str, str]) -> None:
        super().__init__(headers=dict(headers))
        self._reply, self._writer = reply, writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        watcher = asyncio.ensure_future(close_when_left(receive, self._reply))
        try:
            await self._reply.events()
            if self._reply.closed:
                return
            error = failure(self._reply)
            answer = error.response() if error else Response(self._writer.whole(), media_type="application/json")
            answer.headers.update({k: v for k, v in self.headers.items() if k != "content-length"})
        finally:
            watcher.cancel()
            self._reply.close()
        await answer(scope, receive, send)


class StreamedAnswer(Response):
    """Sends events as they come: what waits for a reader that is slow goes as one piece.

    A piece goes out in the callback that brings its events: waking a task for it would be a second round of the loop.
    The task is woken for what cannot be sent at once, and for the end.
    """

    def __init__(self, reply: Reply, writer: Writer, headers: Mapping[str, str]) -> None:
        super().__init__(headers={**STREAM_HEADERS, **headers})
        del self.headers["content-length"]
        self._reply, self._writer = reply, writer
        self._rest: Awaitable[None] | None = None  # of a piece that waits for its reader
        self._failed: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        watcher = asyncio.ensure_future(close_when_left(receive, self._reply))

        def at_once(events: Events) -> bool:
            if self._rest is not None:
                return False
            try:
                if piece := self._writer.piece(events):
                    self._rest = begun(send(_body(piece)))
            except Exception as error:  # it is this stream's alone, and others wait for the callback that we are in
                self._failed = error
                self._reply.close()
            return True

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while events := await self._reply.events(at_once):
                await self._finish_rest()
                if piece := self._writer.piece(events):
                    await send(_body(piece))
            await self._finish_rest()
            await send(_body(self._last(), more=False))
        except OSError:
            pass  # the connection broke while we wrote; the reply is closed below like one that was left
        finally:
            watcher.cancel()
            self._reply.close()

    async def _finish_rest(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._rest is not None:
            rest, self._rest = self._rest, None
            await rest

    def _last(self) -> bytes:
        if self._reply.overrun:
            message = "the stream was ended because its reader was too slow; read faster, or raise max_stream_backlog"
            return error_piece(ApiError(408, message, code="slow_reader"))
        return self._writer.end()


def _body(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def begun(step: Awaitable[None]) -> Awaitable[None] | None:
    """Run a step outside of a task up to where it has to wait; what is left of it, None if it never had to."""
    course = step.__await__()
    try:
        waits_for = next(course)
    except StopIteration:
        return None
    return _rest_of(course, waits_for)


@coroutine
def _rest_of(course: Generator[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    yield waits_for  # the task that runs this waits for what the step asked to wait for
    yield from course


async def close_when_left(receive: Receive, reply: Reply) -> None:
    """Close the reply when its caller has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    reply.close()
