"""Reads sensors in a thread of its own, about once a second, and hands every reading to whoever asked for it.

The engine's thread never waits for a sensor. On a CPU the readings carry the hottest thermal zone where Linux shows
one, for information; nothing is governed by it. A source that fails is not asked again; the last reading says why.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from strata_lab.events import HardwareEvent
from strata_lab.telemetry import hardware
from strata_lab.telemetry.nvml import NvmlSource

INTERVAL_S = 1.0  # NVML's own sensors are refreshed a few times a second
FAILED = "no sensor: reading it failed"
NO_CPU_SENSOR = "no sensor: the thermal governor needs a CUDA card"


class Source(Protocol):
    """Something that can be read."""

    def read(self) -> HardwareEvent:
        """A reading, now."""
        ...

    def close(self) -> None:
        """Give back what reading needs."""
        ...


class CpuSource:
    """The processor: no sensor to govern by, but its temperature and clock where Linux shows them."""

    def __init__(self, note: str = NO_CPU_SENSOR) -> None:
        self.note = note

    def read(self) -> HardwareEvent:
        """Name, clock, memory, and the hottest thermal zone."""
        cpu = hardware.cpu_info()
        used = None
        if cpu.memory_bytes is not None and cpu.available_memory_bytes is not None:
            used = cpu.memory_bytes - cpu.available_memory_bytes
        return HardwareEvent(
            t_s=time.perf_counter(),
            device="cpu",
            name=cpu.name,
            note=self.note,
            core_c=hardware.thermal_zone_c(),
            sm_mhz=None if cpu.clock_mhz is None else round(cpu.clock_mhz),
            memory_used_bytes=used,
            memory_bytes=cpu.memory_bytes,
        )

    def close(self) -> None:
        """Nothing is held."""


def source_for(device: Any) -> Source:
    """The sensors of a torch device or its name; for a card that cannot be read, a `CpuSource` that says so."""
    name = str(device)
    if not name.startswith("cuda"):
        return CpuSource()
    import torch

    index = torch.device(name).index or 0
    try:
        return NvmlSource(f"cuda:{index}", str(torch.cuda.get_device_properties(index).uuid))
    except LookupError as error:
        return CpuSource(str(error))


class Monitor:
    """Reads a source until it is stopped.

    Args:
        source: what to read; closed by `stop`.
        report: called with every reading, in the monitor's thread.
        interval_s: time between two readings.
    """

    def __init__(self, source: Source, report: Callable[[HardwareEvent], Any], interval_s: float = INTERVAL_S) -> None:
        if not interval_s > 0:
            raise ValueError(f"interval_s={interval_s!r} must be more than 0; try {INTERVAL_S}")
        self.source, self.report, self.interval_s = source, report, interval_s
        self.latest: HardwareEvent | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, device: Any, report: Callable[[HardwareEvent], Any], interval_s: float = INTERVAL_S) -> Monitor:
        """A monitor of a torch device or its name."""
        return cls(source_for(device), report, interval_s)

    def start(self) -> None:
        """Begin to read; does nothing if it reads already, or was stopped."""
        if self._thread is None and not self._stopping.is_set():
            self._thread = threading.Thread(target=self._run, name="strata-monitor", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.latest = self._read()
                self.report(self.latest)
                if self.latest.note.startswith(FAILED):
                    return
                self._stopping.wait(self.interval_s)
        finally:
            self.source.close()

    def join(self) -> None:
        """Wait for the end of a reading that is under way, after `stop`."""
        if self._thread is not None:
            self._thread.join()

    def _read(self) -> HardwareEvent:
        try:
            return self.source.read()
        except Exception as error:  # whatever a driver raises: a lost card must not end in a silent thread
            device, name = (self.latest.device, self.latest.name) if self.latest else ("unknown", "unknown")
            note = f"{FAILED}: {type(error).__name__}: {error}"
            return HardwareEvent(t_s=time.perf_counter(), device=device, name=name, note=note)

    def stop(self) -> None:
        """Read no more; returns at once, so that it can be called from any thread. Safe to repeat."""
        started = self._thread is not None
        if not self._stopping.is_set():
            self._stopping.set()
            if not started:
                self.source.close()
