"""NVML with recorded answers: what `telemetry/nvml.py` asks for, and errors for what a card does not have.

`consumer()` answers as a consumer card (no memory temperature, no ECC), `datacentre()` as one with HBM.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

GIB = 1 << 30


class NVMLError(Exception):
    """What NVML raises."""


class FakeNvml:
    """Args: answers: function name to its answer, or to a mapping from its second argument to the answer."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN, NVML_TEMPERATURE_THRESHOLD_MEM_MAX, NVML_TEMPERATURE_THRESHOLD_GPU_MAX = (
        1,
        2,
        3,
    )
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_FI_DEV_MEMORY_TEMP = 82
    nvmlClocksThrottleReasonNone, nvmlClocksThrottleReasonAll = 0, 0x1FF
    nvmlClocksThrottleReasonGpuIdle, nvmlClocksThrottleReasonApplicationsClocksSetting = 1, 2
    nvmlClocksThrottleReasonSwPowerCap, nvmlClocksThrottleReasonHwSlowdown = 4, 8
    nvmlClocksThrottleReasonSwThermalSlowdown, nvmlClocksThrottleReasonHwThermalSlowdown = 0x20, 0x40

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.is_open = True
        self.asked: list[str] = []

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"card {index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-12345678-abcd":
            raise NVMLError("Not Found")
        return "card 0"

    def nvmlDeviceGetIndex(self, handle: str) -> int:
        return 0

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.159.04"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13000

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDevice"):
            raise AttributeError(name)

        def answer(handle: str, *args: Any) -> Any:
            self.asked.append(name)
            if name not in self.answers:
                raise NVMLError("Not Supported")
            found = self.answers[name]
            if isinstance(found, dict):
                if args[0] not in found:
                    raise NVMLError("Not Supported")
                return found[args[0]]
            return found

        return answer


def consumer(**changes: Any) -> FakeNvml:
    answers: dict[str, Any] = {
        "nvmlDeviceGetName": "NVIDIA GeForce RTX 4090",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=48 * GIB, used=30 * GIB),
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=88),
        "nvmlDeviceGetPowerUsage": 402_500,
        "nvmlDeviceGetEnforcedPowerLimit": 450_000,
        "nvmlDeviceGetTemperature": {0: 71},
        "nvmlDeviceGetTemperatureThreshold": {1: 96, 3: 90},
        "nvmlDeviceGetClockInfo": {1: 2520, 2: 10501},
        "nvmlDeviceGetMaxClockInfo": {1: 3120, 2: 10501},
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0,
        "nvmlDeviceGetCurrPcieLinkGeneration": 4,
        "nvmlDeviceGetMaxPcieLinkGeneration": 4,
        "nvmlDeviceGetCurrPcieLinkWidth": 16,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
    }
    return FakeNvml(**(answers | changes))


def datacentre(**changes: Any) -> FakeNvml:
    hot = SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=62))
    extra = {
        "nvmlDeviceGetName": b"NVIDIA H200",
        "nvmlDeviceGetFieldValues": [hot],
        "nvmlDeviceGetTemperatureThreshold": {1: 92, 2: 95, 3: 87},
        "nvmlDeviceGetTotalEccErrors": 0,
    }
    return consumer(**(extra | changes))
