"""Changes toggles of a running engine: what is asked for is checked, built beside what is in force, and swapped.

The last step of every change happens between two steps of the loop (`engine_loop.py`). Nothing here knows what a toggle
means (`resolve.py`, `build.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from strata_lab.apply import ApplyReport, FieldResult, Status
from strata_lab.build import Builder
from strata_lab.config import Optimizations, changed_fields, toggles, why_bad
from strata_lab.engine_loop import EngineLoop
from strata_lab.explain import explain
from strata_lab.settings import ConfigError
from strata_lab.weight_exchange import exchange, room_for


class ChangesSettings:
    """The part of `LLMEngine` that changes settings."""

    _apply_lock: Any
    _builder: Builder
    _loop: EngineLoop
    _wish: Optimizations  # as asked for, None where the engine decides

    @property
    def optimizations(self) -> Optimizations:
        """The toggles in force, every None decided."""
        self._loop.check_open()
        return self._loop.parts.optimizations

    def explain(self) -> dict[str, str]:
        """Toggle name to what it does on this machine, or why it has no effect."""
        texts = explain(self._builder.device.type)
        reasons = {
            "cuda_graph": self._builder.why_not_captured(),
            "batch_invariant": self._builder.why_invariant_anyway(),
        }
        return texts | {name: f"No effect here: {reason}." for name, reason in reasons.items() if reason}

    def apply(self, **changes: Any) -> ApplyReport:
        """Change toggles of the running engine; returns when they are in force or refused.

        New weights, pools and captures are built in the calling thread while the engine goes on; the swap happens
        between two steps. Where memory does not hold old and new weights, requests wait while one replaces the other
        (`weight_exchange.py`). Unknown names, bad values and impossible combinations are refused with a reason, change
        nothing, and leave the engine serving. Requests in flight continue; a KV pool of another size
        takes their blocks, one of another format has their tokens computed again.
        """
        with self._apply_lock:
            before = self.optimizations
            refused = {name: reason for name in changes if (reason := why_bad(name, changes[name]))}
            wanted = {name: value for name, value in changes.items() if name not in refused}
            report = self._change(before, wanted) if wanted else ApplyReport({})
            answers = {name: FieldResult("refused", getattr(before, name, None), why) for name, why in refused.items()}
            return ApplyReport({**answers, **report.results}, report.build_ms, report.swap_ms)

    def _change(self, before: Optimizations, wanted: Mapping[str, Any]) -> ApplyReport:
        started = time.perf_counter()
        try:
            wish = self._wish.replace(wanted)
            after = self._builder.resolve(wish, self._loop.parts)
            if room_for(self._builder, after, self._loop.parts) == "in place":
                build_ms, swap_ms = 0.0, exchange(self._builder, self._loop, after)
            else:
                parts = self._builder.parts(after, self._loop.parts)
                build_ms = (time.perf_counter() - started) * 1e3
                swap_ms = self._loop.swap(parts, self._builder.new_block_manager, build_ms)
        except (ConfigError, MemoryError, torch.OutOfMemoryError) as error:
            return ApplyReport({n: FieldResult("refused", getattr(before, n), str(error)) for n in wanted})
        self._wish = wish
        moved, costs, texts = changed_fields(before, after), {t.name: t.cost for t in toggles()}, self.explain()
        answers = {}
        for name in wanted:
            status: Status = "unchanged" if name not in moved else "rebuilt" if costs[name] == "rebuild" else "applied"
            note = texts[name] if texts[name].startswith("No effect") else ""
            answers[name] = FieldResult(status, getattr(after, name), note)
        return ApplyReport(answers, build_ms, swap_ms)
