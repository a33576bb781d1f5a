"""Log probabilities of a prompt's own tokens, for requests that ask for them.

They need logits of every row of the prompt, a table of vocabulary size each. So the slices of such a request are
computed apart from the step, `MAX_ROWS` rows at a time; what of it yields a token goes with the step as usual. A row
that was computed once is not asked for again after preemption.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from strata_lab.batch import ScheduledBatch, ScheduledRequest
from strata_lab.request import Request, TokenLogprobs
from strata_lab.sampling_draw import log_probabilities

MAX_ROWS = 64  # of logits and their float64 weights at a time: 115 MB for a vocabulary of 150,000


class RowLogits(Protocol):
    """Computes one slice of a request and returns its logits."""

    def __call__(self, item: ScheduledRequest) -> Tensor:
        """[num_tokens, V] float32, valid until the next call."""
        ...


@dataclass(frozen=True, slots=True)
class PromptRows:
    """What a step found out about prompts.

    Attributes:
        rest: the step without what has been computed for it.
        found: requests with the entries that follow those they have.
    """

    rest: ScheduledBatch
    found: list[tuple[Request, list[TokenLogprobs]]]


def wanted_in(batch: ScheduledBatch) -> bool:
    """Whether any slice of a step has such rows."""
    return any(item.request.wants_prompt_rows for item in batch.items)


def prompt_rows(batch: ScheduledBatch, logits_of: RowLogits) -> PromptRows:
    """Compute the slices of requests that want prompt rows, all but the tokens that sample."""
    rest, found = [], []
    for item in batch.items:
        if not item.request.wants_prompt_rows:
            rest.append(item)
            continue
        stop = item.start + item.num_tokens
        end = stop - item.samples
        found.append((item.request, _rows(item, end, logits_of)))
        if item.samples:
            rest.append(ScheduledRequest(item.request, end, 1, item.block_table))
    return PromptRows(replace(batch, items=rest), found)


def _rows(item: ScheduledRequest, end: int, logits_of: RowLogits) -> list[TokenLogprobs]:
    """Entries of the tokens that rows `[item.start, end)` predict, those left out that the request has."""
    request, entries = item.request, []
    tokens, known = request.prompt_token_ids, len(request.prompt_logprobs)
    assert item.start <= known, "a row was skipped"
    for start in range(item.start, end, MAX_ROWS):
        stop = min(start + MAX_ROWS, end)
        logits = logits_of(ScheduledRequest(request, start, stop - start, item.block_table))
        first, last = max(start, known), min(stop, len(tokens) - 1)
        if first < last:
            entries += _entries(logits[first - start : last - start], tokens[first + 1 : last + 1], request)
    return entries


def _entries(logits: Tensor, token_ids: list[int], request: Request) -> list[TokenLogprobs]:
    num_top = min(request.params.prompt_logprobs or 0, logits.shape[1])
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    chosen, top_ids, top = log_probabilities(logits, ids, num_top)
    rows = torch.cat([chosen, top_ids.double(), top], dim=1).tolist()  # SYNC: log probabilities to the host
    return [
        TokenLogprobs(token_id, row[0], dict(zip(map(int, row[1 : num_top + 1]), row[num_top + 1 :], strict=True)))
        for token_id, row in zip(token_ids, rows, strict=True)
    ]
