"""Bytes a decode step has to read, and how close to the memory's speed the engine runs. Arithmetic only.

At small batch a decode step reads every weight once for a handful of multiplications per byte, so its floor is

    floor_s = step_bytes / bandwidth                    (the memory roofline; Williams et al. 2009)
    mbu     = step_bytes / (measured_s * bandwidth)     (model bandwidth utilization: 1.0 is the floor)

with `bandwidth` measured on this machine (`telemetry/bandwidth.py`), never taken from a data sheet, and

    step_bytes = dense weights + experts touched + one embedding row per token + KV cache read
    bytes of an N x K weight:  fp32 4NK   bf16 2NK   fp8 NK + 4N   int8 NK + 2N*ceil(K/32)
                               int4 N*ceil(K/32)*(16 + 2 + 2)      (codes, float16 scale and minimum per 32;
                               on a GPU N*(16*ceil(K/32) + 2*ceil(K/128)), a scale per 128)
    experts touched per layer: E * (1 - (1 - k/E)^T)    for T tokens routed independently to k of E experts;
                               exactly k for one token
    KV bytes per cached token: 2 * layers * Hkv * D * bytes(kv dtype)     (keys and values)

Only reads are counted: what a step writes (one KV entry per token, activations) is below 1% of it, and leaving it
out makes `mbu` err on the low side. A running engine counts the same from its tensors' real sizes
(`StepEvent.bytes_moved`); this is the forecast for what is not loaded. It says nothing of prefill, which is bound by
arithmetic, not by bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata_lab.model_config import ModelConfig
from strata_lab.quant import head_format
from strata_lab.settings import ConfigError
from strata_lab.telemetry.achieved import mbu as mbu
from strata_lab.telemetry.achieved import roofline_tok_s as roofline_tok_s

GROUP = 32  # columns that share a scale in int8 and int4
NORM_BYTES = 4  # norms are kept in float32
ROUTER_BYTES = 2  # routers are kept in bfloat16
KV_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}


def linear_bytes(rows: int, columns: int, weight_format: str, granularity: str | None = None) -> int:
    """Bytes of one [rows, columns] weight with its scales; `ConfigError` for an unknown format.

    `granularity`: "group128" of int4 and "channel" of int8, as an engine on a GPU makes them; None is the format's
    default.
    """
    groups = -(-columns // GROUP)
    if weight_format == "int8" and granularity == "channel":
        return rows * columns + 4 * rows
    if weight_format == "int4" and granularity == "group128":
        return rows * (groups * GROUP // 2 + 2 * -(-columns // 128))
    sizes = {
        "fp32": 4 * rows * columns,
        "bf16": 2 * rows * columns,
        "fp8": rows * columns + 4 * rows,
        "int8": rows * columns + 2 * rows * groups,
        "int4": rows * groups * (GROUP // 2 + 2 + 2),
    }
    if weight_format not in sizes:
        raise ConfigError(f"weight_format={weight_format!r} must be one of {', '.join(sizes)}; try 'int8'")
    return sizes[weight_format]


def kv_bytes_per_token(config: ModelConfig, kv_cache_dtype: str) -> int:
    """Bytes of keys and values that one token leaves in the cache, all layers."""
    if kv_cache_dtype not in KV_BYTES:
        raise ConfigError(f"kv_cache_dtype={kv_cache_dtype!r} must be one of {', '.join(KV_BYTES)}; try 'bf16'")
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * KV_BYTES[kv_cache_dtype]


@dataclass(frozen=True)
class StepCost:
    """What one step reads, as a function of its batch and context.

    Attributes:
        dense_bytes: weights that every step reads once: attention, dense MLP, routers, norms, LM head.
        expert_bytes: one expert of one layer; 0 for a dense model.
        num_layers, num_experts, experts_per_token: how often `expert_bytes` counts.
        row_bytes: one row of the embedding.
        kv_token_bytes: cache of one token, all layers.
        stored_bytes: all weights in memory, the embedding once if it is tied.
    """

    dense_bytes: int
    expert_bytes: int
    num_layers: int
    num_experts: int
    experts_per_token: int
    row_bytes: int
    kv_token_bytes: int
    stored_bytes: int

    def weight_bytes(self, num_tokens: int = 1) -> int:
        """Weight bytes that a step of `num_tokens` tokens reads."""
        if not self.num_experts:
            return self.dense_bytes + num_tokens * self.row_bytes
        share = self.experts_per_token / self.num_experts
        touched = self.num_experts * (1.0 - (1.0 - share) ** num_tokens)
        return self.dense_bytes + round(self.num_layers * touched * self.expert_bytes) + num_tokens * self.row_bytes

    def step_bytes(self, num_tokens: int, context_tokens: int) -> int:
        """Bytes a step reads.

        Args:
            num_tokens: tokens computed in the step, over all requests (decode: the batch).
            context_tokens: cached tokens that attention reads, summed over the requests.
        """
        return self.weight_bytes(num_tokens) + context_tokens * self.kv_token_bytes


def forecast(
    config: ModelConfig, weight_format: str, kv_cache_dtype: str, granularity: str | None = None
) -> StepCost:  # fmt: skip
    """`StepCost` from geometry alone, before anything is loaded; `granularity` as in `linear_bytes`."""
    c = config
    q_rows, kv_rows = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
    stored = weight_format, granularity
    layer = linear_bytes(q_rows + 2 * kv_rows, c.hidden_size, *stored)
    layer += linear_bytes(c.hidden_size, q_rows, *stored)
    layer += NORM_BYTES * (2 * c.hidden_size + (2 * c.head_dim if c.qk_norm else 0))
    layer += NORM_BYTES * (q_rows + 2 * kv_rows) if c.attention_bias else 0
    expert = 0
    if c.num_experts:
        layer += ROUTER_BYTES * c.num_experts * c.hidden_size
        expert = _mlp_bytes(c.hidden_size, c.moe_intermediate_size, *stored)
    else:
        layer += _mlp_bytes(c.hidden_size, c.intermediate_size, *stored)
    head = linear_bytes(c.vocab_size, c.hidden_size, head_format(weight_format))
    dense = c.num_layers * layer + head + NORM_BYTES * c.hidden_size
    embedding = 0 if c.tie_word_embeddings else head
    return StepCost(
        dense_bytes=dense,
        expert_bytes=expert,
        num_layers=c.num_layers,
        num_experts=c.num_experts,
        experts_per_token=c.num_experts_per_tok,
        row_bytes=head // c.vocab_size,
        kv_token_bytes=kv_bytes_per_token(c, kv_cache_dtype),
        stored_bytes=dense + embedding + c.num_layers * c.num_experts * expert,
    )


def _mlp_bytes(hidden: int, intermediate: int, weight_format: str, granularity: str | None) -> int:
    wide = linear_bytes(2 * intermediate, hidden, weight_format, granularity)
    return wide + linear_bytes(hidden, intermediate, weight_format, granularity)
