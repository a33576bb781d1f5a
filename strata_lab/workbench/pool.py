"""A picture of all requests (`StateEvent`) as block map and batch lanes take it. No engine, no clock."""

from __future__ import annotations

from typing import Any

from strata_lab.events import StateEvent
from strata_lab.workbench.names import Names
from strata_widgets.block_map import count_cells, pack_cells

MAX_LANES = 24
_KINDS = (
    ("own", "held by one", "Blocks in exactly one request's table, coloured by the request."),
    ("shared", "shared", "Blocks in several tables: a common beginning that is stored once."),
    ("cached", "cached", "Blocks that nobody holds; the prefix cache keeps them until they are needed."),
    ("free", "free", "num_blocks less all others."),
)


def map_data(state: StateEvent, names: Names) -> dict[str, Any]:
    """The traits of `BlockMap`."""
    holders = [request for request in state.requests if request.blocks]
    tables = [request.blocks for request in holders]
    cells, per_cell = pack_cells(state.num_blocks, tables, state.cached)
    counts = count_cells(state.num_blocks, tables, state.cached)
    return {
        "cells": cells,
        "per_cell": per_cell,
        "block_size": state.block_size,
        "owners": [{"title": names.title(r.request_id), "color": names.color(r.request_id)} for r in holders],
        "kinds": [{"key": key, "label": label, "count": counts[key], "tip": tip} for key, label, tip in _KINDS],
    }


def lane_data(state: StateEvent, names: Names) -> dict[str, Any]:
    """`requests` and `num_more` of `BatchLanes`."""
    lanes = [
        {
            "id": r.request_id,
            "title": names.title(r.request_id),
            "color": names.color(r.request_id),
            "state": r.state,
            "prompt": r.num_prompt_tokens,
            "output": r.num_output_tokens,
            "computed": r.num_computed_tokens,
            "cached": r.num_cached_tokens,
            "blocks": len(r.blocks),
            "priority": r.priority,
            "preemptions": r.num_preemptions,
        }
        for r in state.requests[:MAX_LANES]
    ]
    return {"requests": lanes, "num_more": max(0, len(state.requests) - MAX_LANES)}


def lane_totals(state: StateEvent, num_preempted: int) -> list[dict[str, Any]]:
    """`totals` of `BatchLanes`; `num_preempted` counts since the panel was opened."""
    count = {name: sum(r.state == name for r in state.requests) for name in ("decoding", "prefilling", "waiting")}
    aside = sum(r.state in ("parked", "preempted") for r in state.requests)
    return [
        {"label": "decoding", "value": count["decoding"], "tip": "Requests whose next step computes one token."},
        {"label": "prefilling", "value": count["prefilling"], "tip": "Requests with prompt tokens left to compute."},
        {"label": "waiting", "value": count["waiting"], "tip": "Requests that have no blocks and no seat yet."},
        {"label": "set aside", "value": aside, "tip": "Requests that ran and lost their seat or their blocks."},
        {
            "label": "preemptions",
            "value": num_preempted,
            "tip": "Sum of StepEvent.num_preempted since this was opened.",
        },
    ]
