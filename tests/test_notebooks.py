"""Every notebook runs from top to bottom, with no front end and quick parameters, and is committed without outputs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from strata_lab.lessons import gallery

ROOT = Path(__file__).resolve().parent.parent
GALLERY = ROOT / "artifacts" / "gallery"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_CELL_LINES = 10
MAX_SECONDS = 90  # of one notebook, on a machine that does other work too; the gallery tells each one's time
PARAMETERS = {"model", "device", "seconds", "seed", "close_at_end"}
EXERCISES = 3
CHINESE = re.compile(r"[\u4e00-\u9fff]")
NUMBER = re.compile(r"\b\d+(?:\.\d+)? ?(?:ms|tok/s|GB/s|tokens per second)\b")
# A time or a rate that a text may hold without having measured it -> why.
GIVEN_NUMBERS = {
    "1008 GB/s": "from the data sheet of the card that an exercise names",
    "400 tokens per second": "the claim that an exercise asks about",
}


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def texts(path: Path) -> list[str]:
    return [cell.source for cell in read(path).cells if cell.cell_type == "markdown"]


def numbered(path: Path) -> bool:
    """Whether it is a lesson; 00 is the workbench."""
    return not path.name.startswith("00_")


LESSONS = [path for path in NOTEBOOKS if numbered(path)]
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
every_lesson = pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.stem)


@pytest.fixture(scope="module")
def pages() -> Iterator[list[gallery.Executed]]:
    """What is executed here becomes the gallery that `make gallery` makes, kept with what CI built."""
    done: list[gallery.Executed] = []
    yield done
    if done:
        gallery.index(done, GALLERY)


@pytest.mark.slow
@every_notebook
def test_notebook_runs_from_top_to_bottom(
    path: Path, pages: list[gallery.Executed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "widgets")]))  # also when not installed
    done = gallery.execute(path, GALLERY)
    pages.append(done)
    assert all(cell.execution_count is not None for cell in code_cells(done.path) if cell.source.strip())
    assert done.duration_s < MAX_SECONDS
    shown = gallery.page(done.path).read_text(encoding="utf-8")
    assert re.findall(r"<(?:script|link|img|iframe)[^>]*https?://[^>]*>", shown) == [], "a page needs no network"


@every_notebook
def test_notebook_is_committed_without_outputs(path: Path) -> None:
    assert [c.source[:40] for c in code_cells(path) if c.outputs or c.execution_count is not None] == []
    assert "widgets" not in read(path).metadata


@every_notebook
def test_notebook_cells_call_the_package(path: Path) -> None:
    long = {c.source.splitlines()[0]: len(c.source.splitlines()) for c in code_cells(path) if c.source.strip()}
    assert {first: n for first, n in long.items() if n > MAX_CELL_LINES} == {}


@every_notebook
def test_notebook_names_its_kernel(path: Path) -> None:
    """Without one, JupyterLab asks which kernel to take and a newcomer's first click is a dialog."""
    assert read(path).metadata.get("kernelspec", {}).get("name") == "python3"


@every_notebook
def test_notebook_takes_the_parameters_that_all_take(path: Path) -> None:
    assert gallery.parameters(read(path)) >= PARAMETERS


@every_notebook
def test_notebook_begins_with_what_it_needs_and_how_long_it_takes(path: Path) -> None:
    first = texts(path)[0]
    assert "*Needs*" in first and re.search(r"\*Takes\* .*(second|minute)", first)


@every_lesson
def test_a_lesson_is_titled_by_its_number_and_gives_its_key_terms_in_chinese(path: Path) -> None:
    assert re.match(rf"# {path.name[:2]} .*\([^)]*[\u4e00-\u9fff]", texts(path)[0])
    assert sum(bool(CHINESE.search(text)) for text in texts(path)) >= 3


@every_lesson
def test_a_lesson_ends_with_exercises_whose_answers_are_not_in_it(path: Path) -> None:
    cells = {c.id: c.source.splitlines() for c in code_cells(path)}
    asked = [name for name in cells if re.fullmatch(r"exercise-\d+", name)]
    assert len(asked) >= 2 and len(asked) <= EXERCISES
    for name in asked:
        assert any(line.startswith("answer = None") for line in cells[name]), name
        assert re.fullmatch(r"check\.\w+\(answer\)", cells[name][-1]), f"{name}: the check is hidden in the package"


@every_lesson
def test_no_time_or_rate_is_typed_into_a_text(path: Path) -> None:
    typed = {found for text in texts(path) for found in NUMBER.findall(text)}
    assert typed - set(GIVEN_NUMBERS) == set()


@every_lesson
def test_a_cell_that_only_tells_figures_folds_its_source(path: Path) -> None:
    for cell in code_cells(path):
        tells = (
            cell.source.rstrip().endswith(")") and "\nMarkdown(" in f"\n{cell.source}" and "Checks(" not in cell.source
        )
        tagged = gallery.TOLD in cell.metadata.get("tags", [])
        assert tagged <= (cell.metadata.get("jupyter", {}).get("source_hidden") is True), cell.id
        assert tagged <= tells, f"{cell.id} does more than tell"


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS, "notebooks/ is empty"
    assert len({path.name[:2] for path in NOTEBOOKS}) == len(NOTEBOOKS), "two notebooks have the same number"


@pytest.mark.parametrize("readme", ["README.md", "README.zh.md"])
def test_both_readmes_have_a_row_for_every_notebook(readme: str) -> None:
    rows = set(re.findall(r"^\| (\d\d) \| [^|]+ \| [^|]+ \|$", (ROOT / readme).read_text(encoding="utf-8"), re.M))
    assert {path.name[:2] for path in NOTEBOOKS} - rows == set()
