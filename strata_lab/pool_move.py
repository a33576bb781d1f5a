"""The books of one KV pool go over into those of another size: whose blocks are where now, and what must be copied.

A pool changes its size while requests run (`gpu_memory_utilization`). Computing them again costs seconds where copying
their blocks costs milliseconds, so what the new pool can hold is copied, packed from its first block on. Torch-free:
the copies themselves are `KVCache.copy_blocks`.
"""

from __future__ import annotations

from strata_lab.block_manager import BlockManager
from strata_lab.kv_retention import HOLE


def take_over(new: BlockManager, old: BlockManager) -> list[tuple[int, int]]:
    """Fill the empty books `new` with what `old` says, and return the copies to be made: (old block, new block).

    Every table is taken over, so `new` must have at least as many blocks as `old` has in use. Of the blocks that only
    the prefix cache keeps come as many as fit, those used last. `old` is not to be used any more.
    """
    assert not new.num_used, "the new books are not empty"
    assert old.num_used <= new.num_blocks, (old.num_used, new.num_blocks)
    assert old.block_size == new.block_size
    place: dict[int, int] = {}
    for table in old.tables.values():
        for block in table:
            if block != HOLE and block not in place:
                place[block] = len(place)
    idle = list(old.prefixes.idle())[::-1] if new.prefixes.is_on else []
    for block in idle[: new.num_blocks - len(place)]:
        place[block] = len(place)
    new.restore(old, place)
    return list(place.items())
