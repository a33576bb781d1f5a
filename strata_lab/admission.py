"""Policies of the scheduler that are swapped live: when waiting requests may join, and when prompts get their turn.

Each is an object, so that `schedule` tests no flag. Torch-free.
"""

from __future__ import annotations

from typing import Protocol


class Admission(Protocol):
    """When waiting requests may join those that run; swapped live, so that `schedule` tests no flag."""

    def may_admit(self, num_running: int, budget: int) -> bool:
        """`num_running`: requests running when the step began; `budget`: its tokens not yet given away."""
        ...


class ContinuousAdmission:
    """Join as soon as the step has a token to spare."""

    def may_admit(self, num_running: int, budget: int) -> bool:
        """True while there is budget."""
        return budget > 0


class StaticAdmission:
    """A new batch forms only when the last one has finished; its prompts may then take several steps."""

    def may_admit(self, num_running: int, budget: int) -> bool:
        """True when the step began with nothing running."""
        return num_running == 0


class PrefillPolicy(Protocol):
    """How prompts and decodes share the steps."""

    def turn(self, has_decodes: bool, has_prompts: bool, budget: int) -> tuple[bool, int]:
        """Whether the next step serves decodes, and how many prompt tokens it may compute.

        Args:
            has_decodes: requests that want one token each.
            has_prompts: running prompts, or requests that wait.
            budget: most tokens of the step.
        """
        ...


class MixedPrefill:
    """Prompt slices fill what the decodes of a step leave of its budget."""

    def turn(self, has_decodes: bool, has_prompts: bool, budget: int) -> tuple[bool, int]:
        """Always both."""
        return True, budget


class SplitPrefill:
    """A step is decodes alone or one bounded prompt slice alone, by turns.

    No running stream then waits longer than one slice takes, and steps of decodes keep the shape that is captured.

    Args:
        slice_tokens: most prompt tokens of a turn while streams decode.
        decode_steps: steps of decodes between two slices.
    """

    def __init__(self, slice_tokens: int, decode_steps: int = 1) -> None:
        self.slice_tokens, self.decode_steps = slice_tokens, decode_steps
        self._since_slice = 0

    def turn(self, has_decodes: bool, has_prompts: bool, budget: int) -> tuple[bool, int]:
        """Decodes first, then the slice that is due."""
        if not has_decodes:
            return False, budget
        if has_prompts and self._since_slice >= self.decode_steps:
            self._since_slice = 0
            return False, min(self.slice_tokens, budget)
        self._since_slice += 1
        return True, 0
