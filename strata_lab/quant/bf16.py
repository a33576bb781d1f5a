"""Weights in bfloat16: two bytes each, rounded to nearest even, so off by at most 2^-8 of their magnitude.

The format most checkpoints come in; a bfloat16 matrix is stored as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strata_lab.quant.base import LinearWeight
from strata_lab.quant.groups import check_matrix, check_readable

BFLOAT16_MAX = torch.finfo(torch.bfloat16).max  # a float32 just above it would round to infinity


class Bf16:
    """bfloat16 [N, K] and no scales."""

    name = "bf16"

    def quantize(self, w: Tensor) -> LinearWeight:
        """[N, K] float -> bfloat16, shared with `w` where it is bfloat16 already.

        Raises `ValueError` for elements that are not finite in bfloat16.
        """
        check_matrix(w, self.name, BFLOAT16_MAX)
        return LinearWeight(self.name, (w.shape[0], w.shape[1]), w.to(torch.bfloat16).contiguous())

    def dequantize(self, weight: LinearWeight) -> Tensor:
        """[N, K] float32, exact."""
        check_readable(weight, self.name)
        return weight.data.float()


FORMAT = Bf16()
