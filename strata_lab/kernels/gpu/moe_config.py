"""Numbers of the mixture-of-experts kernels that are to be tuned on a card, by weight format."""

from __future__ import annotations

from dataclasses import dataclass

from strata_lab.quant.base import LinearWeight

DECODE_TOKENS = 16
SELECT_WARPS = 16  # of a program that selects
COMPARED = 16384  # pairs of logits that it compares at a time: 32 a thread
ROUTE_TOKENS = 16  # tokens of one program in the many-token routing
COLUMNS = {"bf16": 8, "fp8": 16, "int8": 16, "int4": 32}  # weight columns in a chunk of 16 bytes
WARP = 32  # chunks of a tile that one warp loads at once


@dataclass(frozen=True)
class MoeConfig:
    """Tunable numbers; `config` of the public functions.

    Attributes:
        half: 16-bit activations are multiplied in float16 (`moe_half.py`, `moe_half_int4.py`), where rows allow it;
            only for e4m3, int8 and int4 without minima.
        gate_tiles, gate_warps: of a program's gate rows (and as many up rows): 1, 2 or 4 tiles of a row per warp.
        gate_programs, gate_registers: per multiprocessor, each looping over its share of the tiles, or 0: one program
            per tile; the most registers of a thread, or None: as the compiler likes.
        one_rows, one_warps, one_registers: of `down_one_kernel`: 1 to 8 rows; its warps share a row, 512 bytes each.
        one_late: `LATE` of `down_one_kernel`.
        shared_tiles, shared_warps, shared_programs, shared_registers: `gate_*` with several tokens, where a program
            meets the activations of up to `pairs` of them.
        down_tiles, down_warps, down_programs, down_registers: the same of `down` with several tokens.
        pairs: pairs of (token, slot) that use a tile together when there are several tokens.
        block_n, block_t, block_k, grouped_warps, grouped_stages: of the many-token products; no step crosses
            the end of a group of columns.
        hold: load a whole tile before the first product; off, ptxas interleaves them and uses fewer registers.
        fuse_down: let one token take `down_one_kernel`; off, it computes bit for bit what it does among others.
    """

    half: bool = False
    gate_tiles: int = 2
    gate_warps: int = 4
    gate_programs: int = 0
    gate_registers: int | None = None
    one_rows: int = 4
    one_warps: int = 4
    one_registers: int | None = None
    one_late: bool = False
    shared_tiles: int = 1
    shared_warps: int = 4
    shared_programs: int = 4
    shared_registers: int | None = None
    down_tiles: int = 4
    down_warps: int = 4
    down_programs: int = 4
    down_registers: int | None = None
    pairs: int = 2
    block_n: int = 64
    block_t: int = 64
    block_k: int = 64
    grouped_warps: int = 4
    grouped_stages: int = 3
    hold: bool = True
    fuse_down: bool = True


CONFIGS = {
    "fp8": MoeConfig(
        half=True,
        gate_programs=4,
        one_rows=8,
        one_registers=168,
        one_late=True,
        shared_tiles=2,
        shared_programs=3,
        shared_registers=168,
        down_tiles=8,
        down_registers=128,
    ),
    "bf16": MoeConfig(
        gate_tiles=1,
        one_rows=1,
        one_warps=2,
        one_registers=128,
        shared_warps=8,
        shared_registers=128,
        down_registers=128,
    ),
    # fp8's; where that has a limit ptxas stays within it by itself for sm_90, and with one it spills. To be swept.
    "int8": MoeConfig(
        half=True,
        gate_programs=4,
        one_rows=8,
        one_late=True,
        shared_tiles=2,
        shared_programs=3,
        down_tiles=8,
        down_registers=128,
    ),
    "int8-groups": MoeConfig(
        half=True,
        shared_warps=8,
        down_registers=96,
    ),
    "int4": MoeConfig(gate_tiles=1, down_tiles=1, one_rows=2, pairs=1),
    "int4-centered": MoeConfig(
        half=True,
        gate_programs=4,
        gate_registers=128,
        one_registers=96,
        shared_tiles=2,
        down_tiles=8,
        down_programs=0,
        down_registers=80,
        pairs=1,
    ),
}


def config_name(weight: LinearWeight) -> str:
    """The key in `CONFIGS` of what experts like this run with."""
    if weight.format == "int4" and weight.mins is None:
        return "int4-centered"
    return "int8-groups" if weight.format == "int8" and weight.group_size else weight.format
