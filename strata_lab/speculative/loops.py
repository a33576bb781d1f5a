"""Does a text go round in circles?

A model that repeats itself is easy to guess: no record may come from that. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_PERIOD = 16  # tokens
MIN_TOKENS = 48  # of the end of a text that must repeat, three rounds of the longest period


def is_loop(token_ids: Sequence[int]) -> bool:
    """Whether the last `MIN_TOKENS` tokens repeat the same few, at most `MAX_PERIOD`, over and over."""
    tail = list(token_ids[-MIN_TOKENS:])
    if len(tail) < MIN_TOKENS:
        return False
    last = tail[-1]  # compared first: that alone rules most periods out
    return any(last == tail[-1 - n] and tail[n:] == tail[:-n] for n in range(1, MAX_PERIOD + 1))


def loop_start(token_ids: Sequence[int]) -> int:
    """Where the first such loop begins; the length of the text where there is none."""
    for end in range(MIN_TOKENS, len(token_ids) + 1):
        if is_loop(token_ids[end - MIN_TOKENS : end]):
            return end - MIN_TOKENS
    return len(token_ids)
