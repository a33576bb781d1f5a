"""One decode step of attention: a token per request over its paged cache, split along the cache, in one kernel.

`decode` is `paged_attention` for max_q_len 1. `decode_fused` takes the QKV product and does everything up to the output
projection: norm and rotation of q and k, the cache write and attention, with the arithmetic of `kv_write.py`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata_lab.kernels.gpu import launch, meta
from strata_lab.kernels.gpu.attention_config import NARROW, ROWS, DecodeConfig, decode_config, tokens_of
from strata_lab.kernels.gpu.attention_decode_kernel import attention_decode_kernel
from strata_lab.kernels.gpu.attention_tiles import operand

MAX_CHUNK = 16  # partial results that are loaded at once and added up
COMBINED_REGISTERS = 64  # of a thread, for them


def _launch(
    x: Tensor, out: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, seq_lens: Tensor, q_heads: int,
    scale: float, k_scale: float, v_scale: float, eps: float, config: DecodeConfig | None,
    fused: tuple[Tensor | None, ...] = (None,) * 5, sinks: int = 0, window: int = 0, together: int = 1,
) -> Tensor:  # fmt: skip
    _, block_size, kv_heads, width = k_cache.shape
    assert k_cache.stride() == v_cache.stride() and k_cache.stride()[2:] == (width, 1), k_cache.stride()
    batch, group, device = seq_lens.shape[0], q_heads // kv_heads, x.device
    assert 1 <= together <= ROWS and batch % together == 0, (together, batch)
    tokens = tokens_of(together, group)
    programs = batch // tokens
    heavy = together > 1 and width > NARROW
    dot, precision = operand(x.dtype, k_cache.dtype)
    max_tokens = min(tables.shape[1] * block_size, sinks + window if window else sys.maxsize)
    c = config or decode_config(programs, kv_heads, max_tokens, dot == tl.float32, launch.num_sms(device), heavy)
    acc = stats = arrivals = None
    if c.splits > 1:
        parts, padded = programs * kv_heads * c.splits, triton.next_power_of_2(tokens * group)
        acc = torch.empty(parts * tokens * group * width, dtype=torch.float32, device=device)
        stats = torch.empty(parts * 2 * padded, dtype=torch.float32, device=device)
        arrivals = launch.counters(device, programs * kv_heads)
    half_padded, padded_width = max(triton.next_power_of_2(width // 2), 16), max(triton.next_power_of_2(width), 16)
    per_part = triton.next_power_of_2(tokens * group) * padded_width // (32 * c.num_warps)  # registers of a thread
    chunk = min(max(COMBINED_REGISTERS // max(per_part, 1), 1), c.splits, MAX_CHUNK)
    attention_decode_kernel[(kv_heads, programs, c.splits)](
        x, out, k_cache, v_cache, tables, seq_lens, *fused, acc, stats, arrivals, eps, scale, k_scale, v_scale,
        x.stride(0), tables.stride(0), k_cache.stride(0), k_cache.stride(1), group, kv_heads, width, half_padded,
        padded_width, block_size, c.tile, c.splits, 1 << (chunk.bit_length() - 1), fused[0] is not None, ROWS, dot,
        precision, (k_scale, v_scale) != (1.0, 1.0), not launch.INTERPRETED, sinks, window, together, tokens,
        **launch.options(device, num_warps=c.num_warps, num_stages=c.num_stages, early=True),
    )  # fmt: skip
    return out


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: int = 0,
    window: int = 0,
    config: DecodeConfig | None = None,
) -> Tensor:
    """`paged_attention` of q [B, H, D], one token per request."""
    q = q.contiguous()
    out = torch.empty_like(q)
    heads = q.shape[1]
    return _launch(
        q, out, k_cache, v_cache, block_tables, seq_lens, heads, scale, k_scale, v_scale, 0.0, config, sinks=sinks,
        window=window,
    )  # fmt: skip


def decode_fused(
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
    *,
    num_q_heads: int,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: int = 0,
    window: int = 0,
    together: int = 1,
    config: DecodeConfig | None = None,
) -> Tensor:
    """`qkv_rope_append` and attention of qkv [B, (H + 2 Hkv) * D] -> [B, H * D].

    A slot that is not -1 is that of the request's last position. `together` as in `qkv_attention_triton`. Tables,
    lengths, slots and older keys are read before waiting (`launch.py`): a LATE kernel must have come after what wrote
    them, and before this one.
    """
    out = torch.empty((qkv.shape[0], num_q_heads * k_cache.shape[3]), dtype=qkv.dtype, device=qkv.device)
    return _launch(
        qkv, out, k_cache, v_cache, block_tables, seq_lens, num_q_heads, scale, k_scale, v_scale, eps, config,
        (cos, sin, q_norm_weight, k_norm_weight, slot_mapping), sinks, window, together,
    )  # fmt: skip


def aot_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Decode steps of the reference geometries, with the choices of an H200 for tables of 512 and 32768 tokens."""
    lens, slots = meta.tensor(1, dtype=torch.int32), meta.tensor(1, dtype=torch.int64)
    for name, heads, width in (("moe", (32, 4), 128), ("smollm2", (9, 3), 64)):
        norm = meta.tensor(width) if name == "moe" else None
        turn = meta.tensor(1, width // 2, dtype=torch.float32)
        for kv, dtype, length in itertools.product(
            (torch.float8_e4m3fn, torch.bfloat16, torch.float32), (torch.bfloat16, torch.float32), (512, 32768)
        ):
            cache = meta.tensor(4096, 16, heads[1], width, dtype=kv)
            tables = meta.tensor(1, length // 16, dtype=torch.int32)
            qkv = meta.tensor(1, (heads[0] + 2 * heads[1]) * width, dtype=dtype)
            config = decode_config(1, heads[1], length, torch.float32 in (kv, dtype), 132)
            yield (
                f"{name}-{length}-{dtype}-{kv}".replace("torch.", ""),
                partial(decode_fused, qkv, turn, turn, norm, norm, 1e-6, cache, cache, slots, tables, lens,
                        num_q_heads=heads[0], scale=0.1, config=config),
            )  # fmt: skip
    cache, tables = meta.tensor(4096, 16, 8, 128, dtype=torch.float8_e4m3fn), meta.tensor(1, 32, dtype=torch.int32)
    qkv, turn = meta.tensor(1, 48 * 128), meta.tensor(1, 64, dtype=torch.float32)
    fused = partial(decode_fused, qkv, turn, turn, None, None, 1e-6, cache, cache, slots, tables, lens, num_q_heads=32)
    yield "window", partial(fused, scale=0.1, sinks=4, window=1024, config=decode_config(1, 8, 1028, False, 132))
    lens, slots = meta.tensor(8, dtype=torch.int32), meta.tensor(8, dtype=torch.int64)
    for name, heads, kv_heads, width in (("together", 9, 3, 64), ("together-wide", 32, 4, 128)):
        cache, tables = meta.tensor(4096, 16, kv_heads, width), meta.tensor(8, 64, dtype=torch.int32)
        qkv, turn = meta.tensor(8, (heads + 2 * kv_heads) * width), meta.tensor(8, width // 2, dtype=torch.float32)
        programs = 8 // tokens_of(8, heads // kv_heads)
        config = decode_config(programs, kv_heads, 1024, False, 132, heavy=width > NARROW)
        yield (
            name,
            partial(decode_fused, qkv, turn, turn, None, None, 1e-6, cache, cache, slots, tables, lens,
                    num_q_heads=heads, scale=0.1, together=8, config=config),
        )  # fmt: skip
    cache, q, tables = meta.tensor(4096, 16, 4, 128), meta.tensor(1, 32, 128), meta.tensor(1, 64, dtype=torch.int32)
    yield "unfused", partial(decode, q, cache, cache, tables, lens, scale=0.1, config=DecodeConfig(64, 16))
