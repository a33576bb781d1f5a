"""The page against axe-core's rules for people who see little, hear the page, or use no mouse."""

from __future__ import annotations

import importlib.resources

import pytest

from tests.browser.lab_page import LabPage

RUN = """async () => {
  const found = await axe.run(document.querySelector('.strata-workbench'));
  return found.violations.map(v => `${v.id}: ${v.nodes.length} x ${v.nodes[0].html.slice(0, 160)}`);
}"""

pytestmark = pytest.mark.slow


def test_axe_finds_nothing_in_either_theme_with_every_panel_open(lab: LabPage) -> None:
    assert lab.ask("wb.open(*wb.panels.details.all); run = wb.generate('Hello', num_streams=2, max_tokens=60)") == ""
    assert lab.ask("assert run.wait(60)") == ""
    lab.page.locator(".strata-quality-chart canvas").first.wait_for(timeout=60_000)
    lab.page.evaluate(importlib.resources.files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8"))
    for theme in ("Light", "Dark"):
        lab.theme(f"JupyterLab {theme}")
        lab.page.wait_for_timeout(1000)
        assert lab.page.evaluate(RUN) == [], theme
    lab.theme("JupyterLab Light")
    assert lab.ask("wb.fold(); wb.open('causes')") == ""
