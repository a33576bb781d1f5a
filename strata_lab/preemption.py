"""What becomes of the blocks of a request that is preempted: forgotten and computed again, or kept in host memory.

The scheduler asks at three moments: a request loses its blocks (`save`), it gets blocks again (`load`), it ends
(`drop`). What has to be copied meanwhile is collected and handed to the step (`take_moves`); the device does it before
anything else of the step (`kv_cache.py`). So a block whose copy is still to come may be given away at once.

Host memory is bounded. What does not fit is computed again, the end of a text first: a beginning is of use alone.
Torch-free: these are the books of the host's blocks, not their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Protocol

from strata_lab.batch import Pairs


class Preemption(Protocol):
    """Keeps what preempted requests have computed, or does not.

    Attributes:
        num_blocks: blocks of host memory.
    """

    num_blocks: int

    @property
    def has_moves(self) -> bool:
        """Whether `take_moves` has anything to give."""
        ...

    @property
    def num_used(self) -> int:
        """Blocks of host memory that hold something."""
        ...

    def save(self, request_id: str, blocks: Sequence[int], num_tokens: int, block_size: int) -> int:
        """Keep the first `num_tokens` tokens of a request, which are in `blocks`; returns how many it could keep."""
        ...

    def saved(self, request_id: str) -> int:
        """Tokens that are kept of a request."""
        ...

    def load(self, request_id: str, blocks: Sequence[int], first: int) -> None:
        """Bring what is kept of a request into `blocks`, which hold the first `first` of them already."""
        ...

    def drop(self, request_id: str) -> int:
        """Forget what is kept of a request; returns its tokens."""
        ...

    def clear(self) -> int:
        """Forget everything, for example because it was computed with other weights; returns its tokens."""
        ...

    def take_moves(self) -> tuple[Pairs, Pairs]:
        """Copies to host memory and back since the last call, as (block, host block) and (host block, block)."""
        ...


class Recompute:
    """Keeps nothing."""

    num_blocks = num_used = 0
    has_moves = False

    def save(self, request_id: str, blocks: Sequence[int], num_tokens: int, block_size: int) -> int:
        """Nothing."""
        return 0

    def saved(self, request_id: str) -> int:
        """Nothing."""
        return 0

    def load(self, request_id: str, blocks: Sequence[int], first: int) -> None:
        """Never asked."""
        raise AssertionError(request_id)

    def drop(self, request_id: str) -> int:
        """Nothing."""
        return 0

    def clear(self) -> int:
        """Nothing."""
        return 0

    def take_moves(self) -> tuple[Pairs, Pairs]:
        """None."""
        return (), ()


class SwapToHost:
    """Keeps as much as a host pool of `num_blocks` blocks holds."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))  # a heap: low numbers first, so that copies run over consecutive blocks
        self._kept: dict[str, tuple[list[int], int]] = {}  # request to its host blocks and their tokens
        self._leaving: dict[str, tuple[list[int], int]] = {}  # on the way back: read by the step that is being built
        self._out: list[tuple[int, int]] = []
        self._in: dict[str, list[tuple[int, int]]] = {}

    @property
    def num_used(self) -> int:
        """Blocks of host memory that hold something."""
        return self.num_blocks - len(self._free)

    @property
    def has_moves(self) -> bool:
        """Whether `take_moves` has anything to give."""
        return bool(self._out or self._leaving)

    def save(self, request_id: str, blocks: Sequence[int], num_tokens: int, block_size: int) -> int:
        """Keep the first `num_tokens` tokens of a request, which are in `blocks`; returns how many it could keep.

        Without `blocks`, what is still there of a request that was on its way back is all that can be kept.
        """
        if request_id in self._leaving:  # back and gone again before the step began: what was kept is still there
            self._kept[request_id] = self._leaving.pop(request_id)
            del self._in[request_id]
            return self._kept[request_id][1]
        wanted = -(-num_tokens // block_size)
        count = min(wanted, len(self._free), len(blocks))
        if not count:
            return 0
        hosts = [heappop(self._free) for _ in range(count)]
        self._out += zip(blocks[:count], hosts, strict=True)
        num_kept = num_tokens if count == wanted else count * block_size
        self._kept[request_id] = hosts, num_kept
        return num_kept

    def saved(self, request_id: str) -> int:
        """Tokens that are kept of a request."""
        return self._kept[request_id][1] if request_id in self._kept else 0

    def load(self, request_id: str, blocks: Sequence[int], first: int) -> None:
        """Bring what is kept of a request into `blocks`, which hold the first `first` of them already."""
        hosts, _ = self._leaving[request_id] = self._kept.pop(request_id)
        self._in[request_id] = list(zip(hosts[first:], blocks[first : len(hosts)], strict=True))

    def drop(self, request_id: str) -> int:
        """Forget what is kept of a request; returns its tokens."""
        hosts, num_tokens = self._kept.pop(request_id, ([], 0))
        self._give_back(hosts)
        return num_tokens

    def clear(self) -> int:
        """Forget everything, for example because it was computed with other weights; returns its tokens."""
        return sum(self.drop(request_id) for request_id in list(self._kept))

    def take_moves(self) -> tuple[Pairs, Pairs]:
        """Copies to host memory and back since the last call, as (block, host block) and (host block, block)."""
        back = [pair for pairs in self._in.values() for pair in pairs]
        out, self._out = self._out, []
        for hosts, _ in self._leaving.values():  # only now: a block may not be read and written in one step
            self._give_back(hosts)
        self._leaving.clear()
        self._in.clear()
        return out, back

    def _give_back(self, hosts: Sequence[int]) -> None:
        for host in hosts:
            heappush(self._free, host)

    def check(self) -> None:
        """Assert between two steps: each host block is free or of one request, and nothing is under way."""
        owned = [host for hosts, _ in self._kept.values() for host in hosts]
        assert sorted([*self._free, *owned]) == list(range(self.num_blocks)), "a host block is lost or has two owners"
        assert not self._out and not self._leaving and not self._in, "a move was not handed to a step"
