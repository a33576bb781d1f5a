"""What a step writes into the KV cache: `kv_append` alone, and `qkv_rope_append` with norm and rotation before it.

The plain composition and prefills need them; a decode step does the same work inside its attention kernel
(`attention_decode.py`), with the arithmetic of this file (`rms_factor`, `rotated`, `stored`), so that fusing changes no
rounding. Bytes: k, v (and q) read once, written once. One program takes a few heads of one token, so a single token
still spreads over a dozen multiprocessors.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata_lab.kernels.gpu import launch, meta

HEAD_BLOCK = 4  # heads of a program
FP8_MAX = tl.constexpr(448.0)  # largest finite float8_e4m3fn


@triton.jit
def stored(x, scale, DTYPE: tl.constexpr, SCALED: tl.constexpr = True):
    """What `kv_append` stores for float32 x: x / scale, correctly rounded; float8 saturates and keeps NaN.

    SCALED: False promises that scale is 1 and saves the division, some 15 instructions an element.
    """
    y = tl.div_rn(x, tl.zeros_like(x) + scale) if SCALED else x
    if DTYPE == tl.float8e4nv:  # noqa: SIM300
        y = tl.where(y > FP8_MAX, FP8_MAX, tl.where(y < -FP8_MAX, -FP8_MAX, y))  # min and max would drop a NaN
    return y.to(DTYPE)


@triton.jit
def rms_factor(first, second, eps, D: tl.constexpr):
    """1 / root mean square of heads [N, D] given as float32 halves [N, D / 2], padded with zeros -> [N, 1]."""
    total = tl.sum(first * first + second * second, axis=1)
    return tl.rsqrt(total / D + eps)[:, None]


@triton.jit
def rotated(first, second, cos, sin):
    """Both halves of the rotated heads."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _kv_append_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, k_scale, v_scale, k_token, k_head, k_col, v_token, v_head,
    v_col, slot_stride, H: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """k_token, k_head, k_col: strides of k; slot_stride: elements from a slot of the cache to the next."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    inside = (heads < H) & (cols < D)
    launch.wait(PDL)
    launch.trigger(PDL)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    inside &= slot >= 0
    k = tl.load(k_ptr + token * k_token + heads * k_head + cols * k_col, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + token * v_token + heads * v_head + cols * v_col, mask=inside, other=0.0).to(tl.float32)
    at = slot * slot_stride + heads * D + cols
    tl.store(k_cache_ptr + at, stored(k, k_scale, k_cache_ptr.dtype.element_ty), mask=inside)
    tl.store(v_cache_ptr + at, stored(v, v_scale, v_cache_ptr.dtype.element_ty), mask=inside)


def kv_append_triton(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """`kv_append_ref`; the caches must be contiguous. Slots outside them are not checked."""
    tokens, heads, width = k.shape
    grid = (tokens, triton.cdiv(heads, HEAD_BLOCK))
    _kv_append_kernel[grid](
        k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, *k.stride(), *v.stride(), heads * width, heads, width,
        HEAD_BLOCK, triton.next_power_of_2(width), **launch.options(k.device, num_warps=1),
    )  # fmt: skip


@triton.jit
def _qkv_rope_append_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps, k_cache_ptr, v_cache_ptr, slots_ptr, q_ptr, k_scale,
    v_scale, H: tl.constexpr, HKV: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token, any of q, k and v: who gets what is decided by masks, not by branches."""
    D: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    is_q, is_k, is_v = heads < H, (heads >= H) & (heads < H + HKV), (heads >= H + HKV) & (heads < H + 2 * HKV)
    within = cols < HALF
    weight_first = tl.full([HEADS, BLOCK], 1.0, tl.float32)
    weight_second = weight_first
    if q_norm_ptr is not None:
        weight_first = tl.load(q_norm_ptr + cols + heads * 0, mask=is_q & within, other=1.0).to(tl.float32)
        weight_second = tl.load(q_norm_ptr + HALF + cols + heads * 0, mask=is_q & within, other=1.0).to(tl.float32)
    if k_norm_ptr is not None:
        weight_first *= tl.load(k_norm_ptr + cols + heads * 0, mask=is_k & within, other=1.0).to(tl.float32)
        weight_second *= tl.load(k_norm_ptr + HALF + cols + heads * 0, mask=is_k & within, other=1.0).to(tl.float32)
    launch.wait(PDL)
    launch.trigger(PDL)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + token * HALF + cols, mask=within, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * HALF + cols, mask=within, other=0.0).to(tl.float32)
    x = qkv_ptr + (token * (H + 2 * HKV) + heads) * D + cols
    inside = (heads < H + 2 * HKV) & within
    first = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + HALF, mask=inside, other=0.0).to(tl.float32)
    rms = rms_factor(first, second, eps, D)
    factor = tl.where(is_q, rms if q_norm_ptr is not None else 1.0, rms if k_norm_ptr is not None else 1.0)
    turned_first, turned_second = rotated(first * factor * weight_first, second * factor * weight_second, cos, sin)
    out = q_ptr + (token * H + heads) * D + cols
    tl.store(out, turned_first.to(q_ptr.dtype.element_ty), mask=is_q & within)
    tl.store(out + HALF, turned_second.to(q_ptr.dtype.element_ty), mask=is_q & within)
    k_at = k_cache_ptr + (slot * HKV + heads - H) * D + cols
    v_at = v_cache_ptr + (slot * HKV + heads - H - HKV) * D + cols
    k_mask, v_mask = is_k & within & (slot >= 0), is_v & within & (slot >= 0)
    K_DTYPE: tl.constexpr = k_cache_ptr.dtype.element_ty
    tl.store(k_at, stored(turned_first, k_scale, K_DTYPE), mask=k_mask)
    tl.store(k_at + HALF, stored(turned_second, k_scale, K_DTYPE), mask=k_mask)
    tl.store(v_at, stored(first, v_scale, v_cache_ptr.dtype.element_ty), mask=v_mask)
    tl.store(v_at + HALF, stored(second, v_scale, v_cache_ptr.dtype.element_ty), mask=v_mask)


def qkv_rope_append_triton(
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
    """`qkv_rope_append_ref` for contiguous tensors; rounds q once, after norm and rotation."""
    tokens, width = qkv.shape[0], k_cache.shape[3]
    q = torch.empty((tokens, num_q_heads, width), dtype=qkv.dtype, device=qkv.device)
    grid = (tokens, triton.cdiv(num_q_heads + 2 * num_kv_heads, HEAD_BLOCK))
    _qkv_rope_append_kernel[grid](
        qkv, cos, sin, q_norm_weight, k_norm_weight, eps, k_cache, v_cache, slot_mapping, q, k_scale, v_scale,
        num_q_heads, num_kv_heads, width // 2, HEAD_BLOCK, triton.next_power_of_2(width // 2),
        **launch.options(qkv.device, num_warps=1),
    )  # fmt: skip
    return q


def aot_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """A token of the MoE geometry, for two dtypes of activations and of the cache."""
    slots, turn, norm = meta.tensor(1, dtype=torch.int64), meta.tensor(1, 64, dtype=torch.float32), meta.tensor(128)
    for dtype in (torch.bfloat16, torch.float32):
        for kv in (torch.bfloat16, torch.float8_e4m3fn):
            name = f"{dtype}-{kv}".replace("torch.", "")
            cache, new, qkv = (
                meta.tensor(64, 16, 4, 128, dtype=kv),
                meta.tensor(1, 4, 128, dtype=dtype),
                meta.tensor(1, 5120, dtype=dtype),
            )
            yield f"kv_append-{name}", partial(kv_append_triton, new, new, cache, cache, slots, 0.1, 0.1)
            yield (
                f"qkv_rope_append-{name}",
                partial(qkv_rope_append_triton, qkv, turn, turn, norm, norm, 1e-6, cache, cache, slots, 32, 4),
            )
