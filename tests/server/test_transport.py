"""Laws of a stream on its way out: every piece in order, at once where it can be, and its trouble is its own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from strata_lab.events import TokenEvent
from strata_lab.server.bridge import Bridge, Events, Reply
from strata_lab.server.transport import StreamedAnswer

TOKENS = 10
WHOLE = b"".join(b"[%d]" % i for i in range(TOKENS)) + b"END"


class Text:
    """A writer of plain text."""

    def piece(self, events: Events) -> bytes:
        return "".join(event.text for _, event in events).encode()

    def end(self) -> bytes:
        return b"END"


class NoEngine:
    def forget(self, request_id: str) -> None:
        pass


class Stream:
    """One stream with a reader that may stop reading."""

    def __init__(self, bridge: Bridge, name: str, fails: bool = False) -> None:
        self.name, self.fails, self.body, self.at_once = name, fails, b"", 0
        self.reads = asyncio.Event()
        self.reads.set()
        reply = Reply(bridge, NoEngine(), name, whole=False)  # type: ignore[arg-type]
        bridge.route(name, reply, 0)
        reply._open = 1
        reply.sessions = [SimpleNamespace(request=SimpleNamespace(request_id=name))]  # type: ignore[list-item]
        self.task = asyncio.ensure_future(StreamedAnswer(reply, Text(), {})({}, self._nothing, self._send))  # type: ignore[arg-type]

    async def _nothing(self) -> Any:
        await asyncio.Event().wait()

    async def _send(self, message: Any) -> None:
        if self.fails and message.get("body"):
            raise RuntimeError("a bug")
        await self.reads.wait()
        self.body += message.get("body", b"")
        self.at_once += asyncio.current_task() is None


async def token(bridge: Bridge, index: int, *streams: Stream) -> None:
    """A step of the engine: a token for each stream."""
    for stream in streams:
        end = "length" if index == TOKENS - 1 else None
        bridge.put(TokenEvent(stream.name, index, f"[{index}]", index, end))
    bridge.flush()
    await asyncio.sleep(0.001)


@pytest.mark.parametrize(("stops", "goes_on"), [(None, None), (0, 1), (3, 7), (8, 9), (9, None)])
def test_pieces_come_whole_and_in_order_however_their_reader_reads(stops: int | None, goes_on: int | None) -> None:
    async def run() -> Stream:
        bridge = Bridge(asyncio.get_running_loop(), max_backlog=100)
        stream = Stream(bridge, "a")
        await asyncio.sleep(0)
        for index in range(TOKENS):
            if index == stops:
                stream.reads.clear()
            if index == goes_on:
                stream.reads.set()
            await token(bridge, index, stream)
        stream.reads.set()
        await asyncio.wait_for(stream.task, 5)
        return stream

    stream = asyncio.run(run())
    assert stream.body == WHOLE
    assert stream.at_once == TOKENS if stops is None else stream.at_once >= 1


def test_a_stream_that_cannot_be_written_fails_alone() -> None:
    async def run() -> tuple[Stream, Stream, int]:
        bridge = Bridge(asyncio.get_running_loop(), max_backlog=100)
        bad, good = Stream(bridge, "bad", fails=True), Stream(bridge, "good")
        await asyncio.sleep(0)
        for index in range(TOKENS):
            await token(bridge, index, bad, good)
        await asyncio.wait_for(good.task, 5)
        with pytest.raises(RuntimeError, match="a bug"):
            await asyncio.wait_for(bad.task, 5)
        return bad, good, bridge.num_live

    bad, good, live = asyncio.run(run())
    assert good.body == WHOLE and bad.body == b"" and live == 0


def test_a_reader_that_stays_behind_is_cut_off_at_the_bound() -> None:
    async def run() -> tuple[Stream, int]:
        bridge = Bridge(asyncio.get_running_loop(), max_backlog=4)
        stream = Stream(bridge, "a")
        await asyncio.sleep(0)
        stream.reads.clear()
        for index in range(TOKENS - 1):
            await token(bridge, index, stream)
        stream.reads.set()
        await asyncio.wait_for(stream.task, 5)
        return stream, bridge.num_overruns

    stream, overruns = asyncio.run(run())
    assert overruns == 1 and b'"slow_reader"' in stream.body and WHOLE.startswith(stream.body.partition(b"data:")[0])
