"""Rows of a table by index: the rotary factors of this step's positions.

    out[i] = table[ids[i]]

table float [R, C] contiguous, ids int64 [T] with 0 <= id < R; the result is a new [T, C]. Bytes moved: T rows read and
written. An operator of its own so that a captured step can look up new positions at every replay.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from strata_lab.kernels.cpu import build
from strata_lab.kernels.spec import Case, KernelSpec


def take_rows_ref(table: Tensor, ids: Tensor) -> Tensor:
    """Plain torch; see the module for the contract."""
    return table[ids]


def take_rows_cpu(table: Tensor, ids: Tensor) -> Tensor:
    """The C++ operator, for a float32 table."""
    return build.load().take_rows(table, ids)


@build.fakes
def _register_fake(namespace: str) -> None:
    @torch.library.register_fake(f"{namespace}::take_rows")
    def take_rows_fake(table: Tensor, ids: Tensor) -> Tensor:
        return table.new_empty((ids.shape[0], table.shape[1]))


def _cases() -> Iterator[Case]:
    for rows, width, count in ((7, 5, 3), (64, 32, 1), (300, 32, 129)):
        yield Case(f"{rows}x{width}-{count}", functools.partial(_inputs, rows, width, count))


def _inputs(rows: int, width: int, count: int, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rows)
    table = torch.randn(rows, width, generator=generator)
    return {"table": table.to(device), "ids": torch.randint(0, rows, (count,), generator=generator).to(device)}


def _bytes_moved(table: Tensor, ids: Tensor) -> int:
    return 2 * ids.shape[0] * table.shape[1] * table.element_size() + ids.numel() * ids.element_size()


SPEC = KernelSpec(
    name="take_rows",
    ref=take_rows_ref,
    cases=_cases,
    tolerance={torch.float32: (0.0, 0.0)},
    bytes_moved=_bytes_moved,
    flops=lambda table, ids: 0,
)
