"""What speculation tells the world: one record per verified proposal, one per change of mind (see `events.py`)."""

from __future__ import annotations

from dataclasses import dataclass

KindOfText = tuple[str, float, float, int]  # name, chance of a first guess and of one behind a true one, guesses made


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposed for one request, and what came of it.

    Attributes:
        request_id: whose text it would go on.
        index: output position of the first proposed token.
        token_ids: the proposal.
        num_accepted: how many of them were taken, from the front.
        kind: what kind of text the drafter took it for.
        is_loop: the text goes round in circles: its speed is no measure of anything.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    num_accepted: int
    kind: str = ""
    is_loop: bool = False

    def count_into(self, drafted: list[int], accepted: list[int]) -> None:
        """Add it to counts of verified and accepted drafts by place in the window, which grow as far as it reaches."""
        missing = len(self.token_ids) - len(drafted)
        drafted += [0] * missing
        accepted += [0] * missing
        for place in range(len(self.token_ids)):
            drafted[place] += 1
            accepted[place] += place < self.num_accepted


@dataclass(frozen=True, slots=True)
class SpeculationEvent:
    """Drafting was stopped because it did not pay, or taken up again, for all texts or for those of a kind.

    Attributes:
        t_s: `time.perf_counter()`, seconds.
        drafter: who drafts.
        state: "on" or "off".
        reason: the measured net speed, for a human.
        kinds: what is expected of each kind of text; no guesses means that drafting is off for it.
    """

    t_s: float
    drafter: str
    state: str
    reason: str
    kinds: tuple[KindOfText, ...] = ()
