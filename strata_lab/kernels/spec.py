"""What an operator promises: its reference, its implementations, its cases and its cost.

Which functions implement an operator is said once, in `kernels.OPERATORS`. A `KernelSpec` feeds the tests (every
implementation against the reference on every case), the roofline benchmark and the kernel-lab notebook, so a new
operator is tested and measured by existing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """One set of inputs.

    Attributes:
        name: what is special about it, for the test id.
        make: device -> keyword arguments of the operator; seeded, fresh tensors on every call.
    """

    name: str
    make: Callable[[torch.device], dict[str, Any]]


@dataclass(frozen=True)
class KernelSpec:
    """Contract of one operator.

    Attributes:
        name: the operator's name in `ops`.
        ref: plain torch, float32 accumulation, obviously right; the specification.
        cases: small inputs, odd sizes included.
        tolerance: dtype to (rtol, atol) against the reference in float64 (or float32 where the contract says so).
        bytes_moved: keyword arguments -> bytes that must cross the memory bus.
        flops: keyword arguments -> floating-point operations.
    """

    name: str
    ref: Callable[..., Any]
    cases: Callable[[], Iterable[Case]]
    tolerance: Mapping[torch.dtype, tuple[float, float]]
    bytes_moved: Callable[..., int]
    flops: Callable[..., int]
