"""How fast the CPU products are on this machine, in the shapes of SmolLM2-135M, against its measured read bandwidth.

    python -m strata_lab.bench.kernels_cpu [--formats int4 int8] [--rows 1 8 128] [--isa avx2]

Per format and number of rows T it times each product over all 30 layers (so weights come from where they come from in a
model, not from the first-level cache) and the whole step, the LM head included. Best of several interleaved rounds, a
plain read of as many bytes among them: percentages refer to that. Weights are random; attention, sampling and Python
between the products are not in it, so the implied tokens per second are ceilings.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from strata_lab.kernels.cpu import build
from strata_lab.kernels.cpu.packing import pack
from strata_lab.quant import FORMATS, get_format, head_format
from strata_lab.quant.base import LinearWeight

HIDDEN, MLP, QKV, LAYERS, VOCABULARY = 576, 1536, 960, 30, 49152
ROUNDS = 7
MIN_ROUND_S = 0.03


@dataclass(frozen=True)
class Product:
    """One kind of product: its weights (one per layer) and what is fused with it."""

    name: str
    weights: list[LinearWeight]
    norm: bool = False
    silu_mul: bool = False
    residual: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of weights that one step reads for it."""
        return sum(weight.nbytes for weight in self.weights)

    def calls(self, op: Callable[..., Tensor], rows: int) -> list[Callable[[], object]]:
        """One call per layer, on `rows` rows."""
        n, k = self.weights[0].shape
        x = torch.randn(rows, k)
        norm = torch.ones(k) if self.norm else None
        residual = torch.randn(rows, n) if self.residual else None
        fused = (None, norm, 1e-5, residual, self.silu_mul)
        return [functools.partial(op, x, w.data, w.scales, w.mins, n, *fused) for w in self.weights]


def smollm2_products(weight_format: str) -> list[Product]:
    """The five products of a step, with random weights of their own for each layer."""

    def weights(name: str, n: int, k: int, count: int) -> list[LinearWeight]:
        packed = pack(get_format(name).quantize(torch.randn(n, k) / k**0.5))
        return [packed, *(_copy(packed) for _ in range(count - 1))]

    return [
        Product("qkv", weights(weight_format, QKV, HIDDEN, LAYERS), norm=True),
        Product("o", weights(weight_format, HIDDEN, HIDDEN, LAYERS), residual=True),
        Product("gate_up", weights(weight_format, 2 * MLP, HIDDEN, LAYERS), norm=True, silu_mul=True),
        Product("down", weights(weight_format, HIDDEN, MLP, LAYERS), residual=True),
        Product("head", weights(head_format(weight_format), VOCABULARY, HIDDEN, 1), norm=True),
    ]


def _copy(weight: LinearWeight) -> LinearWeight:
    scales, mins = (None if t is None else t.clone() for t in (weight.scales, weight.mins))
    return replace(weight, data=weight.data.clone(), scales=scales, mins=mins)


def best_times(functions: list[Callable[[], object]], rounds: int = ROUNDS) -> list[float]:
    """Seconds per call of each function, best of `rounds` rounds in which all take turns."""
    best = [float("inf")] * len(functions)
    for _ in range(rounds):
        for i, function in enumerate(functions):
            calls, start = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - start) < MIN_ROUND_S or calls == 0:
                function()
                calls += 1
            best[i] = min(best[i], elapsed / calls)
    return best


def in_turn(calls: list[Callable[[], object]]) -> Callable[[], None]:
    """A function that makes all calls, one after the other."""

    def run() -> None:
        for call in calls:
            call()

    return run


def report(weight_format: str, rows: list[int], isa: build.Isa) -> Iterator[str]:
    """Lines of the table of one format."""
    ops = build.load(isa)
    products = smollm2_products(weight_format)
    sizes = [product.nbytes for product in products]
    sizes.append(sum(sizes))
    # a plain read of as many bytes, so that as much of them is in the caches
    probes = [functools.partial(ops.read_probe, torch.ones(size // 4)) for size in sizes]
    yield f"{weight_format}, isa {isa}, {torch.get_num_threads()} threads, {sizes[-1] / 1e6:.1f} MB of weights a step"
    for count in rows:
        calls = [product.calls(ops.linear.default, count) for product in products]
        layers = [call for layer in zip(*calls[:-1], strict=True) for call in layer]  # in the order of a model
        runs = [*(in_turn(product) for product in calls), in_turn(layers + calls[-1])]
        times = best_times([*runs, *probes])
        for i, product in enumerate(products):
            (n, k), calls_made = product.weights[0].shape, len(product.weights)
            rate = 2 * count * n * k * calls_made / times[i] / 1e9
            speed = _speed(sizes[i], times[i], times[len(runs) + i])
            yield f"  T={count:<4} {product.name:8} {times[i] / calls_made * 1e6:9.1f} us  {speed} {rate:6.0f} GFLOP/s"
        step = times[len(products)]
        speed = _speed(sizes[-1], step, times[-1])
        yield f"  T={count:<4} step     {step * 1e3:9.2f} ms  {speed}, ceiling {count / step:.0f} tok/s"


def _speed(nbytes: int, seconds: float, probe_seconds: float) -> str:
    share = 100 * probe_seconds / seconds
    return f"{nbytes / seconds / 1e9:6.1f} GB/s, {share:3.0f}% of a plain read at {nbytes / probe_seconds / 1e9:5.1f}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="speed of the CPU products in the shapes of SmolLM2-135M")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 16, 128])
    parser.add_argument("--isa", choices=["native", "avx2"], default="native")
    arguments = parser.parse_args()
    for name in arguments.formats:
        for line in report(name, arguments.rows, arguments.isa):
            print(line, flush=True)


if __name__ == "__main__":
    main()
