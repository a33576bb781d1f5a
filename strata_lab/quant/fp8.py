"""Weights in float8 e4m3fn with one float32 scale per row: w = scale * code, scale = largest magnitude / 448.

Three mantissa bits: an element is off by at most 2^-4 of its magnitude, or by 2^-10 of the scale where the code is
subnormal. One scale per row is what a product can apply after the sum, so a kernel multiplies bare codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strata_lab.quant.base import LinearWeight
from strata_lab.quant.fp32 import FLOAT32_MAX
from strata_lab.quant.groups import check_matrix, check_readable, divided, row_chunks

E4M3_MAX = 448.0
# A row of (almost) zeros takes this scale: the smallest normal float32, so that neither it nor its inverse is flushed.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class Fp8:
    """float8_e4m3fn [N, K], scales float32 [N, 1], group_size 0."""

    name = "fp8"

    def quantize(self, w: Tensor) -> LinearWeight:
        """[N, K] float -> codes rounded to nearest even, saturated at 448.

        Raises `ValueError` for elements that are not finite in float32.
        """
        check_matrix(w, self.name, FLOAT32_MAX)
        n, k = w.shape
        data = torch.empty(n, k, dtype=torch.float8_e4m3fn, device=w.device)
        scales = torch.empty(n, 1, dtype=torch.float32, device=w.device)
        for rows in row_chunks(w):
            x = w[rows].float()
            scale = divided(x.abs().amax(dim=1, keepdim=True), E4M3_MAX).clamp_(min=SMALLEST_SCALE)
            # torch's cast does not saturate: what rounds past 448 would become NaN
            data[rows] = (x / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
            scales[rows] = scale
        return LinearWeight(self.name, (n, k), data, scales)

    def dequantize(self, weight: LinearWeight) -> Tensor:
        """[N, K] float32: scale * code, rounded once."""
        check_readable(weight, self.name)
        assert weight.scales is not None
        return weight.data.float().mul_(weight.scales)


FORMAT = Fp8()
