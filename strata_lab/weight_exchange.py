"""Other weights for a running engine when there is no room for both: the old ones go first, requests wait.

Where both fit, the new weights are made while the engine goes on (`engine.apply`). Where they do not, the engine stands
still between two steps, lets go of captures and weights, and loads the new ones; so it never holds more than the larger
of the two. Where not even that fits, the change is refused with the numbers. Nothing is lost: requests and their cache
stay, and if loading fails the old weights are loaded again.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Literal

import torch

from strata_lab.batch import ScheduledBatch
from strata_lab.build import Builder, Parts
from strata_lab.capture import wait_for
from strata_lab.config import Optimizations
from strata_lab.engine_loop import EngineLoop
from strata_lab.memory_forecast import conversion_nbytes
from strata_lab.run_ahead import RunAhead
from strata_lab.runner import Runner, StepResult
from strata_lab.settings import ConfigError
from strata_lab.speculative.ahead import DraftAhead
from strata_lab.speculative.speculator import NoSpeculation
from strata_lab.telemetry import hardware

GIB = 1 << 30


class Parked(Runner):
    """Stands where a runner was while there are no weights."""

    def __init__(self, runner: Runner | RunAhead | DraftAhead) -> None:
        self.lookahead, self.max_model_len = runner.lookahead, runner.max_model_len

    @property
    def capture_bytes(self) -> int:
        """None: they went with the weights."""
        return 0

    @property
    def captures(self) -> int:
        """None, either."""
        return 0

    def run(self, batch: ScheduledBatch) -> StepResult:
        """Only after a failed exchange whose old weights could not be loaded again either."""
        raise RuntimeError(
            "the engine has no weights: neither the new nor the old ones could be loaded; make a new one"
        )


def room_for(builder: Builder, after: Optimizations, current: Parts) -> Literal["beside", "in place"]:
    """How the weights of `after` can replace those in force; `ConfigError` with the numbers where they cannot."""
    if after.weight_format == current.optimizations.weight_format:
        return "beside"
    assert after.weight_format is not None
    needed = builder.weight_nbytes(after.weight_format) + conversion_nbytes(builder.model_config)
    free, old = free_nbytes(builder.device), current.weights.nbytes
    if needed <= free:
        return "beside"
    if needed <= free + old:
        return "in place"
    wanted, here = builder.weight_nbytes(after.weight_format), current.optimizations.weight_format
    smaller = [f for f in ("fp8", "int8", "int4") if builder.weight_nbytes(f) < wanted]
    raise ConfigError(
        f"weight_format={after.weight_format!r} needs {needed / GIB:.2f} GiB with what converting takes, but without "
        f"the {old / GIB:.2f} GiB of {here} weights only {(free + old) / GIB:.2f} GiB would be free; the KV pool holds "
        f"{current.kv.nbytes / GIB:.2f} GiB: lower gpu_memory_utilization first"
        + (f", or try weight_format={smaller[0]!r}" if smaller else "")
    )


def free_nbytes(device: torch.device) -> int:
    """Memory that could be taken now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    return hardware.cpu_info().available_memory_bytes or 0


def exchange(builder: Builder, loop: EngineLoop, after: Optimizations) -> float:
    """Put the weights of `after` in the place of those in force; returns the standstill in milliseconds."""
    took_ms = 0.0

    def change() -> None:
        nonlocal took_ms
        loop.settle()
        current = loop.parts
        parked, none = Parked(current.runner), NoSpeculation()  # a drafter may hold captures
        loop.parts = emptied = replace(current, runner=parked, lane=None, speculation=none)
        if current.lane is not None:
            current.lane.close()
        before, failure = current.optimizations, None
        del current
        try:
            parts = _made(builder, after, emptied)
        except Exception as error:  # whatever it was, there must be weights again
            failure, parts = error, _made(builder, before, emptied)
        took_ms = loop.put_in_force(parts, builder.new_block_manager, 0.0)
        if failure is not None:
            raise failure

    loop.between_steps(change)
    return took_ms


def _made(builder: Builder, wanted: Optimizations, emptied: Parts) -> Parts:
    builder.forget_captures()
    emptied.weights.release()
    gc.collect()
    wait_for(builder.device)
    if builder.device.type == "cuda":
        torch.cuda.empty_cache()
    return builder.parts(wanted, emptied)
