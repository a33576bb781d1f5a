"""A picture of all unfinished requests: who is where, and whose the blocks are. Torch-free.

It exists so that a panel can show lanes and blocks without the engine saying anything about them in every step: the
picture is taken when somebody asks, under the loop's lock, in microseconds per request. It keeps nothing.
"""

from __future__ import annotations

import time

from strata_lab.events import RequestView, StateEvent
from strata_lab.request import Request, RequestState
from strata_lab.roster import Roster


def snapshot(roster: Roster) -> StateEvent:
    """What `roster` holds now; the caller has the lock."""
    blocks = roster.blocks
    requests = [*roster.running, *roster.waiting]
    return StateEvent(
        t_s=time.perf_counter(),
        requests=tuple(_view(roster, request) for request in requests),
        num_blocks=blocks.num_blocks,
        block_size=blocks.block_size,
        cached=tuple(blocks.prefixes.idle()),
    )


def _view(roster: Roster, request: Request) -> RequestView:
    return RequestView(
        request_id=request.request_id,
        state=_state_of(request),
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_computed_tokens=request.num_computed_tokens,
        priority=request.priority,
        num_preemptions=request.num_preemptions,
        num_cached_tokens=request.num_cached_tokens,
        blocks=tuple(roster.blocks.held(request.request_id)),
    )


def _state_of(request: Request) -> str:
    if request.state is not RequestState.RUNNING:
        return "preempted" if request.state is RequestState.PREEMPTED else "waiting"
    return "decoding" if request.is_decoding else "prefilling"
