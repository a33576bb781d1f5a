"""Paged block tables: which blocks of the KV pool belong to which request.

The KV pool is cut into blocks of `block_size` tokens; a request owns a list of them, its block table. Taking a
block is popping it from a free list and giving it back is appending it, so both are O(1) whatever the size of the
pool. The list is last in, first out: the block used most recently is the one most likely still in a cache.

Torch-free, so it can be tested in microseconds. It never touches device memory (`kv_cache.py` does) and never
decides who gets a block (`scheduler.py` does).
"""

from __future__ import annotations

from collections.abc import Mapping

from strata_lab.config import check_whole


class OutOfBlocks(RuntimeError):
    """There are too few free blocks. The scheduler asks first, so meeting this is a bug of ours."""


class BlockManager:
    """Hands out the blocks `0 .. num_blocks - 1` and keeps one table per request.

    Raises `ConfigError` when `num_blocks` or `block_size` is not a whole number of at least 1.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        check_whole("num_blocks", num_blocks, 1, 64)
        check_whole("block_size", block_size, 1, 16)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # popped from the end: block 0 goes out first
        self._tables: dict[str, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that some request owns."""
        return self.num_blocks - len(self._free)

    @property
    def utilization(self) -> float:
        """Used blocks over all blocks, 0.0 to 1.0."""
        return self.num_used / self.num_blocks

    def fragmentation(self, num_tokens: Mapping[str, int]) -> float:
        """Share of the slots in used blocks that hold no token, 0.0 to 1.0; 0.0 when nothing is used.

        `num_tokens`: request id to the tokens it has in the cache; requests that are left out count as empty.
        """
        slots = self.num_used * self.block_size
        return 1.0 - sum(num_tokens.get(request_id, 0) for request_id in self._tables) / slots if slots else 0.0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def table(self, request_id: str) -> list[int]:
        """Blocks of a request in token order: the live list, to be read only; [] if it has none."""
        return self._tables.get(request_id, [])

    def room(self, request_id: str) -> int:
        """Most tokens the table of a request could cover if it were given every free block."""
        return (len(self._tables.get(request_id, ())) + len(self._free)) * self.block_size

    def can_grow(self, request_id: str, num_tokens: int) -> bool:
        """Whether `grow` would succeed."""
        return num_tokens <= self.room(request_id)

    def grow(self, request_id: str, num_tokens: int) -> list[int]:
        """Extend the table until it covers `num_tokens` tokens, and return it; it never shrinks.

        O(1) per new block. Raises `OutOfBlocks`, with nothing taken, when the free blocks do not suffice.
        """
        table = self._tables.get(request_id)
        missing = -(-num_tokens // self.block_size) - (len(table) if table else 0)
        if missing <= 0:
            return table or []
        if missing > len(self._free):
            raise OutOfBlocks(
                f"request {request_id!r} needs {missing} more blocks for {num_tokens} tokens and {self.num_free} of "
                f"{self.num_blocks} are free; ask for at most {self.room(request_id)} tokens"
            )
        if table is None:
            table = self._tables[request_id] = []
        for _ in range(missing):
            table.append(self._free.pop())
        return table

    def free(self, request_id: str) -> None:
        """Give every block of a request back; does nothing for a request that has none."""
        # The list itself is left as it was: a batch that is in flight may still hold it.
        self._free.extend(reversed(self._tables.pop(request_id, [])))

    def check(self) -> None:
        """Assert every invariant: each block is free or in exactly one table, once; no table is empty."""
        owned = [block for table in self._tables.values() for block in table]
        assert sorted(self._free + owned) == list(range(self.num_blocks)), "a block is lost or has two owners"
        assert all(self._tables.values()), "a request without blocks has a table"
