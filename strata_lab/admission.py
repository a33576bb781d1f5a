"""Policies of the scheduler that are swapped live: who waits in which order, when waiting requests may join, how much
of the pool newcomers leave alone, and when prompts get their turn.

Each is an object, so that `schedule` tests no flag. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from strata_lab.request import Request, RequestState

Seniority = tuple[int, int]  # (minus priority, arrival number): smaller is more senior


class QueueOrder(Protocol):
    """In which order waiting requests are admitted, and whom they may displace."""

    def place(self, request: Request, seniority: Seniority) -> tuple[int, ...]:
        """Where a request waits: smaller is sooner, and no two are equal."""
        ...

    def outranks(self, waiting: Request, running: Request) -> bool:
        """Whether a waiting request goes before a running one: computed first, and in its stead if need be."""
        ...


class FirstComeFirstServed:
    """In order of arrival; preempted requests before all new ones, the most senior first. Nobody is displaced."""

    def place(self, request: Request, seniority: Seniority) -> tuple[int, ...]:
        """Preempted requests by seniority, then new ones by arrival."""
        return (0, *seniority) if request.state is RequestState.PREEMPTED else (1, 0, seniority[1])

    def outranks(self, waiting: Request, running: Request) -> bool:
        """Never."""
        return False


class HighestPriorityFirst:
    """By priority, then by arrival, so that a preempted request is before all that came after it at its priority.

    A request of higher priority is computed first, and takes seat and blocks of lower ones where none are free.
    """

    def place(self, request: Request, seniority: Seniority) -> tuple[int, ...]:
        """By seniority."""
        return seniority

    def outranks(self, waiting: Request, running: Request) -> bool:
        """Only by a higher priority: an earlier arrival displaces nobody."""
        return waiting.priority > running.priority


QUEUE_ORDERS: dict[str, type[QueueOrder]] = {"fcfs": FirstComeFirstServed, "priority": HighestPriorityFirst}


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


@dataclass
class Watermark:
    """How much of the pool stays free beside a new request, with hysteresis.

    Args:
        low: share of the blocks that nobody who runs has a claim on and that a newcomer must leave.
        high: what it must leave after the pool ran short, until so much is free again; `low` if that is more.

    Attributes:
        closed: whether the pool ran short and `high` is not free yet.
        num_closures: how often that began.
    """

    low: float = 0.0
    high: float = 0.0
    closed: bool = field(default=False, compare=False)
    num_closures: int = field(default=0, compare=False)

    def ran_short(self) -> None:
        """A request was evicted for want of blocks."""
        if self.high > self.low and not self.closed:
            self.closed = True
            self.num_closures += 1

    def blocks(self, num_blocks: int) -> int:
        """Blocks of a pool that a newcomer must leave now."""
        return int((self.high if self.closed else self.low) * num_blocks)

    def saw(self, spare: int, num_blocks: int) -> None:
        """So many blocks are free that nobody who runs has a claim on."""
        if self.closed and spare >= self.blocks(num_blocks):
            self.closed = False


class PrefillPolicy(Protocol):
    """How prompts and decodes share the steps."""

    def turn(self, has_decodes: bool, has_prompts: bool, budget: int, pressing: bool = False) -> tuple[bool, int]:
        """Whether the next step serves decodes, and how many prompt tokens it may compute.

        Args:
            has_decodes: requests that want one token each.
            has_prompts: running prompts, or requests that wait.
            budget: most tokens of the step.
            pressing: one of those outranks all that decode.
        """
        ...


class MixedPrefill:
    """Prompt slices fill what the decodes of a step leave of its budget."""

    def turn(self, has_decodes: bool, has_prompts: bool, budget: int, pressing: bool = False) -> tuple[bool, int]:
        """Always both."""
        return True, budget


class SplitPrefill:
    """A step is decodes alone or one bounded prompt slice alone, by turns.

    No running stream then waits longer than one slice takes, and steps of decodes keep the shape that is captured.
    Only for a prompt that outranks all of them do they wait until it is computed.

    Args:
        slice_tokens: most prompt tokens of a turn while streams decode.
        decode_steps: steps of decodes between two slices.
    """

    def __init__(self, slice_tokens: int, decode_steps: int = 1) -> None:
        self.slice_tokens, self.decode_steps = slice_tokens, decode_steps
        self._since_slice = 0

    def turn(self, has_decodes: bool, has_prompts: bool, budget: int, pressing: bool = False) -> tuple[bool, int]:
        """Decodes first, then the slice that is due."""
        if not has_decodes or pressing:
            return False, budget
        if has_prompts and self._since_slice >= self.decode_steps:
            self._since_slice = 0
            return False, min(self.slice_tokens, budget)
        self._since_slice += 1
        return True, 0
