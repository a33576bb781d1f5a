"""What an engine takes of a device's memory beside weights and KV pool, before anything has run.

The pool is sized by what weights (`telemetry.roofline.forecast`) and this leave; `telemetry/memcheck.py` adds all of it
up for a card that may not be here.
"""

from __future__ import annotations

from strata_lab.model_config import ModelConfig

GRAPH_BYTES = 512 << 20  # captures with their private pool, and libraries' handles
CPU_POOL_BYTES = 1 << 30  # enough for 16 streams of 2,800 tokens on the default model; a laptop has other work to do
LOGIT_COPIES = 3  # logits in float32, and what the host's sampler makes of them


def conversion_nbytes(config: ModelConfig) -> int:
    """Bytes that converting the largest matrix takes for a moment: as stored, in float32 twice, as codes."""
    c = config
    mlp = 2 * c.hidden_size * max(c.intermediate_size, c.num_experts * c.moe_intermediate_size)
    return 12 * max(mlp, c.vocab_size * c.hidden_size)


def activation_nbytes(config: ModelConfig, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Bytes for activations of the largest step and its logits."""
    c = config
    mlp = 3 * max(c.intermediate_size, c.num_experts_per_tok * c.moe_intermediate_size)
    mlp += c.num_experts_per_tok * c.hidden_size  # each expert's answer before they are added up
    activations = 4 * max_num_batched_tokens * (4 * c.hidden_size + 2 * _attention_width(c) + mlp)
    return activations + 4 * LOGIT_COPIES * max_num_seqs * c.vocab_size


def dequantized_nbytes(config: ModelConfig) -> int:
    """Bytes of the widest matrix of a layer in bfloat16, as a GPU's prefill makes it."""
    return 2 * config.hidden_size * max(2 * config.intermediate_size, _attention_width(config))


def workspace_nbytes(config: ModelConfig, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Bytes on a GPU for activations of the largest step, logits, dequantized matrices of a prefill, and captures."""
    activations = activation_nbytes(config, max_num_batched_tokens, max_num_seqs)
    return activations + dequantized_nbytes(config) + GRAPH_BYTES


def rotary_nbytes(config: ModelConfig) -> int:
    """Bytes of the tables of sines and cosines, float32."""
    return 4 * config.max_position * config.head_dim


def _attention_width(config: ModelConfig) -> int:
    return (config.num_q_heads + 2 * config.num_kv_heads) * config.head_dim
