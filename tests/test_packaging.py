"""What a user gets from `pip install`: exactly the two packages, with the files that are not Python."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {"strata_lab": ROOT / "strata_lab", "strata_widgets": ROOT / "widgets" / "strata_widgets"}
GENERATED = {"__pycache__", ".ipynb_checkpoints", ".mypy_cache"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built by the project's own backend, without an isolated environment (and so without a network)."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    return next(wheel.read(n).decode() for n in wheel.namelist() if n.endswith(f".dist-info/{name}"))


def test_the_wheel_holds_every_file_of_the_two_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    expected = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in SOURCES.items()
        for path in folder.rglob("*")
        if path.is_file() and not GENERATED & set(path.parts)
    }
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == expected


def test_the_wheel_carries_what_is_not_python(wheel: zipfile.ZipFile) -> None:
    suffixes = {Path(name).suffix for name in wheel.namelist()}
    assert {".js", ".css", ".cpp"} <= suffixes
    assert "strata_lab/py.typed" in wheel.namelist()


def test_the_console_script_is_strata(wheel: zipfile.ZipFile) -> None:
    assert metadata(wheel, "entry_points.txt").split() == ["[console_scripts]", "strata", "=", "strata_lab.cli:main"]


def test_the_metadata_repeats_pyproject_and_carries_the_licence(wheel: zipfile.ZipFile) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    fields = Parser().parsestr(metadata(wheel, "METADATA"))
    assert fields["Name"] == project["name"] == "strata-lab"
    assert fields["License-Expression"] == "Apache-2.0"
    assert set(fields.get_all("Provides-Extra") or []) == {"lab", "serve", "structured", "dev", "peers"}
    assert "Apache License" in metadata(wheel, "licenses/LICENSE")


def test_the_version_has_one_home(wheel: zipfile.ZipFile) -> None:
    import strata_lab

    assert Parser().parsestr(metadata(wheel, "METADATA"))["Version"] == strata_lab.__version__
