"""How often guesses come true: estimates for each request and kind of text, from what happened lately. Torch-free.

The first guess of a window and those behind an accepted one are counted apart: a text that has begun to repeat another
goes on repeating it. A request's own counts are blended with those of all requests, and those with a prior, in the
manner of a Beta distribution; all fade, so that a text that changes is noticed and one that was given up on is tried
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

FADE = 0.92  # of a request's counts, with each of its windows
SHARED_FADE = 0.98  # of all requests' counts, with each window
SKIPPED_FADE = 0.985  # of both, with each window that was not tried for lack of hope
OWN_WEIGHT = 4.0  # windows that the counts of all requests are worth beside a request's own
PRIOR_WEIGHT = 4.0  # windows that the prior is worth beside the counts of all
PRIOR_FIRST = (0.35, 0.6, 0.85)  # by kind of text, from the weakest evidence to the strongest
PRIOR_NEXT = 0.8
UNSURE_TRIES = 3.0  # with fewer windows in all, a request gets no more than `UNSURE_DRAFTS`
UNSURE_DRAFTS = 3


@dataclass(slots=True)
class Counts:
    """Faded counts of windows: their first guesses, and guesses behind an accepted one."""

    first_true: float = 0.0
    first: float = 0.0
    next_true: float = 0.0
    next: float = 0.0

    def add(self, drafted: int, accepted: int, fade: float) -> None:
        """A window of `drafted` guesses of which the first `accepted` came true."""
        self.fade(fade)
        self.first += 1.0
        self.first_true += accepted > 0
        if accepted > 0:
            self.next += min(drafted - 1, accepted)
            self.next_true += accepted - 1

    def fade(self, factor: float) -> None:
        """Forget a part."""
        self.first_true *= factor
        self.first *= factor
        self.next_true *= factor
        self.next *= factor


@dataclass(slots=True)
class Estimates:
    """Estimates of one kind of text, with each request's own counts.

    Attributes:
        prior_first: how often a first guess comes true before anything is known.
        shared: counts of all requests.
        own: counts by request id.
    """

    prior_first: float
    shared: Counts = field(default_factory=Counts)
    own: dict[str, Counts] = field(default_factory=dict)

    def chances(self, request_id: str) -> tuple[float, float]:
        """How likely a first guess and one behind an accepted guess come true."""
        mine, shared = self.own.get(request_id) or Counts(), self.shared
        first = (shared.first_true + PRIOR_WEIGHT * self.prior_first) / (shared.first + PRIOR_WEIGHT)
        later = (shared.next_true + PRIOR_WEIGHT * PRIOR_NEXT) / (shared.next + PRIOR_WEIGHT)
        return (
            (mine.first_true + OWN_WEIGHT * first) / (mine.first + OWN_WEIGHT),
            (mine.next_true + OWN_WEIGHT * later) / (mine.next + OWN_WEIGHT),
        )

    def is_unsure(self, request_id: str) -> bool:
        """Whether too little is known for a long window."""
        mine = self.own.get(request_id)
        return self.shared.first + (mine.first if mine else 0.0) < UNSURE_TRIES

    def add(self, request_id: str, drafted: int, accepted: int) -> None:
        """A window was verified."""
        self.own.setdefault(request_id, Counts()).add(drafted, accepted, FADE)
        self.shared.add(drafted, accepted, SHARED_FADE)

    def skip(self, request_id: str) -> None:
        """A window was not worth trying."""
        if mine := self.own.get(request_id):
            mine.fade(SKIPPED_FADE)
        self.shared.fade(SKIPPED_FADE)


class Acceptance:
    """Estimates for every kind of text that a drafter tells apart.

    Args:
        classes: names and least evidence of each kind, ascending (`Drafter.classes`).
    """

    def __init__(self, classes: Sequence[tuple[str, int]]) -> None:
        self._least = [least for _, least in classes]
        self.names = [name for name, _ in classes]
        priors = PRIOR_FIRST[-len(classes) :] if len(classes) <= len(PRIOR_FIRST) else PRIOR_FIRST[:1] * len(classes)
        self.kinds = [Estimates(prior) for prior in priors]

    def kind_of(self, evidence: int) -> int:
        """Which kind of text so much evidence means."""
        return max(0, sum(evidence >= least for least in self._least) - 1)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        for kind in self.kinds:
            kind.own.pop(request_id, None)
