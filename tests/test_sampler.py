"""Laws of the sampler: agreement with a slow reference, independence of the batch, log probabilities, errors."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strata_lab import sampler as sampler_module
from strata_lab.request import Request
from strata_lab.sampler import NO_TOKEN, Sampler
from tests.sampling_reference import (
    FEATURES,
    GREEDY,
    INF,
    MIXED,
    mixed_requests,
    random_logits,
    reference_tokens,
    request,
)


def assert_agrees(logits: Tensor, requests: list[Request]) -> None:
    """Every row is what the reference says."""
    got = Sampler().sample(logits, requests)
    assert got.errors == [None] * len(requests)
    for row, (token, r) in enumerate(zip(got.token_ids, requests, strict=True)):
        assert token in reference_tokens(logits[row], r), (row, r.params)


@pytest.mark.parametrize("vocab_size", [1, 2, 50, 700])
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_agrees_with_the_float64_reference(feature: str, vocab_size: int) -> None:
    params = dict(FEATURES[feature])
    params["logit_bias"] = {k: v for k, v in params.get("logit_bias", {}).items() if k < vocab_size}
    rng = np.random.default_rng(vocab_size)
    requests = [
        request(seed, rng.integers(0, vocab_size, 6).tolist(), rng.integers(0, vocab_size, seed % 9).tolist(), **params)
        for seed in range(24)
    ]
    assert_agrees(random_logits(24, vocab_size), requests)


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_any_parameters_agree_with_the_reference(data: st.DataObject) -> None:
    vocab_size = data.draw(st.integers(1, 40))
    token = st.integers(0, vocab_size - 1)
    number = st.one_of(st.integers(-3, 3).map(float), st.floats(-30, 30, width=32), st.just(-INF))  # ties are likely
    rows, requests = [], []
    for i in range(data.draw(st.integers(1, 4))):
        row = data.draw(st.lists(number, min_size=vocab_size, max_size=vocab_size))
        row[data.draw(token)] = 1.0
        rows.append(row)
        params = data.draw(
            st.fixed_dictionaries(
                {
                    "temperature": st.sampled_from([0.0, 0.05, 0.5, 1.0, 3.0]),
                    "top_k": st.integers(0, 8),
                    "top_p": st.floats(0.01, 1.0),
                    "min_p": st.floats(0.0, 1.0),
                    "repetition_penalty": st.sampled_from([0.5, 1.0, 1.5]),
                    "presence_penalty": st.sampled_from([-1.0, 0.0, 1.0]),
                    "frequency_penalty": st.sampled_from([-0.5, 0.0, 0.25]),
                    "logit_bias": st.dictionaries(token, st.floats(-100, 100), max_size=3),
                }
            )
        )
        seed, prompt = data.draw(st.integers(0, 2**63 - 1)), data.draw(st.lists(token, min_size=1, max_size=5))
        requests.append(request(seed, prompt, data.draw(st.lists(token, max_size=5)), name=f"r{i}", **params))
    assert_agrees(torch.tensor(rows), requests)


def test_greedy_rows_in_a_mixed_batch_take_the_lowest_of_the_best() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0]] * 4)
    requests = [request(i, **params) for i, params in enumerate([GREEDY, {"top_p": 0.9}, GREEDY, {"logprobs": 1}])]
    tokens = Sampler().sample(logits, requests).token_ids
    assert (tokens[0], tokens[2]) == (1, 1)


@pytest.mark.parametrize("vocab_size", [53, 17001])
def test_tokens_and_logprobs_are_bitwise_the_same_in_any_batch(vocab_size: int) -> None:
    requests, logits = mixed_requests(vocab_size), random_logits(len(MIXED), vocab_size, scale=2.0)
    alone = [Sampler().sample(logits[i : i + 1], [r]) for i, r in enumerate(requests)]
    shared, rng = Sampler(), np.random.default_rng(0)
    for _ in range(12):
        batch = rng.permutation(len(requests))[: rng.integers(1, len(requests) + 1)].tolist()
        got = shared.sample(logits[batch], [requests[i] for i in batch])
        assert got.token_ids == [alone[i].token_ids[0] for i in batch]
        assert got.logprobs == [alone[i].logprobs[0] for i in batch]


def generate(r: Request, steps: int, sampler: Sampler, companions: list[Request], absent: set[int]) -> list[int]:
    """Tokens of `r` beside others; logits depend on its own tokens. It misses steps in `absent`, as if preempted."""
    step = 0
    while r.num_output_tokens < steps:
        present = step not in absent
        batch = companions[: step % 3] + ([r] if present else []) + companions[step % 3 :]
        rows = [random_logits(1, 80, seed=sum(x.token_ids) * 1000 + x.num_tokens)[0] for x in batch]
        for x, token in zip(batch, sampler.sample(torch.stack(rows), batch).token_ids, strict=True):
            x.append(token, 0.0)
        step += 1
    return r.output_token_ids


@pytest.mark.parametrize("feature", ["plain", "all filters", "greedy with everything", "everything"])
def test_preempted_request_resumes_with_identical_tokens(feature: str) -> None:
    params = FEATURES[feature]
    alone = generate(request(9, **params), 10, Sampler(), [], set())
    companions = [request(100 + i, **p) for i, p in enumerate([{}, GREEDY, {"presence_penalty": 1.0}])]
    assert generate(request(9, **params), 10, Sampler(), companions, {2, 3, 6}) == alone


def test_same_seed_same_tokens_other_seed_other_tokens() -> None:
    runs = [generate(request(seed), 12, Sampler(), [], set()) for seed in (4, 4, 5)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_a_request_id_used_again_starts_with_fresh_counts() -> None:
    sampler, logits = Sampler(), torch.tensor([[3.0, 2.0, 1.0]])
    params = {**GREEDY, "presence_penalty": 2.0}
    assert sampler.sample(logits, [request(prompt=[2], output=[0], name="a", **params)]).token_ids == [1]
    assert sampler.sample(logits, [request(prompt=[2], output=[], name="a", **params)]).token_ids == [0]


def test_counts_follow_tokens_appended_between_steps() -> None:
    """3.0 less 0.6 per occurrence: token 0 twice (3.0, 2.4 against 2.2), then 1 (1.8 against 2.2), then 0 again."""
    sampler, logits = Sampler(), torch.tensor([[3.0, 2.2, -9.0]])
    r = request(prompt=[2], **GREEDY, frequency_penalty=0.6)
    for _ in range(4):
        r.append(sampler.sample(logits, [r]).token_ids[0], 0.0)
    assert r.output_token_ids == [0, 0, 1, 0]


@pytest.mark.parametrize("params", [{}, {"top_p": 0.99, "logprobs": 2}, {"min_p": 0.001}, {"temperature": 50.0}])
def test_draws_outside_of_the_head_are_the_full_order_s(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = random_logits(20, 900, scale=1.0)
    requests = [request(seed, **(params if seed % 2 else {**params, "top_k": 3})) for seed in range(20)]
    whole = Sampler().sample(logits, requests)
    monkeypatch.setattr(sampler_module, "HEAD", 2)
    assert Sampler().sample(logits, requests) == whole


def test_real_vocabulary_draws_agree_with_the_full_order(record_property: Callable[[str, object], None]) -> None:
    """Median microseconds at batch 1 are recorded in the test report, not asserted: the machine may be shared."""
    logits = random_logits(1, 49152)
    for name, params in {"greedy": GREEDY, "top_p": {"top_p": 0.9, "temperature": 0.7}, "plain": {}}.items():
        requests, sampler, times = [request(3, **params)], Sampler(), []
        for _ in range(20):
            start = time.perf_counter()
            tokens = sampler.sample(logits, requests).token_ids
            times.append(time.perf_counter() - start)
        record_property(f"{name}_batch1_us", round(sorted(times)[10] * 1e6, 1))
        assert set(tokens) <= reference_tokens(logits[0], requests[0])


def test_logprobs_are_of_the_raw_distribution_whatever_the_filters() -> None:
    logits = random_logits(3, 200)
    params = {"temperature": 0.2, "top_k": 3, "repetition_penalty": 2.0, "logit_bias": {5: 50.0}, "logprobs": 4}
    got = Sampler().sample(logits, [request(i, **params) for i in range(3)])
    raw = torch.log_softmax(logits.double(), dim=1)
    for row, entry in enumerate(got.logprobs):
        assert entry is not None
        assert entry.token_id == got.token_ids[row] == 5
        assert entry.logprob == pytest.approx(raw[row, 5].item(), abs=1e-8)
        top = raw[row].topk(4)
        assert list(entry.top) == top.indices.tolist()
        assert list(entry.top.values()) == pytest.approx(top.values.tolist(), abs=1e-8)


def test_each_row_returns_as_many_logprobs_as_it_asked_for() -> None:
    logits = random_logits(5, 12)
    wanted = [None, 0, 2, 20, None]
    got = Sampler().sample(logits, [request(i, **GREEDY, logprobs=n) for i, n in enumerate(wanted)]).logprobs
    assert [None if entry is None else len(entry.top) for entry in got] == [None, 0, 2, 12, None]
    assert got[3] is not None
    assert sum(map(math.exp, got[3].top.values())) == pytest.approx(1, abs=1e-8)


def test_equal_logits_list_lower_ids_first_in_logprobs() -> None:
    entry = Sampler().sample(torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0]]), [request(**GREEDY, logprobs=4)]).logprobs[0]
    assert entry is not None
    assert list(entry.top) == [1, 2, 4, 0]


@pytest.mark.parametrize("params", [GREEDY, {}, {"top_k": 3}, {"top_p": 0.9, "logprobs": 2}, {"presence_penalty": 1.0}])
def test_a_row_without_a_largest_logit_fails_alone(params: dict[str, Any]) -> None:
    logits = random_logits(4, 300)
    clean = Sampler().sample(logits, [request(i, **params) for i in range(4)])
    logits[1, 250] = math.nan
    logits[3] = -INF
    got = Sampler().sample(logits, [request(i, **params) for i in range(4)])
    assert [got.token_ids[i] for i in (0, 2)] == [clean.token_ids[i] for i in (0, 2)]
    assert [got.logprobs[i] for i in (0, 2)] == [clean.logprobs[i] for i in (0, 2)]
    assert (got.token_ids[1], got.token_ids[3]) == (NO_TOKEN, NO_TOKEN)
    assert (got.logprobs[1], got.logprobs[3]) == (None, None)
    nan, empty = got.errors[1], got.errors[3]
    assert nan is not None
    assert "NaN for 1 of 300 logits" in nan
    assert empty is not None
    assert "every logit is -inf" in empty
    assert got.errors[0] is got.errors[2] is None


def test_bias_on_an_id_outside_of_the_vocabulary_fails_alone() -> None:
    logits = random_logits(2, 10)
    got = Sampler().sample(logits, [request(0, logit_bias={10: 1.0}), request(1, **GREEDY)])
    assert got.token_ids == [NO_TOKEN, int(logits[1].argmax())]
    assert got.errors == ["logit_bias token id 10 must be below the vocabulary's size, 10; try 0", None]


@pytest.mark.parametrize("params", [{"logit_bias": {0: 9.0}, "repetition_penalty": 2.0}, {"min_p": 0.1}, GREEDY])
def test_logits_are_left_as_they_are(params: dict[str, Any]) -> None:
    logits = random_logits(2, 64)
    logits[1, 3] = -0.0
    before = logits.clone()
    Sampler().sample(logits, [request(i, **params) for i in range(2)])
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))


def test_an_empty_batch_has_no_tokens() -> None:
    got = Sampler().sample(torch.empty(0, 10), [])
    assert (got.token_ids, got.logprobs, got.errors) == ([], [], [])
