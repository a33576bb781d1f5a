"""Whether this machine can run the fast operators for a model, and if not, why. Nothing here records or chooses."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from strata_lab.model_config import ModelConfig
from strata_lab.quant.base import PANEL_ROWS

MIN_CAPABILITY = (8, 9)  # the first with float8 conversions in hardware


def why_no_cpu_kernels(c: ModelConfig, progress: Callable[[str, float], None]) -> str:
    """Why the C++ operators cannot serve a model here; empty if they can. They are compiled if need be."""
    from strata_lab.kernels.cpu.build import CpuKernelsUnavailable, load

    rows = (c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size, c.hidden_size)
    if any(n % PANEL_ROWS for n in rows):
        return f"a matrix of this model has a row count that is no multiple of {PANEL_ROWS}; plain torch runs"
    try:
        progress("building CPU kernels", 0.0)
        load()
        progress("building CPU kernels", 1.0)
    except CpuKernelsUnavailable as error:
        return f"{error}; plain torch runs, slower"
    return ""


def why_no_gpu_kernels(device: torch.device) -> str:
    """Why the Triton operators cannot run on a CUDA device; empty if they can."""
    capability = torch.cuda.get_device_capability(device)
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton); plain torch runs, slower"
    if capability < MIN_CAPABILITY:
        needed = ".".join(map(str, MIN_CAPABILITY))
        return f"compute capability {capability[0]}.{capability[1]} is below {needed}; plain torch runs, slower"
    return ""
