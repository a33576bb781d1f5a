"""Choosing tokens where a draft's logits are over some of the target's tokens only.

A draft's tokens are in the order of the target's ids, so its sorted distribution is the one over all of the target's
tokens with nothing outside, and a random number picks the same token from both: rows are sampled as they are, and the
chosen ones become ids of the target. Only rows whose logits are edited by token id (penalties, bans, bias) are spread
out first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strata_lab.request import Request
from strata_lab.sampler import NO_TOKEN, Sampler
from strata_lab.sampling_edits import edits_logits

Ahead = Sequence[Sequence[int]]


class AllTokens:
    """A draft model that speaks all of the target's tokens."""

    def sample(self, sampler: Sampler, logits: Tensor, requests: Sequence[Request], ahead: Ahead) -> list[int]:
        """A token of the target for each row, or `NO_TOKEN`."""
        return sampler.sample(logits, requests, ahead).token_ids


class DraftVocabulary:
    """Some of the target's tokens.

    Args:
        to_target: their ids in the target's vocabulary, [Vd] int64 ascending, where the logits are.
        vocab_size: of the target.
    """

    def __init__(self, to_target: Tensor, vocab_size: int) -> None:
        self._to_target, self._ids, self._vocab_size = to_target, to_target.tolist(), vocab_size

    def sample(self, sampler: Sampler, logits: Tensor, requests: Sequence[Request], ahead: Ahead) -> list[int]:
        """A token of the target for each row, or `NO_TOKEN`.

        Args:
            sampler: the requests' rules.
            logits: [S, Vd] float32.
            requests: whose rows they are.
            ahead: guesses before each row.
        """
        if any(edits_logits(request.params) for request in requests):
            return sampler.sample(self.spread(logits), requests, ahead).token_ids
        chosen = sampler.sample(logits, requests, ahead).token_ids
        return [NO_TOKEN if i == NO_TOKEN else self._ids[i] for i in chosen]

    def spread(self, logits: Tensor) -> Tensor:
        """[S, Vd] -> [S, V] with -inf for all other tokens."""
        wide = logits.new_full((logits.shape[0], self._vocab_size), -torch.inf)
        return wide.index_copy_(1, self._to_target, logits)
