"""What a drafter is: something that guesses how a text goes on, cheaply. Torch-free.

A drafter never decides how many guesses are worth it (`policy.py`) and never whether they are right (`verifier.py`), so
a bad one costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from strata_lab.request import Request


class Drafter(Protocol):
    """Guesses the next tokens of requests that decode.

    Attributes:
        name: for events and texts.
        classes: what kinds of text it tells apart, by the evidence it sees: names, and the least evidence of each,
            ascending.
        look_is_work: whether `look` computes: a model takes in texts that it is to guess for, so it is asked only where
            guesses are wanted; a look-up just sees what there is.
        costs_time: whether `draft` costs time worth counting: a model runs once per guess, a look-up costs nothing.
    """

    name: str
    classes: tuple[tuple[str, int], ...]
    costs_time: bool
    look_is_work: bool

    @property
    def captures(self) -> int:
        """Captures made so far, by what it runs on the host."""
        ...

    def look(self, requests: Sequence[Request]) -> list[int]:
        """Evidence for each request that its next tokens can be guessed; 0: it has nothing to offer."""
        ...

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """At most `counts[i]` guesses for each request, just looked at with evidence above 0."""
        ...

    def forget(self, request: Request) -> None:
        """A request has ended."""
        ...
