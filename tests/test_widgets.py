"""Widgets: strict traits, coalesced pushes, and views that use exactly the traits that exist."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import strata_widgets
from strata_widgets import (
    BatchLanes,
    BlockMap,
    ClimbChart,
    DetailBar,
    DraftLanes,
    EngineHeader,
    ExpertMap,
    HardwareStrip,
    LoadPanel,
    PromptBox,
    QualityChart,
    RateChart,
    RooflineGauge,
    StepTimeline,
    TogglePanel,
    TokenStream,
)
from strata_widgets._base import FLUSHES_PER_S, StrataWidget, load_style, load_view
from strata_widgets.rate_chart import pack_samples

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = sorted(p.parent for p in (ROOT / "widgets" / "strata_widgets").glob("*/view.js"))
ALL = [getattr(strata_widgets, name) for name in strata_widgets.WIDGETS]
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")

TOGGLE = {
    "name": "cuda_graph", "doc": "d", "kind": "bool", "choices": [], "minimum": None, "maximum": None,
    "optional": False, "cost": "live", "lossless": True, "off": False, "default": True, "value": True, "effect": "e",
}  # fmt: skip
CHOICE = {**TOGGLE, "name": "weight_format", "kind": "choice", "choices": ["bf16", "int4"], "value": "bf16"}
NUMBER = {**TOGGLE, "name": "max_num_seqs", "kind": "int", "value": 16, "cost": "rebuild"}
TIP = {"label": "l", "value": "v", "unit": "u", "tip": "t"}
LANE = {"title": "Stream", "prompt": "", "state": "done", "note": "", "num_tokens": 1, "rate": None,
        "color": 0, "phase": "", "accepted": None}  # fmt: skip
FILLED = {
    EngineHeader: {"facts": [{"label": "device", "value": "cpu", "tip": "t"}], "notes": ["n"]},
    TogglePanel: {"toggles": [TOGGLE, CHOICE, NUMBER], "enabled": True},
    PromptBox: {"enabled": True},
    RateChart: {"numbers": [{"label": "total", "unit": "tok/s", "line": "total", "tip": "t"}], "values": [1.0]},
    TokenStream: {"lanes": [{**LANE, "id": "a"}, {**LANE, "id": "b"}]},
    LoadPanel: {"loads": [{**TIP, "name": "A"}]},
    ClimbChart: {
        "stages": [{"label": "s", "low": 1, "median": 2, "high": 3, "before": None, "baseline": None, "kept": True}],
        "claims": [{"label": "start", "detail": "start", "value": 58}],
    },
    StepTimeline: {"causes": [{**TIP, "key": "weights"}]},
    RooflineGauge: {"numbers": [TIP], "values": [1.0], "share": 0.5},
    DetailBar: {"panels": [{"name": "n", "title": "N", "tip": "t"}], "shown": ["n"]},
    BlockMap: {"owners": [{"title": "a", "color": 0}], "kinds": [{**TIP, "key": "own", "count": 1}]},
    BatchLanes: {"totals": [TIP]},
    DraftLanes: {"numbers": [TIP], "lanes": [{"id": "a", "title": "a", "color": 0, "rounds": []}]},
    ExpertMap: {"numbers": [TIP], "num_layers": 1, "num_experts": 2, "top_k": 1},
    HardwareStrip: {"readings": [{**TIP, "tone": ""}]},
    QualityChart: {"points": [{"label": "int8", "x": 1.0, "y": 0.1, "best": True, "tip": "t"}]},
}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, dict[str, Any], Any]]:
    """Everything any widget sends: time, message, buffers."""
    messages: list[tuple[float, dict[str, Any], Any]] = []

    def record(_self: Any, message: dict[str, Any], buffers: Any = None) -> None:
        messages.append((time.monotonic(), message, buffers))

    monkeypatch.setattr(StrataWidget, "_send", record)
    return messages


def synced(cls: type[StrataWidget]) -> set[str]:
    base = set(StrataWidget.class_trait_names(sync=True))
    return {name for name in cls.class_trait_names(sync=True) if name not in base}


def view_report(cls: type[StrataWidget]) -> dict[str, Any]:
    folder = next(f for f in FOLDERS if cls.__module__.endswith(f.name))
    widget = cls(**FILLED[cls])
    state = {name: getattr(widget, name) for name in synced(cls)}
    text = json.dumps(state, default=lambda _bytes: "__bytes__")
    script = ROOT / "widgets" / "js_tests" / "report_names.js"
    assert NODE
    command = [NODE, str(script), str(folder / "view.js"), text]
    report: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return report


# -- the contract between a class and its view ------------------------------------------------------------------------


@needs_node
@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
def test_a_view_reads_and_follows_exactly_the_traits_of_its_class(cls: type[StrataWidget]) -> None:
    report = view_report(cls)
    assert set(report["read"]) == synced(cls)
    followed = {event.removeprefix("change:") for event in report["heard"] if event.startswith("change:")}
    assert followed == synced(cls)


@needs_node
@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
def test_notebook_shortcuts_are_off_in_every_control(cls: type[StrataWidget]) -> None:
    assert view_report(cls)["loud"] == []


@needs_node
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_what_a_page_receives_is_one_valid_module(folder: Path, tmp_path: Path) -> None:
    module = tmp_path / "view.mjs"
    module.write_text(load_view(folder))
    assert not re.search(r"^import ", module.read_text(), re.MULTILINE)
    assert NODE
    checked = subprocess.run([NODE, "--check", str(module)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_views_need_no_network_and_never_parse_text_as_html(folder: Path) -> None:
    text = load_view(folder) + load_style(folder)
    assert not re.search(r"https?://|@import|url\(", text)
    assert not re.search(r"\.(innerHTML|outerHTML|insertAdjacentHTML)|document\.write|\beval\(", text)


def test_every_folder_is_exported() -> None:
    assert {f"strata_widgets.{folder.name}" for folder in FOLDERS} == set(strata_widgets.WIDGETS.values())
    with pytest.raises(AttributeError, match="it has EngineHeader"):
        _ = strata_widgets.TogglePannel


# -- the base class ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
def test_unknown_keywords_are_refused_with_the_nearest_name(cls: type[StrataWidget]) -> None:
    name = sorted(synced(cls))[0]
    with pytest.raises(ValueError, match=f"did you mean '{name}'"):
        cls(**{f"{name}x": 1})
    with pytest.raises(ValueError, match="known are"):
        cls(_esm="x")


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
def test_the_repr_is_the_same_in_every_run(cls: type[StrataWidget]) -> None:
    assert repr(cls()) == f"{cls.__name__}()"


def test_a_flood_becomes_few_messages_and_the_last_value_arrives(sent: list[Any]) -> None:
    stream = TokenStream()
    sent.clear()
    started = time.monotonic()
    count = 0
    while time.monotonic() < started + 1.0:
        count += 1
        stream.push({"append": [count]}, lanes=[{"id": "a", "num_tokens": count}])
    time.sleep(2 / FLUSHES_PER_S)
    assert count > 1000
    assert len(sent) <= 20 * (time.monotonic() - started) + 2
    states = [message["state"] for _, message, _ in sent if message["method"] == "update"]
    assert states[-1]["lanes"] == [{"id": "a", "num_tokens": count}]
    records = [r["append"][0] for _, m, _ in sent if m["method"] == "custom" for r in m["content"]["records"]]
    assert records == list(range(1, count + 1))


def test_pushes_from_several_threads_lose_nothing(sent: list[Any]) -> None:
    chart = RateChart()
    sent.clear()

    def push(first: int) -> None:
        for i in range(first, first + 200):
            chart.push({"i": i}, [bytes([i % 256])])

    threads = [threading.Thread(target=push, args=(1000 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    chart.flush()
    records = [r["i"] for _, m, _ in sent for r in m["content"]["records"]]
    assert sorted(records) == sorted(1000 * k + i for k in range(4) for i in range(200))
    assert all(len(m["content"]["buffers"]) == len(buffers) for _, m, buffers in sent)


def test_equal_state_is_not_sent_again(sent: list[Any]) -> None:
    header = EngineHeader()
    sent.clear()
    for _ in range(5):
        header.push(state="ready", task="")
        header.flush()
    assert len(sent) == 1


def test_closing_sends_what_was_waiting(sent: list[Any]) -> None:
    header = EngineHeader()
    header.push(model="first")
    header.push(model="second")
    header.close()
    assert sent[-1][1]["state"] == {"model": "second"}
    header.push(model="third")  # late pushes of other threads are harmless
    header.flush()


# -- single widgets ---------------------------------------------------------------------------------------------------


def test_samples_are_packed_as_little_endian_doubles() -> None:
    packed = pack_samples([(1.5, 240.0, 60.0, 4), (1.6, 0.0, math.nan, 0)])
    values = struct.unpack("<8d", packed)
    assert values[:6] == (1.5, 240.0, 60.0, 4.0, 1.6, 0.0)
    assert math.isnan(values[6])


def test_only_well_formed_messages_reach_a_handler() -> None:
    panel, box = TogglePanel(), PromptBox()
    asked: list[Any] = []
    panel.on_change_asked(lambda name, value: asked.append((name, value)))
    box.on_generate(lambda fields: asked.append(fields))
    box.on_stop(lambda: asked.append("stop"))
    for widget in (panel, box):
        for content in (None, "set", {}, {"kind": "set"}, {"kind": "set", "name": 3}, {"kind": "other"}):
            widget._handle_custom_msg(content, [])
    assert asked == []
    panel._handle_custom_msg({"kind": "set", "name": "cuda_graph", "value": False}, [])
    box._handle_custom_msg({"kind": "generate", "fields": {"prompt": "Hi"}}, [])
    box._handle_custom_msg({"kind": "stop"}, [])
    assert asked == [("cuda_graph", False), {"prompt": "Hi"}, "stop"]
