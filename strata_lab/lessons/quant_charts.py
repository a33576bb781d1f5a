"""Plotly figures about number formats; the numbers come from `quant/survey.py` and the engine, none is made up here."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from strata_lab.lessons.theme import COLOURS, GREY, GRID, HEIGHT, figure, layout_of
from strata_lab.quant.survey import Rounded

BINS = 120
WIDTH = 4.0  # standard deviations that a histogram shows to each side


@dataclass(frozen=True)
class Point:
    """One way to run a model.

    Attributes:
        label: its name.
        tok_s: measured decode tokens per second of one stream.
        mean_kl: nats to the source, 0 for the source itself.
        gigabytes: of its weights.
    """

    label: str
    tok_s: float
    mean_kl: float
    gigabytes: float


def weight_histogram(matrix: Tensor, made: Sequence[Rounded]) -> Any:
    """How the numbers of a matrix are spread, and how far each variant moves them: two charts beside each other."""
    from plotly.subplots import make_subplots

    both = make_subplots(rows=1, cols=2, subplot_titles=("the weights", "what rounding adds"))
    both.update_layout(**layout_of("", HEIGHT))
    values = matrix.float().flatten().numpy()
    span = WIDTH * float(values.std())
    curves = [("weights", values, span, GREY, 1)]
    for one, colour in zip(made, itertools.cycle(COLOURS), strict=False):
        curves.append((f"{one.variant} ({one.relative:.1%})", one.error.flatten().numpy(), span / 8, colour, 2))
    for name, numbers, width, colour, column in curves:
        counts, edges = np.histogram(numbers, bins=BINS, range=(-width, width))
        both.add_scatter(
            x=(edges[1:] + edges[:-1]) / 2, y=counts, name=name, mode="lines", line_color=colour, row=1, col=column,
            hovertemplate=f"{name}: %{{y}} weights near %{{x:.4f}}<br>{BINS} bins of the shown range<extra></extra>",
        )  # fmt: skip
    both.update_xaxes(gridcolor=GRID).update_yaxes(type="log", gridcolor=GRID, title="how many")
    return both.update_layout(legend={"y": 1.12})


def _error_lines(title: str, x: str, errors: Mapping[str, Mapping[Any, float]], formula: str) -> Any:
    made = figure(title, x=x, y="relative error")
    for variant, by_x in errors.items():
        made.add_scatter(
            x=list(by_x), y=list(by_x.values()), name=variant, mode="lines+markers",
            hovertemplate=f"{variant}: %{{y:.3%}}<br>{formula}<extra></extra>",
        )  # fmt: skip
    return made.update_yaxes(type="log", tickformat=".2%", dtick="D2")


def error_by_size(errors: Mapping[str, Sequence[float]]) -> Any:
    """Error of the smallest weights, the next smallest and so on (`survey.error_by_size`), a line per variant."""
    shares = {v: {(i + 0.5) / len(parts): part for i, part in enumerate(parts)} for v, parts in errors.items()}
    formula = "root mean square of the change in this tenth / root mean square of all weights"
    made = _error_lines("Where the error sits", "weights, from the smallest to the largest", shares, formula)
    return made.update_xaxes(tickformat=".0%")


def error_by_layer(errors: Mapping[str, Mapping[int, float]]) -> Any:
    """Relative error of the matrices against the layer, a line per variant."""
    formula = "root mean square of the change / that of the weights, mean of four matrices"
    return _error_lines("Rounding error by layer", "layer", errors, formula)


def pareto(points: Sequence[Point]) -> Any:
    """Quality against speed; the size of a point is the memory of its weights. Better is right and down."""
    largest = max(p.gigabytes for p in points)
    made = figure(
        "What a format costs and what it brings", "tok/s, one stream, measured here", "mean KL to the source, nats"
    )
    made.add_scatter(
        x=[p.tok_s for p in points], y=[p.mean_kl for p in points], text=[p.label for p in points],
        mode="markers+text", textposition="top center", cliponaxis=False,
        marker={"size": [14 + 30 * p.gigabytes / largest for p in points], "opacity": 0.6},
        customdata=[f"{p.gigabytes:.3f} GB" for p in points],
        hovertemplate="%{text}: %{x:.1f} tok/s, KL %{y:.4f}, %{customdata}<extra></extra>",
    )  # fmt: skip
    return made


def frontier(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in speed and quality both, fastest last."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.tok_s, p.mean_kl)):
        if not best or point.mean_kl < best[-1].mean_kl:
            best.append(point)
    return best[::-1]
