"""Plotly figures about number formats; the numbers come from `quant/survey.py` and the engine, none is made up here."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from strata_lab.quant.survey import Rounded

BINS = 120
WIDTH = 4.0  # standard deviations that a histogram shows to each side
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#000000")  # of variants, in the order given
_LAYOUT = {
    "template": "plotly_white",
    "colorway": _COLOURS,
    "height": 360,
    "margin": {"l": 60, "r": 20, "t": 50, "b": 50},
}


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

    figure = make_subplots(rows=1, cols=2, subplot_titles=("the weights", "what rounding adds"))
    values = matrix.float().flatten().numpy()
    span = WIDTH * float(values.std())
    counts, edges = np.histogram(values, bins=BINS, range=(-span, span))
    figure.add_bar(x=(edges[1:] + edges[:-1]) / 2, y=counts, name="weights", marker_color="#888", row=1, col=1)
    for one, colour in zip(made, itertools.cycle(_COLOURS), strict=False):
        error = one.error.flatten().numpy()
        counts, edges = np.histogram(error, bins=BINS, range=(-span / 8, span / 8))
        name = f"{one.variant} ({one.relative:.1%})"
        figure.add_scatter(
            x=(edges[1:] + edges[:-1]) / 2, y=counts, name=name, mode="lines", line_color=colour, row=1, col=2
        )
    figure.update_yaxes(type="log", title="how many")
    return figure.update_layout(**_LAYOUT)


def error_by_size(errors: Mapping[str, Sequence[float]]) -> Any:
    """Error of the smallest weights, the next smallest and so on (`survey.error_by_size`), a line per variant."""
    import plotly.graph_objects as go

    figure = go.Figure(layout=_LAYOUT)
    for variant, parts in errors.items():
        shares = [(i + 0.5) / len(parts) for i in range(len(parts))]
        figure.add_scatter(x=shares, y=list(parts), name=variant, mode="lines+markers")
    figure.update_yaxes(type="log", tickformat=".2%", dtick="D2", title="relative error")
    figure.update_xaxes(tickformat=".0%", title="weights, from the smallest to the largest")
    return figure.update_layout(title="Where the error sits")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    """Rows of text as a table that a notebook shows."""
    from IPython.display import Markdown

    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return Markdown("\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines))


def error_by_layer(errors: Mapping[str, Mapping[int, float]]) -> Any:
    """Relative error of the matrices against the layer, a line per variant."""
    import plotly.graph_objects as go

    figure = go.Figure(layout=_LAYOUT)
    for variant, by_layer in errors.items():
        figure.add_scatter(x=list(by_layer), y=list(by_layer.values()), name=variant, mode="lines+markers")
    figure.update_yaxes(type="log", tickformat=".1%", dtick="D2", title="relative error")
    return figure.update_xaxes(title="layer").update_layout(title="Rounding error by layer")


def pareto(points: Sequence[Point]) -> Any:
    """Quality against speed; the size of a point is the memory of its weights. Better is right and down."""
    import plotly.graph_objects as go

    largest = max(p.gigabytes for p in points)
    figure = go.Figure(layout=_LAYOUT)
    figure.add_scatter(
        x=[p.tok_s for p in points], y=[p.mean_kl for p in points], text=[p.label for p in points],
        mode="markers+text", textposition="top center",
        marker={"size": [14 + 30 * p.gigabytes / largest for p in points], "opacity": 0.6},
        customdata=[f"{p.gigabytes:.3f} GB" for p in points],
        hovertemplate="%{text}: %{x:.1f} tok/s, KL %{y:.4f}, %{customdata}<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title="tok/s, one stream, measured here").update_yaxes(title="mean KL to the source, nats")
    return figure.update_layout(title="What a format costs and what it brings")


def frontier(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in speed and quality both, fastest last."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.tok_s, p.mean_kl)):
        if not best or point.mean_kl < best[-1].mean_kl:
            best.append(point)
    return best[::-1]
