"""Weights in 4 bits, 16 points per group of 32, 64 or 128 columns.

| granularity | a group stores | w | bits a weight |
|---|---|---|---|
| group32-asym (default) | float16 scale and minimum | scale * code + min | 5, the same numbers as GGUF's Q4_1 |
| group64-asym, group128-asym | the same | the same | 4.5, 4.25 |
| group32 | float16 scale | scale * (code - 8) | 4.5, the same numbers as GGUF's Q4_0 |
| group64, group128 | the same | the same | 4.25, 4.125 |

Asymmetric: scale = (highest - lowest) / 15; an element is off by at most half a scale plus the rounding of scale and
minimum to float16. Symmetric: 16 points around zero cannot be symmetric, so the scale takes the sign that lets code 0
mean the element of largest magnitude, scale = that element / -8 (as in Q4_0); on its side an element is off by half a
scale, on the other, whose last point is 7 scales away, by up to a whole one.

As in GGUF codes are rounded with the float32 scale and minimum. A group whose scale vanishes in float16 gets codes that
mean the minimum (0) or zero (8), where GGUF keeps codes that all mean the same.

Quantizing what `dequantize` returned gives the same codes and scales: always for symmetric groups, and for asymmetric
ones as long as no group sits further from zero than 2^11 times its own width (highest - lowest): beyond that
scale * code is lost beside min in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strata_lab.quant.base import LinearWeight
from strata_lab.quant.grid import Grid
from strata_lab.quant.groups import (
    FLOAT16_MAX,
    GROUP_SIZE,
    check_matrix,
    check_readable,
    divided,
    group_views,
    grouped,
    multiply_groups,
    row_chunks,
)

CODE_MAX = 15
ZERO = 8  # code of zero where there is no minimum
BLOCK = 32  # columns whose codes are packed together, whatever the group size
HALF = BLOCK // 2  # byte j of a block: column j in the low nibble, column j + 16 in the high one
_SHRINKS = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.8, 0.75, 0.7)


@dataclass(frozen=True)
class Int4:
    """uint8 [N, ceil(K/32) * 16], scales float16 [N, ceil(K/group_size)], mins the same or None.

    A ragged last block is filled up with copies of its last column's code; a product must not let them count.
    """

    granularity: str
    group_size: int
    asymmetric: bool
    name: str = "int4"
    shared_rows: int = 1
    largest: float = FLOAT16_MAX

    @property
    def shrinks(self) -> tuple[float, ...]:
        """Of the range; a negative one turns a symmetric grid around, whose longer side is then the other one."""
        return _SHRINKS if self.asymmetric else (*_SHRINKS, -1.14, *(-s for s in _SHRINKS))

    def quantize(self, w: Tensor) -> LinearWeight:
        """[N, K] float -> packed codes.

        Raises `ValueError` for elements that are not finite or beyond float16 (magnitudes above 65504).
        """
        check_matrix(w, self.name, self.largest)
        n, k = w.shape
        data = torch.empty(n, -(-k // BLOCK) * HALF, dtype=torch.uint8, device=w.device)
        scales = torch.empty(n, -(-k // self.group_size), dtype=torch.float16, device=w.device)
        mins = torch.empty_like(scales) if self.asymmetric else None
        for rows in row_chunks(w):
            x = grouped(w[rows], self.group_size)  # [n, groups, size]
            scale, low = self._range(x, 1.0)
            half = scale.half()
            vanished = half == 0
            scales[rows] = torch.where(vanished, 0.0, half).squeeze(-1)
            inverse = torch.where(vanished, 0.0, scale.reciprocal())
            if low is not None and mins is not None:
                mins[rows] = low.squeeze(-1)
                codes = (x - low).mul_(inverse).add_(0.5)
            else:
                codes = (x * inverse).add_(ZERO + 0.5)
            data[rows] = pack_nibbles(codes.to(torch.uint8).clamp_(max=CODE_MAX).flatten(1), k)  # the cast cuts off
        return LinearWeight(self.name, (n, k), data, scales, mins, group_size=self.group_size)

    def dequantize(self, weight: LinearWeight) -> Tensor:
        """[N, K] float32: scale * code is exact (11 + 4 significant bits), adding a minimum rounds once."""
        check_readable(weight, self.name)
        assert weight.scales is not None
        k = weight.shape[1]
        codes = unpack_nibbles(weight.data)[:, :k].float()
        if weight.mins is None:
            return multiply_groups(codes.sub_(ZERO), weight.scales.float(), weight.group_size)
        scales, mins = weight.scales.float(), weight.mins.float()
        for view, groups in group_views(codes, weight.group_size):
            view.mul_(scales[:, groups, None]).add_(mins[:, groups, None])
        return codes

    def fit(self, x: Tensor, shrink: float = 1.0) -> Grid:
        """[N, groups, size] -> scales (and minima) as stored."""
        scale, low = self._range(x, shrink)
        return Grid(scale.half().float() + 0.0, None if low is None else low.half().float())  # + 0.0: no negative zero

    def encode(self, x: Tensor, grid: Grid) -> Tensor:
        """Nearest codes 0..15."""
        inverse = torch.where(grid.scale == 0, 0.0, grid.scale.reciprocal())
        x = x * inverse + ZERO if grid.low is None else (x - grid.low) * inverse
        return x.round_().clamp_(0, CODE_MAX)

    def decode(self, codes: Tensor, grid: Grid) -> Tensor:
        """What the codes mean."""
        return (codes - ZERO) * grid.scale if grid.low is None else codes * grid.scale + grid.low

    def assemble(self, codes: Tensor, grid: Grid) -> LinearWeight:
        """Codes [N, K], whole numbers."""
        n, k = codes.shape
        padded = grouped(codes, BLOCK).flatten(1).to(torch.uint8)
        mins = None if grid.low is None else grid.low.squeeze(-1).half()
        scales = grid.scale.squeeze(-1).half()
        return LinearWeight(self.name, (n, k), pack_nibbles(padded, k), scales, mins, group_size=self.group_size)

    def _range(self, x: Tensor, shrink: float) -> tuple[Tensor, Tensor | None]:
        """float32 scale and lowest value (None without minima), [n, groups, 1]."""
        if self.asymmetric:
            lowest, highest = x.amin(dim=-1, keepdim=True) * shrink, x.amax(dim=-1, keepdim=True) * shrink
            return divided(highest - lowest, CODE_MAX), lowest
        largest = x.gather(-1, x.abs().argmax(dim=-1, keepdim=True))
        return divided(largest * shrink, -ZERO), None


def pack_nibbles(codes: Tensor, columns: int) -> Tensor:
    """uint8 codes [n, at least `columns` rounded up to 32] -> bytes [n, ceil(columns/32) * 16]."""
    blocks = codes[:, : -(-columns // BLOCK) * BLOCK].unflatten(1, (-1, BLOCK))
    return (blocks[..., :HALF] | (blocks[..., HALF:] << 4)).flatten(1)


def unpack_nibbles(data: Tensor) -> Tensor:
    """Bytes [n, blocks * 16] -> uint8 codes [n, blocks * 32]."""
    packed = data.unflatten(1, (-1, HALF))
    return torch.cat([packed & 0x0F, packed >> 4], dim=-1).flatten(1)


VARIANTS = {
    f"group{size}{suffix}": Int4(f"group{size}{suffix}", size, bool(suffix))
    for suffix in ("", "-asym")
    for size in (128, 64, 32)
}
FORMAT = VARIANTS[f"group{GROUP_SIZE}-asym"]
