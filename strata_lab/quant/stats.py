"""What a quantizer knows of a matrix's inputs: their second moments, and nothing that grows with the number of tokens.

The output of y = x @ w.T changes by d = x @ (w - q).T when w is stored as q, and summed over all inputs

    sum |d|^2 = trace((w - q) G (w - q).T)   with the Gram matrix G = X.T @ X, [K, K].

So G is all that is needed to know what any rounding costs on the calibration text. Memory: 4 K^2 bytes (float32),
9.4 MB for K = 1536 and 379 MB for K = 9728; float64 twice that. Adding T rows costs 2 T K^2 operations.

In a model whose earlier layers are quantized, x is not what the original model would have put in, say z. With
C = (Z - X).T @ X kept as well (as much memory and time again), the matrix that comes closest to the original outputs
z @ w.T from the inputs x is known too, before any rounding: `corrected`.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT64_COLUMNS = 4096  # up to here systems of equations are solved in float64: 134 MB a matrix


class InputStats:
    """Accumulates inputs of one matrix.

    Attributes:
        gram: X.T @ X, [K, K].
        drift: (Z - X).T @ X, [K, K], where the original model's inputs Z were given too; else None.
        abs_sum: sum of |x|, [K] float64.
        count: rows seen.
    """

    def __init__(self, columns: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        if columns < 1 or dtype not in (torch.float32, torch.float64):
            raise ValueError(f"columns={columns} must be positive, dtype={dtype} float32 or float64; try 576, float32")
        self.gram = torch.zeros(columns, columns, dtype=dtype, device=device)
        self.drift: Tensor | None = None
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

    def add(self, x: Tensor, original: Tensor | None = None, importance: Tensor | None = None) -> None:
        """Count the rows of x [T, K], any float dtype; T may be 0.

        Args:
            x: the inputs.
            original: what they are in the original model, [T, K].
            importance: how much a change of each row's output matters relative to others, [T]; the rows count as if
                they were that much larger.

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
        weight = 1.0 if importance is None else importance.to(x)[:, None]
        drift = None if original is None else (original.to(x) - x) * weight
        x = x * weight
        self.gram.addmm_(x.T, x)
        if drift is not None:
            self.drift = torch.zeros_like(self.gram) if self.drift is None else self.drift
            self.drift.addmm_(drift.T, x)
        self.abs_sum += x.abs().sum(dim=0, dtype=torch.float64)
        self.count += x.shape[0]

    def scaled(self, scale: Tensor) -> InputStats:
        """The statistics of x / scale, scale [K] positive."""
        inverse = scale.to(self.gram).reciprocal()
        other = InputStats(1, self.gram.dtype, self.gram.device)
        other.gram = self.gram * inverse[:, None] * inverse
        other.drift = None if self.drift is None else self.drift * inverse[:, None] * inverse
        other.abs_sum = self.abs_sum * inverse
        other.count = self.count
        return other

    def corrected(self, w: Tensor, damping: float) -> Tensor:
        """The matrix [N, K] with which the inputs come closest to the original outputs; w itself without `drift`.

        Minimizes |X v.T - Z w.T|^2 + d |v - w|^2 over v, d being `damping` times the mean diagonal of G: directions in
        which few inputs point stay as they are.
        """
        if self.drift is None or not self.gram.any():
            return w
        g = self.gram.double() if self.columns <= FLOAT64_COLUMNS else self.gram.clone()
        g.diagonal().add_(damping * g.diagonal().mean())
        change = torch.linalg.solve(g, (w.to(g) @ self.drift.to(g)).T).T
        return w + change.to(w)

    def output_error(self, difference: Tensor) -> float:
        """Mean over the inputs of |x @ difference.T|^2, difference [N, K]: what that change of the matrix costs."""
        d = difference.to(self.gram)
        return ((d @ self.gram) * d).sum(dtype=torch.float64).item() / max(1, self.count)
