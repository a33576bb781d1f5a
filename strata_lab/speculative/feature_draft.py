"""A draft that goes on from the target's hidden states, on the host's side: `DraftModel` with states beside the tokens.

Whatever steps the target runs hand over their states (`hear`); what has not been taken in waits here, so many tokens of
each request. Guesses behind the first go on from the draft's own states. When the target has verified them, their rows
are computed again from its states. A row whose state nobody handed over (found in the target's prefix cache) is made of
the token alone, and nobody finds it in the draft's own prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from strata_lab.batch import ScheduledBatch
from strata_lab.block_manager import BlockManager
from strata_lab.capture import idle_rows
from strata_lab.graph_prompts import PROMPT_TOKENS, TABLE_WIDTH, padded
from strata_lab.request import Request
from strata_lab.runner import Slice, StepInputs, StepResult
from strata_lab.speculative.draft_model import CATCH_UP_TOKENS, DraftModel, Follower
from strata_lab.speculative.feature_step import FeatureStep

MOST_STATES = 2048  # tokens of a request whose states wait; of a longer text the older ones are forgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class _StatedSlice(Slice):
    """A slice with the target's states before its tokens, [layers, len(token_ids), hidden]; None behind a guess."""

    states: Tensor | None
    request: Request


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Positions from `start` on: rows from `first` on of states [layers, rows, hidden]."""

    start: int
    states: Tensor
    first: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


class States:
    """States of one text that have been handed over: stretches of it, in any order, the newest last."""

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []
        self._num_states = 0

    def add(self, start: int, states: Tensor, first: int, count: int) -> None:
        """States of `count` positions from `start` on: the rows from `first` on of `states` [layers, rows, hidden]."""
        self._stretches.append(_Stretch(start, states, first, count))
        self._num_states += count
        while len(self._stretches) > 1 and self._num_states > MOST_STATES:
            self._num_states -= self._stretches.pop(0).count

    def between(self, start: int, nobody: Tensor, spared: int = -1) -> tuple[Tensor, int]:
        """States of the positions from `start` on, [layers, T, hidden].

        Args:
            start: may lie before the text.
            nobody: [layers, T, hidden], stands where there are no states.
            spared: a position that is not missed.

        Returns:
            The states, and how many there are from the first on without a gap.
        """
        owners = [-1] * nobody.shape[1]
        for index, stretch in enumerate(self._stretches):
            begin, end = max(stretch.start - start, 0), min(stretch.end - start, len(owners))
            if begin < end:
                owners[begin:end] = [index] * (end - begin)
        parts = []
        for owner, group in groupby(range(len(owners)), key=owners.__getitem__):
            at = list(group)
            if owner < 0:
                parts.append(nobody[:, at[0] : at[-1] + 1])
            else:
                stretch = self._stretches[owner]
                behind = stretch.first + start - stretch.start
                parts.append(stretch.states[:, at[0] + behind : at[-1] + 1 + behind])
        missing = (i for i, owner in enumerate(owners) if owner < 0 and i != spared - start)
        return torch.cat(parts, dim=1), next(missing, len(owners))

    def forget(self, end: int) -> None:
        """Let go of stretches that lie before `end`."""
        self._stretches = [stretch for stretch in self._stretches if stretch.end > end]
        self._num_states = sum(stretch.count for stretch in self._stretches)


class FeatureDraft(DraftModel):
    """`Drafter` by a model that sees the target's states.

    Args:
        step: of the draft.
        blocks, device, name, to_target, vocab_size: as of `DraftModel`.

    Attributes:
        features: the step.
        own: the draft's state behind the last token of each request that it computed last, [hidden]; the next guess is
            made of it.
    """

    def __init__(
        self, step: FeatureStep, blocks: BlockManager, device: torch.device, name: str, to_target: Tensor,
        vocab_size: int,
    ) -> None:  # fmt: skip
        super().__init__(step.eager, blocks, device, name, to_target, vocab_size)
        self.features = step
        self.own: dict[Request, Tensor] = {}
        self._heard: dict[Request, States] = {}

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[str, float], None]) -> None:
        """Take texts in that nobody wrote, of each size that a GPU compiles for: later it would stop a stream."""
        sizes = [1, *(size for size in PROMPT_TOKENS if size <= CATCH_UP_TOKENS)]
        for done, size in enumerate(sizes):
            progress("compiling the draft's steps", done / len(sizes))
            inputs = idle_rows(size, 1, TABLE_WIDTH, self.device) if size > 1 else StepInputs.idle(1, 2, self.device)
            states = self.features.no_states(self.features.num_seen, size)
            self.features.model.logits(self._of_texts(inputs, states)[-1:])
        progress("compiling the draft's steps", 1.0)

    def hear(self, batch: ScheduledBatch, result: StepResult) -> None:
        """Keep what a step of the target tells of its requests; guesses that did not come true are left out."""
        states = result.kept
        if states is None:
            if not result.states:
                return
            states = torch.stack(result.states)  # the step's memory is written again
        counts = iter(result.tokens.counts or ())
        first = 0
        for item in batch.items:
            kept = item.num_tokens - len(item.drafts)
            if item.samples and result.tokens.counts is not None:
                kept += next(counts) - 1
            self._heard.setdefault(item.request, States()).add(item.start, states, first, kept)
            first += item.num_tokens
        for request in [r for r in self._heard if r.finished]:
            self.forget(request)

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Guesses, one after the other; their rows are to be computed again from the target's states."""
        drafts = super().draft(requests, counts)
        for request in requests:
            del self._followers[request].computed[request.num_tokens :]
            self._heard[request].forget(request.num_tokens - 2)
        return drafts

    def fly(self, request: Request, num_tokens: int) -> list[int] | None:
        """As of `DraftModel`; `own` has the state from which the device makes its first guess."""
        follower = self._followers.get(request)
        if follower is None or not self.blocks.can_grow(request.request_id, num_tokens + 1):
            return None
        if not follower.flying:
            start = follower.shared(request.token_ids)
            if start < request.num_tokens - 2:
                return None
            self._run([self._slice(request, follower, request.token_ids[start:], start, 1)])
        follower.flying = True
        return self.blocks.grow(request.request_id, num_tokens + 1)  # what is accepted is computed at once

    def land(self, request: Request) -> None:
        """As of `DraftModel`; all but the last token, behind which the device's state is not known, is in the cache."""
        if (follower := self._followers.get(request)) is not None and follower.flying:
            follower.flying, follower.computed = False, request.token_ids[: request.num_tokens - 1]

    def forget(self, request: Request) -> None:
        """Free its blocks, and drop its states."""
        super().forget(request)
        self._heard.pop(request, None)
        self.own.pop(request, None)

    def _slice(self, request: Request, follower: Follower, token_ids: list[int], start: int, num_rows: int) -> Slice:
        plain = super()._slice(request, follower, token_ids, start, num_rows)
        states = None
        if start < request.num_tokens:
            nobody = self.features.no_states(self.features.num_seen, len(token_ids))
            # The state before the first row behind a found beginning is nobody's: one row of a turn is worse for it.
            states, known = self._heard.setdefault(request, States()).between(start - 1, nobody, follower.found - 1)
            if known < len(token_ids):
                follower.sure = min(follower.sure, start + known)
        return _StatedSlice(
            plain.token_ids, plain.start, plain.block_table, plain.num_rows, states=states, request=request
        )

    @torch.inference_mode()
    def _run(self, slices: Sequence[Slice]) -> Tensor:
        stated = [part for part in slices if isinstance(part, _StatedSlice)]
        assert len(stated) == len(slices)
        inputs = StepInputs.gather(slices, self.blocks.block_size, self.device)
        known = [part.states for part in stated if part.states is not None]
        if known:  # all of them: behind a guess everybody is
            hidden = self._of_texts(inputs, torch.cat(known, dim=1))
        else:
            hidden = self.features.further(inputs, torch.stack([self.own[part.request] for part in stated]))
        ends = inputs.cu_seqlens_q[1:].long() - 1
        for part, state in zip(stated, hidden[ends], strict=True):
            self.own[part.request] = state
        return self.features.model.logits(hidden[inputs.sample_rows])

    def _of_texts(self, inputs: StepInputs, states: Tensor) -> Tensor:
        """States of the draft behind tokens of texts, [T, hidden], from the target's before them [layers, T, hidden].

        A GPU compiles for few sizes, so rows are added.
        """
        count, whole = inputs.input_ids.shape[0], inputs
        if self.device.type == "cuda" and inputs.max_q_len > 1:
            whole = padded(inputs)
            states = F.pad(states, (0, 0, 0, whole.input_ids.shape[0] - count))
        return self.features.hidden(whole, states.unbind())[:count]
