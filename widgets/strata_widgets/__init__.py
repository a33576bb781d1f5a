"""Notebook widgets of strata_lab: plain data in, messages out.

They exist so that a notebook can show a running engine; they know nothing of engines, models or tensors and import
neither torch nor strata_lab. One widget is one folder: `__init__.py` holds the traits (its whole interface), `view.js`
draws them, `style.css` is scoped to it. `strata_lab.workbench` binds them to an engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strata_widgets.batch_lanes import BatchLanes
    from strata_widgets.block_map import BlockMap
    from strata_widgets.climb_chart import ClimbChart
    from strata_widgets.detail_bar import DetailBar
    from strata_widgets.draft_lanes import DraftLanes
    from strata_widgets.engine_header import EngineHeader
    from strata_widgets.expert_map import ExpertMap
    from strata_widgets.hardware_strip import HardwareStrip
    from strata_widgets.load_panel import LoadPanel
    from strata_widgets.prompt_box import PromptBox
    from strata_widgets.quality_chart import QualityChart
    from strata_widgets.rate_chart import RateChart
    from strata_widgets.roofline_gauge import RooflineGauge
    from strata_widgets.step_timeline import StepTimeline
    from strata_widgets.toggle_panel import TogglePanel
    from strata_widgets.token_stream import TokenStream

WIDGETS = {
    "EngineHeader": "strata_widgets.engine_header",
    "TogglePanel": "strata_widgets.toggle_panel",
    "PromptBox": "strata_widgets.prompt_box",
    "LoadPanel": "strata_widgets.load_panel",
    "RateChart": "strata_widgets.rate_chart",
    "ClimbChart": "strata_widgets.climb_chart",
    "TokenStream": "strata_widgets.token_stream",
    "StepTimeline": "strata_widgets.step_timeline",
    "RooflineGauge": "strata_widgets.roofline_gauge",
    "DetailBar": "strata_widgets.detail_bar",
    "BlockMap": "strata_widgets.block_map",
    "BatchLanes": "strata_widgets.batch_lanes",
    "DraftLanes": "strata_widgets.draft_lanes",
    "ExpertMap": "strata_widgets.expert_map",
    "HardwareStrip": "strata_widgets.hardware_strip",
    "QualityChart": "strata_widgets.quality_chart",
}

__all__ = [
    "WIDGETS",
    "BatchLanes",
    "BlockMap",
    "ClimbChart",
    "DetailBar",
    "DraftLanes",
    "EngineHeader",
    "ExpertMap",
    "HardwareStrip",
    "LoadPanel",
    "PromptBox",
    "QualityChart",
    "RateChart",
    "RooflineGauge",
    "StepTimeline",
    "TogglePanel",
    "TokenStream",
]


def __getattr__(name: str) -> type:
    """Load a widget class on first use."""
    if name not in WIDGETS:
        raise AttributeError(f"strata_widgets has no {name!r}; it has {', '.join(WIDGETS)}")
    widget: type = getattr(import_module(WIDGETS[name]), name)
    return widget
