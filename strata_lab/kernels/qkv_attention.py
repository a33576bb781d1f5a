"""Everything between the QKV product and the output projection: QK-norm, RoPE, cache write and attention.

Contract: `qkv_rope_append`, then `paged_attention` over the cache it has just written, flattened to [T, H * D]; the
arguments are those of the two, and `together`. Rows that stand as requests of one token may be tokens of one text:
row j * B + i token j of text i, `together` rows each, those that pad last. By the contract each sees the ones before
it, since all are written first; a kernel that writes and reads at once must be told.

Bytes moved: qkv and the result once, K and V of every request once. As one operator a decode step needs no kernel
boundary in the middle, and the rotated q never leaves the registers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from strata_lab.kernels import paged_attention, qkv_rope_append
from strata_lab.kernels.paged_attention import paged_inputs
from strata_lab.kernels.rope import rotation
from strata_lab.kernels.spec import Case, KernelSpec


def composed(append: Callable[..., Tensor], attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The operator, made of its two halves."""

    def run(
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
        """See the module."""
        q = append(
            qkv, cos, sin, q_norm_weight, k_norm_weight, eps, k_cache, v_cache, slot_mapping, num_q_heads,
            num_kv_heads, k_scale, v_scale,
        )  # fmt: skip
        out = attention(
            q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q,
            max_q_len=max_q_len, scale=scale, k_scale=k_scale, v_scale=v_scale, sinks=sinks, window=window,
        )  # fmt: skip
        return out.reshape(out.shape[0], -1)

    return run


qkv_attention_ref = composed(qkv_rope_append.qkv_rope_append_ref, paged_attention.paged_attention_ref)
qkv_attention_cpu = composed(qkv_rope_append.qkv_rope_append_cpu, paged_attention.paged_attention_cpu)


def _cases() -> Iterator[Case]:
    yield Case("decode", functools.partial(_inputs, [(1, 37)], (9, 3, 64), torch.float32, False))
    yield Case(
        "decode-qk-norm", functools.partial(_inputs, [(1, 1), (1, 64), (1, 40)], (8, 2, 80), torch.float32, True)
    )
    yield Case("mixed", functools.partial(_inputs, [(1, 33), (7, 7), (18, 41)], (4, 4, 32), torch.float32, True))
    yield Case("bfloat16", functools.partial(_inputs, [(1, 50), (1, 3)], (4, 1, 128), torch.bfloat16, True))
    yield Case("float8", functools.partial(_inputs, [(1, 50), (9, 20)], (6, 3, 64), torch.float8_e4m3fn, False))


def _inputs(
    lengths: list[tuple[int, int]], heads: tuple[int, int, int], dtype: torch.dtype, qk_norm: bool, device: torch.device
) -> dict[str, Any]:
    inputs = paged_inputs(lengths, heads, kv_dtype=dtype, scales=(0.5, 0.25), device=device)
    num_q_heads, num_kv_heads, head_dim = heads
    tokens, block_size = inputs.pop("q").shape[0], inputs["k_cache"].shape[1]
    generator = torch.Generator().manual_seed(tokens)
    qkv = torch.randn(tokens, (num_q_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(device)
    positions = torch.cat([torch.arange(s - n, s) for n, s in lengths])
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor([n for n, _ in lengths]))
    blocks = inputs["block_tables"].cpu()[owner, positions // block_size].long()
    cos, sin = rotation(positions.to(device), head_dim)
    norms = [1 + 0.1 * torch.randn(head_dim, generator=generator).to(device) if qk_norm else None for _ in range(2)]
    return inputs | {
        "qkv": qkv, "cos": cos, "sin": sin, "q_norm_weight": norms[0], "k_norm_weight": norms[1], "eps": 1e-6,
        "slot_mapping": (blocks * block_size + positions % block_size).to(device), "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
    }  # fmt: skip


def _bytes_moved(**inputs: Any) -> int:
    qkv, cache, heads = inputs["qkv"], inputs["k_cache"], inputs["num_q_heads"]
    kv = 2 * int(inputs["seq_lens"].sum()) * cache.shape[2] * cache.shape[3] * cache.element_size()
    return kv + qkv.element_size() * (qkv.numel() + qkv.shape[0] * heads * cache.shape[3])


def _flops(**inputs: Any) -> int:
    cache = inputs["k_cache"]
    q = inputs["qkv"].new_empty(inputs["qkv"].shape[0], inputs["num_q_heads"], cache.shape[3])
    norm_and_rotation = 7 * q.shape[0] * (inputs["num_q_heads"] + inputs["num_kv_heads"]) * cache.shape[3]
    return paged_attention.SPEC.flops(**inputs, q=q) + norm_and_rotation


SPEC = KernelSpec(
    name="qkv_attention",
    ref=qkv_attention_ref,
    cases=_cases,
    tolerance={
        torch.float32: (1e-5, 2e-5),
        torch.bfloat16: (8e-3, 1e-4),
        torch.float8_e4m3fn: (0.125, 2e-3),
    },
    bytes_moved=_bytes_moved,
    flops=_flops,
)
