"""One tiny model and one server for all tests of this folder that change nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import write_checkpoint
from tests.server.serving import Served, serving


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("served"), "llama")[0]


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Served]:
    with serving(folder) as served:
        yield served
