"""What this process has open, opens and runs: for tests that a file made nothing happen."""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def open_descriptors(folder: Path) -> Iterator[str]:
    """What this process has open or mapped inside a folder (Linux)."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith(str(folder)):
            yield target
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line:
            yield line


@functools.cache
def _recorder() -> list[list]:
    """Where the audit events of this process go while somebody watches; a hook stays for good, so there is one."""
    watchers: list[list] = []

    def hook(event: str, arguments: tuple) -> None:
        if watchers and event in (
            "open",
            "exec",
            "os.system",
            "subprocess.Popen",
            "os.exec",
            "os.posix_spawn",
            "os.fork",
        ):
            watchers[-1].append((event, arguments))

    sys.addaudithook(hook)
    return watchers


@contextmanager
def watched() -> Iterator[list[tuple[str, tuple]]]:
    """Collects what Python code opens and runs meanwhile, as (event, arguments)."""
    seen: list[tuple[str, tuple]] = []
    _recorder().append(seen)
    try:
        yield seen
    finally:
        _recorder().remove(seen)


def runs_code(event: str, arguments: tuple) -> bool:
    """Whether an event is the start of a process or of code that came as text (modules come from files)."""
    if event == "exec":
        return getattr(arguments[0], "co_filename", "").startswith("<string")
    return event != "open"


@contextmanager
def copy_of(folder: Path) -> Iterator[Path]:
    """A copy of a folder that may be damaged; gone afterwards."""
    target = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        shutil.copytree(folder, target / "m")
        yield target / "m"
    finally:
        shutil.rmtree(target)
