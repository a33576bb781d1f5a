"""Does a text go round in circles?

A model that repeats itself is easy to guess: no record may come from that. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_PERIOD = 16  # tokens
MIN_TOKENS = 48  # of the end of a text that must repeat, three rounds of the longest period


def is_loop(token_ids: Sequence[int], least: int = MIN_TOKENS) -> bool:
    """Whether the last `least` tokens repeat the same few, at most a third of them and `MAX_PERIOD`, over and over."""
    tail = list(token_ids[-least:])
    if len(tail) < least:
        return False
    last = tail[-1]  # compared first: that alone rules most periods out
    return any(last == tail[-1 - n] and tail[n:] == tail[:-n] for n in range(1, min(MAX_PERIOD, least // 3) + 1))


def loop_start(token_ids: Sequence[int], least: int = MIN_TOKENS) -> int:
    """Where the first such loop begins; the length of the text where there is none."""
    for end in range(least, len(token_ids) + 1):
        if is_loop(token_ids[end - least : end], least):
            return end - least
    return len(token_ids)
