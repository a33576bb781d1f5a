"""Number formats of weights: a name, a file, and nothing else to register.

This package decides how numbers are stored: the formats (one file each, with their variants), quantizers that choose
the codes (`rtn`, `gptq`, `awq`), the calibration that feeds them (`calibrate`) and what is lost (`quality`).
Multiplying by weights is the kernels' business, reading them from files the loaders'.
"""

from __future__ import annotations

import importlib
from typing import Any

from strata_lab.quant.base import LinearWeight, QuantFormat
from strata_lab.quant.grid import GridFormat
from strata_lab.settings import ConfigError

FORMATS = {
    "bf16": "strata_lab.quant.bf16:FORMAT",
    "fp32": "strata_lab.quant.fp32:FORMAT",
    "fp8": "strata_lab.quant.fp8:FORMAT",
    "int8": "strata_lab.quant.int8:FORMAT",
    "int4": "strata_lab.quant.int4:FORMAT",
}


def get_format(name: str, granularity: str | None = None) -> QuantFormat:
    """The format called `name`, in the variant in which `granularity` says what shares a scale.

    Args:
        name: a key of `FORMATS`.
        granularity: one of `granularities(name)`, for example "channel" or "group64-asym"; None is the default one.

    Raises:
        ConfigError: an unknown format or variant; it names those there are.
    """
    module = _module(name)
    return module.FORMAT if granularity is None else _variant(module, name, granularity)


def get_grid_format(name: str, granularity: str | None = None) -> GridFormat:
    """As `get_format`, of a format that has scales to choose: not of bf16 or fp32, for which it is a `ConfigError`."""
    module = _module(name)
    if not granularities(name):
        raise ConfigError(f"weight_format={name!r} has no scales to choose; a quantizer needs one that has: try 'int4'")
    return module.FORMAT if granularity is None else _variant(module, name, granularity)


def granularities(name: str) -> tuple[str, ...]:
    """The variants of a format, the default one first; none for formats without scales."""
    module = _module(name)
    variants = getattr(module, "VARIANTS", {})
    return tuple(sorted(variants, key=lambda variant: variants[variant] is not module.FORMAT))


def variant_of(weight: LinearWeight) -> str | None:
    """The granularity of a stored weight; None for formats without scales.

    fp8 with one scale for the whole matrix is stored as one scale per row, so it is "channel" too.
    """
    if weight.scales is None:
        return None
    if weight.group_size == 0:
        return "channel"
    if weight.format == "fp8":
        return f"block{weight.group_size}"
    return f"group{weight.group_size}{'-asym' if weight.mins is not None else ''}"


def convert(weight: LinearWeight, name: str, granularity: str | None = None) -> LinearWeight:
    """`weight` (layout "rows") in format `name` and, where one is asked for, in that variant.

    Unchanged if it is in it already; without `granularity` any variant of the format counts. Goes through float32.
    Raises `ConfigError` for an unknown format or variant, `ValueError` for numbers it cannot store.
    """
    target = get_format(name, granularity)
    if weight.format == name and (granularity in (None, variant_of(weight)) or _is_tensor_wide(weight, granularity)):
        return weight
    return target.quantize(get_format(weight.format).dequantize(weight))


def engine_granularity(weight_format: str, device_type: str) -> str | None:
    """The variant that an engine makes of weights in another format; None is the format's default.

    On a GPU int4 has groups of 128 without minima, 0.516 bytes a weight and less arithmetic, and int8 a scale per row,
    with which several rows of x need no columns of their own per group; on a CPU, where neither counts, groups of 32
    keep more of the model.
    """
    return {"int4": "group128", "int8": "channel"}.get(weight_format) if device_type == "cuda" else None


def head_format(weight_format: str) -> str:
    """Format of the LM head and embedding beside layers in `weight_format`.

    Four bits on the head cost more accuracy than anywhere else, so int4 models keep it in int8, as GGUF files do.
    """
    return "int8" if weight_format == "int4" else weight_format


def _is_tensor_wide(weight: LinearWeight, granularity: str | None) -> bool:
    """Whether "tensor" is asked for and one number is the scale of every row."""
    if granularity != "tensor" or weight.group_size or weight.scales is None:
        return False
    return bool((weight.scales == weight.scales[0]).all())


def _module(name: str) -> Any:
    if name not in FORMATS:
        raise ConfigError(f"weight_format={name!r} must be one of {', '.join(FORMATS)}; try 'bf16'")
    return importlib.import_module(FORMATS[name].split(":")[0])


def _variant(module: Any, name: str, granularity: str) -> Any:
    allowed = granularities(name)
    if not allowed:
        raise ConfigError(f"granularity={granularity!r}: {name} has no scales, so none can be shared; leave it out")
    if granularity not in allowed:
        raise ConfigError(
            f"granularity={granularity!r} of {name} must be one of {', '.join(allowed)}; try {allowed[0]!r}"
        )
    return module.VARIANTS[granularity]
