"""What the open page costs: the engine's speed headless, with an unseen panel, and with the page in a browser.

`python -m strata_lab.bench.page_cost` runs the same load by turns (A/B/A): the engine alone, with the pump and widgets
but no page, with the page as it opens in Chromium, and with every panel open there. The browser, the notebook server
and the engine share the cores of one machine, so the second figure is what the workbench costs a kernel, and the others
what a person sees who looks at it on the machine that computes. It also times switches while 8 streams run, and the way
from `make lab` to a first token.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from strata_lab.bench.harness import REPOSITORY, Environment, Record, Spread
from strata_lab.bench.lab_page import (
    TOKEN,
    LabPage,
    browser_page,
    free_port,
    lab_page,
    lab_settings,
    served,
    write_notebook,
)
from strata_lab.bench.page_command import measured, page_parser
from strata_lab.config import DEFAULT_MODEL

SCRIPT = "python -m strata_lab.bench.page_cost"
LOAD = "users"  # 4 streams of 192 tokens that ignore the end token
ROUNDS, SWITCHES = 3, 24
TOGGLES = ("cuda_graph", "continuous_batching", "prefix_cache")
STREAMS, STREAM_TOKENS = 8, 1500
PATIENCE_S = 300.0
MAKES_ENGINE = (
    "from strata_lab import LLMEngine\nfrom strata_lab.bench import page_kernel\n\nengine = LLMEngine({model!r})"
)
SHOWS_PAGE = """from strata_lab.workbench import Workbench
wb = Workbench(engine)
wb.open(*wb.panels.details.all)
wb"""
# Milliseconds from a click to the frame in which the switch shows another value in force.
CLICK_AND_TIME = """(box) => new Promise((resolve) => {
  const [before, started] = [box.checked, performance.now()];
  const look = () => (box.checked === before ? requestAnimationFrame(look) : resolve(performance.now() - started));
  box.click();
  requestAnimationFrame(look);
})"""


def away(lab: LabPage, scratch: Path) -> dict[str, float]:
    """Speeds without a page: the browser shows an empty one meanwhile."""
    path = scratch / "speeds.json"
    path.unlink(missing_ok=True)
    assert lab.ask(f"page_kernel.headless_speeds(engine, {LOAD!r}, {str(path)!r})") == ""
    lab.page.goto("about:blank")
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline, "the kernel wrote no speeds"
        time.sleep(1.0)
    found: dict[str, float] = json.loads(path.read_text())
    return found


def looked_at(lab: LabPage) -> dict[str, float]:
    """Speeds while the page is open: as it opens, with its details folded, and with every panel."""
    lab.run_cell("wb = Workbench(engine)")
    lab.page.locator("[data-state=ready]").first.wait_for(timeout=PATIENCE_S * 1e3)
    chart = lab.page.locator(".strata-quality-chart canvas").first
    chart.wait_for(timeout=PATIENCE_S * 1e3)
    speed = f"print(page_kernel.speed_of(engine, lambda: wb.load({LOAD!r})))"
    assert lab.ask("wb.fold()") == ""
    chart.wait_for(state="detached", timeout=PATIENCE_S * 1e3)
    folded = float(lab.ask(speed))
    assert lab.ask("wb.open(*wb.panels.details.all)") == ""
    chart.wait_for(timeout=PATIENCE_S * 1e3)
    return {"folded": folded, "page": float(lab.ask(speed))}


def effects(lab: LabPage, switches: int) -> list[float]:
    """Milliseconds from click to effect, on the open page, while `STREAMS` streams run."""
    send = f"run = wb.generate('Tell me a very long story.', num_streams={STREAMS}, max_tokens={STREAM_TOKENS})"
    times = []
    assert lab.ask(send) == ""
    assert lab.ask("import time; time.sleep(2)") == ""
    for i in range(switches):
        box = lab.page.get_by_role("switch", name=TOGGLES[i % len(TOGGLES)]).first
        times.append(float(box.evaluate(CLICK_AND_TIME)))
        if lab.ask("print(sum(lane.finish_reason is None for lane in run.lanes))").strip() != str(STREAMS):
            assert lab.ask(f"wb.stop(); {send}; time.sleep(1)") == ""  # one of them came to its end
    assert lab.ask("wb.stop()") == ""
    return times


@contextlib.contextmanager
def make_lab(port: int, scratch: str) -> Iterator[None]:
    """`make lab` as a person starts it, but for the browser that it would open."""
    flags = (
        f"--no-browser --ServerApp.ip=127.0.0.1 --ServerApp.port={port} --ServerApp.token={TOKEN} "
        "--LabApp.expose_app_in_browser=True"
    )
    command = ["make", "-s", "-C", str(REPOSITORY), "lab", f"PY={sys.executable}", f"LAB_FLAGS={flags}"]
    address = f"http://127.0.0.1:{port}/api/status?token={TOKEN}"
    with served(command, scratch, address, end=lambda server: os.killpg(server.pid, signal.SIGTERM)):
        yield


def first_token_s() -> float:
    """Seconds from `make lab` to the first text on the page, with Run All pressed as soon as the kernel is there."""
    port = free_port()
    with tempfile.TemporaryDirectory() as scratch, browser_page() as page:
        lab_settings(Path(scratch))
        started = time.monotonic()
        with make_lab(port, scratch):
            lab = LabPage(page, f"http://127.0.0.1:{port}")
            lab.open("00_workbench.ipynb")  # `make lab` names this file, whose folder is then the server's root
            lab.command("notebook:run-all-cells")
            text = page.locator(".strata-token-stream .text").first
            text.filter(has_text="e").wait_for(timeout=PATIENCE_S * 1e3)
            took_s = time.monotonic() - started
            page.goto("about:blank")  # nothing of the checkout's notebook is saved
    return took_s


def measure_page(model: str, rounds: int, switches: int) -> list[Record]:
    """Records of the speeds and of the switches."""
    environment = Environment.now()
    found: dict[str, list[float]] = {"headless": [], "pump": [], "folded": [], "page": []}
    cells = [MAKES_ENGINE.format(model=model), SHOWS_PAGE]
    with tempfile.TemporaryDirectory() as scratch:
        write_notebook(Path(scratch) / "cost.ipynb", cells)
        with lab_page(Path(scratch)) as lab:
            lab.open("cost.ipynb")
            lab.run_all(PATIENCE_S)
            looked_at(lab)  # warm: captures of every batch size
            for i in range(rounds + 1):
                for name, value in away(lab, Path(scratch)).items():
                    found[name].append(value)
                lab.open("cost.ipynb")
                for name, value in looked_at(lab).items() if i < rounds else ():  # without a page last, as first
                    found[name].append(value)
            settings = json.loads(lab.ask("import json; print(json.dumps(engine.optimizations.as_dict()))"))
            looked_at(lab)
            times = effects(lab, switches)
            lab.ask("wb.close(); engine.close()")
    conditions = {"model": model, "load": LOAD, "toggles": settings}
    speeds = [_share(environment, conditions, found, side) for side in ("pump", "folded", "page")]
    return [*speeds, _switching(environment, conditions, times)]


def measure_start(model: str) -> Record:
    """The record of the start."""
    environment = Environment.now()
    took_s = first_token_s()
    return environment.record(
        "page_cost/start",
        script=SCRIPT,
        conditions={"model": model, "load": "notebooks/00_workbench.ipynb"},
        metrics={"first_token_s": took_s},
        spread=Spread.of([took_s]),
        note="from `make lab` (installed, model and kernels in their caches) to the first text on the page, Run All "
        "pressed as soon as the kernel is there",
    )


def shares(headless: Sequence[float], other: Sequence[float]) -> list[float]:
    """Each run over the mean of the headless runs on either side of it."""
    return [b / statistics.mean(headless[i : i + 2]) for i, b in enumerate(other)]


def _share(environment: Environment, conditions: Any, found: dict[str, list[float]], side: str) -> Record:
    kept = shares(found["headless"], found[side])
    what = {
        "pump": "widgets and pump without a page",
        "folded": "the page as it opens, details folded, in Chromium on the same cores",
        "page": "every panel open in Chromium, on the same cores",
    }
    return environment.record(
        f"page_cost/{side}",
        script=SCRIPT,
        conditions=conditions,
        metrics={
            "output_tok_s": statistics.median(found[side]),
            "headless_tok_s": statistics.median(found["headless"]),
            "share_of_headless": statistics.median(kept),
        },
        spread=Spread.of(kept),
        note=f"{what[side]}, beside the engine alone by turns (A/B/A); the spread is of the shares",
    )


def _switching(environment: Environment, conditions: Any, times: list[float]) -> Record:
    ordered = sorted(times)
    p95 = ordered[max(0, -(-95 * len(ordered) // 100) - 1)]
    return environment.record(
        "page_cost/switch",
        script=SCRIPT,
        conditions={**conditions, "load": f"{STREAMS} streams", "switched": list(TOGGLES)},
        metrics={"effect_p50_ms": statistics.median(ordered), "effect_p95_ms": p95, "effect_max_ms": ordered[-1]},
        spread=Spread.of(times),
        note="from the click to the frame that shows the new value in force, every panel open; the spread is in ms",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 2 where there is no browser."""
    parser = page_parser(SCRIPT, __doc__, "page_cost_cpu")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="runs with the page open; 0 measures the start alone"
    )
    parser.add_argument("--switches", type=int, default=SWITCHES, help="clicks that are timed")
    parser.add_argument("--no-start", action="store_true", help="leave out the start, which runs `make lab`")

    def measure(options: argparse.Namespace) -> list[Record]:
        page = measure_page(options.model, options.rounds, options.switches) if options.rounds else []
        return page if options.no_start else [*page, measure_start(DEFAULT_MODEL)]

    return measured(parser, arguments, measure)


if __name__ == "__main__":
    raise SystemExit(main())
