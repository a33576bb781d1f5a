"""What the formats share: the check of a matrix before it is stored, and its cut into cache-sized float32 pieces.

The formats themselves (what a scale is, how a value is rounded) are in their own files.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from strata_lab.quant.base import LinearWeight

GROUP_SIZE = 32  # columns that share a scale in int8 and int4 by default: GGUF's block, and it divides 576 and 1536
FLOAT16_MAX = torch.finfo(torch.float16).max
CHUNK_ELEMENTS = 1 << 17  # 512 KB of float32: the temporaries of a chunk stay in the second-level cache
CHUNK_ELEMENTS_GPU = 1 << 25  # 128 MB of float32: few launches, little beside the memory of a card


def check_matrix(w: Tensor, name: str, largest: float) -> None:
    """Raise `ValueError` unless `w` is a non-empty float matrix of finite numbers up to `largest` in magnitude.

    The message names the first offending element in row order.
    """
    if w.ndim != 2 or 0 in w.shape or not w.is_floating_point():
        raise ValueError(f"{name} needs a non-empty 2-D floating-point matrix, got {w.dtype} {tuple(w.shape)}")
    lowest, highest = torch.aminmax(w)  # both NaN if any element is
    if -largest <= lowest.item() and highest.item() <= largest:
        return
    bad = ~(w.abs() <= largest)
    row, column = divmod(int(bad.reshape(-1).to(torch.uint8).argmax()), w.shape[1])
    value = w[row, column].item()
    raise ValueError(
        f"w[{row}, {column}]={value:g} cannot be stored as {name}: every weight must be finite and at most "
        f"{largest:g} in magnitude ({int(bad.sum())} of {w.numel()} are not); fix the checkpoint or use fp32"
    )


def check_readable(weight: LinearWeight, name: str) -> None:
    """Assert that `weight` is in format `name` and layout "rows"."""
    assert (weight.format, weight.layout) == (name, "rows"), (weight.format, weight.layout, name)


def row_chunks(w: Tensor, multiple: int = 1) -> Iterator[slice]:
    """Slices that cover the rows of w [N, K], each small enough for the temporaries of its conversion.

    Every slice but the last has a multiple of `multiple` rows.
    """
    rows, columns = w.shape
    most = (CHUNK_ELEMENTS if w.device.type == "cpu" else CHUNK_ELEMENTS_GPU) // columns
    step = max(1, most // multiple) * multiple
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def grouped(w: Tensor, size: int = GROUP_SIZE) -> Tensor:
    """[n, K] any float -> [n, ceil(K/size), size] float32; a ragged last group repeats its last column.

    Repeating a member changes neither the maximum, the minimum nor the largest magnitude of the group. Size 0 is the
    whole row: [n, 1, K].
    """
    w = w.float()
    size = size or w.shape[1]
    missing = -w.shape[1] % size
    if missing:
        w = torch.cat([w, w[:, -1:].expand(-1, missing)], dim=1)
    return w.reshape(w.shape[0], -1, size)


def group_views(x: Tensor, size: int) -> Iterator[tuple[Tensor, slice]]:
    """Views of x [n, K] as [n, groups, columns] with the groups each holds: the full ones, then a ragged last one.

    Size 0 is the whole row.
    """
    size = size or x.shape[1]
    full = x.shape[1] // size
    if full:
        yield x[:, : full * size].unflatten(1, (full, size)), slice(0, full)
    if full * size < x.shape[1]:
        yield x[:, full * size :].unsqueeze(1), slice(full, full + 1)


def multiply_groups(codes: Tensor, scales: Tensor, size: int) -> Tensor:
    """Multiply float32 codes [n, K], in place, by the float32 scale [n, ceil(K/size)] of their group; returns codes."""
    for view, groups in group_views(codes, size):
        view.mul_(scales[:, groups, None])
    return codes


def divided(x: Tensor, divisor: float) -> Tensor:
    """`x / divisor` rounded as IEEE says. By a plain number CUDA multiplies with the rounded inverse instead."""
    return x / torch.full_like(x, divisor)
