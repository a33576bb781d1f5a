"""The documents tell the truth: their paths, commands, targets, tables and code are checked against the repository."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from strata_lab.bench import readme_table

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DOCUMENTS = [README, CONTRIBUTING, *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("README.*.md"))]
SKIPPED_FOLDERS = {".git", ".venv", ".hypothesis", "__pycache__", "artifacts", "dist", "build", ".ipynb_checkpoints"}
MAX_DECISION_LINES = 40
MAKE = r"(?:^|`)make ([a-z][a-z-]*)"
MAX_FILE_BYTES = 2 << 20
MAX_WEIGHTS_BYTES = 16 << 20  # of a file of the drafts that come with the package
WEIGHTS = ROOT / "strata_lab" / "speculative" / "shipped"
# Written in halves, so that this file does not contain what it forbids.
FORBIDDEN = re.compile(
    r"/wo" r"rk/|/fa" r"rm/|/ro" r"ot/|\b(sub" r"agent|helper ses" r"sion|before-" r"stop|C" r"EO)\b"
    r"|py" r"pi\.org|files\.python" r"hosted|registry\.npm" r"js|deb\.deb" r"ian"
)  # fmt: skip


def repository_files() -> Iterator[Path]:
    """Every file that git would take; without git, every file that is not generated."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    if (ROOT / ".git").exists() and shutil.which("git"):
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        yield from (ROOT / name for name in listed if (ROOT / name).is_file())
        return
    for folder, names, files in os.walk(ROOT):
        names[:] = sorted(n for n in names if n not in SKIPPED_FOLDERS and not n.endswith(("_cache", ".egg-info")))
        yield from (Path(folder) / name for name in sorted(files))


def code_blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def section(path: Path, title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert found, f"{path.name} has no section {title!r}"
    return found.group(1)


def file_map() -> dict[str, str]:
    """Path -> description from the README's file map."""
    block = re.search(r"```text\n(.*?)```", section(README, "File map"), flags=re.DOTALL)
    assert block
    lines = [line for line in block.group(1).splitlines() if line.strip()]
    return dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in lines)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):.*## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def cli_commands() -> set[str]:
    from typer.main import get_command

    from strata_lab.cli import app

    return set(get_command(app).commands)  # type: ignore[attr-defined]


def mentioned(pattern: str) -> dict[str, set[str]]:
    """What a pattern's group finds in code spans and code blocks of each document."""
    found = {}
    for path in DOCUMENTS:
        text = path.read_text()
        spans = re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.DOTALL)
        found[path.name] = {m for span in spans for m in re.findall(pattern, span, flags=re.MULTILINE)}
    return found


# -- README -----------------------------------------------------------------------------------------------------------


def test_every_path_in_the_file_map_exists_and_says_what_it_is() -> None:
    assert {path: text for path, text in file_map().items() if not (ROOT / path).exists() or len(text) < 10} == {}


def test_the_file_map_names_every_part_of_the_package() -> None:
    parts = {p.relative_to(ROOT).as_posix() for p in (ROOT / "strata_lab").glob("*.py") if p.name != "__init__.py"}
    parts |= {f"{p.parent.relative_to(ROOT).as_posix()}/" for p in (ROOT / "strata_lab").glob("*/__init__.py")}
    assert parts - set(file_map()) == set()


def test_the_generated_tables_are_what_their_sources_say() -> None:
    for document in readme_table.documents():
        assert readme_table.updated(document) == document.read_text(), "run: python -m strata_lab.bench.readme_table"


def test_python_in_the_readme_parses_and_names_what_exists() -> None:
    import strata_lab

    for block in code_blocks(README, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "strata_lab":
                assert {alias.name for alias in node.names} <= set(strata_lab.__all__)


@pytest.mark.slow
def test_the_first_token_of_the_readme_runs_as_written() -> None:
    first = code_blocks(README, "python")[0]
    result = subprocess.run([sys.executable, "-c", first], capture_output=True, text=True, timeout=400, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-3000:]
    assert len(result.stdout.split()) > 5, result.stdout


# -- commands and paths ------------------------------------------------------------------------------------------------


def test_make_targets_in_the_documents_exist() -> None:
    targets = make_targets()
    assert {name: t - targets for name, t in mentioned(MAKE).items() if t - targets} == {}


def test_every_make_target_is_documented() -> None:
    documented = mentioned(MAKE)
    assert make_targets() - documented["README.md"] - documented["CONTRIBUTING.md"] - {"help"} == set()


def test_strata_commands_in_the_documents_exist_and_all_are_in_the_readme() -> None:
    commands, found = cli_commands(), mentioned(r"(?:^|`)\.?[\w/.]*strata ([a-z][a-z-]*)")
    assert {name: c - commands for name, c in found.items() if c - commands} == {}
    assert commands - found["README.md"] == set()


def test_modules_that_the_documents_run_exist() -> None:
    for name, modules in mentioned(r"python -m (strata_[\w.]+)").items():
        for module in modules:
            path = ROOT / module.replace(".", "/")
            found = path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
            assert found, f"{name}: python -m {module}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", path.read_text())
    local = [link for link in links if not link.startswith(("http://", "https://", "mailto:"))]
    assert [link for link in local if not (path.parent / link).exists()] == []


def test_paths_in_contributing_and_architecture_exist() -> None:
    """A code span with a slash is a path from the root or from the package; <name> stands for anything."""
    for document in (CONTRIBUTING, ROOT / "docs" / "architecture.md"):
        spans = re.findall(r"`((?:[\w.<>*-]+/)+[\w.<>*-]*)`", document.read_text())
        spans = [span for span in spans if not span.startswith("artifacts/")]  # generated
        patterns = [re.sub(r"<[^>]+>", "*", span).rstrip("/") for span in spans]
        missing = [p for p in patterns if not any(ROOT.glob(p)) and not any((ROOT / "strata_lab").glob(p))]
        assert missing == [], document.name


def test_decisions_fit_on_a_screen_and_say_what_would_change_them() -> None:
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert decisions
    numbers = [path.name[:4] for path in decisions]
    assert len(set(numbers)) == len(numbers)
    for path in decisions:
        text = path.read_text()
        assert len(text.splitlines()) <= MAX_DECISION_LINES, path.name
        assert "change" in text.lower(), f"{path.name}: what would make us change it?"


# -- one truth ---------------------------------------------------------------------------------------------------------


def test_environment_yml_adds_nothing_that_pyproject_does_not_say() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert set(environment) == {"name", "channels", "dependencies"}
    assert environment["channels"] == ["conda-forge"]
    *conda, pip = environment["dependencies"]
    assert conda == [f"python{project['requires-python']}", "pip"]
    (requirement,) = pip["pip"]
    extra = re.fullmatch(r"-e \.\[(\w+)\]", requirement)
    assert extra
    assert extra.group(1) in project["optional-dependencies"]


def test_ci_runs_what_people_run() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111, ".ci/run must be executable"
    assert "make test" in script.read_text()


def test_files_speak_of_the_project_only() -> None:
    found = {}
    for path in repository_files():
        if path.suffix == ".safetensors":  # numbers, in which any three letters can be found
            continue
        text = path.read_bytes().decode("utf-8", errors="ignore")
        if hits := {m.group(0) for m in FORBIDDEN.finditer(text)}:
            found[path.relative_to(ROOT).as_posix()] = hits
    assert found == {}


def test_no_file_is_large() -> None:
    sizes = {path: path.stat().st_size for path in repository_files()}
    most = {path: MAX_WEIGHTS_BYTES if path.is_relative_to(WEIGHTS) else MAX_FILE_BYTES for path in sizes}
    assert {path.name: size for path, size in sizes.items() if size > most[path]} == {}
