"""How a decode step of attention is cut up on a card, decided on the host; the numbers are to be tuned on a card."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton

ROWS = 16  # query heads of a group, times tokens, padded to the smallest tile of tl.dot; twice as many were slower
NARROW = 64  # a head's numbers, of which four warps have room for the keys of several new tokens
MAX_SPLITS = 64
LONG = 4096  # tokens from which on the bytes in flight of later tiles are worth their shared memory
PROGRAMS_PER_SM = 2.5  # measured best on an H200: one round of programs, whose registers ...
LONG_PROGRAMS_PER_SM = 2.0  # ... or shared memory fill the card


@dataclass(frozen=True)
class DecodeConfig:
    """What may be tuned on a card.

    Attributes:
        tile: positions that a program loads at a time; a multiple of the block size or a part of it.
        splits: programs per request and KV head.
        num_warps: of a program.
        num_stages: of the loop over a program's second tile and on; each but two keeps a tile in flight.
    """

    tile: int
    splits: int
    num_warps: int = 4
    num_stages: int = 3


@functools.cache
def decode_config(
    batch: int, kv_heads: int, max_tokens: int, wide: bool, sms: int, heavy: bool = False
) -> DecodeConfig:
    """`batch`: requests, or shares of one (`tokens_of`). `wide`: products are in float32. `heavy`: 4 warps spill.

    The splits cover the card when the tables are full.
    """
    long = max_tokens > LONG
    wanted = max(int((LONG_PROGRAMS_PER_SM if long else PROGRAMS_PER_SM) * sms / (batch * kv_heads)), 1)
    tile = 32 if wide else 64
    splits = min(wanted, triton.cdiv(max_tokens, tile), MAX_SPLITS)
    if wide:
        return DecodeConfig(tile, splits, num_warps=8, num_stages=2)
    return DecodeConfig(tile, splits, num_warps=8 if heavy else 4, num_stages=5 if long else 3)


def tokens_of(together: int, group: int) -> int:
    """Tokens that are new together, of a program: all where its tile has room for their heads, or an equal share."""
    return max(n for n in range(1, together + 1) if together % n == 0 and (n == 1 or n * group <= ROWS))
