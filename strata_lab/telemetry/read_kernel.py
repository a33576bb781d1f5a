"""A Triton kernel that only reads, to find the ceiling of a GPU's memory.

Reductions of torch reach about 95% of what a GPU can read; a plain loop of wide loads, in the best of a few shapes,
reaches the rest. The kernel is made inside a function because Triton is not there on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

# (elements of 4 bytes per load and program, loads per program, warps)
SHAPES = ((1024, 8, 4), (2048, 4, 4), (2048, 16, 4), (4096, 4, 8), (4096, 8, 8), (8192, 4, 8), (8192, 2, 16))


def readers(buffer: Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and call of each shape that divides the buffer ([n] int32 on a GPU); none where Triton is missing."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return

    @triton.jit
    def read(x, out, block: tl.constexpr, loads: tl.constexpr):  # type: ignore[no-untyped-def]
        program = tl.program_id(0).to(tl.int64)
        start = program * block * loads
        total = tl.zeros([block], tl.int32)
        for i in range(loads):
            total += tl.load(x + start + i * block + tl.arange(0, block))
        tl.store(out + program, tl.sum(total))  # nothing is read that is not used

    for block, loads, warps in SHAPES:
        programs, rest = divmod(buffer.numel(), block * loads)
        if rest == 0:
            out = buffer.new_empty(programs)
            launch = partial(read[(programs,)], buffer, out, block, loads, num_warps=warps)
            yield f"triton {block}x{loads}, {warps} warps", launch
