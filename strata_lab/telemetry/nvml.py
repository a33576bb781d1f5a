"""What an NVIDIA card's sensors say, through NVML (`nvidia-ml-py`, imported here and only when asked).

NVML numbers cards as the driver does, torch as the process sees them, so a card is found by its UUID. Reading takes
about a millisecond and happens off the hot path (`telemetry/monitor.py`). It only reads: clocks, power limits and fans
are never changed. A sensor that a card or a driver does not have is None; consumer cards do not tell the temperature of
their memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from strata_lab.events import HardwareEvent

# NVML's reasons, in the order in which to look when a card is slow (heat, power, others), in words.
THROTTLE_WORDS = {
    "HwThermalSlowdown": "hot: the hardware cuts the clocks",
    "SwThermalSlowdown": "hot: the driver lowers the clocks",
    "HwSlowdown": "hardware slowdown: heat or the power supply",
    "HwPowerBrakeSlowdown": "power: the supply asks for less",
    "SwPowerCap": "power: the limit is reached",
    "BoardLimit": "power: the board's own limit is reached",
    "SyncBoost": "held to the clocks of another card (sync boost)",
    "DisplayClockSetting": "clocks fixed for a display",
    "Reliability": "held down by the voltage at which the chip is reliable",
}
HARMLESS = ("None", "All", "GpuIdle", "ApplicationsClocksSetting", "UserDefinedClocks")
_PREFIX = "nvmlClocksThrottleReason"

Ask = Callable[..., Any]


def open_nvml() -> ModuleType | None:
    """NVML, initialized; None without a driver, a card or the package. Whoever gets it calls `nvmlShutdown`."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # a missing module, driver or device raise different types; all mean "no GPU"
        return None
    return pynvml


def asker(nvml: Any, handle: Any) -> Ask:
    """A function that asks NVML about one card by the question's name, and answers None where there is no answer."""

    def ask(name: str, *args: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *(getattr(nvml, a) if isinstance(a, str) else a for a in args))
        except (nvml.NVMLError, AttributeError):
            return None  # this card, this driver or this package has no such sensor

    return ask


def read(nvml: Any, handle: Any, device: str) -> HardwareEvent:
    """All sensors of one card, now.

    Args:
        nvml: from `open_nvml`.
        handle: NVML's handle of the card.
        device: what the reading is to be called, such as "cuda:0".
    """
    ask = asker(nvml, handle)
    memory, rates = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetUtilizationRates")
    power, limit = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetEnforcedPowerLimit")
    return HardwareEvent(
        t_s=time.perf_counter(),
        device=device,
        name=text(ask("nvmlDeviceGetName") or "unknown card"),
        core_c=ask("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
        memory_c=_memory_c(nvml, ask),
        core_limit_c=_threshold(ask, "GPU_MAX") or _threshold(ask, "SLOWDOWN"),
        memory_limit_c=_threshold(ask, "MEM_MAX"),
        sm_mhz=ask("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
        sm_max_mhz=ask("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM"),
        memory_mhz=ask("nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM"),
        memory_max_mhz=ask("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_MEM"),
        power_w=None if power is None else power / 1000,
        power_limit_w=None if limit is None else limit / 1000,
        gpu_percent=None if rates is None else int(rates.gpu),
        memory_percent=None if rates is None else int(rates.memory),
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_bytes=None if memory is None else int(memory.total),
        throttle=throttle_words(nvml, ask("nvmlDeviceGetCurrentClocksThrottleReasons")),
        pcie_gen=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_gen_max=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_max=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        ecc_errors=ask("nvmlDeviceGetTotalEccErrors", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_VOLATILE_ECC"),
    )


def driver_cuda(nvml: Any) -> str | None:
    """Newest CUDA that the driver runs, such as "13.0"; None where it does not say."""
    try:
        version = int(nvml.nvmlSystemGetCudaDriverVersion())
    except (nvml.NVMLError, AttributeError):
        return None
    return f"{version // 1000}.{version % 1000 // 10}"


def throttle_words(nvml: Any, mask: int | None) -> tuple[str, ...]:
    """The bits in force, in words and in order; idling and clocks that somebody chose are no throttling."""
    bits = {n.removeprefix(_PREFIX): getattr(nvml, n) for n in dir(nvml) if n.startswith(_PREFIX)}
    names = [n for n, bit in bits.items() if n not in HARMLESS and isinstance(bit, int) and (mask or 0) & bit]
    order = list(THROTTLE_WORDS)
    names.sort(key=lambda n: order.index(n) if n in order else len(order))
    return tuple(THROTTLE_WORDS.get(n, n) for n in names)


def text(value: str | bytes) -> str:
    """NVML's strings, which older packages give as bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _memory_c(nvml: Any, ask: Ask) -> int | None:
    found = ask("nvmlDeviceGetFieldValues", [getattr(nvml, "NVML_FI_DEV_MEMORY_TEMP", 0)])
    if not found or found[0].nvmlReturn != 0:
        return None
    return int(found[0].value.uiVal) or None  # a card without the sensor may say 0


def _threshold(ask: Ask, name: str) -> int | None:
    found = ask("nvmlDeviceGetTemperatureThreshold", f"NVML_TEMPERATURE_THRESHOLD_{name}")
    return int(found) or None if found is not None else None


class NvmlSource:
    """The sensors of one card, kept open.

    Args:
        device: what its readings are called.
        uuid: torch's UUID of the card (`torch.cuda.get_device_properties(i).uuid`); None takes NVML's first card.
        nvml: NVML, initialized; None opens it.

    Raises:
        LookupError: there is no NVML, or it does not know the card.
    """

    def __init__(self, device: str, uuid: str | None = None, nvml: Any = None) -> None:
        self.device = device
        self._nvml: Any = nvml or open_nvml()
        if self._nvml is None:
            raise LookupError(
                "no sensor: NVML cannot be opened; pip install nvidia-ml-py and see whether nvidia-smi runs"
            )
        try:
            if uuid is None:
                self._handle = self._nvml.nvmlDeviceGetHandleByIndex(0)
            else:
                self._handle = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
            self.index = int(self._nvml.nvmlDeviceGetIndex(self._handle))
        except self._nvml.NVMLError as error:
            self._nvml.nvmlShutdown()
            raise LookupError(f"no sensor: NVML does not know {device} ({error})") from error

    def read(self) -> HardwareEvent:
        """All sensors, now."""
        return read(self._nvml, self._handle, self.device)

    def close(self) -> None:
        """Let NVML go."""
        self._nvml.nvmlShutdown()
