"""What number formats do to a model, as numbers to plot: error of the weights, quality of the text, bytes, speed.

A variant is written "int8" or, with what shares a scale, "int4/group64".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from strata_lab.models.base import WeightSource
from strata_lab.models.checkpoint import is_linear
from strata_lab.quant import convert, engine_granularity, get_format, get_grid_format, head_format, variant_of
from strata_lab.quant.base import LinearWeight
from strata_lab.quant.calibrate import quantize_model
from strata_lab.quant.forward import sequence_logits
from strata_lab.quant.overlay import Overlay
from strata_lab.quant.quality import Comparison, Logits, compare

WARM_TOKENS = 16  # before a speed is measured
MOST_TOKENS = 224  # that are generated to measure one; more would need a wider table captured meanwhile, on a GPU
MATRICES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


@dataclass(frozen=True)
class Rounded:
    """A matrix in a variant.

    Attributes:
        variant: its name.
        weight: as stored.
        error: what rounding changed, [N, K].
        relative: root mean square of the error over that of the matrix; 0 for a matrix of zeros.
    """

    variant: str
    weight: LinearWeight
    error: Tensor
    relative: float

    @property
    def bits(self) -> float:
        """Bits that a weight takes, its share of the scales counted."""
        return 8 * self.weight.nbytes / self.error.numel()


def rounded(matrix: Tensor, variant: str) -> Rounded:
    """Round a float matrix [N, K] to nearest in a variant; `ConfigError` for an unknown one."""
    name, _, granularity = variant.partition("/")
    target = get_format(name, granularity or None)
    weight = target.quantize(matrix)
    error = get_format(name).dequantize(weight) - matrix.float()
    size = _rms(matrix.float())
    return Rounded(variant, weight, error, _rms(error) / size if size else 0.0)


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def matrix_of(source: WeightSource, name: str) -> Tensor:
    """A matrix of a checkpoint as float32 [N, K]."""
    weight = source.linear(name)
    return get_format(weight.format).dequantize(weight)


def stored_formats(source: WeightSource, names: Sequence[str]) -> dict[str, int]:
    """How many matrices are stored in which variant, most frequent first."""
    found: dict[str, int] = {}
    for name in names:
        if is_linear(name):
            weight = source.linear(name)
            label = "/".join(filter(None, (weight.format, variant_of(weight))))
            found[label] = found.get(label, 0) + 1
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def error_by_size(matrix: Tensor, made: Rounded, parts: int = 10) -> list[float]:
    """Error of the smallest 1/`parts` of the weights, of the next smallest, and so on; over the size of the matrix.

    Each is a root mean square over that of the whole matrix, so that they can be compared with `relative`.
    """
    order = matrix.flatten().abs().argsort()
    error = made.error.flatten()[order]
    return [_rms(part) / _rms(matrix.float()) for part in error.tensor_split(parts)]


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


def as_engine_holds(source: WeightSource, names: Sequence[str], weight_format: str, device_type: str) -> Overlay:
    """The checkpoint as an engine with that `weight_format` holds it: embedding and head too, what fits unchanged."""
    overlay, granularity = Overlay(source), engine_granularity(weight_format, device_type)
    for name in names:
        if is_linear(name):
            layer, stored = name.startswith("model.layers."), source.linear(name)
            target = weight_format if layer else head_format(weight_format)
            fixed = granularity if layer and stored.format != weight_format else None
            overlay.put(name, convert(stored, target, fixed))
    return overlay


def calibrated(
    source: WeightSource, sequences: Sequence[Sequence[int]], variant: str, layers: int, method: str = "gptq",
    device: torch.device | str = "cpu",
) -> Overlay:  # fmt: skip
    """The checkpoint with its first `layers` layers quantized by a method that looks at what `sequences` put in."""
    name, _, granularity = variant.partition("/")
    overlay, first = Overlay(source), Overlay(source)
    first.config = replace(source.config, num_layers=layers)  # nothing is computed for layers that are not kept
    for one in quantize_model(first, sequences, get_grid_format(name, granularity or None), method, device=device):
        overlay.put(one.name, one.value.to("cpu"))
    return overlay


def distance(source: WeightSource, changed: WeightSource, names: Sequence[str]) -> float:
    """How far the matrices `names` moved: root mean square of the change over that of the weights."""
    before = [matrix_of(source, name) for name in names]
    moved = [matrix_of(changed, name) - matrix for name, matrix in zip(names, before, strict=True)]
    squares = [sum(float(m.square().sum(dtype=torch.float64)) for m in group) for group in (moved, before)]
    return (squares[0] / squares[1]) ** 0.5


def remembered(logits: Logits, sequences: Sequence[Sequence[int]]) -> Logits:
    """The same function, computed once for each of `sequences` and unable to answer for others; 4 V bytes a token."""
    known = {tuple(sequence): logits(sequence) for sequence in sequences}
    return lambda sequence: known[tuple(sequence)]


def decode_tok_s(engine: Any, seconds: float, prompt: str = "Once upon a time") -> float:
    """Tokens per second of one greedy stream, after a short one to warm up; generates for about `seconds`."""
    from strata_lab.sampling_params import SamplingParams

    tokens, best = WARM_TOKENS, 0.0
    for _ in range(2):
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        best = 1000 / engine.generate(prompt, params)[0].tpot_ms
        tokens = min(max(int(seconds * best), WARM_TOKENS), MOST_TOKENS)
    return float(best)


def layer_matrices(names: Sequence[str]) -> list[str]:
    """Of a checkpoint's names those of the layers' matrices: what formats are for; embedding and head stay."""
    return [name for name in names if is_linear(name) and name.startswith("model.layers.")]


@torch.no_grad()
def quality(source: WeightSource, changed: WeightSource, sequences: Sequence[Sequence[int]]) -> Comparison:
    """A changed model beside its source on the same tokens."""
    return compare(sequence_logits(source), sequence_logits(changed), sequences)
