"""One JupyterLab and one browser for all tests of this folder: the workbench notebook, run from top to bottom."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from strata_lab.bench.lab_page import LabPage, lab_page, why_no_browser

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOK = "00_workbench.ipynb"
RUN_ALL_S = 500.0  # the first time on a busy machine, the decode step is compiled


@pytest.fixture(scope="module")  # not the session: the browser driver keeps an asyncio loop running in this thread
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabPage]:
    """The workbench notebook after Run All, with a short demonstration and a second view of the panel at its end."""
    reason = why_no_browser()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("notebooks")
    notebook = nbformat.read(ROOT / "notebooks" / NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", []):
            cell.source += "\nseconds = 1.0"
    notebook.cells.append(nbformat.v4.new_code_cell("wb"))
    nbformat.write(notebook, folder / NOTEBOOK)
    with lab_page(folder) as page:
        page.open(NOTEBOOK)
        page.run_all(RUN_ALL_S)
        yield page
