"""What a CUDA card can do at best: bytes read per second, and microseconds that a launch costs by itself.

The bandwidth is `telemetry/bandwidth.py`'s; this adds the launches and the clock that measures them: a CUDA graph of
many calls, so that no Python is between them. Launch costs are kept in the user's cache folder per card and driver.
A launch cost is no ceiling in the sense of an upper bound: it says how much of a kernel's time is not bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from strata_lab.telemetry import bandwidth, hardware

CHAIN = 500  # launches in a graph
REPLAYS = 20
WARM_UP = 3


@dataclass(frozen=True)
class LaunchCosts:
    """Microseconds from one empty kernel to the next.

    Attributes:
        graph_us: in a CUDA graph.
        dependent_us: in a CUDA graph with programmatic dependent launch; None where the card has none.
        eager_us: launched from Python one by one.
    """

    graph_us: float
    dependent_us: float | None
    eager_us: float


@dataclass(frozen=True)
class Ceilings:
    """A card's limits.

    Attributes:
        name: of the card.
        bytes_s: fastest read of main memory, measured.
        reader: what read it.
        cache_bytes: last-level cache; data below about this size need not come from memory.
        launch: costs of launches.
    """

    name: str
    bytes_s: float
    reader: str
    cache_bytes: int
    launch: LaunchCosts


def ceilings(device: torch.device, *, fresh: bool = False) -> Ceilings:
    """Limits of a CUDA device; `fresh` measures again even if a result is kept."""
    properties = torch.cuda.get_device_properties(device)
    memory = bandwidth.ceiling(str(device), fresh=fresh)
    return Ceilings(
        properties.name, memory.bytes_s, memory.reader, properties.L2_cache_size, launch_costs(device, fresh=fresh)
    )


def launch_costs(device: torch.device, *, fresh: bool = False) -> LaunchCosts:
    """Measured launch costs of a CUDA device, from the cache folder where they are known."""
    path = _file(device)
    known = None if fresh else _load(path)
    if known is None:
        known = _measure(device)
        _save(path, known)
    return known


def _measure(device: torch.device) -> LaunchCosts:
    from strata_lab.kernels.gpu.launch import has_pdl
    from strata_lab.kernels.gpu.launch_probe import nothing

    def in_graph(launch: Callable[[], object]) -> float:
        return min(graph_times_us([launch] * CHAIN, device)) / CHAIN

    plain = nothing(device, dependent=False)
    dependent = in_graph(nothing(device, dependent=True)) if has_pdl(device) else None
    return LaunchCosts(in_graph(plain), dependent, min(_eager_us(plain, device) for _ in range(WARM_UP)))


def _eager_us(launch: Callable[[], object], device: torch.device) -> float:
    launch()
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(CHAIN):
        launch()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e6 / CHAIN


@torch.inference_mode()
def graph_times_us(calls: Sequence[Callable[[], object]], device: torch.device, replays: int = REPLAYS) -> list[float]:
    """Capture `calls` in one CUDA graph and return the microseconds of each of several replays."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for call in calls:
            call()  # loads kernels and workspaces, which a capture may not do
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):  # the stream whose workspaces the kernels know by now
        for call in calls:
            call()
    for _ in range(WARM_UP):
        graph.replay()
    times = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # keeps the card busy until all that follows is queued, so that no host time is in it
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return times


def median_us(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Median microseconds of one call, in a graph of all of them."""
    return statistics.median(graph_times_us(calls, device)) / len(calls)


def _file(device: torch.device) -> Path | None:
    try:
        from platformdirs import user_cache_dir
    except ImportError:
        return None  # a bare GPU machine: measured anew every time
    name = torch.cuda.get_device_name(device)
    driver = next((g.driver for g in hardware.gpus() if g.name == name), "unknown")
    key = hashlib.sha256(repr((name, driver, torch.version.cuda)).encode()).hexdigest()[:16]
    return Path(user_cache_dir("strata_lab")) / f"launch-{key}.json"


def _load(path: Path | None) -> LaunchCosts | None:
    try:
        return LaunchCosts(**json.loads(path.read_text())) if path else None
    except (OSError, ValueError, TypeError):
        return None  # none yet, or written by another version: measure again


def _save(path: Path | None, costs: LaunchCosts) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(asdict(costs)))
    part.replace(path)
