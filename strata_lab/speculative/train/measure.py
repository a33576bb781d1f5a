"""How many guesses would come true, without generating: the draft's best token against the target's, place by place.

A guess is looked at only while all before it were right, and then the draft has seen the target's own text; so guesses
along a greedy text tell exactly what would have become of every window (`Lesson.runs`). Of drawn texts the same numbers
say how often both would choose the same most likely token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from strata_lab.speculative.traffic import Text
from strata_lab.speculative.train.lessons import Lesson
from strata_lab.speculative.train.network import Network
from strata_lab.speculative.train.texts import Rows, in_groups
from strata_lab.speculative.train.told import Told

MOST_GUESSES = 8  # of a window
TOKENS_AT_ONCE = 8192  # places


@dataclass(frozen=True)
class Acceptance:
    """Expected acceptance on texts that the draft has not learned from.

    Attributes:
        places: tokens that were guessed at.
        by_position: share of true guesses at each place of a window, of those whose predecessors were all true.
        tokens_per_step: tokens per step of the target with windows of 1, 2, ... guesses.
    """

    places: int
    by_position: tuple[float, ...]
    tokens_per_step: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def acceptance(texts: Sequence[Sequence[int]]) -> Acceptance:
    """From how many guesses in a row are true from each token of some texts on; their first comes with the prompt."""
    runs = [text[1:] for text in texts]
    return Acceptance(
        places=sum(map(len, runs)),
        by_position=tuple(_share_true(runs, n) for n in range(MOST_GUESSES)),
        tokens_per_step=tuple(_tokens_per_step(runs, most) for most in range(1, MOST_GUESSES + 1)),
    )


def _share_true(runs: Sequence[Sequence[int]], before: int) -> float:
    """Of the guesses behind `before` true ones, as far as the texts go, how many are true."""
    tried = [run > before for text in runs for run in text[: max(0, len(text) - before)] if run >= before]
    return sum(tried) / len(tried) if tried else 0.0


def _tokens_per_step(runs: Sequence[Sequence[int]], most: int) -> float:
    """Walk along the texts as windows of `most` guesses would: the true ones, and one more from the target."""
    tokens = steps = 0
    for text in runs:
        place = 0
        while place < len(text):
            taken = min(min(text[place], most) + 1, len(text) - place)
            place, tokens, steps = place + taken, tokens + taken, steps + 1
    return tokens / steps if steps else 1.0


class HeldOut:
    """Texts to measure with, and what the target says in them.

    Args:
        lesson: of the drafts that are measured.
        texts: that the draft does not learn from.
        most_tokens: of a row.
        device: of the target.
    """

    def __init__(self, lesson: Lesson, texts: Sequence[Text], most_tokens: int, device: torch.device) -> None:
        self._lesson, self._told = lesson, Told(lesson.teacher, texts, most_tokens, lesson.seen)
        groups = in_groups(texts, range(len(texts)), TOKENS_AT_ONCE, most_tokens)
        self._rows = [Rows.of(texts, group, most_tokens).to(device) for group in groups]
        self._best = [lesson.teacher.best(self._told(rows).states[-1][rows.learned]) for rows in self._rows]

    @torch.no_grad()
    def measure(self, draft: Network) -> Acceptance:
        """Acceptance of a draft, computed in the target's dtype."""
        runs: list[list[int]] = []
        dtype = self._lesson.teacher.network.head.dtype
        cast = type(draft)(draft.config, {name: value.to(dtype) for name, value in draft.tensors.items()})
        for rows, best in zip(self._rows, self._best, strict=True):
            runs += self._lesson.runs(cast, rows, self._told(rows), best)
        return acceptance(runs)
