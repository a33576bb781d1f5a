"""Whether the open page leaks: browser heap, kernel memory and threads while streams run for a number of minutes.

`python -m strata_lab.bench.page_leak --minutes 60` keeps load coming on the workbench with every panel open, and reads
the figures each `EVERY_S` seconds after garbage was collected on both sides. The engine's log of events is full before
the page opens, since a log that fills looks like a leak. The record holds first and last reading after a warm-up, the
slopes between, and how many minutes that was; nothing is extrapolated.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strata_lab.bench.harness import Environment, Record, Spread
from strata_lab.bench.lab_page import LabPage, lab_page, write_notebook
from strata_lab.bench.page_command import measured, page_parser

SCRIPT = "python -m strata_lab.bench.page_leak"
EVERY_S = 20.0
WARM_UP_S = 100.0  # until charts hold what they keep, 60 s, and every batch size is captured
READY_S = 600.0  # until the engine is there and has filled its log
LOADS = ("users", "A")
SETTINGS = ("cuda_graph", "prefix_cache")  # flipped at each reading, as a person would
CELL = """from strata_lab import LLMEngine
from strata_lab.bench import page_kernel
from strata_lab.workbench import Workbench

engine = LLMEngine({model!r})
page_kernel.fill_log(engine)
wb = Workbench(engine)
wb"""


def reading(lab: LabPage, browser: Any) -> dict[str, float]:
    """Figures of the page and of the kernel, after a collection."""
    browser.send("HeapProfiler.collectGarbage")
    page = {one["name"]: one["value"] for one in browser.send("Performance.getMetrics")["metrics"]}
    kernel = json.loads(lab.ask("import json; print(json.dumps(page_kernel.memory()))"))
    return {
        "browser_heap_mb": page["JSHeapUsedSize"] / 2**20,
        "dom_nodes": page["Nodes"],
        "event_listeners": page["JSEventListeners"],
        **kernel,
    }


def watch(lab: LabPage, minutes: float, every_s: float, warm_up_s: float) -> list[dict[str, float]]:
    """Readings with their minute, while load keeps coming and settings are flipped."""
    browser = lab.page.context.new_cdp_session(lab.page)
    browser.send("Performance.enable")
    started, found, turn = time.monotonic(), [], 0
    while (passed_s := time.monotonic() - started) < warm_up_s + 60 * minutes:
        name, setting = LOADS[turn % len(LOADS)], SETTINGS[turn % len(SETTINGS)]
        lab.ask(f"wb.stop(); wb.load({name!r}); wb.apply({setting}=not wb.engine.optimizations.{setting})")
        lab.page.wait_for_timeout(every_s * 1e3)
        turn += 1
        if passed_s + every_s >= warm_up_s:
            found.append({"minute": (time.monotonic() - started - warm_up_s) / 60, **reading(lab, browser)})
    return found


def slope(readings: Sequence[dict[str, float]], name: str) -> float:
    """Change a minute: the line of least squares."""
    minutes, values = [one["minute"] for one in readings], [one[name] for one in readings]
    return statistics.linear_regression(minutes, values).slope


def measure(model: str, minutes: float, every_s: float = EVERY_S, warm_up_s: float = WARM_UP_S) -> list[Record]:
    """One record."""
    environment = Environment.now()
    with tempfile.TemporaryDirectory() as scratch:
        write_notebook(Path(scratch) / "leak.ipynb", [CELL.format(model=model)])
        with lab_page(Path(scratch)) as lab:
            lab.open("leak.ipynb")
            lab.run_all(READY_S)
            lab.page.locator("[data-state=ready]").first.wait_for(timeout=READY_S * 1e3)
            assert lab.ask("wb.open(*wb.panels.details.all)") == ""
            readings = watch(lab, minutes, every_s, warm_up_s)
            tokens = int(lab.ask("print(wb.engine.stats().num_output_tokens)"))
            lab.ask("wb.close(); engine.close()")
    names = [name for name in readings[0] if name != "minute"]
    watched = readings[-1]["minute"] - readings[0]["minute"]
    heap = [one["browser_heap_mb"] for one in readings]
    return [
        environment.record(
            "page_leak",
            script=f"{SCRIPT} --minutes {minutes:g}",
            conditions={"model": model, "loads": LOADS, "settings": SETTINGS, "panels": "all", "minutes": watched},
            metrics={
                "minutes": watched,
                "num_readings": len(readings),
                "output_tokens": tokens,
                **{f"first_{name}": readings[0][name] for name in names},
                **{f"last_{name}": readings[-1][name] for name in names},
                **{f"{name}_per_minute": slope(readings, name) for name in names},
                "readings": readings,
            },
            spread=Spread.of(heap),
            note=f"watched for {watched:.1f} minutes after a warm-up of {warm_up_s:.0f} s, longer was not tried; the "
            "spread is of the browser's heap in MB after a collection",
        )
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 2 where there is no browser."""
    parser = page_parser(SCRIPT, __doc__, "page_leak_cpu")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long, after the warm-up")
    return measured(parser, arguments, lambda options: measure(options.model, options.minutes))


if __name__ == "__main__":
    raise SystemExit(main())
