"""Two texts to quantize and to judge with, English, Chinese and some code; one for each, so that neither flatters.

Written for this project and under its license. They are small: enough to tell formats and methods apart, not to rank
models.
"""

from __future__ import annotations

from importlib import resources
from typing import Literal


def text(name: Literal["calibration", "evaluation"]) -> str:
    """The whole text; sections are divided by lines of three hyphens."""
    return resources.files(__package__).joinpath(f"{name}.txt").read_text(encoding="utf-8")


def windows(token_ids: list[int], length: int) -> list[list[int]]:
    """Token ids cut into sequences of `length`, the rest of fewer than `length` left out unless there is only that."""
    if length < 2:
        raise ValueError(f"length={length} must be at least 2, or nothing is predicted; try 512")
    cut = [token_ids[start : start + length] for start in range(0, len(token_ids), length)]
    return cut if len(cut) == 1 else [part for part in cut if len(part) == length]
