"""The geometry of a model: what weights, cache and byte counts are derived from. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strata_lab.settings import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Geometry of a decoder-only model, in the names of the field (Hugging Face's `config.json`, made regular).

    Attributes:
        architecture: key of the model registry: "llama", "qwen2", "qwen3" or "qwen3_moe".
        vocab_size: V.
        hidden_size: width of the residual stream.
        num_layers: decoder layers.
        num_q_heads, num_kv_heads, head_dim: H, Hkv and D.
        intermediate_size: width of the dense MLP.
        max_position: longest sequence the model was made for.
        rope_theta: base of the rotary frequencies.
        rope_scaling: None, or the parameters of the "linear" or "llama3" scaling rule.
        rms_norm_eps: epsilon of every norm.
        tie_word_embeddings: the LM head is the embedding.
        attention_bias: q, k and v projections have a bias (Qwen2).
        qk_norm: q and k heads are normalized before RoPE (Qwen3).
        num_experts: 0 for a dense model.
        num_experts_per_tok, moe_intermediate_size, norm_topk_prob: routing (Qwen3-MoE).
        bos_token_id: None where the model has none.
        eos_token_ids: any of them ends a text.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_q_heads", "num_kv_heads", "head_dim", "max_position")
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r} in the model's config must be a whole number of at least 1")
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_q_heads={self.num_q_heads} must be a multiple of num_kv_heads={self.num_kv_heads}; "
                "check num_attention_heads and num_key_value_heads in the model's config"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even for rotary embeddings; try {self.head_dim + 1}")
        if self.num_experts and not 0 < self.num_experts_per_tok <= self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok={self.num_experts_per_tok} must be from 1 to num_experts={self.num_experts}"
            )
