"""A small model guesses: any checkpoint with the target's tokenizer, on a KV cache of its own.

It follows the texts of the requests it drafts for: what a request has got since the last call is computed first, then
one token after the other is guessed, for all requests together. Rejected guesses leave keys and values that are written
again. It chooses with the request's own parameters, seed and positions: where the target draws at random, it draws with
the same random number, so that two similar distributions agree far more often than two independent draws would.

A long text that it has not seen is taken in over several steps (`CATCH_UP_TOKENS`), during which there are no guesses
for it; where its blocks run out a request goes without. Where its pool has a prefix cache, the beginning of a text that
another has left there is not taken in again: the next turn of a chat goes on where the last one ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import torch

from strata_lab.block_manager import BlockManager
from strata_lab.request import Request
from strata_lab.runner import Slice, Step, StepInputs, captures_of
from strata_lab.sampler import NO_TOKEN, Sampler
from strata_lab.speculative.draft_vocabulary import AllTokens, DraftVocabulary

CATCH_UP_TOKENS = 256  # of all texts together that are taken in before a step


@dataclass(slots=True)
class Follower:
    """What the drafter has of one text: the tokens in its cache, the last ones perhaps wrong guesses."""

    computed: list[int] = field(default_factory=list)
    flying: bool = False  # the device drafts for it by itself
    found: int = 0  # tokens of it that were in the prefix cache
    sure: float = inf  # of the tokens in its cache, so many from the first are as others may find them

    def shared(self, token_ids: list[int]) -> int:
        """Tokens of the text that are in the cache; one is always left to be computed."""
        length = min(len(self.computed), len(token_ids) - 1)
        while length and self.computed[length - 1] != token_ids[length - 1]:
            length -= 1
        return length


class DraftModel:
    """`Drafter` by a model.

    Args:
        step: computes logits of the small model, [S, V] float32; its tokens are the target's ids.
        blocks: tables of its own pool.
        device: where its step runs.
        name: for events.
        to_target: [Vd] int64 ascending, the target's token for each of its logits; None where the two vocabularies are
            one.
        vocab_size: of the target, with `to_target`.

    Attributes:
        step_ms: what one of its steps took when it was made.
    """

    classes = (("any", 1),)
    costs_time = look_is_work = True
    step_ms = 0.0

    def __init__(
        self, step: Step, blocks: BlockManager, device: torch.device, name: str, to_target: torch.Tensor | None = None,
        vocab_size: int = 0,
    ) -> None:  # fmt: skip
        self.step, self.blocks, self.device, self.name = step, blocks, device, name
        self.to_target = to_target
        self._vocabulary: AllTokens | DraftVocabulary = (
            AllTokens() if to_target is None else DraftVocabulary(to_target, vocab_size)
        )
        self._followers: dict[Request, Follower] = {}
        self._sampler = Sampler()

    @property
    def captures(self) -> int:
        """Made for its own steps so far."""
        return captures_of(self.step)

    def first_ms(self) -> float:
        """Milliseconds per guess, to begin with."""
        return self.step_ms

    def look(self, requests: Sequence[Request]) -> list[int]:
        """1 for each request whose text it knows up to its end; others are taken in as far as the budget goes."""
        for request in [r for r in self._followers if r.finished]:
            self.forget(request)
        budget, evidence, slices = CATCH_UP_TOKENS, [], []
        for request in requests:
            follower = self._followers.get(request) or self._follow(request)
            if follower.flying:
                evidence.append(1)
                continue
            start = follower.shared(request.token_ids)
            missing = request.num_tokens - 1 - start
            ready = self.blocks.can_grow(request.request_id, request.num_tokens)
            take = min(missing, budget) if ready and missing > 1 else 0
            if take:
                budget -= take
                slices.append(self._slice(request, follower, request.token_ids[start : start + take], start, 0))
            evidence.append(int(ready and missing - take <= 1))
        if slices:
            self._run(slices)
        return evidence

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Guesses of the model, one after the other."""
        drafts: list[list[int]] = [[] for _ in requests]
        rows = list(range(len(requests)))
        slices = []
        for i in rows:
            follower = self._followers[requests[i]]
            start = follower.shared(requests[i].token_ids)
            slices.append(self._slice(requests[i], follower, requests[i].token_ids[start:], start, 1))
        while True:
            logits = self._run(slices)
            asking, ahead = [requests[i] for i in rows], [drafts[i] for i in rows]
            chosen = self._vocabulary.sample(self._sampler, logits, asking, ahead)
            for i, token_id in zip(rows, chosen, strict=True):
                if token_id != NO_TOKEN:
                    drafts[i].append(token_id)
            going = [i for i, t in zip(rows, chosen, strict=True) if t != NO_TOKEN]
            rows = [i for i in going if len(drafts[i]) < counts[i] and self._has_room(requests[i], len(drafts[i]))]
            if not rows:
                return drafts
            slices = [
                self._slice(requests[i], self._followers[requests[i]], drafts[i][-1:],
                            requests[i].num_tokens + len(drafts[i]) - 1, 1)
                for i in rows
            ]  # fmt: skip

    def fly(self, request: Request, num_tokens: int) -> list[int] | None:
        """Let the device draft for a request by itself, from its last two tokens on.

        Returns the block table, which covers `num_tokens`; None where that cannot be, or where it does not know the
        text. To be called again for more tokens, until `land`.
        """
        follower = self._followers.get(request)
        if follower is None or not self.blocks.can_grow(request.request_id, num_tokens):
            return None
        if not follower.flying and follower.shared(request.token_ids) < request.num_tokens - 2:
            return None
        follower.flying = True
        return self.blocks.grow(request.request_id, num_tokens)

    def land(self, request: Request) -> None:
        """The device drafts no more for a request, whose last two tokens are still to be computed."""
        if (follower := self._followers.get(request)) is not None and follower.flying:
            follower.flying, follower.computed = False, request.token_ids[: request.num_tokens - 2]

    def _has_room(self, request: Request, num_drafts: int) -> bool:
        return self.blocks.can_grow(request.request_id, request.num_tokens + num_drafts)

    def _slice(self, request: Request, follower: Follower, token_ids: list[int], start: int, num_rows: int) -> Slice:
        table = self.blocks.grow(request.request_id, start + len(token_ids))
        del follower.computed[start:]
        follower.computed += token_ids
        return Slice(token_ids, start, table, num_rows)

    @torch.inference_mode()
    def _run(self, slices: Sequence[Slice]) -> torch.Tensor:
        return self.step(StepInputs.gather(slices, self.blocks.block_size, self.device))

    def _follow(self, request: Request) -> Follower:
        """Begin with a text, behind what the prefix cache has of it."""
        found = self.blocks.attach(request.request_id, request.token_ids)
        follower = self._followers[request] = Follower(request.token_ids[:found], found=found)
        return follower

    def forget(self, request: Request) -> None:
        """Free its blocks; others may find what is sure to be in them."""
        self.land(request)
        if (follower := self._followers.pop(request, None)) is not None:
            known = min(follower.shared(request.token_ids), follower.sure)
            self.blocks.commit(request.request_id, request.token_ids, int(known))
            self.blocks.free(request.request_id)
