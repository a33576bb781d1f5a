"""Puts a function that `kernel_lab.judge` accepted in force, through the same safe point as every other setting.

The new runner is built beside the old one; one step that writes nowhere tries it first. Nothing here judges.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from strata_lab.apply import Fallback
from strata_lab.build import Builder
from strata_lab.engine_loop import EngineLoop
from strata_lab.events import SettingEvent
from strata_lab.kernel_lab import SWAPPED_STEP, Guarded, SwapReport, judge, spec_of
from strata_lab.kernels import bind


def swap_op(builder: Builder, loop: EngineLoop, op: str, fn: Callable[..., Any] | None) -> SwapReport:
    """Judge, try and swap; the caller lets no other change of settings run meanwhile.

    Raises `ValueError` for an unknown operator.
    """
    spec_of(op)
    started = time.perf_counter()
    kept = dict(builder.swapped)
    if fn is None:
        if op not in kept:
            return SwapReport(op, "unchanged", "the built-in computes it already")
        del builder.swapped[op]
        if not builder.swapped:
            builder.fallbacks[:] = [f for f in builder.fallbacks if not f.reason.startswith(SWAPPED_STEP)]
        return SwapReport(op, "applied", "the built-in computes it again", swap_ms=_in_force(builder, loop, started))
    built_in = getattr(bind(builder.backend), op)
    report = judge(op, fn, built_in, builder.device, builder.dtype, builder.backend == "triton")
    if not report.ok:
        return report

    def failed(error: Exception) -> None:
        reason = f"the swapped {op} raised {type(error).__name__}: {error}; the built-in computes it again"
        builder.fallbacks.append(Fallback(f"op {op}", reason))
        loop.events.append(SettingEvent(time.perf_counter(), {f"op {op}": "built-in"}, 0.0, 0.0))

    builder.swapped[op] = guarded = Guarded(fn, built_in, failed)
    try:
        calls = builder.calls_per_step(op, loop.parts)
        swap_ms = _in_force(builder, loop, started)
    except Exception as error:
        builder.swapped.clear()
        builder.swapped.update(kept)
        return replace(report, status="refused", reason=f"a trial step raised {type(error).__name__}: {error}")
    guarded.armed = True
    unused = "" if calls else "no decode step calls it under these toggles; try apply(fused_kernels=False)"
    return replace(report, calls_per_step=calls, swap_ms=swap_ms, reason=unused)


def _in_force(builder: Builder, loop: EngineLoop, started: float) -> float:
    parts = builder.parts(loop.parts.optimizations, loop.parts)
    return loop.swap(parts, builder.new_block_manager, (time.perf_counter() - started) * 1e3)


class SwapsOps:
    """The part of `LLMEngine` that replaces operators."""

    _apply_lock: Any
    _builder: Builder
    _loop: EngineLoop

    def swap_op(self, op: str, fn: Callable[..., Any] | None) -> SwapReport:
        """Let `fn` compute an operator of the running engine, if it keeps the operator's SPEC; None restores it.

        A function that fails later ends the step's requests and gives way to the built-in.
        """
        with self._apply_lock:
            self._loop.check_open()
            return swap_op(self._builder, self._loop, op, fn)

    @property
    def swapped_ops(self) -> dict[str, Callable[..., Any]]:
        """Operator name to the function that computes it in place of the built-in."""
        return {name: guarded.fn for name, guarded in self._builder.swapped.items() if not guarded.broken}
