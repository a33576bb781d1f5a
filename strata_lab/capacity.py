"""How many KV slots a request can ever need, and whether a pool and a length limit allow that. Torch-free."""

from __future__ import annotations

from strata_lab.block_manager import BlockManager
from strata_lab.kv_retention import Retention
from strata_lab.request import Request


def most_slots(request: Request, max_model_len: int) -> int:
    """KV slots a request can ever fill: one per token but the last, which is never fed back."""
    return min(request.num_prompt_tokens + request.params.max_tokens, max_model_len) - 1


def why_never_fits(
    request: Request, blocks: BlockManager, max_model_len: int, retention: Retention | None = None
) -> str | None:
    """Why a request can never be served from an empty pool and under a limit, with numbers that work; else None.

    `retention`: which tokens are seen; that of `blocks` if None.
    """
    have = request.num_tokens
    if have >= max_model_len:
        return (
            f"request {request.request_id!r} has {have} tokens and must have room for one more, but max_model_len="
            f"{max_model_len}; try at most {max_model_len - 1} tokens, or max_model_len={have + 1}"
        )
    kept = (retention or blocks.retention).most_blocks(blocks.block_size, 1)
    needed = min(blocks.blocks_for(most_slots(request, max_model_len)), kept)
    if needed <= blocks.num_blocks:
        return None
    spare = blocks.num_blocks * blocks.block_size - have
    fix = (
        f"max_tokens={request.num_output_tokens + spare + 1}"
        if spare >= 0
        else f"max_tokens=1 and a prompt {-spare} tokens shorter"
    )
    return (
        f"request {request.request_id!r} has {have} tokens and max_tokens={request.params.max_tokens}: it may need "
        f"{needed} KV blocks of {blocks.block_size} tokens and the pool has {blocks.num_blocks}; try {fix}, or "
        f"num_kv_blocks={needed}"
    )
