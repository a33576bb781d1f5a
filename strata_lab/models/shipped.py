"""Drafts that come with the package, by name: `<model>-draft` for a model's known name.

Made by `strata train-draft`; each folder has a card that says how. Torch-free.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "speculative" / "shipped"


def find_shipped(name: str, folder: Path = FOLDER) -> Path | None:
    """The folder of a draft; None for a name that none has."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return folder / name.lower() if name.lower() in names else None


def draft_for(model: str, folder: Path = FOLDER) -> str | None:
    """The name of the draft that comes with a model; None where there is none."""
    name = f"{model.lower()}-draft"
    return name if find_shipped(name, folder) else None
