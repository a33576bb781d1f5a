"""Prompts that are no text: rows of numbers that take the place of token embeddings, for example of image patches.

A request with embeddings is like any other: it is sliced, preempted, computed again. Its prompt positions carry token
ids that no vocabulary has and no other request carries, so that the prefix cache can never take it for a text or for
somebody else's picture. The rows stay with the request, because a preempted prompt is computed again from them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strata_lab.batch import ScheduledBatch
from strata_lab.sampling_params import RequestError

_names = itertools.count(1)


def checked(value: Any, hidden_size: int, device: torch.device) -> Tensor:
    """A copy of [T, hidden] numbers on a device, float32; `RequestError` for any other shape, and for NaN."""
    rows = torch.as_tensor(value)
    if rows.ndim != 2 or rows.shape[1] != hidden_size or rows.shape[0] < 1 or not rows.is_floating_point():
        raise RequestError(
            f"prompt_embeds of shape {tuple(rows.shape)} and {rows.dtype} must be [tokens, {hidden_size}] floating "
            f"point numbers; try torch.zeros(4, {hidden_size}), or engine.embed(token_ids) for text"
        )
    rows = rows.detach().to(device=device, dtype=torch.float32, copy=True)
    if not bool(rows.isfinite().all()):
        raise RequestError("prompt_embeds hold a value that is not finite; check what made them")
    return rows


def placeholder_ids(count: int) -> list[int]:
    """Token ids for `count` positions without a token: negative, and of this request alone."""
    return [-next(_names)] * count


@dataclass(frozen=True)
class EmbeddedRows:
    """What takes the place of token embeddings in a step.

    Attributes:
        rows: which of the T rows, [R] int64.
        values: their numbers, [R, hidden].
    """

    rows: Tensor
    values: Tensor

    @classmethod
    def of(cls, batch: ScheduledBatch, device: torch.device) -> EmbeddedRows | None:
        """The rows of a scheduled batch; None when it has none, which is nearly always."""
        places: list[int] = []
        pieces: list[Tensor] = []
        first = 0
        for item in batch.items:
            embeds = item.request.prompt_embeds
            stop = min(item.start + item.num_tokens, item.request.num_prompt_tokens)
            if embeds is not None and item.start < stop:
                places += range(first, first + stop - item.start)
                pieces.append(embeds[item.start : stop])
            first += item.num_tokens
        return cls(torch.tensor(places, dtype=torch.int64, device=device), torch.cat(pieces)) if pieces else None

    def put(self, x: Tensor) -> Tensor:
        """`x` [T, hidden] with these rows in their places."""
        return x.index_copy(0, self.rows, self.values.to(x.dtype))
