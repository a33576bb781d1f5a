"""Paged block tables: which blocks of the KV pool belong to which requests.

The KV pool is cut into blocks of `block_size` tokens; a request holds a list of them, its block table. A block may be
in several tables: full blocks of a common beginning (`attach`), or all blocks of a request that goes on in several ways
(`fork`). Each block counts its holders; with the last one gone it is free, or idle if the prefix cache has a name for
it. Taking a block is popping it from the free list, or from the idle ones when that list is empty: O(1) whatever the
size of the pool. The free list is last in, first out: the block used most recently is the one most likely still in a
cache of the device.

Where attention does not see the whole text (`kv_retention.py`), blocks that no later token sees are let go of while
their request goes on: the table keeps its length, with a `HOLE` in their place.

Nothing writes into a block that several tables hold: `writable` says which copy must be made first, on the device.
Torch-free, so it can be tested in microseconds. It never touches device memory (`kv_cache.py` does) and never
decides who gets a block (`scheduler.py` does).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from strata_lab.kv_retention import HOLE, KeepAll, Retention
from strata_lab.prefix_cache import BlockNames, NoPrefixCache
from strata_lab.settings import check_whole


class OutOfBlocks(RuntimeError):
    """There are too few free blocks. The scheduler asks first, so meeting this is a bug of ours."""


class BlockManager:
    """Hands out the blocks `0 .. num_blocks - 1` and keeps one table per request.

    Args:
        num_blocks: size of the pool.
        block_size: tokens per block.
        prefixes: which blocks hold which tokens; none by default.
        retention: which tokens of a text are seen; all by default.

    Attributes:
        num_asked_tokens, num_hit_tokens: tokens of the texts that `attach` looked up in a prefix cache, and those that
            it found.

    Raises:
        ConfigError: `num_blocks` or `block_size` is not a whole number of at least 1.
    """

    def __init__(
        self, num_blocks: int, block_size: int, prefixes: BlockNames | None = None, retention: Retention | None = None
    ) -> None:
        check_whole("num_blocks", num_blocks, 1, 64)
        check_whole("block_size", block_size, 1, 16)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefixes: BlockNames = NoPrefixCache() if prefixes is None else prefixes
        self.retention: Retention = KeepAll() if retention is None else retention
        self.num_asked_tokens = self.num_hit_tokens = 0
        self._free = list(range(num_blocks - 1, -1, -1))  # popped from the end: block 0 goes out first
        self._holders = [0] * num_blocks
        self._tables: dict[str, list[int]] = {}
        self._holes: dict[str, int] = {}  # how many blocks of a request's table were let go of
        self._stale: set[str] = set()  # hold blocks computed with what is no longer in force: never to be named

    # -- what there is --------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that can be taken: free ones, and idle ones of the prefix cache."""
        return len(self._free) + self.prefixes.num_idle

    @property
    def num_used(self) -> int:
        """Blocks that some request holds, each counted once."""
        return self.num_blocks - self.num_free

    @property
    def num_idle(self) -> int:
        """Blocks that nobody holds and whose content may still be of use."""
        return self.prefixes.num_idle

    @property
    def utilization(self) -> float:
        """Used blocks over all blocks, 0.0 to 1.0."""
        return self.num_used / self.num_blocks

    @property
    def hit_rate(self) -> float:
        """Tokens found in the prefix cache over tokens looked up, 0.0 to 1.0."""
        return self.num_hit_tokens / self.num_asked_tokens if self.num_asked_tokens else 0.0

    def fragmentation(self, num_tokens: Mapping[str, int]) -> float:
        """Share of the slots in used blocks that hold no token, 0.0 to 1.0; 0.0 when nothing is used.

        `num_tokens`: request id to the tokens it has in the cache; requests that are left out count as empty.
        """
        # Only the ends of tables can be empty. A block of which some holder has every token is full for all of them.
        ends: dict[int, list[int]] = {}
        for request_id, table in self._tables.items():
            have = num_tokens.get(request_id, 0)
            for index in range(max(have // self.block_size, self._holes_end(request_id)), len(table)):
                ends.setdefault(table[index], []).append(max(0, have - index * self.block_size))
        empty = sum(self.block_size - max(n) for block, n in ends.items() if len(n) == self._holders[block])
        return empty / (self.num_used * self.block_size) if self.num_used else 0.0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def table(self, request_id: str) -> list[int]:
        """Blocks of a request in token order: the live list, to be read only; [] if it has none."""
        return self._tables.get(request_id, [])

    def held(self, request_id: str) -> list[int]:
        """Blocks that a request holds, in token order: its table without holes."""
        table = self.table(request_id)
        return [block for block in table if block != HOLE] if request_id in self._holes else table

    def has_holes(self, request_id: str) -> bool:
        """Whether a request has let go of blocks while it goes on."""
        return request_id in self._holes

    def num_held(self, request_id: str) -> int:
        """How many blocks a request holds. O(1)."""
        return len(self.table(request_id)) - self._holes.get(request_id, 0)

    def room(self, request_id: str) -> int:
        """Most tokens the table of a request could cover if it were given every free block."""
        return (len(self._tables.get(request_id, ())) + self.num_free) * self.block_size

    def can_grow(self, request_id: str, num_tokens: int) -> bool:
        """Whether `grow` would succeed."""
        return num_tokens <= self.room(request_id)

    def num_holders(self, block: int) -> int:
        """How many tables a block is in."""
        return self._holders[block]

    def frees_any(self, *request_ids: str) -> bool:
        """Whether `free` of all of these would give at least one block back: nobody else holds it."""
        if len(request_ids) == 1:
            return any(self._holders[block] == 1 for block in reversed(self.held(*request_ids)))
        held = Counter(block for request_id in request_ids for block in self.held(request_id))
        return any(self._holders[block] == count for block, count in held.items())

    # -- tables ---------------------------------------------------------------------------------------------------

    def grow(self, request_id: str, num_tokens: int) -> list[int]:
        """Extend the table until it covers `num_tokens` tokens, and return it; it never shrinks.

        O(1) per new block. Raises `OutOfBlocks`, with nothing taken, when the free blocks do not suffice.
        """
        table = self._tables.get(request_id)
        missing = -(-num_tokens // self.block_size) - (len(table) if table else 0)
        if missing <= 0:
            return table or []
        if missing > self.num_free:
            raise OutOfBlocks(
                f"request {request_id!r} needs {missing} more blocks for {num_tokens} tokens and {self.num_free} of "
                f"{self.num_blocks} are free; ask for at most {self.room(request_id)} tokens"
            )
        if table is None:
            table = self._tables[request_id] = []
        for _ in range(missing):
            table.append(self._take())
        return table

    def _take(self) -> int:
        block = self._free.pop() if self._free else self.prefixes.evict()
        self._holders[block] = 1
        return block

    def free(self, request_id: str, *, suspect: bool = False) -> None:
        """Let go of every block of a request; does nothing for a request that has none.

        Args:
            request_id: whose.
            suspect: what it computed is not to be found by others: its blocks lose their names.
        """
        # The list itself is left as it was: a batch that is in flight may still hold it.
        for block in reversed(self.held(request_id)):  # the end of a text is given away before its beginning
            if suspect:
                self.prefixes.unname(block)
            self._let_go(block)
        self._tables.pop(request_id, None)
        self._holes.pop(request_id, None)
        self._stale.discard(request_id)
        self.prefixes.forget(request_id)

    def _let_go(self, block: int) -> None:
        self._holders[block] -= 1
        if not self._holders[block] and not self.prefixes.rest(block):
            self._free.append(block)

    # -- sharing --------------------------------------------------------------------------------------------------

    def find(self, request_id: str, token_ids: Sequence[int]) -> list[int]:
        """Blocks of the prefix cache that hold the beginning of a text, never all of it.

        At least the last token is left to be computed: without that there are no logits to go on from.
        """
        return self.prefixes.find(request_id, token_ids, (len(token_ids) - 1) // self.block_size)

    def num_shared(self, request_id: str, token_ids: Sequence[int]) -> int:
        """How many of the blocks that `find` finds somebody holds: taking them leaves `num_free` as it is."""
        return sum(1 for block in self.find(request_id, token_ids) if self._holders[block])

    def attach(self, request_id: str, token_ids: Sequence[int]) -> int:
        """Give a request without blocks those that `find` finds; returns the tokens they hold."""
        assert request_id not in self._tables, request_id
        found = self.find(request_id, token_ids)
        for block in found:
            if not self._holders[block]:
                self.prefixes.wake(block)
            self._holders[block] += 1
        if found:
            self._tables[request_id] = found
        num_hit = len(found) * self.block_size
        self._give_back(request_id, num_hit)
        self.num_asked_tokens += len(token_ids) if self.prefixes.is_on else 0
        self.num_hit_tokens += num_hit
        return num_hit

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed: int, num_prompt: int = 0) -> None:
        """The first `num_computed` of a request's tokens are in its blocks: others may find those that are full.

        `num_prompt`: tokens of its prompt, beyond which not every retention lets others find them.
        """
        if request_id not in self._stale:
            sure = min(num_computed, self.retention.sure(num_prompt)) // self.block_size
            self.prefixes.publish(request_id, token_ids, self.table(request_id), sure)
        self._give_back(request_id, num_computed)

    def _holes_end(self, request_id: str) -> int:
        """Index behind the holes of a table; 0 without any."""
        return self.table(request_id).index(HOLE) + self._holes[request_id] if request_id in self._holes else 0

    def _give_back(self, request_id: str, num_computed: int) -> None:
        """Let go of what no token from `num_computed` on sees. O(1) per block, over the life of a request."""
        gone, table = self.retention.gone(num_computed, self.block_size), self.table(request_id)
        first, stop = gone.start + self._holes.get(request_id, 0), min(gone.stop, len(table))
        for index in range(first, stop):
            block, table[index] = table[index], HOLE
            self._let_go(block)
        if first < stop:
            self._holes[request_id] = stop - gone.start

    def keep(self, retention: Retention, basis: bytes) -> None:
        """Another way of attention from now on, and what tells it from others; no request has blocks."""
        assert not self._tables, list(self._tables)
        self.retention = retention
        self.prefixes.computed_with(basis)

    def fork(self, parent: str, child: str, num_blocks: int | None = None) -> list[int]:
        """Let `child`, which has no blocks, hold the first `num_blocks` of `parent` (None: all); returns its table.

        O(1) per block. Before either writes, it asks `writable`.
        """
        assert child not in self._tables, child
        assert parent not in self._holes, "a child may look back at what a window has let go"
        table = self.table(parent)[:num_blocks]
        for block in table:
            self._holders[block] += 1
        if table:
            self._tables[child] = table
        if parent in self._stale:
            self._stale.add(child)
        return table

    def writable(self, request_id: str, position: int) -> tuple[int, int] | None:
        """Make the block of a position the request's own before it writes there.

        Returns:
            None if nothing has to be copied, else the blocks (old, new): the device must copy the keys and values of
            old to new before it writes. The table holds the new one already.

        Raises:
            OutOfBlocks: a copy is needed and no block is free; nothing has changed.
        """
        table, index = self.table(request_id), position // self.block_size
        assert 0 <= index < len(table) and table[index] != HOLE, (request_id, position)
        old = table[index]
        if self._holders[old] == 1:
            self.prefixes.unname(old)  # what it is known to hold is about to change
            return None
        if not self.num_free:
            raise OutOfBlocks(
                f"request {request_id!r} needs a block of its own for position {position} and none of "
                f"{self.num_blocks} is free; free a request first"
            )
        table[index] = new = self._take()
        self._holders[old] -= 1
        return old, new

    def is_stale(self, request_id: str) -> bool:
        """Whether a request holds blocks that were computed with what is no longer in force."""
        return request_id in self._stale

    # -- the prefix cache -----------------------------------------------------------------------------------------

    def drop_prefixes(self) -> None:
        """Nothing computed so far may be found any more, for example because the weights have changed."""
        self._free += self.prefixes.clear()
        self._stale.update(self._tables)

    def use_prefixes(self, prefixes: BlockNames) -> None:
        """Another prefix cache from now on; it starts empty. What live requests have computed may still be named."""
        self._free += self.prefixes.clear()
        self.prefixes = prefixes

    # -- another pool ---------------------------------------------------------------------------------------------

    @property
    def tables(self) -> Mapping[str, Sequence[int]]:
        """Every table by its request, to be read only."""
        return self._tables

    def restore(self, old: BlockManager, place: Mapping[int, int]) -> None:
        """Be what `old` was, with its blocks in other places (`pool_move.py`); what has no place is forgotten."""
        self._tables = {name: [place.get(block, HOLE) for block in table] for name, table in old._tables.items()}
        self._holes, self._stale = dict(old._holes), set(old._stale)
        for block, to in place.items():
            self._holders[to] = old._holders[block]
        taken = set(place.values())
        self._free = [block for block in range(self.num_blocks - 1, -1, -1) if block not in taken]
        self.prefixes.restore(old.prefixes, place)

    def check(self) -> None:
        """Assert every invariant: each block is free, idle, or held as often as it says; no table is empty."""
        held = Counter(block for request_id in self._tables for block in self.held(request_id))
        apart = [*self._free, *self.prefixes.idle(), *held]
        assert sorted(apart) == list(range(self.num_blocks)), "a block is lost or has two owners"
        assert held == {b: n for b, n in enumerate(self._holders) if n}, "a block is lost or has two owners"
        tables = {name: [block for block in table if block != HOLE] for name, table in self._tables.items()}
        assert all(self._tables.values()), "an empty table"
        assert all(len(table) == len(set(table)) for table in tables.values()), "a loop"
        assert {n: self.num_held(n) for n in tables} == {n: len(t) for n, t in tables.items()}, "holes are miscounted"
        assert set(self.prefixes.named()) <= {*self.prefixes.idle(), *held}, "a free block has a name"
        assert self._stale <= self._tables.keys(), "a request without blocks is stale"
