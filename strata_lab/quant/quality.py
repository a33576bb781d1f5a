"""What a change of weights does to a model: numbers from logits, however those were computed.

A `Logits` function takes the token ids of a sequence and returns the logits of every position, [T, V]. Nothing here
knows about formats, files or text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Logits = Callable[[Sequence[int]], Tensor]


@dataclass(frozen=True)
class Comparison:
    """A candidate beside a reference on the same tokens.

    Attributes:
        tokens: positions that predicted a next token.
        reference_perplexity, perplexity: exp of the mean negative log probability of the text; the candidate's second.
        mean_kl: mean over positions of KL(reference || candidate) in nats.
        top1_agreement: share of positions at which both find the same token likeliest.
    """

    tokens: int
    reference_perplexity: float
    perplexity: float
    mean_kl: float
    top1_agreement: float

    def figures(self, name: str) -> dict[str, float]:
        """What a results file says of it, under `name`; "relative" is how much larger the perplexity is."""
        return {
            f"{name}_tokens": self.tokens,
            f"{name}_reference": self.reference_perplexity,
            f"{name}_perplexity": self.perplexity,
            f"{name}_relative": self.perplexity / self.reference_perplexity - 1,
            f"{name}_kl": self.mean_kl,
            f"{name}_top1": self.top1_agreement,
        }


def perplexity(logits: Logits, sequences: Sequence[Sequence[int]]) -> float:
    """exp of the mean negative log probability of each token given those before it in its sequence.

    Raises `ValueError` where no sequence has two tokens.
    """
    nats, tokens = 0.0, 0
    for sequence in _predicted(sequences):
        nats += _nats(_log_probabilities(logits, sequence), sequence)
        tokens += len(sequence) - 1
    return _exp(nats / tokens)


def compare(reference: Logits, candidate: Logits, sequences: Sequence[Sequence[int]]) -> Comparison:
    """Both on the same sequences, one of them at a time. Raises `ValueError` where no sequence has two tokens."""
    nats, kl, agree, tokens = [0.0, 0.0], 0.0, 0, 0
    for sequence in _predicted(sequences):
        both = [_log_probabilities(logits, sequence) for logits in (reference, candidate)]
        nats = [total + _nats(log_p, sequence) for total, log_p in zip(nats, both, strict=True)]
        ours, theirs = both
        kl += torch.where(ours > -torch.inf, ours.exp() * (ours - theirs), 0.0).sum(dtype=torch.float64).item()
        agree += int((ours.argmax(dim=-1) == theirs.argmax(dim=-1)).sum())
        tokens += len(sequence) - 1
    before, after = (_exp(total / tokens) for total in nats)
    return Comparison(tokens, before, after, kl / tokens, agree / tokens)


def greedy(logits: Logits, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The `num_tokens` likeliest tokens after `prompt`, each given those before; runs the whole sequence every time."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def divergence(candidate: Logits, prompt: Sequence[int], reference: Sequence[int]) -> int | None:
    """Position of the first token of `reference` (a greedy continuation of `prompt`) that the candidate, also greedy,
    would not have chosen; None if it agrees with all of them.
    """
    if not prompt or not reference:
        raise ValueError(f"prompt of {len(prompt)}, continuation of {len(reference)} tokens: both need one at least")
    sequence = [*prompt, *reference]
    chosen = candidate(sequence[:-1])[len(prompt) - 1 :].argmax(dim=-1).tolist()
    return next((i for i, (ours, theirs) in enumerate(zip(reference, chosen, strict=True)) if ours != theirs), None)


def _exp(nats: float) -> float:
    """Infinite where a float is too small: a ruined model can be that sure of the wrong token."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def _predicted(sequences: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    usable = [sequence for sequence in sequences if len(sequence) > 1]
    if not usable:
        raise ValueError(f"{len(sequences)} sequences, none with 2 tokens: nothing is predicted; give some of 256")
    return usable


def _log_probabilities(logits: Logits, sequence: Sequence[int]) -> Tensor:
    """Of the token after each position but the last, [T - 1, V] float32."""
    return torch.log_softmax(logits(sequence)[:-1].float(), dim=-1)


def _nats(log_p: Tensor, sequence: Sequence[int]) -> float:
    targets = torch.tensor(sequence[1:], device=log_p.device)
    return -log_p.gather(1, targets[:, None]).sum(dtype=torch.float64).item()
