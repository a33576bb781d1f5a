"""Which blocks of the KV pool hold which tokens, so that a request need not compute again what is there already.

A block's keys and values depend on its own tokens and on all before them. So its name is a digest of its tokens *and*
the name of the block before it: one look-up of a 16-byte name compares whole prefixes. Only full blocks whose tokens
were computed get a name. A named block that no request holds any more stays as it is, *idle*, until its place is
needed; then the one that has been idle longest goes. Everything here is O(1) per block.

Names are 128-bit BLAKE2b, not Python's `hash`: whoever can choose prompts could make two of those collide and read
another's conversation. What else decides a block's content is the same for a whole pool: where weights or number
formats change, `clear` is called; how attention is computed (`computed_with`) stands before the first block of every
name, so that what was computed in another way is not found, and found again once that way is back. Torch-free. It
counts no owners and hands out no blocks (`block_manager.py` does both).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

NAME_BYTES = 16
TOKEN_CODE = "i"  # 32 bits per token id; negative where an embedding stands instead (`prompt_embeds.py`)
FIRST_NAME = bytes(NAME_BYTES)  # stands before the first block of every text


class BlockNames(Protocol):
    """What a block manager asks of a prefix cache; blocks that are not named are no concern of it.

    Attributes:
        is_on: whether it can ever find anything: what is asked of one that cannot is no miss.
    """

    is_on: bool

    @property
    def num_idle(self) -> int:
        """Named blocks that nobody holds."""
        ...

    def named(self) -> Iterator[int]:
        """Every block that has a name, held or idle."""
        ...

    def idle(self) -> Iterator[int]:
        """Named blocks that nobody holds, the next to be given away first."""
        ...

    def computed_with(self, basis: bytes) -> None:
        """What is named or looked up from now on was computed in a way that `basis` tells from others."""
        ...

    def find(self, request_id: str, token_ids: Sequence[int], num_blocks: int) -> list[int]:
        """Blocks that hold the beginning of a text, at most its first `num_blocks`."""
        ...

    def publish(self, request_id: str, token_ids: Sequence[int], table: Sequence[int], num_blocks: int) -> None:
        """Name the first `num_blocks` of a table: they are full and computed."""
        ...

    def wake(self, block: int) -> None:
        """Somebody holds a block that was idle."""
        ...

    def rest(self, block: int) -> bool:
        """Nobody holds a block any more; False if it has no name and is simply free."""
        ...

    def evict(self) -> int:
        """Take the name of the block that has been idle longest, and the block with it."""
        ...

    def unname(self, block: int) -> None:
        """Take the name of a block that is held."""
        ...

    def forget(self, request_id: str) -> None:
        """A request lost its blocks or ended: drop what was remembered about it."""
        ...

    def clear(self) -> list[int]:
        """Take every name; returns the blocks that were idle, which are free now."""
        ...

    def restore(self, old: BlockNames, place: Mapping[int, int]) -> None:
        """Know what another cache of the same ways of computing knew, of the blocks that have a new place."""
        ...


class PrefixCache:
    """Named blocks of one pool.

    Args:
        block_size: tokens per block.
    """

    is_on = True

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}  # in the order in which they became idle
        # Request to its text and the names of its full blocks: a queue asks every step. A text is only appended to.
        self._names: dict[str, tuple[Sequence[int], list[bytes]]] = {}
        self._published: dict[str, int] = {}  # request to the blocks of its table that were offered already
        self._first = FIRST_NAME

    @property
    def num_idle(self) -> int:
        """Named blocks that nobody holds."""
        return len(self._idle)

    def named(self) -> Iterator[int]:
        """Every block that has a name, held or idle."""
        return iter(self._name_of)

    def idle(self) -> Iterator[int]:
        """Named blocks that nobody holds, longest idle first."""
        return iter(self._idle)

    def name_of(self, block: int) -> bytes | None:
        """The name of a block; None if it has none."""
        return self._name_of.get(block)

    def computed_with(self, basis: bytes) -> None:
        """Names of another `basis` are kept and not found; nobody may hold a block that is still to be named."""
        self._first = blake2b(basis, digest_size=NAME_BYTES).digest() if basis else FIRST_NAME
        self._names.clear()
        self._published.clear()

    def find(self, request_id: str, token_ids: Sequence[int], num_blocks: int) -> list[int]:
        """Blocks that hold the beginning of a text, at most its first `num_blocks`; touches nothing."""
        found = []
        for name in self._names_of(request_id, token_ids, num_blocks)[:num_blocks]:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, request_id: str, token_ids: Sequence[int], table: Sequence[int], num_blocks: int) -> None:
        """Name the first `num_blocks` of a table: they are full and computed.

        Where another block holds the same text already, that one keeps the name: two requests that computed it at the
        same time both go on with their own.
        """
        done = self._published.get(request_id, 0)
        if num_blocks <= done:
            return
        names = self._names_of(request_id, token_ids, num_blocks)
        for index in range(done, num_blocks):
            name, block = names[index], table[index]
            if block >= 0 and name not in self._block_of and block not in self._name_of:  # -1: given back before
                self._block_of[name], self._name_of[block] = block, name
        self._published[request_id] = num_blocks

    def _names_of(self, request_id: str, token_ids: Sequence[int], num_blocks: int) -> list[bytes]:
        """The names of at least the first `num_blocks` blocks of a text."""
        text, names = self._names.get(request_id, (None, []))
        if text is not token_ids:  # the same name for another text would find another's blocks
            names = []
            self._names[request_id] = token_ids, names
        if len(names) < num_blocks:
            assert num_blocks * self.block_size <= len(token_ids), "a block that is not full has no name"
            start, step = len(names) * self.block_size, self.block_size * array(TOKEN_CODE).itemsize
            data = array(TOKEN_CODE, token_ids[start : num_blocks * self.block_size]).tobytes()
            name = names[-1] if names else self._first
            for at in range(0, len(data), step):
                name = blake2b(name + data[at : at + step], digest_size=NAME_BYTES).digest()
                names.append(name)
        return names

    def wake(self, block: int) -> None:
        """Somebody holds a block that was idle."""
        del self._idle[block]

    def rest(self, block: int) -> bool:
        """Nobody holds a block any more; False if it has no name and is simply free."""
        if block not in self._name_of:
            return False
        self._idle[block] = None
        return True

    def evict(self) -> int:
        """Take the name of the block that has been idle longest, and the block with it."""
        block = next(iter(self._idle))
        del self._idle[block]
        self.unname(block)
        return block

    def unname(self, block: int) -> None:
        """Take the name of a block, if it has one."""
        name = self._name_of.pop(block, None)
        if name is not None:
            del self._block_of[name]

    def forget(self, request_id: str) -> None:
        """A request lost its blocks or ended: drop what was remembered about it."""
        self._names.pop(request_id, None)
        self._published.pop(request_id, None)

    def clear(self) -> list[int]:
        """Take every name; returns the blocks that were idle, which are free now."""
        idle = list(self._idle)
        for memory in (self._block_of, self._name_of, self._idle, self._published):
            memory.clear()
        return idle

    def restore(self, old: BlockNames, place: Mapping[int, int]) -> None:
        """Know what another cache of the same ways of computing knew, of the blocks that have a new place."""
        if not isinstance(old, PrefixCache):
            return
        assert old._first == self._first, "names that were given in another way of computing"
        self._name_of = {place[block]: name for block, name in old._name_of.items() if block in place}
        self._block_of = {name: block for block, name in self._name_of.items()}
        self._idle = {place[block]: None for block in old._idle if block in place}
        self._names, self._published = dict(old._names), dict(old._published)


class NoPrefixCache:
    """Names nothing: every request computes its whole prompt."""

    is_on = False
    num_idle = 0

    def computed_with(self, basis: bytes) -> None:
        """Does nothing."""

    def named(self) -> Iterator[int]:
        """Nothing."""
        return iter(())

    def idle(self) -> Iterator[int]:
        """Nothing."""
        return iter(())

    def find(self, request_id: str, token_ids: Sequence[int], num_blocks: int) -> list[int]:
        """Nothing."""
        return []

    def publish(self, request_id: str, token_ids: Sequence[int], table: Sequence[int], num_blocks: int) -> None:
        """Does nothing."""

    def wake(self, block: int) -> None:
        """Never asked: no block is idle."""
        raise AssertionError(block)

    def rest(self, block: int) -> bool:
        """Every block is simply free."""
        return False

    def evict(self) -> int:
        """Never asked: no block is idle."""
        raise AssertionError("no block is idle")

    def unname(self, block: int) -> None:
        """Does nothing."""

    def forget(self, request_id: str) -> None:
        """Does nothing."""

    def clear(self) -> list[int]:
        """Nothing was idle."""
        return []

    def restore(self, old: BlockNames, place: Mapping[int, int]) -> None:
        """Does nothing."""
