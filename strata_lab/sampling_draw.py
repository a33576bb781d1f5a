"""Tensor arithmetic of sampling: the best token, the order of tokens, and a draw from the filtered distribution.

Everything a result depends on is exact, so that a row gives the same token on its own and in any batch, whatever
order a device adds in: tokens are ordered by unique integer keys, and probabilities are whole numbers (`WEIGHT_ONE` for
the best token) kept in float64, whose sums are exact below 2^53.

It knows nothing of requests; `sampler.py` turns their parameters into tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

WEIGHT_ONE = 2.0**34  # weight of the best token; what is less than 2^-35 as likely weighs nothing
MAX_VOCAB_SIZE = 2**19  # as many weights of WEIGHT_ONE still add exactly in float64
HEAD = 256  # most likely tokens that are put in order first; a draw seldom falls outside of them
UNRESOLVED = -1  # result of `draw` where the head was too short

_ID_MASK = 0xFFFFFFFF  # low half of a sort key
_BLOCK = 32  # logits under one maximum in `first_ids`
_FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Filters:
    """Sampling parameters of S rows, each a tensor [S, 1].

    Attributes:
        inverse_temperature: float64, above 0 and finite.
        top_k: int64 from 1; the vocabulary's size or more is off.
        top_p: float64 in (0, 1]; 1 is off.
        min_p: float64 in [0, 1]; 0 is off.
        all_top_k: every row has top_k on, so the head holds all that can be drawn.
    """

    inverse_temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    all_top_k: bool


def best_token(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest logit and the lowest id that has it: [B, V] -> ([B], [B] int64). NaN counts as largest."""
    if logits.device.type == "cpu":  # NumPy finds positions with SIMD: measured 20 times as fast as torch
        ids = torch.from_numpy(logits.numpy().argmax(axis=1))
        return logits.gather(1, ids.unsqueeze(1)).squeeze(1), ids
    best, ids = logits.max(dim=1)
    return best, ids


def first_ids(logits: Tensor, count: int) -> Tensor:
    """The `count` first tokens by descending logit, then ascending id: [B, V] float32 -> [B, count] int64.

    The result is that of a stable sort of all V, reached without one: the first `count` tokens lie in the first
    `count` blocks by descending maximum, then ascending place. For take a token of any other block: each of those
    has one that comes before it.
    """
    (num_rows, vocab_size), device = logits.shape, logits.device
    if count * _BLOCK * 2 > vocab_size:
        return _smallest(_sort_keys(logits, torch.arange(vocab_size, device=device)), count) & _ID_MASK
    num_blocks = vocab_size // _BLOCK
    whole = num_blocks * _BLOCK
    peaks = logits[:, :whole].unflatten(1, (num_blocks, _BLOCK)).amax(dim=2)  # [B, V/32]
    blocks = _smallest(_sort_keys(peaks, torch.arange(num_blocks, device=device)), count) & _ID_MASK
    candidates = (blocks.unsqueeze(2) * _BLOCK + torch.arange(_BLOCK, device=device)).flatten(1)  # [B, count * 32]
    if whole < vocab_size:
        ragged = torch.arange(whole, vocab_size, device=device).expand(num_rows, -1)
        candidates = torch.cat([candidates, ragged], dim=1)
    return _smallest(_sort_keys(logits.gather(1, candidates), candidates), count) & _ID_MASK


def _sort_keys(values: Tensor, ids: Tensor) -> Tensor:
    """Unique int64 keys whose ascending order is descending value, then ascending id; -0 is 0, NaN is anywhere.

    The low 32 bits are the id.
    """
    bits = (values + 0.0).view(torch.int32)
    # As integers, positive floats ascend and negative ones descend: flip all bits, or the sign bit alone.
    descending = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_not_().bitwise_xor_(bits)
    return descending.long().bitwise_left_shift_(32).bitwise_or_(ids)


def _smallest(keys: Tensor, count: int) -> Tensor:
    """The `count` smallest of each row in ascending order: [B, n] int64 -> [B, count]."""
    partial = count < keys.shape[1]
    if keys.device.type == "cpu":  # NumPy selects and sorts int64 with SIMD: measured 5 and 10 times as fast as torch
        array = keys.numpy()
        if partial:
            array = np.partition(array, count - 1, axis=1)[:, :count]
        return torch.from_numpy(np.sort(array, axis=1))
    return keys.topk(count, dim=1, largest=False).values if partial else keys.sort(dim=1).values


def weights(logits: Tensor, best: Tensor, inverse_temperature: Tensor | float) -> Tensor:
    """exp((logit - best) / temperature) in whole parts of 1 / `WEIGHT_ONE`: [B, n], [B, 1] -> [B, n] float64.

    `best` is capped to the largest float32, so that +inf has a difference: it takes all, and several share.
    """
    gap = logits.double().sub_(best).clamp_(max=0.0).mul_(inverse_temperature)
    return gap.exp_().mul_(WEIGHT_ONE).round_()


def draw(logits: Tensor, best: Tensor, filters: Filters, uniform: Tensor, head: int) -> Tensor:
    """Inverse of the filtered distribution's cumulative sum, in sorted token order, at `uniform`.

    All filters keep the first tokens of that order, so together they keep the fewest that any of them keeps.
    top_p is a share of what top_k left.

    Args:
        logits: [S, V] float32 without NaN.
        best: [S], their row maxima, above -inf.
        filters: of the S rows.
        uniform: [S] float64 in [0, 1).
        head: tokens to put in order; at least every top_k that is on, at most V.

    Returns:
        [S] int64 token ids; `UNRESOLVED` where more than `head` tokens were needed (never if head is V). Rows that
        break the promise on NaN and -inf give some id.
    """
    best = best.unsqueeze(1).clamp(max=_FLOAT32_MAX)
    ids = first_ids(logits, head)  # [S, head]
    weight = weights(logits.gather(1, ids), best, filters.inverse_temperature)
    reach = weight.cumsum(dim=1)  # weight of a token and all before it
    total = reach.gather(1, filters.top_k.clamp(max=head) - 1)  # [S, 1]
    if head < logits.shape[1] and not filters.all_top_k:
        everything = weights(logits, best, filters.inverse_temperature).sum(dim=1, keepdim=True)
        total = torch.where(filters.top_k < logits.shape[1], total, everything)
    num_top_p = torch.searchsorted(reach, filters.top_p * total) + 1  # [S, 1]
    num_min_p = torch.searchsorted(-weight, -WEIGHT_ONE * filters.min_p, right=True)
    num_min_p.masked_fill_(num_min_p == head, logits.shape[1])  # perhaps more than the head holds
    kept = torch.minimum(torch.minimum(num_top_p, num_min_p), filters.top_k).clamp_(min=1)
    in_head = kept <= head
    kept_weight = torch.where(in_head, reach.gather(1, kept.clamp(max=head) - 1), total)
    # Below kept_weight: uniform is at most 1 - 2^-53, and kept_weight a whole number up to 2^53.
    target = (uniform.unsqueeze(1) * kept_weight).floor()
    index = torch.searchsorted(reach, target, right=True)
    unfiltered = (filters.top_p == 1) & (filters.min_p == 0)
    known = in_head | (unfiltered & (index < head))
    return torch.where(known, ids.gather(1, index.clamp(max=head - 1)), UNRESOLVED).squeeze(1)


def log_probabilities(logits: Tensor, token_ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Natural-log probabilities of the softmax of `logits`.

    Args:
        logits: [R, V] float32.
        token_ids: [R] int64, the chosen tokens.
        top: how many of the most likely tokens to add.

    Returns:
        chosen tokens' log probabilities [R, 1], ids [R, top] of the most likely tokens, theirs [R, top]; float64.
    """
    best = logits.amax(dim=1, keepdim=True).clamp_(max=_FLOAT32_MAX)
    log_total = (weights(logits, best, 1.0).sum(dim=1, keepdim=True) / WEIGHT_ONE).log_()
    ids = token_ids.unsqueeze(1)
    if top:
        ids = torch.cat([ids, first_ids(logits, top)], dim=1)
    logprobs = (logits.gather(1, ids).double() - best).clamp_(max=0.0) - log_total
    return logprobs[:, :1], ids[:, 1:], logprobs[:, 1:]
