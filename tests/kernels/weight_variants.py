"""Weights of every variant of every format, and what they stand for, without the code that quantizes.

A name is a format and its group: "int4g64" has codes about 8, "int4g64-min" minima; "int8row" and "fp8" a float32
scale per row; "fp8g128" one per 128 columns.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from strata_lab.quant.base import LinearWeight

INT4 = ("int4g32", "int4g64", "int4g128", "int4g64-min", "int4g128-min")
VARIANTS = (*INT4, "int8row", "fp8g128")  # beside the defaults


def make(name: str, n: int, k: int, device: torch.device) -> LinearWeight:
    """A random weight [n, k] of about unit gain; codes beyond the last column are noise that must not count."""
    stored, group, minima = _parsed(name)
    groups = -(-k // group) if group else 1
    unit = k**-0.5
    spread = 0.5 + torch.rand(n, groups)
    if stored == "int4":
        data = torch.randint(0, 256, (n, -(-k // 32) * 16), dtype=torch.uint8)
        scales = (spread * unit / 4.6).half()  # codes deviate by 4.6
        mins = (torch.randn(n, groups) * unit - 7.5 * scales.float()).half() if minima else None
    elif stored == "int8":
        data = torch.randint(-127, 128, (n, k), dtype=torch.int8)
        scales, mins = spread * unit / 73, None
        scales = scales if group == 0 else scales.half()
    else:
        data = (torch.randn(n, k) * 80).clamp(-448, 448).to(torch.float8_e4m3fn)
        scales, mins = spread * unit / 80, None
    return LinearWeight(stored, (n, k), data, scales, mins, group).to(device)


def exact(weight: LinearWeight) -> Tensor:
    """[N, K] float64 of a weight in any format, from the interface's definition alone."""
    n, k = weight.shape
    if weight.format == "int4":
        packed = weight.data.long().view(n, -1, 16)
        codes = torch.cat([packed & 15, packed >> 4], dim=2).flatten(1)[:, :k].double()
        codes -= 0 if weight.mins is not None else 8
    else:
        codes = weight.data.double()
    if weight.scales is not None:
        group = torch.arange(k, device=codes.device) // (weight.group_size or k)
        codes = codes * weight.scales.double()[:, group]
        if weight.mins is not None:
            codes = codes + weight.mins.double()[:, group]
    return codes


def _parsed(name: str) -> tuple[str, int, bool]:
    found = re.fullmatch(r"(fp8|int8|int4)(?:g(\d+)|row)?(-min)?", name)
    assert found, name
    return found[1], int(found[2] or 0), found[3] is not None
