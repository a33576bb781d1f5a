"""Measure how fast this machine reads memory: the ceiling that every percentage is taken of.

The fastest of several readers over a buffer too large for any cache, best of several passes, because a ceiling
is a maximum. A model that fits in the last-level cache is not bound by main memory, so for a small working set
the same readers also run over a buffer of that size and the faster of the two is its ceiling.

Results are kept in the user's cache folder per machine, and a later, faster measurement replaces a slower one;
a busy machine can therefore only make the ceiling too low until the next `fresh=True`, never too high.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strata_lab.telemetry.hardware import cpu_info, machine_key

CPU_BUFFER_BYTES = 1 << 30
GPU_BUFFER_BYTES = 4 << 30
CACHES_BEYOND = 4  # the buffer holds the last-level cache this many times, so what stays cached counts little
PASSES = 5
STEP_BYTES = 16 << 20  # working-set sizes are rounded up to this, so that near sizes share a measurement


@dataclass(frozen=True)
class Bandwidth:
    """A measured ceiling.

    Attributes:
        bytes_s: bytes read per second.
        buffer_bytes: size of the buffer that was read.
        level: "memory", or "cache" for a working set that the last-level cache holds.
        reader: the operation that read fastest.
    """

    bytes_s: float
    buffer_bytes: int
    level: str
    reader: str


def ceiling(device: str = "cpu", working_set_bytes: int | None = None, *, fresh: bool = False) -> Bandwidth:
    """Fastest measured read for a step that reads `working_set_bytes` again and again.

    Args:
        device: "cpu" or "cuda[:i]".
        working_set_bytes: what a step reads; None asks for main memory.
        fresh: measure again even if a result is kept; the faster one is kept.
    """
    known = _load(device)
    large, small = _buffer_sizes(device, working_set_bytes)
    for size, level in ((large, "memory"), (small, "cache")):
        key = f"{level}:{size}"
        if size and (fresh or key not in known):
            new = _measure(device, size, level)
            known[key] = max(new, known.get(key, new), key=lambda b: b.bytes_s)
            _save(device, known)
    found = [known[f"memory:{large}"]] + ([known[f"cache:{small}"]] if small else [])
    return max(found, key=lambda b: b.bytes_s)


def known_ceiling(device: str = "cpu", working_set_bytes: int | None = None) -> Bandwidth | None:
    """What `ceiling` would answer without measuring anything; None where it would have to measure."""
    known = _load(device)
    large, small = _buffer_sizes(device, working_set_bytes)
    keys = [f"memory:{large}"] + ([f"cache:{small}"] if small else [])
    if any(key not in known for key in keys):
        return None
    return max((known[key] for key in keys), key=lambda b: b.bytes_s)


def _buffer_sizes(device: str, working_set_bytes: int | None) -> tuple[int, int]:
    """Bytes of the main-memory buffer, and of the cached one (0 where the working set is no candidate)."""
    if device.startswith("cuda"):
        import torch

        cache = torch.cuda.get_device_properties(device).L2_cache_size
        large = min(GPU_BUFFER_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    else:
        cpu = cpu_info()
        cache = cpu.last_level_cache_bytes or 0
        large = min(max(CPU_BUFFER_BYTES, CACHES_BEYOND * cache), (cpu.available_memory_bytes or 4 << 30) // 4)
    small = -(-(working_set_bytes or 0) // STEP_BYTES) * STEP_BYTES
    large = 1 << (large.bit_length() - 1) if large < CPU_BUFFER_BYTES else large
    return large, small if working_set_bytes and small <= cache else 0


def _measure(device: str, size: int, level: str) -> Bandwidth:
    import torch

    rows = size // (4 * 4096)
    buffer = torch.ones(rows, 4096, device=device)  # written, or the system would map one page of zeros
    flat, ones = buffer.view(-1), torch.ones(4096, device=device)
    readers: dict[str, Callable[[], Any]] = {
        "matrix-vector product": lambda: torch.mv(buffer, ones),
        "sum of float32": flat.sum,
        "sum of int64": flat.view(torch.int64).sum,
        "maximum": flat.amax,
        "dot product": lambda: torch.dot(flat, flat),
    }
    if size // 4 >= 1 << 31:
        del readers["dot product"]  # BLAS counts elements in 32 bits
    if device.startswith("cuda"):
        from strata_lab.telemetry.read_kernel import readers as wide_readers

        readers |= dict(wide_readers(flat.view(torch.int32)))
    seconds = {name: min(_seconds(read, device) for _ in range(PASSES)) for name, read in readers.items()}
    best = min(seconds, key=lambda name: seconds[name])
    return Bandwidth(rows * 4096 * 4 / seconds[best], size, level, best)


def _seconds(read: Callable[[], Any], device: str) -> float:
    if device.startswith("cuda"):
        import torch

        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        read()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3
    begin = time.perf_counter()
    read()
    return time.perf_counter() - begin


def _file(device: str) -> Path | None:
    try:
        from platformdirs import user_cache_dir
    except ImportError:
        return None  # a bare GPU machine: measured anew every time
    return Path(user_cache_dir("strata_lab")) / f"bandwidth-{machine_key(device)}.json"


def _load(device: str) -> dict[str, Bandwidth]:
    path = _file(device)
    try:
        return {k: Bandwidth(**v) for k, v in json.loads(path.read_text()).items()} if path else {}
    except (OSError, ValueError, TypeError):
        return {}  # none yet, or written by another version: measure again


def _save(device: str, known: dict[str, Bandwidth]) -> None:
    path = _file(device)
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps({k: asdict(v) for k, v in known.items()}, indent=1))
    part.replace(path)
