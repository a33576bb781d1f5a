"""Exercises that answer: "right, because ...", or a hint; never the solution.

A notebook's checks are methods of a class in its own module here, whose truths come from the engine, the machine or a
measurement in the notebook. They end in `number` or `choice`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ASK = "Write your answer in place of `None` and run the cell again."


@dataclass(frozen=True)
class Verdict:
    """What an exercise answers.

    Attributes:
        right: None where there is no answer yet.
        text: for the reader, Markdown.
    """

    right: bool | None
    text: str

    def __str__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        mark = {None: "✎", True: "✔ **Right.**", False: "✘ **Not yet.**"}[self.right]
        return f"{mark} {self.text}"


def number(
    answer: Any, truth: float, *, because: str, hint: str, within: float = 0.1,
    traps: Sequence[tuple[float, str]] = (),
) -> Verdict:  # fmt: skip
    """Judge a number.

    Args:
        answer: the reader's; None where there is none yet.
        truth: what is right.
        because: why, shown to those who have it.
        hint: shown to those who do not.
        within: relative distance that counts as right.
        traps: (wrong answer, what leads to it), shown in place of the hint to those who fell in.
    """
    if answer is None:
        return Verdict(None, ASK)
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        return Verdict(False, f"`{answer!r}` is not a number; one is asked for, such as `1.5`.")
    if abs(answer - truth) <= within * abs(truth):
        return Verdict(True, because)
    for wrong, reason in traps:
        if abs(answer - wrong) <= within * abs(wrong):
            return Verdict(False, reason)
    return Verdict(False, f"That is too {'much' if answer > truth else 'little'}. {hint}")


def choice(answer: Any, truth: str, *, because: str, hints: Mapping[str, str]) -> Verdict:
    """Judge a choice between words.

    Args:
        answer: the reader's; None where there is none yet.
        truth: the right word.
        because: why, shown to those who have it.
        hints: wrong word to what to think of; with `truth` they are all that may be chosen.
    """
    if answer is None:
        return Verdict(None, ASK)
    if answer == truth:
        return Verdict(True, because)
    if answer in hints:
        return Verdict(False, hints[answer])
    options = ", ".join(f'`"{word}"`' for word in sorted({truth, *hints}))
    return Verdict(False, f"`{answer!r}` is not among the words to choose from: {options}.")
