"""A checkpoint with some of its tensors replaced: a quantized model that has not been written to disk."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from strata_lab.models.base import WeightSource
from strata_lab.quant.base import LinearWeight


class Overlay:
    """Reads what was `put` into it, and everything else from `source`, whose other attributes are its own too."""

    def __init__(self, source: WeightSource) -> None:
        self.source, self.config = source, source.config
        self.replaced: dict[str, LinearWeight | Tensor] = {}

    def put(self, name: str, value: LinearWeight | Tensor) -> None:
        """Replace a matrix by a `LinearWeight`, or a plain tensor by a tensor.

        Raises `ValueError` where the shape is not that of the tensor replaced.
        """
        old = (
            self.source.linear(name).shape if isinstance(value, LinearWeight) else tuple(self.source.tensor(name).shape)
        )
        if tuple(value.shape) != tuple(old):
            raise ValueError(f"{name} has shape {tuple(old)}, so {tuple(value.shape)} cannot replace it")
        self.replaced[name] = value

    def linear(self, name: str) -> LinearWeight:
        """A matrix, layout "rows"."""
        value = self.replaced.get(name)
        return value if isinstance(value, LinearWeight) else self.source.linear(name)

    def tensor(self, name: str) -> Tensor:
        """A norm, a bias, a router."""
        value = self.replaced.get(name)
        return value if isinstance(value, Tensor) else self.source.tensor(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)
