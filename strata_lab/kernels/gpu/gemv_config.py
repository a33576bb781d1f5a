"""How a product of `gemv.py` is cut up: all that is decided on the host.

Nothing here is compiled; the numbers are to be tuned on a card (`bench/sweep_linear.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from strata_lab.quant.base import LinearWeight

LOAD_BYTES = 16  # what one thread asks for at once
MAX_CHUNKS = 8  # of a row; more are spread over more threads
PRELOAD_REGISTERS = 64  # of a thread, for weights on their way
HELD_REGISTERS = 96  # the same where nothing else takes many
WARP = 32
WARPS = 8  # of a program
SHORT = 2048  # columns of a bf16 row that half a warp, or a whole one, requests at once
NARROW = 768  # columns of a bf16 row of which several rows of x go through CUDA cores faster, where it is gated
FEW_ROWS = 2  # of x
LONG = 1 << 15  # outputs from which programs may be large (heads)


@dataclass(frozen=True)
class GemvConfig:
    """How a product is cut up.

    Attributes:
        rows: weight rows of a tile, a power of two.
        chunk: columns of a tile, a power of two.
        pieces: tiles of rows a program owns; even for a gated product (half gate, half up).
        preload: chunks requested before waiting for the previous kernel.
        share: prepare x once per program and hand it around in shared memory (two barriers per chunk and row of x),
            not in every warp.
    """

    rows: int
    chunk: int
    pieces: int
    preload: int
    share: bool = False


def default_config(weight: LinearWeight, t: int, norm: bool, silu_mul: bool, dtype: torch.dtype) -> GemvConfig:
    """Tiles for `t` rows of x. Tunable: every valid configuration is right.

    One row of x: a warp to a row, most of it requested at once, measured best on an H200 (of many small programs an
    incomplete last wave does not matter). More rows leave fewer registers: float32 x is held by every thread.
    """
    outputs = weight.shape[0] // 2 if silu_mul else weight.shape[0]
    per_load = columns_per_load(weight)
    narrow = dtype != torch.float32 and weight.format != "bf16"
    if t == 1 and narrow and weight.format == "fp8" and weight.shape[1] > WARP * per_load:
        big = silu_mul or outputs >= LONG
        warps = WARPS if norm and not big else WARPS // 2
        pieces = 4 if big else 2
        return GemvConfig(warps, WARP * per_load, pieces, HELD_REGISTERS // (4 * pieces), share=norm)
    if t == 1 and dtype != torch.float32 and weight.format == "bf16" and weight.shape[1] <= SHORT:
        lanes = WARP // 2 if weight.shape[1] <= SHORT // 2 else WARP
        warps = WARPS // 2 if norm else WARPS
        pieces = 4 if silu_mul else 2 if norm else 1  # what is gated is normed
        return GemvConfig(warps * WARP // lanes, lanes * per_load, pieces, MAX_CHUNKS, share=norm)
    if is_narrow(weight, t, silu_mul, dtype):
        return GemvConfig(2, WARP * per_load, 4, MAX_CHUNKS)
    most = MAX_CHUNKS if t == 1 else 5 if t == 2 and narrow else 3
    lanes = 8
    while -(-weight.shape[1] // (lanes * per_load)) > most:
        lanes *= 2
    pieces = 4 if outputs >= LONG and t == 1 and weight.format != "bf16" else 2 if silu_mul or t <= 2 else 1
    preload = most if t > 1 else PRELOAD_REGISTERS // (4 * pieces * (2 if weight.mins is not None else 1))
    share = (t > 1 and weight.format != "bf16") or norm or weight.group_size > 0
    return GemvConfig(max(1, WARPS * 32 // lanes), lanes * per_load, pieces, preload, share=share)


def is_narrow(weight: LinearWeight, t: int, silu_mul: bool, dtype: torch.dtype) -> bool:
    """Whether a few rows of x are multiplied faster here than on tensor cores, where the norm takes longer.

    Measured on an H200 in whole steps of the default model: two rows are 20 us of 480 faster, three no faster, four 11
    us slower.
    """
    narrow = weight.format == "bf16" and weight.shape[1] <= NARROW and dtype != torch.float32
    return narrow and silu_mul and 1 < t <= FEW_ROWS


def columns_per_load(weight: LinearWeight) -> int:
    """Columns that one thread gets of what it asks for at once."""
    return LOAD_BYTES // weight.data.element_size() * (2 if weight.format == "int4" else 1)
