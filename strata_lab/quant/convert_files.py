"""The files of a conversion: layers written whole or not at all, and a journal of what is finished.

Formats of the files: `models/strata_folder.py`, which reads them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from strata_lab.models.base import WeightSource
from strata_lab.models.strata_folder import piece_rows
from strata_lab.quant.base import LinearWeight, concat_rows
from strata_lab.quant.overlay import Overlay

JOURNAL = "journal.json"
Values = dict[str, LinearWeight | Tensor]
Entries = dict[str, dict[str, Any]]  # canonical name -> line of the manifest, without the file

_MATRIX = re.compile(r"^(?P<owner>.*?)(\.experts\.(?P<expert>\d+))?\.(?P<part>\w+)_proj\.weight$")
_PIECES = {"q": ("qkv", 0), "k": ("qkv", 1), "v": ("qkv", 2), "gate": ("gate_up", 0), "up": ("gate_up", 1)}


def pieces(values: Values) -> Iterator[tuple[str, list[str]]]:
    """Matrices that lie in one piece, in the kernels' order: name of the piece, canonical names."""
    groups: dict[str, list[tuple[tuple[int, int], str]]] = {}
    for name, value in values.items():
        if isinstance(value, LinearWeight):
            piece, order = _place(name)
            groups.setdefault(piece, []).append((order, name))
    for piece, members in groups.items():
        names = [name for _, name in sorted(members)]
        if len({_kind(values[name]) for name in names}) == 1:
            yield piece, names
        else:
            yield from ((name, [name]) for name in names)


def _place(name: str) -> tuple[str, tuple[int, int]]:
    """The piece a matrix belongs to, and its order there."""
    match = _MATRIX.match(name)
    if match is None:
        return name, (0, 0)
    part, order = _PIECES.get(match["part"], (match["part"], 0))
    owner = match["owner"] + (".experts" if match["expert"] else "")
    return f"{owner}.{part}", (int(match["expert"] or 0), order)


def _kind(weight: LinearWeight | Tensor) -> tuple[Any, ...]:
    assert isinstance(weight, LinearWeight)
    return weight.format, weight.group_size, weight.mins is None, weight.shape[1]


def write_tensors(path: Path, values: Values) -> Entries:
    """One file of tensors, whole or not there; their lines of the manifest."""
    stored: dict[str, Tensor] = {}
    entries: Entries = {}
    for piece, names in pieces(values):
        weights = [values[name] for name in names]
        whole = concat_rows([w for w in weights if isinstance(w, LinearWeight)])
        for part in ("data", "scales", "mins"):
            tensor = getattr(whole, part)
            if tensor is not None:
                stored[f"{piece}.{part}"] = tensor.contiguous().cpu()
        start = 0
        for name in names:
            n, k = values[name].shape
            entries[name] = {
                "tensor": piece, "rows": [start, start + n], "shape": [n, k], "format": whole.format,
                "group_size": whole.group_size, "mins": whole.mins is not None,
            }  # fmt: skip
            start += n
    for name, value in values.items():
        if isinstance(value, Tensor):
            stored[name] = value.contiguous().cpu()
            entries[name] = {"tensor": name, "shape": list(value.shape)}
    unfinished = path.with_suffix(".part")
    save_file(stored, unfinished)
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.rename(path)
    return entries


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)


class Journal:
    """What an unfinished folder holds already.

    Attributes:
        layers: files of finished layers, in order, each with its lines of the manifest.
    """

    def __init__(self, folder: Path, key: dict[str, Any]) -> None:
        self._folder, self._key = folder, key
        self.layers: Entries = {}
        try:
            found = json.loads((folder / JOURNAL).read_text(encoding="utf-8"))
            if found["key"] == key and all((folder / file).is_file() for file in found["layers"]):
                self.layers = found["layers"]
        except (OSError, ValueError, KeyError, TypeError):
            pass
        if not self.layers:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)

    def finished(self, file: str, entries: Entries) -> None:
        """Note a layer."""
        self.layers[file] = entries
        replace_file(self._folder / JOURNAL, json.dumps({"key": self._key, "layers": self.layers}).encode())

    def entries(self, file: str) -> Entries:
        """A finished layer's lines of the manifest."""
        return {name: {"file": file} | entry for name, entry in self.layers[file].items()}

    def read(self, file: str) -> Callable[[WeightSource], Overlay]:
        """Puts the finished layer over a checkpoint."""

        def over(source: WeightSource) -> Overlay:
            overlay, folder = Overlay(source), _Stored(self._folder / file, self.layers[file])
            for name in self.layers[file]:
                overlay.replaced[name] = folder.value(name)
            return overlay

        return over


class _Stored:
    """Tensors of one written file."""

    def __init__(self, path: Path, entries: Entries) -> None:
        self._tensors, self._entries = load_file(path), entries

    def value(self, name: str) -> LinearWeight | Tensor:
        entry = self._entries[name]
        if "format" not in entry:
            return self._tensors[entry["tensor"]]
        parts = {part: self._tensors.get(f"{entry['tensor']}.{part}") for part in ("data", "scales", "mins")}
        found = {part: tensor for part, tensor in parts.items() if tensor is not None}
        return piece_rows(found, entry["format"], entry["shape"][1], entry["group_size"], entry["rows"])


def files_hash(files: Sequence[Path]) -> str:
    """SHA-256 over names and contents."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def precision(tensors: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Layer (or "model") to the formats of its matrices, as people write them."""
    found: dict[str, set[str]] = {}
    for name, entry in tensors.items():
        if "format" in entry:
            place = name.split(".")[2] if name.startswith("model.layers.") else "model"
            size = f"/group{entry['group_size']}" if entry["group_size"] else ""
            found.setdefault(place, set()).add(f"{entry['format']}{size}{'-asym' if entry['mins'] else ''}")
    return {place: sorted(formats) for place, formats in found.items()}
