"""The two ends of a cycle of drafting and verifying: the kernels do what the reference does, for any request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from strata_lab.kernels.gpu import follow_rows as gpu_follow_rows
from strata_lab.kernels.gpu.decode_state import DecodeState
from strata_lab.kernels.gpu.sampling import sample_drawn, sample_greedy
from strata_lab.kernels.gpu.window_state import WINDOWS
from strata_lab.speculative import follow_rows
from strata_lab.speculative.follow_rows import FollowRows
from strata_lab.speculative.window_state import PARAMETERS, TORCH_WINDOWS, WindowOps, WindowState

SIZE, MOST, VOCAB = 4, 5, 60


class States:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def state(self, num_seqs: int, table_width: int, steps: int) -> DecodeState:
        return DecodeState.empty(num_seqs, table_width, steps, SIZE, VOCAB, self.device)


def make(seed: int, num_seqs: int, device: torch.device) -> WindowState:
    """Requests anywhere in their tables, some about to be full, some padding; tokens of which most come true."""
    generator = torch.Generator().manual_seed(seed)

    def dice(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    states = States(device)
    state = WindowState.empty(states, states, num_seqs, (6, 5), MOST, SIZE, torch.arange(VOCAB, device=device))
    state.base.block_tables.copy_(torch.randperm(6 * num_seqs, generator=generator).view(num_seqs, 6))
    state.drafts.block_tables.copy_(torch.randperm(5 * num_seqs, generator=generator).view(num_seqs, 5))
    positions = dice(1, 24, num_seqs)
    state.base.positions.copy_(positions)
    state.base.seq_lens.copy_(torch.where(dice(0, 4, num_seqs) > 0, positions + 1, 0))
    state.base.max_seq_lens.copy_(positions + dice(1, 9, num_seqs))
    state.drafts.max_seq_lens.copy_(positions + dice(0, 9, num_seqs))
    state.base.output_positions.copy_(dice(0, 99, num_seqs))
    for tensor in (state.base.input_ids, state.previous_ids):
        tensor.copy_(dice(0, VOCAB, num_seqs))
    state.report.copy_(dice(0, VOCAB, 2, 1 + MOST, num_seqs))
    state.report[1, :-1] = torch.where(dice(0, 4, MOST, num_seqs).to(device) > 0, state.report[0, 1:], -1)
    state.spread()
    return state


def tensors(state: Any) -> dict[str, Tensor]:
    found = {f.name: getattr(state, f.name) for f in fields(state)}
    return {name: value.clone() for name, value in found.items() if isinstance(value, Tensor)}


def everything(state: WindowState, window: DecodeState) -> dict[str, Tensor]:
    parts = {"base": state.base, "pairs": state.pairs, "drafts": state.drafts, "window": window, "all": state}
    return {f"{part}.{name}": value for part, holder in parts.items() for name, value in tensors(holder).items()}


@pytest.mark.parametrize("end", ["open", "close"])
@pytest.mark.parametrize("num_drafts", [1, 3, MOST])
def test_both_ends_are_those_of_the_reference(end: str, num_drafts: int, device: torch.device) -> None:
    for seed in range(6):
        results = []
        for ops in (TORCH_WINDOWS, WINDOWS):
            state = make(seed, 1 + seed, device)
            window = state.window(States(device), num_drafts)
            before = everything(state, window)
            getattr(ops, end)(state, window)
            results.append(everything(state, window))
        for name, expected in results[0].items():
            assert torch.equal(expected, results[1][name]), name
        assert any(not torch.equal(value, before[name]) for name, value in results[1].items()), "it did something"


@pytest.mark.parametrize("num_drafts", [1, 3, MOST])
def test_rows_that_follow_a_window_are_those_of_the_reference(num_drafts: int, device: torch.device) -> None:
    slots = set()
    for seed in range(6):
        found = []
        for place in (follow_rows.place_rows, gpu_follow_rows.place_rows):
            state = make(seed, 1 + seed, device)
            window = state.window(States(device), num_drafts)
            rows = FollowRows.empty(state, torch.zeros(1 + seed, 8, device=device)).first(window.input_ids.shape[0])
            place(state, window, rows)
            found.append(tensors(rows))
        for name, expected in found[0].items():
            assert torch.equal(expected, found[1][name]), name
        slots |= set(found[0]["slot_mapping"].tolist())
    assert slots > {-1}


def test_what_follows_a_window_is_what_a_request_keeps(device: torch.device) -> None:
    """Each kept token at its own position in the draft's pool, and the row behind the last of them."""
    state = make(0, 1, device)
    state.base.positions.fill_(6)
    state.base.seq_lens.fill_(7)
    state.base.max_seq_lens.fill_(99)
    state.drafts.max_seq_lens.fill_(99)
    state.report[0, :, 0] = torch.tensor([40, 41, 42, 43, 50, 51])
    state.report[1, :, 0] = torch.tensor([41, 42, 30, 44, 52, 53])
    window = state.window(States(device), 3)
    rows = FollowRows.empty(state, torch.zeros(1, 8, device=device)).first(4)
    gpu_follow_rows.place_rows(state, window, rows)
    assert rows.input_ids.tolist() == [41, 42, 30, 0]
    assert rows.positions.tolist() == [7, 8, 9, 0]
    assert rows.seq_lens.tolist() == [8, 9, 10, 0]
    table = state.drafts.block_tables[0].tolist()
    assert rows.slot_mapping.tolist() == [table[p // SIZE] * SIZE + p % SIZE for p in (7, 8, 9)] + [-1]
    assert rows.kept.tolist() == [2]


@pytest.fixture(params=[TORCH_WINDOWS, WINDOWS], ids=["reference", "kernels"])
def ops(request: pytest.FixtureRequest) -> WindowOps:
    return request.param


def test_rows_see_what_lies_before_them_and_none_beyond_the_end(ops: WindowOps, device: torch.device) -> None:
    state = make(0, 2, device)
    state.base.positions.copy_(torch.tensor([6, 9]))
    state.base.seq_lens.copy_(torch.tensor([7, 10]))
    state.base.max_seq_lens.copy_(torch.tensor([99, 11]))
    state.drafts.max_seq_lens.fill_(99)
    window = state.window(States(device), 3)
    ops.open(state, window)
    tables = state.base.block_tables.tolist()
    slots = [[tables[0][p // SIZE] * SIZE + p % SIZE for p in (6, 7, 8, 9)],
             [tables[1][p // SIZE] * SIZE + p % SIZE for p in (9, 10)] + [-1, -1]]  # fmt: skip
    assert window.slot_mapping.view(4, 2).t().tolist() == slots
    assert window.seq_lens.view(4, 2).t().tolist() == [[7, 8, 9, 10], [10, 11, 0, 0]]
    assert (state.pairs.positions - 1).tolist() == [4, 7, 5, 8]
    assert state.pairs.input_ids.tolist() == [*state.previous_ids.tolist(), *state.base.input_ids.tolist()]
    assert state.report[0, 0].tolist() == state.base.input_ids.tolist()
    before = state.base.output_positions
    assert window.output_positions.view(4, 2).tolist() == [(before + j).tolist() for j in range(4)]


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_a_request_goes_on_behind_the_first_token_that_differs(
    accepted: int, ops: WindowOps, device: torch.device
) -> None:
    state = make(1, 1, device)
    state.base.positions.fill_(7)
    state.base.seq_lens.fill_(8)
    state.base.max_seq_lens.fill_(99)
    output = int(state.base.output_positions)
    state.report[0, :, 0] = torch.tensor([40, 41, 42, 43, 50, 51])
    state.report[1, :, 0] = torch.tensor([41, 42, 43, 44, 52, 53])
    state.base.input_ids.fill_(40)
    state.report[1, accepted, 0] = 30
    ops.close(state, state.window(States(device), 3))
    assert state.base.input_ids.tolist() == [30]
    assert state.previous_ids.tolist() == [40 + accepted]
    assert state.base.positions.tolist() == [8 + accepted]
    assert state.base.seq_lens.tolist() == [9 + accepted]
    assert state.base.output_positions.tolist() == [output + 1 + accepted]


def test_nothing_is_kept_beyond_the_end_and_the_row_pads_from_there(ops: WindowOps, device: torch.device) -> None:
    state = make(1, 1, device)
    state.base.positions.fill_(7)
    state.base.seq_lens.fill_(8)
    state.base.max_seq_lens.fill_(9)
    state.report[1, :-1] = state.report[0, 1:].clone()
    ops.close(state, state.window(States(device), 5))
    assert state.base.input_ids.tolist() == [int(state.report[1, 1, 0])], "two slots, two tokens"
    assert state.base.seq_lens.tolist() == [0]


def test_parameters_and_tables_reach_every_row(device: torch.device) -> None:
    state = make(2, 3, device)
    for name in PARAMETERS:
        getattr(state.base, name).copy_(torch.tensor([1, 2, 3]))
    state.spread()
    window = state.window(States(device), 4)
    for name in PARAMETERS:
        assert getattr(window, name).tolist() == [1, 2, 3] * 5, name
        assert getattr(state.drafts, name).tolist() == [1, 2, 3], name
    assert window.block_tables.tolist() == state.base.block_tables.tolist() * 5
    assert state.pairs.block_tables.tolist() == state.drafts.block_tables.tolist() * 2


@pytest.mark.parametrize("sample", [sample_greedy, sample_drawn])
def test_a_guess_is_the_targets_token_and_never_negative(sample: Callable[..., None], device: torch.device) -> None:
    state = States(device).state(2, 3, 1)
    state.seq_lens.fill_(1)
    state.to_target = torch.arange(VOCAB, device=device) * 3 + 7
    logits = torch.zeros(2, VOCAB, device=device)
    logits[0, 20] = 9.0
    logits[1] = float("nan")
    sample(logits, state, 0)
    assert state.out_tokens.tolist() == [[67, 7]]
    assert state.input_ids.tolist() == [67, 7]
