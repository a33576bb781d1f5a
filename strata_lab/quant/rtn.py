"""Round to nearest, the method that every other one has to beat.

Plain: scales cover the largest weight of a group and each weight takes the nearest code. Nothing can be tuned and no
input is needed, so this is what loading a model in a format does.

With clipping: covering the largest weight makes the steps between codes as wide as they can be, for the sake of one
number. A slightly smaller scale cuts that number off and serves its 31 or 127 neighbours better. So every group tries
the shrink factors of its format and keeps the one with the smallest sum of h_k (w_k - q_k)^2, where h_k is the mean
square of the k-th input: an error matters as much as what it is multiplied with. Columns are treated as independent,
which they are not; `gptq.py` does better there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strata_lab.quant.base import LinearWeight
from strata_lab.quant.grid import Grid, GridFormat
from strata_lab.quant.groups import check_matrix, grouped, row_chunks
from strata_lab.quant.stats import InputStats


def quantize(w: Tensor, stats: InputStats | None, format: GridFormat, *, clip: bool = False) -> LinearWeight:
    """[N, K] float -> the nearest codes; with `clip`, on scales searched for.

    Args:
        w: the matrix.
        stats: of its inputs; None counts every column alike. Only `clip` looks at it.
        format: what to store.
        clip: search scales. Formats whose rows share scales, and fp8, have nothing to gain and ignore it.

    Raises:
        ValueError: numbers the format cannot store, statistics of another width.
    """
    check_inputs(w, stats, format)
    if not clip or len(format.shrinks) == 1 or format.shared_rows != 1:
        return format.quantize(w)
    n, k = w.shape
    importance = grouped_importance(stats, k, w.device, format)
    codes = torch.empty(n, k, device=w.device)
    grids = []
    for rows in row_chunks(w):
        x = grouped(w[rows], format.group_size)
        grid = best_grid(x, importance, format)
        codes[rows] = format.encode(x, grid).flatten(1)[:, :k]
        grids.append(grid)
    return format.assemble(codes, join(grids))


def check_inputs(w: Tensor, stats: InputStats | None, format: GridFormat) -> None:
    """`ValueError` unless `format` can store w and `stats` are of inputs that fit it."""
    check_matrix(w, format.name, format.largest)
    if stats is not None and stats.columns != w.shape[1]:
        raise ValueError(
            f"statistics of {stats.columns} columns do not belong to a matrix of {w.shape[1]}; "
            "give those of its own inputs"
        )


def grouped_importance(stats: InputStats | None, columns: int, device: torch.device, format: GridFormat) -> Tensor:
    """Weight of an error in each column, [groups, size]; 0 where a ragged last group is padded.

    Columns that no input has used count a little (a millionth of the mean), so that they are rounded well too.
    """
    h = torch.ones(columns, device=device) if stats is None else stats.mean_square.to(device)
    mean = h.mean()
    h = torch.ones_like(h) if mean == 0 else h.clamp(min=1e-6 * mean.item())
    size = format.group_size or columns
    return torch.nn.functional.pad(h, (0, -columns % size)).reshape(-1, size)


def best_grid(x: Tensor, importance: Tensor, format: GridFormat) -> Grid:
    """The scales of x [n, groups, size] with the least weighted error among those of `format.shrinks`."""
    best, least = format.fit(x), None
    for shrink in format.shrinks:
        grid = format.fit(x, shrink)
        error = (format.decode(format.encode(x, grid), grid) - x).square_().mul_(importance).sum(dim=-1, keepdim=True)
        if least is None:
            least = error
            continue
        better = error < least
        low = None if grid.low is None or best.low is None else torch.where(better, grid.low, best.low)
        best, least = Grid(torch.where(better, grid.scale, best.scale), low), torch.minimum(error, least)
    return best


def join(grids: list[Grid], dim: int = 0) -> Grid:
    """Grids of consecutive rows (dim 0) or groups (dim 1) as one."""
    lows = [grid.low for grid in grids if grid.low is not None]
    return Grid(torch.cat([grid.scale for grid in grids], dim), torch.cat(lows, dim) if lows else None)
