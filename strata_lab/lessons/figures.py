"""Charts that several notebooks use. They show measured numbers, with units, and on hover how one was computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strata_lab.events import StepEvent
from strata_lab.lessons.measuring import Compared
from strata_lab.lessons.theme import BLUE, CAUSES, COLOURS, GREY, ORANGE, figure
from strata_lab.workbench.causes import Ceiling, cause_data

BAR_HEIGHT, FRAME_HEIGHT = 56, 154  # pixels of a horizontal chart: per bar, and around them


def compared(found: Compared, title: str, formula: str) -> Any:
    """A bar per setting (its best round), and a point per round, so that the spread can be seen."""
    labels = list(found.rounds)
    made = figure(title, y=found.unit)
    best = [found.best(label) for label in labels]
    made.add_bar(
        x=labels, y=best, text=[f"{value:.1f}" for value in best], textposition="inside", insidetextanchor="middle",
        name="best round", marker_color=COLOURS[: len(labels)] * (len(labels) <= len(COLOURS)) or BLUE,
        hovertemplate=f"%{{x}}: %{{y:.2f}} {found.unit}, best of its rounds<br>{formula}<extra></extra>",
    )  # fmt: skip
    points = [(label, value) for label in labels for value in found.rounds[label]]
    made.add_scatter(
        x=[p[0] for p in points], y=[p[1] for p in points], mode="markers", name="every round",
        marker={"color": GREY, "size": 8, "symbol": "line-ew-open", "line": {"width": 2}},
        hovertemplate=f"%{{x}}: %{{y:.2f}} {found.unit}, one round<extra></extra>",
    )  # fmt: skip
    return made.update_layout(showlegend=False)


def causes(by_label: Mapping[str, Mapping[str, float]], ceiling: Ceiling, title: str) -> Any:
    """Where the milliseconds of a step go: a bar per setting, cut by cause (`measuring.causes_ms`)."""
    made = figure(title, x="ms per step", height=FRAME_HEIGHT + BAR_HEIGHT * len(by_label))
    for row in cause_data(ceiling):
        values = [parts.get(row["key"], 0.0) for parts in by_label.values()]
        made.add_bar(
            y=list(by_label), x=values, name=row["label"], orientation="h", marker_color=CAUSES[row["key"]],
            hovertemplate=f"%{{y}}: {row['label']} %{{x:.3f}} ms<br>{row['tip']}<extra></extra>",
        )  # fmt: skip
    made.update_yaxes(autorange="reversed")
    return made.update_layout(barmode="stack", margin={"t": 96})


def steps(seen: Sequence[StepEvent], title: str) -> Any:
    """The engine's steps against time: as wide as they took, as high too, coloured by what they computed.

    Raises:
        ValueError: there are no steps.
    """
    if not seen:
        raise ValueError("seen=[] must hold a step at least; generate inside `with Trace(engine) as seen:`")
    start_s = seen[0].t_s - seen[0].duration_ms / 1e3
    made = figure(title, x="ms since the first step began", y="ms that the step took")
    kinds = (
        ("prefill", ORANGE, lambda s: s.num_prefill_tokens > 0),
        ("decode", BLUE, lambda s: not s.num_prefill_tokens),
    )
    for name, colour, belongs in kinds:
        chosen = [s for s in seen if belongs(s)]
        middles = [(s.t_s - start_s) * 1e3 - s.duration_ms / 2 for s in chosen]
        told = [(s.step, s.num_prefill_tokens, s.num_decode_tokens, s.bytes_moved / 1e6) for s in chosen]
        made.add_bar(
            x=middles, y=[s.duration_ms for s in chosen], width=[s.duration_ms * 0.92 for s in chosen], name=name,
            marker={"color": colour, "line": {"width": 0}}, customdata=told,
            hovertemplate="step %{customdata[0]}: %{y:.2f} ms (StepEvent.duration_ms)<br>%{customdata[1]} tokens of a "
            "prompt, %{customdata[2]} decoded<br>%{customdata[3]:.1f} MB to read (bytes_moved)<extra></extra>",
        )  # fmt: skip
    return made


def against(
    title: str, x: str, y: str, measured: Mapping[float, float], predicted: Mapping[float, float], formula: str
) -> Any:
    """Measured points over a predicted line; the keys are x, the values y; `formula` is the prediction's."""
    made = figure(title, x=x, y=y)
    made.add_scatter(
        x=list(predicted), y=list(predicted.values()), mode="lines", name="predicted",
        line={"color": GREY, "dash": "dash", "width": 2},
        hovertemplate=f"predicted at %{{x}}: %{{y:.2f}}<br>{formula}<extra></extra>",
    )  # fmt: skip
    made.add_scatter(
        x=list(measured), y=list(measured.values()), mode="lines+markers", name="measured here",
        line={"color": BLUE}, marker={"size": 9}, hovertemplate="measured at %{x}: %{y:.2f}<extra></extra>",
    )  # fmt: skip
    return made


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    """Rows of text as a table that a notebook shows."""
    from IPython.display import Markdown

    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return Markdown("\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines))
