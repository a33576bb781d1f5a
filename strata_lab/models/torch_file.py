"""Reads `pytorch_model.bin`: the tensors of a zip archive of torch.save, by torch's own restricted unpickler alone.

A pickle is a program. `torch.load(weights_only=True)` runs one that can build tensors and nothing else, and fails on
the rest; there is no other way in here and no setting that opens one. Before it, the archive is checked to be
uncompressed and as large as it says (a small file cannot unfold into a large one); after it, every value is checked to
be an ordinary tensor inside its own storage. The file is memory-mapped, so the old format that is no zip archive is not
read.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strata_lab.models.errors import CheckpointError, refuse_pickle
from strata_lab.models.safetensors_io import DTYPES, MAX_HEADER_BYTES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TorchFile:
    """One open, memory-mapped file.

    Attributes:
        path: the file.
        shapes: tensor name to shape.
        dtypes: tensor name to safetensors' name of the dtype; torch's own for one that safetensors lacks here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_archive(path)
        self._tensors: dict[str, Tensor] | None = _load(path)
        self.shapes = {name: tuple(t.shape) for name, t in self._tensors.items()}
        self.dtypes = {name: _NAMES.get(t.dtype, str(t.dtype)) for name, t in self._tensors.items()}

    def get(self, name: str) -> Tensor:
        """A tensor whose memory is the mapped file; a copy where the file keeps it as a view that is not contiguous."""
        if self._tensors is None:
            raise CheckpointError(f"{self.path} is closed; open the checkpoint again to read {name!r}")
        return self._tensors[name].contiguous()

    def close(self) -> None:
        """Let go of the file; tensors handed out keep their mapping."""
        self._tensors = None


def _check_archive(path: Path) -> None:
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except OSError:
        raise
    except Exception as error:  # the parser of a damaged archive fails in many ways
        raise refuse_pickle(path, f"it is no zip archive as torch.save writes since 1.6 ({error})") from error
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > size:
            raise refuse_pickle(path, f"its entry {entry.filename!r} is compressed or larger than the file")
        if entry.filename.endswith(".pkl") and entry.file_size > MAX_HEADER_BYTES:
            raise refuse_pickle(path, f"its entry {entry.filename!r} has {entry.file_size} bytes of at most "
                                f"{MAX_HEADER_BYTES}")  # fmt: skip


def _load(path: Path) -> dict[str, Tensor]:
    try:
        content: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a hostile pickle picks its exception
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise refuse_pickle(path, f"torch's weights_only reader refuses it ({first[:200]})") from error
    if not isinstance(content, dict) or not content:
        raise refuse_pickle(path, f"it holds a {type(content).__name__}, not tensors by name")
    tensors = {}
    for name, value in content.items():
        if not isinstance(name, str) or not _is_plain(value):
            raise refuse_pickle(
                path, f"its entry {str(name)[:100]!r} is a {type(value).__name__} that is no plain tensor"
            )
        tensors[name] = value.detach()
    return tensors


def _is_plain(value: Any) -> bool:
    """Whether it is an ordinary dense tensor in memory that it owns."""
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.is_nested:
        return False
    if value.device.type != "cpu" or value.is_quantized or value.is_conj() or value.is_neg():
        return False
    if value.numel() == 0:
        return True
    last = value.storage_offset() + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    return (last + 1) * value.element_size() <= value.untyped_storage().nbytes()
