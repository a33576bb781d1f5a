"""Tensors and weights without memory: the arguments of the launches that `aot.py` compiles."""

from __future__ import annotations

import torch
from torch import Tensor

from strata_lab.quant.base import LinearWeight

_CODES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor."""
    return torch.empty(shape, dtype=dtype, device="meta")


def weight(name: str, n: int, k: int) -> LinearWeight:
    """A weight [n, k] in a format, or in "int4g128": int4 with a scale per 128 columns and no minima."""
    group = 128 if name == "int4g128" else 32
    stored = name.removesuffix("g128")
    groups = -(-k // group)
    data = tensor(n, groups * group // 2 if stored == "int4" else k, dtype=_CODES[stored])
    if stored == "bf16":
        return LinearWeight(stored, (n, k), data)
    if stored == "fp8":
        return LinearWeight(stored, (n, k), data, tensor(n, 1, dtype=torch.float32))
    scales = tensor(n, groups, dtype=torch.float16)
    return LinearWeight(stored, (n, k), data, scales, scales if name == "int4" else None, group)
