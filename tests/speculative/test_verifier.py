"""Verifying a window gives the tokens that one step after the other would have given, whatever the drafts are."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from strata_lab.batch import ScheduledRequest
from strata_lab.request import Request
from strata_lab.sampler import Sampler
from strata_lab.sampling_params import SamplingParams
from strata_lab.speculative.verifier import sample_items

VOCAB = 24
PARAMS = {
    "greedy": SamplingParams(temperature=0),
    "drawn": SamplingParams(temperature=1.0),
    "filtered": SamplingParams(temperature=0.7, top_p=0.8, top_k=9, min_p=0.02),
    "penalties": SamplingParams(temperature=1.0, repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.9),
    "greedy-penalties": SamplingParams(temperature=0, repetition_penalty=1.4, frequency_penalty=1.5),
    "bias": SamplingParams(temperature=1.0, logit_bias={3: 4.0, 5: -100.0}, logprobs=3),
    "logprobs": SamplingParams(temperature=0, logprobs=2),
    "banned": SamplingParams(temperature=1.0, min_tokens=5),
}


def model(tokens: list[int]) -> torch.Tensor:
    """Logits that depend on the whole text."""
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(hash(tuple(tokens)) % 2**31)) * 2


def make(name: str, params: SamplingParams, seed: int) -> Request:
    request = Request(name, [1, 2, 3, seed % VOCAB], params, seed=seed)
    request.append(4, 0.0)
    if params.min_tokens:
        request.stop_ids, request.bad_words = frozenset(range(12)), ((13,), (14, 15), (16, 17, 18))
    return request


def one_by_one(request: Request, count: int) -> tuple[list[int], list]:
    sampler, tokens, logprobs = Sampler(), [], []
    for _ in range(count):
        sampled = sampler.sample(model(request.token_ids).unsqueeze(0), [request])
        request.append(sampled.token_ids[0], 0.0)
        tokens.append(sampled.token_ids[0])
        logprobs.append(sampled.logprobs[0])
    return tokens, logprobs


def window(request: Request, drafts: list[int]) -> ScheduledRequest:
    item = ScheduledRequest(request, request.num_tokens - 1, 1, [0])
    item.drafts = drafts
    item.num_tokens += len(drafts)
    return item


def logits_of(items: list[ScheduledRequest]) -> torch.Tensor:
    return torch.stack([model([*i.request.token_ids, *i.drafts[:j]]) for i in items for j in range(i.num_rows)])


@pytest.mark.parametrize("name", PARAMS)
def test_windows_give_the_tokens_and_logprobs_of_single_steps(name: str) -> None:
    rng, sampler = random.Random(name), Sampler()
    for seed in range(6):
        expected, logprobs = one_by_one(make("r", PARAMS[name], seed), 12)
        request, got, got_logprobs, sizes = make("r", PARAMS[name], seed), [], [], set()
        while len(got) < 12:
            k = rng.randrange(5)
            drafts = [t if rng.random() < 0.7 else rng.randrange(VOCAB) for t in expected[len(got) : len(got) + k]]
            item = window(request, drafts)
            sampled = sample_items(sampler, logits_of([item]), [item])
            if sampled.counts is not None:
                assert sampled.counts == [len(sampled.token_ids)]
            sizes.add(len(sampled.token_ids))
            for token_id in sampled.token_ids:
                request.append(token_id, 0.0)
            got += sampled.token_ids
            got_logprobs += sampled.logprobs
        assert got[:12] == expected
        assert got_logprobs[:12] == logprobs
        assert max(sizes) > 1, "no draft was ever accepted: the test shows nothing"


def test_windows_of_different_length_share_a_batch_with_plain_decodes() -> None:
    names = list(PARAMS)
    expected = [one_by_one(make(n, PARAMS[n], 7), 4)[0] for n in names]
    requests = [make(n, PARAMS[n], 7) for n in names]
    items = [window(r, e[: i % 4]) for i, (r, e) in enumerate(zip(requests, expected, strict=True))]
    items[2].drafts = [(expected[2][0] + 1) % VOCAB, expected[2][1]]  # wrong, then what would have been right
    sampled = sample_items(Sampler(), logits_of(items), items)
    assert sampled.counts == [1, 2, 1, 4, 1, 2, 3, 4]
    first = 0
    for e, count in zip(expected, sampled.counts, strict=True):
        assert sampled.token_ids[first : first + count] == e[:count]
        first += count


def test_an_error_behind_a_wrong_draft_is_nobodys() -> None:
    request = make("r", SamplingParams(temperature=0), 1)
    token = int(model(request.token_ids).argmax())
    for draft, errors in ((token, [False, True]), ((token + 1) % VOCAB, [False])):
        item = window(request, [draft])
        logits = logits_of([item])
        logits[1] = float("nan")
        sampled = sample_items(Sampler(), logits, [item])
        assert [e is not None for e in sampled.errors] == errors


def test_drafts_do_not_change_the_distribution() -> None:
    """Chi-square of token pairs over seeds against the model's own probabilities, with drafts of one fixed guess."""
    seeds, vocab = 4000, 5
    first = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05])
    then = torch.stack([first.roll(i) for i in range(vocab)])  # depends on the token before
    params, guess = SamplingParams(temperature=1.0), 0
    requests = [Request(f"r{s}", [1], params, seed=s) for s in range(seeds)]
    items = []
    for request in requests:
        item = ScheduledRequest(request, 0, 1, [0])
        item.drafts = [guess]
        items.append(item)
    logits = torch.stack([first.log(), then[guess].log()]).repeat(seeds, 1)
    sampled = sample_items(Sampler(), logits, items)
    second = sample_items(Sampler(), logits, items)
    assert sampled.token_ids == second.token_ids
    counts, place = np.zeros((vocab, vocab)), 0
    for request, count in zip(requests, sampled.counts, strict=True):
        tokens = sampled.token_ids[place : place + count]
        place += count
        request.append(tokens[0], 0.0)
        if count == 1:  # the draft was wrong: the second token comes from a step of its own
            tokens = [*tokens, *Sampler().sample(then[tokens[0]].log().unsqueeze(0), [request]).token_ids]
        counts[tokens[0], tokens[1]] += 1
    expected = (first.unsqueeze(1) * then).numpy() * seeds
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 51.2  # 24 degrees of freedom: exceeded once in 1,000
    assert 0.46 < sum(c == 2 for c in sampled.counts) / seeds < 0.54  # acceptance of a fixed guess is its probability
