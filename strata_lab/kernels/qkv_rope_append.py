"""Everything between the QKV product and attention: optional QK-norm, RoPE and the cache write, in one pass.

Contract: qkv [T, (H + 2 Hkv) * D], a row holding the q heads, then the k heads, then the v heads; cos and sin
[T, D/2]; q_norm_weight and k_norm_weight [D] or None (RMSNorm over each head before the rotation, as Qwen3 does);
caches, slots and what is stored exactly as `kv_append`. Returns the rotated q [T, H, D] in qkv's dtype, fresh memory.
It is `rms_norm`, `rope` and `kv_append` in a row: those are the reference. Bytes moved: qkv read once, q and the slots
written once; unfused it would read and write q and k two more times and cost four more launches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from strata_lab.kernels.cpu.build import fakes
from strata_lab.kernels.kv_append import kv_append_ref
from strata_lab.kernels.rms_norm import rms_norm_ref
from strata_lab.kernels.rope import rope_ref, rotation
from strata_lab.kernels.spec import Case, KernelSpec


def qkv_rope_append_ref(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Normalize and rotate q and k, store k and v, return q [T, H, D]."""
    heads = qkv.view(qkv.shape[0], num_q_heads + 2 * num_kv_heads, -1)  # [T, H + 2 Hkv, D]
    q, k, v = heads.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm_weight is not None:
        q = rms_norm_ref(q, q_norm_weight, eps)
    if k_norm_weight is not None:
        k = rms_norm_ref(k, k_norm_weight, eps)
    kv_append_ref(rope_ref(k, cos, sin), v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    return rope_ref(q, cos, sin)


def qkv_rope_append_cpu(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """`qkv_rope_append_ref` in C++ for float32 on the CPU. A slot outside the cache is a ValueError."""
    return torch.ops.strata.qkv_rope_append(
        qkv, cos, sin, q_norm_weight, k_norm_weight, eps, k_cache, v_cache, slot_mapping, num_q_heads, num_kv_heads,
        k_scale, v_scale,
    )  # fmt: skip


@fakes
def _register_fake(namespace: str) -> None:
    @torch.library.register_fake(f"{namespace}::qkv_rope_append")
    def _(
        qkv: Tensor, cos: Tensor, sin: Tensor, q_norm_weight: Tensor | None, k_norm_weight: Tensor | None, eps: float,
        k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, num_q_heads: int, num_kv_heads: int, k_scale: float,
        v_scale: float,
    ) -> Tensor:  # fmt: skip
        return qkv.new_empty((qkv.shape[0], num_q_heads, k_cache.shape[3]))


def _cases() -> Iterator[Case]:
    yield Case("one-token", functools.partial(_inputs, [11], (9, 3, 64), torch.float32, False))
    yield Case("qk-norm", functools.partial(_inputs, [0, 9, 30], (4, 2, 128), torch.float32, True))
    yield Case("skips", functools.partial(_inputs, [-1, 4, 5, -1, 6], (8, 1, 80), torch.float32, True))
    yield Case("bfloat16", functools.partial(_inputs, [7, 3, 31], (3, 1, 64), torch.bfloat16, False))
    yield Case("float8-qk-norm", functools.partial(_inputs, [2, 1, 0, 17], (3, 3, 80), torch.float8_e4m3fn, True))


def _inputs(
    slots: list[int], heads: tuple[int, int, int], dtype: torch.dtype, qk_norm: bool, device: torch.device
) -> dict[str, Any]:
    num_q_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(len(slots))
    qkv = torch.randn(len(slots), (num_q_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(device)
    norms = [1 + 0.1 * torch.randn(head_dim, generator=generator).to(device) if qk_norm else None for _ in range(2)]
    cache = torch.full((4, 8, num_kv_heads, head_dim), float("nan"), device=device).to(dtype)
    slot_mapping = torch.tensor(slots, dtype=torch.int64, device=device)
    cos, sin = rotation(slot_mapping.clamp(min=0), head_dim)
    return {
        "qkv": qkv, "cos": cos, "sin": sin, "q_norm_weight": norms[0], "k_norm_weight": norms[1], "eps": 1e-6,
        "k_cache": cache, "v_cache": cache.clone(), "slot_mapping": slot_mapping, "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads, "k_scale": 0.5, "v_scale": 0.25,
    }  # fmt: skip


def _bytes_moved(qkv: Tensor, k_cache: Tensor, num_q_heads: int, num_kv_heads: int, **_: Any) -> int:
    tokens, head_dim = qkv.shape[0], k_cache.shape[3]
    written = tokens * head_dim * (num_q_heads * qkv.element_size() + 2 * num_kv_heads * k_cache.element_size())
    return qkv.numel() * qkv.element_size() + written


def _flops(
    qkv: Tensor, q_norm_weight: Tensor | None, k_cache: Tensor, num_q_heads: int, num_kv_heads: int, **_: Any
) -> int:
    per_element = 3 + (0 if q_norm_weight is None else 4)  # rotation, norm
    return per_element * qkv.shape[0] * (num_q_heads + num_kv_heads) * k_cache.shape[3]


SPEC = KernelSpec(
    name="qkv_rope_append",
    ref=qkv_rope_append_ref,
    cases=_cases,
    tolerance={
        torch.float32: (2e-6, 2e-6),
        torch.bfloat16: (8e-3, 1e-4),  # one rounding apart where the float32 values straddle a boundary
        torch.float8_e4m3fn: (0.125, 2e-3),
    },
    bytes_moved=_bytes_moved,
    flops=_flops,
)
