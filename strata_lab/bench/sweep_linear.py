"""Which cut of a product is fastest on the card at hand: every sensible configuration of every path, checked and timed.

    python -m strata_lab.bench.sweep_linear [--formats fp8 int8row] [--tokens 1 8 16] [--seconds N] [--json PATH]

Products, epilogues included, are those of the reference models. Processes without a launch of their own compile ahead
into Triton's cache on disk; one process checks each candidate against the definition and, if it is right, times it in a
CUDA graph over sets of weights that exceed the cache. If a candidate takes the card's context down, that process is
started again behind it. The most important groups come first, and what does not fit in the time is left out.

"int4g128" is int4 with one scale per 128 columns and no minima, "int8row" int8 with one per row.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from strata_lab.bench.linear_candidates import (
    FORMATS,
    PRODUCTS,
    TOKENS,
    Product,
    Task,
    exact_weight,
    random_weight,
    tasks,
)
from strata_lab.kernels.gpu import gemm, gemv, gemv_int, gemv_mma_config
from strata_lab.kernels.gpu.linear import Config, linear_triton, lm_head_triton
from strata_lab.kernels.linear import linear_ref
from strata_lab.quant.base import LinearWeight
from strata_lab.telemetry.ceilings import median_us

SECONDS = 500.0
CACHES_BEYOND = 4  # sets of weights hold the cache this many times
MIN_CALLS = 48  # in a graph
TOLERANCE = 2**-7  # of the largest result of a row, two roundings to bfloat16 (tests/kernels/test_gpu_linear.py)
BEST = 5
COMPILED_ROWS = 256  # outputs of the product that is compiled; the kernels do not depend on it
RESTARTS = 20
EPS = 1e-6


_CONFIGS: dict[str, type] = {
    "gemv": gemv.GemvConfig, "int": gemv_int.IntConfig, "mma": gemv_mma_config.MmaConfig, "dot": gemm.DotConfig,
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """A candidate's end: microseconds, or why there are none."""

    product: str
    fmt: str
    tokens: int
    path: str
    config: dict[str, Any] | None
    us: float | None
    tb_s: float | None
    problem: str | None


def _inputs(product: Product, tokens: int, n: int, device: torch.device) -> dict[str, Any]:
    x = torch.randn(tokens, product.k, device=device).bfloat16()
    if product.norm:
        gain = torch.rand(product.k, device=device).add_(0.5).bfloat16()
        return {"x": x, "norm_weight": gain, "norm_eps": EPS} | ({} if product.head else {"silu_mul": product.gated})
    return {"x": x, "residual": torch.randn(tokens, n, device=device).bfloat16()}


def call(product: Product, inputs: dict[str, Any], weight: LinearWeight, config: Config | None) -> Tensor:
    """The product as the model calls it."""
    run = lm_head_triton if product.head else linear_triton
    return run(**inputs, weight=weight, config=config)


def wrong(result: Tensor, expected: Tensor) -> str | None:
    """What is wrong with it."""
    error = ((result.float() - expected).abs().amax(dim=1) / expected.abs().amax(dim=1)).max().item()
    return None if error <= TOLERANCE else f"wrong by {error:.2e}"


def ended(task: Task, us: float | None, nbytes: int, problem: str | None) -> Result:
    """The record of a task."""
    path = next((name for name, kind in _CONFIGS.items() if isinstance(task.config, kind)), "default")
    config = None if task.config is None else asdict(task.config)
    return Result(*task.group, path, config, us, None if us is None else nbytes / us * 1e-6, problem)


def compile_share(every: Sequence[Task], index: int, of: int, folder: Path) -> None:
    """Compile every `of`-th candidate and write down which."""
    device = torch.device("cuda")
    with open(folder / f"compiled-{index}", "a") as log, torch.inference_mode(), _not_launched():
        for number in range(index, len(every), of):
            task = every[number]
            try:
                n = COMPILED_ROWS * (2 if task.product.gated else 1)
                weight = _empty_like(random_weight(task.fmt, 32, task.product.k, torch.device("cpu")), n, device)
                call(task.product, _compile_inputs(task, device), weight, task.config)
            except Exception as problem:  # the measuring process will meet and report it
                sys.stderr.write(f"{task}: {type(problem).__name__}\n")
            _line(log, str(number))


def _compile_inputs(task: Task, device: torch.device) -> dict[str, Any]:
    made = _inputs(task.product, task.tokens, COMPILED_ROWS, torch.device("cpu"))
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in made.items()}


def _empty_like(weight: LinearWeight, n: int, device: torch.device) -> LinearWeight:
    def grown(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.empty(n, x.shape[1], dtype=x.dtype, device=device)

    data = grown(weight.data)
    assert data is not None
    shape = (n, weight.shape[1])
    return LinearWeight(weight.format, shape, data, grown(weight.scales), grown(weight.mins), weight.group_size)


@contextmanager
def _not_launched() -> Iterator[None]:
    """Triton kernels called inside are compiled only."""
    from triton.runtime.jit import JITFunction

    original = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return original(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = original


def measure(every: Sequence[Task], folder: Path, deadline: float, device: torch.device) -> None:
    """Check and time what has not been; a line per candidate, before and after. Raises what ruins the context."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    group, made = None, None
    with open(folder / "measured", "a") as log, torch.inference_mode():
        begun, _ = progress(folder)
        ready: set[int] = set()
        for number, task in enumerate(every):
            if number in begun:
                continue
            while number not in ready and time.time() <= deadline:
                ready = _compiled(folder)
                if number not in ready:
                    time.sleep(0.2)
            if time.time() > deadline:
                return
            if task.group != group:
                made = None
                group, made = task.group, _prepared(task, cache, device)
            assert made is not None
            inputs, sets, expected = made
            _line(log, json.dumps({"begun": number}))
            us, problem, fatal = None, None, None
            try:
                problem = wrong(call(task.product, inputs, sets[0], task.config), expected)
                if problem is None:
                    us = time_over(sets, partial(call, task.product, inputs, config=task.config), device)
            except Exception as error:
                problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
                fatal = error if "CUDA" in str(error) else None  # later calls in this process would fail as well
            result = ended(task, us, sets[0].nbytes, problem)
            _line(log, json.dumps({"number": number, "result": asdict(result)}))
            if fatal is not None:
                raise fatal


def _line(log: TextIO, text: str) -> None:
    log.write(text + "\n")
    log.flush()


def time_over(sets: Sequence[LinearWeight], run: Callable[[LinearWeight], object], device: torch.device) -> float:
    """Microseconds of `run(weight)`, the weights in turn, so that none comes from the cache."""
    return median_us([partial(run, sets[i % len(sets)]) for i in range(max(MIN_CALLS, len(sets)))], device)


def inputs_and_sets(
    product: Product, fmt: str, tokens: int, cache: int, device: torch.device
) -> tuple[dict[str, Any], list[LinearWeight]]:
    """What goes into a product, and equal weights that together exceed a cache of that many bytes."""
    weight = random_weight(fmt, product.n, product.k, device)
    count = max(2, -(-CACHES_BEYOND * cache // weight.nbytes))
    sets = [weight, *(_copy(weight) for _ in range(count - 1))]
    return _inputs(product, tokens, product.n, device), sets


def _prepared(task: Task, cache: int, device: torch.device) -> tuple[dict[str, Any], list[LinearWeight], Tensor]:
    inputs, sets = inputs_and_sets(task.product, task.fmt, task.tokens, cache, device)
    exact: dict[str, Any] = {k: v.float() if isinstance(v, Tensor) else v for k, v in inputs.items()}
    return inputs, sets, linear_ref(**exact, weight=exact_weight(sets[0]))


def _copy(weight: LinearWeight) -> LinearWeight:
    scales, mins = (None if x is None else x.clone() for x in (weight.scales, weight.mins))
    return replace(weight, data=weight.data.clone(), scales=scales, mins=mins)


def _compiled(folder: Path) -> set[int]:
    return {int(line) for path in folder.glob("compiled-*") for line in path.read_text().split()}


def progress(folder: Path) -> tuple[set[int], dict[int, Result]]:
    """Candidates that were begun, and how those ended that did."""
    path = folder / "measured"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    begun = {line["begun"] for line in lines if "begun" in line}
    return begun, {line["number"]: Result(**line["result"]) for line in lines if "number" in line}


def report(results: Sequence[Result]) -> str:
    """The fastest of each group beside the default, and what failed."""
    lines = []
    for group in dict.fromkeys((r.product, r.fmt, r.tokens) for r in results):
        mine = [r for r in results if (r.product, r.fmt, r.tokens) == group]
        timed = sorted((r for r in mine if r.us is not None), key=lambda r: r.us or 0.0)
        failed = [r for r in mine if r.us is None]
        lines.append(f"{group[0]} {group[1]} T={group[2]}: {len(timed)} timed, {len(failed)} failed")
        for r in [*timed[:BEST], *(r for r in timed[BEST:] if r.path == "default")]:
            numbers = "" if r.config is None else " ".join(f"{k}={v}" for k, v in r.config.items())
            lines.append(f"  {r.us:8.2f} us {r.tb_s:5.2f} TB/s  {r.path:8}{numbers}")
        lines += [f"  {r.path} {r.config}: {r.problem}" for r in failed]
    return "\n".join(lines)


def sweep(options: argparse.Namespace, every: Sequence[Task]) -> list[Result]:
    """Start the processes, see them through, collect what they found."""
    deadline = time.time() + options.seconds
    own = [sys.executable, "-m", "strata_lab.bench.sweep_linear", "--formats", *options.formats]
    own += ["--tokens", *map(str, options.tokens), "--products", *options.products]
    with tempfile.TemporaryDirectory() as name:
        folder, workers = Path(name), max(1, (os.cpu_count() or 2) - 1)
        command = [*own, "--folder", name, "--deadline", str(deadline)]
        compilers = [
            subprocess.Popen([*command, "--compile", f"{i}/{workers}"], stderr=subprocess.DEVNULL)
            for i in range(workers)
        ]
        try:
            for _ in range(RESTARTS):
                if subprocess.run([*command, "--measure"], check=False).returncode == 0:
                    break
        finally:
            for process in compilers:
                process.kill()
            for process in compilers:
                process.wait()
        begun, done = progress(folder)
        for number in begun - done.keys():
            done[number] = ended(every[number], None, 0, "took the process down")
        return [done[number] for number in sorted(done)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Sweep, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=[*FORMATS, "bf16", "int8"])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="rows of x")
    names = [product.name for product in PRODUCTS]
    parser.add_argument("--products", nargs="+", default=names, choices=names)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which no candidate is begun")
    parser.add_argument("--json", type=Path, help="write all results there")
    for internal in ("--folder", "--compile", "--deadline"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    every = tasks(options.formats, options.tokens, [p for p in PRODUCTS if p.name in options.products])
    if options.compile:
        index, of = map(int, options.compile.split("/"))
        compile_share(every, index, of, Path(options.folder))
    elif options.measure:
        measure(every, Path(options.folder), float(options.deadline), torch.device("cuda"))
    else:
        results = sweep(options, every)
        sys.stdout.write(f"{report(results)}\n{len(results)} of {len(every)} candidates\n")
        if options.json:
            options.json.write_text(json.dumps([asdict(r) for r in results], indent=1))


if __name__ == "__main__":
    main()
