"""Which reader serves a `quantization_config`. A new published quantization is one file and one line here."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from strata_lab.models.errors import CheckpointError
from strata_lab.models.hf_config import read_json
from strata_lab.models.quant_parts import QuantReader, Settings, Tensors

READERS = {
    "awq": "strata_lab.models.awq:AwqReader",
    "compressed-tensors": "strata_lab.models.compressed_tensors:CompressedTensorsReader",
    "fp8": "strata_lab.models.fp8_block:Fp8Reader",
    "gptq": "strata_lab.models.gptq:GptqReader",
}
_KEYS = ("quantization_config", "compression_config")  # the second in early files of compressed-tensors


def open_reader(folder: Path, tensors: Tensors) -> QuantReader | None:
    """The reader of a folder's quantized modules; None where its `config.json` names no quantization.

    Raises `CheckpointError` for an unknown method, for settings that are not supported and for tensors that do not fit
    them.
    """
    path = folder / "config.json"
    config = read_json(path)
    settings = next((config[key] for key in _KEYS if config.get(key) is not None), None)
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path}: quantization_config={settings!r} must be an object; fetch config.json again")
    method: Any = settings.get("quant_method")
    name = method.replace("_", "-").lower() if isinstance(method, str) else method
    if not isinstance(name, str) or name not in READERS:
        raise CheckpointError(
            f"{path}: the quantization method {method!r} is not supported; supported are {', '.join(READERS)}. Use a "
            "copy of the model in one of these, or an unquantized one"
        )
    module, reader = READERS[name].split(":")
    return getattr(importlib.import_module(module), reader)(tensors, Settings(path, settings))
