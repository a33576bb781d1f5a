"""Weights in int8, symmetric: w = scale * code with codes -127..127, scale = largest magnitude / 127.

| granularity | scales | why |
|---|---|---|
| group32 (default) | float16 per 32 columns | the same numbers as GGUF's Q8_0 |
| channel | float32 per row | a product can apply it after the sum; 6% fewer bytes; what W8A8 checkpoints hold |

An element is off by at most half a scale, plus the rounding of the scale to float16 in groups. As in Q8_0 codes are
rounded with the float32 scale, halves away from zero. A group whose scale vanishes in float16 gets codes 0, where Q8_0
keeps codes that all mean zero.

Quantizing what `dequantize` returned gives the same codes and, in groups, the same scales if every group has a code of
+-127 or is all zero, which `quantize` itself guarantees; a file made by other means need not. A row's float32 scale may
move by one unit in its last place, as 127 * scale is rounded before it is divided by 127 again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strata_lab.quant.base import LinearWeight
from strata_lab.quant.fp32 import FLOAT32_MAX
from strata_lab.quant.grid import Grid
from strata_lab.quant.groups import (
    FLOAT16_MAX,
    GROUP_SIZE,
    check_matrix,
    check_readable,
    divided,
    grouped,
    multiply_groups,
    row_chunks,
)

CODE_MAX = 127
SMALLEST_ROW_SCALE = torch.finfo(torch.float32).tiny  # of a row of (almost) zeros: neither it nor its inverse vanishes


@dataclass(frozen=True)
class Int8:
    """int8 [N, K], scales float16 [N, ceil(K/32)], the last group possibly ragged; by rows float32 [N, 1]."""

    granularity: str
    group_size: int
    name: str = "int8"
    shared_rows: int = 1
    shrinks: tuple[float, ...] = (1.0, 0.99, 0.98, 0.97, 0.96, 0.95, 0.92, 0.88)

    def quantize(self, w: Tensor) -> LinearWeight:
        """[N, K] float -> codes -127..127.

        Raises `ValueError` for elements that are not finite or, in groups, need a scale beyond float16 (magnitudes
        above 8.3e6).
        """
        check_matrix(w, self.name, self.largest)
        n, k = w.shape
        data = torch.empty(n, k, dtype=torch.int8, device=w.device)
        scales = torch.empty(n, -(-k // (self.group_size or k)), dtype=self._dtype, device=w.device)
        for rows in row_chunks(w):
            x = grouped(w[rows], self.group_size)  # [n, groups, size]
            scale = self._scale(x)
            scales[rows] = scale.squeeze(-1)
            vanished = scales[rows].unsqueeze(-1) == 0
            codes = _rounded(x * torch.where(vanished, 0.0, scale.reciprocal()))
            data[rows] = codes.reshape(codes.shape[0], -1)[:, :k]
        return LinearWeight(self.name, (n, k), data, scales, group_size=self.group_size)

    def dequantize(self, weight: LinearWeight) -> Tensor:
        """[N, K] float32: scale * code; exact with a float16 scale (11 + 7 significant bits), else rounded once."""
        check_readable(weight, self.name)
        assert weight.scales is not None
        return multiply_groups(weight.data.float(), weight.scales.float(), weight.group_size)

    def fit(self, x: Tensor, shrink: float = 1.0) -> Grid:
        """[N, groups, size] -> scales as stored."""
        return Grid((self._scale(x) * shrink).to(self._dtype).float())

    def encode(self, x: Tensor, grid: Grid) -> Tensor:
        """Nearest codes, halves away from zero."""
        inverse = torch.where(grid.scale == 0, 0.0, grid.scale.reciprocal())
        return _rounded(x * inverse).clamp_(-CODE_MAX, CODE_MAX)

    def decode(self, codes: Tensor, grid: Grid) -> Tensor:
        """Scale * code."""
        return codes * grid.scale

    def assemble(self, codes: Tensor, grid: Grid) -> LinearWeight:
        """Codes [N, K], whole numbers."""
        scales = grid.scale.squeeze(-1).to(self._dtype)
        shape = (codes.shape[0], codes.shape[1])
        return LinearWeight(self.name, shape, codes.to(torch.int8), scales, group_size=self.group_size)

    @property
    def largest(self) -> float:
        """Largest magnitude that its scales reach."""
        return CODE_MAX * FLOAT16_MAX if self.group_size else FLOAT32_MAX

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float16 if self.group_size else torch.float32

    def _scale(self, x: Tensor) -> Tensor:
        scale = divided(x.abs().amax(dim=-1, keepdim=True), CODE_MAX)
        return scale if self.group_size else scale.clamp_(min=SMALLEST_ROW_SCALE)


def _rounded(x: Tensor) -> Tensor:
    """x rounded to whole numbers, halves away from zero, exactly; x is overwritten."""
    whole = x.trunc()
    return x.sub_(whole).mul_(2).trunc_().add_(whole)


FORMAT = Int8("group32", GROUP_SIZE)
VARIANTS = {"group32": FORMAT, "channel": Int8("channel", 0)}
