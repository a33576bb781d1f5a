"""Scales of an FP8 key/value cache, one for keys and one for values of each layer, from a text.

e4m3 is a floating-point format, so a scale changes nothing about precision; it keeps large keys and values from being
cut off at 448. The largest magnitude that the text produces goes to half of that, which leaves room for other texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from strata_lab.models.base import WeightSource
from strata_lab.quant.forward import Forward

LARGEST = 224.0  # stored magnitude of the largest key or value of the text


def cache_scales(
    source: WeightSource, sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> list[list[float]]:
    """[[k scale, v scale], ...] by layer; stored value = value / scale."""
    peaks = [0.0, 0.0]

    def seen(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> None:
        for i, x in enumerate((k, v)):
            peaks[i] = max(peaks[i], float(x.abs().max()))
        append(k, v, k_cache, v_cache, *rest)

    append = Forward(source, device).ops.kv_append
    forward = Forward(source, device, {"kv_append": seen})
    scales: list[list[float]] = []
    with torch.no_grad():
        states = [forward.embed(sequence) for sequence in sequences]
        for index in range(source.config.num_layers):
            peaks[:] = [0.0, 0.0]
            layer = forward.load_layer(index)
            states = [forward.layer(state, layer) for state in states]
            scales.append([max(peak, 1e-6) / LARGEST for peak in peaks])
    return scales
