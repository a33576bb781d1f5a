"""A number format seen as a grid: the points it can represent once its scales are chosen.

Rounding each weight to the nearest point is what `QuantFormat.quantize` does. A quantizer that looks at activations
(`rtn.py`, `gptq.py`, `awq.py`) instead chooses scales and codes itself, group by group or column by column, and needs
the steps one at a time: fit scales, find codes, read values back, assemble. The formats implement them; this file has
no arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from strata_lab.quant.base import LinearWeight


@dataclass(frozen=True)
class Grid:
    """Scales of groups, as float32 numbers that the format's stored dtype holds exactly.

    Attributes:
        scale: [n, groups, 1].
        low: value of code 0, [n, groups, 1]; None for formats without minima.
    """

    scale: Tensor
    low: Tensor | None = None

    def column(self, group: int) -> Grid:
        """The grid of one group, [n, 1, 1]."""
        return Grid(self.scale[:, group : group + 1], None if self.low is None else self.low[:, group : group + 1])


class GridFormat(Protocol):
    """A format with scales. Codes are float32 here, whatever they are stored as.

    Attributes:
        name: the format's name.
        granularity: the variant's name, for example "group64-asym".
        group_size: columns that share a scale; 0 is the whole row.
        shared_rows: rows that share a scale: 1, 128 (blocks) or 0 (the whole matrix).
        largest: magnitude beyond which it stores nothing.
        shrinks: what `fit` may usefully be given, 1.0 first.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 - see the class

    @property
    def granularity(self) -> str: ...  # noqa: D102

    @property
    def group_size(self) -> int: ...  # noqa: D102

    @property
    def shared_rows(self) -> int: ...  # noqa: D102

    @property
    def largest(self) -> float: ...  # noqa: D102

    @property
    def shrinks(self) -> tuple[float, ...]: ...  # noqa: D102

    def quantize(self, w: Tensor) -> LinearWeight:
        """[N, K] float -> layout "rows", rounded to nearest."""
        ...

    def dequantize(self, weight: LinearWeight) -> Tensor:
        """Layout "rows" -> [N, K] float32."""
        ...

    def fit(self, x: Tensor, shrink: float = 1.0) -> Grid:
        """Scales that cover x [N, groups, size] float32 (all rows of a matrix), times `shrink`."""
        ...

    def encode(self, x: Tensor, grid: Grid) -> Tensor:
        """Nearest codes of x [n, groups, size], saturated; float32 of the same shape."""
        ...

    def decode(self, codes: Tensor, grid: Grid) -> Tensor:
        """What the codes mean, float32, exactly what `dequantize` says."""
        ...

    def assemble(self, codes: Tensor, grid: Grid) -> LinearWeight:
        """Codes [N, K] and the grid of all their groups as a stored weight."""
        ...
