"""Changes to logits that a request asks for: bias, penalties, tokens that may not come yet or at all, a grammar.

Only the tokens concerned are touched, from a table per request that grows with its tokens (a grammar touches all:
`grammar.py`); requests that ask for nothing cost nothing.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from strata_lab.grammar import GrammarMasks
from strata_lab.request import Request
from strata_lab.sampling_params import SamplingParams


def edits_logits(params: SamplingParams) -> bool:
    """Whether `params` asks for anything that changes logits: such rows are the host sampler's."""
    bans = params.min_tokens > 0 or bool(params.bad_words) or params.structured_outputs is not None
    return bans or bool(params.logit_bias) or _counts_tokens(params)


def _counts_tokens(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def banned_tokens(request: Request, ahead: Sequence[int] = ()) -> set[int]:
    """Tokens that may not come next: ends before `min_tokens`, and the last token of a bad word that has begun.

    `ahead`: output tokens that count although the request has not got them yet.
    """
    ended = request.num_output_tokens + len(ahead) >= request.params.min_tokens
    banned = set() if ended else set(request.stop_ids)
    for word in request.bad_words:
        *begin, last = word
        first = request.num_tokens + len(ahead) - len(begin)
        begun = [*request.token_ids[-len(begin) :], *ahead][-len(begin) :] if begin else []
        if first >= request.num_prompt_tokens and begun == begin:
            banned.add(last)
    return banned


class TokenTable:
    """The tokens of one request whose logits change: those with a bias, and those already seen.

    Arrays of one entry per token, in order of appearance: `ids`, `bias`, `seen` (1 in prompt or output), `counts`
    (occurrences in the output).
    """

    def __init__(self, request: Request, vocab_size: int) -> None:
        self.request = request
        self.error: str | None = None
        self.ids, self.bias, self.seen, self.counts = array("q"), array("d"), array("d"), array("d")
        self._slots: dict[int, int] = {}
        for token_id, bias in request.params.logit_bias.items():
            if token_id < vocab_size:
                self.bias[self._slot(token_id)] = bias
            else:
                self.error = f"logit_bias token id {token_id} must be below the vocabulary's size, {vocab_size}; try 0"
        # Prompt tokens matter to the repetition penalty alone.
        self._num_read = 0 if request.params.repetition_penalty != 1 else request.num_prompt_tokens

    def _slot(self, token_id: int) -> int:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self.ids):
            self.ids.append(token_id)
            for column in (self.bias, self.seen, self.counts):
                column.append(0.0)
        return slot

    def read_new_tokens(self) -> None:
        """Take in the tokens that the request has got since the last call."""
        if not _counts_tokens(self.request.params):
            return
        tokens, first_output = self.request.token_ids, self.request.num_prompt_tokens
        for position in range(self._num_read, len(tokens)):
            slot = self._slot(tokens[position])
            self.seen[slot] = 1.0
            if position >= first_output:
                self.counts[slot] += 1.0
        self._num_read = len(tokens)

    def columns(self, row: int, ahead: Sequence[int] = ()) -> np.ndarray:
        """[5, entries] float64: row, token id, number to add, to divide or multiply by, to subtract.

        `ahead`: output tokens that count for this row although the request has not got them yet.
        """
        params = self.request.params
        ids, bias, seen, counts = (np.array(column) for column in (self.ids, self.bias, self.seen, self.counts))
        if ahead and _counts_tokens(params):
            known = [self._slots[token_id] for token_id in ahead if token_id in self._slots]
            np.add.at(counts, known, 1.0)
            seen[known] = 1.0
            fresh = Counter(token_id for token_id in ahead if token_id not in self._slots)
            ids, bias = np.append(ids, [*fresh]).astype(np.int64), np.append(bias, [0.0] * len(fresh))
            seen, counts = np.append(seen, [1.0] * len(fresh)), np.append(counts, [*fresh.values()])
        table = np.empty((5, len(ids)))
        table[0] = row
        table[1] = ids
        table[2] = bias
        table[3] = np.where(seen > 0, params.repetition_penalty, 1.0)
        table[4] = params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
        return table


class LogitEdits:
    """Keeps the tables of the requests in the current batch, and applies them."""

    def __init__(self) -> None:
        self._tables: dict[str, TokenTable] = {}
        self._grammars = GrammarMasks()

    def apply(
        self, logits: Tensor, requests: Iterable[tuple[int, Request, Sequence[int]]]
    ) -> tuple[Tensor, dict[int, str]]:
        """Edited copy of `logits` [B, V] float32, and an error text for each row that cannot be served.

        `requests` are the rows that want edits, with their numbers and the drafts that count for them. Arithmetic is
        float64, rounded once to float32.
        """
        tables: dict[str, TokenTable] = {}
        columns: list[np.ndarray] = []
        errors: dict[int, str] = {}
        bans: list[tuple[int, int]] = []
        structured: list[tuple[int, Request]] = []
        for row, request, ahead in requests:
            table = tables.get(request.request_id) or self._tables.get(request.request_id)
            if table is None or table.request is not request:  # new, or an old name used again
                table = TokenTable(request, logits.shape[1])
            tables[request.request_id] = table
            table.read_new_tokens()
            columns.append(table.columns(row, ahead))
            bans += [(row, token_id) for token_id in banned_tokens(request, ahead) if token_id < logits.shape[1]]
            if request.grammar is not None:
                structured.append((row, request))
            if table.error:
                errors[row] = table.error
        self._tables = tables  # forgets requests that are gone; one that was preempted is read again when it is back
        edits = torch.from_numpy(np.concatenate(columns, axis=1)).to(logits.device)
        rows, ids = edits[:2].long()
        value = logits[rows, ids].double() + edits[2]
        value = torch.where(value > 0, value / edits[3], value * edits[3]) - edits[4]
        edited = logits.clone()
        edited[rows, ids] = value.float()
        if bans:
            rows, ids = torch.tensor(bans, device=logits.device).unbind(1)
            edited[rows, ids] = -torch.inf
        return edited, errors | self._grammars.apply(edited, structured)

    def clear(self) -> None:
        """Forget all requests."""
        self._tables = {}
        self._grammars.clear()
