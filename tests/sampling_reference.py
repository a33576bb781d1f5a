"""What sampling means, in python numbers and one token at a time; and the requests that the sampling tests share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strata_lab.request import Request
from strata_lab.sampling_params import SamplingParams

INF = math.inf
GREEDY = {"temperature": 0.0}


def request(
    seed: int = 0, prompt: Sequence[int] = (1, 2, 2), output: Sequence[int] = (), name: str = "", **params: Any
) -> Request:
    """A request that has generated `output`."""
    made = Request(
        request_id=name or f"r{seed}", prompt_token_ids=list(prompt), params=SamplingParams(**params), seed=seed
    )
    made.token_ids.extend(output)
    return made


def random_logits(rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


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

MIXED = [*FEATURES.values(), {"logprobs": 3}, {**GREEDY, "logprobs": 0}, {"top_p": 0.5, "logprobs": 20, "top_k": 7}]


def mixed_requests(vocab_size: int) -> list[Request]:
    rng = np.random.default_rng(5)
    return [
        request(i, rng.integers(0, vocab_size, 4).tolist(), rng.integers(0, vocab_size, i % 4).tolist(), **params)
        for i, params in enumerate(MIXED)
    ]
