"""What every exercise of a notebook must do; the tests of the lessons ask it of each."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

FACTORS = (1e-3, 1 / 8, 0.5, 2.0, 8.0, 1e3)


def name_of(check: Any) -> str:
    """What a test's name calls an exercise."""
    return str(getattr(check, "__qualname__", ""))


def assert_number_is_judged(check: Callable[[Any], Any], truth: float) -> None:
    """None asks, the truth is right, and no hint for a wrong answer contains a number near it."""
    assert check(None).right is None and check(truth).right is True
    for factor in FACTORS:
        verdict = check(truth * factor)
        assert verdict.right is False and len(verdict.text) > 20
        told = [float(n) for n in re.findall(r"\d+(?:\.\d+)?", verdict.text)]
        assert all(abs(n - truth) > 0.05 * truth for n in told), verdict.text


def assert_choice_is_judged(check: Callable[[Any], Any], truth: str, wrong: tuple[str, ...]) -> None:
    """None asks, the truth is right, and every wrong word has a hint of its own that does not name the right one."""
    assert check(None).right is None and check(truth).right is True
    hints = [check(word) for word in wrong]
    assert [hint.right for hint in hints] == [False] * len(wrong)
    assert len({hint.text for hint in hints}) == len(wrong) and all(f'"{truth}"' not in h.text for h in hints)
