"""Weights in int8 with one float16 scale per group of 32 columns: w = scale * code, the same numbers as GGUF's Q8_0.

scale = largest magnitude / 127; an element is off by at most half a scale plus the rounding of the scale to float16.
As in Q8_0 codes are rounded with the float32 scale, halves away from zero. A group whose scale vanishes in float16
gets codes 0, where Q8_0 keeps codes that all mean zero.

Quantizing what `dequantize` returned gives the same codes and scales if every group has a code of +-127 or is all
zero, which `quantize` itself guarantees; a Q8_0 file made by other means need not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strata_lab.quant.base import LinearWeight
from strata_lab.quant.groups import FLOAT16_MAX, GROUP_SIZE, check_matrix, check_readable, divided, grouped, row_chunks

CODE_MAX = 127


class Int8:
    """int8 [N, K], scales float16 [N, ceil(K/32)]; the last group may be ragged."""

    name = "int8"

    def quantize(self, w: Tensor) -> LinearWeight:
        """[N, K] float -> codes -127..127.

        Raises `ValueError` for elements that are not finite or need a scale beyond float16 (magnitudes above 8.3e6).
        """
        check_matrix(w, self.name, CODE_MAX * FLOAT16_MAX)
        n, k = w.shape
        data = torch.empty(n, k, dtype=torch.int8, device=w.device)
        scales = torch.empty(n, -(-k // GROUP_SIZE), dtype=torch.float16, device=w.device)
        for rows in row_chunks(w):
            x = grouped(w[rows])  # [n, groups, 32]
            scale = divided(x.abs().amax(dim=-1, keepdim=True), CODE_MAX)
            scales[rows] = scale.squeeze(-1)
            vanished = scales[rows].unsqueeze(-1) == 0
            x = x * torch.where(vanished, 0.0, scale.reciprocal())
            whole = x.trunc()
            codes = x.sub_(whole).mul_(2).trunc_().add_(whole)  # exact rounding, halves away from zero
            data[rows] = codes.reshape(codes.shape[0], -1)[:, :k]
        return LinearWeight(self.name, (n, k), data, scales, group_size=GROUP_SIZE)

    def dequantize(self, weight: LinearWeight) -> Tensor:
        """[N, K] float32: scale * code, exact (11 + 7 significant bits)."""
        check_readable(weight, self.name)
        assert weight.scales is not None
        codes, scales = weight.data.float(), weight.scales.float()
        whole = weight.shape[1] // GROUP_SIZE * GROUP_SIZE  # columns in full groups
        if whole:
            blocks = codes[:, :whole].unflatten(1, (-1, GROUP_SIZE))
            blocks.mul_(scales[:, : whole // GROUP_SIZE, None])
        codes[:, whole:].mul_(scales[:, whole // GROUP_SIZE :])
        return codes


FORMAT = Int8()
