"""Laws of what is drawn: exact cuts of the filters, frequencies, and the random numbers behind them."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strata_lab.request import Request
from strata_lab.sampler import Sampler
from strata_lab.sampling_params import SamplingParams
from strata_lab.sampling_random import seed_keys, splitmix64, uniforms
from tests.sampling_reference import GREEDY, INF, random_logits, reference_uniform, request


def drawn_tokens(logits: list[float], count: int = 3000, **params: Any) -> Counter[int]:
    """How often each token comes from `count` seeds."""
    shared = SamplingParams(**params)
    requests = [Request(request_id="", prompt_token_ids=[1], params=shared, seed=seed) for seed in range(count)]
    return Counter(Sampler().sample(torch.tensor([logits] * count), requests).token_ids)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_p": 0.5}, {0, 1}),  # two of four equal tokens reach 0.5 exactly
        ({"top_p": 0.5000001}, {0, 1, 2}),
        ({"top_p": 0.75}, {0, 1, 2}),
        ({"top_p": 1e-9}, {0}),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"min_p": 1.0}, {0, 1, 2, 3}),  # all are as likely as the best
        ({"top_k": 2, "top_p": 0.5}, {0}),  # top_p is a share of what top_k left
        ({"temperature": 100.0, "top_k": 2}, {0, 1}),
    ],
)
def test_filters_cut_equal_tokens_exactly_and_keep_lower_ids(params: dict[str, Any], kept: set[int]) -> None:
    assert set(drawn_tokens([2.0] * 4, **params)) == kept


def test_top_p_takes_the_fewest_tokens_that_reach_it() -> None:
    """Probabilities 1/2, 1/4, 1/8, 1/8: 0.75 is reached by two, a little more needs three."""
    logits = [math.log(8), math.log(2), math.log(2), math.log(4)]
    assert set(drawn_tokens(logits, top_p=0.7499)) == {0, 3}
    assert set(drawn_tokens(logits, top_p=0.7501)) == {0, 1, 3}


@pytest.mark.parametrize("params", [{"top_p": 1e-12}, {"min_p": 1.0}, {"top_k": 1}, {"temperature": 5e-324}])
def test_the_strictest_filters_leave_the_best_token(params: dict[str, Any]) -> None:
    logits = random_logits(8, 300)
    tokens = Sampler().sample(logits, [request(i, **params) for i in range(8)]).token_ids
    assert tokens == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.6}, {"temperature": 2.5}, {"top_k": 4}, {"top_p": 0.85}, {"min_p": 0.15},
     {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.1}],
)  # fmt: skip
def test_frequencies_follow_the_filtered_distribution(params: dict[str, Any]) -> None:
    """Chi-square over 20,000 fixed seeds; the bound is passed by chance once in 10^6 (Wilson-Hilferty, z = 4.75)."""
    logits = [1.0, 0.2, -0.5, 2.0, 0.0, -3.0, 1.2, 0.8]
    p, count = SamplingParams(**params), 20_000
    order = sorted(range(8), key=lambda token: -logits[token])
    likely = np.exp([logits[token] / p.temperature for token in order])[: p.top_k or 8]
    below = np.concatenate([[0.0], np.cumsum(likely)[:-1]]) / likely.sum()
    likely = likely[(below < p.top_p) & (likely >= p.min_p * likely[0])]
    expected = count * likely / likely.sum()
    observed = drawn_tokens(logits, count, **params)
    assert set(observed) == set(order[: len(likely)])
    statistic = sum((observed[t] - e) ** 2 / e for t, e in zip(order, expected, strict=False))
    degrees = len(likely) - 1
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 4.75 * math.sqrt(2 / (9 * degrees))) ** 3


def test_infinite_logits_share_all_the_probability() -> None:
    logits = [0.0, INF, 5.0, INF, -INF]
    drawn = drawn_tokens(logits, 1000)
    assert set(drawn) == {1, 3}
    assert abs(drawn[1] - 500) < 5 * math.sqrt(250)
    got = Sampler().sample(torch.tensor([logits] * 2), [request(1, logprobs=1), request(2, **GREEDY, logprobs=5)])
    assert got.token_ids[1] == 1
    assert got.logprobs[1] is not None
    assert got.logprobs[1].logprob == pytest.approx(-math.log(2))
    assert got.logprobs[1].top[2] < -1e30


def test_tokens_at_minus_infinity_are_never_drawn() -> None:
    assert set(drawn_tokens([-INF, 0.0, -INF, 0.0], temperature=100.0)) == {1, 3}


def test_splitmix64_gives_the_published_sequence() -> None:
    """First outputs for seed 1234567 of the public-domain C implementation."""
    counters = np.array([(1234567 + k * 0x9E3779B97F4A7C15) % 2**64 for k in range(1, 6)], dtype=np.uint64)
    assert splitmix64(counters).tolist() == [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**40))
def test_uniforms_agree_with_unbounded_integers(seed: int, position: int) -> None:
    value = uniforms(seed_keys([seed]), [position])[0]
    assert value == reference_uniform(seed, position)
    assert 0 <= value < 1


@pytest.mark.parametrize("vary", ["seeds", "positions"])
def test_uniforms_are_even_and_neighbours_unrelated(vary: str) -> None:
    """40,000 numbers: bounds are five standard deviations of the mean, of 64 bins' counts and of the correlation."""
    n = 40_000
    values = uniforms(seed_keys(range(n)), [3] * n) if vary == "seeds" else uniforms(seed_keys([7] * n), range(n))
    assert abs(values.mean() - 0.5) < 5 / math.sqrt(12 * n)
    counts = np.bincount((values * 64).astype(int), minlength=64)
    assert abs(counts - n / 64).max() < 5 * math.sqrt(n / 64)
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 5 / math.sqrt(n)
