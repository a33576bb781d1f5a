"""The layout that the CPU kernels read: panels of eight output rows, interleaved.

A 256-bit register loaded from a panel holds the next bytes of eight rows, so every product is added in the lane of its
own row and no sum across lanes is ever needed. Packing only permutes bytes (and pads with zeros): unpacking gives back
the same bits. It computes nothing, and copies nothing that is packed already. A variant of a format that the kernels do
not read is rewritten first (`packing_variants.py`).

With P = ceil(N / 8) panels and S steps of columns, data is [P, S, elements of a step]. In a step each row in turn
contributes `lane` adjacent bytes:

| format | columns a step | lane bytes | data | scales, mins |
|---|---|---|---|---|
| fp32 | 1 | 4 | float32 [P, S, 8] | |
| bf16 | 2 | 4 | bfloat16 [P, S, 16] | |
| fp8 | 4 | 1 | float8_e4m3fn [P, S, 32] | float32 [P, 1, 8]; in blocks of 128 columns [P, ceil(K/128), 8] |
| int8 | 32 | 4 | int8 [P, S, 256], top bit flipped: byte = code + 128 | float16 [P, S, 8]; by rows float32 [P, 1, 8] |
| int4 | 32 | 4 | uint8 [P, S, 128], byte of columns c and c + 16 as in layout "rows" | float16 [P, S, 8], both |
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from strata_lab.kernels.cpu import build
from strata_lab.kernels.cpu.packing_variants import readable
from strata_lab.quant.base import PANEL_ROWS, LinearWeight


@dataclass(frozen=True)
class PanelFormat:
    """How one format lies in a panel.

    Attributes:
        step: columns a kernel reads at a time; K is padded to a multiple.
        step_bytes: bytes of one row in a step.
        lane_bytes: bytes of one row that stay adjacent.
        group_sizes: how many columns may share a scale; 0 is the whole row.
    """

    step: int
    step_bytes: int
    lane_bytes: int
    group_sizes: tuple[int, ...] = (0,)


PANEL_FORMATS = {
    "fp32": PanelFormat(1, 4, 4),
    "bf16": PanelFormat(2, 4, 4),
    "fp8": PanelFormat(4, 4, 1, (0, 128)),
    "int8": PanelFormat(32, 32, 4, (32, 0)),
    "int4": PanelFormat(32, 16, 4, (32,)),
}
_INT8_TOP_BIT = 0x80


def pack(weight: LinearWeight) -> LinearWeight:
    """The same numbers in layout "panels" (the weight itself if it is in that layout).

    Raises:
        ValueError: a format or group size that the kernels do not read.
        build.CpuKernelsUnavailable: no kernels on this machine, so nothing could read the result.
    """
    if weight.layout == "panels":
        return weight
    form = PANEL_FORMATS.get(weight.format)
    if form is None:
        raise ValueError(f"format={weight.format!r} has no panel layout; convert to one of {', '.join(PANEL_FORMATS)}")
    weight = readable(weight)
    form = PANEL_FORMATS[weight.format]
    if weight.group_size not in form.group_sizes:
        raise ValueError(
            f"group_size={weight.group_size} of {weight.format} has no kernel; requantize with {form.group_sizes[0]}"
        )
    build.load()
    rows = weight.data.contiguous().view(torch.uint8)  # [N, row bytes]
    panels = _interleave(rows, form.lane_bytes, form.step_bytes)
    if weight.format == "int8":
        panels ^= _INT8_TOP_BIT
    data = panels.view(weight.data.dtype).view(panels.shape[0], -(-weight.shape[1] // form.step), -1)
    scales, mins = (None if t is None else _interleave(t, 1, 1) for t in (weight.scales, weight.mins))
    return replace(weight, data=data, scales=scales, mins=mins, layout="panels")


def unpack(weight: LinearWeight) -> LinearWeight:
    """The same weight in layout "rows", bit for bit what was packed (after `readable`)."""
    if weight.layout == "rows":
        return weight
    n, k = weight.shape
    form = PANEL_FORMATS[weight.format]
    panels = weight.data.view(torch.uint8)
    if weight.format == "int8":
        panels = panels ^ _INT8_TOP_BIT
    used = panels.shape[1] * form.step_bytes if weight.format == "int4" else k * form.step_bytes // form.step
    rows = _deinterleave(panels, form.lane_bytes)[:n, :used].contiguous()
    scales, mins = (None if t is None else _deinterleave(t, 1)[:n] for t in (weight.scales, weight.mins))
    return replace(weight, data=rows.view(weight.data.dtype), scales=scales, mins=mins, layout="rows")


def _interleave(rows: Tensor, lane: int, multiple: int) -> Tensor:
    """[N, B] -> [P, padded B / lane, 8 * lane], B padded to `multiple`."""
    n, width = rows.shape
    padded = rows.new_zeros(-(-n // PANEL_ROWS) * PANEL_ROWS, -(-width // multiple) * multiple)
    padded[:n, :width] = rows
    return padded.view(-1, PANEL_ROWS, padded.shape[1] // lane, lane).transpose(1, 2).flatten(2).contiguous()


def _deinterleave(panels: Tensor, lane: int) -> Tensor:
    """[P, ..., 8 * lane or a multiple] -> [8 P, B]."""
    split = panels.flatten(1).view(panels.shape[0], -1, PANEL_ROWS, lane)
    return split.transpose(1, 2).reshape(panels.shape[0] * PANEL_ROWS, -1)
