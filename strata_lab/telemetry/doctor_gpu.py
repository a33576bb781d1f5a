"""The doctor's look at GPUs: do driver, CUDA and torch match, does the card have room, is it slow and why.

Each card's lines come in the order in which the source articles look (`telemetry/triage.py`). One measurement is made
where torch can use the card: copying from locked memory, which is what swapping and loading live on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from strata_lab.telemetry import hardware
from strata_lab.telemetry.checks import Check
from strata_lab.telemetry.triage import slowest, triage

GIB = 1 << 30
LOW_MEMORY_BYTES = 2 << 30
COPY_BYTES = 64 << 20
COPIES = 5
LANE_BYTES_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}  # of one lane, per PCIe generation
SLOW_COPY = 0.5  # of what the link could carry


def gpu_checks() -> Iterator[Check]:
    """Lines about all GPUs."""
    import torch

    found = hardware.gpus()
    usable = torch.cuda.is_available()
    if not found and not usable:
        yield Check("gpu", "NVIDIA GPU", "none; everything runs on the CPU")
        return
    if not usable:
        reason = "this torch has no CUDA" if torch.version.cuda is None else "torch cannot open it"
        yield Check(
            "gpu", "torch", f"{found[0].name} is there, but {reason}", "fail", "make setup installs the CUDA build",
            "the build of torch does not fit" if torch.version.cuda is None else "driver, permissions or container",
        )  # fmt: skip
        return
    yield match(torch.version.cuda, found[0] if found else None, torch.cuda.device_count())
    if not found:
        yield Check("gpu", "sensors", "no driver library for them", "warn", "pip install nvidia-ml-py")
    for gpu in found:
        yield from one_gpu(gpu)
    yield pinned_copy(torch, found[0] if found else None)


def match(torch_cuda: str | None, gpu: hardware.GpuInfo | None, count: int) -> Check:
    """Whether the driver runs the CUDA that torch was built with: the same major version or a later one."""
    driver = None if gpu is None else gpu.driver_cuda
    value = f"torch for CUDA {torch_cuda}, sees {count} GPU(s); the driver runs CUDA up to {driver or 'unknown'}"
    if driver is not None and torch_cuda is not None and int(driver.split(".")[0]) < int(torch_cuda.split(".")[0]):
        fix = f"update the driver, or install the torch build for CUDA {driver}"
        return Check("gpu", "driver and CUDA", value, "fail", fix, "the driver is older than torch's CUDA")
    return Check("gpu", "driver and CUDA", value)


def one_gpu(gpu: hardware.GpuInfo) -> Iterator[Check]:
    """Room and sensors of one card; the first that is not ok is where to begin."""
    name = f"gpu {gpu.index}"
    free = gpu.memory_bytes - gpu.memory_used_bytes
    low = free < LOW_MEMORY_BYTES
    value = f"{gpu.name}, driver {gpu.driver}, {free / GIB:.1f} of {gpu.memory_bytes / GIB:.1f} GiB free"
    fix = "end other programs that hold its memory (nvidia-smi lists them)" if low else ""
    yield Check("gpu", name, value, "warn" if low else "ok", fix)
    lines = triage(gpu.reading)
    first = slowest(lines)
    for line in lines:
        begin = (
            "begin here: " if line is first and line.name in ("core temperature", "memory temperature", "power") else ""
        )
        yield replace(line, section="gpu", name=f"{name} {line.name}", fix=f"{begin}{line.fix}")


def pinned_copy(torch: Any, gpu: hardware.GpuInfo | None) -> Check:
    """Copy from locked memory, measured, against what the link could carry."""
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    card = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")

    def seconds() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        card.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    best = COPY_BYTES / min(seconds() for _ in range(COPIES))
    reading = None if gpu is None else gpu.reading
    link = 0.0
    if reading is not None and reading.pcie_gen_max and reading.pcie_width:
        link = LANE_BYTES_S.get(reading.pcie_gen_max, 0.0) * reading.pcie_width
    slow = best < SLOW_COPY * link
    value = f"{best / 1e9:.1f} GB/s to the card" + (f", the link carries {link / 1e9:.1f}" if link else "")
    fix = "another slot, or fewer programs on the memory; a virtual machine may not lock memory" if slow else ""
    cause = "locked memory is copied far below the link" if slow else ""
    return Check("gpu", "pinned memory", value, "warn" if slow else "ok", fix, cause)
