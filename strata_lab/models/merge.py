"""Makes weights that a kernel reads as one matrix (q, k and v; gate and up) the same variant of one format.

A file may keep some projections more precise than others, or give only some of them minima or smaller groups. 4-bit
groups are split and given minima without changing a value; everything else goes through `convert`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from strata_lab.quant import convert, get_format
from strata_lab.quant.base import LinearWeight


def alike(weights: Sequence[LinearWeight], weight_format: str) -> list[LinearWeight]:
    """The weights (layout "rows") in one variant, ready for `concat_rows`; unchanged where they share one already.

    Raises `ValueError` for numbers that `weight_format` cannot store.
    """
    if len({_variant(w) for w in weights}) == 1:
        return list(weights)
    if {w.format for w in weights} == {"int4"}:
        split = _split_groups(weights)
        if split is not None:
            return split
    made = [convert(w, weight_format) for w in weights]
    if len({_variant(w) for w in made}) == 1:
        return made
    target = get_format(weight_format)  # the same format in several variants: the default one for all
    return [target.quantize(get_format(w.format).dequantize(w)) for w in made]


def _variant(weight: LinearWeight) -> tuple[str, int, bool]:
    return weight.format, weight.group_size, weight.mins is None


def _split_groups(weights: Sequence[LinearWeight]) -> list[LinearWeight] | None:
    """int4 weights in groups of the smallest size, with minima if one has them; None where those overflow float16."""
    size, any_mins = min(w.group_size for w in weights), any(w.mins is not None for w in weights)
    made = []
    for w in weights:
        assert w.scales is not None
        scales, mins = w.scales, w.mins
        if mins is None and any_mins:
            mins = scales * -8  # exact unless it overflows
            if bool(torch.isinf(mins).any()):
                return None
        times, groups = w.group_size // size, -(-w.shape[1] // size)
        parts = [
            None if t is None else t.repeat_interleave(times, dim=1)[:, :groups].contiguous() for t in (scales, mins)
        ]
        made.append(replace(w, scales=parts[0], mins=parts[1], group_size=size))
    return made
