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
        data: the numbers. Layout "rows": fp32/bf16/fp8/int8 [N, K]; int4 uint8 [N, ceil(K/32) * 16], where byte j of
            each block of 32 columns holds column j in its low and column j + 16 in its high nibble (GGUF's order),
            whatever the group_size; K is padded to a multiple of 32.
            Layout "panels": as `kernels/cpu/packing.py` says; dim 0 counts panels of `PANEL_ROWS` rows.
        scales: None, or one scale per row and group: [N, ceil(K/group_size)] (panels: [N/8, ceil(K/group_size), 8]);
            with group_size 0 one per row: [N, 1]. float16 for int4 and for int8 in groups, float32 for fp8 and for
            int8 by rows. They may be negative.
        mins: the value of code 0 per group, same shape and dtype as scales: w = scale * code + min; or None, which
            means w = scale * code, and for int4 w = scale * (code - 8). Only int4 has them.
        group_size: columns that share a scale; 0 is the whole row. int8: 32 or 0; int4: 32, 64 or 128; fp8: 0, or 128
            for blocks of 128 x 128, whose scale is repeated for their rows.
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
    """Stack weights of the same format, variant, width and layout "rows" along N (for example q, k and v).

    Weights that lie one behind the other in one piece of memory are not copied.
    """
    first = weights[0]
    kinds = [(w.format, w.shape[1], w.group_size, w.mins is None, w.layout) for w in weights]
    assert set(kinds) == {(first.format, first.shape[1], first.group_size, first.mins is None, "rows")}, kinds
    rows = sum(w.shape[0] for w in weights)
    scales = [w.scales for w in weights if w.scales is not None]
    mins = [w.mins for w in weights if w.mins is not None]
    return replace(
        first,
        shape=(rows, first.shape[1]),
        data=_stacked([w.data for w in weights]),
        scales=_stacked(scales) if scales else None,
        mins=_stacked(mins) if mins else None,
    )


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Rows of all parts; a view where they are consecutive rows of one tensor."""
    storage, expected = parts[0].untyped_storage().data_ptr(), parts[0].data_ptr()
    for part in parts:
        if (
            not part.is_contiguous()
            or part.data_ptr() != expected
            or part.untyped_storage().data_ptr() != storage
            or part.device.type == "meta"
        ):
            return torch.cat(list(parts))
        expected += part.numel() * part.element_size()
    return parts[0].as_strided((sum(p.shape[0] for p in parts), parts[0].shape[1]), (parts[0].shape[1], 1))


class QuantFormat(Protocol):
    """One number format: how to make a `LinearWeight` of a matrix and how to get the matrix back."""

    @property
    def name(self) -> str:
        """What `LinearWeight.format` says."""
        ...

    def quantize(self, w: Tensor) -> LinearWeight:
        """[N, K] float -> layout "rows"."""
        ...

    def dequantize(self, weight: LinearWeight) -> Tensor:
        """Layout "rows" -> [N, K] float32, exactly what a product with it computes."""
        ...
