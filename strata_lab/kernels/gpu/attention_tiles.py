"""What the attention kernels share: finding a position's block, the number format of products, arrival counters."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata_lab.kernels.gpu import launch

MIN_COUNTERS = 1 << 16
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def block_ids(table_ptr, first, limit, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Blocks of the positions first : first + TILE as [TILE, 1]; scalar loads, so nothing passes shared memory."""
    rows = tl.arange(0, TILE)[:, None]
    ids = tl.zeros([TILE, 1], tl.int32)
    for j in tl.static_range((TILE + BLOCK_SIZE - 1) // BLOCK_SIZE):
        start = first + j * BLOCK_SIZE
        block = tl.load(table_ptr + start // BLOCK_SIZE, mask=start < limit, other=0)
        ids = tl.where(rows // BLOCK_SIZE == j, block, ids)
    return ids


def operand(x: torch.dtype, cache: torch.dtype) -> tuple[Any, str]:
    """What tl.dot multiplies, and its precision: narrow only where every cached number is exact in it.

    float8 goes to float16 in one instruction, to bfloat16 in three; q beyond 65504 would overflow in it.
    """
    if launch.INTERPRETED or x == torch.float32 or cache == torch.float32:
        return tl.float32, "ieee" if launch.INTERPRETED else "tf32x3"
    if cache == torch.bfloat16:
        return (tl.bfloat16, "tf32") if x == torch.bfloat16 else (tl.float32, "tf32x3")
    return tl.float16, "tf32"


_counters: dict[torch.device, list[Tensor]] = {}


def counters(device: torch.device, count: int) -> Tensor:
    """Zeros that every call leaves as zeros. Old ones stay alive: captured graphs hold their addresses.

    One stream at a time may run attention on a device.
    """
    kept = _counters.setdefault(device, [])
    if not kept or kept[-1].numel() < count:
        assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "run the step once before capture"
        kept.append(torch.zeros(max(count, MIN_COUNTERS), dtype=torch.int32, device=device))
    return kept[-1]
