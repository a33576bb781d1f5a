"""Turns a model's name or path into an open checkpoint.

Known names, GGUF files, Hugging Face folders and converted ones (`strata convert`); anything else gets an error that
says what was there and what would work. Of pickles only the plain tensors of a folder's `pytorch_model.bin` are read:
reading more can run code.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from strata_lab.models import hub
from strata_lab.models.checkpoint import Checkpoint
from strata_lab.models.errors import PICKLE_SUFFIXES, CheckpointError, refuse_pickle
from strata_lab.models.shipped import find_shipped

__all__ = ["Checkpoint", "CheckpointError", "open_checkpoint"]


def open_checkpoint(model: str, *, cache_dir: Path | None = None) -> Checkpoint:
    """Open a known name ("smollm2-135m"), a .gguf file, a Hugging Face folder or a converted one.

    `cache_dir` is where converted GGUF files are kept (the user's cache folder when None). Raises `CheckpointError`.
    """
    path = Path(model).expanduser()
    try:
        if model.lower() in hub.KNOWN_MODELS and not path.exists():
            return _open_known(model.lower(), cache_dir)
        folder = path if path.is_dir() else find_shipped(model)
        if folder is not None:
            return _open_folder(folder)
        if path.is_file():
            return _open_file(path, cache_dir)
        raise CheckpointError(_not_found(model, path))
    except OSError as error:
        raise CheckpointError(f"{model} cannot be read: {error}; check the file and your rights to it") from error


def open_model(model: str, seed: int = 0, device: Any = "cpu") -> Checkpoint:
    """`open_checkpoint`, or a preset's random weights of that seed, made on a device."""
    from strata_lab.models.presets import PresetCheckpoint, preset_config

    preset = preset_config(model)
    return open_checkpoint(model) if preset is None else PresetCheckpoint(model, preset, seed, device)


def checkpoint_files(model: str) -> list[Path]:
    """The files that hold a model's numbers, for hashes; none for what is no file."""
    path = hub.find_model(model) or Path(model).expanduser()
    if path.is_dir():
        kinds = ("*.safetensors", "pytorch_model*.bin", "*.json")
        return sorted(file for kind in kinds for file in path.glob(kind))
    return [path] if path.is_file() else []


def _open_folder(path: Path) -> Checkpoint:
    if (path / "manifest.json").is_file():
        from strata_lab.models.strata_folder import StrataCheckpoint

        return StrataCheckpoint(path)
    from strata_lab.models.hf_folder import HfFolderCheckpoint

    return HfFolderCheckpoint(path)


def _open_known(name: str, cache_dir: Path | None) -> Checkpoint:
    found = hub.find_model(name)
    if found is None:
        raise CheckpointError(f"the model {name!r} is not installed; {hub.how_to_get(name)}")
    return _open_gguf(found, name, cache_dir)


def _open_gguf(path: Path, name: str | None, cache_dir: Path | None) -> Checkpoint:
    from strata_lab.models.conversion import open_gguf

    return open_gguf(path, name, cache_dir)


def _open_file(path: Path, cache_dir: Path | None) -> Checkpoint:
    if path.suffix in PICKLE_SUFFIXES:
        raise refuse_pickle(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} is one file of a checkpoint; give its folder, {path.parent}, with config.json")
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if is_gguf or path.suffix == ".gguf":
        return _open_gguf(path, None, cache_dir)
    raise CheckpointError(
        f"{path} is no model file this engine knows; give a .gguf file or a Hugging Face folder, or {hub.how_to_get()}"
    )


def _not_found(model: str, path: Path) -> str:
    parent = path.parent
    beside = [p.name for p in parent.iterdir()] if parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=3)
    near_paths = [str(parent / name) for name in near]
    near_paths += difflib.get_close_matches(model.lower(), hub.KNOWN_MODELS, n=1)
    hint = f"did you mean {' or '.join(near_paths)}? " if near_paths else ""
    return (
        f"there is no model, file or folder {model!r}; {hint}Give a .gguf file, a Hugging Face folder on this machine "
        f"(hubs are not searched), or {hub.how_to_get()}"
    )
