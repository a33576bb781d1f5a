"""What this machine is made of: processor, caches, memory, GPUs and their sensors.

Exists so that `doctor`, the benchmarks and the roofline describe the same machine in the same words. It reads
operating-system files and, where `nvidia-ml-py` is installed, the NVIDIA driver; it never imports torch, never
changes a setting, and answers None for what a machine does not tell.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from strata_lab.events import HardwareEvent
from strata_lab.telemetry import container

CPU_FLAGS_THAT_MATTER = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")
_SIZE_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class CpuInfo:
    """The processor.

    Attributes:
        name: as the operating system calls it.
        flags: instruction sets out of `CPU_FLAGS_THAT_MATTER` that it has.
        usable_cores: logical cores this process may run on.
        last_level_cache_bytes: size of the largest cache; None where it is unknown.
        memory_bytes: physical memory, or what a container may use of it; None where it is unknown.
        available_memory_bytes: memory that can be taken without swapping, and within a container's limit; None where
            it is unknown.
        governor: the frequency governor, or None where the system shows none (many virtual machines).
        clock_mhz: current clock of the first core, None where it is unknown.
    """

    name: str
    flags: tuple[str, ...]
    usable_cores: int
    last_level_cache_bytes: int | None
    memory_bytes: int | None
    available_memory_bytes: int | None
    governor: str | None
    clock_mhz: float | None


@dataclass(frozen=True)
class GpuInfo:
    """One NVIDIA GPU as the driver describes it.

    Attributes:
        index: the driver's index.
        driver: driver version.
        reading: its name and all its sensors, as of now.
        driver_cuda: newest CUDA that the driver runs, such as "13.0".
    """

    index: int
    driver: str
    reading: HardwareEvent
    driver_cuda: str | None = None

    @property
    def name(self) -> str:
        """Product name."""
        return self.reading.name

    @property
    def memory_bytes(self) -> int:
        """Total memory; 0 where the driver does not tell."""
        return self.reading.memory_bytes or 0

    @property
    def memory_used_bytes(self) -> int:
        """In use by anyone."""
        return self.reading.memory_used_bytes or 0


def cpu_info() -> CpuInfo:
    """Describe the processor (a few small reads, no cache: clocks and memory change)."""
    info = _read("/proc/cpuinfo")
    flags = _field(r"(?:flags|Features)\s*:\s*(.*)$", info).split()
    name = _field(r"model name\s*:\s*(.*)$", info) or platform.processor()
    clock = _field(r"cpu MHz\s*:\s*([\d.]+)", info)
    available = _field(r"MemAvailable:\s*(\d+) kB", _read("/proc/meminfo"))
    bounds = container.limits()
    return CpuInfo(
        name=name.strip() or platform.machine() or "unknown processor",
        flags=tuple(f for f in CPU_FLAGS_THAT_MATTER if f in flags),
        usable_cores=usable_cores(),
        last_level_cache_bytes=_last_level_cache_bytes(),
        memory_bytes=_least(_physical_memory_bytes(), bounds.memory_bytes),
        available_memory_bytes=_least(int(available) * 1024 if available else None, bounds.memory_left_bytes),
        governor=_read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip() or None,
        clock_mhz=float(clock) if clock else None,
    )


def usable_cores() -> int:
    """Logical cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_average() -> float | None:
    """Runnable processes over the last minute, None on systems that do not say."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def processor_times() -> tuple[float, float] | None:
    """Seconds that all cores together were idle, and that passed, since the start; None where the system hides it."""
    fields = _field(r"cpu\s+(.*)$", _read("/proc/stat")).split()
    if len(fields) < 5:
        return None
    ticks = [int(f) for f in fields[:8]]  # user nice system idle iowait irq softirq steal; guests are in user already
    hz = os.sysconf("SC_CLK_TCK")
    return (ticks[3] + ticks[4]) / hz, sum(ticks) / hz


def thermal_zone_c() -> float | None:
    """The hottest thermal zone that Linux shows, in degrees Celsius; None where it shows none (virtual machines)."""
    texts = [_read(str(p)).strip() for p in Path("/sys/class/thermal").glob("thermal_zone*/temp")]
    return max((int(t) / 1000 for t in texts if t.lstrip("-").isdigit()), default=None)


def gpus() -> list[GpuInfo]:
    """Every GPU the NVIDIA driver shows; empty without a driver or without `nvidia-ml-py`."""
    from strata_lab.telemetry.nvml import open_nvml

    nvml = open_nvml()
    if nvml is None:
        return []
    try:
        return [_gpu(nvml, i) for i in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()


def machine_key(device: str = "cpu") -> str:
    """Short hash that names this machine (and its GPU for "cuda"), to key measurements by."""
    cpu = cpu_info()
    parts: list[Any] = [platform.node(), cpu.name, cpu.usable_cores, cpu.last_level_cache_bytes, cpu.memory_bytes]
    if device.startswith("cuda"):
        parts += [(g.name, g.memory_bytes) for g in gpus()]
    return hashlib.sha256(repr((device, parts)).encode()).hexdigest()[:16]


def _gpu(nvml: ModuleType, index: int) -> GpuInfo:
    from strata_lab.telemetry.nvml import driver_cuda, read, text

    reading = read(nvml, nvml.nvmlDeviceGetHandleByIndex(index), f"gpu {index}")
    return GpuInfo(index, text(nvml.nvmlSystemGetDriverVersion()), reading, driver_cuda(nvml))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _least(*values: int | None) -> int | None:
    return min((v for v in values if v is not None), default=None)


def _field(pattern: str, text: str) -> str:
    """What the pattern's group matches at the start of a line; empty where nothing does."""
    found = re.search(f"^{pattern}", text, re.M)
    return found[1] if found else ""


def _last_level_cache_bytes() -> int | None:
    sizes = [_read(str(p)).strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(s[:-1]) * _SIZE_UNITS[s[-1]] for s in sizes if s and s[-1] in _SIZE_UNITS), default=None)


def _physical_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
