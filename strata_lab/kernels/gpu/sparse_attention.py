"""Attention over the pages that promise most, and the bounds it chooses by. Contracts: `kernels/sparse_attention.py`.

`_promises_kernel` scores pages, a tile of them per program, so that a long text spreads over the card; `_choose_kernel`
keeps the best of a row and KV head: it finds the lowest promise that is kept bit by bit, counting how many are at least
as high, which takes 32 counts however many pages there are and no sorting. It writes their table, and the decode kernel
(`attention_decode.py`) runs over it as over any other: each row and KV head is a request of its own, over a view of the
cache in which a block begins at every row of D.

Bytes: bounds of the text once, then what the decode kernel reads of the chosen pages. Prompts and answers in one step
are computed one after the other; a step of decodes alone is three kernels and `page_bounds`.
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
from strata_lab.kernels.gpu.attention_decode import decode
from strata_lab.kernels.gpu.attention_prefill import prefill

TILE = 32  # pages that a program scores
FIRST, LAST = tl.constexpr(1), tl.constexpr(2)  # pages that are always attended


@triton.jit
def _page_bounds_kernel(
    k_ptr, bounds_ptr, slots_ptr, tokens, block_stride, slot_stride, HKV: tl.constexpr, D: tl.constexpr,
    D_P: tl.constexpr, BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token and KV head; the last token that a step writes into a block bounds it."""
    token, head = tl.program_id(0), tl.program_id(1)
    launch.wait(PDL)
    launch.trigger(PDL)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    after = tl.load(slots_ptr + token + 1, mask=token + 1 < tokens, other=-1).to(tl.int64)
    offset = slot % BLOCK_SIZE
    if (slot >= 0) & ((after != slot + 1) | (offset == BLOCK_SIZE - 1)):
        block = slot // BLOCK_SIZE
        rows, cols = tl.arange(0, BLOCK_SIZE)[:, None], tl.arange(0, D_P)[None, :]
        there = rows <= offset
        at = k_ptr + block * block_stride + rows * slot_stride + head * D + cols
        keys = tl.load(at, mask=there & (cols < D), other=0.0).to(tl.float32)
        col = tl.arange(0, D_P)
        out = bounds_ptr + (block * HKV + head) * (2 * D) + col
        low = tl.min(tl.where(there, keys, float("inf")), axis=0)
        high = tl.max(tl.where(there, keys, float("-inf")), axis=0)
        tl.store(out, low.to(bounds_ptr.dtype.element_ty), mask=col < D)
        tl.store(out + D, high.to(bounds_ptr.dtype.element_ty), mask=col < D)


@triton.jit
def _row(owners_ptr, lengths_ptr, prompts_ptr, token, BLOCK_SIZE: tl.constexpr):
    """Request of a row, tokens that it sees, their pages, and whether it is an answer's."""
    owner = token
    if owners_ptr is not None:
        owner = tl.load(owners_ptr + token)
    length = tl.load(lengths_ptr + token)
    return owner, length, tl.cdiv(length, BLOCK_SIZE), length > tl.load(prompts_ptr + owner)


@triton.jit
def _promises_kernel(
    q_ptr, bounds_ptr, tables_ptr, owners_ptr, lengths_ptr, prompts_ptr, promises_ptr, table_stride,
    G: tl.constexpr, G_P: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, PAGES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """promises [T, HKV, WIDTH] float32 of the pages that may be chosen or not."""
    token, head = tl.program_id(0), tl.program_id(1)
    launch.wait(PDL)
    launch.trigger(PDL)
    owner, _, total, answers = _row(owners_ptr, lengths_ptr, prompts_ptr, token, BLOCK_SIZE)
    first = FIRST + tl.program_id(2) * TILE
    if answers & (total > PAGES) & (first < total - LAST):
        group, cols = tl.arange(0, G_P)[:, None], tl.arange(0, D_P)[None, :]
        at = q_ptr + ((token.to(tl.int64) * HKV + head) * G + group) * D + cols
        q = tl.load(at, mask=(group < G) & (cols < D), other=0.0).to(tl.float32)
        below, above = tl.sum(tl.minimum(q, 0.0), axis=0), tl.sum(tl.maximum(q, 0.0), axis=0)  # [D_P]
        page = first + tl.arange(0, TILE)
        ids = tl.load(tables_ptr + owner * table_stride + page, mask=page < total - LAST, other=0).to(tl.int64)
        bound = bounds_ptr + (ids * HKV + head)[:, None] * (2 * D) + cols
        inside = (page < total - LAST)[:, None] & (cols < D)
        low = tl.load(bound, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(bound + D, mask=inside, other=0.0).to(tl.float32)
        promise = tl.sum(low * below[None, :] + high * above[None, :], axis=1)
        promise = tl.where(promise != promise, float("inf"), promise)
        tl.store(promises_ptr + (token.to(tl.int64) * HKV + head) * WIDTH + page, promise, mask=page < total - LAST)


@triton.jit
def _choose_kernel(
    promises_ptr, tables_ptr, owners_ptr, lengths_ptr, prompts_ptr, chosen_ptr, lens_ptr, table_stride,
    HKV: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, W_P: tl.constexpr, KEPT: tl.constexpr,
    PAGES: tl.constexpr, ALL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """chosen [T, HKV, KEPT], ids of the view of one head, and the tokens in them, lens [T, HKV].

    ALL: a prompt's row gets all its pages; else none.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    launch.wait(PDL)
    launch.trigger(PDL)
    owner, length, total, answers = _row(owners_ptr, lengths_ptr, prompts_ptr, token, BLOCK_SIZE)
    row = token.to(tl.int64) * HKV + head
    page = tl.arange(0, W_P)
    taken = page < total
    if answers & (total > PAGES):
        open_ = (page >= FIRST) & (page < total - LAST)
        promise = tl.load(promises_ptr + row * WIDTH + page, mask=open_, other=0.0) + 0.0  # -0.0 is 0.0
        bits = promise.to(tl.int32, bitcast=True)
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # whole numbers in the order of the promises
        wanted = PAGES - FIRST - LAST
        least = tl.where(tl.sum((open_ & (key >= 0)).to(tl.int32)) >= wanted, 0, -0x80000000).to(tl.int32)
        for bit in range(31):
            higher = least + (1 << (30 - bit))
            least = tl.where(tl.sum((open_ & (key >= higher)).to(tl.int32)) >= wanted, higher, least)
        above, equal = open_ & (key > least), open_ & (key == least)
        missing = wanted - tl.sum(above.to(tl.int32))
        best = above | (equal & (tl.cumsum(equal.to(tl.int32)) <= missing))
        taken = taken & (best | (page < FIRST) | (page >= total - LAST))
        length -= (total - PAGES) * BLOCK_SIZE
    elif not (answers | ALL):
        length = length * 0
        taken = taken & (length > 0)
    ids = tl.load(tables_ptr + owner * table_stride + page, mask=taken, other=0)
    place = tl.cumsum(taken.to(tl.int32)) - 1
    tl.store(chosen_ptr + row * KEPT + place, ids * (BLOCK_SIZE * HKV) + head, mask=taken)
    tl.store(lens_ptr + row, length)


def page_bounds_triton(k_cache: Tensor, bounds_cache: Tensor, slot_mapping: Tensor) -> None:
    """`page_bounds_ref`; slots outside the cache are not checked."""
    _, size, heads, width = k_cache.shape
    tokens = slot_mapping.shape[0]
    _page_bounds_kernel[(tokens, heads)](
        k_cache, bounds_cache, slot_mapping, tokens, k_cache.stride(0), k_cache.stride(1), heads, width,
        triton.next_power_of_2(width), size, **launch.options(k_cache.device, num_warps=1),
    )  # fmt: skip


def sparse_attention_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    bounds_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    prompt_lens: Tensor,
    *,
    max_q_len: int,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    pages: int,
) -> Tensor:
    """`sparse_attention_ref` for contiguous caches; blocks are not checked."""
    scales: Any = {"scale": scale, "k_scale": k_scale, "v_scale": v_scale}
    owners, lengths = None, seq_lens
    if max_q_len > 1:
        owners, lengths = _rows(seq_lens, cu_seqlens_q, q.shape[0])
    tables, lens = choose_pages(
        q.contiguous(), bounds_cache, block_tables, owners, lengths, prompt_lens, k_cache.shape[1], pages
    )
    out = _over_tables(q, k_cache, v_cache, tables, lens, scales)
    if max_q_len == 1:
        return out
    whole = prefill(q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q, max_q_len=max_q_len, **scales)
    return torch.where((lens[:, :1] > 0)[..., None], out, whole)


def _rows(seq_lens: Tensor, cu_seqlens_q: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Request of every row and the tokens that it sees, [T] int32 each; rows of nobody see none."""
    row = torch.arange(tokens, dtype=torch.int32, device=seq_lens.device)
    owners = torch.searchsorted(cu_seqlens_q[1:].contiguous(), row, right=True, out_int32=True)
    inside = owners < seq_lens.shape[0]
    owners = owners.clamp(max=seq_lens.shape[0] - 1)
    lengths = seq_lens[owners] - cu_seqlens_q[1:][owners] + row + 1
    return owners, torch.where(inside, lengths, 0).int()


def choose_pages(
    q: Tensor, bounds_cache: Tensor, block_tables: Tensor, owners: Tensor | None, lengths: Tensor, prompt_lens: Tensor,
    block_size: int, pages: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Tables [T, Hkv, K] and lengths [T, Hkv] of what the rows of q [T, H, D] attend.

    Without `owners` row t is request t. An entry is block * BS * Hkv + head, for the view of one head. With
    `owners` a prompt's row has length 0.
    """
    tokens, width = q.shape[0], block_tables.shape[1]
    _, heads, _, dim = bounds_cache.shape
    group = q.shape[1] // heads
    promises = torch.empty((tokens, heads, width), dtype=torch.float32, device=q.device)
    kept = width if owners is None else min(pages, width)
    chosen = torch.empty((tokens, heads, kept), dtype=torch.int32, device=q.device)
    lens = torch.empty((tokens, heads), dtype=torch.int32, device=q.device)
    known = (block_tables, owners, lengths, prompt_lens)
    if width > pages:
        _promises_kernel[(tokens, heads, triton.cdiv(width, TILE))](
            q, bounds_cache, *known, promises, block_tables.stride(0), group, triton.next_power_of_2(group), heads,
            dim, triton.next_power_of_2(dim), block_size, width, pages, TILE, **launch.options(q.device),
        )  # fmt: skip
    _choose_kernel[(tokens, heads)](
        promises, *known, chosen, lens, block_tables.stride(0), heads, block_size, width,
        triton.next_power_of_2(width), kept, pages, owners is None, **launch.options(q.device),
    )  # fmt: skip
    return chosen, lens


def _over_tables(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, lens: Tensor, scales: dict[str, float]
) -> Tensor:
    """The decode kernel over a table for every row and KV head."""
    tokens, heads, kept = tables.shape
    dim = q.shape[2]
    caches = [one_head(cache) for cache in (k_cache, v_cache)]
    rows = q.reshape(tokens * heads, -1, dim)
    return decode(rows, *caches, tables.view(-1, kept), lens.view(-1), **scales).view(q.shape)


def one_head(cache: Tensor) -> Tensor:
    """A contiguous cache [NB, BS, Hkv, D] as [N, BS, 1, D], a block beginning at every row of D."""
    blocks, size, heads, dim = cache.shape
    count = (blocks * size - (size - 1)) * heads
    return cache.as_strided((count, size, 1, dim), (dim, heads * dim, dim, 1))


def aot_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Decode steps of the reference geometries behind 32768 tokens, of which 64 pages are attended."""
    lens, slots = meta.tensor(1, dtype=torch.int32), meta.tensor(1, dtype=torch.int64)
    for name, heads, width in (("moe", (32, 4), 128), ("smollm2", (9, 3), 64)):
        for kv in (torch.float8_e4m3fn, torch.bfloat16):
            cache = meta.tensor(4096, 16, heads[1], width, dtype=kv)
            bounds = meta.tensor(4096, heads[1], 2, width, dtype=kv)
            q, tables = meta.tensor(1, heads[0], width), meta.tensor(1, 2048, dtype=torch.int32)
            label = f"{name}-{kv}".replace("torch.", "")
            yield f"bounds-{label}", partial(page_bounds_triton, cache, bounds, slots)
            yield f"choose-{label}", partial(choose_pages, q, bounds, tables, None, lens, lens, 16, 64)
