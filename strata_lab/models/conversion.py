"""Keeps a parsed GGUF file in the user's cache folder, in a form that opens in milliseconds.

Parsing a GGUF's token lists takes seconds, and its blocks mix codes with scales; both are done once. The converted
folder holds `model.safetensors` (codes, scales and minimums as separate tensors, memory-mapped when used; K types stay
blocks), `config.json` and the tokenizer. It is written beside its final place and moved there in one rename, so a
reader sees a whole folder or none, and of two processes that convert at the same time the slower one drops its copy.
The key covers the file's size, time, first and last megabyte and the version of this format: a changed file is
converted anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strata_lab.model_config import ModelConfig
from strata_lab.models.checkpoint import check_tensors, is_linear, plain_linear, plain_tensor
from strata_lab.models.errors import CheckpointError
from strata_lab.models.gguf_tensor import GROUP, K_TYPES
from strata_lab.models.packed import Notes
from strata_lab.models.safetensors_io import SafetensorsFile, TensorPart, write_safetensors
from strata_lab.quant.base import LinearWeight
from strata_lab.tokenizer import Tokenizer

FORMAT_VERSION = 2
_SAMPLE_BYTES = 1 << 20
_ABANDONED_S = 86_400.0  # a half-written folder older than a day belongs to no living process
_EXPERT = re.compile(r"\.experts\.(\d+)\.")

logger = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """Where converted checkpoints are kept; safe to delete at any time."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("strata_lab")) / "checkpoints"


def open_gguf(path: Path, name: str | None = None, cache_dir: Path | None = None) -> ConvertedCheckpoint:
    """Open a GGUF file through its converted form, converting it first where there is none.

    A damaged converted folder is thrown away and made again. Where the cache folder cannot be written, the conversion
    lasts as long as the checkpoint is open, and a warning says so. Raises `CheckpointError` for a bad file.
    """
    root = cache_dir or default_cache_dir()
    folder = root / cache_key(path)
    name = name or path.stem
    if folder.is_dir():
        try:
            return ConvertedCheckpoint(folder, name)
        except (CheckpointError, OSError, ValueError, KeyError) as error:
            logger.warning("the converted checkpoint %s is damaged (%s); converting again", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
    try:
        root.mkdir(parents=True, exist_ok=True)
        work = root / f".tmp-{os.getpid()}-{uuid.uuid4().hex}"
        work.mkdir()
    except OSError as error:
        logger.warning(
            "cannot write the cache folder %s (%s); %s is converted for this session only", root, error, path
        )
        scratch = tempfile.TemporaryDirectory(prefix="strata_lab-")
        convert(path, Path(scratch.name))
        return ConvertedCheckpoint(Path(scratch.name), name, scratch)
    _remove_abandoned(root)
    try:
        convert(path, work)
        _move_into_place(work, folder)
    except OSError as error:
        needed = path.stat().st_size // 1_000_000
        raise CheckpointError(
            f"{path} cannot be converted into the cache folder {root}: {error}; it needs about {needed} MB there"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return ConvertedCheckpoint(folder, name)


def cache_key(path: Path) -> str:
    """Name of the converted folder of this file as it is now."""
    stat = path.stat()
    digest = hashlib.sha256(f"{FORMAT_VERSION} {stat.st_size} {stat.st_mtime_ns} ".encode())
    with path.open("rb") as file:
        digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, stat.st_size - _SAMPLE_BYTES))
        digest.update(file.read(_SAMPLE_BYTES))
    stem = re.sub(r"[^\w.-]", "_", path.stem)[:60]
    return f"{stem}-{digest.hexdigest()[:24]}"


def convert(path: Path, folder: Path) -> None:
    """Parse a GGUF file and write its converted form into an existing, empty folder."""
    from strata_lab.models.gguf_file import GgufFile  # the parser is slow to import and needed once per file
    from strata_lab.models.gguf_tokenizer import read_tokenizer

    gguf = GgufFile(path)
    check_tensors(gguf.shapes(), gguf.config, str(path))
    manifest: dict[str, Any] = {}
    parts: list[TensorPart] = []
    for name, tensor in gguf.weights.items():
        if tensor.quantized and not is_linear(name):
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} is {tensor.kind}; norms, biases and routers must be "
                "F32, F16 or BF16. Use another file of the model"
            )
        new = tensor.parts(name)
        entry = {"format": tensor.format, "shape": tensor.shape, "kind": tensor.kind, "parts": [p.name for p in new]}
        manifest[name] = entry
        parts += new
    tokenizer = read_tokenizer(gguf)
    if tokenizer is not None:
        tokenizer.save(folder)
    write_safetensors(folder / "model.safetensors", parts)
    config = dataclasses.asdict(gguf.config)
    meta = {"config": config, "stored_format": gguf.stored_format(), "tensors": manifest}
    (folder / "config.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


def _move_into_place(work: Path, folder: Path) -> None:
    for path in work.iterdir():  # the rename must not reach the disk before the contents do
        with path.open("rb") as file:
            os.fsync(file.fileno())
    try:
        work.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was faster, and its copy is as good as ours
            raise


def _remove_abandoned(root: Path) -> None:
    for left in root.glob(".tmp-*"):
        try:
            old = time.time() - left.stat().st_mtime > _ABANDONED_S
        except OSError:
            continue
        if old:
            shutil.rmtree(left, ignore_errors=True)


class ConvertedCheckpoint:
    """A converted folder, opened. Attributes and methods as `Checkpoint` says."""

    def __init__(self, folder: Path, name: str, scratch: tempfile.TemporaryDirectory[str] | None = None) -> None:
        meta = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = meta["config"] | {"eos_token_ids": tuple(meta["config"]["eos_token_ids"])}
        self.name = name
        self.config = ModelConfig(**config)
        self.stored_format: str = meta["stored_format"]
        self.generation: dict[str, Any] = {"eos_token_ids": list(self.config.eos_token_ids)}
        self._folder = folder
        self._scratch = scratch
        self._manifest: dict[str, dict[str, Any]] = meta["tensors"]
        self._file = SafetensorsFile(folder / "model.safetensors")
        self._tokenizer: Tokenizer | None = None
        self._notes = Notes()

    def names(self) -> list[str]:
        """Canonical names of all tensors."""
        found: list[str] = []
        for name, entry in self._manifest.items():
            experts = range(entry["shape"][0]) if "*" in name else ()
            found += [name.replace("*", str(e)) for e in experts] or [name]
        return found

    def linear(self, name: str) -> LinearWeight:
        """A matrix as the file stores it."""
        expert = _EXPERT.search(name)
        stored = _EXPERT.sub(".experts.*.", name)
        entry = self._entry(stored, name)
        n, k = entry["shape"][-2:]
        data, number = self._file.get(stored), 0 if expert is None else int(expert[1])
        start, stop = number * n, (number + 1) * n
        if entry["kind"] in K_TYPES:
            return self._dequantized(name, entry["kind"], data[start:stop])
        if len(entry["parts"]) == 1:
            return plain_linear(data if expert is None else data[number])
        mins = f"{stored}.mins"
        whole = LinearWeight(
            format=entry["format"],
            shape=(data.shape[0], k),
            data=data,
            scales=self._file.get(f"{stored}.scales"),
            mins=self._file.get(mins) if mins in entry["parts"] else None,
            group_size=GROUP,
        )
        return whole if expert is None else whole.rows(start, stop)

    def _dequantized(self, name: str, kind: str, blocks: Tensor) -> LinearWeight:
        from gguf import GGMLQuantizationType  # slow to import, and needed for these types alone
        from gguf.quants import dequantize

        self._notes.add(f"{kind} has no counterpart among this engine's formats: dequantized to float32", name)
        return plain_linear(torch.from_numpy(dequantize(blocks.numpy(), GGMLQuantizationType[kind])))

    def tensor(self, name: str) -> Tensor:
        """A norm, bias or router."""
        self._entry(name, name)
        data = self._file.get(name)
        return plain_tensor(data)

    def notes(self) -> list[str]:
        """What was read otherwise than stored."""
        return self._notes.lines()

    def _entry(self, stored: str, name: str) -> dict[str, Any]:
        if stored not in self._manifest:
            raise CheckpointError(f"{self._folder}: there is no tensor {name!r}; names() lists what there is")
        return self._manifest[stored]

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that the GGUF file carried; None where it has none."""
        if self._tokenizer is None and (self._folder / "tokenizer.json").is_file():
            self._tokenizer = Tokenizer.load(self._folder)
        return self._tokenizer

    def close(self) -> None:
        """Let go of the files; a conversion that could not be cached is removed."""
        self._file.close()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None
