"""The text of each request as events bring it, one lane per request.

Keeps what the widget needs (pieces since the last push, a snapshot for late views) and what callers need (text,
number of tokens, how it ended). Knows neither engine nor widgets.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from strata_lab.events import Draft, StateEvent, TokenEvent
from strata_lab.request import RequestOutput
from strata_lab.workbench.names import Names

MAX_LANES = 16
SNAPSHOT_CHARS = 20_000  # what the page keeps of one lane

_ENDINGS = {"stop": "ended by itself", "length": "reached its length", "abort": "stopped", "error": "failed",
            "timeout": "ran out of time"}  # fmt: skip


@dataclass(eq=False)
class Lane:
    """One request on screen.

    Attributes:
        request_id: the engine's name for it.
        title: "Stream 1".
        prompt: the text that was sent; empty for a request that was not made here.
        sent_s: `time.perf_counter()` when it was sent; None for a request that was not made here.
        text: everything generated so far.
        num_tokens: tokens generated so far.
        first_s, last_s: times of its first and its last token.
        finish_reason: "stop", "length", "abort", "timeout" or "error"; None while it runs.
        error: what went wrong, for "error".
        phase: one of `REQUEST_STATES`, as the engine last said; empty before that.
        num_proposed, num_drafted: tokens that a drafter proposed, and those of the text that were among them.
        drafted: characters `[start, end)` of the text that were proposed, those not given out yet.
    """

    request_id: str
    title: str
    prompt: str = ""
    sent_s: float | None = None
    text: str = ""
    num_tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    finish_reason: str | None = None
    error: str | None = None
    phase: str = ""
    num_proposed: int = 0
    num_drafted: int = 0
    drafted: list[tuple[int, int]] = field(default_factory=list, repr=False)
    done: threading.Event = field(default_factory=threading.Event, repr=False)
    pushed_chars: int = 0
    has_gap: bool = False  # events were dropped before they were read

    def add(self, token: TokenEvent, t_s: float) -> None:
        """Take in a token event of this request."""
        self.has_gap |= token.index > self.num_tokens
        if token.token_id >= 0:
            self.num_tokens = token.index + 1
            self.first_s = t_s if self.first_s is None else self.first_s
            self.last_s = t_s
        if token.drafted:
            self.num_drafted += 1
            self.drafted.append((len(self.text), len(self.text) + len(token.text)))
        self.text += token.text
        if token.finish_reason is not None:
            self.end(token.finish_reason, token.error)

    def end(self, reason: str, error: str | None = None) -> None:
        """It has ended."""
        self.finish_reason, self.error = reason, error
        self.done.set()

    def settle(self, output: RequestOutput) -> None:
        """Take over the engine's own account of a request that ended without an event, or whose events have a gap."""
        if output.finish_reason is None:
            return  # its text still grows, and events will bring it
        if not output.text.startswith(self.text):
            self.pushed_chars = len(output.text)  # pieces no longer fit; the next snapshot brings it whole
        self.text, self.num_tokens, self.has_gap = output.text, len(output.token_ids), False
        self.end(output.finish_reason, output.error)

    @property
    def ttft_ms(self) -> float | None:
        """From sending to the end of the step that made the first token, milliseconds."""
        return None if self.first_s is None or self.sent_s is None else (self.first_s - self.sent_s) * 1e3

    @property
    def mean_tok_s(self) -> float | None:
        """(tokens - 1) / (time from first to last token); None with fewer than two."""
        if self.num_tokens < 2 or self.first_s is None or self.last_s is None or self.last_s <= self.first_s:
            return None
        return (self.num_tokens - 1) / (self.last_s - self.first_s)

    @property
    def accepted(self) -> float | None:
        """Share of the proposed tokens that were taken; None without proposals."""
        return self.num_drafted / self.num_proposed if self.num_proposed else None

    def as_dict(self, speed: float | None, color: int) -> dict[str, Any]:
        """What the widget shows; `speed` is the tok/s of this moment, `color` 0 to 7."""
        ended = self.finish_reason is not None
        note = "" if self.finish_reason is None else _ENDINGS.get(self.finish_reason, self.finish_reason)
        return {
            "id": self.request_id,
            "title": self.title,
            "prompt": self.prompt,
            "color": color,
            "phase": "" if ended else self.phase or "waiting",
            "accepted": self.accepted,
            "state": "done" if ended else "generating" if self.num_tokens else "waiting",
            "note": f"{note}: {self.error}" if self.error else note,
            "num_tokens": self.num_tokens,
            "rate": self.mean_tok_s if ended else speed,
        }


class Lanes:
    """The lanes on screen, newest batch first. Not thread-safe: its owner holds a lock."""

    def __init__(self, names: Names) -> None:
        self.shown: list[Lane] = []
        self._names = names
        self._by_id: dict[str, Lane] = {}

    def open(self, lanes: list[Lane], replaces: bool = True) -> None:
        """Show new lanes; those that have ended make room (if it `replaces` them), those that run stay."""
        for lane in lanes:
            self._names.give(lane.request_id, lane.title)
        running = self.unfinished()
        others = running if replaces or not running else self.shown
        self._set([*lanes, *others] if replaces else [*others, *lanes])

    def feed_state(self, state: StateEvent) -> None:
        """Take over the phases of a picture of all requests."""
        for view in state.requests:
            lane = self._by_id.get(view.request_id)
            if lane is not None:
                lane.phase = view.state

    def feed_draft(self, draft: Draft) -> None:
        """Count a proposal."""
        lane = self._by_id.get(draft.request_id)
        if lane is not None:
            lane.num_proposed += len(draft.token_ids)

    def data(self, speed: Callable[[str], float | None]) -> list[dict[str, Any]]:
        """The lanes as the widget takes them; `speed` tells a request's tok/s."""
        return [lane.as_dict(speed(lane.request_id), self._names.color(lane.request_id)) for lane in self.shown]

    def feed(self, token: TokenEvent, t_s: float) -> None:
        """Take in a token; a request that was not made here gets a lane if there is room."""
        lane = self._by_id.get(token.request_id)
        if lane is None:
            others = self.unfinished()
            if len(others) >= MAX_LANES or token.index > 0:
                return  # no room, or its beginning was not seen
            if len(others) < len(self.shown):
                self._set(others)
            lane = Lane(token.request_id, f"Stream {len(self.shown) + 1}")
            self._names.give(lane.request_id, lane.title)
            self._set([*self.shown, lane])
        lane.add(token, t_s)

    def unfinished(self) -> list[Lane]:
        """Lanes that are waiting or running."""
        return [lane for lane in self.shown if lane.finish_reason is None]

    def pieces(self) -> list[dict[str, Any]]:
        """Text since the last call, per lane that has any."""
        pieces = []
        for lane in self.shown:
            start, lane.pushed_chars = lane.pushed_chars, len(lane.text)
            if start < lane.pushed_chars:
                drafted, lane.drafted = lane.drafted, []
                piece = {"start": start, "end": lane.pushed_chars, "text": lane.text[start:], "drafted": drafted}
                pieces.append({"id": lane.request_id, **piece})
        return pieces

    def snapshot(self) -> list[dict[str, Any]]:
        """The text up to what `pieces` has given out."""
        ends = [(lane, lane.pushed_chars) for lane in self.shown]
        return [
            {"id": lane.request_id, "end": end, "text": lane.text[max(0, end - SNAPSHOT_CHARS) : end]}
            for lane, end in ends
        ]

    def _set(self, lanes: list[Lane]) -> None:
        self.shown = lanes
        self._by_id = {lane.request_id: lane for lane in lanes}


class Run:
    """Requests that were sent together.

    Attributes:
        lanes: one per stream, in order.
    """

    def __init__(self, lanes: list[Lane]) -> None:
        self.lanes = lanes

    @property
    def finished(self) -> bool:
        """Whether all have ended."""
        return all(lane.done.is_set() for lane in self.lanes)

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, all streams together."""
        return sum(lane.num_tokens for lane in self.lanes)

    @property
    def texts(self) -> list[str]:
        """The text of each stream so far."""
        return [lane.text for lane in self.lanes]

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until all have ended; False on timeout. The panel cannot answer while a cell blocks: see `until`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        return all(lane.done.wait(None if deadline is None else deadline - time.monotonic()) for lane in self.lanes)

    async def until(self, num_tokens: int | None = None, timeout_s: float = 60.0) -> bool:
        """Wait for the end, or for that many tokens, while the panel goes on answering; False on timeout."""
        deadline = time.monotonic() + timeout_s
        while not self.finished and (num_tokens is None or self.num_tokens < num_tokens):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    def __repr__(self) -> str:
        state = "finished" if self.finished else "running"
        return f"Run({len(self.lanes)} streams, {self.num_tokens} tokens, {state})"
