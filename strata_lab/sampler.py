"""From logits to tokens, for a whole batch at once.

A token depends on its row of logits, its request's parameters, tokens and seed, and its position in the output:
never on batch mates, the place in the batch, or what was preempted. Stop strings and ids are the engine's business,
random numbers `sampling_random.py`'s, the arithmetic `sampling_draw.py`'s.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from strata_lab.request import Request, TokenLogprobs
from strata_lab.sampling_draw import (
    HEAD,
    MAX_VOCAB_SIZE,
    UNRESOLVED,
    Filters,
    best_token,
    draw,
    log_probabilities,
)
from strata_lab.sampling_edits import LogitEdits, edits_logits
from strata_lab.sampling_params import SamplingParams
from strata_lab.sampling_random import seed_keys, uniforms

NO_TOKEN = -1  # token id where there is an error instead
_NO_BEST = -2  # device-side code of a row whose logits have no maximum


@dataclass(frozen=True)
class SampledTokens:
    """What one step sampled, one entry per token, in the order of the requests given.

    Attributes:
        token_ids: the tokens; `NO_TOKEN` where there is an error.
        logprobs: None where not asked for, or where there is an error.
        errors: why a request got no token, else None.
        counts: how many entries each request has, where drafts were verified; None for one each.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: list[str | None]
    counts: list[int] | None = None


@dataclass(frozen=True)
class _Plan:
    """What a batch of requests needs, worked out once and valid while the batch stays the same.

    Attributes:
        requests: the batch.
        vocab_size, device: of the logits.
        drawn: rows with a temperature.
        drawn_index: the same as a tensor; None if it is every row.
        keys: seed keys of the drawn rows.
        filters: of the drawn rows; None if there are none.
        head: how many tokens `draw` puts in order.
        edited: rows with a bias or penalties.
        logprobs, logprob_index: rows that return log probabilities, as list and tensor.
        num_top: most alternatives that one of them asks for.
    """

    requests: list[Request]
    vocab_size: int
    device: torch.device
    drawn: list[int]
    drawn_index: Tensor | None
    keys: np.ndarray
    filters: Filters | None
    head: int
    edited: list[int]
    logprobs: list[int]
    logprob_index: Tensor
    num_top: int

    @classmethod
    def of(cls, requests: Sequence[Request], logits: Tensor, head: int) -> _Plan:
        params = [r.params for r in requests]
        vocab_size, device = logits.shape[1], logits.device
        drawn = [i for i, p in enumerate(params) if not p.greedy]
        logprobs = [i for i, p in enumerate(params) if p.logprobs is not None]
        top_k = [min(params[i].top_k or vocab_size, vocab_size) for i in drawn]
        all_top_k = all(k < vocab_size for k in top_k)
        limited = [k for k in top_k if k < vocab_size]
        return cls(
            requests=list(requests),
            vocab_size=vocab_size,
            device=device,
            drawn=drawn,
            drawn_index=None if len(drawn) == len(requests) else torch.tensor(drawn, device=device),
            keys=seed_keys([requests[i].seed for i in drawn]),
            filters=_filters([params[i] for i in drawn], top_k, all_top_k, device) if drawn else None,
            head=min(vocab_size, max([*limited, 1 if all_top_k else head])),
            edited=[i for i, p in enumerate(params) if edits_logits(p)],
            logprobs=logprobs,
            logprob_index=torch.tensor(logprobs, dtype=torch.int64, device=device),
            num_top=min(vocab_size, max((params[i].logprobs or 0 for i in logprobs), default=0)),
        )

    def fits(self, requests: Sequence[Request], logits: Tensor) -> bool:
        """Whether this is the plan of exactly these requests, in this order."""
        same = len(requests) == len(self.requests) and all(map(operator.is_, requests, self.requests))
        return same and logits.shape[1] == self.vocab_size and logits.device == self.device


def inverse_temperature(params: SamplingParams) -> float:
    """1 / temperature, finite; 0 for greedy. A subnormal temperature has no finite inverse: the cap acts the same."""
    return 0.0 if params.greedy else min(1 / params.temperature, sys.float_info.max)


def _filters(params: Sequence[SamplingParams], top_k: list[int], all_top_k: bool, device: torch.device) -> Filters:
    rows = [[inverse_temperature(p), p.top_p, p.min_p] for p in params]
    numbers = torch.tensor(rows, dtype=torch.float64, device=device)
    inverse, top_p, min_p = numbers.unsqueeze(2).unbind(1)  # each [S, 1]
    ranks = torch.tensor(top_k, device=device).unsqueeze(1)
    return Filters(inverse, ranks, top_p, min_p, all_top_k)


class Sampler:
    """Chooses one token per request. Keeps only what can be rebuilt from the requests."""

    def __init__(self) -> None:
        self._edits = LogitEdits()
        self._plan: _Plan | None = None

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, requests: Sequence[Request], ahead: Sequence[Sequence[int]] | None = None
    ) -> SampledTokens:
        """Next tokens of `requests` from `logits` [B, V] float32, which stay as they are.

        With `ahead` a row's token is the one that its request gets behind these tokens more (drafts, which it has not
        got yet); a request may then have several rows. A row without a largest logit (NaN, or all -inf) yields an error
        for its request and no other.
        """
        assert logits.ndim == 2, logits.shape
        assert logits.shape[0] == len(requests), (logits.shape, len(requests))
        assert logits.dtype == torch.float32, logits.dtype
        assert logits.shape[1] <= MAX_VOCAB_SIZE, logits.shape
        if not requests:
            return SampledTokens([], [], [])
        if self._plan is None or not self._plan.fits(requests, logits):
            self._plan = _Plan.of(requests, logits, HEAD)
        plan, edited = self._plan, logits
        errors: dict[int, str] = {}
        if plan.edited:
            edited, errors = self._edits.apply(
                logits, [(i, requests[i], ahead[i] if ahead else ()) for i in plan.edited]
            )
        else:
            self._edits.clear()
        positions = [requests[i].num_output_tokens + (len(ahead[i]) if ahead else 0) for i in plan.drawn]
        token_ids, logprobs = _choose(logits, edited, plan, positions)
        again = [i for i, token_id in enumerate(token_ids) if token_id == UNRESOLVED]
        if again:  # draws that fell outside of the head: once more with every token in order
            rest = _Plan.of([requests[i] for i in again], logits, logits.shape[1])
            place = dict(zip(plan.drawn, positions, strict=True))
            more_ids, more_logprobs = _choose(logits[again], edited[again], rest, [place[i] for i in again])
            for i, token_id, logprob in zip(again, more_ids, more_logprobs, strict=True):
                token_ids[i], logprobs[i] = token_id, logprob
        if min(token_ids) < 0:
            errors.update({i: _why_no_best(edited[i]) for i, t in enumerate(token_ids) if t == _NO_BEST})
        for i in errors:
            token_ids[i], logprobs[i] = NO_TOKEN, None
        return SampledTokens(token_ids, logprobs, [errors.get(i) for i in range(len(requests))])


def _choose(
    raw: Tensor, edited: Tensor, plan: _Plan, positions: list[int]
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Tokens (or `UNRESOLVED`, `_NO_BEST`) and log probabilities of the batch: one copy to the host.

    `positions` are the output positions of the drawn rows.
    """
    if plan.filters is None:
        best, tokens = best_token(edited)
    else:
        uniform = torch.from_numpy(uniforms(plan.keys, positions)).to(plan.device)
        if plan.drawn_index is None:
            best = edited.amax(dim=1)  # NaN if any logit is
            tokens = draw(edited, best, plan.filters, uniform, plan.head)
        else:
            best, tokens = best_token(edited)
            rows = plan.drawn_index
            tokens[rows] = draw(edited[rows], best[rows], plan.filters, uniform, plan.head)
    tokens = torch.where(best > -torch.inf, tokens, _NO_BEST)
    if not plan.logprobs:
        return tokens.tolist(), [None] * len(plan.requests)  # SYNC: token ids to the host
    rows = plan.logprob_index
    chosen, top_ids, top = log_probabilities(raw[rows], tokens[rows].clamp(min=0), plan.num_top)
    # float64 holds every id exactly, so all travels as one tensor: B ids, then 1 + 2 * num_top numbers a row.
    packed = torch.cat([tokens.double(), torch.cat([chosen, top_ids.double(), top], dim=1).flatten()])
    values = packed.tolist()  # SYNC: token ids and log probabilities to the host
    num_rows, width = len(plan.requests), 1 + 2 * plan.num_top
    token_ids = [int(value) for value in values[:num_rows]]
    logprobs: list[TokenLogprobs | None] = [None] * num_rows
    for place, i in enumerate(plan.logprobs):
        chosen_logprob, *numbers = values[num_rows + place * width : num_rows + (place + 1) * width]
        wanted = min(plan.requests[i].params.logprobs or 0, plan.num_top)
        ranked = zip(map(int, numbers[:wanted]), numbers[plan.num_top :][:wanted], strict=True)
        logprobs[i] = TokenLogprobs(token_id=token_ids[i], logprob=chosen_logprob, top=dict(ranked))
    return token_ids, logprobs


def _why_no_best(logits: Tensor) -> str:
    """Error text for a row [V] whose maximum is NaN or -inf. Only on the way to an error, so it may wait."""
    num_nan = int(logits.isnan().sum())
    if num_nan:
        return f"the model returned NaN for {num_nan} of {logits.numel()} logits; try fp32 weights and KV cache"
    return "every logit is -inf, so there is no token to choose; check logit_bias, bad_words and the model's output"
