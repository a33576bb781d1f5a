"""What the notebook's kernel does for `page_cost.py` and `page_leak.py`: loads, speeds from events, memory, threads."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strata_lab.events import StepEvent
from strata_lab.sampling_params import SamplingParams

POLL_S = 0.1
FILL_STREAMS, FILL_TOKENS = 4, 1000  # that fill the event log: as many as a load sends, so that steps hold as much
SETTLE_S = 3.0  # before a run, until a browser that was sent away is at rest


def speed_of(engine: Any, send: Callable[[], Any]) -> float:
    """Tokens a second of a load, from its first pure decode step to its last.

    Args:
        engine: idle.
        send: queues the requests.
    """
    engine.reset_prefix_cache()
    cursor = engine.events.cursor
    send()
    while (stats := engine.stats()).num_running + stats.num_waiting:
        time.sleep(POLL_S)
    events, _, lost = engine.events.since(cursor)
    assert not lost, f"{lost} events were lost; take a smaller load"
    steps = [e for e in events if isinstance(e, StepEvent) and e.num_decode_tokens and not e.num_prefill_tokens]
    seconds = steps[-1].t_s - steps[0].t_s
    return sum(len(step.tokens) for step in steps[1:]) / seconds


def send_bare(engine: Any, load: str) -> None:
    """Queue a load of the panel without a panel."""
    from strata_lab.workbench.loads import load_requests

    for request in load_requests(load, engine):
        engine.add_request(request.prompt, request.params)


def headless_speeds(engine: Any, load: str, path: str) -> None:
    """Measure in a thread, when the page is gone: the engine alone, then with a pump and widgets that nobody sees.

    Writes {"headless": tok/s, "pump": tok/s} to `path`.
    """
    from strata_lab.workbench import Workbench

    def run() -> None:
        time.sleep(SETTLE_S)
        found = {"headless": speed_of(engine, lambda: send_bare(engine, load))}
        unseen = Workbench(engine, name="unseen")
        unseen.open(*unseen.panels.details.all)
        found["pump"] = speed_of(engine, lambda: unseen.load(load))
        unseen.retire()
        part = Path(f"{path}.part")
        part.write_text(json.dumps(found))
        part.replace(path)

    threading.Thread(target=run, name="strata-page-cost").start()


def fill_log(engine: Any) -> None:
    """Write texts until the event log is full, so that what it holds grows no more."""
    params = SamplingParams(temperature=0.0, max_tokens=FILL_TOKENS, ignore_eos=True)
    while engine.events.cursor < engine.events.capacity:
        engine.generate(["Tell me a very long story."] * FILL_STREAMS, params)


def memory() -> dict[str, float]:
    """Of this process: resident memory, threads, live widgets, and Python objects after a collection."""
    from ipywidgets.widgets import widget

    gc.collect()
    resident = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return {
        "kernel_rss_mb": int(resident.split()[1]) / 1024,
        "num_threads": threading.active_count(),
        "num_widgets": len(widget._instances),
        "num_objects": len(gc.get_objects()),
        "num_modules": len(sys.modules),
    }
