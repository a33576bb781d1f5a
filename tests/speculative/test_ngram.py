"""Prompt look-up finds what followed the longest earlier likeness of the end of a text."""

from __future__ import annotations

import random

import pytest

from strata_lab.request import Request
from strata_lab.sampling_params import SamplingParams
from strata_lab.speculative.ngram import HOPS, MAX_MATCH, SIZES, NgramDrafter, NgramIndex


def index_of(tokens: list[int]) -> NgramIndex:
    index = NgramIndex(list(tokens))
    index.read()
    return index


def common(tokens: list[int], position: int) -> int:
    length = 0
    while length < min(MAX_MATCH, position) and tokens[position - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def test_nothing_is_found_in_a_text_that_repeats_nothing() -> None:
    assert index_of(list(range(50))).find() == (-1, 0)
    assert index_of([1, 1]).find() == (-1, 0)  # the pair at the end is itself


def test_the_continuation_of_the_longest_likeness_is_proposed_not_of_the_latest() -> None:
    past = [5, 6, 7, 8, 1, 2, 3, 100, 9, 1, 2, 3, 200]
    index = index_of([*past, 8, 1, 2, 3])
    position, length = index.find()
    assert (position, length) == (7, 4)
    assert index.follow(position, 2) == [100, 9]


def test_a_text_that_goes_round_is_continued_past_its_end() -> None:
    index = index_of([1, 2, 3] * 4)
    position, _ = index.find()
    assert index.follow(position, 8) == [1, 2, 3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_reading_token_by_token_finds_what_a_search_of_the_whole_text_finds(seed: int) -> None:
    rng = random.Random(seed)
    tokens: list[int] = []
    index = NgramIndex(tokens)
    for _ in range(300):
        tokens.append(rng.randrange(4))
        index.read()
        position, length = index.find()
        for size in SIZES:
            places = [p for p in range(size, len(tokens)) if tokens[p - size : p] == tokens[-size:]][-HOPS:]
            if places:
                break
        if len(tokens) <= SIZES[-1] or not places:
            assert (position, length) == (-1, 0)
        else:
            assert position in places
            assert length == max(common(tokens, p) for p in places) == common(tokens, position)


def test_work_per_token_does_not_grow_with_the_text() -> None:
    index = NgramIndex([])
    sizes = []
    for _ in range(2):
        index.token_ids += [random.Random(1).randrange(50_000) for _ in range(1000)]
        index.read()
        sizes.append(sum(len(table) for table in index._latest) + sum(len(chain) for chain in index._earlier))
    assert sizes[1] <= 2 * sizes[0]
    assert index._num_read == 2000  # each token was read once
    index.read()
    assert sum(len(chain) for chain in index._earlier) == 2000 * len(SIZES)


def test_a_request_sees_its_own_text_only_and_is_forgotten_when_it_ends() -> None:
    drafter = NgramDrafter()
    a = Request("a", [1, 2, 3, 4, 5, 1, 2], SamplingParams())
    b = Request("b", [9, 8, 7, 1, 2], SamplingParams())
    assert drafter.look([a, b]) == [2, 0]
    assert drafter.draft([a], [3]) == [[3, 4, 5]]
    drafter.forget(a)
    assert drafter.look([b]) == [0]
    assert len(drafter._indexes) == 1
