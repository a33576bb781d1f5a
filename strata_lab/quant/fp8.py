"""Weights in float8 e4m3fn with float32 scales: w = scale * code, scale = largest magnitude / 448.

Three mantissa bits: an element is off by at most 2^-4 of its magnitude, or by 2^-10 of the scale where the code is
subnormal. What shares a scale is the variant:

| granularity | shares a scale | why |
|---|---|---|
| channel (default) | a row | what a product can apply after the sum, so a kernel multiplies bare codes |
| tensor | the matrix | the same product; only useful because checkpoints come that way |
| block128 | 128 x 128 | an outlier costs its neighbours nothing further away; the product scales every 128 columns |

All three store one scale per row (and per 128 columns), repeated where rows share it, so kernels know two shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strata_lab.quant.base import LinearWeight
from strata_lab.quant.fp32 import FLOAT32_MAX
from strata_lab.quant.grid import Grid
from strata_lab.quant.groups import check_matrix, check_readable, divided, grouped, multiply_groups, row_chunks

E4M3_MAX = 448.0
BLOCK = 128
# A row of (almost) zeros takes this scale: the smallest normal float32, so that neither it nor its inverse is flushed.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Fp8:
    """float8_e4m3fn [N, K], scales float32 [N, 1] or, in blocks, [N, ceil(K/128)]."""

    granularity: str
    group_size: int = 0
    shared_rows: int = 1
    name: str = "fp8"
    largest: float = FLOAT32_MAX
    shrinks: tuple[float, ...] = (1.0,)  # the relative error of a float does not care where the range ends

    def quantize(self, w: Tensor) -> LinearWeight:
        """[N, K] float -> codes rounded to nearest even, saturated at 448.

        Raises `ValueError` for elements that are not finite in float32.
        """
        check_matrix(w, self.name, self.largest)
        n, k = w.shape
        data = torch.empty(n, k, dtype=torch.float8_e4m3fn, device=w.device)
        scales = torch.empty(n, -(-k // (self.group_size or k)), dtype=torch.float32, device=w.device)
        whole = self._scale(torch.stack(torch.aminmax(w)).abs().max().float()) if self.shared_rows == 0 else None
        for rows in row_chunks(w, max(1, self.shared_rows)):
            x = grouped(w[rows], self.group_size)
            grid = self.fit(x) if whole is None else Grid(whole.expand(x.shape[0], 1, 1))
            # torch's cast does not saturate: what rounds past 448 would become NaN
            codes = (x / grid.scale).clamp_(-E4M3_MAX, E4M3_MAX)
            data[rows] = codes.flatten(1)[:, :k].to(torch.float8_e4m3fn)
            scales[rows] = grid.scale.squeeze(-1)
        return LinearWeight(self.name, (n, k), data, scales, group_size=self.group_size)

    def dequantize(self, weight: LinearWeight) -> Tensor:
        """[N, K] float32: scale * code, rounded once."""
        check_readable(weight, self.name)
        assert weight.scales is not None
        return multiply_groups(weight.data.float(), weight.scales, weight.group_size)

    def fit(self, x: Tensor, shrink: float = 1.0) -> Grid:
        """[N, groups, size] -> scales, shared as the variant says."""
        amax = x.abs().amax(dim=-1)  # [N, groups]
        if self.shared_rows != 1:
            shared = self.shared_rows or amax.shape[0]
            blocks = torch.stack([part.amax(dim=0) for part in amax.split(shared)])
            amax = blocks.repeat_interleave(shared, dim=0)[: amax.shape[0]]
        return Grid(self._scale(amax * shrink).unsqueeze(-1))

    def encode(self, x: Tensor, grid: Grid) -> Tensor:
        """Nearest codes."""
        return (x / grid.scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()

    def decode(self, codes: Tensor, grid: Grid) -> Tensor:
        """Scale * code."""
        return codes * grid.scale

    def assemble(self, codes: Tensor, grid: Grid) -> LinearWeight:
        """Codes [N, K] that are e4m3 numbers."""
        scales = grid.scale.squeeze(-1).contiguous()
        return LinearWeight(
            self.name, (codes.shape[0], codes.shape[1]), codes.to(torch.float8_e4m3fn), scales,
            group_size=self.group_size,
        )  # fmt: skip

    @staticmethod
    def _scale(amax: Tensor) -> Tensor:
        return divided(amax, E4M3_MAX).clamp_(min=SMALLEST_SCALE)


FORMAT = Fp8("channel")
VARIANTS = {
    "channel": FORMAT,
    "tensor": Fp8("tensor", shared_rows=0),
    "block128": Fp8("block128", group_size=BLOCK, shared_rows=BLOCK),
}
