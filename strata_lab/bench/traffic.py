"""Many requests of one program over an engine (`LLMEngine.follow`): one reader for their events, and who sends them.

`load.py` measures whatever answers as a client would, with a thread per request; here nothing but the engine takes
part, and times are its own.
"""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from strata_lab.events import TokenEvent
from strata_lab.sampling_params import SamplingParams
from strata_lab.session import Session
from strata_lab.waiting_queue import QueueFull


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


@dataclass
class Traffic:
    """Requests of one kind over an engine.

    Attributes:
        prompt_tokens, output_tokens, priority: of each.
        live: those that have not ended.
        done: those that have.
        refused: how many were.
    """

    engine: Any
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    live: dict[str, Session] = field(default_factory=dict)
    done: list[Session] = field(default_factory=list)
    refused: int = 0
    _inbox: Inbox = field(default_factory=Inbox)
    _random: random.Random = field(default_factory=lambda: random.Random(5))

    def send(self) -> bool:
        """One more, of a text of its own; False if it was refused."""
        vocabulary = self.engine.model_config.vocab_size
        prompt = [self._random.randrange(5, vocabulary) for _ in range(self.prompt_tokens)]
        params = SamplingParams(temperature=0.0, max_tokens=self.output_tokens, ignore_eos=True)
        try:
            session = self.engine.follow(prompt, params, self._inbox, priority=self.priority)
        except QueueFull:
            self.refused += 1
            return False
        self.live[session.request.request_id] = session
        return True

    def take(self, wait_s: float) -> None:
        """Book those that have ended meanwhile."""
        for event in self._inbox.take(wait_s):
            if event.finish_reason is not None:
                self.done.append(self.live.pop(event.request_id))
                self.engine.forget(event.request_id)

    def keep(self, count: int, wait_s: float) -> None:
        """Let so many be under way."""
        while len(self.live) < count:
            self.send()
        self.take(wait_s)

    def until_idle(self) -> None:
        """Wait for the last."""
        while self.live:
            self.take(0.05)

    def drop(self) -> None:
        """End those that have not."""
        for request_id in list(self.live):
            self.engine.forget(request_id)
        self.live.clear()


def latencies_ms(sessions: Sequence[Session]) -> list[float]:
    """From arrival to last token."""
    return [out.e2e_ms for s in sessions if (out := s.output()).e2e_ms is not None]


def first_token_ms(
    engine: Any, tokens: int, priority: int = 0, while_waiting: Callable[[], Any] | None = None
) -> float:
    """Time to first token of one request."""
    probe = Traffic(engine, tokens, 1, priority, _random=random.Random(time.perf_counter_ns()))
    while not probe.send():
        time.sleep(0.001)
    while probe.live:
        probe.take(0.0 if while_waiting else 1.0)
        if while_waiting:
            while_waiting()
    ttft = probe.done[0].output().ttft_ms
    assert ttft is not None, probe.done[0].output()
    return ttft
