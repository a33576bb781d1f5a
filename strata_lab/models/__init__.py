"""The model families, by the name in `ModelConfig.architecture`. A new family is one file and one line here."""

from __future__ import annotations

import importlib
from typing import Any

from strata_lab.settings import ConfigError

FAMILIES = {
    "llama": "strata_lab.models.llama",
    "qwen2": "strata_lab.models.qwen2",
    "qwen3": "strata_lab.models.qwen3",
    "qwen3_moe": "strata_lab.models.qwen3_moe",
}


def get_family(architecture: str) -> Any:
    """The module of a family (it satisfies `models.base.Family`), or `ConfigError` naming those that exist."""
    if architecture not in FAMILIES:
        raise ConfigError(f"architecture {architecture!r} is not supported; supported are {', '.join(FAMILIES)}")
    return importlib.import_module(FAMILIES[architecture])
