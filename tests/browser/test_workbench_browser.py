"""The workbench as a visitor meets it: JupyterLab, a real browser, the real engine and model.

The tests share one page and run in order; each leaves the panel idle.
"""

from __future__ import annotations

import importlib.resources
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from strata_lab.bench.lab_page import LabPage
from strata_lab.bench.page_cost import CLICK_AND_TIME

ROOT = Path(__file__).resolve().parent.parent.parent
EFFECT_S = 1.0  # from a click to its effect
PATIENCE_MS = 60_000
RUN_AXE = """async () => {
  const found = await axe.run(document.querySelector('.strata-workbench'));
  return found.violations.map(v => `${v.id}: ${v.nodes.length} x ${v.nodes[0].html.slice(0, 160)}`);
}"""
# Focuses the first control of a panel and notes what gets the focus from then on; how many controls there are.
WATCH_FOCUS = """(root) => {
  const stops = [...root.querySelectorAll("input, select, textarea, button, summary, [tabindex]")]
    .filter((e) => e.tabIndex >= 0 && !e.disabled && e.checkVisibility());
  const seen = new Set();
  root.addEventListener("focusin", (event) => seen.add(event.target));
  const missed = () => stops.filter((e) => e.isConnected && !seen.has(e));
  window.strataNotReached = () => missed().map((e) => e.outerHTML.slice(0, 120));
  stops[0].focus();
  return stops.length;
}"""
# The value of a control and its line, once its row shows another answer than the numbered one; null before.
ANSWERED = """([field, number]) => {
  const row = field.closest(".row");
  if (row.dataset.answer === number || row.dataset.tone === "busy") return null;
  return [field.type === "checkbox" ? field.checked : field.value, row.querySelector(".line").textContent];
}"""
# Numbers that say nothing when pointed at, or that no Tab and arrow key leads to; a redraw may have replaced some.
WITHOUT_FORMULA = """(all) => all.filter((one) => one.isConnected && (!one.querySelector(".s-tip") ||
  ![...one.parentElement.children].some((near) => near.tabIndex === 0))).map((one) => one.outerHTML.slice(0, 120))"""
# A value for every control that is not the one in force; null where there is no other that makes sense on its own.
OTHER_VALUES = """
import json
from strata_lab.config import toggles
wanted = {}
for t in toggles():
    now = getattr(wb.engine.optimizations, t.name)
    others = [c for c in t.choices if c != now]
    if t.kind == "bool":
        wanted[t.name] = not now
    elif t.kind == "choice":
        wanted[t.name] = "int8" if "int8" in others else others[0] if others else None  # int8 is soon made
    else:
        wanted[t.name] = now // 2 if isinstance(now, int) and now >= 2 else None
print(json.dumps(wanted))
"""
OPEN_ENGINES = "sum(not e.closed for e in __import__('strata_lab.engine').engine._open_engines)"
ENGINE_THREADS = "sum(t.name == 'strata-engine' for t in __import__('threading').enumerate())"
NUM_MODELS = "len(__import__('ipywidgets').widgets.widget._instances)"
MAKES_PANEL = "wb = Workbench("

pytestmark = pytest.mark.slow


class Panel:
    """One view of the workbench."""

    def __init__(self, lab: LabPage, index: int) -> None:
        self.lab, self.root = lab, lab.page.locator(".strata-workbench").nth(index)
        self.text = self.root.locator(".strata-token-stream .text")
        self.chart = self.root.get_by_role("slider", name="Output speed of the last minute")
        self.prompt = self.root.get_by_label("Prompt")

    def switch(self, name: str) -> Any:
        return self.root.get_by_role("switch", name=name)

    def field(self, name: str) -> Any:
        return self.root.get_by_label(name, exact=True)

    def unfold(self) -> None:
        """Show the controls of all topics, by keyboard."""
        folded = self.root.locator(".strata-toggle-panel details:not([open])")
        for _ in range(folded.count()):
            folded.first.locator("summary").press("Enter")
        folded.first.wait_for(state="detached", timeout=PATIENCE_MS)

    def line(self, name: str) -> Any:
        return self.root.locator(".row").filter(has=self.lab.page.get_by_label(name, exact=True)).locator(".line")

    def change(self, name: str, value: Any) -> tuple[Any, str]:
        """Set a control; its value and its line once the page shows the answer."""
        field = self.field(name)
        number = field.evaluate("e => e.closest('.row').dataset.answer")
        if isinstance(value, bool):
            field.click()
        elif isinstance(value, str):
            field.select_option(value)
        else:
            field.fill(str(value))
            field.press("Enter")
        found = self.lab.page.wait_for_function(ANSWERED, arg=[field.element_handle(), number], timeout=PATIENCE_MS)
        value, line = found.json_value()
        return value, line

    def generate(self, prompt: str, streams: int = 1, tokens: int = 400) -> None:
        self.prompt.fill(prompt)
        self.field("streams").fill(str(streams))
        self.field("max tokens").fill(str(tokens))
        self.root.get_by_role("button", name="Generate").click()
        self.wait_for_text(prompt)

    def wait_for_text(self, prompt: str) -> None:
        """Until the text of this prompt has begun."""
        shown = self.root.locator(".large", has_text=prompt).locator(".text")
        shown.filter(has_text="e").wait_for(timeout=PATIENCE_MS)  # there is no English sentence without one

    def stop(self) -> None:
        """Press Stop, which does nothing where the text has just ended by itself."""
        self.root.get_by_role("button", name="Stop", exact=True).evaluate("button => button.click()")
        self.root.locator("[data-state=ready]").wait_for(timeout=PATIENCE_MS)

    def wait_checked(self, name: str, checked: bool) -> None:
        state = ":checked" if checked else ":not(:checked)"
        self.root.locator(f"input[role=switch][id*='-{name}-']{state}").wait_for(timeout=PATIENCE_MS)


@pytest.fixture
def panel(lab: LabPage) -> Iterator[Panel]:
    panel = Panel(lab, 0)
    panel.root.scroll_into_view_if_needed()
    panel.root.locator("[data-state=ready]").wait_for(timeout=PATIENCE_MS)
    yield panel
    lab.ask("wb.stop()")


def patiently(holds: Callable[[], bool], otherwise: str) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE_MS / 1e3
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


def in_kernel(lab: LabPage, expression: str) -> str:
    return lab.ask(f"print({expression})").strip()


def test_run_all_shows_a_panel_with_text_and_speed(lab: LabPage, panel: Panel) -> None:
    assert len(panel.text.text_content()) > 20
    assert "Changes: cuda_graph off, cuda_graph on" in panel.chart.get_attribute("aria-valuetext")
    assert panel.switch("cuda_graph").is_checked()
    assert panel.root.locator(".fact", has_text="device").text_content()


def test_a_click_while_tokens_stream_changes_the_engine_within_a_second(lab: LabPage, panel: Panel) -> None:
    panel.generate("Describe the sea in winter.", streams=2)
    took_s = panel.switch("cuda_graph").evaluate(CLICK_AND_TIME) / 1e3
    assert in_kernel(lab, "wb.engine.optimizations.cuda_graph") == "False"
    assert took_s <= EFFECT_S
    assert "Now off, applied" in panel.line("cuda_graph").text_content()
    tokens = int(in_kernel(lab, "wb.engine.stats().num_output_tokens"))
    panel.switch("cuda_graph").click()
    panel.wait_checked("cuda_graph", True)
    markers = "[m['label'] for m in wb.panels.chart.markers][-2:]"
    assert in_kernel(lab, markers) == "['cuda_graph off', 'cuda_graph on']"
    told = "cuda_graph off, cuda_graph on."
    patiently(lambda: panel.chart.get_attribute("aria-valuetext").endswith(told), "the chart does not tell of both")
    assert int(in_kernel(lab, "wb.engine.stats().num_output_tokens")) > tokens, "streams went on"


def test_a_refused_value_snaps_back_and_the_reason_is_shown(lab: LabPage, panel: Panel) -> None:
    panel.unfold()
    field = panel.field("max_model_len")
    before = field.input_value()
    field.fill("99999999")
    field.press("Enter")
    panel.line("max_model_len").filter(has_text="Refused").wait_for(timeout=PATIENCE_MS)
    assert field.input_value() == before
    assert in_kernel(lab, "wb.engine.optimizations.max_model_len") == before


def test_a_bad_prompt_is_answered_in_words(lab: LabPage, panel: Panel) -> None:
    panel.prompt.fill("Hello")
    panel.field("max tokens").fill("-1")
    panel.root.get_by_role("button", name="Generate").click()
    panel.root.locator(".problem", has_text="max_tokens=-1 must be").wait_for(timeout=PATIENCE_MS)
    assert panel.prompt.input_value() == "Hello"
    panel.field("max tokens").fill("64")


def test_the_panel_works_by_keyboard_alone_and_triggers_no_notebook_shortcut(lab: LabPage, panel: Panel) -> None:
    cells = lab.page.locator(".jp-Cell").count()
    keyboard = lab.page.keyboard
    panel.switch("continuous_batching").focus()
    keyboard.press("b")  # the notebook's "insert a cell below"
    keyboard.press("Space")
    panel.wait_checked("continuous_batching", False)
    keyboard.press("Space")
    panel.wait_checked("continuous_batching", True)
    panel.prompt.focus()
    keyboard.press("Control+a")
    keyboard.type("Tell me about bees.")
    keyboard.press("Control+Enter")
    panel.wait_for_text("Tell me about bees.")
    for _ in range(60):
        keyboard.press("Tab")
        if lab.page.evaluate("document.activeElement.tagName") == "CANVAS":
            break
    keyboard.press("ArrowLeft")
    panel.root.locator(".strata-rate-chart .s-readout", has_text="before the latest").wait_for(timeout=PATIENCE_MS)
    assert lab.page.locator(".jp-Cell").count() == cells
    panel.stop()


def test_stop_ends_the_streams_and_keeps_their_text(lab: LabPage, panel: Panel) -> None:
    panel.generate("Write a long story about a ship.", streams=4, tokens=3000)
    panel.root.get_by_role("button", name="Stop", exact=True).click()
    panel.root.locator("[data-state=ready]").wait_for(timeout=PATIENCE_MS)
    assert panel.text.text_content()
    tokens = in_kernel(lab, "wb.engine.stats().num_output_tokens")
    panel.lab.page.wait_for_timeout(500)
    assert in_kernel(lab, "wb.engine.stats().num_output_tokens") == tokens


def test_a_second_view_shows_the_same_and_can_be_used(lab: LabPage, panel: Panel) -> None:
    panel.generate("Write about mountains.")
    panel.stop()
    lab.page.locator(".jp-Notebook .jp-WindowedPanel-outer, .jp-Notebook").first.evaluate("e => e.scrollTo(0, 1e6)")
    second = Panel(lab, 1)
    second.text.filter(has_text=panel.text.text_content()[:20]).wait_for(timeout=PATIENCE_MS)
    second.switch("continuous_batching").click()
    second.wait_checked("continuous_batching", False)
    panel.wait_checked("continuous_batching", False)
    assert lab.ask("assert wb.apply(continuous_batching=True).ok") == ""


def test_both_themes_are_followed(lab: LabPage, panel: Panel) -> None:
    pictures = ROOT / "artifacts"
    pictures.mkdir(exist_ok=True)
    panel.generate("Why is the sky blue?", streams=4)
    ink = {}
    for theme in ("Light", "Dark"):
        lab.theme(f"JupyterLab {theme}")
        lab.page.wait_for_timeout(1500)
        ink[theme] = panel.root.locator(".name").evaluate("e => getComputedStyle(e).color")
        lab.page.screenshot(path=str(pictures / f"workbench-{theme.lower()}.png"))
    assert ink["Light"] != ink["Dark"]
    lab.theme("JupyterLab Light")
    panel.stop()


def test_a_panel_opens_and_closes_at_a_click_and_every_number_names_its_formula(lab: LabPage, panel: Panel) -> None:
    chip = panel.root.get_by_role("button", name="KV blocks and batch")
    chip.click()
    panel.root.locator(".strata-block-map canvas").wait_for(timeout=PATIENCE_MS)
    panel.generate("Why is the sea salty?", streams=2)
    panel.root.locator(".strata-batch-lanes .lane[data-state=decoding]").first.wait_for(timeout=PATIENCE_MS)
    panel.root.locator(".strata-step-timeline .whole", has_text="ms a step").wait_for(timeout=PATIENCE_MS)
    tips = panel.root.locator(".s-tip").evaluate_all("tips => tips.map(tip => tip.textContent.trim())")
    assert all(tips)
    numbers = panel.root.locator(
        ".cause, .strata-roofline-gauge :is(li, .head), .s-facts li, .tile, .fact, .column, .reading, .place, "
        ".lane.s-tipped, header .status, .whole, .strata-rate-chart .s-readout"
    )
    assert numbers.evaluate_all(WITHOUT_FORMULA) == []
    chip.click()
    panel.root.locator(".strata-block-map").wait_for(state="detached", timeout=PATIENCE_MS)
    panel.stop()


def test_load_is_sent_by_a_button_and_marked_on_the_chart(lab: LabPage, panel: Panel) -> None:
    panel.root.get_by_role("button", name="+ 4 users").click()
    panel.root.locator(".strata-load-panel .answer", has_text="4 requests sent").wait_for(timeout=PATIENCE_MS)
    lab.page.wait_for_function("document.querySelector('.strata-rate-chart canvas').ariaValueText.includes('4 users')")
    panel.root.get_by_role("button", name="Stop all").evaluate("button => button.click()")
    panel.root.locator("[data-state=ready]").wait_for(timeout=PATIENCE_MS)


def test_every_control_changes_the_engine_or_is_refused_and_the_page_shows_which(lab: LabPage, panel: Panel) -> None:
    panel.generate("Write a long story about a river.", streams=2, tokens=3000)
    before = in_kernel(lab, "wb.engine.optimizations.as_dict()")
    wanted = json.loads(lab.ask(OTHER_VALUES))
    assert len(wanted) == int(in_kernel(lab, "len(wb.panels.toggles.toggles)")), "every control is among them"
    tried = {name: value for name, value in wanted.items() if value is not None}
    assert len(tried) >= 12
    panel.unfold()
    shown = {name: panel.change(name, value) for name, value in tried.items()}
    code = "import json; a, o = wb.panels.toggles.answers, wb.engine.optimizations\n"
    code += f"print(json.dumps({{name: [a[name]['status'], getattr(o, name)] for name in {list(tried)}}}))"
    for name, (status, now) in json.loads(lab.ask(code)).items():
        value, line = shown[name]
        assert (status == "refused") == line.startswith("Refused"), f"{name}: {line}"
        assert value == (now if isinstance(now, bool) else str(now)), f"{name}: {line}"
        assert status == "refused" or now == tried[name], f"{name}: {line}"
    assert lab.ask(f"assert wb.apply(**{before}).ok") == ""
    panel.stop()


def test_a_recording_plays_without_an_engine_and_says_so(lab: LabPage, panel: Panel) -> None:
    code = """
import tempfile, pathlib
path = pathlib.Path(tempfile.mkdtemp()) / "session.jsonl"
with wb.record(path):
    assert wb.generate("Count to ten.", max_tokens=20).wait(60)
shown = Workbench.replay(path)
assert shown.engine.finished.wait(60)
print(shown.panels.header.badge[:12], shown.panels.toggles.enabled)
shown.retire()
"""
    assert lab.ask(code).strip() == "Recording of False"


def test_a_reloaded_page_finds_the_panel_as_it_was(lab: LabPage, panel: Panel) -> None:
    text = panel.text.text_content()
    lab.command("docmanager:save")
    lab.page.wait_for_timeout(2000)
    lab.reload()
    reloaded = Panel(lab, 0)
    reloaded.text.filter(has_text=text[:20]).wait_for(timeout=PATIENCE_MS)
    reloaded.generate("One more time.")
    reloaded.stop()


def test_axe_finds_nothing_in_either_theme_with_every_panel_open(lab: LabPage, panel: Panel) -> None:
    assert lab.ask("wb.open(*wb.panels.details.all); run = wb.generate('Hello', num_streams=2, max_tokens=60)") == ""
    assert lab.ask("assert run.wait(60)") == ""
    lab.page.locator(".strata-quality-chart canvas").first.wait_for(timeout=PATIENCE_MS)
    lab.page.evaluate(importlib.resources.files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8"))
    for theme in ("Light", "Dark"):
        lab.theme(f"JupyterLab {theme}")
        lab.page.wait_for_timeout(1000)
        assert lab.page.evaluate(RUN_AXE) == [], theme
    lab.theme("JupyterLab Light")


def test_every_control_of_every_panel_is_reached_by_tab_and_set_by_keys(lab: LabPage, panel: Panel) -> None:
    assert lab.ask("wb.open(*wb.panels.details.all)") == ""
    panel.root.locator(".strata-quality-chart canvas").first.wait_for(timeout=PATIENCE_MS)
    panel.unfold()
    keyboard, most = lab.page.keyboard, panel.root.evaluate(WATCH_FOCUS)
    assert most > 30
    for _ in range(most + 10):
        keyboard.press("Tab")
        if not lab.page.evaluate("document.activeElement.closest('.strata-workbench')"):
            break
    assert lab.page.evaluate("window.strataNotReached()") == []
    seats = panel.field("max_num_seqs")
    before = seats.input_value()
    seats.focus()
    keyboard.press("Control+a")
    keyboard.type("7")
    keyboard.press("Enter")
    patiently(lambda: in_kernel(lab, "wb.engine.optimizations.max_num_seqs") == "7", "the number was not taken")
    assert lab.ask(f"wb.apply(max_num_seqs={before}); wb.fold(); wb.open('causes')") == ""


def test_a_cell_that_runs_again_leaves_no_second_engine_and_no_stale_panel(lab: LabPage, panel: Panel) -> None:
    models = int(in_kernel(lab, NUM_MODELS))
    assert in_kernel(lab, OPEN_ENGINES) == "1"
    lab.run_cell(MAKES_PANEL)
    patiently(lambda: in_kernel(lab, "wb.engine.alive") == "True", "the new engine does not run")
    fresh = Panel(lab, 0)
    fresh.root.locator("[data-state=ready]").wait_for(timeout=PATIENCE_MS)
    assert in_kernel(lab, OPEN_ENGINES) == "1"
    assert in_kernel(lab, ENGINE_THREADS) == "1"
    assert int(in_kernel(lab, NUM_MODELS)) == models
    patiently(lambda: lab.page.locator(".strata-workbench").count() == 1, "the old panel is still shown")
    fresh.generate("Once more.", tokens=40)
    fresh.stop()


def test_a_restarted_kernel_runs_the_notebook_from_the_top(lab: LabPage) -> None:
    lab.restart_and_run_all(PATIENCE_MS / 1e3 * 2)
    panel = Panel(lab, 0)
    panel.root.locator("[data-state=ready]").wait_for(timeout=PATIENCE_MS)
    assert in_kernel(lab, OPEN_ENGINES) == "1"
    assert len(panel.text.text_content()) > 20
    panel.switch("continuous_batching").click()
    panel.wait_checked("continuous_batching", False)
    assert in_kernel(lab, "wb.engine.optimizations.continuous_batching") == "False"


def test_nothing_was_fetched_from_elsewhere_and_no_script_failed(lab: LabPage) -> None:
    assert lab.external == []
    assert lab.errors == []
