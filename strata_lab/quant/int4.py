"""Weights in 4 bits with a float16 scale and minimum per group of 32 columns: the same numbers as GGUF's Q4_1.

w = scale * code + min with codes 0..15 and scale = (highest - lowest) / 15. An element is off by at most half a scale
plus the rounding of scale and minimum to float16. As in Q4_1 codes are rounded with the float32 scale and minimum.
A group whose scale vanishes in float16 gets codes 0, where Q4_1 keeps codes that all mean the minimum.

Quantizing what `dequantize` returned gives the same codes, scales and minima as long as no group sits further from
zero than 2^11 times its own width (highest - lowest): beyond that scale * code is lost beside min in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strata_lab.quant.base import LinearWeight
from strata_lab.quant.groups import FLOAT16_MAX, GROUP_SIZE, check_matrix, check_readable, divided, grouped, row_chunks

CODE_MAX = 15
HALF = GROUP_SIZE // 2  # byte j of a group: column j in the low nibble, column j + 16 in the high one


class Int4:
    """uint8 [N, ceil(K/32) * 16], scales and mins float16 [N, ceil(K/32)].

    A ragged last group is filled up with copies of its last column's code; a product must not let them count.
    """

    name = "int4"

    def quantize(self, w: Tensor) -> LinearWeight:
        """[N, K] float -> packed codes.

        Raises `ValueError` for elements that are not finite or beyond float16 (magnitudes above 65504).
        """
        check_matrix(w, self.name, FLOAT16_MAX)
        n, k = w.shape
        groups = -(-k // GROUP_SIZE)
        data = torch.empty(n, groups * HALF, dtype=torch.uint8, device=w.device)
        scales = torch.empty(n, groups, dtype=torch.float16, device=w.device)
        mins = torch.empty_like(scales)
        for rows in row_chunks(w):
            x = grouped(w[rows])  # [n, groups, 32]
            lowest = x.amin(dim=-1, keepdim=True)
            scale = divided(x.amax(dim=-1, keepdim=True) - lowest, CODE_MAX)
            scales[rows], mins[rows] = scale.squeeze(-1), lowest.squeeze(-1)
            vanished = scales[rows].unsqueeze(-1) == 0
            x = (x - lowest).mul_(torch.where(vanished, 0.0, scale.reciprocal())).add_(0.5)
            codes = x.to(torch.uint8).clamp_(max=CODE_MAX)  # the cast cuts the fraction off
            data[rows] = (codes[..., :HALF] | (codes[..., HALF:] << 4)).flatten(1)
        return LinearWeight(self.name, (n, k), data, scales, mins, group_size=GROUP_SIZE)

    def dequantize(self, weight: LinearWeight) -> Tensor:
        """[N, K] float32: scale * code is exact (11 + 4 significant bits), adding min rounds once."""
        check_readable(weight, self.name)
        assert weight.scales is not None
        assert weight.mins is not None
        packed = weight.data.unflatten(1, (-1, HALF))  # [N, groups, 16]
        codes = torch.cat([packed & 0x0F, packed >> 4], dim=-1).float()  # [N, groups, 32]
        codes.mul_(weight.scales.float().unsqueeze(-1)).add_(weight.mins.float().unsqueeze(-1))
        return codes.flatten(1)[:, : weight.shape[1]].contiguous()


FORMAT = Int4()
