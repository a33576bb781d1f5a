"""What number formats do to a model, as numbers to plot: error of the weights, quality of the text, bytes.

A variant is written "int8" or, with what shares a scale, "int4/group64".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strata_lab.models.base import WeightSource
from strata_lab.models.checkpoint import is_linear
from strata_lab.quant import get_format
from strata_lab.quant.base import LinearWeight
from strata_lab.quant.forward import sequence_logits
from strata_lab.quant.overlay import Overlay
from strata_lab.quant.quality import Comparison, compare

MATRICES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


@dataclass(frozen=True)
class Rounded:
    """A matrix in a variant.

    Attributes:
        variant: its name.
        weight: as stored.
        error: what rounding changed, [N, K].
        relative: root mean square of the error over that of the matrix.
    """

    variant: str
    weight: LinearWeight
    error: Tensor
    relative: float


def rounded(matrix: Tensor, variant: str) -> Rounded:
    """Round a float matrix [N, K] to nearest in a variant; `ConfigError` for an unknown one."""
    name, _, granularity = variant.partition("/")
    target = get_format(name, granularity or None)
    weight = target.quantize(matrix)
    error = get_format(name).dequantize(weight) - matrix.float()
    relative = float(error.square().mean().sqrt() / matrix.float().square().mean().sqrt())
    return Rounded(variant, weight, error, relative)


def matrix_of(source: WeightSource, name: str) -> Tensor:
    """A matrix of a checkpoint as float32 [N, K]."""
    weight = source.linear(name)
    return get_format(weight.format).dequantize(weight)


def errors_by_layer(
    source: WeightSource, variants: Sequence[str], layers: Sequence[int] | None = None
) -> dict[str, dict[int, float]]:
    """Variant to layer to the mean relative error of four of its matrices (of a mixture: of its first expert).

    `layers`: which; None is all.
    """
    found: dict[str, dict[int, float]] = {variant: {} for variant in variants}
    expert = ".experts.0." if source.config.num_experts else "."
    for index in range(source.config.num_layers) if layers is None else layers:
        names = [f"model.layers.{index}.{m}.weight".replace("mlp.", f"mlp{expert}") for m in MATRICES]
        matrices = [matrix_of(source, name) for name in names]
        for variant in variants:
            found[variant][index] = sum(rounded(m, variant).relative for m in matrices) / len(matrices)
    return found


def in_variant(source: WeightSource, names: Sequence[str], variant: str) -> Overlay:
    """The checkpoint with the matrices `names` rounded to nearest."""
    overlay = Overlay(source)
    for name in names:
        if is_linear(name):
            overlay.put(name, rounded(matrix_of(source, name), variant).weight)
    return overlay


def layer_matrices(names: Sequence[str]) -> list[str]:
    """Of a checkpoint's names those of the layers' matrices: what formats are for; embedding and head stay."""
    return [name for name in names if is_linear(name) and name.startswith("model.layers.")]


@torch.no_grad()
def quality(source: WeightSource, changed: WeightSource, sequences: Sequence[Sequence[int]]) -> Comparison:
    """A changed model beside its source on the same tokens."""
    return compare(sequence_logits(source), sequence_logits(changed), sequences)
