"""Makes the picture of the README: python -m tests.browser.screenshot docs/workbench.png [--theme dark]

The picture shows the real engine in the middle of decoding on this machine: it starts plain, and three settings are
changed while tokens stream. Nothing in it is drawn or edited afterwards, and its speeds are those of this machine with
a browser beside the engine, so take it when nothing else runs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from strata_lab.bench.lab_page import LabPage, lab_page, why_no_browser, write_notebook

WIDTH, HEIGHT = 1320, 1610
CELL = 'from strata_lab.workbench import Workbench\n\nwb = Workbench("{model}")\nwb'
PROMPT = "Write a long story about a lighthouse keeper who finds a map in a bottle."
PLAIN = 'cuda_graph=False, fused_kernels=False, weight_format="bf16"'
NUM_STREAMS, MAX_TOKENS = 2, 3000
STRETCH_S = 6.5  # of streaming between two changes; a change is judged by the four seconds after it
LOADING_S = 600.0


def take(lab: LabPage, path: Path, theme: str) -> None:
    """Open the panel, stream with everything plain, switch three settings, and take the picture while tokens come."""
    page = lab.page
    lab.open("workbench.ipynb")
    lab.theme(f"JupyterLab {theme.title()}")
    lab.command("application:toggle-left-area")
    lab.run_all(LOADING_S)
    page.locator(".strata-engine-header [data-state=ready]").wait_for(timeout=LOADING_S * 1e3)
    assert lab.ask(f"assert wb.apply({PLAIN}).ok") == ""
    time.sleep(21)  # the change to plain settings leaves the chart
    lab.ask("wb.restart_climb()")
    page.get_by_label("Prompt", exact=True).fill(PROMPT)
    page.get_by_label("streams", exact=True).fill(str(NUM_STREAMS))
    page.get_by_label("max tokens", exact=True).fill(str(MAX_TOKENS))
    endless = f"num_streams={NUM_STREAMS}, max_tokens={MAX_TOKENS}, chat=False, ignore_eos=True"
    assert lab.ask(f"run = wb.generate({PROMPT!r}, {endless})") == ""  # by code, so that no stream ends before its time
    page.locator(".large[data-state=generating] .text").wait_for(timeout=LOADING_S * 1e3)
    time.sleep(STRETCH_S)
    page.get_by_label("weight_format", exact=True).select_option("int4")
    time.sleep(STRETCH_S)
    for name in ("fused_kernels", "cuda_graph"):
        page.get_by_role("switch", name=name).click()
        page.mouse.move(WIDTH - 4, 4)
        time.sleep(STRETCH_S)
    page.evaluate("document.activeElement.blur()")
    assert lab.ask("print(sum(lane.finish_reason is None for lane in run.lanes))").strip() == str(NUM_STREAMS)
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
    with tempfile.TemporaryDirectory() as folder:
        write_notebook(Path(folder) / "workbench.ipynb", [CELL.format(model=given.model)])
        with lab_page(Path(folder), width=WIDTH, height=HEIGHT, scale=given.scale) as lab:
            take(lab, given.path, given.theme)
    return 0


if __name__ == "__main__":
    sys.exit(main())
