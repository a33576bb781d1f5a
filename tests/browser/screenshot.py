"""Makes the picture of the README: python -m tests.browser.screenshot docs/workbench.png [--theme dark]

The picture shows the real engine in the middle of decoding on this machine, with a change of a setting on the chart.
Nothing in it is drawn or edited afterwards.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import nbformat

from tests.browser.lab_page import LabPage, lab_page, why_no_browser

WIDTH, HEIGHT = 1320, 1000
CELL = 'from strata_lab.workbench import Workbench\n\nwb = Workbench("{model}")\nwb'
PROMPT = "Write a long story about a lighthouse keeper who finds a map in a bottle."
BEFORE_S = 7.0  # of streaming before the change
AFTER_S = 7.5
LOADING_S = 600.0


def take(lab: LabPage, path: Path, theme: str) -> None:
    """Open the panel, stream with the capture off, switch it on, and take the picture while tokens come."""
    page = lab.page
    lab.open("workbench.ipynb")
    lab.theme(f"JupyterLab {theme.title()}")
    lab.command("application:toggle-left-area")
    lab.run_all(LOADING_S)
    page.locator(".strata-engine-header [data-state=ready]").wait_for(timeout=LOADING_S * 1e3)
    assert lab.ask("assert wb.apply(cuda_graph=False).ok") == ""
    page.get_by_label("Prompt", exact=True).fill(PROMPT)
    page.get_by_label("streams", exact=True).fill("4")
    page.get_by_label("max tokens", exact=True).fill("1500")
    page.get_by_role("button", name="Generate").click()
    page.locator(".large[data-state=generating] .text").wait_for(timeout=LOADING_S * 1e3)
    time.sleep(BEFORE_S)
    page.get_by_role("switch", name="cuda_graph").click()
    time.sleep(AFTER_S)
    page.mouse.move(WIDTH - 4, 4)
    page.evaluate("document.activeElement.blur()")
    page.screenshot(path=str(path))
    lab.ask("wb.close()")


def main() -> int:
    """Parse the arguments and take the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--scale", type=float, default=1.5, help="device pixels per CSS pixel")
    given = parser.parse_args()
    reason = why_no_browser()
    if reason:
        sys.stderr.write(f"no picture: {reason}\n")
        return 1
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL.format(model=given.model))])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(notebook, Path(folder) / "workbench.ipynb")
        with lab_page(Path(folder), width=WIDTH, height=HEIGHT, scale=given.scale) as lab:
            take(lab, given.path, given.theme)
    return 0


if __name__ == "__main__":
    sys.exit(main())
