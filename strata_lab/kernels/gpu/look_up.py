"""Look-ups on the device, at the beginning and end of a captured cycle: see `speculative/look_up.py`.

A text lies in memory by position, 4 bytes a token. Each program compares `CHUNK` places of one text with its end, a
token at a time from the last one back, and leaves the best as one integer: tokens in common, then the place. The
program of a text that arrives last takes the largest and writes the guesses. A text of 400 tokens is one program that
reads it eight times from the first-level cache; one of 32,768 is 32 of them. Programs behind the end of the text read
nothing.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata_lab.kernels.gpu.launch import counters, options, trigger, wait
from strata_lab.speculative.look_up import MOST_COMMON, LookUpOps
from strata_lab.speculative.window_state import WindowState

CHUNK = 1024  # places that one program compares
_PLACES = tl.constexpr(1 << 32)  # a candidate is its tokens in common times this, and its place


@triton.jit
def _look_up_kernel(
    texts, positions, seq_lens, report, partials, arrivals, slots,
    DRAFTS: tl.constexpr, DRAFTS_POW2: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
    PARTS_POW2: tl.constexpr, MOST_COMMON: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, part, num_seqs = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    at = part * CHUNK + tl.arange(0, CHUNK)
    text = texts + row.to(tl.int64) * slots
    wait(PDL)
    trigger(PDL)
    live, last = tl.load(seq_lens + row) > 0, tl.load(positions + row)
    best = tl.zeros((), tl.int64)
    if live & (part * CHUNK < last):
        same = at < last
        common = tl.zeros((CHUNK,), tl.int64)
        for back in tl.static_range(MOST_COMMON):
            own = tl.load(text + last - back, mask=last >= back, other=-1)
            there = tl.load(text + at - back, mask=same & (at >= back), other=-2)
            same = same & (own == there)
            common += same.to(tl.int64)
        best = tl.max(tl.where(common > 0, common * _PLACES + at + 1, 0))
    tl.store(partials + row * PARTS + part, best)
    if tl.atomic_add(arrivals + row, 1, sem="acq_rel") == PARTS - 1:
        parts = tl.arange(0, PARTS_POW2)
        # .cg: other multiprocessors wrote them, past the L1 cache
        found = tl.max(tl.load(partials + row * PARTS + parts, mask=parts < PARTS, other=0, cache_modifier=".cg"))
        tl.store(arrivals + row, 0)
        follow = tl.where(found > 0, found % _PLACES, last)  # where what followed begins
        step = tl.arange(0, DRAFTS_POW2)
        tokens = tl.load(text + follow + step % (last + 1 - follow), mask=live & (step < DRAFTS), other=0)
        tl.store(report + (1 + step) * num_seqs + row, tokens.to(tl.int64), mask=step < DRAFTS)


@triton.jit
def _remember_kernel(
    texts, positions, seq_lens, sampled, slots, ROWS: tl.constexpr, ROWS_POW2: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row, num_seqs = tl.program_id(0), tl.num_programs(0)
    step = tl.arange(0, ROWS_POW2)
    wait(PDL)
    trigger(PDL)
    place = tl.load(positions + row) + 1 + step
    there = (tl.load(seq_lens + row) > 0) & (step < ROWS) & (place < slots)
    tokens = tl.load(sampled + step * num_seqs + row, mask=there, other=0)
    tl.store(texts + row.to(tl.int64) * slots + place, tl.maximum(tokens, 0).to(tl.int32), mask=there)


def look_up(texts: Tensor, state: WindowState, num_drafts: int) -> None:
    """`look_up.look_up`."""
    num_seqs, slots = texts.shape
    parts = triton.cdiv(slots, CHUNK)
    partials = torch.empty(num_seqs, parts, dtype=torch.int64, device=texts.device)
    _look_up_kernel[(num_seqs, parts)](
        texts, state.base.positions, state.base.seq_lens, state.report, partials, counters(texts.device, num_seqs),
        slots, DRAFTS=num_drafts, DRAFTS_POW2=triton.next_power_of_2(num_drafts), CHUNK=CHUNK, PARTS=parts,
        PARTS_POW2=triton.next_power_of_2(parts), MOST_COMMON=MOST_COMMON, **options(texts.device, num_warps=4),
    )  # fmt: skip


def remember(texts: Tensor, state: WindowState, num_rows: int) -> None:
    """`look_up.remember`."""
    num_seqs, slots = texts.shape
    _remember_kernel[(num_seqs,)](
        texts, state.base.positions, state.base.seq_lens, state.report[1], slots, ROWS=num_rows,
        ROWS_POW2=triton.next_power_of_2(num_rows), **options(texts.device, num_warps=1),
    )  # fmt: skip


LOOK_UPS = LookUpOps(look_up, remember)


def aot_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """A short text, and four long ones."""

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    for num_seqs, slots, drafts in ((1, 1024, 3), (4, 32768, 7)):
        base = SimpleNamespace(positions=empty(num_seqs), seq_lens=empty(num_seqs, dtype=torch.int32))
        state: Any = SimpleNamespace(base=base, report=empty(2, 8, num_seqs))
        texts = empty(num_seqs, slots, dtype=torch.int32)
        yield f"look_up_B{num_seqs}_{slots}", partial(look_up, texts, state, drafts)
        yield f"remember_B{num_seqs}_{slots}", partial(remember, texts, state, 1 + drafts)
