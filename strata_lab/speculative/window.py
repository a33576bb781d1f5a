"""Room for drafts in a step that has been built: what of budget and blocks nobody else wants. Torch-free.

It takes no block that a running request may need for its next token, evicts nobody and decides nothing about which
guesses are good.
"""

from __future__ import annotations

from collections.abc import Sequence

from strata_lab.batch import ScheduledRequest
from strata_lab.block_manager import BlockManager
from strata_lab.capacity import most_slots


def take_drafts(
    items: Sequence[ScheduledRequest], budget: int, blocks: BlockManager, num_running: int, max_model_len: int
) -> int:
    """Add the drafts of those items that decode to them, as many as fit.

    Args:
        items: of the step; each covers what it computes without drafts.
        budget: tokens that are left of the step's.
        blocks: the tables, which grow.
        num_running: free blocks that are left alone, one per request that may want one next.
        max_model_len: drafts beyond a request's end are dropped.

    Returns:
        How many drafts were added.
    """
    total = 0
    for item in items:
        request = item.request
        drafts, request.draft_token_ids = request.draft_token_ids, []
        if not drafts or not item.samples or item.num_tokens > 1:
            continue
        stop = item.start + item.num_tokens
        room = (len(item.block_table) + max(0, blocks.num_free - num_running)) * blocks.block_size - stop
        count = min(len(drafts), budget - total, most_slots(request, max_model_len) - stop, room)
        if count > 0:
            blocks.grow(request.request_id, stop + count)
            item.drafts = drafts[:count]
            item.num_tokens += count
            total += count
    return total
