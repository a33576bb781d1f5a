"""Weights in float32: four bytes each, nothing lost. The reference the other formats are measured against."""

from __future__ import annotations

import torch
from torch import Tensor

from strata_lab.quant.base import LinearWeight
from strata_lab.quant.groups import check_matrix, check_readable

FLOAT32_MAX = torch.finfo(torch.float32).max


class Fp32:
    """float32 [N, K] and no scales."""

    name = "fp32"

    def quantize(self, w: Tensor) -> LinearWeight:
        """[N, K] float -> float32, shared with `w` where it is float32 already.

        Raises `ValueError` for elements that are not finite in float32.
        """
        check_matrix(w, self.name, FLOAT32_MAX)
        return LinearWeight(self.name, (w.shape[0], w.shape[1]), w.float().contiguous())

    def dequantize(self, weight: LinearWeight) -> Tensor:
        """The stored [N, K] float32 itself."""
        check_readable(weight, self.name)
        return weight.data


FORMAT = Fp32()
