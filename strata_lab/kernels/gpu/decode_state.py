"""What a captured decode step keeps on the device between replays, and how a sampled token becomes the next input.

A step that ends in `advance` can be replayed again without the host: token, position, length and slot of the next
step are written where this step read its own. Also here: the integer keys that put tokens in order, and the random
numbers, both bit for bit those of `sampling_draw.py` and `sampling_random.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata_lab.sampling_draw import HEAD, MAX_VOCAB_SIZE

GREEDY_CHUNK = 1024  # fewest logits of one program: sizes the scratch memory
DRAW_CHUNK = 1024  # logits of one program
MAX_BLOCK = 64  # logits under one maximum at most
MIN_BLOCKS = 2 * HEAD  # with fewer maxima than this, the first tokens would crowd into too few blocks


@dataclass
class Scratch:
    """Memory of the sampling kernels, one row per request; nothing in it outlives a call but the zeros.

    Attributes:
        block, chunk: logits under one maximum, logits of one program; powers of two.
        partials: best key of each program, [B, parts] int64.
        arrivals: programs that are done, [B] int32; 0 between calls.
        peaks: first key of each block, [B, blocks] int64.
        best: first key of the row, [B] int64.
        thresholds: last key that may be among the first `HEAD`, [B] int64.
        sums: weight of each chunk, [B, chunks] float64.
        candidates: keys up to the threshold, in any order, [B, HEAD * block] int64.
        num_candidates: how many, [B] int32; 0 between calls.
        head: first keys in order, [B, HEAD] int64.
    """

    block: int
    chunk: int
    partials: Tensor
    arrivals: Tensor
    peaks: Tensor
    best: Tensor
    thresholds: Tensor
    sums: Tensor
    candidates: Tensor
    num_candidates: Tensor
    head: Tensor

    @classmethod
    def empty(
        cls, num_seqs: int, vocab_size: int, device: torch.device | str, block: int = 0, chunk: int = DRAW_CHUNK
    ) -> Scratch:
        """Allocate; `block` 0 chooses the largest that leaves `MIN_BLOCKS` blocks, or 1."""
        block = block or next((b for b in _halves(MAX_BLOCK) if triton.cdiv(vocab_size, b) >= MIN_BLOCKS), 1)
        num_blocks = triton.cdiv(vocab_size, block)
        assert block == 1 or num_blocks >= HEAD, (vocab_size, block)
        keys: dict[str, Any] = {"dtype": torch.int64, "device": device}
        counts: dict[str, Any] = {"dtype": torch.int32, "device": device}
        return cls(
            block=block,
            chunk=chunk,
            partials=torch.empty(num_seqs, triton.cdiv(vocab_size, GREEDY_CHUNK), **keys),
            arrivals=torch.zeros(num_seqs, **counts),
            peaks=torch.empty(num_seqs, num_blocks, **keys),
            best=torch.empty(num_seqs, **keys),
            thresholds=torch.empty(num_seqs, **keys),
            sums=torch.empty(num_seqs, triton.cdiv(vocab_size, chunk), dtype=torch.float64, device=device),
            candidates=torch.empty(num_seqs, HEAD * block, **keys),
            num_candidates=torch.zeros(num_seqs, **counts),
            head=torch.empty(num_seqs, HEAD, **keys),
        )


def _halves(number: int) -> list[int]:
    return [number >> shift for shift in range(number.bit_length())]


@dataclass
class DecodeState:
    """Inputs and outputs of a captured decode step of B rows, at fixed addresses.

    A row with `seq_lens` 0 is padding: no kernel changes it and its tokens are 0. A row that has no room for another
    token (`max_seq_lens`) becomes padding after its last one.

    Attributes:
        input_ids: [B] int64, the token to feed; the sampled one afterwards (0 where there is none).
        positions: [B] int64, of that token.
        seq_lens: [B] int32, tokens in the cache with this step's.
        slot_mapping: [B] int64, where this step's keys and values go; -1 is nowhere.
        block_tables: [B, W] int32.
        max_seq_lens: [B] int32, tokens that the row's blocks hold; at most W * block_size counts.
        block_size: tokens of a KV block.
        vocab_size: logits of a row.
        inverse_temperature: [B] float64; 0 is greedy.
        top_k: [B] int64; 0, or the vocabulary's size or more, is off.
        top_p: [B] float64 in (0, 1]; 1 is off.
        min_p: [B] float64 in [0, 1]; 0 is off.
        seed_keys: [B] int64, the bits of `sampling_random.seed_keys`.
        output_positions: [B] int64, place in the output of the token to be drawn.
        out_tokens: [steps, B] int64: what each step sampled, `UNRESOLVED` (-1) where `draw` could not tell, -2 where a
            row had no largest logit.
        scratch: memory of the sampling kernels.
        to_target: of guesses, [V] int64: the token that each logit stands for. A guess is never negative: what cannot
            be told may as well be the first.
    """

    input_ids: Tensor
    positions: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    max_seq_lens: Tensor
    block_size: int
    vocab_size: int
    inverse_temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed_keys: Tensor
    output_positions: Tensor
    out_tokens: Tensor
    scratch: Scratch
    to_target: Tensor | None = None

    @classmethod
    def empty(
        cls,
        num_seqs: int,
        table_width: int,
        steps: int,
        block_size: int,
        vocab_size: int,
        device: torch.device | str,
    ) -> DecodeState:
        """All rows padding, all sampling parameters off."""
        assert 0 < vocab_size <= MAX_VOCAB_SIZE, vocab_size

        def full(value: float, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((num_seqs,), value, dtype=dtype, device=device)

        return cls(
            input_ids=full(0),
            positions=full(0),
            seq_lens=full(0, torch.int32),
            slot_mapping=full(-1),
            block_tables=torch.zeros(num_seqs, table_width, dtype=torch.int32, device=device),
            max_seq_lens=full(table_width * block_size, torch.int32),
            block_size=block_size,
            vocab_size=vocab_size,
            inverse_temperature=full(0.0, torch.float64),
            top_k=full(0),
            top_p=full(1.0, torch.float64),
            min_p=full(0.0, torch.float64),
            seed_keys=full(0),
            output_positions=full(0),
            out_tokens=torch.zeros(steps, num_seqs, dtype=torch.int64, device=device),
            scratch=Scratch.empty(num_seqs, vocab_size, device),
        )

    def row_pointers(self) -> tuple[Tensor, ...]:
        """What `upcoming` and `advance` take, in the order of every kernel's arguments."""
        return (
            self.input_ids,
            self.positions,
            self.seq_lens,
            self.slot_mapping,
            self.block_tables,
            self.max_seq_lens,
            self.output_positions,
            self.out_tokens,
            self.to_target,
        )


@triton.jit
def sort_keys(x, ids):
    """Unique int64 keys that ascend by descending logit, then id; NaN comes first, -0 is 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    # As integers, positive floats ascend and negative ones descend: flip all bits, or the sign bit alone.
    order = tl.where(bits < 0, bits & 0x7FFFFFFF, ~bits)
    order = tl.where(x != x, ~0x7FFFFFFF, order)
    return (order.to(tl.int64) << 32) | ids.to(tl.int64)


@triton.jit
def key_values(keys):
    """The float32 logits behind keys of numbers."""
    order = (keys >> 32).to(tl.int32)
    return tl.where(order < 0, ~order, order ^ ~0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def key_ids(keys):
    """The token ids behind keys, int64."""
    return keys & 0xFFFFFFFF


@triton.jit
def is_best(key):
    """Whether the first key of a row belongs to a largest logit: no NaN, and not all -inf."""
    order = (key >> 32).to(tl.int32)
    return (order >= ~0x7F800000) & (order < 0x7F800000)  # from +inf to above -inf


@triton.jit
def uniform(key, position):
    """`sampling_random.uniforms` of one key (int64 bits) and position (int64), float64."""
    x = key.to(tl.uint64, bitcast=True)
    x += (position + 1).to(tl.uint64, bitcast=True) * tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    x = (x ^ (x >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    x = x ^ (x >> 31)
    return (x >> 11).to(tl.int64, bitcast=True).to(tl.float64) * (1.0 / 9007199254740992.0)  # 53 bits


@triton.jit
def upcoming(
    positions, seq_lens, block_tables, max_seq_lens, output_positions, row, table_width, BLOCK_SIZE: tl.constexpr
):
    """The row's next position, its slot or -1 where there is no room, its length now, and its place in the output."""
    position = tl.load(positions + row) + 1
    column = tl.minimum(position // BLOCK_SIZE, table_width - 1)
    block = tl.load(block_tables + row * table_width + column).to(tl.int64)
    capacity = tl.minimum(tl.load(max_seq_lens + row), table_width * BLOCK_SIZE)
    slot = tl.where(position < capacity, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    return position, slot, tl.load(seq_lens + row), tl.load(output_positions + row)


@triton.jit
def advance(
    token, position, slot, seq_len, drawn, row, step,
    input_ids, positions, seq_lens, slot_mapping, output_positions, out_tokens, to_target,
):  # fmt: skip
    """Record the row's token and make it the next input; the numbers are those of `upcoming`, read before."""
    if to_target is not None:
        token = tl.load(to_target + tl.maximum(token, 0))
    live = seq_len > 0
    more = slot >= 0
    tl.debug_barrier()  # every warp has read before one of them writes
    tl.store(out_tokens + step * tl.num_programs(0) + row, tl.where(live, token, 0))
    tl.store(input_ids + row, tl.maximum(token, 0), mask=live)
    tl.store(positions + row, position, mask=live & more)
    tl.store(seq_lens + row, tl.where(more, seq_len + 1, 0), mask=live)
    tl.store(slot_mapping + row, slot, mask=live)
    tl.store(output_positions + row, drawn + 1, mask=live)
