"""Notebook widgets of strata_lab: plain data in, messages out.

They exist so that a notebook can show a running engine; they know nothing of engines, models or tensors and import
neither torch nor strata_lab. One widget is one folder: `__init__.py` holds the traits (its whole interface), `view.js`
draws them, `style.css` is scoped to it. `strata_lab.workbench` binds them to an engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strata_widgets.engine_header import EngineHeader
    from strata_widgets.prompt_box import PromptBox
    from strata_widgets.rate_chart import RateChart
    from strata_widgets.toggle_panel import TogglePanel
    from strata_widgets.token_stream import TokenStream

WIDGETS = {
    "EngineHeader": "strata_widgets.engine_header",
    "TogglePanel": "strata_widgets.toggle_panel",
    "PromptBox": "strata_widgets.prompt_box",
    "RateChart": "strata_widgets.rate_chart",
    "TokenStream": "strata_widgets.token_stream",
}

__all__ = ["WIDGETS", "EngineHeader", "PromptBox", "RateChart", "TogglePanel", "TokenStream"]


def __getattr__(name: str) -> type:
    """Load a widget class on first use."""
    if name not in WIDGETS:
        raise AttributeError(f"strata_widgets has no {name!r}; it has {', '.join(WIDGETS)}")
    widget: type = getattr(import_module(WIDGETS[name]), name)
    return widget
