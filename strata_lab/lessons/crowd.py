"""Several requests at once: when each got its tokens, and pictures of who holds what, as the workbench draws them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from strata_lab.events import StateEvent
from strata_lab.lessons.measuring import Trace
from strata_lab.sampling_params import SamplingParams
from strata_lab.workbench.details import Context, Detail, PoolDetail
from strata_lab.workbench.names import Names

WAIT_S = 60.0  # at most, for a moment that a picture is taken of
POLL_S = 0.0002  # half a step of a fast card: the picture shall not come after the requests have ended


def token_ms(seen: Trace) -> dict[str, list[float]]:
    """Request id to the times of its tokens, ms since the trace began; in order of their first tokens."""
    found: dict[str, list[float]] = {}
    for ms, token in seen.arrivals:
        found.setdefault(token.request_id, []).append(ms)
    return found


def picture_of(engine: Any, prompts: Sequence[list[int]], outputs: Sequence[int], when_tokens: int) -> StateEvent:
    """Send requests, take a picture of them all `when_tokens` tokens after the last was sent, and end them.

    Args:
        engine: an open `LLMEngine` without other work.
        prompts, outputs: tokens of each request, and how many it is to make.
        when_tokens: fewer than all of them together make.

    Raises:
        ValueError: they make no more than `when_tokens`, so there would be nobody left.
        TimeoutError: they did not come that far in time.
    """
    if when_tokens >= sum(outputs):
        raise ValueError(f"when_tokens={when_tokens} must be below the {sum(outputs)} tokens in all; try half of it")
    ids = [
        engine.add_request(
            prompt, SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True), request_id=f"request {i + 1}"
        )
        for i, (prompt, length) in enumerate(zip(prompts, outputs, strict=True))
    ]
    before, deadline = engine.stats().num_output_tokens, time.monotonic() + WAIT_S
    engine.start()
    try:
        while engine.stats().num_output_tokens - before < when_tokens:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{when_tokens} tokens did not come within {WAIT_S:.0f} s; ask for fewer")
            time.sleep(POLL_S)
        state: StateEvent = engine.snapshot()
        return state
    finally:
        for request_id in ids:
            engine.forget(request_id)


def still(detail: Detail, engine: Any, events: Sequence[Any]) -> Detail:
    """A panel of the workbench that shows these events and then nothing more; its `widgets` are for a cell to show."""
    for event in events:
        detail.take(event)
    detail.push(Context(engine, Names()), time.perf_counter())
    for widget in detail.widgets:
        widget.flush()
    return detail


def pool(engine: Any, state: StateEvent) -> PoolDetail:
    """Block map (`.map`) and batch lanes (`.lanes`) of a picture."""
    detail = PoolDetail()
    still(detail, engine, [state])
    return detail
