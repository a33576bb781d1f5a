"""What the kernel tests share: implementations by name, skipped with a reason where they cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from strata_lab.kernels import bind, prepare
from strata_lab.kernels.cpu.build import CpuKernelsUnavailable


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is here of operators that run on the processor, card or no card, is marked `host`: not for `make gpu`."""
    for item in (item for item in items if Path(__file__).parent in item.path.parents):
        chosen = getattr(item, "callspec", None)
        params = chosen.params if chosen else {}
        on_host = params.get("backend") in ("reference", "cpu") or params.get("impl") == "cpu"
        if on_host or "cpu_ops" in getattr(item, "fixturenames", ()):
            item.add_marker("host")


def _prepared(backend: str) -> str:
    try:
        prepare(backend)
    except CpuKernelsUnavailable as reason:
        pytest.skip(str(reason))
    return backend


@pytest.fixture(scope="session")
def available() -> Callable[[str], str]:
    """backend -> backend, ready to be called; skips the test where the machine cannot run it."""
    return _prepared


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where references and Triton kernels run: the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend that runs on a CPU."""
    return _prepared(request.param)


@pytest.fixture
def ops(backend: str) -> Any:
    """All operators of `backend`."""
    return bind(backend)


@pytest.fixture
def cpu_ops() -> Any:
    """The C++ operators."""
    return bind(_prepared("cpu"))
