"""Requests that wait for their turn, in the order of a policy, with the bounds at which new ones are refused.

A queue without a bound answers overload with ever longer waits: everybody is accepted and nobody is served in time.
Two bounds, since neither count nor tokens alone says how long a newcomer would wait. Torch-free. Nothing here decides
when a request starts (`scheduler.py` does).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from strata_lab.admission import QueueOrder, Seniority
from strata_lab.request import Request
from strata_lab.sampling_params import RequestError

MAX_WAITING = 1024
MAX_WAITING_TOKENS = 1 << 20  # a thousand prompts of a thousand tokens


class QueueFull(RequestError):
    """The waiting queue is at its bound; the request was not taken and may be sent again later."""


class WaitingQueue:
    """Waiting requests, the next one first.

    Args:
        order: who comes first.

    Attributes:
        num_tokens: tokens of all waiting requests, output that they had before they were preempted included.
    """

    def __init__(self, order: QueueOrder) -> None:
        self.order = order
        self.num_tokens = 0
        self._entries: list[tuple[tuple[int, ...], Request, Seniority]] = []  # places are distinct

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request, _ in self._entries)

    @property
    def head(self) -> Request | None:
        """Who comes next; None if nobody waits."""
        return self._entries[0][1] if self._entries else None

    def check_room(self, request: Request, max_waiting: int, max_waiting_tokens: int) -> None:
        """Raise `QueueFull` where a newcomer would exceed a bound; an empty queue takes any."""
        if reason := self.why_no_room(request, max_waiting, max_waiting_tokens):
            raise QueueFull(reason)

    def why_no_room(self, request: Request, max_waiting: int, max_waiting_tokens: int) -> str | None:
        """Which bound a newcomer would exceed, with numbers that work; None if it would exceed none."""
        now, tokens = len(self), self.num_tokens
        if now >= max_waiting:
            return (
                f"{now} requests wait and max_waiting={max_waiting}; try again later, or max_waiting={2 * max_waiting}"
            )
        if now and tokens + request.num_tokens > max_waiting_tokens:
            return (
                f"{now} requests with {tokens} tokens wait, {request.num_tokens} more would exceed max_waiting_tokens="
                f"{max_waiting_tokens}; try again later, or max_waiting_tokens={tokens + request.num_tokens}"
            )
        return None

    def push(self, request: Request, seniority: Seniority) -> None:
        """Queue a new or a preempted request."""
        insort(self._entries, (self.order.place(request, seniority), request, seniority), key=lambda entry: entry[0])
        self.num_tokens += request.num_tokens

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is."""
        index = next(i for i, (_, waiting, _) in enumerate(self._entries) if waiting is request)
        del self._entries[index]
        self.num_tokens -= request.num_tokens

    def reorder(self, order: QueueOrder) -> None:
        """Another policy from now on."""
        self.order = order
        self._entries = [
            (order.place(request, seniority), request, seniority) for _, request, seniority in self._entries
        ]
        self._entries.sort(key=lambda entry: entry[0])
