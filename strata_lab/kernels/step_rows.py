"""What a step begins with: a row for each of its tokens, and the rotary factors of their positions.

    x[t] = dequantize(weight)[ids[t]]        turns[n, t] = rotary[n, positions[t]]

ids and positions int64 [T], weight `LinearWeight` [V, K] in any format and layout (as of `embedding`), rotary float32
[2, R, D/2] contiguous with 0 <= position < R; x [T, K] of `dtype`, rounded once from float32, and turns [2, T, D/2]:
new tensors. Bytes moved: T rows of each, read and written. Neither look-up needs the other; they are one operator
because on a GPU each is a few KB, so that a kernel of its own costs many times what it moves.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from strata_lab.kernels import embedding
from strata_lab.kernels.cpu import build
from strata_lab.kernels.linear import case_weight
from strata_lab.kernels.spec import Case, KernelSpec
from strata_lab.quant.base import LinearWeight


def step_rows_ref(
    ids: Tensor, weight: LinearWeight, positions: Tensor, rotary: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Plain torch; see the module for the contract."""
    return embedding.embedding_ref(ids, weight).to(dtype), rotary[:, positions]


def step_rows_cpu(
    ids: Tensor, weight: LinearWeight, positions: Tensor, rotary: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The C++ operators, one after the other; `IndexError` for an id or a position outside its table."""
    return embedding.embedding(ids, weight).to(dtype), build.load().take_rows(rotary, positions)


@build.fakes
def _register_fake(namespace: str) -> None:
    @torch.library.register_fake(f"{namespace}::take_rows")
    def take_rows_fake(tables: Tensor, ids: Tensor) -> Tensor:
        return tables.new_empty((tables.shape[0], ids.shape[0], tables.shape[2]))


def _cases() -> Iterator[Case]:
    for name, shape, half, count, dtype in (
        ("bf16", (20, 72), 5, 3, torch.float32),
        ("fp32", (7, 33), 16, 1, torch.float32),
        ("int8", (64, 576), 32, 1, torch.bfloat16),
        ("int4", (40, 64), 32, 129, torch.float32),
    ):
        case = f"{name}-{shape[0]}x{shape[1]}-{half}-{count}-{str(dtype).removeprefix('torch.')}"
        yield Case(case, functools.partial(_inputs, name, shape, half, count, dtype))


def _inputs(
    name: str, shape: tuple[int, int], half: int, count: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(half)
    table = torch.randn(*shape, generator=generator).to(device)
    rotary = torch.randn(2, 300, half, generator=generator).to(device)
    ids, positions = (torch.randint(0, n, (count,), generator=generator).to(device) for n in (shape[0], 300))
    return {
        "ids": ids, "weight": case_weight(name, table), "positions": positions, "rotary": rotary, "dtype": dtype
    }  # fmt: skip


def _bytes_moved(
    ids: Tensor, weight: LinearWeight, positions: Tensor, rotary: Tensor, dtype: torch.dtype = torch.float32
) -> int:
    n, k = weight.shape
    turns = 2 * rotary.shape[0] * rotary.shape[2] * rotary.element_size()
    return ids.numel() * (weight.nbytes // n + dtype.itemsize * k + turns + 16)


def _flops(
    ids: Tensor, weight: LinearWeight, positions: Tensor, rotary: Tensor, dtype: torch.dtype = torch.float32
) -> int:
    return 2 * ids.numel() * weight.shape[1]


SPEC = KernelSpec(
    name="step_rows",
    ref=step_rows_ref,
    cases=_cases,
    tolerance={torch.float32: (0.0, 0.0), torch.bfloat16: (2**-7, 0.0)},  # a 16-bit row may be rounded either way
    bytes_moved=_bytes_moved,
    flops=_flops,
)
