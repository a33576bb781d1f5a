"""Drafter and policy at work, once before and once after every step of the loop. Torch-free.

It writes guesses into `Request.draft_token_ids`, from which the scheduler takes what has room, and learns from what
came of them. `NoSpeculation` is the same thing for an engine that does not draft.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from strata_lab.batch import ScheduledBatch
from strata_lab.events import Draft, SpeculationEvent
from strata_lab.request import Request
from strata_lab.speculative.base import Drafter
from strata_lab.speculative.loops import MIN_TOKENS, is_loop
from strata_lab.speculative.policy import DraftPolicy

Hear = Callable[[ScheduledBatch, Any], None]  # of a step, and its `StepResult`
Observed = tuple[tuple[Draft, ...], SpeculationEvent | None]
DRAFT_TIME_SHARE = 0.2  # of the latest drafting time in its average
LOOK_SHARE = 0.005  # of a step's time that looking may take while it leads to nothing
MOST_SKIPPED = 8  # steps between two looks, at most
LOOK_WEIGHT, FIRST_LOOK_MS = 0.2, 0.02  # of the latest look in the average of one, which begins there


class Speculation(Protocol):
    """What the loop calls."""

    runner: Any  # that makes the guesses and verifies them; None where the engine's ordinary one does

    @property
    def captures(self) -> int:
        """Grows with every capture that is made for guesses in `prepare`."""
        ...

    @property
    def status(self) -> tuple[str, str]:
        """State ("none", "on" or "off") and the reason."""
        ...

    def hear(self, batch: ScheduledBatch, result: Any, /) -> None:
        """A step of the target was run, with this `StepResult`; its tokens are not booked yet."""
        ...

    def prepare(self, running: Callable[[], Sequence[Request]]) -> None:
        """Before a step is scheduled, without the loop's lock: guess for those that decode.

        `running` gives a copy of the list of all that run.
        """
        ...

    def observe(self, batch: ScheduledBatch, counts: Sequence[int] | None, ms: float | None, began: bool) -> Observed:
        """After a step has been committed: what became of its drafts, and a change of state if there is one.

        Args:
            batch: the step.
            counts: tokens per item that samples (`SampledTokens.counts`).
            ms: from before `prepare` until the tokens were there; of a step that was queued, what it took of the
                device's time. None where something was captured in it: that tells nothing of the next such step.
            began: as of `StepResult`.
        """
        ...


def no_hearing(batch: ScheduledBatch, result: Any) -> None:
    """Of drafters that see tokens only."""


class NoSpeculation:
    """`Speculation` that never guesses."""

    status = ("none", "")
    runner = None
    captures = 0

    def prepare(self, running: Callable[[], Sequence[Request]]) -> None:
        """Nothing to prepare."""

    def hear(self, batch: ScheduledBatch, result: Any, /) -> None:
        """Nothing to hear."""

    def observe(self, batch: ScheduledBatch, counts: Sequence[int] | None, ms: float | None, began: bool) -> Observed:
        """Nothing to learn."""
        return (), None


class Speculator:
    """`Speculation` by a drafter, as a policy sees fit.

    Args:
        drafter: makes the guesses.
        policy: says how many; None where every request gets `most` (tests and measurements of the bare drafter).
        most: guesses per request and step at most.
        times: of a drafter that costs time; what it takes is told to it.
        clock_s: for that time.
        runner: that makes the guesses, where it is not the drafter itself.
        hear: what wants to know of the target's steps.
    """

    def __init__(
        self,
        drafter: Drafter,
        policy: DraftPolicy | None,
        most: int,
        times: DraftTimes | None = None,
        clock_s: Callable[[], float] = time.perf_counter,
        runner: Any = None,
        hear: Hear = no_hearing,
    ) -> None:
        self.runner, self._hear = runner, hear
        self.drafter, self.policy, self.most, self.times, self._clock_s = drafter, policy, most, times, clock_s
        self._evidence: dict[Request, int] = {}
        self._skip, self._look_ms = 0, FIRST_LOOK_MS  # steps in which nobody looks; what a look takes, per request
        self._drafted_ms = 0.0  # in this step, by a drafter that costs time

    def hear(self, batch: ScheduledBatch, result: Any, /) -> None:
        """Tell who wants to know, unless no guess can pay for so many requests anyway."""
        if self.policy is None or not self.policy.is_hopeless(batch.num_decode_tokens):
            self._hear(batch, result)

    @property
    def captures(self) -> int:
        """Of the drafter's own steps."""
        return self.drafter.captures

    @property
    def status(self) -> tuple[str, str]:
        """The policy's state and reason."""
        return ("on", "") if self.policy is None else (self.policy.state, self.policy.reason)

    def prepare(self, running: Callable[[], Sequence[Request]]) -> None:
        """Guess for those that decode."""
        self._evidence, self._drafted_ms = {}, 0.0
        if self._skip:
            self._skip -= 1
            return
        decoding = [request for request in running() if request.is_decoding and _can_be_drafted_for(request)]
        if not decoding or (self.policy is not None and self.policy.rests(len(decoding))):
            return
        started = self._clock_s()
        evidence, counts = self._planned(decoding)
        chosen = [(r, n, seen) for r, n, seen in zip(decoding, counts, evidence, strict=True) if n and seen]
        if chosen:
            self._draft(chosen)
        elif self.policy is not None:
            looked_ms = (self._clock_s() - started) * 1e3 / len(decoding)
            # a prompt that is read for the first time takes far longer than a look
            self._look_ms += LOOK_WEIGHT * (min(looked_ms, 2 * self._look_ms) - self._look_ms)
            allowed_ms = LOOK_SHARE * self.policy.costs.plain_ms(len(decoding))
            self._skip = min(MOST_SKIPPED, int(self._look_ms * len(decoding) / allowed_ms))

    def _planned(self, decoding: Sequence[Request]) -> tuple[Sequence[int], Sequence[int]]:
        """What the drafter sees of each request, and how many guesses it is to make where it sees something."""
        names, none = [r.request_id for r in decoding], [0] * len(decoding)
        if self.policy is None:
            return self.drafter.look(decoding) if self.most else none, [self.most] * len(decoding)
        if self.drafter.look_is_work:
            counts = self.policy.plan(names, [1] * len(decoding), len(decoding))
            return (self.drafter.look(decoding) if any(counts) else none), counts
        evidence = self.drafter.look(decoding)
        return evidence, self.policy.plan(names, evidence, len(decoding)) if any(evidence) else none

    def _draft(self, chosen: Sequence[tuple[Request, int, int]]) -> None:
        """Have the drafter guess: requests, how many guesses, and what it has seen of them."""
        started, captures, wanted = self._clock_s(), self.captures, [n for _, n, _ in chosen]
        drafts = self.drafter.draft([r for r, _, _ in chosen], wanted)
        if self.times is not None:
            self._drafted_ms = (self._clock_s() - started) * 1e3
            if self.captures == captures:
                self.times.observe(max(wanted), self._drafted_ms)
        for (request, _, seen), tokens in zip(chosen, drafts, strict=True):
            request.draft_token_ids = tokens
            self._evidence[request] = seen

    def observe(self, batch: ScheduledBatch, counts: Sequence[int] | None, ms: float | None, began: bool) -> Observed:
        """Learn from a step."""
        windows, num_accepted = self._windows(batch, counts) if batch.num_draft_tokens else ([], 0)
        for item in batch.items:
            if item.request.finished:
                self._forget(item.request)
        if self.policy is not None and batch.num_decode_tokens and not batch.num_prefill_tokens:
            n = batch.num_decode_tokens
            if self.policy.observe(n, batch.num_draft_tokens, num_accepted, ms, self._drafted_ms, began):
                kinds = self.policy.kinds(n)
                return tuple(windows), SpeculationEvent(time.perf_counter(), self.drafter.name, *self.status, kinds)
        return tuple(windows), None

    def _windows(self, batch: ScheduledBatch, counts: Sequence[int] | None) -> tuple[list[Draft], int]:
        """What became of the drafts of a step, and how many came true."""
        sampling = [item for item in batch.items if item.samples]
        windows: list[Draft] = []
        num_accepted = 0
        for item, count in zip(sampling, counts or [1] * len(sampling), strict=True):
            if item.drafts:
                accepted, seen = count - 1, self._evidence.get(item.request, 1)
                num_accepted += accepted
                windows.append(self._window(item.request, item.start, list(item.drafts), accepted, seen))
        return windows, num_accepted

    def _window(self, request: Request, start: int, drafts: list[int], accepted: int, seen: int) -> Draft:
        if self.policy is not None:
            self.policy.verified(request.request_id, seen, len(drafts), accepted)
        kinds = self.drafter.classes
        return Draft(
            request_id=request.request_id,
            index=start + 1 - request.num_prompt_tokens,
            token_ids=tuple(drafts),
            num_accepted=accepted,
            kind=[name for name, least in kinds if seen >= least or name == kinds[0][0]][-1],
            is_loop=is_loop(request.token_ids[max(request.num_prompt_tokens, request.num_tokens - MIN_TOKENS) :]),
        )

    def _forget(self, request: Request) -> None:
        self.drafter.forget(request)
        if self.policy is not None:
            self.policy.forget(request.request_id)


def _can_be_drafted_for(request: Request) -> bool:
    """Not where a mask depends on the token before it (grammars), nor where the text is not all tokens."""
    return request.grammar is None and request.prompt_embeds is None


class DraftTimes:
    """How long a drafter that costs time takes for so many guesses per request: measured, linear in the guesses."""

    def __init__(self, first_ms: float) -> None:
        self.ms_per_draft = first_ms

    def __call__(self, count: int) -> float:
        """Milliseconds for `count` guesses."""
        return self.ms_per_draft * count

    def observe(self, count: int, ms: float) -> None:
        """`count` guesses took `ms`; no more than twice the average is believed, as texts are taken in too."""
        if count:
            self.ms_per_draft += DRAFT_TIME_SHARE * (min(ms / count, 2 * self.ms_per_draft) - self.ms_per_draft)
