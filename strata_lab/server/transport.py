"""Sends answers, and notices when nobody listens any more: a reader that leaves frees its blocks at once.

These are ASGI responses of their own, since Starlette's start two tasks and a queue per stream. Nothing here knows what
the bytes say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from strata_lab.server.bridge import Reply
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
    """Sends events as they come: what waits for a reader that is slow goes as one piece."""

    def __init__(self, reply: Reply, writer: Writer, headers: Mapping[str, str]) -> None:
        super().__init__(headers={**STREAM_HEADERS, **headers})
        del self.headers["content-length"]
        self._reply, self._writer = reply, writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        watcher = asyncio.ensure_future(close_when_left(receive, self._reply))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while events := await self._reply.events():
                if piece := self._writer.piece(events):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": self._last(), "more_body": False})
        except OSError:
            pass  # the connection broke while we wrote; the reply is closed below like one that was left
        finally:
            watcher.cancel()
            self._reply.close()

    def _last(self) -> bytes:
        if self._reply.overrun:
            message = "the stream was ended because its reader was too slow; read faster, or raise max_stream_backlog"
            return error_piece(ApiError(408, message, code="slow_reader"))
        return self._writer.end()


async def close_when_left(receive: Receive, reply: Reply) -> None:
    """Close the reply when its caller has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    reply.close()
