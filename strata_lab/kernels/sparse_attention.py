"""Causal attention in which an answer's tokens see only the pages of the cache that promise most.

A page is a block of the cache. A key's product with a query is at most sum(max(q * low, q * high)) over the
dimensions, where low and high bound the keys of its block (`page_bounds`): the page's promise, after Quest (Tang et al.
2024). For a kv head the promises to its q heads are added up, so that all of them read the same pages once. Of its past
a query sees the first block, which attention rests on, the two last ones, which hold what was just written, and of the
others those with the highest promises, `pages` blocks in all; of equal promises that of the earlier block.

Contract: q, caches, block_tables, seq_lens, cu_seqlens_q, max_q_len, scale, k_scale and v_scale as in
`paged_attention`; caches contiguous. bounds_cache [NB, Hkv, 2, D] of the cache's dtype: bounds of every block but the
last two that a query sees, which may be anything. prompt_lens [B] int32: queries at positions below see all before
them, as in `paged_attention`, so that what a token is computed from depends on its text and its prompt's length, and
neither on slices nor on batch mates. pages: at least 4. Returns [T, H, D] in q's dtype. A query that sees at most
`pages` blocks gets what `paged_attention` gives it, in C++ to the last bit.

Bytes moved: for an answer's token the bounds of its text, a share of 1 / BS of K and V, and K and V of `pages` blocks.
A block that is not attended is never read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from strata_lab.kernels import paged_attention
from strata_lab.kernels.cpu.build import fakes
from strata_lab.kernels.page_bounds import page_bounds_ref
from strata_lab.kernels.paged_attention import attend, by_request, gather, paged_inputs
from strata_lab.kernels.spec import Case, KernelSpec

LEAST_PAGES = 4  # the first, the last two, and one to choose


def sparse_attention_ref(
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
    """Attention of q [T, H, D] over the pages that promise most; see the module's contract."""
    size = k_cache.shape[1]

    def rows(queries: Tensor, positions: Tensor, some: slice) -> Tensor:
        table = block_tables[some]
        k, v = gather(k_cache, table, k_scale, q.dtype), gather(v_cache, table, v_scale, q.dtype)
        chosen = chosen_pages(queries, bounds_cache, table, positions, prompt_lens[some], size, pages)
        past = torch.arange(k.shape[1], device=q.device) <= positions[:, :, None]
        return attend(queries, k, v, past[:, None] & chosen.repeat_interleave(size, dim=-1), scale)

    return by_request(rows, q, seq_lens, cu_seqlens_q, max_q_len)


def chosen_pages(
    q: Tensor, bounds_cache: Tensor, table: Tensor, positions: Tensor, prompt_lens: Tensor, block_size: int, pages: int
) -> Tensor:
    """Which entries of table [B, W] the queries q [B, Q, H, D] at `positions` [B, Q] attend, [B, Hkv, Q, W]."""
    bounds = bounds_cache[table.clamp(0, bounds_cache.shape[0] - 1).long()]  # [B, W, Hkv, 2, D]
    bounds = bounds.to(torch.promote_types(q.dtype, torch.float32))
    grouped = q.to(bounds.dtype).unflatten(2, (bounds.shape[2], -1))  # [B, Q, Hkv, G, D]
    signs = torch.stack((grouped.clamp(max=0).sum(3), grouped.clamp(min=0).sum(3)), dim=3)  # [B, Q, Hkv, 2, D]
    promises = torch.einsum("bqhsd,bwhsd->bhqw", signs, bounds)
    index, total = torch.arange(table.shape[1], device=q.device), (positions // block_size + 1)[:, None, :, None]
    always = (index == 0) | (index >= total - 2)
    promises = torch.where(always | promises.isnan(), torch.inf, promises)
    promises = torch.where(index < total, promises, -torch.inf)
    rank = promises.sort(dim=-1, descending=True, stable=True).indices.argsort(dim=-1)
    dense = positions < prompt_lens[:, None]
    return (index < total) & ((rank < pages) | dense[:, None, :, None])


def sparse_attention_cpu(
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
    """`sparse_attention_ref` in C++ for float32 q on the CPU; D a multiple of 8. Errors as `paged_attention_cpu`."""
    return torch.ops.strata.sparse_attention(
        q, k_cache, v_cache, bounds_cache, block_tables, seq_lens, cu_seqlens_q, prompt_lens, scale, k_scale, v_scale,
        pages,
    )  # fmt: skip


@fakes
def _register_fake(namespace: str) -> None:
    @torch.library.register_fake(f"{namespace}::sparse_attention")
    def _(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, bounds_cache: Tensor, block_tables: Tensor, seq_lens: Tensor,
        cu_seqlens_q: Tensor, prompt_lens: Tensor, scale: float, k_scale: float, v_scale: float, pages: int,
    ) -> Tensor:  # fmt: skip
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def sparse_inputs(
    lengths: list[tuple[int, int]], prompts: list[int], heads: tuple[int, int, int], pages: int, **more: Any
) -> dict[str, Any]:
    """Arguments of `sparse_attention` as `paged_inputs` makes them; bounds that no query may read are NaN."""
    inputs = paged_inputs(lengths, heads, **more)
    cache, size, device = inputs["k_cache"], inputs["k_cache"].shape[1], inputs["k_cache"].device
    shape = (cache.shape[0], cache.shape[2], 2, cache.shape[3])
    bounds = torch.full(shape, torch.nan, device=device).to(cache.dtype)
    full = [int(b) for i, (_, n) in enumerate(lengths) for b in inputs["block_tables"][i, : max(0, -(-n // size) - 2)]]
    slots = torch.tensor([b * size + size - 1 for b in full], dtype=torch.int64, device=device)
    if full:
        page_bounds_ref(cache, bounds, slots)
    known = torch.tensor(prompts, dtype=torch.int32, device=device)
    return inputs | {"bounds_cache": bounds, "prompt_lens": known, "pages": pages}


def _cases() -> Iterator[Case]:
    def case(
        name: str, lengths: list[tuple[int, int]], prompts: list[int], heads: tuple[int, int, int], pages: int,
        **more: Any,
    ) -> Case:  # fmt: skip
        return Case(name, lambda device: sparse_inputs(lengths, prompts, heads, pages, device=device, **more))

    yield case("decode-one", [(1, 137)], [20], (9, 3, 64), 4, block_size=8)
    yield case("decode-ragged", [(1, 1), (1, 0), (1, 65), (1, 330)], [0, 0, 7, 300], (6, 3, 64), 5)
    yield case("all-pages", [(1, 100), (1, 129)], [0, 0], (2, 2, 80), 9)
    yield case("prompt-of-one-token", [(1, 200), (1, 200)], [200, 199], (4, 1, 32), 6, block_size=8)
    yield case("mixed", [(1, 60), (3, 3), (4, 63), (1, 50)], [50, 3, 61, 9], (4, 2, 16), 5, block_size=8)
    yield case("wide-blocks", [(2, 201)], [30], (3, 1, 80), 4, block_size=32)
    narrow: dict[str, Any] = {"block_size": 8, "scales": (0.02, 0.03)}
    yield case("bfloat16", [(1, 70), (3, 60)], [1, 58], (4, 2, 64), 4, kv_dtype=torch.bfloat16, **narrow)
    yield case("float8", [(1, 70), (3, 60)], [1, 58], (4, 2, 64), 4, kv_dtype=torch.float8_e4m3fn, **narrow)


def _seen(inputs: dict[str, Any]) -> tuple[int, int]:
    """(keys read, keys multiplied), per kv head, over all requests; a page that is scored counts as one key."""
    size, pages = inputs["k_cache"].shape[1], inputs["pages"]
    read = pairs = 0
    q_lens = inputs["cu_seqlens_q"].diff().tolist()
    for q_len, length, prompt in zip(q_lens, inputs["seq_lens"].tolist(), inputs["prompt_lens"].tolist(), strict=True):
        counts = []
        for seen in range(length - q_len + 1, length + 1):
            sparse = seen > max(prompt, pages * size)
            counts.append(pages * size + seen // size if sparse else seen)
        read += min(sum(counts), length + length // size)
        pairs += sum(counts)
    return read, pairs


def _bytes_moved(**inputs: Any) -> int:
    q, cache = inputs["q"], inputs["k_cache"]
    per_key = 2 * cache.shape[2] * cache.shape[3] * cache.element_size()
    return _seen(inputs)[0] * per_key + 2 * q.numel() * q.element_size()


def _flops(**inputs: Any) -> int:
    return 4 * _seen(inputs)[1] * inputs["q"].shape[1] * inputs["q"].shape[2]


SPEC = KernelSpec(
    name="sparse_attention",
    ref=sparse_attention_ref,
    cases=_cases,
    tolerance=paged_attention.SPEC.tolerance,
    bytes_moved=_bytes_moved,
    flops=_flops,
)
