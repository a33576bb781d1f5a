"""How every chart of the notebooks looks, in the light and in the dark.

A plotly figure holds fixed colours, and a notebook's theme may change after it was drawn. So a figure has no paper of
its own, colours of its marks stand out on white and on dark grey alike (a test measures it), and text and grid follow
the notebook's theme through `stylesheet`, which one cell of a notebook shows. Where that is missing they are grey.
"""

from __future__ import annotations

from typing import Any

BLUE, ORANGE, GREEN, PURPLE, OCHRE, TEAL = "#1f83cc", "#d1661f", "#1f9468", "#a872c9", "#a1831a", "#2191a6"
GREY = "#808080"  # what is shown for comparison only, and text without a stylesheet
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, OCHRE, TEAL)
# One colour per cause of time, as in the workbench (`causes.cause_data` names the keys).
CAUSES = {
    "schedule": GREEN, "weights": BLUE, "kv": TEAL, "compute": ORANGE, "sample": PURPLE, "commit": OCHRE, "host": GREY,
}  # fmt: skip
HEIGHT = 340
GRID = "rgba(128,128,128,0.22)"
LEGEND_BELOW = {"orientation": "h", "y": -0.3, "yanchor": "top", "x": 0, "xanchor": "left"}  # for long titles or names

_TEXT = (
    "xtick > text|ytick > text|x2tick > text|y2tick > text|xtitle|ytitle|x2title|y2title|gtitle|legendtext|"
    "annotation-text|textpoint text|bartext-outside"
)
_CSS = """
{text} {{ fill: var(--jp-ui-font-color1, {grey}) !important; }}
.js-plotly-plot .modebar-btn path {{ fill: var(--jp-ui-font-color2, {grey}) !important; }}
.js-plotly-plot .modebar {{ background: transparent !important; }}
"""


def stylesheet() -> Any:
    """What lets the charts of a notebook follow its theme; a cell shows it once."""
    from IPython.display import HTML

    return HTML(stylesheet_text())


def stylesheet_text() -> str:
    """The same as a `<style>` element, for what a cell shows anyway."""
    places = ", ".join(f".js-plotly-plot .{place}" for place in _TEXT.split("|"))
    return f"<style>{_CSS.format(text=places, grey=GREY)}</style>"


def figure(title: str, x: str = "", y: str = "", *, height: int = HEIGHT, **layout: Any) -> Any:
    """An empty `plotly.graph_objects.Figure` of the house.

    Args:
        title: what the picture says, a short sentence.
        x, y: of the axes, with units.
        height: pixels.
        **layout: of plotly, beside or in place of the house's.
    """
    import plotly.graph_objects as go

    made = go.Figure()
    made.update_layout(**layout_of(title, height) | layout)
    for axis, text in ((made.update_xaxes, x), (made.update_yaxes, y)):
        axis(title=text or None, gridcolor=GRID, zerolinecolor=GRID, automargin=True)
    return made


def layout_of(title: str, height: int = HEIGHT) -> dict[str, Any]:
    """The layout alone, for figures that are made otherwise (subplots)."""
    return {
        "template": "none",
        "title": {"text": title, "x": 0, "xref": "paper", "y": 1, "yref": "container", "yanchor": "top",
                  "pad": {"t": 10}, "font": {"size": 15}},
        "colorway": COLOURS,
        "font": {"color": GREY, "size": 13, "family": "system-ui, sans-serif"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "height": height,
        "margin": {"l": 60, "r": 24, "t": 74, "b": 52},
        "hoverlabel": {"align": "left"},
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0, "xanchor": "left", "traceorder": "normal"},
    }  # fmt: skip
