"""A Hugging Face model folder: `config.json`, weights as safetensors (one file or shards), tokenizer files.

Weights are memory-mapped and handed out as the file stores them. Names of shards come from a file and are not trusted:
a shard must lie in the folder itself. Pickled weights are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from strata_lab.models.checkpoint import check_tensors, plain_linear, plain_tensor
from strata_lab.models.errors import PICKLE_SUFFIXES, CheckpointError, refuse_pickle
from strata_lab.models.hf_config import read_config, read_json
from strata_lab.models.safetensors_io import SafetensorsFile, float_dtype
from strata_lab.quant.base import LinearWeight
from strata_lab.tokenizer import Tokenizer

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_FORMATS = {"F32": "fp32", "F16": "fp32", "BF16": "bf16"}


class HfFolderCheckpoint:
    """An open Hugging Face folder. Attributes and methods as `Checkpoint` says."""

    def __init__(self, folder: Path) -> None:
        _check_folder(folder)
        self.name = folder.resolve().name
        self.config, self.generation = read_config(folder)
        self._folder = folder
        self._files = [SafetensorsFile(path) for path in _weight_files(folder)]
        self._where = {name: file for file in self._files for name in file.shapes}
        shapes = {name: file.shapes[name] for name, file in self._where.items()}
        self._names = check_tensors(shapes, self.config, str(folder))
        for name in self._names:
            dtype = self._where[name].dtypes[name]
            if float_dtype(dtype) is None:
                raise CheckpointError(
                    f"{self._where[name].path}: tensor {name!r} has dtype {dtype}; supported are "
                    f"{', '.join(_FORMATS)}. Use an unquantized copy of the model"
                )
        self.stored_format = self._most_common_format()
        self._tokenizer: Tokenizer | None = None

    def _most_common_format(self) -> str:
        counts: dict[str, int] = {}
        for name in self._names:
            if name.endswith("_proj.weight"):
                dtype = self._where[name].dtypes[name]
                counts[_FORMATS[dtype]] = counts.get(_FORMATS[dtype], 0) + 1
        return max(counts, key=lambda f: counts[f])

    def names(self) -> list[str]:
        """Canonical names of all tensors."""
        return list(self._names)

    def linear(self, name: str) -> LinearWeight:
        """A matrix as the file stores it; float16 comes as fp32."""
        return plain_linear(self._file(name).get(name))

    def tensor(self, name: str) -> Tensor:
        """A norm, bias or router."""
        return plain_tensor(self._file(name).get(name))

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._where:
            raise CheckpointError(f"{self._folder}: there is no tensor {name!r}; names() lists what there is")
        return self._where[name]

    def tokenizer(self) -> Tokenizer | None:
        """Its tokenizer; None for a folder of weights alone."""
        if self._tokenizer is None and any((self._folder / file).is_file() for file in _TOKENIZER_FILES):
            self._tokenizer = Tokenizer.load(self._folder)
        return self._tokenizer

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files:
            file.close()


def _check_folder(folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    ggufs = sorted(folder.glob("*.gguf"))
    hint = f"give the file in it, {ggufs[0]}" if ggufs else "give the folder that holds config.json"
    raise CheckpointError(f"{folder} is not a Hugging Face model folder: config.json is missing; {hint}")


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file():
        return _shards(folder / _INDEX)
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    pickles = sorted(p for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise refuse_pickle(pickles[0])
    raise CheckpointError(f"{folder} has no weights: expected {_SINGLE} or {_INDEX}; the download may be incomplete")


def _shards(index: Path) -> list[Path]:
    weight_map: Any = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: 'weight_map' must map tensor names to files; fetch the file again")
    shards = []
    for name in dict.fromkeys(weight_map.values()):
        if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name or "\\" in name:
            raise CheckpointError(
                f"{index}: shard {name!r} must be the plain name of a .safetensors file beside the index; "
                "do not use this checkpoint, it may try to read other files"
            )
        shards.append(index.parent / name)
    missing = [path.name for path in shards if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{index.parent}: shard {missing[0]!r} is missing ({len(missing)} of {len(shards)} are); "
            "fetch the missing files"
        )
    return shards
