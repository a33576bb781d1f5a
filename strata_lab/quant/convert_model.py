"""Turns any checkpoint into one of this engine's, quantized on the way: what `strata convert` runs.

One decoder layer is in memory at a time. Each layer becomes one file, written beside its place and moved there; the
manifest comes last, and then the whole folder gets its name. So an interrupted conversion leaves a folder that nothing
takes for a model, and the next call with the same settings goes on behind the last finished layer.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strata_lab import __version__
from strata_lab.models.checkpoint import Checkpoint, is_linear
from strata_lab.models.strata_folder import MANIFEST, VERSION, StrataCheckpoint
from strata_lab.quant import convert as to_format
from strata_lab.quant import get_format, get_grid_format
from strata_lab.quant.base import LinearWeight
from strata_lab.quant.cache_scales import cache_scales
from strata_lab.quant.calibrate import METHODS, Quantized, quantize_model
from strata_lab.quant.convert_files import (
    JOURNAL,
    Entries,
    Journal,
    Values,
    files_hash,
    precision,
    replace_file,
    write_tensors,
)
from strata_lab.settings import ConfigError

HEADS = {"fp8": "int8", "int8": "int8", "int4": "int8"}  # format of the layers -> of embedding and head
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class ConvertSettings:
    """What to make of a model.

    Attributes:
        weights: format of the layers' matrices: "fp8", "int8", "int4", "bf16" or "fp32".
        granularity: what shares a scale; None is the format's default.
        method: how codes are chosen: "rtn" rounds to nearest; "gptq", "awq" and others need a calibration text.
        keep: rules "PATTERN" or "PATTERN=FORMAT" for canonical names; the first that fits decides: kept as stored, or
            in that format.
        head: format of embedding and LM head; None is int8 with all quantized layers: what three mantissa bits or four
            bits round there goes straight into the logits and costs more than in all layers together.
        kv_scales: whether to calibrate scales for an FP8 cache.
    """

    weights: str
    granularity: str | None = None
    method: str = "rtn"
    keep: tuple[str, ...] = ()
    head: str | None = None
    kv_scales: bool = False

    def __post_init__(self) -> None:
        get_format(self.weights, self.granularity)
        if self.method not in METHODS:
            raise ConfigError(f"method={self.method!r} must be one of {', '.join(METHODS)}; try 'gptq'")
        if self.method != "rtn":
            get_grid_format(self.weights, self.granularity)
        if self.head is not None:
            get_format(self.head)
        for rule in self.keep:
            pattern, _, name = rule.partition("=")
            if not pattern:
                raise ConfigError(f"keep={rule!r} must be PATTERN or PATTERN=FORMAT; try '*.down_proj.weight=int8'")
            if name:
                get_format(name)

    def format_of(self, name: str) -> tuple[str, str | None] | None:
        """Format and granularity of a matrix; None: as stored."""
        for rule in self.keep:
            pattern, _, kept = rule.partition("=")
            if fnmatch.fnmatchcase(name, pattern):
                return (kept, None) if kept else None
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            return self.head or HEADS.get(self.weights, self.weights), None
        return self.weights, self.granularity


@dataclass(frozen=True)
class Converted:
    """What came of it.

    Attributes:
        folder: the new checkpoint.
        bytes_before, bytes_after: of all tensors.
        seconds: that this call took.
        layers, resumed: of the model; of them found finished.
    """

    folder: Path
    bytes_before: int
    bytes_after: int
    seconds: float
    layers: int
    resumed: int


def convert_checkpoint(
    source: Checkpoint,
    destination: Path,
    settings: ConvertSettings,
    *,
    files: Sequence[Path] = (),
    calibration: Sequence[Sequence[int]] = (),
    device: torch.device | str = "cpu",
    progress: Progress = lambda text, fraction: None,
) -> Converted:
    """Write `source` as a new checkpoint folder.

    Args:
        source: an open checkpoint.
        destination: must not exist; its parent must.
        settings: what to make.
        files: of the source; their hash goes into the manifest.
        calibration: token ids of the calibration text.
        device: where to compute.
        progress: called with what is being done and the fraction done.

    Raises:
        ConfigError: the destination exists, a calibrated method without text, a rule that fits no matrix.
    """
    start = time.perf_counter()
    if destination.exists():
        raise ConfigError(f"{destination} exists already; give another name, or remove it first")
    if not destination.parent.is_dir():
        raise ConfigError(f"the folder {destination.parent} does not exist; make it first")
    if not calibration and (settings.method != "rtn" or settings.kv_scales):
        asks = f"method={settings.method!r}" if settings.method != "rtn" else "kv_scales=True"
        raise ConfigError(f"{asks} needs a calibration text; give one, or take method='rtn'")
    _check_rules(settings, source.names())
    work = destination.parent / f".{destination.name}.converting"
    progress("hashing the source", 0.0)
    key = _key(settings, calibration, files, source)
    journal = Journal(work, key)
    resumed = len(journal.layers)
    count = source.config.num_layers
    tensors: Entries = {}
    for index, values in enumerate(_layers(source, settings, calibration, journal, device, progress)):
        file = _layer_file(index)
        if index >= resumed:
            journal.finished(file, write_tensors(work / file, values))
        tensors |= journal.entries(file)
        progress(f"layer {index + 1} of {count}", (index + 1) / (count + 1))
    rest = _rest(source, settings)
    entries = write_tensors(work / "model.safetensors", rest)
    tensors |= {name: {"file": "model.safetensors"} | e for name, e in entries.items()}
    before = sum(_nbytes(source, name) for name in source.names())
    scales = cache_scales(source, calibration, device) if settings.kv_scales else None
    tokenizer = source.tokenizer()
    if tokenizer is not None:
        tokenizer.save(work)
    manifest = _manifest(source, settings, tensors, scales, key, calibration)
    replace_file(work / MANIFEST, json.dumps(manifest, indent=1).encode())
    (work / JOURNAL).unlink()
    after = sum(path.stat().st_size for path in work.glob("*.safetensors"))
    work.rename(destination)
    StrataCheckpoint(destination).close()  # what was written is what is read
    progress("done", 1.0)
    return Converted(destination, before, after, time.perf_counter() - start, count, resumed)


def _check_rules(settings: ConvertSettings, names: Iterable[str]) -> None:
    matrices = [name for name in names if is_linear(name)]
    for rule in settings.keep:
        pattern = rule.partition("=")[0]
        if not fnmatch.filter(matrices, pattern):
            raise ConfigError(f"keep={rule!r} fits no matrix; names look like {matrices[min(1, len(matrices) - 1)]!r}")


def _layers(
    source: Checkpoint,
    settings: ConvertSettings,
    calibration: Sequence[Sequence[int]],
    journal: Journal,
    device: torch.device | str,
    progress: Progress,
) -> Iterator[Values]:
    """Every tensor of each decoder layer, one layer after the other; of finished ones nothing."""
    names: dict[int, list[str]] = {}
    for name in source.names():
        if name.startswith("model.layers."):
            names.setdefault(int(name.split(".")[2]), []).append(name)
    done = len(journal.layers)
    made: Iterator[Quantized] = iter(())
    if settings.method != "rtn":
        made = quantize_model(
            source, calibration, get_grid_format(settings.weights, settings.granularity), settings.method,
            device=device, finished=[journal.read(_layer_file(i)) for i in range(done)],
            left_out=lambda name: settings.format_of(name) != (settings.weights, settings.granularity),
        )  # fmt: skip
    held: Quantized | None = None
    for index in range(source.config.num_layers):
        if index < done:
            yield {}
            continue
        pending: Values = {} if held is None else {held.name: held.value}
        held = None
        for one in made:
            if not one.name.startswith(f"model.layers.{index}."):
                held = one
                break
            pending[one.name] = one.value
            progress(f"layer {index + 1} of {source.config.num_layers}", one.progress)
        yield {name: pending[name] if name in pending else _plain(source, settings, name) for name in names[index]}


def _plain(source: Checkpoint, settings: ConvertSettings, name: str) -> LinearWeight | Tensor:
    """A tensor that no calibrated method has made: as stored, or rounded to nearest."""
    if not is_linear(name):
        return source.tensor(name)
    wanted = settings.format_of(name)
    weight = source.linear(name)
    return weight if wanted is None else to_format(weight, *wanted)


def _rest(source: Checkpoint, settings: ConvertSettings) -> Values:
    return {n: _plain(source, settings, n) for n in source.names() if not n.startswith("model.layers.")}


def _layer_file(index: int) -> str:
    return f"layer-{index:05}.safetensors"


def _key(
    settings: ConvertSettings, calibration: Sequence[Sequence[int]], files: Sequence[Path], source: Checkpoint
) -> dict[str, Any]:
    """What a conversion is determined by."""
    text = hashlib.sha256(json.dumps([list(s) for s in calibration]).encode()).hexdigest() if calibration else None
    return {
        "tool_version": __version__, "settings": json.loads(json.dumps(dataclasses.asdict(settings))),
        "source": {"name": source.name, "sha256": files_hash(files) if files else None},
        "calibration": text,
    }  # fmt: skip


def _manifest(
    source: Checkpoint, settings: ConvertSettings, tensors: Entries, scales: Any,
    key: dict[str, Any], calibration: Sequence[Sequence[int]],
) -> dict[str, Any]:  # fmt: skip
    tokens = sum(len(s) for s in calibration)
    return {
        "strata_checkpoint": VERSION, "tool_version": __version__, "stored_format": settings.weights,
        "granularity": settings.granularity, "method": settings.method, "keep": list(settings.keep),
        "precision": precision(tensors), "expert_count": source.config.num_experts,
        "source": key["source"],
        "calibration": {"sha256": key["calibration"], "tokens": tokens} if calibration else None,
        "kv_scales": scales, "config": dataclasses.asdict(source.config),
        "generation": getattr(source, "generation", {}), "tensors": tensors,
    }  # fmt: skip


def _nbytes(source: Checkpoint, name: str) -> int:
    if is_linear(name):
        return source.linear(name).nbytes
    tensor = source.tensor(name)
    return tensor.numel() * tensor.element_size()
