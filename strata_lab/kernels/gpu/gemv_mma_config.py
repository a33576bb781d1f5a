"""How a product of `gemv_mma.py` is cut up, and which products it takes: all that is decided on the host.

Nothing here is compiled; the numbers are to be tuned on a card (`bench/sweep_linear.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from strata_lab.quant.base import LinearWeight

MAX_ROWS = 16  # of x
MAX_COLUMNS = 32  # of the product, for which a program has registers
REGISTERS = 64  # for weights on their way
WIDE_X_REGISTERS = 32  # the same where x takes many
HELD_REGISTERS = 96  # the same where x takes few
INT4_PRELOAD, INT4_WIDE_PRELOAD = 12, 5  # tiles; the latter where x takes many registers
SHORT_TILES = 48  # of a row that four warps share
SHORT_PRELOAD, WIDE_SHORT_PRELOAD = 12, 8  # tiles of such a row; the latter where results or pieces are many
BIG, LONG = 1 << 14, 1 << 15  # rows of a weight
TILE_ROWS = 8  # of a weight tile: one per four lanes
TILE_BYTES = 64  # of a weight row in a tile: 16 per lane
ALIGNMENT = 16


@dataclass(frozen=True)
class MmaConfig:
    """How a product is cut up.

    Attributes:
        pieces: tiles of eight weight rows a program owns: 1 or even; even for a gated product (half gate, half up).
        warps: that share the columns, a power of two.
        preload: tiles of columns that a warp requests before waiting for the previous kernel.
        ahead: tiles of x that are on their way.
        block: rows of x of a program; all, where they are no more.
    """

    pieces: int
    warps: int
    preload: int
    ahead: int = 2
    block: int = MAX_ROWS


def default_config(weight: LinearWeight, t: int) -> MmaConfig:
    """Tiles for `t` rows of x. Tunable: every valid configuration is right."""
    tiles = -(-row_bytes(weight) // TILE_BYTES)  # of a row
    if weight.format == "fp8" and tiles > 8:
        return _measured(weight.shape[0], tiles, t > 8)
    if weight.format == "int8" and weight.group_size == 0 and tiles > 8:  # as many bytes; more of x ahead would spill
        return replace(_measured(weight.shape[0], tiles, t > 8), ahead=1)
    if weight.format == "bf16" and tiles <= SHORT_TILES:  # measured on an H200 with 576 and 1,536 columns
        if t > 8:
            return MmaConfig(2, 4, WIDE_SHORT_PRELOAD, 2, MAX_COLUMNS)
        if weight.shape[0] >= LONG:
            return MmaConfig(4, 2, WIDE_SHORT_PRELOAD, 2, MAX_COLUMNS)
        return MmaConfig(2, 2 if tiles <= SHORT_TILES // 2 else 4, SHORT_PRELOAD, 2, MAX_COLUMNS)
    warps = 16 if tiles > 128 and weight.group_size == 0 else 8 if tiles > 4 else 4
    held = 8 + (4 if weight.group_size else 0)
    wide = t * slots(weight) > 8
    if weight.format == "int4" and not wide and tiles > 8:  # measured on an H200, groups of 128
        return MmaConfig(2, 4, min(-(-tiles // 4), INT4_PRELOAD), 3, MAX_COLUMNS // slots(weight))
    if weight.format == "int4" and slots(weight) == 1 and weight.mins is None and tiles > 8:
        preload = min(-(-tiles // 4), INT4_WIDE_PRELOAD)
        if tiles <= SHORT_TILES:
            # Measured on an H200 with 4,096 columns (7.0 us for 11.2) and gated with 2,560 (33.4 for 35.3): the weights
            # are read once more, from the cache, by programs that unpack a quarter of the columns.
            return MmaConfig(4, 4, preload, 2, MAX_ROWS // 2)
        # Not measured. Eight warps of 150 registers let one program onto a multiprocessor, with 16 KB on their way;
        # four of 140 let three, with 60 KB.
        return MmaConfig(2, 4, preload, 1, MAX_ROWS)
    preload = max(1, (WIDE_X_REGISTERS if wide else REGISTERS) // held)
    ahead = 1 if wide and weight.format in ("int4", "bf16") else 2
    return MmaConfig(2, warps, preload, ahead, MAX_COLUMNS // slots(weight))


def _measured(rows: int, tiles: int, wide: bool) -> MmaConfig:
    """Best, or nearly, of a sweep over the products of the reference models in FP8 on an H200; `wide`: 9 to 16 rows."""
    big, long = rows >= BIG, rows >= LONG
    if wide:
        warps, pieces = 4, 2 if tiles <= SHORT_TILES else 1
    else:
        warps, pieces = 4 if tiles <= SHORT_TILES else 8, 4 if big else 2
    chunks, fit = -(-tiles // warps), HELD_REGISTERS // (4 * pieces)
    most = min(chunks, fit)
    half = (big if wide else long) or (pieces == 2 and chunks > fit)
    return MmaConfig(pieces, warps, most // 2 if half else most, 2 if half else 1)


def slots(weight: LinearWeight) -> int:
    """Groups of columns that four lanes of a row hold: columns of the product per row of x."""
    cols = 128 if weight.format == "int4" else 64
    return cols // weight.group_size if 0 < weight.group_size < cols else 1


def row_bytes(weight: LinearWeight) -> int:
    """Bytes of a row of codes."""
    k = weight.shape[1]
    return -(-k // 32) * 16 if weight.format == "int4" else k * weight.data.element_size()


def supports(x: Tensor, weight: LinearWeight, norm_weight: Tensor | None) -> bool:
    """Whether `gemv_mma` can do it: 16-bit activations, everything 16-byte aligned, no fp8 in groups."""
    if x.dtype != torch.bfloat16 and (x.dtype != torch.float16 or weight.format == "bf16"):
        return False
    if norm_weight is not None and norm_weight.dtype != x.dtype:
        return False
    tensors = (x, weight.data) if norm_weight is None else (x, weight.data, norm_weight)
    return (
        0 < x.shape[0] <= MAX_ROWS
        and weight.shape[1] % 32 == 0
        and weight.group_size in ((0,) if weight.format == "fp8" else (0, 32, 64, 128))
        and weight.nbytes < 1 << 33
        and all(part is None or part.data_ptr() % 4 == 0 for part in (weight.scales, weight.mins))
        and all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)
    )
