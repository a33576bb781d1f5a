"""Test session set-up: Triton's interpreter before anything else, offline, seeded, GPU tests skipped with a reason."""

from __future__ import annotations

import os
import random
import shutil
import sys
from pathlib import Path

import pytest


def _cuda_is_available() -> bool:
    """Ask torch only where a driver is present: torch-free test files should not pay for importing it."""
    if shutil.which("nvidia-smi") is None and not Path("/proc/driver/nvidia").exists():
        return False
    import torch

    return torch.cuda.is_available()


CUDA = _cuda_is_available()
if not CUDA:
    # Read when a kernel is decorated, so it must be set before strata_lab.kernels is imported.
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may download anything
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SEED = 1234


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a CUDA device; run `make gpu` on a machine that has one")
    for item in items:
        if not CUDA and item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    random.seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(SEED)


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user cache folder; other tests share the real one, which saves compiling the same kernels again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "strata_lab"
