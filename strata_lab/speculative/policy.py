"""How many guesses are worth their cost: estimated gain against measured cost. Torch-free.

A guess is worth the chance that it and all before it come true, and costs what the step becomes longer by. All requests
of a step share its cost, so their guesses compete: taken in order of worth, as many as make the step's tokens per
millisecond the highest, or none where plain decoding is faster. That alone shortens windows as the batch grows, as
acceptance falls, or as verification becomes dearer (experts, a slow device).

Estimates may be wrong, so the outcome is held against the clock: where steps with drafts were slower than plain ones
would have been, drafting stops for that batch size, for a while that doubles each time, and is tried again (hysteresis:
`OFF_BELOW` and `ON_ABOVE`). Where not even guesses that nearly all come true would pay, nobody is asked for any: such a
batch costs what it costs without speculation. It never decides what is right, only what is tried.

Where steps are queued ahead of the host, going from plain steps to those with drafts, or back, leaves the device
without work for a while. What that takes is measured (`switch_ms`) and shared among the steps that follow
(`SWITCH_STEPS`), so that nobody goes back and forth with a text that invites guesses in every other step.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from strata_lab.draft_events import KindOfText
from strata_lab.speculative.acceptance import UNSURE_DRAFTS, Acceptance
from strata_lab.speculative.costs import StepCosts

MARGIN = 1.06  # a plan must promise this much more than plain decoding
OFF_BELOW = 0.99  # net speed of steps with drafts over plain ones
ON_ABOVE = 1.02
JUDGED_STEPS = 16  # steps with drafts that a verdict needs
FIRST_PAUSE, LONGEST_PAUSE = 64, 4096  # steps
REFRESH_STEPS = 96  # a plain step after so many with drafts, to know what it costs now
TOLD_STEPS = 64  # between two looks at which kinds of text get guesses
PAUSE = 4.0  # times what is expected: a step that took longer stood still for another reason, and is judged as this
SWITCH_STEPS = 8  # that a change between plain steps and those with drafts has to pay for itself in
SWITCH_SHARE = 0.2  # of what the latest one took in the average of one
REFRESH_COST = 0.005  # of the time of steps with drafts, that plain ones may take which only tell what they cost
HOPE = 0.95  # of guesses that come true in the best of texts
HOPE_STEPS = 64  # for which it is believed that there is, or is no, hope at a batch size: costs change slowly


@dataclass(slots=True)
class _Trial:
    """Net speed at one batch size (rounded up to a power of two).

    Attributes:
        earned_ms: what plain steps would have taken for the tokens that steps with drafts gave.
        spent_ms: what these took.
        steps: how many they are; fading, as both sums.
        resting: steps until drafting is tried again.
        pause: how long the last rest was.
        proving: it was off, and has yet to show that it pays.
        state, reason: "on" or "off", and why, for a human.
    """

    earned_ms: float = 0.0
    spent_ms: float = 0.0
    steps: int = 0
    resting: int = 0
    pause: int = 0
    proving: bool = False
    state: str = "on"
    reason: str = "no verdict yet"

    @property
    def net(self) -> float:
        return self.earned_ms / self.spent_ms if self.spent_ms else 1.0


class DraftPolicy:
    """Chooses window lengths and learns from their outcome.

    Args:
        costs: of steps.
        classes: kinds of text (`Drafter.classes`).
        most: guesses per request and step at most.
        draft_ms: what the drafter takes to make so many guesses for each request; 0 for a look-up.
    """

    def __init__(
        self,
        costs: StepCosts,
        classes: Sequence[tuple[str, int]],
        most: int,
        draft_ms: Callable[[int], float] = lambda count: 0.0,
    ) -> None:
        self.costs, self.most, self.draft_ms = costs, most, draft_ms
        self.acceptance = Acceptance(classes)
        self._trials: dict[int, _Trial] = {}
        self._latest = self._trial(1)
        self._hopes: dict[int, tuple[float, int]] = {}  # requests to best gain, and steps until it is computed again
        self._since_plain = self._since_told = 0
        self.switch_ms = 0.0  # what going from plain steps to those with drafts, or back, adds to a step
        self._told: tuple[Any, ...] = ("on",)

    # -- before a step --------------------------------------------------------------------------------------------

    def rests(self, num_requests: int) -> bool:
        """Whether nothing is to be drafted in this step; to be asked once a step."""
        trial = self._latest = self._trial(num_requests)
        if trial.resting:
            trial.resting -= 1
            return True
        if self._hope(num_requests) < MARGIN:
            trial.state = "off"
            trial.reason = f"no step that verifies guesses is known to pay with {_requests(num_requests)}"
            return True
        trial.state = "on"
        twice = 2 * self.switch_ms / (REFRESH_COST * self.costs.plain_ms(num_requests))
        return self._since_plain >= max(REFRESH_STEPS, twice)

    def _hope(self, num_requests: int) -> float:
        """How much faster steps could be with the best of guesses."""
        gain, steps = self._hopes.get(num_requests, (0.0, 0))
        if not steps:
            gain, steps = self.costs.best_gain(num_requests, self.most, HOPE, self.draft_ms), HOPE_STEPS
        self._hopes[num_requests] = gain, steps - 1
        return gain

    def is_hopeless(self, num_requests: int) -> bool:
        """Whether no step that verifies guesses was known to pay with so many when that was last asked."""
        return self._hopes.get(num_requests, (MARGIN, 0))[0] < MARGIN

    def plan(self, request_ids: Sequence[str], evidence: Sequence[int], num_requests: int) -> list[int]:
        """Guesses for each request; evidence 0 gets none.

        Args:
            request_ids: that decode and could be drafted for.
            evidence: what the drafter sees of each.
            num_requests: of the step, those without drafts included.
        """
        acceptance = self.acceptance
        kinds = [acceptance.kinds[acceptance.kind_of(e)] for e in evidence]
        chances = [kind.chances(i) for kind, i in zip(kinds, request_ids, strict=True)]
        caps = [
            0 if not seen else min(self.most, UNSURE_DRAFTS) if kind.is_unsure(i) else self.most
            for kind, seen, i in zip(kinds, evidence, request_ids, strict=True)
        ]
        counts = self._best(chances, caps, num_requests, self.switch_ms / SWITCH_STEPS)
        for kind, seen, count, i in zip(kinds, evidence, counts, request_ids, strict=True):
            if seen and not count:
                kind.skip(i)
        return counts

    def _best(
        self, chances: Sequence[tuple[float, float]], caps: Sequence[int], num_requests: int, switch_ms: float = 0.0
    ) -> list[int]:
        """As many guesses of each as make tokens per millisecond the highest; a step of the other kind than the last
        one takes `switch_ms` longer.
        """
        going_on = self._since_plain > 0
        to_plain_ms, to_drafts_ms = (switch_ms, 0.0) if going_on else (0.0, switch_ms)
        best_rate, best = num_requests / (self.costs.plain_ms(num_requests) + to_plain_ms) * MARGIN, 0
        heap = [(-first, i) for i, (first, _) in enumerate(chances) if caps[i]]
        heapq.heapify(heap)
        taken: list[int] = []
        counts, tokens = [0] * len(caps), float(num_requests)
        room = self.costs.most_tokens - num_requests
        while heap and len(taken) < room:
            worth, i = heap[0]
            counts[i] += 1
            taken.append(i)
            tokens -= worth
            ms = self.costs.window_ms(num_requests + len(taken)) + self.draft_ms(max(counts[i], counts[taken[0]]))
            ms += to_drafts_ms
            if tokens / ms > best_rate:
                best_rate, best = tokens / ms, len(taken)
            if counts[i] < caps[i]:
                heapq.heapreplace(heap, (worth * chances[i][1], i))
            else:
                heapq.heappop(heap)
        for i in taken[best:]:
            counts[i] -= 1
        return counts

    # -- after a step ---------------------------------------------------------------------------------------------

    def verified(self, request_id: str, evidence: int, drafted: int, accepted: int) -> None:
        """A window's outcome."""
        kind = self.acceptance.kinds[self.acceptance.kind_of(evidence)]
        kind.add(request_id, drafted, accepted)

    def observe(
        self, num_requests: int, num_drafts: int, num_accepted: int, ms: float | None, draft_ms: float = 0.0,
        began: bool = False,
    ) -> bool:  # fmt: skip
        """A step of decodes was made; whether there is news: of `state`, or of which kinds of text get guesses.

        Args:
            num_requests: that decoded.
            num_drafts, num_accepted: of all of them.
            ms: what it took; None where that tells nothing of such steps.
            draft_ms: the part of it in which the drafter guessed (`DraftPolicy.draft_ms` tells of that).
            began: nothing was queued before it, so that `ms` has in it what a change of kind takes.
        """
        changed_back = self._since_plain > 0 and not num_drafts
        self._since_plain = self._since_plain + 1 if num_drafts else 0
        if ms is not None:
            num_tokens = num_requests + num_drafts
            if num_drafts:
                most_ms = PAUSE * (self.costs.window_ms(num_tokens) + draft_ms)
                self._judge(self._trial(num_requests), num_requests, num_accepted, min(ms, most_ms))
            if began:
                self._began(num_requests, num_tokens, ms, changed_back)
            else:
                self.costs.observe(num_tokens, num_drafts > 0, ms - draft_ms)
        self._since_told += 1
        if self.state == self._told[0] and self._since_told < TOLD_STEPS:
            return False
        before, self._since_told = self._told, 0
        self._told = self.state, *(guesses > 0 for _, _, _, guesses in self.kinds(num_requests))
        return self._told != before

    def _began(self, num_requests: int, num_tokens: int, ms: float, changed_back: bool) -> None:
        """A step with nothing queued before it took `ms`: what is more than such steps take is the change's."""
        drafts = num_tokens > num_requests
        expected_ms = self.costs.window_ms(num_tokens) if drafts else self.costs.plain_ms(num_requests)
        extra_ms = min(max(0.0, ms - expected_ms), PAUSE * expected_ms)
        self.switch_ms += SWITCH_SHARE * (extra_ms - self.switch_ms)
        if changed_back:  # plain decoding would not have had it
            self._trial(num_requests).spent_ms += extra_ms

    @property
    def state(self) -> str:
        """ "on" or "off", at the batch size of the latest step."""
        return self._latest.state

    @property
    def reason(self) -> str:
        """Why, for a human."""
        return self._latest.reason

    def verdict(self, num_requests: int) -> tuple[str, str]:
        """State and reason at a batch size."""
        return self._trial(num_requests).state, self._trial(num_requests).reason

    def kinds(self, num_requests: int) -> tuple[KindOfText, ...]:
        """What is expected of each kind of text: name, chances of a first and of a next guess, guesses that pay.

        The guesses are those of a request that nothing is known of, where all others of a step get none.
        """
        found = []
        for name, kind in zip(self.acceptance.names, self.acceptance.kinds, strict=True):
            first, later = kind.chances("")
            found.append((name, first, later, self._best([(first, later)], [self.most], num_requests)[0]))
        return tuple(found)

    def _judge(self, trial: _Trial, num_requests: int, num_accepted: int, ms: float) -> None:
        keep = 1 - 1 / (2 * JUDGED_STEPS)
        plain_ms = self.costs.plain_ms(num_requests)
        trial.earned_ms = trial.earned_ms * keep + plain_ms * (num_requests + num_accepted) / num_requests
        trial.spent_ms = trial.spent_ms * keep + ms
        trial.steps += 1
        if trial.steps < JUDGED_STEPS:
            return
        text = f"steps with drafts gave {trial.net:.2f} times the tokens of plain ones"
        if trial.net < (ON_ABOVE if trial.proving else OFF_BELOW):
            trial.pause = min(LONGEST_PAUSE, 2 * trial.pause) if trial.proving else FIRST_PAUSE
            trial.resting, trial.proving = trial.pause, True
            trial.earned_ms = trial.spent_ms = 0.0
            trial.steps = 0
            trial.state = "off"
            trial.reason = f"{text} with {_requests(num_requests)}; tried again in {trial.pause} steps"
        else:
            trial.proving = False
            trial.state, trial.reason = "on", f"{text} with {_requests(num_requests)}"

    def _trial(self, num_requests: int) -> _Trial:
        return self._trials.setdefault((num_requests - 1).bit_length(), _Trial())

    def net(self, num_requests: int) -> float:
        """Tokens per second of steps with drafts over that of plain steps, lately, at this batch size."""
        return self._trial(num_requests).net

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self.acceptance.forget(request_id)


def _requests(count: int) -> str:
    return "one request" if count == 1 else f"{count} requests"
