"""A draft that knows some of the tokens chooses what it would if it knew all and gave nothing to the others."""

from __future__ import annotations

import pytest
import torch

from strata_lab.request import Request
from strata_lab.sampler import NO_TOKEN, Sampler
from strata_lab.sampling_params import SamplingParams
from strata_lab.speculative.draft_vocabulary import DraftVocabulary

V, VD, ROWS = 500, 64, 60
TO_TARGET = sorted(torch.randperm(V, generator=torch.Generator().manual_seed(3))[:VD].tolist())
PARAMS = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.3},
    "top_k": {"temperature": 1.0, "top_k": 7},
    "top_k of nearly all": {"temperature": 2.0, "top_k": VD + 9},
    "top_p": {"temperature": 0.9, "top_p": 0.8},
    "min_p": {"temperature": 1.1, "min_p": 0.05},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    "bias": {"temperature": 0, "logit_bias": {TO_TARGET[5]: 6.0, 1: 20.0}},
}


def requests(count: int, **params: object) -> list[Request]:
    prompt = [TO_TARGET[i] for i in range(20)]
    return [Request(f"r{i}", prompt, SamplingParams(seed=i, **params), seed=i) for i in range(count)]


@pytest.mark.parametrize("name", PARAMS)
def test_choosing_among_some_equals_choosing_among_all_with_nothing_outside(name: str) -> None:
    logits = 2 * torch.randn(ROWS, VD, generator=torch.Generator().manual_seed(1))
    logits[::7, 3] = logits[::7].amax(dim=1)  # ties
    vocabulary = DraftVocabulary(torch.tensor(TO_TARGET), V)
    asked, ahead = requests(ROWS, **PARAMS[name]), [[TO_TARGET[2]]] * ROWS
    wide = torch.full((ROWS, V), -torch.inf)
    wide[:, torch.tensor(TO_TARGET)] = logits
    found = vocabulary.sample(Sampler(), logits, asked, ahead)
    assert found == Sampler().sample(wide, asked, ahead).token_ids
    assert set(found) <= set(TO_TARGET)
    assert len(set(found)) > 5


def test_a_row_without_a_best_token_gets_no_guess() -> None:
    logits = torch.zeros(2, VD)
    logits[0] = torch.nan
    vocabulary = DraftVocabulary(torch.tensor(TO_TARGET), V)
    assert vocabulary.sample(Sampler(), logits, requests(2, temperature=0), [[], []]) == [NO_TOKEN, TO_TARGET[0]]
