"""Sends requests and notes when tokens come: a fixed number at a time, or at random moments at a given rate.

Whatever answers is behind `Target`: this engine or somebody's server. Times are the client's. A token is counted when
its text could be shown, and how many there were is what the target says, never the number of chunks. With a rate the
clock of a request starts when it should have been sent, so that a client that is late cannot make a server look fast.
"""

from __future__ import annotations

import math
import queue
import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

PERCENTILES = (50, 90, 95, 99)
MAX_OPEN = 512  # requests under way with a rate: one thread each


@dataclass(frozen=True)
class Ask:
    """One request: a prompt as text or as token ids, and how many tokens to generate."""

    prompt: str | list[int]
    max_tokens: int


@dataclass
class Reply:
    """What came of it.

    Attributes:
        sent_s: when it was, or should have been, sent (`time.perf_counter()`).
        times_s: when pieces came, in order.
        prompt_tokens, output_tokens: as the target counts them.
        error: what went wrong, empty if nothing did.
    """

    sent_s: float
    times_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def ttft_ms(self) -> float:
        """Time to the first piece, milliseconds."""
        return (self.times_s[0] - self.sent_s) * 1e3

    @property
    def e2e_ms(self) -> float:
        """Time to the last piece, milliseconds."""
        return (self.times_s[-1] - self.sent_s) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Mean milliseconds per token after the first; None with fewer than two."""
        if self.output_tokens < 2 or len(self.times_s) < 2:
            return None
        return (self.times_s[-1] - self.times_s[0]) * 1e3 / (self.output_tokens - 1)

    @property
    def gaps_ms(self) -> list[float]:
        """Milliseconds between tokens; empty where pieces are not tokens, so that nobody takes one for the other."""
        if len(self.times_s) != self.output_tokens:
            return []
        return [(b - a) * 1e3 for a, b in zip(self.times_s, self.times_s[1:], strict=False)]


class Target(Protocol):
    """Something that answers."""

    name: str

    def answer(self, ask: Ask, reply: Reply) -> None:
        """Send `ask`, fill in `reply`; an exception becomes its error. Called by many threads."""
        ...


def send(
    target: Target, asks: Sequence[Ask], *, concurrency: int | None = None, rate: float | None = None, seed: int = 0
) -> list[Reply]:
    """Send all requests and wait for all replies, in order.

    Args:
        target: who answers.
        asks: what is asked.
        concurrency: how many are under way at the same time, all of them at most; or
        rate: how many are sent per second, at random moments (Poisson).
        seed: of those moments.
    """
    assert (concurrency is None) != (rate is None), "either a concurrency or a rate"
    start = time.perf_counter()
    if rate is None:
        due = [start] * len(asks)
    else:
        moments = random.Random(seed)
        due, moment = [], start
        for _ in asks:
            due.append(moment)
            moment += moments.expovariate(rate)
    replies = [Reply(d) for d in due]
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(asks)):
        todo.put(index)

    def work() -> None:
        while True:
            try:
                index = todo.get_nowait()
            except queue.Empty:
                return
            if rate is not None:
                time.sleep(max(0.0, due[index] - time.perf_counter()))
            else:
                replies[index].sent_s = time.perf_counter()
            try:
                target.answer(asks[index], replies[index])
            except Exception as error:  # one request's failure is a figure and not the end of the run
                replies[index].error = f"{type(error).__name__}: {error}"

    count = min(len(asks), concurrency or MAX_OPEN)
    threads = [threading.Thread(target=work, name=f"strata-bench-{i}", daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return replies


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and `PERCENTILES` (nearest rank) of some values; None without any."""
    if not values:
        return None
    ordered = sorted(values)
    ranked = {f"p{p}": ordered[max(0, math.ceil(p / 100 * len(ordered)) - 1)] for p in PERCENTILES}
    return {"mean": statistics.fmean(ordered), **ranked}


def metrics(replies: Sequence[Reply]) -> dict[str, Any]:
    """Figures of a run. Rates of one stream and of all together stay apart.

    `output_tok_s` is all tokens over the time from the first request to the last token; `tok_s_per_stream` is 1 / TPOT
    of the median request. `itl_ms` is None where the target sends pieces that are not single tokens.
    """
    good = [r for r in replies if not r.error and r.times_s]
    found: dict[str, Any] = {"requests": len(replies), "errors": len(replies) - len(good)}
    if not good:
        return found
    took_s = max(r.times_s[-1] for r in good) - min(r.sent_s for r in good)
    per_token = [r.tpot_ms for r in good if r.tpot_ms]
    total = sum(r.output_tokens for r in good)
    return found | {
        "output_tok_s": total / took_s if took_s else None,
        "tok_s_per_stream": 1e3 / statistics.median(per_token) if per_token else None,
        "requests_s": len(good) / took_s if took_s else None,
        "prompt_tokens": sum(r.prompt_tokens for r in good),
        "output_tokens": total,
        "ttft_ms": percentiles([r.ttft_ms for r in good]),
        "tpot_ms": percentiles(per_token),
        "itl_ms": percentiles([g for r in good for g in r.gaps_ms]),
        "e2e_ms": percentiles([r.e2e_ms for r in good]),
    }
