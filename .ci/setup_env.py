#!/usr/bin/env python3
"""Create the virtual environment, with the build of torch that suits this machine; quick when nothing changed.

Needs only Python's standard library. torch goes in first, because on Linux the build that pip takes by default carries
several gigabytes of CUDA packages, which a machine without an NVIDIA GPU cannot use:

- an NVIDIA GPU answers (`nvidia-smi -L`): pip's default, the CUDA build;
- otherwise pip is asked, without installing, what it would take; if that needs CUDA packages, the CPU build is taken
  from PyTorch's own index instead.

A torch that is already in the environment and new enough is left alone. A stamp inside the environment, keyed by
pyproject.toml and this file, makes the second call return at once. It installs neither models nor system packages.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
TORCH_MINIMUM = (2, 11)  # as in pyproject.toml
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
EXTRAS = ("lab", "dev")  # dev contains lab
READ_TORCH_VERSION = "import importlib.metadata as m; print(m.version('torch'))"


def say(text: str) -> None:
    """One line of progress."""
    print(f"[setup] {text}", flush=True)


def stop(text: str) -> None:
    """End with a message that says what to do."""
    raise SystemExit(f"[setup] {text}")


def stamp_text(extra: str) -> str:
    """What the environment was made from."""
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    return f"{extra} {ROOT} {digest.hexdigest()}\n"


def is_current(venv: Path, extra: str) -> bool:
    """Whether the environment already has `extra`, from this pyproject.toml."""
    covering = EXTRAS[EXTRAS.index(extra) :]
    stamps = [(venv / f"strata-{name}.stamp", stamp_text(name)) for name in covering]
    return any(path.is_file() and path.read_text() == text for path, text in stamps)


def create(venv: Path) -> Path:
    """Make the environment if it is missing; return its interpreter."""
    python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        say(f"creating {venv} with Python {sys.version.split()[0]}")
        result = subprocess.run([sys.executable, "-m", "venv", str(venv)], capture_output=True, text=True)
        if result.returncode:
            shutil.rmtree(venv, ignore_errors=True)
            stop(f"{result.stdout}{result.stderr}could not create {venv}; on Debian: apt-get install python3-venv")
    return python


def pip(python: Path, *arguments: str) -> bool:
    """Run pip, with its progress on a terminal and only its errors elsewhere; return whether it succeeded."""
    options = ["--no-compile"]  # Python compiles what it imports; compiling everything is half of the installation
    if not sys.stdout.isatty():
        options.append("-qq")
    return subprocess.run([str(python), "-m", "pip", "install", *options, *arguments], cwd=ROOT).returncode == 0


def has_nvidia_gpu() -> bool:
    """Whether a driver answers and lists a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    result = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return result.returncode == 0 and "GPU" in result.stdout


def torch_version(python: Path) -> str:
    """The torch in the environment, or an empty string."""
    return subprocess.run([str(python), "-c", READ_TORCH_VERSION], capture_output=True, text=True).stdout.strip()


def default_build_needs_cuda(python: Path) -> bool:
    """Ask pip which file it would take for torch, and whether that file requires CUDA packages."""
    command = [str(python), "-m", "pip", "install", "-qq", "--dry-run", "--no-deps", "--report", "-", TORCH]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        return True  # pip has no file at all for this Python: PyTorch's index is worth a try
    metadata = json.loads(result.stdout)["install"][0]["metadata"]
    on_linux = [r for r in metadata.get("requires_dist", []) if r.startswith(("nvidia-", "cuda-", "triton"))]
    return sys.platform == "linux" and bool(on_linux)


def install_torch(python: Path, build: str) -> None:
    """Install the build of torch for this machine unless a good one is there."""
    present = torch_version(python)
    if present and tuple(int(part) for part in present.split(".")[:2]) >= TORCH_MINIMUM:
        say(f"torch {present} is already there")
        return
    if build == "auto":
        build = "cuda" if has_nvidia_gpu() else "cpu"
    say(f"installing {TORCH}, {build.upper()} build")
    source: tuple[str, ...] = ()
    if build == "cpu" and default_build_needs_cuda(python):
        source = ("--extra-index-url", CPU_INDEX, "--retries", "2", "--timeout", "30")
    wanted = f"{TORCH}+cpu" if source else TORCH
    if not pip(python, *source, wanted):
        stop(
            f"pip could not install {wanted}. Without a way to {CPU_INDEX}, install any torch >= 2.11 into the "
            "environment by hand and run this again, or take the CUDA build (several GB): make setup TORCH=cuda"
        )


def silence_announcements(venv: Path) -> None:
    """Keep JupyterLab's news question, which covers the page, out of this environment's JupyterLab."""
    path = venv / "etc" / "jupyter" / "labconfig" / "page_config.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        settings = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
        path.write_text(json.dumps(settings, indent=1) + "\n")


def main() -> None:
    """Parse the command line and bring the environment up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the virtual environment")
    parser.add_argument("--extra", choices=EXTRAS, default="lab", help="lab: to use it; dev: to test it too")
    parser.add_argument("--torch", choices=("auto", "cpu", "cuda"), default="auto", help="which build of torch")
    options = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 (this file must explain itself on an older Python)
        stop(f"Python {sys.version.split()[0]} is too old; 3.11 or newer is needed, for example PYTHON=python3.11")
    if is_current(options.venv, options.extra):
        return
    started = time.monotonic()
    python = create(options.venv)
    install_torch(python, options.torch)
    say(f"installing strata-lab[{options.extra}]")
    if not pip(python, "-e", f".[{options.extra}]"):
        stop("pip could not install the project's dependencies; its message is above. Running this again resumes.")
    silence_announcements(options.venv)
    (options.venv / f"strata-{options.extra}.stamp").write_text(stamp_text(options.extra))
    say(f"ready in {time.monotonic() - started:.0f} s: torch {torch_version(python)}")
    if shutil.which("c++") is None and shutil.which("g++") is None:
        say("no C++ compiler found: the engine will run, but without its fast CPU kernels. Debian: apt-get install g++")


if __name__ == "__main__":
    main()
