"""Attention over the paged cache on a GPU: which kernel takes which step.

A step whose requests all have one token goes to the split decode kernel (`attention_decode.py`), everything else to the
ragged one (`attention_prefill.py`). Contracts: `kernels/paged_attention.py` and `kernels/qkv_rope_append.py`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from strata_lab.kernels.gpu.attention_decode import decode, decode_fused
from strata_lab.kernels.gpu.attention_prefill import prefill
from strata_lab.kernels.gpu.kv_write import qkv_rope_append_triton


def paged_attention_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    max_q_len: int,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: int = 0,
    window: int = 0,
) -> Tensor:
    """`paged_attention_ref` for caches of one shape and contiguous heads; blocks are not checked."""
    scales: Any = {"scale": scale, "k_scale": k_scale, "v_scale": v_scale, "sinks": sinks, "window": window}
    if max_q_len == 1:
        return decode(q, k_cache, v_cache, block_tables, seq_lens, **scales)
    return prefill(q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q, max_q_len=max_q_len, **scales)


def qkv_attention_triton(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    max_q_len: int,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: int = 0,
    window: int = 0,
    together: int = 1,
) -> Tensor:
    """All between the QKV product and the output projection: [T, (H + 2 Hkv) * D] -> [T, H * D].

    It is `qkv_rope_append`, then `paged_attention`; for a decode step in one kernel, which takes for granted that a
    slot is that of its request's last position and that only `qkv` was written by the kernel just before. With
    `together` a row sees that many tokens of its text in this step, or fewer (`kernels/qkv_attention.py`).
    """
    scales: Any = {"scale": scale, "k_scale": k_scale, "v_scale": v_scale, "sinks": sinks, "window": window}
    if max_q_len == 1:
        return decode_fused(
            qkv, cos, sin, q_norm_weight, k_norm_weight, eps, k_cache, v_cache, slot_mapping, block_tables, seq_lens,
            num_q_heads=num_q_heads, together=together, **scales,
        )  # fmt: skip
    q = qkv_rope_append_triton(
        qkv, cos, sin, q_norm_weight, k_norm_weight, eps, k_cache, v_cache, slot_mapping, num_q_heads, num_kv_heads,
        k_scale, v_scale,
    )  # fmt: skip
    out = prefill(q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q, max_q_len=max_q_len, **scales)
    return out.view(qkv.shape[0], -1)
