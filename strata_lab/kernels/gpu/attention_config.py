"""How a decode step of attention is cut up on a card, decided on the host; the numbers are to be tuned on a card."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton

MAX_SPLITS = 64
LONG = 4096  # tokens from which on the bytes in flight of later tiles are worth their shared memory
WINDOW_ROWS, WINDOW_TILE = 5, 128  # of so many tokens that are new together, all of which read the same past
NARROW = 64  # a head's numbers, of which a program holds twice as large a tile
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
    batch: int, kv_heads: int, max_tokens: int, wide: bool, sms: int, together: int = 1, width: int = NARROW
) -> DecodeConfig:
    """`wide`: products are in float32. The splits cover the card when the tables are full.

    `together`: rows of `batch` that are one text's; `width`: of a head. Eight rows of the default model over 900 tokens
    take 5.3 us with large tiles for 7.6, over 300 tokens 5.1 for 5.3 (H200).
    """
    long = max_tokens > LONG
    wanted = max(int((LONG_PROGRAMS_PER_SM if long else PROGRAMS_PER_SM) * sms / (batch * kv_heads)), 1)
    large = together >= WINDOW_ROWS and width <= NARROW and not long  # more stages of them would not fit
    tile = 32 if wide else WINDOW_TILE if large else 64
    splits = min(wanted, triton.cdiv(max_tokens, tile), MAX_SPLITS)
    if wide:
        return DecodeConfig(tile, splits, num_warps=8, num_stages=2)
    return DecodeConfig(tile, splits, num_stages=5 if long else 3)
