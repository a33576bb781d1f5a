"""Tensors and weights without memory: the arguments of the launches that `aot.py` compiles."""

from __future__ import annotations

import torch
from torch import Tensor

from strata_lab.quant.base import LinearWeight

_CODES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor."""
    return torch.empty(shape, dtype=dtype, device="meta")


_VARIANTS = {  # format, group_size, minima
    "bf16": ("bf16", 0, False),
    "fp8": ("fp8", 0, False),
    "fp8g128": ("fp8", 128, False),
    "int8": ("int8", 32, False),
    "int8row": ("int8", 0, False),
    "int4": ("int4", 32, True),
    "int4g32": ("int4", 32, False),
    "int4g64": ("int4", 64, False),
    "int4g128": ("int4", 128, False),
    "int4g64-min": ("int4", 64, True),
    "int4g128-min": ("int4", 128, True),
}


def weight(name: str, n: int, k: int) -> LinearWeight:
    """A weight [n, k] in a format, or in a variant: "int4g128" is int4 with a scale per 128 columns and no minima."""
    stored, group, minima = _VARIANTS[name]
    data = tensor(n, -(-k // 32) * 16 if stored == "int4" else k, dtype=_CODES[stored])
    if stored == "bf16":
        return LinearWeight(stored, (n, k), data)
    dtype = torch.float32 if stored == "fp8" or group == 0 else torch.float16
    scales = tensor(n, -(-k // group) if group else 1, dtype=dtype)
    return LinearWeight(stored, (n, k), data, scales, scales if minima else None, group)
