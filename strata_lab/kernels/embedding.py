"""Embedding lookup: `out[t] = dequantize(weight)[ids[t]]`.

ids int64 [T] in [0, N), weight `LinearWeight` [N, K] in any format and layout, out float32 [T, K] (a new tensor).
Only the T rows are dequantized, so a tied LM head serves as the table in its own format: T * K elements are read and
written, nothing else. Layout "panels" is the CPU operator; packing such a weight has loaded it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from strata_lab.kernels.cpu import build
from strata_lab.kernels.cpu.packing import unpack
from strata_lab.kernels.linear import case_weight
from strata_lab.kernels.spec import Case, KernelSpec
from strata_lab.quant import FORMATS, get_format
from strata_lab.quant.base import LinearWeight


def embedding_ref(ids: Tensor, weight: LinearWeight) -> Tensor:
    """Gather the stored rows, then dequantize them."""
    table = unpack(weight)
    data, scales, mins = (None if part is None else part[ids] for part in (table.data, table.scales, table.mins))
    assert data is not None
    rows = replace(table, shape=(ids.shape[0], table.shape[1]), data=data, scales=scales, mins=mins)
    return get_format(weight.format).dequantize(rows)


def embedding(ids: Tensor, weight: LinearWeight) -> Tensor:
    """See the module; `IndexError` for an id outside the table."""
    if weight.layout == "rows":
        return embedding_ref(ids, weight)
    n, k = weight.shape
    return torch.ops.strata.embedding.default(ids, weight.data, weight.scales, weight.mins, n, k)


@build.fakes
def _register_fake(namespace: str) -> None:
    @torch.library.register_fake(f"{namespace}::embedding")
    def _(ids: Tensor, data: Tensor, scales: Tensor | None, mins: Tensor | None, n: int, k: int) -> Tensor:
        return data.new_empty((ids.shape[0], k), dtype=torch.float32)


def _cases() -> Iterator[Case]:
    for name in FORMATS:
        for shape, ids in (((20, 72), [19, 0, 7, 7, 8]), ((8, 32), [3])):
            yield Case(f"{name}-{shape[0]}x{shape[1]}", functools.partial(_inputs, name, shape, ids))


def _inputs(name: str, shape: tuple[int, int], ids: list[int], device: torch.device) -> dict[str, Any]:
    table = torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0])).to(device)
    return {"ids": torch.tensor(ids, device=device), "weight": case_weight(name, table)}


def _bytes_moved(ids: Tensor, weight: LinearWeight) -> int:
    n, k = weight.shape
    return ids.numel() * (weight.nbytes // n + 4 * k + 8)


def _flops(ids: Tensor, weight: LinearWeight) -> int:
    return 2 * ids.numel() * weight.shape[1]


SPEC = KernelSpec(
    name="embedding",
    ref=embedding_ref,
    cases=_cases,
    tolerance={torch.float32: (0.0, 0.0)},
    bytes_moved=_bytes_moved,
    flops=_flops,
)
