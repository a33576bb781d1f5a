"""The widgets of the workbench, and engine facts turned into the plain data they take.

Nothing here decides when to push, and nothing here knows a toggle by name: the controls come from `toggles()`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import ipywidgets

from strata_lab.apply import ApplyReport, FieldResult
from strata_lab.config import toggles_by_topic
from strata_lab.settings import Toggle
from strata_lab.workbench.details import CausesDetail, Detail, Details, HardwareDetail, PoolDetail
from strata_lab.workbench.drafts import DraftsDetail
from strata_lab.workbench.experts import DENSE, ExpertsDetail
from strata_lab.workbench.frontier import QualityDetail
from strata_lab.workbench.ladder import CLAIMS, CLAIMS_NOTE
from strata_lab.workbench.loads import load_data
from strata_lab.workbench.meter import STREAM_FORMULA, TOTAL_FORMULA, Sample
from strata_lab.workbench.names import Names
from strata_widgets import (
    ClimbChart,
    DetailBar,
    EngineHeader,
    LoadPanel,
    PromptBox,
    RateChart,
    TogglePanel,
    TokenStream,
)

DEFAULT_PROMPT = "Explain in a few sentences why the sky is blue."
_NUMBERS = (  # label, unit, line of the chart, formula
    ("per stream", "tok/s", "stream", STREAM_FORMULA),
    ("total", "tok/s", "total", TOTAL_FORMULA),
    ("first token", "ms", "", "Latest request: from sending it to the end of the step that made its first token."),
    ("KV blocks used", "", "", "Blocks in use / in the pool, after the latest step."),
    ("running / waiting", "", "", "Requests that take part in steps / that wait for room."),
)
NUMBERS = [dict(zip(("label", "unit", "line", "tip"), row, strict=True)) for row in _NUMBERS]


class Panels:
    """The widgets and the box that arranges them.

    Args:
        model: the name to show.

    Attributes:
        header, toggles, prompt, loads, climb, chart, stream: always on the page.
        details_bar, details: which panels of details are open.
        causes: the panel that is open at first.
        experts: the panel for mixtures of experts.
        names: of requests, for all panels.
        all: every widget, open or not.
        box: the page.
    """

    def __init__(self, model: str) -> None:
        self.names = Names()
        self.header = EngineHeader(model=model, task="starting")
        self.toggles = TogglePanel(toggles=toggle_data({}, {}))
        self.prompt = PromptBox(prompt=DEFAULT_PROMPT)
        self.loads = LoadPanel(loads=load_data())
        self.climb = ClimbChart(claims=CLAIMS, claims_note=CLAIMS_NOTE)
        self.chart = RateChart(numbers=NUMBERS, values=[None] * len(NUMBERS))
        self.stream = TokenStream()
        self.causes = CausesDetail()
        self.experts = ExpertsDetail()
        details: list[Detail] = [
            self.causes,
            PoolDetail(),
            DraftsDetail(),
            self.experts,
            HardwareDetail(),
            QualityDetail(),
        ]
        self.details_bar = DetailBar()
        self._drawers = {detail.name: _drawer(detail) for detail in details}
        self._open_drawers = ipywidgets.Box()
        self._open_drawers.add_class("strata-details")
        self.details = Details(details, self._show)
        self.offer_experts(None)
        shown = (
            self.header,
            self.toggles,
            self.prompt,
            self.loads,
            self.climb,
            self.chart,
            self.stream,
            self.details_bar,
        )
        self.all = (*shown, *(widget for detail in details for widget in detail.widgets))
        self.box = ipywidgets.Box((*shown, self._open_drawers))
        self.box.add_class("strata-workbench")
        self.details.set_open(self.causes.name, True)

    def offer_experts(self, num_experts: int | None) -> None:
        """Give the experts' panel a button where there are some; None: the model is not known yet."""
        offered = [d for d in self.details.all.values() if num_experts or d is not self.experts]
        self.details_bar.push(
            panels=[{"name": d.name, "title": d.title, "tip": d.tip} for d in offered],
            note=f"{ExpertsDetail.title}: {DENSE[0].lower()}{DENSE[1:]}" if num_experts == 0 else "",
        )
        if num_experts == 0:
            self.experts.say(DENSE)

    def _show(self, details: list[Detail]) -> None:
        self._open_drawers.children = [self._drawers[detail.name] for detail in details]
        self.details_bar.push(shown=[detail.name for detail in details])

    def flush(self) -> None:
        """Send what is waiting, now."""
        for widget in self.all:
            widget.flush()

    def close(self) -> None:
        """Remove the widgets from every page."""
        boxes = (*self._drawers.values(), self._open_drawers, self.box)
        for widget in (*self.all, *(box.layout for box in boxes), *boxes):
            widget.close()


def _drawer(detail: Detail) -> Any:
    box = ipywidgets.Box(detail.widgets)
    box.add_class("strata-drawer")
    box.add_class(f"strata-drawer-{detail.name}")
    return box


def toggle_data(values: Mapping[str, Any], effects: Mapping[str, str]) -> list[dict[str, Any]]:
    """One description per toggle, topic by topic, as `TogglePanel.toggles` takes it.

    Without a value in force the default is shown.
    """
    ordered = itertools.chain.from_iterable(toggles_by_topic().values())
    return [_toggle_data(toggle, values.get(toggle.name, toggle.default), effects) for toggle in ordered]


def _toggle_data(toggle: Toggle, value: Any, effects: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": toggle.name,
        "topic": toggle.topic,
        "doc": toggle.doc,
        "kind": toggle.kind,
        "choices": list(toggle.choices),
        "minimum": toggle.minimum,
        "maximum": toggle.maximum,
        "optional": toggle.optional,
        "cost": toggle.cost,
        "lossless": toggle.lossless,
        "off": toggle.off,
        "default": toggle.default,
        "value": value,
        "effect": effects.get(toggle.name, ""),
    }


def words(value: Any) -> str:
    """A toggle's value as people say it: on, off, auto, int4, 512."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "auto" if value is None else str(value)


def marker_label(changes: Mapping[str, Any]) -> str:
    """The label of a change on the chart; what followed from it is only counted."""
    labels = [f"{name} {words(value)}" for name, value in changes.items()]
    return labels[0] + (f" +{len(labels) - 1}" if len(labels) > 1 else "") if labels else "settings"


def answer_text(result: FieldResult, report: ApplyReport) -> str:
    """What became of a change, in words."""
    if result.status == "refused":
        return f"Refused, still {words(result.value)}: {result.reason}"
    if result.status == "unchanged":
        return f"Already {words(result.value)}. {result.reason}".strip()
    built = f" in {duration(report.build_ms)}" if report.build_ms >= 1 else ""
    text = f"Now {words(result.value)}, {result.status}{built}; the engine stood still for {duration(report.swap_ms)}."
    return f"{text} {result.reason}".strip()


def duration(ms: float) -> str:
    """Under 0.1 ms, 0.2 ms, 35 ms, 1.4 s."""
    if ms < 0.1:
        return "under 0.1 ms"
    if ms >= 1000:
        return f"{ms / 1000:.1f} s"
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"


def byte_size(count: int) -> str:
    """135 MB, 1.2 GB (decimal units)."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def facts(device: str, settings: Mapping[str, Any], stats: Any) -> list[dict[str, str]]:
    """What the header says about a loaded engine."""
    return [
        {"label": "device", "value": device, "tip": "Where the model runs."},
        {
            "label": "weights",
            "value": f"{settings['weight_format']}, {byte_size(stats.weight_bytes)}",
            "tip": "Number format of the linear layers and the bytes of all matrices. Each decode step reads "
            f"{byte_size(stats.bytes_per_step)} of them.",
        },
        {
            "label": "KV cache",
            "value": f"{settings['kv_cache_dtype']}, {byte_size(stats.kv_bytes)}",
            "tip": f"Number format and size of the pool: {stats.kv_blocks_total} blocks, "
            f"{byte_size(stats.kv_bytes_per_token)} per token of context.",
        },
    ]


def values(sample: Sample | None, now: Any, ttft_ms: float | None) -> list[float | str | None]:
    """The values of `NUMBERS`, in their order; None for what is not known now.

    Args:
        sample: speed now, None when nothing is generating.
        now: the latest `StepEvent`, or `EngineStats`: both count blocks and requests.
        ttft_ms: of the latest request.
    """
    return [
        sample.tok_s_per_stream if sample is not None and sample.num_generating else None,
        None if sample is None else sample.output_tok_s,
        ttft_ms,
        f"{now.kv_blocks_used} / {now.kv_blocks_total}",
        f"{now.num_running} / {now.num_waiting}",
    ]
