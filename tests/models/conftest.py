"""A small plain model in a folder of its own, to be quantized and damaged."""

from __future__ import annotations

import pytest

from tests.checkpoints import write_checkpoint
from tests.models.cases import WIDE


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A small Llama whose widths are no multiples of 128, as tensors and config."""
    folder, _ = write_checkpoint(tmp_path_factory.mktemp("plain"), "llama", **WIDE)
    return folder


@pytest.fixture
def folder(plain, tmp_path):
    for path in plain.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path
