"""Laws of shared blocks: who finds what, what is never found, what must be copied, what goes first, what it costs."""

from __future__ import annotations

import time
from hashlib import blake2b

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from strata_lab.block_manager import BlockManager, OutOfBlocks
from strata_lab.prefix_cache import NoPrefixCache, PrefixCache

SIZE = 4


def pool(num_blocks: int = 16, size: int = SIZE) -> BlockManager:
    return BlockManager(num_blocks, size, PrefixCache(size))


def compute(blocks: BlockManager, name: str, tokens: list[int]) -> int:
    """A request computes what the cache does not hold; how many tokens it held."""
    hit = blocks.attach(name, tokens)
    blocks.grow(name, len(tokens))
    blocks.commit(name, tokens, len(tokens))
    return hit


def reference_names(tokens: list[int], size: int) -> dict[bytes, list[int]]:
    """Name to tokens of every full block of a text, spelled out."""
    names, name = {}, bytes(16)
    for start in range(0, len(tokens) - size + 1, size):
        block = tokens[start : start + size]
        name = blake2b(name + b"".join(t.to_bytes(4, "little") for t in block), digest_size=16).digest()
        names[name] = block
    return names


# -- what is found ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "found"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8), (30, 8)], ids=str)
def test_full_blocks_are_found_and_never_the_whole_prompt(length: int, found: int) -> None:
    blocks = pool()
    compute(blocks, "a", list(range(11)))  # two full blocks and a part of a third
    assert blocks.attach("b", [*range(11), *range(100, 120)][:length]) == found
    assert blocks.table("b") == blocks.table("a")[: found // SIZE]
    blocks.check()


def test_a_block_is_found_only_behind_the_same_beginning() -> None:
    blocks = pool()
    compute(blocks, "a", [1, 1, 1, 1, 2, 2, 2, 2, 0])
    assert compute(blocks, "b", [2, 2, 2, 2, 1, 1, 1, 1, 0]) == 0
    assert compute(blocks, "c", [3, 3, 3, 3, 2, 2, 2, 2, 0]) == 0
    assert compute(blocks, "d", [1, 1, 1, 1, 3, 3, 3, 3, 0]) == 4


def test_a_block_is_found_only_once_its_tokens_are_computed() -> None:
    blocks, tokens = pool(), list(range(12))
    blocks.attach("a", tokens)
    blocks.grow("a", 12)
    for computed, found in ((0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (12, 8)):
        blocks.commit("a", tokens, computed)
        assert blocks.attach("b", tokens) == found
        blocks.free("b")


def test_what_a_request_left_behind_is_found_until_its_place_is_needed() -> None:
    blocks = pool(num_blocks=4)
    compute(blocks, "a", list(range(13)))
    blocks.free("a")
    assert (blocks.num_free, blocks.num_used, blocks.num_idle) == (4, 0, 3)
    blocks.grow("b", 2 * SIZE)  # the one free block, and one of the idle ones: the end of the text goes first
    assert blocks.attach("c", list(range(13))) == 8
    blocks.check()


def test_the_block_that_was_idle_longest_goes_first_and_use_renews_it() -> None:
    blocks = pool(num_blocks=3)
    texts = {name: [n] * SIZE + [0] for n, name in enumerate("abc", start=1)}
    for name in "abc":
        blocks.attach(name, texts[name])
        blocks.grow(name, SIZE)
        blocks.commit(name, texts[name], SIZE)
    for name in "abc":
        blocks.free(name)
    assert blocks.attach("again", texts["a"]) == SIZE
    blocks.free("again")
    blocks.grow("x", 1)
    assert [len(blocks.find(n, texts[n])) for n in "abc"] == [1, 0, 1]
    blocks.grow("y", 1)
    assert [len(blocks.find(n, texts[n])) for n in "abc"] == [1, 0, 0]


def test_two_requests_that_computed_the_same_text_keep_their_own_blocks() -> None:
    blocks, tokens = pool(), list(range(9))
    for name in "ab":
        blocks.attach(name, tokens)
        blocks.grow(name, 9)
    for name in "ab":
        blocks.commit(name, tokens, 9)
    assert not set(blocks.table("a")) & set(blocks.table("b"))
    blocks.free("b")
    assert (blocks.num_idle, blocks.find("c", tokens)) == (0, blocks.table("a")[:2])
    blocks.check()


def test_nothing_is_found_after_the_weights_changed_not_even_from_requests_that_go_on() -> None:
    blocks, tokens = pool(), list(range(9))
    compute(blocks, "done", [7] * 9)
    blocks.free("done")
    compute(blocks, "live", tokens)
    blocks.fork("live", "twin")
    blocks.drop_prefixes()
    assert (blocks.num_idle, blocks.find("x", [7] * 9), blocks.find("y", tokens)) == (0, [], [])
    more = [*tokens, *range(50, 60)]
    for name in ("live", "twin"):
        blocks.commit(name, more[:9], 9)
        assert blocks.find("z", more) == []
    blocks.free("live")
    assert compute(blocks, "live", tokens) == 0  # computed anew, so it counts again
    assert blocks.attach("x", tokens) == 8
    blocks.check()


def test_what_a_failed_request_computed_is_not_found() -> None:
    blocks = pool()
    compute(blocks, "a", list(range(9)))
    assert compute(blocks, "b", [*range(8), *range(90, 100)]) == 8
    blocks.free("b", suspect=True)
    assert (blocks.find("c", list(range(9))), blocks.num_idle) == ([], 0)
    blocks.check()


def test_without_a_cache_nothing_is_found_and_switching_keeps_every_table() -> None:
    blocks = BlockManager(16, SIZE)
    assert [compute(blocks, name, list(range(9))) for name in "ab"] == [0, 0]
    assert (blocks.num_asked_tokens, blocks.hit_rate) == (0, 0.0), "what nobody looked for was not missed"
    table = list(blocks.table("a"))
    blocks.use_prefixes(PrefixCache(SIZE))
    blocks.commit("a", list(range(9)), 9)
    assert compute(blocks, "c", list(range(9))) == 8
    blocks.free("b"), blocks.free("c")
    blocks.use_prefixes(NoPrefixCache())
    assert (blocks.table("a"), blocks.num_idle, blocks.num_free) == (table, 0, 13)
    blocks.check()


def test_the_hit_rate_is_tokens_found_over_tokens_asked() -> None:
    blocks = pool()
    assert blocks.hit_rate == 0.0
    for name, found in (("a", 0), ("b", 8), ("c", 8)):
        assert compute(blocks, name, list(range(10))) == found
    assert (blocks.num_hit_tokens, blocks.num_asked_tokens, blocks.hit_rate) == (16, 30, 16 / 30)


def test_a_shared_block_is_used_once_and_its_slots_count_once() -> None:
    blocks = pool(num_blocks=8)
    for name in "ab":
        compute(blocks, name, list(range(10)))
    assert (blocks.num_used, blocks.utilization) == (4, 0.5)
    assert blocks.fragmentation({"a": 10, "b": 10}) == pytest.approx(4 / 16)
    assert blocks.fragmentation({"a": 10, "b": 4}) == pytest.approx(6 / 16), "the second block is full for `a`"
    blocks.fork("a", "c")
    assert blocks.fragmentation({"a": 10, "b": 10, "c": 9}) == pytest.approx(4 / 16)
    assert [blocks.num_holders(b) for b in blocks.table("a")] == [3, 3, 2]


# -- copy on write ----------------------------------------------------------------------------------------------------


def test_a_fork_shares_everything_until_one_of_the_two_writes() -> None:
    blocks, tokens = pool(), list(range(6))
    compute(blocks, "a", tokens)
    assert blocks.fork("a", "b") == blocks.table("a")
    assert blocks.num_used == 2
    before = list(blocks.table("a"))
    assert blocks.writable("b", 6) == (before[1], blocks.table("b")[1])
    assert (blocks.table("a"), blocks.table("b")[0], blocks.num_used) == (before, before[0], 3)
    assert blocks.writable("a", 6) is None  # nobody else holds it any more
    assert blocks.writable("b", 6) is None
    blocks.check()


def test_a_block_that_is_written_again_loses_its_name() -> None:
    blocks, tokens = pool(), list(range(9))
    compute(blocks, "a", tokens)
    assert blocks.writable("a", 5) is None
    assert len(blocks.find("b", tokens)) == 1


def test_a_copy_without_a_free_block_is_refused_and_changes_nothing() -> None:
    blocks = pool(num_blocks=2)
    compute(blocks, "a", list(range(6)))
    blocks.fork("a", "b")
    with pytest.raises(OutOfBlocks, match="'b' needs a block of its own for position 6 and none of 2 is free"):
        blocks.writable("b", 6)
    assert blocks.table("b") == blocks.table("a")
    blocks.free("a")
    assert blocks.writable("b", 6) is None
    blocks.check()


def test_who_only_shares_frees_nothing() -> None:
    blocks = pool()
    compute(blocks, "a", list(range(9)))
    blocks.attach("b", list(range(9)))
    assert (blocks.frees_any("a"), blocks.frees_any("b"), blocks.frees_any("stranger")) == (True, False, False)
    blocks.fork("b", "c")
    assert not blocks.frees_any("b", "c") and not blocks.frees_any()
    blocks.free("a")
    assert not blocks.frees_any("b") and blocks.frees_any("b", "c")


def test_check_notices_a_wrong_count_and_a_free_block_with_a_name() -> None:
    miscounted = pool()
    compute(miscounted, "a", list(range(9)))
    miscounted.fork("a", "b").pop()
    with pytest.raises(AssertionError, match="lost or has two owners"):
        miscounted.check()
    named = pool()
    compute(named, "a", list(range(9)))
    named.prefixes._name_of[15] = bytes(16)  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="a free block has a name"):
        named.check()


# -- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [False, True], ids=["plain", "prefix cache"])
def test_a_block_costs_microseconds(cached: bool) -> None:
    """Attach, grow, commit and free, per block, with every block named and evicted; about 1 us on an idle core."""
    blocks = BlockManager(4096, 16, PrefixCache(16) if cached else None)
    texts = [[n] * 16 * 128 for n in range(64)]
    best = float("inf")
    for _ in range(5):
        start = time.thread_time()  # other programs' time is not the manager's
        for n, tokens in enumerate(texts):
            compute(blocks, f"r{n % 16}", tokens)
            if n >= 15:
                blocks.free(f"r{(n + 1) % 16}")
        best = min(best, (time.thread_time() - start) / (64 * 128))
        for n in range(16):
            blocks.free(f"r{n}")
        blocks.drop_prefixes()
    assert best < 5e-6  # seconds


# -- everything at once -----------------------------------------------------------------------------------------------


class SharedBlocksMachine(RuleBasedStateMachine):
    """Random use with a model of the device: what a table leads to is what its request wrote, whoever shares it."""

    names = st.sampled_from("abcde")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = pool(num_blocks=11, size=2)
        self.kv = [[-1, -1] for _ in range(11)]
        self.texts: dict[str, list[int]] = {}  # computed tokens of each request
        self.known: dict[bytes, list[int]] = {}  # what each name stands for, by the reference
        self.idle: list[int] = []  # longest idle first

    def take(self, name: str, tokens: list[int], named: bool) -> None:
        """Let a request compute `tokens` behind what it has, if there is room."""
        have, blocks = len(self.texts.get(name, [])), self.blocks
        text = self.texts.get(name, []) + tokens
        shared = have % 2 and blocks.num_holders(blocks.table(name)[-1]) > 1
        missing = blocks.blocks_for(len(text)) - len(blocks.table(name)) + bool(shared)
        if missing > blocks.num_free:
            return
        evicted = max(0, missing - (blocks.num_free - len(self.idle)))
        if have % 2 and (copy := blocks.writable(name, have)):
            self.kv[copy[1]] = list(self.kv[copy[0]])
        table = blocks.grow(name, len(text))
        self.idle = self.idle[evicted:]
        for position in range(have, len(text)):
            block = table[position // 2]
            assert blocks.num_holders(block) == 1, "shared while written"
            assert block not in set(blocks.prefixes.named()), "named while written"
            self.kv[block][position % 2] = text[position]
        self.texts[name] = text
        self.known |= reference_names(text, 2)
        if named:
            blocks.commit(name, text, len(text))

    @rule(name=names, tokens=st.lists(st.integers(1, 2), min_size=1, max_size=9), named=st.booleans())
    def compute(self, name: str, tokens: list[int], named: bool) -> None:
        if name not in self.texts:
            hit = self.blocks.attach(name, tokens)
            assert hit < len(tokens)
            self.idle = [b for b in self.idle if b not in self.blocks.table(name)]
            if hit:
                self.texts[name] = tokens[:hit]
            self.take(name, tokens[hit:], named)
        else:
            self.take(name, tokens, named)

    @rule(parent=names, child=names)
    def fork(self, parent: str, child: str) -> None:
        if parent in self.texts and child not in self.texts:
            assert self.blocks.fork(parent, child) == self.blocks.table(parent)
            self.texts[child] = list(self.texts[parent])

    @rule(name=names, suspect=st.booleans())
    def free(self, name: str, suspect: bool) -> None:
        table, named = list(self.blocks.table(name)), set(self.blocks.prefixes.named())
        last = [b for b in reversed(table) if self.blocks.num_holders(b) == 1]
        self.blocks.free(name, suspect=suspect)
        self.texts.pop(name, None)
        if suspect:
            assert not set(table) & set(self.blocks.prefixes.named())
        else:
            self.idle += [b for b in last if b in named]

    @precondition(lambda self: len(self.idle) > 3)
    @rule()
    def drop(self) -> None:
        self.blocks.drop_prefixes()
        self.idle = []
        assert not list(self.blocks.prefixes.named())

    @precondition(lambda self: len(self.idle) > 3)
    @rule()
    def replace_the_cache(self) -> None:
        self.blocks.use_prefixes(PrefixCache(2))
        self.idle = []

    @invariant()
    def books_are_right(self) -> None:
        self.blocks.check()
        assert list(self.blocks.prefixes.idle()) == self.idle
        assert self.blocks.num_used == len({b for n in self.texts for b in self.blocks.table(n)})

    @invariant()
    def every_table_leads_to_its_text(self) -> None:
        for name, text in self.texts.items():
            table = self.blocks.table(name)
            assert [self.kv[table[p // 2]][p % 2] for p in range(len(text))] == text

    @invariant()
    def a_named_block_holds_what_its_name_says(self) -> None:
        cache = self.blocks.prefixes
        assert isinstance(cache, PrefixCache)
        names = {block: cache.name_of(block) for block in cache.named()}
        assert len(set(names.values())) == len(names)
        for block, name in names.items():
            assert name is not None
            assert self.kv[block] == self.known[name]


TestSharedBlocksMachine = SharedBlocksMachine.TestCase
TestSharedBlocksMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
