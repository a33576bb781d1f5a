"""strata_lab: a workbench around a small, fast LLM decode engine.

Only names live here, and each loads its module when it is first asked for, so `import strata_lab` is instant and pulls
in no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata_lab.config import EngineConfig, Optimizations
    from strata_lab.engine import LLMEngine
    from strata_lab.sampling_params import SamplingParams
    from strata_lab.structured_outputs import StructuredOutputs

__version__ = "0.1.0"
__all__ = ["EngineConfig", "LLMEngine", "Optimizations", "SamplingParams", "StructuredOutputs", "__version__"]

_HOMES = {
    "EngineConfig": "strata_lab.config",
    "LLMEngine": "strata_lab.engine",
    "Optimizations": "strata_lab.config",
    "SamplingParams": "strata_lab.sampling_params",
    "StructuredOutputs": "strata_lab.structured_outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
