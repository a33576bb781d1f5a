"""Laws of sampling: agreement with a slow float64 reference, exact boundaries, distributions, independence of the batch."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strata_lab import sampler as sampler_module
from strata_lab.request import Request, SamplingParams
from strata_lab.sampler import NO_TOKEN, Sampler
from strata_lab.sampling_draw import UNRESOLVED, WEIGHT_ONE, Filters, best_token, draw, first_ids, weights
from strata_lab.sampling_random import seed_keys, splitmix64, uniforms

INF = math.inf
GREEDY = {"temperature": 0.0}


def request(
    seed: int = 0, prompt: Sequence[int] = (1, 2, 2), output: Sequence[int] = (), name: str = "", **params: Any
) -> Request:
    """A request that has generated `output`."""
    made = Request(
        request_id=name or f"r{seed}", prompt_token_ids=list(prompt), params=SamplingParams(**params), seed=seed
    )
    made.token_ids += output
    return made


def random_logits(rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


# --- the reference: python numbers, one token at a time -------------------------------------------------------------


def reference_uniform(seed: int, position: int) -> float:
    """The uniform of a seed and position, in unbounded integers."""
    mask, increment = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    key = mix((seed + increment) & mask)
    return (mix((key + (position + 1) * increment) & mask) >> 11) / 2**53


def reference_edits(logits: Tensor, r: Request) -> list[float]:
    """Bias, then repetition, then presence and frequency penalties, in float64, rounded to float32 where edited."""
    p, output = r.params, Counter(r.output_token_ids)
    edited = logits.tolist()
    for token in range(len(edited)):
        value = edited[token] + p.logit_bias.get(token, 0.0)
        if token in r.token_ids:
            value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        value -= p.presence_penalty * (output[token] > 0) + p.frequency_penalty * output[token]
        edited[token] = float(np.float32(value))
    return edited


def reference_tokens(logits: Tensor, r: Request) -> set[int]:
    """The tokens that may be drawn; more than one only where a boundary is closer than 1e-8."""
    p, values = r.params, reference_edits(logits, r)
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    best = values[order[0]]
    if p.temperature == 0:
        return {order[0]}
    if best == INF:
        likely = [1.0 if values[token] == INF else 0.0 for token in order]
    else:
        likely = [math.exp((values[token] - best) / p.temperature) for token in order]
    likely = likely[: p.top_k or None]
    cumulative = np.cumsum(likely)
    allowed = set()
    for tolerance in (-1e-8, 0.0, 1e-8):
        by_top_p = len(likely) if p.top_p == 1 else int((cumulative < (p.top_p + tolerance) * cumulative[-1]).sum()) + 1
        by_min_p = sum(x >= p.min_p + tolerance for x in likely)
        kept = max(1, min(by_top_p, by_min_p, len(likely)))
        target = reference_uniform(r.seed, r.num_output_tokens) * cumulative[kept - 1]
        for shift in (-1e-8, 0.0, 1e-8):
            index = int((cumulative[:kept] <= target + shift).sum())
            allowed.add(order[min(index, kept - 1)])
    return allowed


def assert_agrees(logits: Tensor, requests: list[Request]) -> None:
    """Every row is what the reference says."""
    got = Sampler().sample(logits, requests)
    assert got.errors == [None] * len(requests)
    for row, (token, r) in enumerate(zip(got.token_ids, requests, strict=True)):
        assert token in reference_tokens(logits[row], r), (row, r.params)


FEATURES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 7.5},
    "top_k": {"top_k": 5},
    "top_k above the vocabulary": {"top_k": 10_000},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all filters": {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.7},
    "bias": {"logit_bias": {3: 4.5, 7: -100.0, 2: 1.25}},
    "greedy with everything": {
        **GREEDY,
        "logit_bias": {0: 6.0, 5: 6.0},
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.9,
    },
    "everything": {
        "temperature": 0.8,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.01,
        "logit_bias": {11: 3.0, 1: -2.0},
        "repetition_penalty": 0.7,
        "presence_penalty": -1.0,
        "frequency_penalty": 0.3,
    },
}


@pytest.mark.parametrize("vocab_size", [1, 2, 50, 700])
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_agrees_with_the_float64_reference(feature: str, vocab_size: int) -> None:
    params = dict(FEATURES[feature])
    params["logit_bias"] = {k: v for k, v in params.get("logit_bias", {}).items() if k < vocab_size}
    rng = np.random.default_rng(vocab_size)
    requests = [
        request(seed, prompt=rng.integers(0, vocab_size, 6), output=rng.integers(0, vocab_size, seed % 9), **params)
        for seed in range(24)
    ]
    assert_agrees(random_logits(24, vocab_size), requests)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
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


# --- order and boundaries --------------------------------------------------------------------------------------------


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


def test_greedy_rows_in_a_mixed_batch_take_the_lowest_of_the_best() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0]] * 4)
    requests = [request(i, **params) for i, params in enumerate([GREEDY, {"top_p": 0.9}, GREEDY, {"logprobs": 1}])]
    tokens = Sampler().sample(logits, requests).token_ids
    assert (tokens[0], tokens[2]) == (1, 1)


def drawn_tokens(logits: list[float], count: int = 3000, **params: Any) -> Counter[int]:
    """How often each token comes from `count` seeds."""
    requests = [request(seed, **params) for seed in range(count)]
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


# --- distributions ---------------------------------------------------------------------------------------------------


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


# --- independence of everything else ---------------------------------------------------------------------------------

MIXED = [*FEATURES.values(), {"logprobs": 3}, {**GREEDY, "logprobs": 0}, {"top_p": 0.5, "logprobs": 20, "top_k": 7}]


def mixed_requests(vocab_size: int) -> list[Request]:
    rng = np.random.default_rng(5)
    return [
        request(i, rng.integers(0, vocab_size, 4).tolist(), rng.integers(0, vocab_size, i % 4).tolist(), **params)
        for i, params in enumerate(MIXED)
    ]


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


@pytest.mark.parametrize("vocab_size", [53, 1001])
def test_weights_do_not_depend_on_where_a_row_lies(vocab_size: int) -> None:
    logits = random_logits(9, vocab_size)
    best, slower = logits.amax(dim=1, keepdim=True), 1 / 0.7
    together = weights(logits, best, slower)
    for i in range(9):
        assert torch.equal(weights(logits[i : i + 1].clone(), best[i : i + 1], slower)[0], together[i])
        some = torch.randperm(vocab_size)[: 1 + 5 * i]
        assert torch.equal(weights(logits[i : i + 1, some], best[i : i + 1], slower)[0], together[i, some])


def generate(r: Request, steps: int, sampler: Sampler, companions: list[Request], absent: set[int]) -> list[int]:
    """Tokens of `r` beside others; logits depend on its own tokens. It misses the steps in `absent`, as if preempted."""
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


# --- the head is only a short cut ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("params", [{}, {"top_p": 0.99, "logprobs": 2}, {"min_p": 0.001}, {"temperature": 50.0}])
def test_draws_outside_of_the_head_are_the_full_order_s(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = random_logits(20, 900, scale=1.0)
    requests = [request(seed, **(params if seed % 2 else {**params, "top_k": 3})) for seed in range(20)]
    whole = Sampler().sample(logits, requests)
    monkeypatch.setattr(sampler_module, "HEAD", 2)
    assert Sampler().sample(logits, requests) == whole


def test_real_vocabulary_draws_agree_with_the_full_order(record_property: pytest.RecordProperty) -> None:  # type: ignore[name-defined]
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


# --- log probabilities -----------------------------------------------------------------------------------------------


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


# --- errors and infinities -------------------------------------------------------------------------------------------


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


def test_best_token_weighs_one_and_the_rest_whole_parts() -> None:
    values = weights(torch.tensor([[2.0, 1.0, -40.0, -INF]]), torch.tensor([[2.0]]), 1.0)
    assert values.tolist() == [[WEIGHT_ONE, round(math.exp(-1) * WEIGHT_ONE), 0.0, 0.0]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("vocab_size", [53, 49152])
def test_cuda_gives_the_cpus_tokens_in_any_batch(vocab_size: int) -> None:
    requests, logits = mixed_requests(vocab_size), random_logits(len(MIXED), vocab_size, scale=2.0)
    logits[2, vocab_size // 2 :] = logits[2, : vocab_size - vocab_size // 2].clone()  # ties
    expected = Sampler().sample(logits, requests)
    shared, on_device, rng = Sampler(), logits.cuda(), np.random.default_rng(0)
    assert shared.sample(on_device, requests).token_ids == expected.token_ids
    alone = [Sampler().sample(on_device[i : i + 1], [r]) for i, r in enumerate(requests)]
    for _ in range(10):
        batch = rng.permutation(len(requests))[: rng.integers(1, len(requests) + 1)].tolist()
        got = shared.sample(on_device[batch], [requests[i] for i in batch])
        assert got.token_ids == [expected.token_ids[i] for i in batch]
        assert got.logprobs == [alone[i].logprobs[0] for i in batch]
