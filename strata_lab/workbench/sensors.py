"""What the hardware strip shows: sensors of the device that the engine runs on, and the load of the processor."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from strata_lab.events import GovernorEvent, HardwareEvent
from strata_lab.telemetry import hardware
from strata_lab.telemetry.heat import NEAR_C, limit_c
from strata_lab.telemetry.monitor import source_for

EVERY_S = 1.0
_NONE = "no sensor"


def no_sensors() -> dict[str, Any]:
    """The traits of `HardwareStrip` before anything was read."""
    return {"readings": [], "note": "Sensors are read once a second while this panel is open."}


class Sensors:
    """Reads at most once a second."""

    def __init__(self) -> None:
        self._due_s = float("-inf")
        self._times: tuple[float, float] | None = None

    def due(
        self, now_s: float, device: str | None, reported: HardwareEvent | None, governor: GovernorEvent | None = None
    ) -> dict[str, Any] | None:
        """The traits of `HardwareStrip`; None while the last reading is fresh.

        Args:
            now_s: `time.perf_counter()`.
            device: of the engine; None for a recording, where only what was recorded is shown.
            reported: the latest reading among the events, which is then not read again.
            governor: what it said last.
        """
        if now_s < self._due_s:
            return None
        self._due_s = now_s + EVERY_S
        reading = reported
        if device is not None and (reading is None or now_s - reading.t_s > 5 * EVERY_S):
            with closing(source_for(device)) as source:
                reading = source.read()
        notes = [] if governor is None else [f"Governor {governor.policy}: {governor.reason}"]
        if reading is None:
            return {"readings": [], "note": "This recording holds no readings of sensors."}
        if reading.note:
            notes.append(f"{reading.note[0].upper()}{reading.note[1:]}.")
        rows = _device_rows(reading) + ([] if device is None else self._cpu_rows())
        return {"readings": rows, "note": " ".join(notes)}

    def _cpu_rows(self) -> list[dict[str, str]]:
        cpu, before = hardware.cpu_info(), self._times
        self._times = now = hardware.processor_times()
        load = None
        if before is not None and now is not None and now[1] > before[1]:
            load = 100 * (1 - (now[0] - before[0]) / (now[1] - before[1]))
        free = cpu.available_memory_bytes
        return [
            _row(
                "CPU load", load, "%", "Share of all cores' time that was not idle since the last reading, /proc/stat."
            ),
            _row("CPU clock", cpu.clock_mhz, "MHz", "Clock of the first core now, /proc/cpuinfo."),
            _row("governor", cpu.governor or "not shown", "", "Frequency governor; virtual machines often show none."),
            _row("memory free", None if free is None else free / 1e9, "GB", "MemAvailable of /proc/meminfo."),
        ]


def _device_rows(r: HardwareEvent) -> list[dict[str, str]]:
    heat, tone, falls = r.core_c, "", ""
    if r.device != "cpu":  # a processor does not tell its limit, and there is no usual one
        hottest = limit_c(r, "core")
        tone = "" if heat is None or heat < hottest - NEAR_C else "warn" if heat < hottest else "bad"
        falls = f"; at {hottest:.0f} °C clocks fall"
    limit = "" if r.power_limit_w is None else f" Limit {r.power_limit_w:.0f} W."
    rows = [
        _row("temperature", heat, "°C", f"Core of {r.name}{falls}.", tone),
        _row("power", r.power_w, "W", f"Draw now.{limit}"),
    ]
    if r.device == "cpu":
        return [*rows, _row("throttle", None, "", "A processor does not tell why its clocks fall.")]
    throttle = ", ".join(r.throttle) or "none"
    return [
        *rows,
        _row("memory temperature", r.memory_c, "°C", "Memory; few consumer cards tell it."),
        _row(
            "GPU busy", r.gpu_percent, "%", "Share of the last moment with a kernel running, as the driver counts it."
        ),
        _row("core clock", r.sm_mhz, "MHz", "Clock of the multiprocessors now."),
        _row("memory clock", r.memory_mhz, "MHz", "Clock of the memory now: decode speed follows it."),
        _row("throttle", throttle, "", "What holds the clocks down now.", "warn" if r.throttle else ""),
    ]


def _row(label: str, value: float | str | None, unit: str, tip: str, tone: str = "") -> dict[str, str]:
    known = value is not None
    text = (
        _NONE
        if value is None
        else value
        if isinstance(value, str)
        else f"{value:.3g}"
        if value < 100
        else f"{value:.0f}"
    )
    return {"label": label, "value": text, "unit": unit if known else "", "tone": tone, "tip": tip}
