"""How much device memory a setting will take, before anything is loaded.

From geometry and format alone; the KV pool is sized by what these leave. `telemetry` measures what was really taken.
"""

from __future__ import annotations

import math

from strata_lab.config import ModelConfig
from strata_lab.models.presets import tensor_shapes
from strata_lab.quant import head_format

GROUP_BYTES = {"int8": 2 / 32, "int4": 4 / 32}  # scales (and minima) in float16 per group of 32
CODE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
SCALE_BYTES = 4  # fp8: one float32 per row
GRAPH_BYTES = 512 << 20  # captures and their private pool, libraries' handles; measured below this on an H200
LOGIT_COPIES = 3  # logits in float32, and what the host's sampler makes of them


def weights_nbytes(config: ModelConfig, weight_format: str) -> int:
    """Bytes of all weights of a model; norms and biases are counted as float32, which bounds them."""
    total = 0.0
    for name, shape in tensor_shapes(config).items():
        if len(shape) < 2 or name.endswith("mlp.gate.weight"):
            total += 4 * math.prod(shape)
            continue
        is_head = name.startswith(("model.embed_tokens", "lm_head"))
        stored = head_format(weight_format) if is_head else weight_format
        total += math.prod(shape) * (CODE_BYTES[stored] + GROUP_BYTES.get(stored, 0.0))
        total += SCALE_BYTES * shape[0] if stored == "fp8" else 0
    return int(total)


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
