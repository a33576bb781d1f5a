"""Laws of the paged block tables: no block is lost, none has two owners, a failed call changes nothing."""

from __future__ import annotations

import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from strata_lab.block_manager import BlockManager, OutOfBlocks
from strata_lab.settings import ConfigError


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)], ids=str
)
def test_blocks_for_rounds_up_to_whole_blocks(num_tokens: int, num_blocks: int) -> None:
    assert BlockManager(8, 16).blocks_for(num_tokens) == num_blocks


def test_a_table_grows_only_when_a_block_boundary_is_crossed() -> None:
    blocks = BlockManager(4, 4)
    sizes = []
    for num_tokens in range(1, 10):
        blocks.grow("a", num_tokens)
        sizes.append(len(blocks.table("a")))
    assert sizes == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert blocks.num_free == 1
    assert blocks.num_used == 3


def test_a_table_keeps_its_order_and_never_shrinks() -> None:
    blocks = BlockManager(4, 4)
    blocks.grow("a", 8)
    before = list(blocks.table("a"))
    blocks.grow("a", 1)
    assert blocks.table("a") == before
    blocks.grow("a", 12)
    assert blocks.table("a")[:2] == before


def test_the_block_freed_last_is_taken_first() -> None:
    blocks = BlockManager(4, 1)
    blocks.grow("a", 2)
    blocks.grow("b", 2)
    freed = list(blocks.table("a"))
    blocks.free("a")
    blocks.grow("c", 2)
    assert blocks.table("c") == freed


def test_the_table_is_live_and_empty_for_strangers() -> None:
    blocks = BlockManager(4, 1)
    assert blocks.table("a") == []
    table = blocks.grow("a", 1)
    blocks.grow("a", 3)
    assert table is blocks.table("a")
    assert len(table) == 3


def test_free_leaves_a_list_that_a_batch_still_holds_alone() -> None:
    blocks = BlockManager(4, 1)
    held = blocks.grow("a", 3)
    copy = list(held)
    blocks.free("a")
    blocks.grow("b", 4)
    assert held == copy
    assert blocks.table("a") == []


def test_growing_past_the_pool_raises_and_takes_nothing() -> None:
    blocks = BlockManager(4, 16)
    blocks.grow("a", 33)
    before = (list(blocks.table("a")), blocks.num_free)
    assert not blocks.can_grow("a", 65)
    with pytest.raises(OutOfBlocks, match=r"'a' needs 2 more blocks for 65 tokens and 1 of 4 are free; .* 64 tokens"):
        blocks.grow("a", 65)
    with pytest.raises(OutOfBlocks, match="'b'"):
        blocks.grow("b", 17)
    assert (list(blocks.table("a")), blocks.num_free) == before
    assert blocks.table("b") == []
    blocks.check()


def test_room_is_what_the_table_can_reach() -> None:
    blocks = BlockManager(4, 16)
    assert blocks.room("a") == 64
    blocks.grow("a", 1)
    blocks.grow("b", 32)
    assert (blocks.room("a"), blocks.room("b"), blocks.room("c")) == (32, 48, 16)
    assert blocks.can_grow("a", 32)
    assert not blocks.can_grow("a", 33)


def test_free_is_idempotent() -> None:
    blocks = BlockManager(4, 16)
    blocks.grow("a", 40)
    for _ in range(3):
        blocks.free("a")
        blocks.free("nobody")
        assert blocks.num_free == 4
        blocks.check()


def test_utilization_and_fragmentation_count_slots() -> None:
    blocks = BlockManager(8, 10)
    assert (blocks.utilization, blocks.fragmentation({})) == (0.0, 0.0)
    blocks.grow("a", 11)
    blocks.grow("b", 5)
    assert blocks.utilization == 3 / 8
    assert blocks.fragmentation({"a": 11, "b": 5}) == pytest.approx(14 / 30)
    assert blocks.fragmentation({"a": 11}) == pytest.approx(19 / 30)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "16", None])
def test_sizes_must_be_positive_whole_numbers(value: object) -> None:
    with pytest.raises(ConfigError, match=r"num_blocks=.* must be a whole number of at least 1; try 64"):
        BlockManager(value, 16)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"block_size=.* must be a whole number of at least 1; try 16"):
        BlockManager(64, value)  # type: ignore[arg-type]


def test_check_notices_a_lost_block_and_a_second_owner() -> None:
    lost = BlockManager(4, 1)
    lost.grow("a", 2)
    lost.table("a").pop()
    with pytest.raises(AssertionError, match="lost or has two owners"):
        lost.check()
    shared = BlockManager(4, 1)
    shared.grow("a", 1)
    shared.grow("b", 1)
    shared.table("b")[0] = shared.table("a")[0]
    with pytest.raises(AssertionError, match="lost or has two owners"):
        shared.check()


def test_the_cost_of_a_block_does_not_depend_on_the_size_of_the_pool() -> None:
    def seconds_per_block(num_blocks: int) -> float:
        blocks, best = BlockManager(num_blocks, 16), float("inf")
        for _ in range(7):
            start = time.perf_counter()
            for _ in range(20):
                for name in "abcd":
                    blocks.grow(name, 16 * 128)
                for name in "abcd":
                    blocks.free(name)
            best = min(best, (time.perf_counter() - start) / (20 * 4 * 128))
        return best

    # 2000 times the pool; anything that scans it would be hundreds of times slower, noise is not.
    assert seconds_per_block(1_000_000) < 20 * seconds_per_block(512)


class BlockManagerMachine(RuleBasedStateMachine):
    """Random calls against a model that knows only how many tokens each request covers."""

    names = st.sampled_from("abcdef")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(13, 3)
        self.covered: dict[str, int] = {}  # request to blocks

    @rule(name=names, num_tokens=st.integers(0, 45))
    def grow(self, name: str, num_tokens: int) -> None:
        free, had = self.blocks.num_free, self.covered.get(name, 0)
        target = max(had, self.blocks.blocks_for(num_tokens))
        before = list(self.blocks.table(name))
        assert self.blocks.can_grow(name, num_tokens) == (target - had <= free)
        if target - had <= free:
            assert self.blocks.grow(name, num_tokens) == self.blocks.table(name)
            self.covered[name] = target
            assert self.blocks.table(name)[:had] == before
            assert self.blocks.num_free == free - (target - had)
        else:
            with pytest.raises(OutOfBlocks):
                self.blocks.grow(name, num_tokens)
            assert self.blocks.table(name) == before
            assert self.blocks.num_free == free

    @rule(name=names)
    def free(self, name: str) -> None:
        self.blocks.free(name)
        self.covered.pop(name, None)

    @invariant()
    def nothing_is_lost_or_shared(self) -> None:
        self.blocks.check()
        assert all(len(self.blocks.table(name)) == self.covered.get(name, 0) for name in "abcdef")
        assert self.blocks.num_used == sum(self.covered.values()) == 13 - self.blocks.num_free
        assert self.blocks.utilization == self.blocks.num_used / 13
        have = {name: 3 * count - 2 for name, count in self.covered.items() if count}
        empty = 2 * len(have) / (3 * self.blocks.num_used) if have else 0.0
        assert self.blocks.fragmentation(have) == pytest.approx(empty)


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
