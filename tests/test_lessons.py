"""What the notebooks call: exercises never give their solution away, comparisons are fair, charts can be read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest

from strata_lab.events import StepEvent
from strata_lab.lessons import drafting, figures, gallery, suite, theme
from strata_lab.lessons.checks import choice, number
from strata_lab.lessons.measuring import Compared, Trace, causes_ms, in_turn
from strata_lab.workbench.causes import Ceiling

LIGHT, DARK = "#ffffff", "#212121"  # --jp-layout-color1 of JupyterLab's two themes
CONTRAST = 3.0  # what WCAG asks of marks


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def step(i: int, *, prefill: int = 0, decode: int = 1, ms: float = 10.0) -> StepEvent:
    return StepEvent(
        step=i, t_s=(i + 1) * ms / 1e3, duration_ms=ms, schedule_ms=1.0, forward_ms=7.0, sample_ms=1.0, commit_ms=0.5,
        num_prefill_tokens=prefill, num_decode_tokens=decode, num_running=1, num_waiting=0, num_preempted=0,
        kv_blocks_used=1, kv_blocks_total=8, bytes_moved=40_000_000, tokens=(), kv_bytes_moved=10_000_000,
    )  # fmt: skip


# -- exercises --------------------------------------------------------------------------------------------------------


def ask(answer: Any) -> Any:
    return number(answer, 12.5, because="as it is", hint="Divide.", traps=((125.0, "Bits, not bytes."),))


def test_an_exercise_without_an_answer_asks_for_one() -> None:
    assert ask(None).right is None and "None" in ask(None).text


@pytest.mark.parametrize(("answer", "right"), [(12.5, True), (13.7, True), (11.3, True), (14.0, False), (-12.5, False)])
def test_a_number_is_right_within_its_tolerance(answer: float, right: bool) -> None:
    assert ask(answer).right is right


def test_a_wrong_number_gets_the_direction_or_the_trap_it_fell_into() -> None:
    assert ask(1.0).text == "That is too little. Divide."
    assert ask(99.0).text == "That is too much. Divide."
    assert ask(125).text == "Bits, not bytes."
    assert "not a number" in ask("12.5").text and ask("12.5").right is False


def test_a_choice_is_right_wrong_with_its_hint_or_not_among_the_words() -> None:
    def pick(answer: Any) -> Any:
        return choice(answer, "reading", because="yes", hints={"computing": "Count."})

    assert [pick(a).right for a in (None, "reading", "computing", "red")] == [None, True, False, False]
    assert pick("computing").text == "Count."
    assert '"computing"' in pick("red").text and '"reading"' in pick("red").text


# -- measuring --------------------------------------------------------------------------------------------------------


def test_settings_are_measured_in_turn_and_back_so_that_drift_meets_all_alike() -> None:
    order: list[str] = []
    values: Iterator[float] = iter(range(1, 7))
    found = in_turn({n: lambda n=n: order.append(n) for n in "ABC"}, lambda: next(values), rounds=2)
    assert "".join(order) == "ABCCBA"
    assert {n: sum(v) for n, v in found.rounds.items()} == {"A": 7, "B": 7, "C": 7}


def test_the_best_round_counts_and_a_missing_effect_names_its_figures() -> None:
    found = Compared("ms", {"slow": [20.0, 35.0], "fast": [10.0, 99.0]})
    assert found.require_faster("fast", "slow", by=1.5) == 2.0
    with pytest.raises(AssertionError, match=r"'slow' should be more than 1\.00 times.*35\.00.*run this cell again"):
        found.require_faster("slow", "fast")


def test_the_causes_of_a_step_add_up_to_it() -> None:
    parts = causes_ms([step(0), step(1, ms=12.0)], Ceiling(20e9))
    assert math.isclose(sum(parts.values()), 11.0)
    assert math.isclose(parts["weights"], 30e6 / 20e9 * 1e3) and math.isclose(parts["kv"], 10e6 / 20e9 * 1e3)
    with pytest.raises(ValueError, match="must hold a step"):
        causes_ms([], Ceiling(20e9))


def test_a_trace_sees_what_happened_inside_it_and_tells_prefill_from_decode() -> None:
    from strata_lab.events import EventLog

    log = EventLog()
    log.append(step(0, prefill=9, decode=0))
    with Trace(SimpleNamespace(events=log)) as seen:
        log.append(step(1, prefill=5, decode=1))
        log.append(step(2))
    log.append(step(3))
    assert [s.step for s in seen.steps] == [1, 2] and seen.lost == 0
    assert [s.step for s in seen.prefill_steps] == [1] and [s.step for s in seen.decode_steps] == [2]


# -- charts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("colour", sorted({*theme.COLOURS, *theme.CAUSES.values(), theme.GREY}))
def test_marks_can_be_seen_on_light_and_on_dark_paper(colour: str) -> None:
    assert contrast(colour, LIGHT) >= CONTRAST and contrast(colour, DARK) >= CONTRAST


def charts() -> dict[str, Any]:
    ceiling = Ceiling(20e9)
    return {
        "compared": figures.compared(Compared("ms", {"a": [2.0, 3.0], "b": [1.0, 1.5]}), "t", "formula"),
        "causes": figures.causes({"a": causes_ms([step(0)], ceiling)}, ceiling, "t"),
        "steps": figures.steps([step(0, prefill=9, decode=0), step(1)], "t"),
        "against": figures.against("t", "bytes", "ms", {1.0: 2.0}, {1.0: 1.0, 2.0: 2.0}, "bytes / bandwidth"),
    }


def test_every_chart_has_units_on_its_axes_and_tells_on_hover_how_a_number_is_made() -> None:
    for name, chart in charts().items():
        titles = [axis.title.text for axis in (chart.layout.xaxis, chart.layout.yaxis)]
        assert any(title and re.search(r"\b(ms|bytes)\b", title) for title in titles), name
        hovers = [trace.hovertemplate for trace in chart.data]
        assert all(hovers), name
        assert any(re.search(r"formula|/|_ms|best of", hover) for hover in hovers), name
        assert chart.layout.paper_bgcolor == chart.layout.plot_bgcolor == "rgba(0,0,0,0)", name


# -- pages ------------------------------------------------------------------------------------------------------------


def executed(tmp_path: Path) -> Path:
    """A notebook as papermill leaves it: a chart, a widget, a cell that tells, and text that could break a page."""
    new = nbformat.v4
    chart = json.loads(figures.against("</script> & more", "bytes", "ms", {1.0: 2.0}, {1.0: 1.0}, "f").to_json())
    cells = [
        new.new_markdown_cell("# 99 A title (标题)\n\n*Needs* nothing."),
        new.new_code_cell("model = 'x'  # = 1\nseconds: float = 2.0", metadata={"tags": ["parameters"]}),
        new.new_code_cell("draw()", outputs=[new.new_output("display_data", {gallery.PLOTLY: chart})]),
        new.new_code_cell("panel", outputs=[new.new_output("display_data", {gallery.WIDGET: {"model_id": "1"}})]),
        new.new_code_cell("secret_source()", metadata={"tags": [gallery.TOLD]}),
    ]  # fmt: skip
    path = tmp_path / "99_title.ipynb"
    nbformat.write(new.new_notebook(cells=cells, metadata={"widgets": {"state": {}}}), path)
    return path


def test_a_page_draws_its_charts_without_a_network_and_folds_what_only_tells(tmp_path: Path) -> None:
    text = gallery.page(executed(tmp_path)).read_text(encoding="utf-8")
    assert f'<script src="{gallery.SCRIPT}">' in text and text.count("Plotly.newPlot(") == 1
    assert "A widget stands here" in text and "secret_source" not in text and "prefers-color-scheme: dark" in text
    assert re.findall(r"<(?:script|link|img|iframe)[^>]*https?://[^>]*>", text) == [] and "mermaid.esm" not in text
    drawn = text[text.index("Plotly.newPlot(") :]
    assert "</script> & more" not in drawn[: drawn.index("</script>")]


def test_the_index_lists_every_page_and_brings_the_script(tmp_path: Path) -> None:
    path = executed(tmp_path)
    notebook = nbformat.read(path, as_version=4)
    assert gallery.parameters(notebook) == {"model", "seconds"}
    text = gallery.index([gallery.Executed(path, gallery.title_of(notebook), 12.4)], tmp_path).read_text(
        encoding="utf-8"
    )
    assert 'href="99_title.html"' in text and "99 A title (标题)" in text and "12 s" in text
    assert (tmp_path / gallery.SCRIPT).stat().st_size > 1e6


def test_steps_that_a_device_made_ahead_cost_what_the_device_took() -> None:
    """Of two that were queued together the host waits for the first and finds the second ready."""
    ahead = [replace(step(i, ms=ms), forward_ms=0.4, sample_ms=0.0) for i, ms in enumerate((0.77, 0.03))]
    assert drafting.sizes([step(2, ms=10.0), *ahead]) == {1: [10.0, 0.4, 0.4]}


# -- all of them on a device ------------------------------------------------------------------------------------------


def written(folder: Path, name: str, *sources: str) -> Path:
    new = nbformat.v4
    cells = [new.new_code_cell('device = "auto"', metadata={"tags": ["parameters"]}), *map(new.new_code_cell, sources)]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(new.new_notebook(cells=cells, metadata={"kernelspec": kernel}), folder / name)
    return folder / name


def test_a_notebook_that_fails_is_told_with_its_cell_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, "00_wrong.ipynb", "1 + 1", 'assert device == "cuda", device')
    written(tmp_path, "01_right.ipynb", 'assert device == "cpu"')
    monkeypatch.setattr(suite, "NOTEBOOKS", tmp_path)
    told = ("--out", str(tmp_path / "done"), "--name", "found", "--results", str(tmp_path), "--jobs", "2")
    assert suite.main(["--device", "cpu", *told]) == 1
    wrong, right = json.loads((tmp_path / "found.json").read_text())
    assert (wrong["metrics"]["passed"], right["metrics"]["passed"]) == (False, True)
    assert wrong["note"] == 'assert device == "cuda", device: AssertionError: cpu'
    assert right["conditions"]["device"] == "cpu" and right["metrics"]["slowest_cell_s"] < right["metrics"]["total_s"]
    assert "01_right: passed" in capsys.readouterr().out


def test_a_notebook_that_takes_too_long_is_ended_and_told(tmp_path: Path) -> None:
    path = written(tmp_path, "00_slow.ipynb", "import time; time.sleep(60)")
    ended = suite.outcome(path, tmp_path / "done", {"device": "cpu"}, 4.0)
    assert ended.error == "not at its end after 4 s" and ended.seconds < 30
