"""GPTQ: round one column at a time, and let the columns not yet rounded make up for the error.

Rounding column k of w moves every output by e * x_k, e = w_k - q_k. Inputs are correlated, so part of that can be
predicted from the other columns' inputs and taken back by changing their weights, which are still free. With
H = X.T X, the change of the remaining columns that minimizes the output error is, for U the upper Cholesky factor of
the inverse of H (Frantar et al. 2022, "GPTQ", after the optimal brain surgeon of Hassibi and Stork 1993),

    w_j -= (w_k - q_k) / U_kk * U_kj     for all j > k.

Rows do not interact, so all N of them advance together: K steps of vector work, and the far columns are updated once
per `BLOCK` columns by a matrix product.

Choices, all of them of detail:

* Damping: H gets `damping` of its mean diagonal added to the diagonal, ten times more as long as it is not positive
  definite (fewer inputs than columns, columns that are copies of each other). A column that no input has used gets a 1,
  has nothing to do with the others, and is rounded to nearest.
* Order: with `act_order` the columns with the largest inputs come first, while many others can still make up for their
  errors. Groups stay the contiguous ones of the format, so their scales must be known before their first column comes:
  they are fitted to the original weights. Otherwise columns come from left to right and a group's scales are
  fitted to its weights as they are when it is reached.
* `clip` fits scales by the search of `rtn.py` instead of covering the largest weight.
* Sweeps: once all columns have a code, each is chosen again, given all the others. With e = w - q the output error as a
  function of q_k alone is smallest at q_k + (H e)_k / H_kk; the code nearest to that is the best one, so an error never
  grows (coordinate descent). It costs as much as the first pass and takes off about another twentieth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strata_lab.quant.base import LinearWeight
from strata_lab.quant.grid import Grid, GridFormat
from strata_lab.quant.groups import grouped
from strata_lab.quant.rtn import best_grid, check_inputs, grouped_importance, join
from strata_lab.quant.stats import InputStats

BLOCK = 128  # columns between two updates of all that follow; every group size divides it
FLOAT64_COLUMNS = 4096  # up to here the factors are computed in float64: 134 MB each
ATTEMPTS = 8  # at damping; the last one multiplies it by 10^7, where H is a multiple of the identity


def quantize(
    w: Tensor,
    stats: InputStats,
    format: GridFormat,
    *,
    damping: float = 0.01,
    sweeps: int = 2,
    act_order: bool = True,
    clip: bool = True,
) -> LinearWeight:
    """[N, K] float -> codes that keep x @ w.T on inputs like those of `stats`.

    Args:
        w: the matrix; it is not changed.
        stats: of its inputs. With no rows at all the result is that of `rtn.quantize`.
        format: what to store, any with scales.
        damping: share of the mean diagonal added to H, positive.
        act_order: columns with large inputs first.
        clip: search scales.
        sweeps: how often to go over all columns again; 0 is GPTQ as published.

    Raises:
        ValueError: numbers the format cannot store, statistics of another width, a damping that is not positive.
    """
    check_inputs(w, stats, format)
    if not damping > 0:
        raise ValueError(f"damping={damping} must be positive; try 0.01")
    k = w.shape[1]
    order = torch.argsort(stats.gram.diagonal(), descending=True, stable=True) if act_order else None
    upper = _inverse_factor(stats, damping, order).to(w.device)
    work = w.float().T.contiguous()  # [K, N]: a column of w is a row here
    scales = _Scales(work, stats, format, clip)
    if order is not None:
        order = order.to(w.device)
        scales.fit_all(work)
        work = work[order]
    columns = list(range(k)) if order is None else order.tolist()
    codes = torch.empty_like(work)
    for start in range(0, k, BLOCK):
        stop = min(start + BLOCK, k)
        errors = _round_block(work[start:stop], upper[start:stop, start:stop], columns[start:stop], scales, codes)
        work[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1)
    if sweeps and stats.count:
        h = stats.gram.to(device=w.device, dtype=torch.float32, copy=True)
        h.diagonal().add_(damping * h.diagonal().mean())
        _sweep(w.float().T.contiguous(), h, columns * sweeps, scales, codes)
    return format.assemble(codes.T.contiguous(), scales.grid())


def _sweep(w: Tensor, h: Tensor, columns: list[int], scales: _Scales, codes: Tensor) -> None:
    """Choose the codes [K, N] of the columns again, one after the other; w is [K, N] too."""
    format = scales.format
    q = torch.stack([format.decode(codes[k][:, None, None], scales.of(k, w)).flatten() for k in range(len(w))])
    pull = h @ (w - q)  # how much less output error a small step of q is worth, [K, N]
    diagonal = h.diagonal().tolist()
    for k in columns:
        grid = scales.of(k, w)
        code = format.encode((q[k] + pull[k] / diagonal[k])[:, None, None], grid)
        step = format.decode(code, grid).flatten() - q[k]
        pull.addr_(h[:, k], step, alpha=-1)
        q[k] += step
        codes[k] = code.flatten()


def _round_block(work: Tensor, upper: Tensor, columns: list[int], scales: _Scales, codes: Tensor) -> Tensor:
    """Round the rows of work [m, N], which are `columns` of the matrix; their errors over the diagonal, [m, N]."""
    errors = torch.empty_like(work)
    diagonal = upper.diagonal().tolist()
    for i, column in enumerate(columns):
        grid = scales.of(column, work[i:])
        x = work[i][:, None, None]
        code = scales.format.encode(x, grid)
        errors[i] = (x - scales.format.decode(code, grid)).flatten() / diagonal[i]
        codes[column] = code.flatten()
        work[i + 1 :].addr_(upper[i, i + 1 :], errors[i], alpha=-1)
    return errors


class _Scales:
    """The grids of a matrix's groups: all fitted at once, or each when its first column is asked for."""

    def __init__(self, work: Tensor, stats: InputStats, format: GridFormat, clip: bool) -> None:
        self.format, self.columns = format, work.shape[0]
        self.size = format.group_size or self.columns
        self.grids: list[Grid] = []
        searched = clip and len(format.shrinks) > 1 and format.shared_rows == 1
        self.importance = grouped_importance(stats, self.columns, work.device, format) if searched else None
        if format.group_size == 0:  # the row is its own group, and must be seen whole
            self.fit_all(work)

    def fit_all(self, work: Tensor) -> None:
        """Fit every group to work [K, N]."""
        groups = -(-self.columns // self.size)
        self.grids = [self._fit(work[g * self.size : (g + 1) * self.size], g) for g in range(groups)]

    def of(self, column: int, rest: Tensor) -> Grid:
        """The grid of a column, [N, 1, 1]; `rest` holds it and what follows it in its block, up to date."""
        group = column // self.size
        if group == len(self.grids):
            self.grids.append(self._fit(rest[: self.size], group))
        return self.grids[group]

    def grid(self) -> Grid:
        """All groups."""
        return join(self.grids, dim=1)

    def _fit(self, columns: Tensor, group: int) -> Grid:
        x = grouped(columns.T, self.format.group_size)
        if self.importance is None:
            return self.format.fit(x)
        return best_grid(x, self.importance[group : group + 1], self.format)


def _inverse_factor(stats: InputStats, damping: float, order: Tensor | None) -> Tensor:
    """Upper Cholesky factor of the inverse of damped H, columns in the given order, [K, K] float32."""
    h = stats.gram.to(torch.float64 if stats.columns <= FLOAT64_COLUMNS else torch.float32, copy=True)
    diagonal = h.diagonal()
    diagonal[diagonal == 0] = 1
    if stats.count == 0:
        return h.float()
    if order is not None:
        h = h[order][:, order]
        diagonal = h.diagonal()
    step = damping * diagonal.mean()
    for attempt in range(ATTEMPTS):
        diagonal += step * (10.0**attempt - (10.0 ** (attempt - 1) if attempt else 0.0))
        lower, failed = torch.linalg.cholesky_ex(h)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                return upper.float()
    raise ValueError(f"the inputs' {stats.columns} x {stats.columns} Gram matrix cannot be inverted; give more inputs")
