"""What a quantizer knows of a matrix's inputs: their second moments, and nothing that grows with the number of tokens.

The output of y = x @ w.T changes by d = x @ (w - q).T when w is stored as q, and summed over all inputs

    sum |d|^2 = trace((w - q) G (w - q).T)   with the Gram matrix G = X.T @ X, [K, K].

So G is all that is needed to know what any rounding costs on the calibration text. Memory: 4 K^2 bytes (float32),
9.4 MB for K = 1536 and 379 MB for K = 9728; float64 twice that. Adding T rows costs 2 T K^2 operations.
"""

from __future__ import annotations

import torch
from torch import Tensor


class InputStats:
    """Accumulates inputs of one matrix.

    Attributes:
        gram: X.T @ X, [K, K].
        abs_sum: sum of |x|, [K] float64.
        count: rows seen.
    """

    def __init__(self, columns: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        if columns < 1 or dtype not in (torch.float32, torch.float64):
            raise ValueError(f"columns={columns} must be positive, dtype={dtype} float32 or float64; try 576, float32")
        self.gram = torch.zeros(columns, columns, dtype=dtype, device=device)
        self.abs_sum = torch.zeros(columns, dtype=torch.float64, device=device)
        self.count = 0

    @property
    def columns(self) -> int:
        """K."""
        return self.gram.shape[0]

    @property
    def mean_abs(self) -> Tensor:
        """Mean |x| of every column, [K] float32; zeros before any row."""
        return (self.abs_sum / max(1, self.count)).float()

    @property
    def mean_square(self) -> Tensor:
        """Mean x^2 of every column, [K] float32: the weight of an error in that column when columns are independent."""
        return (self.gram.diagonal() / max(1, self.count)).float()

    def add(self, x: Tensor) -> None:
        """Count the rows of x [T, K], any float dtype; T may be 0.

        Raises `ValueError` for another width or for numbers that are not finite (nothing is counted then).
        """
        if x.ndim != 2 or x.shape[1] != self.columns:
            raise ValueError(f"inputs of shape {tuple(x.shape)} do not fit; give [T, {self.columns}], one row a token")
        x = x.to(self.gram)
        if not x.isfinite().all():
            row, column = (~x.isfinite()).nonzero()[0].tolist()
            raise ValueError(
                f"x[{row}, {column}]={x[row, column]:g}: calibration inputs must be finite; "
                "the model or the format of an earlier layer overflowed"
            )
        self.gram.addmm_(x.T, x)
        self.abs_sum += x.abs().sum(dim=0, dtype=torch.float64)
        self.count += x.shape[0]

    def scaled(self, scale: Tensor) -> InputStats:
        """The statistics of x / scale, scale [K] positive."""
        inverse = scale.to(self.gram).reciprocal()
        other = InputStats(1, self.gram.dtype, self.gram.device)
        other.gram = self.gram * inverse[:, None] * inverse
        other.abs_sum = self.abs_sum * inverse
        other.count = self.count
        return other

    def output_error(self, difference: Tensor) -> float:
        """Mean over the inputs of |x @ difference.T|^2, difference [N, K]: what that change of the matrix costs."""
        d = difference.to(self.gram)
        return ((d @ self.gram) * d).sum(dtype=torch.float64).item() / max(1, self.count)
