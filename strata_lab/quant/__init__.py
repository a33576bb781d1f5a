"""Number formats of weights: a name, a file, and nothing else to register.

This package decides how numbers are stored. Multiplying by them is the kernels' business, reading them from files
the loaders'.
"""

from __future__ import annotations

import importlib

from strata_lab.config import ConfigError
from strata_lab.quant.base import LinearWeight, QuantFormat

FORMATS = {
    "bf16": "strata_lab.quant.bf16:FORMAT",
    "fp32": "strata_lab.quant.fp32:FORMAT",
    "fp8": "strata_lab.quant.fp8:FORMAT",
    "int8": "strata_lab.quant.int8:FORMAT",
    "int4": "strata_lab.quant.int4:FORMAT",
}


def get_format(name: str) -> QuantFormat:
    """The format called `name`; `ConfigError` for an unknown one."""
    if name not in FORMATS:
        raise ConfigError(f"weight_format={name!r} must be one of {', '.join(FORMATS)}; try 'bf16'")
    module, attribute = FORMATS[name].split(":")
    return getattr(importlib.import_module(module), attribute)


def convert(weight: LinearWeight, name: str) -> LinearWeight:
    """`weight` (layout "rows") in format `name`; unchanged if it is in it already.

    Goes through float32. Raises `ConfigError` for an unknown format, `ValueError` for numbers it cannot store.
    """
    target = get_format(name)
    if weight.format == name:
        return weight
    return target.quantize(get_format(weight.format).dequantize(weight))


def head_format(weight_format: str) -> str:
    """Format of the LM head and embedding beside layers in `weight_format`.

    Four bits on the head cost more accuracy than anywhere else, so int4 models keep it in int8, as GGUF files do.
    """
    return "int8" if weight_format == "int4" else weight_format
