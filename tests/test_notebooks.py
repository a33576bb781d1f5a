"""Every notebook runs from top to bottom, with no front end and quick parameters, and is committed without outputs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_CELL_LINES = 10
# What makes a notebook short enough for a test; one that declares a parameter of this name gets this value.
QUICK = {"seconds": 1.0, "close_at_end": True}


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def quick_parameters(path: Path) -> list[str]:
    """papermill's arguments for those of our quick values whose names the notebook's parameters cell assigns."""
    cells = [c.source for c in code_cells(path) if "parameters" in c.metadata.get("tags", [])]
    declared = {
        line.split("=")[0].split(":")[0].strip() for source in cells for line in source.splitlines() if "=" in line
    }
    return [part for name, value in QUICK.items() if name in declared for part in ("-p", name, str(value))]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    done = tmp_path / path.name
    command = [sys.executable, "-m", "papermill", str(path), str(done), "--cwd", str(path.parent), "--no-progress-bar"]
    found = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "widgets")])}  # also when not installed
    result = subprocess.run([*command, *quick_parameters(path)], capture_output=True, text=True, timeout=400, env=found)
    assert result.returncode == 0, result.stderr[-4000:]
    counts = [cell.execution_count for cell in code_cells(done) if cell.source.strip()]
    assert all(count is not None for count in counts)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_committed_without_outputs(path: Path) -> None:
    assert [c.source[:40] for c in code_cells(path) if c.outputs or c.execution_count is not None] == []
    assert "widgets" not in read(path).metadata


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_cells_call_the_package(path: Path) -> None:
    long = {c.source.splitlines()[0]: len(c.source.splitlines()) for c in code_cells(path) if c.source.strip()}
    assert {first: n for first, n in long.items() if n > MAX_CELL_LINES} == {}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_names_its_kernel(path: Path) -> None:
    """Without one, JupyterLab asks which kernel to take and a newcomer's first click is a dialog."""
    assert read(path).metadata.get("kernelspec", {}).get("name") == "python3"


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS, "notebooks/ is empty"
