"""A card's sensors while an engine decodes and rests: `python -m strata_lab.bench.heat_trace [--load-s 90]`.

Rest, load, rest; every reading is kept as the driver gave it, with the tokens per second since the one before. What the
thermal governor would have done with such a card can then be tried without one. Nothing is governed meanwhile, and no
clock or limit is touched. Where the first reading has no temperature of a card, nothing runs and nothing is written.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from strata_lab.bench.harness import Environment, Record, write_results
from strata_lab.bench.traffic import Traffic
from strata_lab.events import HardwareEvent
from strata_lab.telemetry.monitor import Monitor, Source, source_for

SCRIPT = "python -m strata_lab.bench.heat_trace"
INTERVAL_S = 0.5
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 512
KEPT = ("core_c", "memory_c", "power_w", "sm_mhz", "memory_mhz", "gpu_percent", "throttle")
LIMITS = ("core_limit_c", "memory_limit_c", "power_limit_w")


@dataclass
class Trace:
    """Readings and how many tokens the engine had made at each.

    Attributes:
        engine: that is asked for its tokens.
        readings: as they came.
        tokens: of the engine until each reading.
    """

    engine: Any
    readings: list[HardwareEvent] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def keep(self, reading: HardwareEvent) -> None:
        """One more."""
        self.readings.append(reading)
        self.tokens.append(self.engine.stats().num_output_tokens)

    def metrics(self) -> dict[str, Any]:
        """Columns of equal length, by name, and what the driver says of limits."""
        times = [reading.t_s for reading in self.readings]
        spans = [max(b - a, 1e-9) for a, b in pairwise(times)]
        made = [b - a for a, b in pairwise(self.tokens)]
        last = self.readings[-1]
        return {
            "t_s": [t - times[0] for t in times],
            "output_tok_s": [0.0, *(n / s for n, s in zip(made, spans, strict=True))],
            **{name: [getattr(reading, name) for reading in self.readings] for name in KEPT},
            **{name: getattr(last, name) for name in LIMITS},
        }


def record(
    engine: Any, source: Source, seats: int, load_s: float, rest_s: float, interval_s: float = INTERVAL_S
) -> Trace:  # fmt: skip
    """Rest, decode for `seats` requests at a time, rest; seconds of each. `source` is closed."""
    trace = Trace(engine)
    monitor = Monitor(source, trace.keep, interval_s)
    load = Traffic(engine, PROMPT_TOKENS, OUTPUT_TOKENS)
    engine.start()
    monitor.start()
    try:
        time.sleep(rest_s)
        until = time.perf_counter() + load_s
        while time.perf_counter() < until:
            load.keep(seats, interval_s)
        load.drop()
        time.sleep(rest_s)
    finally:
        monitor.stop()
        monitor.join()
    return trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: 0 with a trace, 1 where the device tells no temperature."""
    parser = argparse.ArgumentParser(prog=SCRIPT, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen3.8-flash-dense", help="a preset, or anything the engine loads")
    parser.add_argument("--weights", help="format; default: as stored")
    parser.add_argument("--seats", type=int, default=8, help="requests at a time")
    parser.add_argument("--load-s", type=float, default=90.0, help="seconds under load")
    parser.add_argument("--rest-s", type=float, default=30.0, help="seconds of rest before it, and after")
    parser.add_argument("--results", help="folder of the results file (default: docs/results)")
    given = parser.parse_args(arguments)
    from strata_lab.engine import LLMEngine

    options = {"weight_format": given.weights} if given.weights else {}
    room = PROMPT_TOKENS + OUTPUT_TOKENS
    with LLMEngine(given.model, max_num_seqs=given.seats, max_model_len=room, **options) as engine:
        source = source_for(engine.device)
        seen = source.read()
        if seen.core_c is None or seen.device == "cpu":
            source.close()
            sys.stderr.write(f"{seen.name} tells no temperature to govern by ({seen.note}): nothing is written\n")
            return 1
        environment = Environment.now(engine.device.type)
        trace = record(engine, source, given.seats, given.load_s, given.rest_s)
        conditions = {
            "model": given.model, "batch": given.seats, "load_s": given.load_s, "rest_s": given.rest_s,
            "interval_s": INTERVAL_S, "toggles": engine.optimizations.as_dict(),
        }  # fmt: skip
    note = "readings as the driver gave them; nothing was governed"
    made: Record = environment.record(
        "heat_trace", script=SCRIPT, conditions=conditions, metrics=trace.metrics(), note=note
    )
    sys.stdout.write(f"{len(trace.readings)} readings: {write_results('heat_trace_gpu', [made], given.results)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
