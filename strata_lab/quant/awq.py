"""AWQ: give the columns with large inputs finer steps, by scaling the matrix up there and its inputs down.

x @ w.T = (x / s) @ (w * s).T for any positive s [K]. Nothing changes until w * s is rounded: then a column with s_k > 1
is rounded in steps that are 1 / s_k as wide in terms of w, as long as it does not widen the scale of its group. So the
few columns with large inputs are protected at the expense of the others (Lin et al. 2023, "AWQ"). The scales are
s = (mean |x|)^a, and a is searched on a grid by the error of the output.

The division of x must cost nothing at run time, so it is folded into what produces x:

* a norm weight: `fold_norm` rounds norm / s to bfloat16, which every engine can hold, and returns as the scale what
  that rounding made of it. The matrix is then multiplied by *this* scale in float32, so the two cancel again and the
  only rounding left is float32's.
* the matrix before, where nothing nonlinear stands between (up before down, v before the attention's output): its rows
  are divided in float32, before it is quantized itself.

Scales of powers of two would make any fold exact, and give up a third of the gain in output error (measured on random
matrices with correlated inputs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from strata_lab.quant import get_format, rtn
from strata_lab.quant.base import LinearWeight
from strata_lab.quant.grid import GridFormat
from strata_lab.quant.stats import InputStats

STEPS = 20  # exponents tried: 0, 0.05, ... 0.95
LARGEST_SCALE = 2.0**8  # a column is never scaled further than this from the others' middle

Inner = Callable[[Tensor, InputStats, GridFormat], LinearWeight]


@dataclass(frozen=True)
class Folded:
    """A quantized matrix of scaled inputs.

    Attributes:
        weight: of w * scale, so x / scale must come in.
        scale: [K] float32, positive.
    """

    weight: LinearWeight
    scale: Tensor


def clipped(w: Tensor, stats: InputStats, format: GridFormat) -> LinearWeight:
    """What rounds the scaled matrix by default: to nearest, on scales searched for."""
    return rtn.quantize(w, stats, format, clip=True)


def quantize(
    w: Tensor, stats: InputStats, format: GridFormat, *, scale: Tensor | None = None, inner: Inner = clipped
) -> Folded:
    """[N, K] float -> the matrix for scaled inputs, with the scale to fold.

    Args:
        w: the matrix. Matrices that share an input share its scale: stack their rows, or give them the same `scale`.
        stats: of its inputs, unscaled.
        format: what to store.
        scale: [K]; None searches for it.
        inner: rounds the scaled matrix, given the statistics of the scaled inputs.

    Raises:
        ValueError: numbers the format cannot store, statistics of another width.
    """
    rtn.check_inputs(w, stats, format)
    if scale is None:
        scale = search(w, stats, format)
    return Folded(inner(w.float() * scale, stats.scaled(scale), format), scale)


def search(
    w: Tensor, stats: InputStats, format: GridFormat, *, tied: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """The scale [K] float32 with which rounding w * scale to nearest changes the output least.

    `tied` is applied to mean |x| first and may make columns alike that have to share a scale. All ones where nothing is
    better, or where no input has been seen.
    """
    rtn.check_inputs(w, stats, format)
    w = w.float()
    size = stats.mean_abs.to(w.device)
    if tied is not None:
        size = tied(size)
    best, least = torch.ones_like(size), None
    if not size.any():
        return best
    for step in range(STEPS):
        scale = _power(size, step / STEPS)
        stored = rtn.quantize(w * scale, None, format)
        error = stats.output_error(get_format(format.name).dequantize(stored).div_(scale).sub_(w))
        if least is None or error < least:
            best, least = scale, error
    return best


def fold_norm(norm: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(norm / scale in bfloat16, the scale that this is exact for), both [K]; the first in the dtype of norm.

    Multiply the matrix by the returned scale, not by the given one.
    """
    exact = norm.float()
    folded = (exact / scale).to(torch.bfloat16).float()
    lost = (folded == 0) | ~folded.isfinite()  # a norm weight of zero, or one at the end of the exponents' range
    folded = torch.where(lost, exact, folded)
    return folded.to(norm.dtype), torch.where(lost, 1.0, exact / folded)


def fold_rows(matrix: Tensor, scale: Tensor) -> Tensor:
    """A matrix [K, M] (or a bias [K]) in front with its outputs divided by scale, float32."""
    return matrix.float() / scale.view(-1, *[1] * (matrix.ndim - 1))


def _power(size: Tensor, exponent: float) -> Tensor:
    """size^exponent around a middle of 1; columns without inputs keep that of the median."""
    used = size > 0
    logs = torch.where(used, size, size[used].median()).log2() * exponent
    middle = (logs.max() + logs.min()) / 2
    bound = torch.tensor(LARGEST_SCALE).log2().item()
    return torch.exp2((logs - middle).clamp(-bound, bound))
