"""The KV pool as a map: one cell per block, coloured by the request that holds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import traitlets as t

from strata_widgets._base import StrataWidget, load_style, load_view

FREE, CACHED, SHARED, FIRST_OWNER = 0, 1, 2, 3  # what a cell says
MAX_CELLS = 8192  # of a larger pool, a cell stands for several blocks
MAX_OWNERS = 255 - FIRST_OWNER


def pack_cells(num_blocks: int, tables: Sequence[Iterable[int]], cached: Iterable[int]) -> tuple[bytes, int]:
    """One byte per cell, and how many blocks a cell stands for.

    Args:
        num_blocks: of the pool.
        tables: blocks of each owner, in the owners' order; those beyond `MAX_OWNERS` count as the last one's.
        cached: blocks that nobody holds and the prefix cache keeps.
    """
    blocks = bytearray(num_blocks)
    for block in cached:
        blocks[block] = CACHED
    for i, table in enumerate(tables):
        owner = FIRST_OWNER + min(i, MAX_OWNERS - 1)
        for block in table:
            blocks[block] = owner if blocks[block] <= CACHED else SHARED
    per_cell = -(-num_blocks // MAX_CELLS)
    if per_cell == 1:
        return bytes(blocks), 1
    return bytes(max(blocks[i : i + per_cell]) for i in range(0, num_blocks, per_cell)), per_cell


def count_cells(num_blocks: int, tables: Sequence[Iterable[int]], cached: Iterable[int]) -> Mapping[str, int]:
    """Blocks held by one request, by several, kept by the prefix cache, and free."""
    held = [block for table in tables for block in table]
    distinct = set(held)
    num_shared = sum(count > 1 for count in _times(held).values())
    num_cached = len(set(cached))
    own = len(distinct) - num_shared
    return {"own": own, "shared": num_shared, "cached": num_cached, "free": num_blocks - len(distinct) - num_cached}


def _times(blocks: Iterable[int]) -> dict[int, int]:
    times: dict[int, int] = {}
    for block in blocks:
        times[block] = times.get(block, 0) + 1
    return times


class BlockMap(StrataWidget):
    """A map of the pool.

    Traits:
        cells: one byte per cell, as `pack_cells` makes it: `FREE`, `CACHED`, `SHARED`, or an owner's number.
        per_cell: blocks that a cell stands for.
        block_size: tokens of a block.
        owners: `{title, color}` per request that holds blocks; `color` is 0 to 7.
        kinds: `{key, label, count, tip}` per kind of block, for the legend.
    """

    _esm = load_view(__path__[0])
    _css = load_style(__path__[0])
    cells = t.Bytes(b"").tag(sync=True)
    per_cell = t.Int(1).tag(sync=True)
    block_size = t.Int(16).tag(sync=True)
    owners = t.List(t.Dict()).tag(sync=True)
    kinds = t.List(t.Dict()).tag(sync=True)
