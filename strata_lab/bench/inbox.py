"""One reader for the events of many requests of an engine (`LLMEngine.follow`), for benchmarks that send many."""

from __future__ import annotations

import queue

from strata_lab.events import TokenEvent


class Inbox:
    """Filled by the engine's thread, emptied by one reader."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()

    def put(self, event: TokenEvent) -> None:
        """Keep an event."""
        self._events.put(event)

    def flush(self) -> None:
        """Nobody has to be woken: the reader waits for the event itself."""

    def take(self, wait_s: float) -> list[TokenEvent]:
        """What has come, after waiting at most so long for the first of it."""
        taken: list[TokenEvent] = []
        try:
            taken.append(self._events.get(timeout=wait_s) if wait_s > 0 else self._events.get_nowait())
            while True:
                taken.append(self._events.get_nowait())
        except queue.Empty:
            return taken
