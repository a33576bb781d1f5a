"""Rotary position tables: cos and sin for every position, made once per model.

Follows Su et al. 2021 (RoFormer) in the half-split order of Hugging Face's Llama; "linear" divides positions, "llama3"
is the frequency rule of Meta's Llama 3.1 model card. Other rules are refused when the config is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from strata_lab.model_config import ModelConfig


def rotary_table(config: ModelConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [length, D/2] float32."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    frequency = 1.0 / (config.rope_theta**half)
    frequency = _scaled(frequency, config.rope_scaling or {})
    angle = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequency)
    return angle.cos(), angle.sin()


def _scaled(frequency: Tensor, rule: Mapping[str, Any]) -> Tensor:
    kind = rule.get("rope_type", "default")
    if kind == "default":
        return frequency
    factor = float(rule["factor"])
    if kind == "linear":
        return frequency / factor
    assert kind == "llama3", kind  # the config reader refuses everything else
    low, high = float(rule["low_freq_factor"]), float(rule["high_freq_factor"])
    original = float(rule["original_max_position_embeddings"])
    wavelength = 2 * math.pi / frequency
    blend = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)  # 1 keeps the frequency, 0 stretches it
    return (1 - blend) * frequency / factor + blend * frequency
