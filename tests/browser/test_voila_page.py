"""The workbench as a page without a notebook, served by Voila: a small mixture, so that its experts are seen, too."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata_lab.bench.lab_page import WatchedPage, browser_page, free_port, served, why_no_browser, write_notebook

MODEL = "moe-small@0.5"
CELL = f"from strata_lab.workbench import Workbench\n\nwb = Workbench({MODEL!r}, device='cpu')\nwb"
# Voila's own page asks for two style sheets of icons; nothing that is ours does, and it works without them.
ICONS = "https://cdn.jsdelivr.net/npm/@fortawesome/"
PATIENCE_MS = 60_000

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedPage]:
    reason = why_no_browser()
    if reason:
        pytest.skip(reason)
    if importlib.util.find_spec("voila") is None:
        pytest.skip("voila is not installed; pip install voila")
    path: Path = tmp_path_factory.mktemp("voila") / "page.ipynb"
    write_notebook(path, [CELL])
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [
        sys.executable, "-m", "voila", str(path), "--no-browser", f"--port={port}", "--Voila.ip=127.0.0.1",
        "--strip_sources=True",
    ]  # fmt: skip
    scratch = str(tmp_path_factory.mktemp("settings"))
    with served(command, scratch, f"{address}/voila/static/voila.js"), browser_page() as page:
        watched = WatchedPage(page, address)
        page.goto(address, timeout=PATIENCE_MS)
        page.locator("[data-state=ready]").wait_for(timeout=PATIENCE_MS)
        yield watched


def test_the_page_without_a_notebook_streams_switches_and_shows_the_experts(shown: WatchedPage) -> None:
    page = shown.page
    page.get_by_role("button", name="Experts").click()
    map_ = page.get_by_role("slider", name="Experts by layer")
    page.get_by_role("button", name="+ 4 users").click()
    page.locator(".strata-load-panel .answer", has_text="4 requests sent").wait_for(timeout=PATIENCE_MS)
    map_.wait_for(timeout=PATIENCE_MS)
    page.wait_for_function(
        "/^tokens [1-9]/.test(document.querySelector('.strata-expert-map canvas').getAttribute('aria-valuetext'))"
    )
    map_.focus()
    page.keyboard.press("Home")
    page.locator(".strata-expert-map .s-readout", has_text="layer 0, expert 0: chosen").wait_for(timeout=PATIENCE_MS)
    switch = page.get_by_role("switch", name="continuous_batching")
    switch.click()
    page.locator(".row", has=switch).locator(".line", has_text="Now off").wait_for(timeout=PATIENCE_MS)
    assert not switch.is_checked()


def test_nothing_of_ours_was_fetched_from_elsewhere_and_no_script_failed(shown: WatchedPage) -> None:
    assert [url for url in shown.external if not url.startswith(ICONS)] == []
    assert shown.errors == []
