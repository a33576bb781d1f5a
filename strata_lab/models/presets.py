"""Geometries filled with random weights: the two of the articles' "qwen3.8-flash", and a mixture for a laptop.

For speed and memory work only: the text is noise. `qwen3.8-flash@0.05` scales layers, widths, experts and vocabulary
so that a small relative runs in a test; the ratios between them stay recognizable. Nothing is read from disk.
"""

from __future__ import annotations

import math
import re
import zlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from strata_lab.model_config import ModelConfig
from strata_lab.quant import get_format
from strata_lab.quant.base import LinearWeight
from strata_lab.settings import ConfigError

PRESETS = {
    "qwen3.8-flash": ModelConfig(
        architecture="qwen3_moe", vocab_size=151936, hidden_size=2560, num_layers=40, num_q_heads=32, num_kv_heads=4,
        head_dim=128, intermediate_size=8192, max_position=40960, rope_theta=1e6, rms_norm_eps=1e-6, qk_norm=True,
        num_experts=64, num_experts_per_tok=8, moe_intermediate_size=1024,
    ),
    "qwen3.8-flash-dense": ModelConfig(
        architecture="qwen3", vocab_size=151936, hidden_size=2560, num_layers=36, num_q_heads=32, num_kv_heads=8,
        head_dim=128, intermediate_size=9728, max_position=40960, rope_theta=1e6, rms_norm_eps=1e-6, qk_norm=True,
        tie_word_embeddings=True,
    ),
    "moe-small": ModelConfig(
        architecture="qwen3_moe", vocab_size=4096, hidden_size=256, num_layers=8, num_q_heads=8, num_kv_heads=2,
        head_dim=32, intermediate_size=512, max_position=4096, rope_theta=1e6, rms_norm_eps=1e-6, qk_norm=True,
        num_experts=16, num_experts_per_tok=2, moe_intermediate_size=128,
    ),
}  # fmt: skip
INIT_STD = 0.02  # standard deviation of the random weights: GPT-2's, keeps activations finite at any depth
# Multipliers of MurmurHash3's 32-bit finalizer (Appleby 2011), and the golden ratio that spreads neighbouring counters.
_MIX_1, _MIX_2, _SPREAD = 0x85EBCA6B, 0xC2B2AE35, 0x9E3779B1
_NAME = re.compile(r"^(?P<preset>[\w.\-]+?)(@(?P<scale>[\d.]+))?$")


def preset_config(name: str) -> ModelConfig | None:
    """Geometry of "preset" or "preset@scale"; None if `name` is no preset. A bad scale raises `ConfigError`."""
    match = _NAME.match(name)
    if match is None or match["preset"] not in PRESETS:
        return None
    config = PRESETS[match["preset"]]
    return config if match["scale"] is None else scaled(config, _scale(name, match["scale"]))


def _scale(name: str, text: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0 < scale <= 1:
        raise ConfigError(f"scale {text!r} in {name!r} must be above 0 and at most 1; try {name.split('@')[0]}@0.05")
    return scale


def scaled(config: ModelConfig, scale: float) -> ModelConfig:
    """A smaller relative: every size times `scale`, rounded to what the kernels like."""

    def size(value: int, multiple: int) -> int:
        return max(multiple, round(value * scale / multiple) * multiple)

    experts = size(config.num_experts, 4) if config.num_experts else 0
    kv_heads = max(1, round(config.num_kv_heads * scale))
    return replace(
        config,
        vocab_size=size(config.vocab_size, 64),
        hidden_size=size(config.hidden_size, 64),
        num_layers=max(2, round(config.num_layers * scale)),
        num_q_heads=kv_heads * max(1, config.num_q_heads // config.num_kv_heads // 2),
        num_kv_heads=kv_heads,
        head_dim=max(32, size(config.head_dim, 32)),
        intermediate_size=size(config.intermediate_size, 64),
        max_position=max(2048, size(config.max_position, 2048)),
        num_experts=experts,
        num_experts_per_tok=min(config.num_experts_per_tok, max(1, experts // 2)) if experts else 0,
        moe_intermediate_size=size(config.moe_intermediate_size, 64) if experts else 0,
    )


class PresetCheckpoint:
    """Random weights that look like a checkpoint, made where they are needed.

    The same name and seed give the same weights on every device.
    """

    stored_format = "bf16"

    def __init__(self, name: str, config: ModelConfig, seed: int, device: torch.device | str = "cpu") -> None:
        self.name, self.config, self.seed, self.device = name, config, seed, torch.device(device)
        self.generation: dict[str, Any] = {}
        self._shapes = tensor_shapes(config)

    def names(self) -> list[str]:
        """Every tensor."""
        return list(self._shapes)

    def linear(self, name: str) -> LinearWeight:
        """A random matrix in bf16."""
        return get_format("bf16").quantize(self._random(name))

    def tensor(self, name: str) -> Tensor:
        """Ones for a norm, random numbers for anything else."""
        return torch.ones(self._shapes[name], device=self.device) if "norm" in name else self._random(name)

    def _random(self, name: str) -> Tensor:
        shape = self._shapes[name]
        return uniform(shape, self.seed * 1_000_003 + zlib.crc32(name.encode()), INIT_STD, self.device)

    def notes(self) -> list[str]:
        """Nothing is stored, so nothing is read otherwise."""
        return []

    def tokenizer(self) -> None:
        """A preset has no tokenizer: prompts are token ids."""
        return None

    def close(self) -> None:
        """Nothing to release."""


def uniform(shape: tuple[int, ...], key: int, std: float, device: torch.device) -> Tensor:
    """Uniform numbers of mean 0 and standard deviation `std`, float32: hashes of `key` and the element's index.

    Integer arithmetic and one multiplication, so every device gives the same bits. At most 2^31 elements.
    """

    def signed(value: int) -> int:
        return (value + 2**31) % 2**32 - 2**31

    x = torch.arange(math.prod(shape), dtype=torch.int32, device=device)
    x.mul_(signed(_SPREAD)).add_(signed(key * _SPREAD))
    for shift, multiplier in ((16, _MIX_1), (13, _MIX_2), (16, 1)):
        x.bitwise_xor_((x >> shift) & ((1 << (32 - shift)) - 1)).mul_(signed(multiplier))
    return ((x >> 8).float() * (std * 3**0.5 / 2**23)).view(shape)  # 24 bits: exact in float32


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint of this geometry holds, in Hugging Face's names."""
    c = config
    q, kv = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    for index in range(c.num_layers):
        layer, attn = f"model.layers.{index}.", f"model.layers.{index}.self_attn."
        shapes[f"{layer}input_layernorm.weight"] = (c.hidden_size,)
        for part, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{attn}{part}_proj.weight"] = (rows, c.hidden_size)
            if c.attention_bias:
                shapes[f"{attn}{part}_proj.bias"] = (rows,)
        if c.qk_norm:
            shapes |= {f"{attn}{part}_norm.weight": (c.head_dim,) for part in "qk"}
        shapes[f"{attn}o_proj.weight"] = (c.hidden_size, q)
        shapes[f"{layer}post_attention_layernorm.weight"] = (c.hidden_size,)
        shapes |= _mlp_shapes(c, f"{layer}mlp.")
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes


def _mlp_shapes(c: ModelConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    if not c.num_experts:
        owners, width = [prefix], c.intermediate_size
    else:
        owners, width = [f"{prefix}experts.{e}." for e in range(c.num_experts)], c.moe_intermediate_size
    shapes: dict[str, tuple[int, ...]] = (
        {f"{prefix}gate.weight": (c.num_experts, c.hidden_size)} if c.num_experts else {}
    )
    for owner in owners:
        shapes |= {f"{owner}{part}_proj.weight": (width, c.hidden_size) for part in ("gate", "up")}
        shapes[f"{owner}down_proj.weight"] = (c.hidden_size, width)
    return shapes
