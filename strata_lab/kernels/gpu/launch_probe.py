"""A kernel that does nothing, to measure what a launch costs (`telemetry/ceilings.py`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata_lab.kernels.gpu.launch import options, trigger, wait

PROGRAMS = 132  # about one for each multiprocessor, as small products have


@triton.jit
def _nothing_kernel(x, PDL: tl.constexpr):
    wait(PDL)
    trigger(PDL)
    if tl.program_id(0) < 0:  # never, but the compiler does not know
        tl.store(x, 1)


def nothing(device: torch.device, *, dependent: bool) -> Callable[[], object]:
    """A launch of `PROGRAMS` empty programs; `dependent` asks for programmatic dependent launch where there is one."""
    x: Tensor = torch.zeros(1, dtype=torch.int32, device=device)
    launch = options(device, num_warps=4) if dependent else {"PDL": False, "num_warps": 4}
    return partial(_nothing_kernel[(PROGRAMS,)], x, **launch)
