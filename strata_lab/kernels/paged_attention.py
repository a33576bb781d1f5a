"""Causal attention of this step's queries over a paged KV cache; prefill slices and decodes in one ragged batch.

Contract:
    q [T, H, D] float, the tokens of request b being rows cu_seqlens_q[b] : cu_seqlens_q[b + 1].
    k_cache, v_cache [NB, BS, Hkv, D] in float32, bfloat16 or float8_e4m3fn; a value is stored * scale. H is a
        multiple of Hkv, and q head h reads kv head h // (H / Hkv).
    block_tables [B, max_blocks] int32: position p of request b lies in block block_tables[b, p // BS] at p % BS.
        Entries past the request's last block may be anything.
    seq_lens [B] int32: tokens in the cache, this step's included (their keys are written before the call). Query i of
        request b sits at position seq_lens[b] - q_len + i and sees the positions up to its own. A request with
        seq_len 0 (padding of a captured step) gets zeros.
    cu_seqlens_q [B + 1] int32, from 0; rows of q past its last entry get zeros.
    max_q_len: the longest q_len, a Python int. 1 promises that every q_len is 1, hence T == B: a decode batch, which
        takes a branch with no loop. It is a shape, never read from a tensor, so the reference synchronizes with no host
        and can be captured and traced; its work grows with B * max_q_len * max_blocks: trim the tables.
    sinks, window: a query at position p sees the positions below `sinks` and those above p - window, up to its own;
        window 0 (then `sinks` means nothing) sees all of them. Entries of block_tables of which no query of the step
        sees a position may be anything.
    Returns [T, H, D] in q's dtype, fresh memory. Scores and softmax in float32 at least.

Slots that no query may see are never part of a result, whatever they hold (NaN included).
Bytes moved: the K and V that each request sees once, q and the result once. Grouped q heads share one read of K and V.

CPU kernel: keys are taken in chunks of 64 (`kChunk`), cut at absolute positions. Within a chunk a dot product adds in
a fixed order, and the (max, sum, weighted values) of the chunks are merged from the first to the last. Neither the
batch, nor how a prompt was cut into slices, nor the number of threads changes that order, so a row's result is bitwise
the same in all of them. A window that sees everything gives the bits of none. Decodes spread over threads by (request,
kv head, chunk), prefills by (request, kv head, query block).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from strata_lab.kernels.cpu.build import fakes
from strata_lab.kernels.kv_append import to_cache
from strata_lab.kernels.spec import Case, KernelSpec


def paged_attention_ref(
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
    """Attention of q [T, H, D] over the cached keys and values; see the module's contract."""

    def rows(queries: Tensor, positions: Tensor, some: slice) -> Tensor:
        table = block_tables[some]
        k, v = gather(k_cache, table, k_scale, q.dtype), gather(v_cache, table, v_scale, q.dtype)
        slots, here = torch.arange(k.shape[1], device=q.device), positions[:, :, None]
        visible = slots <= here  # [B, Q, S]
        if window:
            visible &= (slots < sinks) | (slots > here - window)
        return attend(queries, k, v, visible[:, None], scale)

    return by_request(rows, q, seq_lens, cu_seqlens_q, max_q_len)


def by_request(
    rows: Callable[[Tensor, Tensor, slice], Tensor], q: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, max_q_len: int
) -> Tensor:
    """A result for every row of q [T, H, D]: `rows` of one request at a time, or of a decode batch at once.

    `rows` gets queries [B, Q, H, D], their positions [B, Q] (-1: sees nothing) and which requests they are.
    """
    if max_q_len == 1:
        return rows(q[:, None], seq_lens[:, None] - 1, slice(None))[:, 0]
    out = q.new_zeros(q.shape[0] + 1, *q.shape[1:])  # the last row takes what lies past a request's queries
    steps = torch.arange(max_q_len, device=q.device)
    for b in range(seq_lens.shape[0]):
        q_len = cu_seqlens_q[b + 1] - cu_seqlens_q[b]
        inside = steps < q_len
        index = torch.where(inside, cu_seqlens_q[b] + steps, q.shape[0])
        positions = torch.where(inside, seq_lens[b] - q_len + steps, -1)
        queries = q[index.clamp(max=q.shape[0] - 1)]
        out[index] = rows(queries[None], positions[None], slice(b, b + 1))[0]
    return out[:-1]


def gather(cache: Tensor, block_tables: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Cached rows in order of position, [B, max_blocks * BS, Hkv, D], float32 at least."""
    blocks = cache[block_tables.clamp(0, cache.shape[0] - 1).long()]  # [B, max_blocks, BS, Hkv, D]
    return blocks.flatten(1, 2).to(torch.promote_types(dtype, torch.float32)) * scale


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """q [B, Q, H, D] over k and v [B, S, Hkv, D] where `visible` [B, Hkv or 1, Q, S] -> [B, Q, H, D]."""
    used = visible.any(dim=2).transpose(1, 2)[..., None]  # [B, S, Hkv or 1, 1]
    k, v = torch.where(used, k, 0.0), torch.where(used, v, 0.0)
    grouped = q.to(k.dtype).unflatten(2, (k.shape[2], -1))  # [B, Q, Hkv, G, D]
    scores = torch.einsum("bqhgd,bshd->bhgqs", grouped, k) * scale
    scores = scores.masked_fill(~visible[:, :, None], -torch.inf)
    highest = scores.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = torch.exp(scores - highest)  # [B, Hkv, G, Q, S]
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
    return torch.einsum("bhgqs,bshd->bqhgd", weights, v).flatten(2, 3).to(q.dtype)


def paged_attention_cpu(
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
    """`paged_attention_ref` in C++ for float32 q on the CPU; D a multiple of 8.

    Raises:
        ValueError: a needed block lies outside the cache, a table is too short for its seq_len, or the query counts
            do not add up to T. (`max_q_len` is not needed: on the CPU the lengths can simply be read.)
    """
    return torch.ops.strata.paged_attention(
        q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q, scale, k_scale, v_scale, sinks, window
    )


@fakes
def _register_fake(namespace: str) -> None:
    @torch.library.register_fake(f"{namespace}::paged_attention")
    def _(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor,
        scale: float, k_scale: float, v_scale: float, sinks: int = 0, window: int = 0,
    ) -> Tensor:  # fmt: skip
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def paged_inputs(
    lengths: Sequence[tuple[int, int]],
    heads: tuple[int, int, int],
    *,
    block_size: int = 16,
    kv_dtype: torch.dtype = torch.float32,
    poison: float = float("nan"),
    spare_blocks: int = 2,
    scales: tuple[float, float] = (1.0, 1.0),
    seed: int = 0,
    device: torch.device | str = "cpu",
    kept: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Random arguments of `paged_attention`, for cases, tests and benchmarks.

    Args:
        lengths: (q_len, seq_len) of each request.
        heads: (H, Hkv, D).
        block_size: tokens in a block.
        kv_dtype: dtype of the caches.
        poison: what every slot that no request uses holds.
        spare_blocks: blocks that belong to nobody; the tail of each table points at them.
        scales: (k_scale, v_scale).
        seed: of the random numbers and of the order of blocks.
        device: where the tensors go.
        kept: (sinks, window): slots that no query sees are poisoned, and table entries that lead to none but those
            are -1.
    """
    generator = torch.Generator().manual_seed(seed)
    num_q_heads, num_kv_heads, head_dim = heads
    counts = [-(-seq_len // block_size) for _, seq_len in lengths]
    order = torch.randperm(sum(counts) + spare_blocks, generator=generator).tolist()
    tables = torch.full((len(lengths), max(counts) + 1), order[-1], dtype=torch.int32)
    caches = [torch.full((len(order), block_size, num_kv_heads, head_dim), poison) for _ in range(2)]
    used = 0
    for b, (count, (_, seq_len)) in enumerate(zip(counts, lengths, strict=True)):
        blocks = torch.tensor(order[used : used + count], dtype=torch.int64)
        used += count
        tables[b, :count] = blocks.int()
        positions = torch.arange(seq_len)
        for cache in caches:
            rows = torch.randn(seq_len, num_kv_heads, head_dim, generator=generator)
            cache[blocks[positions // block_size], positions % block_size] = rows
        if kept is not None:
            _forget(caches, tables[b], blocks, seq_len - lengths[b][0], kept, poison)
    q_lens = torch.tensor([0] + [q_len for q_len, _ in lengths])
    q = torch.randn(int(q_lens.sum()), num_q_heads, head_dim, generator=generator)
    k_cache, v_cache = (to_cache(c, s, kv_dtype).to(device) for c, s in zip(caches, scales, strict=True))
    return {
        "q": q.to(device), "k_cache": k_cache, "v_cache": v_cache, "block_tables": tables.to(device),
        "seq_lens": torch.tensor([s for _, s in lengths], dtype=torch.int32, device=device),
        "cu_seqlens_q": q_lens.cumsum(0).int().to(device), "max_q_len": int(q_lens.max()), "scale": head_dim**-0.5,
        "k_scale": scales[0], "v_scale": scales[1],
    } | ({} if kept is None else {"sinks": kept[0], "window": kept[1]})  # fmt: skip


def _forget(
    caches: list[Tensor], table: Tensor, blocks: Tensor, first: int, kept: tuple[int, int], poison: float
) -> None:
    """Poison what queries from position `first` on do not see, and take the blocks that hold nothing else."""
    size = caches[0].shape[1]
    hidden = torch.arange(kept[0], max(kept[0], first + 1 - kept[1]))
    for cache in caches:
        cache[blocks[hidden // size], hidden % size] = poison
    table[-(-kept[0] // size) : max(0, first + 1 - kept[1]) // size] = -1


def _cases() -> Iterator[Case]:
    def case(name: str, lengths: list[tuple[int, int]], heads: tuple[int, int, int], **more: Any) -> Case:
        return Case(name, lambda device: paged_inputs(lengths, heads, device=device, **more))

    yield case("decode-one", [(1, 37)], (9, 3, 64))
    yield case("decode-ragged", [(1, 1), (1, 64), (1, 65), (1, 130)], (9, 3, 64), block_size=8)
    yield case("decode-padded-row", [(1, 20), (1, 0)], (2, 2, 80))
    yield case("prefill", [(70, 70)], (8, 1, 64))
    yield case("window-decode", [(1, 5), (1, 300), (1, 0), (1, 41)], (6, 3, 64), block_size=8, kept=(4, 40))
    yield case("window-mixed", [(1, 150), (40, 40), (18, 181), (3, 150)], (4, 2, 64), kept=(5, 24))
    yield case("window-no-sinks", [(1, 100), (9, 60)], (2, 2, 64), kept=(0, 7), kv_dtype=torch.bfloat16)
    yield case("slice-of-prefill", [(5, 71)], (3, 1, 80), block_size=32)
    yield case("mixed", [(1, 33), (7, 7), (18, 81)], (4, 4, 128))
    yield case("bfloat16", [(1, 50), (9, 20)], (9, 3, 64), kv_dtype=torch.bfloat16, scales=(0.5, 2.0))
    yield case("float8", [(1, 50), (9, 20)], (9, 3, 64), kv_dtype=torch.float8_e4m3fn, scales=(0.02, 0.03))


def _pairs(inputs: dict[str, Any]) -> int:
    """(query, visible key) pairs, over all requests."""
    q_lens = inputs["cu_seqlens_q"].diff().tolist()
    lengths = zip(q_lens, inputs["seq_lens"].tolist(), strict=True)
    return sum(q_len * seq_len - q_len * (q_len - 1) // 2 for q_len, seq_len in lengths)


def _bytes_moved(**inputs: Any) -> int:
    q, cache = inputs["q"], inputs["k_cache"]
    kv = 2 * int(inputs["seq_lens"].sum()) * cache.shape[2] * cache.shape[3] * cache.element_size()
    return kv + 2 * q.numel() * q.element_size()


def _flops(**inputs: Any) -> int:
    return 4 * _pairs(inputs) * inputs["q"].shape[1] * inputs["q"].shape[2]  # two products of 2 flops each


SPEC = KernelSpec(
    name="paged_attention",
    ref=paged_attention_ref,
    cases=_cases,
    tolerance={torch.float32: (1e-5, 2e-6), torch.bfloat16: (8e-3, 8e-3)},
    bytes_moved=_bytes_moved,
    flops=_flops,
)
