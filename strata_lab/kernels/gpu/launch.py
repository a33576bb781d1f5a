"""What all Triton kernels share: which card this is, and how a kernel waits for the one before it.

Programmatic dependent launch (PDL, compute capability 9.0 on): a kernel may start while its predecessor still runs,
load weights, which nobody writes, and then `wait` for the predecessor's results. The rule in this package:

    load what no kernel of the step writes -> wait(PDL) -> trigger(PDL) -> read, compute, store

`trigger` lets the successor start. A LATE kernel triggers after its own `wait`: what its successor reads before waiting
may be results of everything but the LATE kernel itself. An EARLY kernel triggers before it waits (`wait` does both), so
that its successors' weights are on their way as well; of what ran between the latest LATE kernel and them, successors
may read nothing before their `wait`. Every step has LATE kernels: the embedding, and in a layer with experts the one
that reads their weights. On other cards and in the interpreter all this is nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

INTERPRETED = bool(triton.knobs.runtime.interpret)
PDL_CAPABILITY = (9, 0)
MEASURED_CAPABILITY = (9, 0)  # of the card that limits of registers were measured on
MIN_COUNTERS = 1 << 16
LATE, EARLY = tl.constexpr(1), tl.constexpr(2)  # values of `PDL`; 0 is without
REFERENCE_SMS = 132  # of an H200, for compiling ahead of time
INTERPRETED_SMS = 4  # keeps grids small where a program costs milliseconds


@triton.jit
def wait(PDL: tl.constexpr):
    """Block until the kernel before this one has finished and its stores are visible."""
    if PDL == EARLY:
        cuda.gdc_launch_dependents()
    if PDL != 0:
        cuda.gdc_wait()


@triton.jit
def trigger(PDL: tl.constexpr):
    """Allow the kernel after this one to start, once every program of this one has said so; EARLY ones have."""
    if PDL == LATE:
        cuda.gdc_launch_dependents()


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Whether kernels on this device can be launched with `launch_pdl=True`."""
    return device.type == "cuda" and not INTERPRETED and torch.cuda.get_device_capability(device) >= PDL_CAPABILITY


@functools.cache
def has_measured_limits(device: torch.device) -> bool:
    """Whether limits of a kernel's registers hold here: for other cards the compiler needs more, and would spill.

    For a `meta` device yes; `aot.py` knows what it compiles for.
    """
    if device.type == "meta":
        return True
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == MEASURED_CAPABILITY


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of the device."""
    if device.type != "cuda":
        return INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


_counters: dict[tuple[torch.device, int], list[Tensor]] = {}


def counters(device: torch.device, count: int) -> Tensor:
    """Zeros that count arrivals and that every kernel leaves as zeros; one set per stream, where kernels take turns.

    Old ones stay alive: captures hold their addresses. A capture must come after a run on the same stream.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    kept = _counters.setdefault((device, stream), [])
    if not kept or kept[-1].numel() < count:
        assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "run the step once before capture"
        kept.append(torch.zeros(max(count, MIN_COUNTERS), dtype=torch.int32, device=device))
    return kept[-1]


def options(device: torch.device, *, num_warps: int = 4, num_stages: int = 3, early: bool = False) -> dict[str, Any]:
    """Keyword arguments of a launch: `PDL` for the kernel and what the launcher needs to honour it."""
    sizes = {"num_warps": num_warps, "num_stages": num_stages}
    if not has_pdl(device):
        return {"PDL": 0} | sizes
    return {"PDL": EARLY.value if early else LATE.value, "launch_pdl": True} | sizes


def dot_dtype(x: torch.dtype) -> Any:
    """What operands of `tl.dot` are cast to for activations of dtype `x`, a constexpr.

    The interpreter multiplies bfloat16 wrongly, so there it is always float32.
    """
    return tl.float32 if INTERPRETED or x == torch.float32 else {torch.float16: tl.float16}.get(x, tl.bfloat16)
