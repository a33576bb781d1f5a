"""What a container may use: limits of CPU time and memory from Linux control groups, version 1 and 2.

Inside a container the operating system still shows the whole machine; the kernel enforces something else. It only
reads; answers are None where nothing is limited or nothing can be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
UNLIMITED = 1 << 60  # version 1 says "no limit" with a number near 2^63


@dataclass(frozen=True)
class Limits:
    """What the tightest group around this process allows.

    Attributes:
        memory_bytes, memory_used_bytes: the limit and what the group takes now, less what the kernel drops when
            memory is short (files that were read and not used again).
        cpus: processors' worth of time.
    """

    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    cpus: float | None = None

    @property
    def memory_left_bytes(self) -> int | None:
        """What may still be taken; None where nothing is limited."""
        return None if self.memory_bytes is None else max(0, self.memory_bytes - (self.memory_used_bytes or 0))


def limits(root: Path = ROOT, membership: Path = MEMBERSHIP) -> Limits:
    """Limits of this process.

    Args:
        root: where control groups are mounted.
        membership: which of them this process is in.
    """
    groups = _groups(membership)
    found = [_unified(path) for path in _upwards(root, groups.get("", "/"))] if "" in groups else []
    found += [_memory_v1(path) for path in _upwards(root / "memory", groups.get("memory", "/"))]
    found += [_cpu_v1(path) for path in _upwards(root / "cpu", groups.get("cpu", "/"))]
    bounded = [f for f in found if f.memory_bytes is not None]
    tightest = min(bounded, key=lambda f: f.memory_bytes or 0, default=Limits())
    cpus = min((f.cpus for f in found if f.cpus is not None), default=None)
    return Limits(tightest.memory_bytes, tightest.memory_used_bytes, cpus)


def _groups(membership: Path) -> dict[str, str]:
    """Controller to the path of its group; "" is version 2."""
    found = {}
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            found[controller] = path
    return found


def _upwards(root: Path, group: str) -> list[Path]:
    """The group's folder and all above it; inside a container the path of the host may not exist."""
    folder, found = root / group.strip("/"), []
    while folder != root and folder.is_relative_to(root):
        found.append(folder)
        folder = folder.parent
    return [*found, root]


def _unified(folder: Path) -> Limits:
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    cpus = int(quota) / int(period) if quota.isdigit() and period.strip().isdigit() else None
    return Limits(_number(folder / "memory.max"), _used(folder, "memory.current", "inactive_file"), cpus)


def _memory_v1(folder: Path) -> Limits:
    limit = _number(folder / "memory.limit_in_bytes")
    if limit is None or limit > UNLIMITED:
        return Limits()
    return Limits(limit, _used(folder, "memory.usage_in_bytes", "total_inactive_file"))


def _used(folder: Path, name: str, droppable: str) -> int | None:
    used = _number(folder / name)
    rows = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    return None if used is None else max(0, used - int(rows.get(droppable, 0)))


def _cpu_v1(folder: Path) -> Limits:
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return Limits(cpus=quota / period if quota and period else None)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None  # "max" and "-1" are no limits


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
