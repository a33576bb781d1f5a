"""Laws of the set-up script: never CUDA packages without a GPU, never a second installation without a reason."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / ".ci" / "setup_env.py"
PYTHON = Path("python")


@pytest.fixture
def setup_env() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_env", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def installed(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What pip is told to install; nothing is, and the environment has no torch."""
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(setup_env, "pip", lambda python, *arguments: calls.append(arguments) or True)
    monkeypatch.setattr(setup_env, "torch_version", lambda python: "")
    monkeypatch.setattr(setup_env, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(setup_env, "default_build_needs_cuda", lambda python: True)
    return calls


def test_without_a_gpu_the_cpu_build_is_taken_from_where_it_is(setup_env: ModuleType, installed: list) -> None:
    setup_env.install_torch(PYTHON, "auto")
    assert installed[0][:2] == ("--extra-index-url", setup_env.CPU_INDEX)
    assert installed[0][-1] == f"{setup_env.TORCH}+cpu"


def test_a_default_build_without_cuda_needs_no_other_index(
    setup_env: ModuleType, installed: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env, "default_build_needs_cuda", lambda python: False)
    setup_env.install_torch(PYTHON, "auto")
    assert installed == [(setup_env.TORCH,)]


def test_with_a_gpu_the_default_build_is_taken(
    setup_env: ModuleType, installed: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env, "has_nvidia_gpu", lambda: True)
    setup_env.install_torch(PYTHON, "auto")
    assert installed == [(setup_env.TORCH,)]


@pytest.mark.parametrize(("present", "kept"), [("2.11.0+cu130", True), ("2.14.1", True), ("2.10.0", False)])
def test_a_torch_that_is_new_enough_is_left_alone(
    setup_env: ModuleType, installed: list, monkeypatch: pytest.MonkeyPatch, present: str, kept: bool
) -> None:
    monkeypatch.setattr(setup_env, "torch_version", lambda python: present)
    setup_env.install_torch(PYTHON, "auto")
    assert (installed == []) is kept


def test_a_failure_names_the_ways_out(setup_env: ModuleType, installed: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env, "pip", lambda python, *arguments: False)
    with pytest.raises(SystemExit, match="make setup TORCH=cuda"):
        setup_env.install_torch(PYTHON, "auto")


def test_the_environment_with_everything_also_serves_those_who_need_less(setup_env: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "strata-dev.stamp").write_text(setup_env.stamp_text("dev"))
    assert setup_env.is_current(tmp_path, "lab")
    (tmp_path / "strata-dev.stamp").rename(tmp_path / "strata-lab.stamp")
    assert not setup_env.is_current(tmp_path, "dev")


def test_an_environment_of_another_pyproject_is_stale(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    (tmp_path / "strata-lab.stamp").write_text(setup_env.stamp_text("lab"))
    assert setup_env.is_current(tmp_path, "lab")
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert not setup_env.is_current(tmp_path, "lab")


def test_the_minimum_is_the_one_that_pyproject_states(setup_env: ModuleType) -> None:
    minimum = ".".join(map(str, setup_env.TORCH_MINIMUM))
    assert f'"torch>={minimum}"' in (SCRIPT.parent.parent / "pyproject.toml").read_text()
