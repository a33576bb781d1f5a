"""The weight files of a Hugging Face folder as one set of raw tensors, whichever way they are cut and stored.

Safetensors files come first; a folder that has only `pytorch_model.bin` files is read through `torch_file.py`. Names of
shards come from a file and are not trusted: a shard must lie in the folder itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from strata_lab.models.errors import PICKLE_SUFFIXES, CheckpointError, refuse_pickle
from strata_lab.models.hf_config import read_json
from strata_lab.models.safetensors_io import SafetensorsFile
from strata_lab.models.torch_file import TorchFile

_SINGLE = "model.safetensors"
_PICKLED = "pytorch_model.bin"


class TensorFile(Protocol):
    """One open file.

    Attributes:
        path: the file.
        shapes: tensor name to shape.
        dtypes: tensor name to safetensors' name of the dtype ("BF16").
    """

    path: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]

    def get(self, name: str) -> Tensor:
        """A tensor whose memory is the mapped file."""
        ...

    def close(self) -> None:
        """Let go of the file; tensors handed out stay valid."""
        ...


class TensorFiles:
    """All tensors of some files.

    Attributes:
        shapes: tensor name to shape.
        dtypes: tensor name to safetensors' name of the dtype.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: list[TensorFile] = []
        self._where: dict[str, TensorFile] = {}
        try:
            for path in paths:
                self._add(SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path))
        except BaseException:
            self.close()
            raise
        self.shapes = {name: file.shapes[name] for name, file in self._where.items()}
        self.dtypes = {name: file.dtypes[name] for name, file in self._where.items()}
        self._folder = paths[0].parent

    def _add(self, file: TensorFile) -> None:
        self._files.append(file)
        for name in file.shapes:
            if name in self._where:
                raise CheckpointError(
                    f"{file.path}: tensor {name!r} is in {self._where[name].path.name} too; a name must be in one "
                    "file: fetch the model again"
                )
            self._where[name] = file

    def get(self, name: str) -> Tensor:
        """The tensor as stored; its memory is the mapped file."""
        if name not in self._where:
            raise CheckpointError(f"{self._folder}: there is no tensor {name!r}; names() lists what there is")
        return self._where[name].get(name)

    def where(self, name: str) -> Path:
        """The file that holds a tensor, the folder for an unknown one; for messages."""
        return self._where[name].path if name in self._where else self._folder

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files:
            file.close()


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder; `CheckpointError` where there are none, or only files that are not read."""
    for single in (_SINGLE, _PICKLED):
        index = folder / f"{single}.index.json"
        if index.is_file():
            return _shards(index, Path(single).suffix)
        if (folder / single).is_file():
            return [folder / single]
    pickles = sorted(p for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise refuse_pickle(pickles[0])
    raise CheckpointError(
        f"{folder} has no weights: expected {_SINGLE}, {_PICKLED} or the index of one ({_SINGLE}.index.json); "
        "the download may be incomplete"
    )


def _shards(index: Path, suffix: str) -> list[Path]:
    weight_map: Any = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: 'weight_map' must map tensor names to files; fetch the file again")
    names = list(weight_map.values())
    for name in names:
        if not isinstance(name, str) or not name.endswith(suffix) or Path(name).name != name or "\\" in name:
            raise CheckpointError(
                f"{index}: shard {name!r} must be the plain name of a {suffix} file beside the index; "
                "do not use this checkpoint, it may try to read other files"
            )
    shards = [index.parent / name for name in dict.fromkeys(names)]
    missing = [path.name for path in shards if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{index.parent}: shard {missing[0]!r} is missing ({len(missing)} of {len(shards)} are); "
            "fetch the missing files"
        )
    return shards
