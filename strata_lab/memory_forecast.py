"""What an engine takes of a device's memory beside weights and KV pool, before anything has run.

The pool is sized by what weights (`telemetry.roofline.forecast`) and this leave.
"""

from __future__ import annotations

from strata_lab.model_config import ModelConfig

GRAPH_BYTES = 512 << 20  # captures with their private pool, and libraries' handles
LOGIT_COPIES = 3  # logits in float32, and what the host's sampler makes of them


def conversion_nbytes(config: ModelConfig) -> int:
    """Bytes that converting the largest matrix takes for a moment: as stored, in float32 twice, as codes."""
    c = config
    mlp = 2 * c.hidden_size * max(c.intermediate_size, c.num_experts * c.moe_intermediate_size)
    return 12 * max(mlp, c.vocab_size * c.hidden_size)


def workspace_nbytes(config: ModelConfig, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Bytes for activations of the largest step, logits, dequantized matrices of a prefill, and captures."""
    c = config
    attention = (c.num_q_heads + 2 * c.num_kv_heads) * c.head_dim
    mlp = 3 * max(c.intermediate_size, c.num_experts_per_tok * c.moe_intermediate_size)
    mlp += c.num_experts_per_tok * c.hidden_size  # each expert's answer before they are added up
    activations = 4 * max_num_batched_tokens * (4 * c.hidden_size + 2 * attention + mlp)
    logits = 4 * LOGIT_COPIES * max_num_seqs * c.vocab_size
    widest = 2 * c.hidden_size * max(2 * c.intermediate_size, attention)  # one matrix in bfloat16
    return activations + logits + widest + GRAPH_BYTES
