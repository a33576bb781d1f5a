"""Laws of the tensor arithmetic under the sampler: the order of tokens, their weights, and draws from a short head."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_lab.sampling_draw import UNRESOLVED, WEIGHT_ONE, Filters, best_token, draw, first_ids, weights
from strata_lab.sampling_random import seed_keys, uniforms
from tests.sampling_reference import INF, random_logits


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_first_ids_are_those_of_a_stable_sort(data: st.DataObject) -> None:
    """Few distinct values, so that ties cross the edge of the head; sizes on both sides of whole blocks."""
    vocab_size, count = data.draw(st.integers(1, 400)), data.draw(st.integers(1, 6))
    seed, levels = data.draw(st.integers(0, 2**32)), data.draw(st.integers(1, 50))
    values = torch.randint(-levels, levels + 1, (3, vocab_size), generator=torch.Generator().manual_seed(seed)) / 2
    values[values == 0] *= torch.where(torch.rand(int((values == 0).sum())) < 0.5, -1.0, 1.0)  # both zeros
    count = min(count, vocab_size)
    expected = values.sort(dim=1, descending=True, stable=True).indices[:, :count]
    assert torch.equal(first_ids(values, count), expected)


def test_order_holds_over_the_whole_range_of_float32() -> None:
    tiny, large = torch.finfo(torch.float32).smallest_normal, torch.finfo(torch.float32).max
    values = torch.tensor([[-tiny, 0.0, tiny / 4, -INF, large, -0.0, 1.0, INF, -large, tiny, -1.0, -tiny / 4]])
    expected = values.sort(dim=1, descending=True, stable=True).indices
    assert first_ids(values, 12).tolist() == expected.tolist()


@pytest.mark.parametrize("vocab_size", [1, 31, 127, 128, 129, 1000, 49152])
def test_best_token_is_the_lowest_id_of_the_largest_logit(vocab_size: int) -> None:
    logits = random_logits(4, vocab_size).round()
    best, ids = best_token(logits)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert ids.tolist() == expected
    assert torch.equal(best, logits.amax(dim=1))


@pytest.mark.parametrize("vocab_size", [53, 1001])
def test_weights_do_not_depend_on_where_a_row_lies(vocab_size: int) -> None:
    logits = random_logits(9, vocab_size)
    best, slower = logits.amax(dim=1, keepdim=True), 1 / 0.7
    together = weights(logits, best, slower)
    for i in range(9):
        assert torch.equal(weights(logits[i : i + 1].clone(), best[i : i + 1], slower)[0], together[i])
        some = torch.randperm(vocab_size)[: 1 + 5 * i]
        assert torch.equal(weights(logits[i : i + 1, some], best[i : i + 1], slower)[0], together[i, some])


def test_best_token_weighs_one_and_the_rest_whole_parts() -> None:
    values = weights(torch.tensor([[2.0, 1.0, -40.0, -INF]]), torch.tensor([[2.0]]), 1.0)
    assert values.tolist() == [[WEIGHT_ONE, round(math.exp(-1) * WEIGHT_ONE), 0.0, 0.0]]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_short_head_gives_the_full_order_s_token_or_none(data: st.DataObject) -> None:
    vocab_size, seed = data.draw(st.integers(1, 600)), data.draw(st.integers(0, 2**32))
    logits = random_logits(6, vocab_size, seed, scale=data.draw(st.sampled_from([0.0, 0.5, 3.0])))
    logits = (logits * 4).round() / 4  # ties
    column = lambda numbers: torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)  # noqa: E731
    top_p = column(data.draw(st.lists(st.sampled_from([0.2, 0.9, 0.999, 1.0]), min_size=6, max_size=6)))
    min_p = column(data.draw(st.lists(st.sampled_from([0.0, 0.001, 0.5, 1.0]), min_size=6, max_size=6)))
    ranks = torch.tensor([[1], [min(5, vocab_size)], *[[vocab_size]] * 4])
    filters = Filters(column([1.0] * 6), ranks, top_p, min_p, all_top_k=False)
    uniform = torch.from_numpy(uniforms(seed_keys(range(6)), [seed] * 6))
    full = draw(logits, logits.amax(dim=1), filters, uniform, vocab_size)
    assert UNRESOLVED not in full.tolist()
    for head in (5, 8, 40):
        short = draw(logits, logits.amax(dim=1), filters, uniform, min(head, vocab_size))
        assert all(s in (UNRESOLVED, f) for s, f in zip(short.tolist(), full.tolist(), strict=True))
        assert UNRESOLVED not in short[:2].tolist()  # top_k within the head always suffices
