"""The one shape every weight has, whatever its number format.

A `LinearWeight` is plain tensors and a name for how to read them. Formats (one file each) make and unmake them,
kernels multiply by them, loaders fill them without requantizing what the file already stores. It does no arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

PANEL_ROWS = 8  # output rows interleaved in one panel of the CPU layout: the eight 32-bit lanes of an AVX2 register


@dataclass(frozen=True)
class LinearWeight:
    """Weight of `y = x @ w.T`, with w of shape [N, K].

    Attributes:
        format: "fp32", "bf16", "fp8", "int8" or "int4".
        shape: (N, K), without padding.
        data: the numbers. Layout "rows": fp32/bf16/fp8/int8 [N, K]; int4 uint8 [N, K/2], where byte j of each block
            of 32 columns holds column j in its low and column j + 16 in its high nibble (GGUF's order).
            Layout "panels": as `kernels/cpu/packing.py` says; dim 0 counts panels of `PANEL_ROWS` rows.
        scales: None, or one scale per row and group: [N, K/group_size] (panels: [N/8, K/group_size, 8]); with
            group_size 0 one per row: [N, 1].
        mins: None, or the value of code 0 per group, same shape as scales: w = scale * code + min.
        group_size: columns that share a scale; 0 is the whole row.
        layout: "rows" or "panels".
    """

    format: str
    shape: tuple[int, int]
    data: Tensor
    scales: Tensor | None = None
    mins: Tensor | None = None
    group_size: int = 0
    layout: Literal["rows", "panels"] = "rows"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors it is made of."""
        return tuple(t for t in (self.data, self.scales, self.mins) if t is not None)

    @property
    def nbytes(self) -> int:
        """Bytes a product has to read."""
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def _map(self, fn: Callable[[Tensor], Tensor], shape: tuple[int, int]) -> LinearWeight:
        scales = None if self.scales is None else fn(self.scales)
        mins = None if self.mins is None else fn(self.mins)
        return replace(self, shape=shape, data=fn(self.data), scales=scales, mins=mins)

    def rows(self, start: int, stop: int) -> LinearWeight:
        """Rows start:stop as a view. In panel layout both must be multiples of `PANEL_ROWS`."""
        unit = 1 if self.layout == "rows" else PANEL_ROWS
        assert 0 <= start < stop <= self.shape[0], (start, stop, self.shape)
        assert start % unit == 0 and (stop % unit == 0 or stop == self.shape[0]), (start, stop, self.layout)
        first, last = start // unit, -(-stop // unit)
        return self._map(lambda t: t[first:last], (stop - start, self.shape[1]))

    def to(self, device: torch.device | str) -> LinearWeight:
        """A copy on another device."""
        return self._map(lambda t: t.to(device), self.shape)


def concat_rows(weights: Sequence[LinearWeight]) -> LinearWeight:
    """Stack weights of the same format, width and layout "rows" along N (for example q, k and v)."""
    first = weights[0]
    same = all(
        (w.format, w.shape[1], w.group_size, w.layout) == (first.format, first.shape[1], first.group_size, "rows")
        for w in weights
    )
    assert same, [(w.format, w.shape, w.group_size, w.layout) for w in weights]
    rows = sum(w.shape[0] for w in weights)
    scales = [w.scales for w in weights if w.scales is not None]
    mins = [w.mins for w in weights if w.mins is not None]
    return replace(
        first,
        shape=(rows, first.shape[1]),
        data=torch.cat([w.data for w in weights]),
        scales=torch.cat(scales) if scales else None,
        mins=torch.cat(mins) if mins else None,
    )


class QuantFormat(Protocol):
    """One number format: how to make a `LinearWeight` of a matrix and how to get the matrix back."""

    name: str

    def quantize(self, w: Tensor) -> LinearWeight:
        """[N, K] float -> layout "rows"."""
        ...

    def dequantize(self, weight: LinearWeight) -> Tensor:
        """Layout "rows" -> [N, K] float32, exactly what a product with it computes."""
        ...
