"""A checkpoint that `strata convert` wrote: `manifest.json`, safetensors files, tokenizer files.

The manifest says for every canonical tensor in which file it lies, under which name, in which rows and in which number
format. Matrices that the kernels read as one (q, k and v; gate and up; all experts of a layer) lie in one piece, in the
kernels' order, so that loading copies nothing. The manifest is written last: a folder without one is not finished.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from strata_lab.model_config import ModelConfig
from strata_lab.models import FAMILIES
from strata_lab.models.checkpoint import check_tensors, is_linear, plain_tensor
from strata_lab.models.draft_part import EMBEDDING, DraftPart
from strata_lab.models.errors import CheckpointError
from strata_lab.models.hf_config import FLOAT64_MAX, ROPE_RULES
from strata_lab.models.safetensors_io import SafetensorsFile
from strata_lab.quant import FORMATS
from strata_lab.quant.base import LinearWeight
from strata_lab.tokenizer import Tokenizer

MANIFEST = "manifest.json"
VERSION = 1
GROUP_SIZES = (0, 32, 64, 128)
DATA = {"fp32": "F32", "bf16": "BF16", "fp8": "F8_E4M3", "int8": "I8", "int4": "U8"}
_AGAIN = "convert the model again"


class StrataCheckpoint:
    """An open folder. Attributes and methods as `Checkpoint` says.

    Attributes:
        manifest: all that `manifest.json` says.
        kv_scales: (k, v) scale of each layer's cache; None where the model was not calibrated.
        draft: whose draft it is; None for a model.
    """

    def __init__(self, folder: Path) -> None:
        self.name = folder.resolve().name
        self._folder = folder
        self._path = folder / MANIFEST
        self.manifest = _read_manifest(self._path)
        try:
            self.config = _config(self.manifest["config"])
            self.stored_format: str = self.manifest["stored_format"]
            if self.stored_format not in FORMATS:
                raise ValueError(f"stored_format={self.stored_format!r}")
            self.generation: dict[str, Any] = dict(self.manifest["generation"])
            self._entries = {name: _Entry(self._path, name, entry) for name, entry in self.manifest["tensors"].items()}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self._path} is damaged ({error!r}); {_AGAIN}") from error
        self.kv_scales = _kv_scales(self._path, self.manifest.get("kv_scales"), self.config.num_layers)
        self.draft = DraftPart.read(self._path, self.manifest.get("draft"), self.config.vocab_size)
        shapes = {name: e.shape for name, e in self._entries.items()}
        if self.draft is None:
            check_tensors(shapes, self.config, str(folder))
        else:
            own = self.draft.own_tensors(self.config.hidden_size)
            check_tensors(shapes, self.config, str(folder), elsewhere=(EMBEDDING,), more=own)
        self._files: dict[str, SafetensorsFile] = {}
        self._tokenizer: Tokenizer | None = None
        try:
            for entry in self._entries.values():
                self._check(entry)
        except BaseException:
            self.close()
            raise

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._files:
            path = self._folder / name
            if not path.is_file():
                raise CheckpointError(f"{path} is missing, but {MANIFEST} names it; copy the folder again")
            self._files[name] = SafetensorsFile(path)
        return self._files[name]

    def _check(self, entry: _Entry) -> None:
        """Whether the entry's tensors are in its file and can hold its rows."""
        file = self._file(entry.file)
        for part in entry.parts:
            shape = file.shapes.get(part)
            if shape is None:
                raise CheckpointError(f"{file.path}: tensor {part!r} is missing, but {MANIFEST} names it; {_AGAIN}")
            if entry.format:
                dtype, columns = entry.expected(part.rpartition(".")[2])
                if len(shape) != 2 or shape[0] < entry.rows[1] or shape[1] != columns or file.dtypes[part] != dtype:
                    raise CheckpointError(
                        f"{file.path}: tensor {part!r} is {file.dtypes[part]} {list(shape)}, but {MANIFEST} takes rows "
                        f"{entry.rows[0]} to {entry.rows[1]} of {dtype} with {columns} columns; {_AGAIN}"
                    )
            elif tuple(shape) != entry.shape or file.dtypes[part] not in ("F32", "F16", "BF16"):
                raise CheckpointError(
                    f"{file.path}: tensor {part!r} is {file.dtypes[part]} {list(shape)}, but {MANIFEST} says a float "
                    f"of {list(entry.shape)}; {_AGAIN}"
                )

    def names(self) -> list[str]:
        """Canonical names of all tensors."""
        return list(self._entries)

    def linear(self, name: str) -> LinearWeight:
        """A matrix as stored: rows of the piece it lies in."""
        entry = self._entry(name)
        file = self._file(entry.file)
        tensors = {part.rpartition(".")[2]: file.get(part) for part in entry.parts}
        return piece_rows(tensors, entry.format, entry.shape[1], entry.group_size, entry.rows)

    def tensor(self, name: str) -> Tensor:
        """A norm, bias or router."""
        entry = self._entry(name)
        return plain_tensor(self._file(entry.file).get(entry.parts[0]))

    def _entry(self, name: str) -> _Entry:
        if name == EMBEDDING and self.draft is not None:
            raise CheckpointError(
                f"{self._folder} is a draft for {self.draft.target} and no model of its own; give it as draft_model, "
                f"with model={self.draft.target!r} and speculative='draft'"
            )
        if name not in self._entries:
            raise CheckpointError(f"{self._folder}: there is no tensor {name!r}; names() lists what there is")
        return self._entries[name]

    def notes(self) -> list[str]:
        """Nothing is read otherwise than stored."""
        return []

    def tokenizer(self) -> Tokenizer | None:
        """The source's tokenizer; None where it had none."""
        if self._tokenizer is None and (self._folder / "tokenizer.json").is_file():
            self._tokenizer = Tokenizer.load(self._folder)
        return self._tokenizer

    def close(self) -> None:
        """Let go of the files; tensors handed out stay valid."""
        for file in self._files.values():
            file.close()


def piece_rows(
    parts: Mapping[str, Tensor], weight_format: str, columns: int, group_size: int, rows: Sequence[int]
) -> LinearWeight:
    """Rows of a piece, from first to end, of its "data", "scales" and "mins"."""
    data = parts["data"]
    shape = (data.shape[0], columns)
    whole = LinearWeight(weight_format, shape, data, parts.get("scales"), parts.get("mins"), group_size=group_size)
    return whole.rows(rows[0], rows[1])


class _Entry:
    """One tensor's line of the manifest, checked: `CheckpointError` or `KeyError`/`TypeError` where it is none.

    Attributes:
        file, parts: the file, and the keys of data, scales and minima in it.
        shape: of the tensor.
        format: "" for a plain tensor.
        rows: first and end, of the piece.
        group_size: as in `LinearWeight`.
    """

    def __init__(self, manifest: Path, name: str, entry: dict[str, Any]) -> None:
        self.file: str = entry["file"]
        if not isinstance(self.file, str) or Path(self.file).name != self.file or "\\" in self.file:
            raise CheckpointError(
                f"{manifest}: file {self.file!r} of {name!r} must be the plain name of a file beside it; do not use "
                "this checkpoint, it may try to read other files"
            )
        self.shape = tuple(int(n) for n in entry["shape"])
        self.format: str = entry.get("format", "") if is_linear(name) else ""
        stored = str(entry["tensor"])
        if not self.format:
            if is_linear(name):
                raise CheckpointError(f"{manifest}: {name!r} has no format; {_AGAIN}")
            self.parts: tuple[str, ...] = (stored,)
            return
        start, stop = (int(n) for n in entry["rows"])
        self.rows, self.group_size = (start, stop), int(entry["group_size"])
        if self.format not in FORMATS:
            raise CheckpointError(f"{manifest}: format {self.format!r} of {name!r} must be one of {', '.join(FORMATS)}")
        if not 0 <= start < stop or stop - start != self.shape[0] or self.group_size not in GROUP_SIZES:
            raise CheckpointError(
                f"{manifest}: {name!r} of shape {list(self.shape)} cannot be rows {start} to {stop} in groups of "
                f"{self.group_size}; {_AGAIN}"
            )
        scaled = self.format in ("fp8", "int8", "int4")
        self.parts = (f"{stored}.data", *([f"{stored}.scales"] if scaled else []))
        self.parts += (f"{stored}.mins",) if entry.get("mins") else ()

    def expected(self, part: str) -> tuple[str, int]:
        """Dtype and columns of "data", "scales" or "mins"."""
        k = self.shape[1]
        if part == "data":
            return DATA[self.format], -(-k // 32) * 16 if self.format == "int4" else k
        wide = self.format == "fp8" or self.group_size == 0
        return "F32" if wide else "F16", -(-k // self.group_size) if self.group_size else 1


def _config(found: dict[str, Any]) -> ModelConfig:
    """The geometry; `ValueError`, `TypeError` or `KeyError` for one that no conversion writes."""
    config = ModelConfig(**dict(found) | {"eos_token_ids": tuple(found["eos_token_ids"])})
    wrong = {f.name: getattr(config, f.name) for f in fields(config) if not _is_a(getattr(config, f.name), str(f.type))}
    if config.architecture not in FAMILIES:
        wrong["architecture"] = config.architecture
    if not all(0 < number <= FLOAT64_MAX for number in (config.rope_theta, config.rms_norm_eps)):
        wrong |= {"rope_theta": config.rope_theta, "rms_norm_eps": config.rms_norm_eps}
    if config.num_experts < 0 or not all(_is_a(i, "int") for i in config.eos_token_ids):
        wrong |= {"num_experts": config.num_experts, "eos_token_ids": config.eos_token_ids}
    if config.rope_scaling is not None:
        rule = dict(config.rope_scaling)
        keys = ROPE_RULES[rule.pop("rope_type")]
        if set(rule) != set(keys) or not all(_is_a(n, "float") and 0 < n <= FLOAT64_MAX for n in rule.values()):
            wrong["rope_scaling"] = config.rope_scaling
    if wrong:
        raise ValueError(f"the config cannot have {wrong}")
    return replace(config, rope_theta=float(config.rope_theta), rms_norm_eps=float(config.rms_norm_eps))


def _is_a(value: Any, kind: str) -> bool:
    """Whether a value is what a field of `ModelConfig` is annotated with; fields of other kinds are looked at apart."""
    kinds: dict[str, tuple[type, ...]] = {
        "str": (str,), "int": (int,), "bool": (bool,), "float": (int, float), "int | None": (int, type(None)),
    }  # fmt: skip
    return kind not in kinds or type(value) in kinds[kind]  # type(), because True is an int to isinstance


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        version = found["strata_checkpoint"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not the manifest of a converted model ({error!r}); {_AGAIN}") from error
    if version != VERSION:
        raise CheckpointError(f"{path} is of version {version!r}, this release reads {VERSION}; {_AGAIN} with it")
    return dict(found)


def _kv_scales(path: Path, found: Any, layers: int) -> list[tuple[float, float]] | None:
    if found is None:
        return None
    try:
        scales = [(float(k), float(v)) for k, v in found]
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path}: kv_scales must be a pair of numbers for each layer; {_AGAIN}") from error
    if len(scales) != layers or not all(0 < s < float("inf") for pair in scales for s in pair):
        raise CheckpointError(f"{path}: kv_scales must be {layers} pairs of positive numbers; {_AGAIN}")
    return scales
