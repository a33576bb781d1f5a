"""Which variant of a weight format the CPU kernels read, and how the others become it.

The kernels know one shape of scales per format, so a variant with other groups is rewritten before it is packed. This
is the one place where that happens. Where the numbers change, even by a rounding, the change is stated for people.

| stored as | read as | the numbers |
|---|---|---|
| int4, groups of 64 or 128 | int4, groups of 32, scales repeated | the same |
| int4 without minima | int4 with minima of -8 * scale | the same: a power of two times a float16 |
| the same, a scale above 8188 | fp32: float16 does not hold -8 * scale | the same, 8 times the bytes |

It packs nothing and reads no file.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from strata_lab.quant import get_format
from strata_lab.quant.base import LinearWeight
from strata_lab.quant.groups import GROUP_SIZE
from strata_lab.quant.int4 import ZERO


def readable(weight: LinearWeight) -> LinearWeight:
    """`weight` (layout "rows") as the kernels read it; itself if they read it as it is.

    Raises `ValueError` for a variant that no format has.
    """
    if weight.format != "int4":
        return weight
    if weight.group_size == 0 or weight.group_size % GROUP_SIZE:
        raise ValueError(
            f"group_size={weight.group_size} of int4 must be a multiple of {GROUP_SIZE}, a block of its codes; try 32"
        )
    assert weight.scales is not None
    scales, mins = weight.scales, weight.mins
    if mins is None:
        mins = scales * -ZERO
        if not mins.isfinite().all():
            return get_format("fp32").quantize(get_format("int4").dequantize(weight))
    if weight.group_size != GROUP_SIZE:
        repeats, blocks = weight.group_size // GROUP_SIZE, -(-weight.shape[1] // GROUP_SIZE)
        scales, mins = (t.repeat_interleave(repeats, dim=1)[:, :blocks].contiguous() for t in (scales, mins))
    return replace(weight, scales=scales, mins=mins, group_size=GROUP_SIZE)


def change_of(weight: LinearWeight) -> str:
    """What `readable` changes, for people; empty where the kernels read the weight as it is stored."""
    read = readable(weight)
    if read is weight:
        return ""
    more = f"{read.nbytes / weight.nbytes - 1:.0%} more bytes"
    if read.format != weight.format:
        largest = 0.0 if weight.scales is None else weight.scales.abs().max().item()
        return (
            f"the CPU reads this int4 weight as fp32 ({more}): its largest scale, {largest:g}, times -8 is beyond "
            f"float16 ({torch.finfo(torch.float16).max:g}). The numbers are the same"
        )
    return f"the CPU kernels read int4 in groups of 32 with minima ({more}). The numbers are the same"
