"""Look-up on the device: the kernel proposes what the reference does, and the reference what its rule says."""

from __future__ import annotations

import random

import pytest
import torch

from strata_lab.kernels.gpu.look_up import CHUNK, LOOK_UPS
from strata_lab.speculative.look_up import MOST_COMMON, TORCH_LOOK_UPS, LookUpOps, follows
from strata_lab.speculative.ngram import NgramIndex
from strata_lab.speculative.window_state import WindowState
from tests.kernels.test_gpu_window_state import States

MOST = 7
OLD = 3  # behind the end of a text, and a token of it


def state_of(texts: list[list[int]], slots: int, device: torch.device) -> tuple[torch.Tensor, WindowState]:
    """Texts by position, and a cycle that feeds the last token of each; an empty one pads."""
    states = States(device)
    to_target = torch.zeros(0, dtype=torch.int64, device=device)
    state = WindowState.empty(states, states, len(texts), (1, 1), MOST, slots, to_target)
    kept = torch.full((len(texts), slots), OLD, dtype=torch.int32, device=device)
    for row, text in enumerate(texts):
        kept[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
    lengths = torch.tensor([len(text) for text in texts])
    state.base.positions.copy_((lengths - 1).clamp(min=0))
    state.base.seq_lens.copy_(lengths)
    state.report.fill_(77)
    return kept, state


def guesses(
    ops: LookUpOps, texts: list[list[int]], device: torch.device, count: int = MOST, slots: int = 64
) -> list[list[int]]:
    kept, state = state_of(texts, slots, device)
    before = kept.clone()
    ops.look_up(kept, state, count)
    assert (state.report[1] == 77).all() and (state.report[0, 1 + count :] == 77).all(), "nothing else is written"
    assert (state.report[0, 0] == 77).all() and torch.equal(kept, before)
    found: list[list[int]] = state.report[0, 1 : 1 + count].t().tolist()
    return found


@pytest.mark.parametrize("alphabet", [2, 5, 40])
@pytest.mark.parametrize("count", [1, 3, MOST])
def test_the_kernel_proposes_what_the_reference_does(alphabet: int, count: int, device: torch.device) -> None:
    dice = random.Random(alphabet)
    texts = [[dice.randrange(alphabet) for _ in range(n)] for n in (1, 2, 3, 9, 40, 0, 63, 64)]
    assert guesses(LOOK_UPS, texts, device, count) == guesses(TORCH_LOOK_UPS, texts, device, count)


def test_a_text_may_be_longer_than_what_one_program_compares(device: torch.device) -> None:
    dice = random.Random(0)
    slots = 2 * CHUNK + 100
    texts = [[dice.randrange(2, 9) for _ in range(n)] for n in (CHUNK, CHUNK + 1, slots, 50)]
    phrase = [100, 101, 102, 103, 104]
    for text in texts[:3]:
        text[20:25], text[-4:] = phrase, phrase[:4]  # in the first program's part alone
    for _ in range(2):  # the counters are zeros again
        found = guesses(LOOK_UPS, texts, device, slots=slots)
        assert found == guesses(TORCH_LOOK_UPS, texts, device, slots=slots)
        assert [row[0] for row in found[:3]] == [104] * 3


@pytest.fixture(params=[TORCH_LOOK_UPS, LOOK_UPS], ids=["reference", "kernels"])
def ops(request: pytest.FixtureRequest) -> LookUpOps:
    found: LookUpOps = request.param
    return found


def test_of_all_places_the_longest_past_counts_and_then_the_latest(ops: LookUpOps, device: torch.device) -> None:
    longest = [8, 1, 2, 3, 30, 9, 1, 2, 3, 40, 8, 1, 2, 3]
    latest = [1, 2, 50, 1, 2, 60, 4, 1, 2]
    (first, second) = guesses(ops, [longest, latest], device, 2)
    assert (first, second) == ([30, 9], [60, 4])


def test_no_more_of_the_past_counts_than_is_looked_at(ops: LookUpOps, device: torch.device) -> None:
    past = list(range(10, 10 + MOST_COMMON))
    (found,) = guesses(ops, [[5, *past, 1, 6, *past, 2, 5, *past]], device, 1)
    assert found == [2], "the one before it has a token more in common, which nobody compares"


def test_a_copy_that_reaches_the_end_goes_on_and_a_text_without_likeness_repeats_its_token(
    ops: LookUpOps, device: torch.device
) -> None:
    found = guesses(ops, [[1, 2, 3] * 4, [5, 6, 7], [9], []], device, 5)
    assert found == [[1, 2, 3, 1, 2], [7] * 5, [9] * 5, [0] * 5]


@pytest.mark.parametrize("seed", range(3))
def test_a_past_as_long_as_that_of_the_hosts_index_is_found(seed: int, device: torch.device) -> None:
    """The index compares few places, but more tokens of each; where it finds the latest of the longest, both do."""
    dice, same = random.Random(seed), 0
    for _ in range(40):
        text = [dice.randrange(6) for _ in range(dice.randrange(4, 60))]
        index = NgramIndex(text)
        index.read()
        position, length = index.find()
        follow = follows(text)
        common = next((n for n in range(follow) if text[follow - 1 - n] != text[-1 - n]), follow)
        assert min(common, MOST_COMMON) >= min(length, MOST_COMMON)
        if position == follow:
            same += 1
            assert guesses(LOOK_UPS, [text], device) == [index.follow(position, MOST)]
    assert same > 10


@pytest.mark.parametrize("num_rows", [2, 4, 1 + MOST])
def test_a_text_goes_on_with_what_was_sampled_and_no_further_than_its_table(
    num_rows: int, ops: LookUpOps, device: torch.device
) -> None:
    kept, state = state_of([[5] * 6, [], [6] * 30], 32, device)
    expected = kept.clone()
    state.report[1] = torch.arange(3 * (1 + MOST)).view(1 + MOST, 3)
    state.report[1, 1, 0] = -1
    ops.remember(kept, state, num_rows)
    expected[0, 6 : 6 + num_rows] = state.report[1, :num_rows, 0]
    expected[0, 7] = 0  # what only the host can tell is a token as well, since it may become a guess
    expected[2, 30:] = state.report[1, :2, 2]
    assert torch.equal(kept, expected)
