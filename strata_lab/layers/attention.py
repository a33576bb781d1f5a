"""Attention over the paged KV cache, as two compositions of the same operators.

`PlainAttention` is the textbook order, one operator at a time; `FusedAttention` reads the same merged weights
through the fused operators. `build.py` picks one; neither knows about formats, graphs or batching.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from strata_lab.kernels import Ops
from strata_lab.layers.weights import AttentionWeights
from strata_lab.model_config import ModelConfig


@dataclass(frozen=True)
class StepContext:
    """What every layer of a step shares.

    Attributes:
        cos, sin: rotary factors of this step's positions, [T, D/2] float32.
        slot_mapping: where each token's key and value go, [T] int64; -1 writes nothing.
        block_tables: [B, max_blocks] int32.
        seq_lens: tokens in the cache per request, this step's included, [B] int32.
        cu_seqlens_q: [B + 1] int32, prefix sums of this step's tokens per request.
        max_q_len: most tokens of one request in this step; 1 for a pure decode step.
        apart: the rows of a request stand as several requests of one token, so that every key and value of the step
            must be written before any row reads them.
        together: of such rows, how many each text has, if all have as many and in the order of `qkv_attention`; else 1.
        prompt_lens: tokens of each request that are its prompt, [B] int32; None where all attention is dense.
    """

    cos: Tensor
    sin: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    max_q_len: int
    apart: bool = False
    prompt_lens: Tensor | None = None
    together: int = 1


@dataclass(frozen=True)
class LayerKV:
    """One layer's slice of the KV cache.

    Attributes:
        k, v: [num_blocks, block_size, Hkv, D].
        k_scale, v_scale: stored value = value / scale.
        bounds: smallest and largest key of each block, [num_blocks, Hkv, 2, D]; None where nobody chooses blocks.
    """

    k: Tensor
    v: Tensor
    k_scale: float
    v_scale: float
    bounds: Tensor | None = None


class Reading(Protocol):
    """How much of the cache attention reads, once this step's keys and values are in it.

    Attributes:
        joins: whether it may be one operator with what comes before.
    """

    joins: bool

    def __call__(self, ops: Ops, q: Tensor, step: StepContext, kv: LayerKV, scale: float) -> Tensor:
        """q [T, H, D] -> [T, H, D]."""
        ...


class ReadAll:
    """All that the operator shows."""

    joins = True

    def __call__(self, ops: Ops, q: Tensor, step: StepContext, kv: LayerKV, scale: float) -> Tensor:
        """Dense attention."""
        return ops.paged_attention(
            q, kv.k, kv.v, step.block_tables, step.seq_lens, step.cu_seqlens_q,
            max_q_len=step.max_q_len, scale=scale, k_scale=kv.k_scale, v_scale=kv.v_scale,
        )  # fmt: skip


READ_ALL = ReadAll()


@dataclass(frozen=True)
class ReadPages:
    """For a token of an answer only the `pages` blocks that promise most (`kernels/sparse_attention.py`)."""

    pages: int
    joins = False

    def __call__(self, ops: Ops, q: Tensor, step: StepContext, kv: LayerKV, scale: float) -> Tensor:
        """Bound the blocks that were written, then attend."""
        ops.page_bounds(kv.k, kv.bounds, step.slot_mapping)
        return ops.sparse_attention(
            q, kv.k, kv.v, kv.bounds, step.block_tables, step.seq_lens, step.cu_seqlens_q, step.prompt_lens,
            max_q_len=step.max_q_len, scale=scale, k_scale=kv.k_scale, v_scale=kv.v_scale, pages=self.pages,
        )  # fmt: skip


class PlainAttention:
    """norm, q, k, v, QK-norm, RoPE, cache write, attention, projection, residual: one operator each."""

    def __init__(self, config: ModelConfig, ops: Ops, reading: Reading = READ_ALL) -> None:
        self.config, self.ops, self.reading = config, ops, reading
        self.scale = config.head_dim**-0.5

    def __call__(self, x: Tensor, w: AttentionWeights, step: StepContext, kv: LayerKV) -> Tensor:
        """[T, hidden] -> [T, hidden], residual included."""
        c, ops = self.config, self.ops
        num_q, num_k = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
        h = ops.rms_norm(x, w.norm, c.rms_norm_eps)
        bounds = (0, num_q, num_q + num_k, num_q + 2 * num_k)
        q, k, v = (self._project(h, w, bounds[i], bounds[i + 1]) for i in range(3))  # each [T, heads, D]
        if w.q_norm is not None and w.k_norm is not None:
            q, k = ops.rms_norm(q, w.q_norm, c.rms_norm_eps), ops.rms_norm(k, w.k_norm, c.rms_norm_eps)
        q, k = ops.rope(q, step.cos, step.sin), ops.rope(k, step.cos, step.sin)
        ops.kv_append(k, v, kv.k, kv.v, step.slot_mapping, kv.k_scale, kv.v_scale)
        out = self.reading(ops, q, step, kv, self.scale)
        return ops.add(x, ops.linear(out.reshape(x.shape[0], -1), w.out))

    def _project(self, h: Tensor, w: AttentionWeights, start: int, stop: int) -> Tensor:
        bias = None if w.qkv_bias is None else w.qkv_bias[start:stop]
        return self.ops.linear(h, w.qkv.rows(start, stop), bias).view(h.shape[0], -1, self.config.head_dim)


class FusedAttention:
    """norm+QKV, QK-norm+RoPE+cache write+attention, projection+residual: three operators."""

    def __init__(self, config: ModelConfig, ops: Ops, reading: Reading = READ_ALL) -> None:
        self.config, self.ops, self.reading = config, ops, reading
        self.scale = config.head_dim**-0.5

    def __call__(self, x: Tensor, w: AttentionWeights, step: StepContext, kv: LayerKV) -> Tensor:
        """[T, hidden] -> [T, hidden], residual included."""
        c, ops = self.config, self.ops
        qkv = ops.linear(x, w.qkv, w.qkv_bias, norm_weight=w.norm, norm_eps=c.rms_norm_eps)
        written = (w.q_norm, w.k_norm, c.rms_norm_eps, kv.k, kv.v, step.slot_mapping)
        if (step.apart and step.together == 1) or not self.reading.joins:
            q = ops.qkv_rope_append(
                qkv, step.cos, step.sin, *written, c.num_q_heads, c.num_kv_heads, kv.k_scale, kv.v_scale
            )
            out = self.reading(ops, q, step, kv, self.scale).reshape(x.shape[0], -1)
        else:
            out = ops.qkv_attention(
                qkv, step.cos, step.sin, *written, step.block_tables, step.seq_lens, step.cu_seqlens_q,
                num_q_heads=c.num_q_heads, num_kv_heads=c.num_kv_heads, max_q_len=step.max_q_len, scale=self.scale,
                k_scale=kv.k_scale, v_scale=kv.v_scale, together=step.together,
            )  # fmt: skip
        return ops.linear(out, w.out, residual=x)
