"""Which drafts came true: sample every position of a window with its own random number, keep the true ones.

A token is a function of its row of logits, the request's seed and tokens, and its output position (`sampler.py`). The
row behind draft j has seen the drafts before it, so if those are what the request would have got, the row's token is
what it would get next, with or without speculation: a draft is kept while it *equals* the sampled token, and the first
sampled token that differs from its draft is the correct one. So greedy and drawn texts are identical token by token,
whatever the drafts were (docs/decisions/0017-speculative-decoding.md weighs this against rejection sampling).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from strata_lab.batch import ScheduledRequest
from strata_lab.sampler import SampledTokens, Sampler


def sample_items(sampler: Sampler, logits: Tensor, items: Sequence[ScheduledRequest]) -> SampledTokens:
    """Tokens of all items that sample, in their order; several where drafts came true (`SampledTokens.counts`).

    Args:
        sampler: the request's rules.
        logits: [sum of num_rows, V] float32: a row per item and draft, in the batch's order.
        items: those that sample.
    """
    if not any(item.drafts for item in items):
        return sampler.sample(logits, [item.request for item in items])
    requests, ahead = [], []
    for item in items:
        requests += [item.request] * item.num_rows
        ahead += [item.drafts[:j] for j in range(item.num_rows)]
    return keep_true(sampler.sample(logits, requests, ahead), items)


def keep_true(sampled: SampledTokens, items: Sequence[ScheduledRequest]) -> SampledTokens:
    """Of a token for every row those that the items really get: up to the first that differs from its draft."""
    kept: list[int] = []
    counts: list[int] = []
    first = 0
    for item in items:
        count = 1
        for draft, token_id in zip(item.drafts, sampled.token_ids[first : first + len(item.drafts)], strict=True):
            if token_id != draft:
                break
            count += 1
        kept += range(first, first + count)
        counts.append(count)
        first += item.num_rows
    return SampledTokens(
        token_ids=[sampled.token_ids[i] for i in kept],
        logprobs=[sampled.logprobs[i] for i in kept],
        errors=[sampled.errors[i] for i in kept],
        counts=counts,
    )
