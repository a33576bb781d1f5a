"""A Hugging Face model folder: `config.json`, weight files (`tensor_files.py`), tokenizer files.

Weights are memory-mapped and handed out as the file stores them: plain ones as they are, quantized ones (GPTQ, AWQ,
FP8, compressed-tensors) with the codes that the file holds, by the reader that `published.py` picks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from strata_lab.models.checkpoint import check_tensors, plain_linear, plain_tensor
from strata_lab.models.errors import CheckpointError
from strata_lab.models.hf_config import read_config
from strata_lab.models.packed import Notes
from strata_lab.models.published import open_reader
from strata_lab.models.safetensors_io import float_dtype
from strata_lab.models.tensor_files import TensorFiles, weight_files
from strata_lab.quant.base import LinearWeight
from strata_lab.tokenizer import Tokenizer

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_FORMATS = {"F32": "fp32", "F16": "fp32", "BF16": "bf16"}
_USED_BIASES = ("q_proj.bias", "k_proj.bias", "v_proj.bias")


class HfFolderCheckpoint:
    """An open Hugging Face folder. Attributes and methods as `Checkpoint` says."""

    def __init__(self, folder: Path) -> None:
        _check_folder(folder)
        self.name = folder.resolve().name
        self.config, self.generation = read_config(folder)
        self._folder = folder
        self._notes = Notes()
        self._tokenizer: Tokenizer | None = None
        self._files = TensorFiles(weight_files(folder))
        try:
            self._reader = open_reader(folder, self._files)
            self._names = check_tensors(self._shapes(), self.config, str(folder))
            self._check_plain()
            self.stored_format = self._most_common_format()
        except BaseException:
            self._files.close()
            raise

    @property
    def _quantized(self) -> Mapping[str, tuple[int, int]]:
        return self._reader.shapes if self._reader is not None else {}

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name to shape."""
        claimed = self._reader.claimed if self._reader is not None else set()
        plain = {name: shape for name, shape in self._files.shapes.items() if name not in claimed}
        return {name: s for name, s in plain.items() if not self._is_idle_bias(name)} | dict(self._quantized)

    def _is_idle_bias(self, name: str) -> bool:
        """Whether it is a bias of zeros that a quantizer gave to a matrix without one (AutoGPTQ does)."""
        if not name.endswith(".bias") or f"{name.removesuffix('.bias')}.weight" not in self._quantized:
            return False
        if self.config.attention_bias and name.endswith(_USED_BIASES):
            return False
        return not bool(self._files.get(name).any())

    def _check_plain(self) -> None:
        for name in self._names:
            if name not in self._quantized and float_dtype(self._files.dtypes[name]) is None:
                raise CheckpointError(
                    f"{self._files.where(name)}: tensor {name!r} has dtype {self._files.dtypes[name]}; supported are "
                    f"{', '.join(_FORMATS)}. Use an unquantized copy of the model, or one whose config.json says in "
                    "quantization_config how it was quantized"
                )

    def _most_common_format(self) -> str:
        counts: dict[str, int] = {}
        for name in self._names:
            if not name.endswith("_proj.weight"):
                continue
            if self._reader is not None and name in self._reader.shapes:
                stored = self._reader.stored_format
            else:
                stored = _FORMATS[self._files.dtypes[name]]
            counts[stored] = counts.get(stored, 0) + 1
        return max(counts, key=lambda f: counts[f])

    def names(self) -> list[str]:
        """Canonical names of all tensors."""
        return list(self._names)

    def linear(self, name: str) -> LinearWeight:
        """A matrix as the file stores it; float16 comes as fp32."""
        if self._reader is not None and name in self._reader.shapes:
            return self._reader.linear(name, self._notes)
        return plain_linear(self._files.get(name))

    def tensor(self, name: str) -> Tensor:
        """A norm, bias or router."""
        return plain_tensor(self._files.get(name))

    def notes(self) -> list[str]:
        """What was read otherwise than stored."""
        return self._notes.lines()

    def tokenizer(self) -> Tokenizer | None:
        """Its tokenizer; None for a folder of weights alone."""
        if self._tokenizer is None and any((self._folder / file).is_file() for file in _TOKENIZER_FILES):
            self._tokenizer = Tokenizer.load(self._folder)
        return self._tokenizer

    def close(self) -> None:
        """Let go of the files."""
        self._files.close()


def _check_folder(folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    ggufs = sorted(folder.glob("*.gguf"))
    hint = f"give the file in it, {ggufs[0]}" if ggufs else "give the folder that holds config.json"
    raise CheckpointError(f"{folder} is not a Hugging Face model folder: config.json is missing; {hint}")
