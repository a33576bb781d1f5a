"""Times steps of a runner by their number of tokens, for `costs.py`: on made-up inputs that write nowhere.

The first replay of a captured shape is the capture, so each shape is run once before the clock starts. Steps of an
engine that serves meanwhile make the figures larger, all alike; what is left of the error the running costs correct.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from strata_lab.capture import MIN_TABLE_WIDTH, Recorder, idle_rows, wait_for
from strata_lab.run_ahead import RunAhead
from strata_lab.runner import Step, StepInputs
from strata_lab.speculative.costs import StepCosts, measure

BUDGET_S = 2.0
TIMED_REPLAYS = 5


def measured_costs(step: Step, block_size: int, device: torch.device, budget_s: float = BUDGET_S) -> StepCosts:
    """Costs of the steps of `step`."""

    def timer(inputs_of: Callable[[int], StepInputs]) -> Callable[[int], float]:
        seen: set[int] = set()

        def run(num_tokens: int) -> float:
            inputs = inputs_of(num_tokens)
            if num_tokens not in seen:
                seen.add(num_tokens)
                step(inputs)
            return time_ms(lambda: step(inputs), device)

        return run

    with torch.inference_mode():
        plain_ms = timer(lambda n: StepInputs.idle(n, 2, device))
        window_ms = timer(lambda n: idle_rows(n, 1, max(2, -(-n // block_size)), device))
        plain, window = measure([plain_ms, window_ms], time.perf_counter, budget_s)
    return StepCosts(plain, window)


def time_ms(work: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds that `work` takes, the device's part included."""
    wait_for(device)
    started = time.perf_counter()
    work()
    wait_for(device)
    return (time.perf_counter() - started) * 1e3


@torch.inference_mode()
def queued_step_ms(ahead: RunAhead, recorder: Recorder, width: int = MIN_TABLE_WIDTH) -> float:
    """Device milliseconds of a queued greedy step of one request, by a capture of its own; others may run."""
    graph = ahead.captured_by(recorder, 1, width, drawn=False)
    return best_ms(graph.replay, ahead.clock) / graph.steps


def best_ms(replay: Callable[[], None], clock: Callable[[], Any]) -> float:
    """Device milliseconds of a replay behind another, as queued ones follow each other: the best of a few."""
    times = []
    for _ in range(TIMED_REPLAYS):
        begin, end = clock(), clock()
        replay()  # while it runs, the host gets the next one launched
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times)
