"""What of a product's time is not bytes: its time against the size of its weight, and the line through that.

    python -m strata_lab.bench.fixed_costs [--formats fp8 int8row int4g128] [--tokens 1 8]

Products are those of the reference models, cut shorter and made longer. Each is timed in a CUDA graph over sets of
weights that exceed the cache, one call behind the other as in a decode step, so that what the next call does before it
waits for this one is counted as it is there. The line's height at no bytes is what a call costs however small it is:
reading x, the norm, the reduction, the boundary. Its slope is the bandwidth that is left once that is paid. `bare` is
the same product without norm and residual, `coded` an integer one whose x was cut into bytes before, which otherwise
is a kernel of its own. Where the points are no line, the deviation says so.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from strata_lab.bench.harness import Environment, Record, Spread, write_results
from strata_lab.bench.linear_candidates import FORMATS, REFERENCE, Product
from strata_lab.bench.sweep_linear import call, inputs_and_sets, time_over
from strata_lab.kernels.gpu import gemv_int
from strata_lab.quant.base import LinearWeight
from strata_lab.telemetry.ceilings import launch_costs

SCRIPT = "python -m strata_lab.bench.fixed_costs"
SIZES = (0.25, 0.5, 1.0, 1.5, 2.0)  # of a product's outputs
ROUNDED = 256  # outputs
GEOMETRIES = tuple(product.name for product in REFERENCE if not product.head)


@dataclass(frozen=True)
class Line:
    """A line through (bytes, microseconds).

    Attributes:
        fixed_us: its height at no bytes.
        bytes_s: bytes per second that its slope means; infinite where larger weights take no longer.
        deviation_us: the largest distance of a point from it.
    """

    fixed_us: float
    bytes_s: float
    deviation_us: float


def line(nbytes: Sequence[float], us: Sequence[float]) -> Line:
    """The line of least squares; raises `statistics.StatisticsError` for fewer than two sizes."""
    slope, height = statistics.linear_regression(nbytes, us)
    off = max(abs(height + slope * x - y) for x, y in zip(nbytes, us, strict=True))
    return Line(height, 1e6 / slope if slope > 0 else float("inf"), off)


def sized(product: Product, size: float) -> Product:
    """The product with that share of its outputs."""
    return replace(product, n=max(1, round(product.n * size / ROUNDED)) * ROUNDED)


def timed(product: Product, fmt: str, tokens: int, device: torch.device, *, bare: bool = False) -> tuple[int, float]:
    """Bytes of a product's weight, and microseconds of a call."""
    inputs, sets = _made(product, fmt, tokens, device)
    if bare:
        inputs = {"x": inputs["x"]}
    return sets[0].nbytes, time_over(sets, partial(call, product, inputs, config=None), device)


def coded(product: Product, fmt: str, device: torch.device) -> float | None:
    """Microseconds of a call for one token whose x is in codes already; None where x is not cut into codes."""
    inputs, sets = _made(product, fmt, 1, device)
    if not gemv_int.supports(inputs["x"], sets[0]):
        return None
    x, norm, eps = inputs["x"], inputs.get("norm_weight"), inputs.get("norm_eps", 0.0)
    residual, gated = inputs.get("residual"), inputs.get("silu_mul", False)
    codes, out = gemv_int.codes_of(x, norm, eps), x.new_empty(1, product.n // 2 if gated else product.n)

    def run(weight: LinearWeight) -> None:
        gemv_int.gemv_int(x, weight, None, norm, eps, residual, gated, out, codes=codes)

    return time_over(sets, run, device)


def _made(product: Product, fmt: str, tokens: int, device: torch.device) -> tuple[dict[str, Any], list[LinearWeight]]:
    return inputs_and_sets(product, fmt, tokens, torch.cuda.get_device_properties(device).L2_cache_size, device)


def measure(product: Product, fmt: str, tokens: int, device: torch.device, environment: Environment) -> Record:
    """The record of one product."""
    points = [timed(sized(product, size), fmt, tokens, device) for size in SIZES]
    found = line(*zip(*points, strict=True))
    whole = points[SIZES.index(1.0)]
    metrics: dict[str, Any] = {
        "fixed_us": found.fixed_us,
        "bandwidth_gb_s": found.bytes_s * 1e-9,
        "deviation_us": found.deviation_us,
        "us": whole[1],
        "fixed_share": found.fixed_us / whole[1],
        "bare_us": timed(product, fmt, tokens, device, bare=True)[1],
        "coded_us": coded(product, fmt, device) if tokens == 1 else None,
        "launch_dependent_us": launch_costs(device).dependent_us,
        "points": [{"nbytes": nbytes, "us": us} for nbytes, us in points],
    }
    return environment.record(
        f"fixed_costs/{product.name}/{fmt}/x{tokens}",
        script=SCRIPT,
        conditions={"product": product.name, "n": product.n, "k": product.k, "format": fmt, "tokens": tokens},
        metrics=metrics,
        spread=Spread.of([us for _, us in points]),
        note="the spread is of the sizes' times",
    )


def row(record: Record) -> str:
    """A line for people."""
    m = record.metrics
    known = "" if m["coded_us"] is None else f", coded {m['coded_us']:.2f} us"
    return (
        f"{record.name:36} {m['us']:7.2f} us, {m['fixed_us']:5.2f} of them whatever its size, then "
        f"{m['bandwidth_gb_s']:5.0f} GB/s (off by {m['deviation_us']:.2f} us); bare {m['bare_us']:.2f} us{known}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 2 where there is no GPU."""
    parser = argparse.ArgumentParser(
        prog=SCRIPT, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    formats = ["fp8", "int8row", "int4g128"]
    parser.add_argument("--formats", nargs="+", default=formats, choices=[*FORMATS, "bf16", "int8"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8], help="rows of x")
    parser.add_argument("--products", nargs="+", default=list(GEOMETRIES), choices=[p.name for p in REFERENCE])
    parser.add_argument("--name", default="fixed_costs_gpu", help="results file")
    parser.add_argument("--results", help="folder of the results file (default: docs/results)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("fixed costs of GPU kernels need a CUDA device, and torch sees none\n")
        return 2
    device, environment = torch.device("cuda"), Environment.now("cuda")
    records: list[Record] = []
    for tokens in options.tokens:
        for fmt in options.formats:
            for product in (p for p in REFERENCE if p.name in options.products):
                records.append(measure(product, fmt, tokens, device, environment))
                sys.stdout.write(row(records[-1]) + "\n")
                sys.stdout.flush()
                write_results(options.name, records, options.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
