"""Try the tiles of the mixture-of-experts kernels on this card: `python -m strata_lab.bench.sweep_moe`.

Per kernel of a decode step, and then for the whole block made of the best of them: every candidate is first compared
with a float64 composition, then timed in a CUDA graph over several tokens' routings and several copies of the weights,
so that nothing is in the cache by luck. Candidates are compiled beforehand by a pool of processes, each of which runs
them once: Triton's cache on disk is warm when the clock starts. One that fails is reported and skipped. Prints the best
five of each stage beside the time that its bytes take; `--json` keeps everything.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strata_lab.bench.sweep_moe_plan import (
    EXPERTS,
    HIDDEN,
    TOP_K,
    WIDTH,
    Overrides,
    Result,
    best,
    candidates,
    merged,
    stages,
    table,
)
from strata_lab.quant import engine_granularity, get_format
from strata_lab.quant.base import LinearWeight, QuantFormat

EPS = 1e-6
COPIES = 3  # of the weights, 0.5 GB each in FP8
CALLS = 12  # in a graph, each with its own tokens
CLEAR = 0.02  # distance of the last chosen logit from the next, below which rounding could choose another expert
TOLERANCE = 1.5e-2  # of a row's largest element; bfloat16 rounds an element by 4e-3
COMPILE_SHARE, STAGES_SHARE = 0.45, 0.8  # of the time limit, by when compiling and the stages must end


class Bench:
    """Weights, tokens and expected results of one format and step size on a card."""

    def __init__(self, weights: str, tokens: int, device: torch.device, *, checked: bool = True) -> None:
        self.weights, self.tokens, self.device = weights, tokens, device
        torch.manual_seed(0)
        copies = COPIES if checked else 1
        self.experts = [(self._weight(2 * WIDTH, HIDDEN), self._weight(HIDDEN, WIDTH)) for _ in range(copies)]
        self.norm = (1 + 0.1 * torch.randn(HIDDEN, device=device)).bfloat16()
        self.router = (2 * torch.randn(EXPERTS, HIDDEN, device=device) / HIDDEN**0.5).bfloat16()
        self.inputs = [self._tokens() for _ in range(CALLS)]
        chosen = [self._logits(x).topk(TOP_K, dim=-1).indices for x in self.inputs]
        self.distinct = sum(ids.unique().numel() for ids in chosen) / CALLS
        self.exact = self._exact(self.inputs[0], chosen[0]) if checked else None

    def _weight(self, rows: int, columns: int) -> LinearWeight:
        """Of all experts, quantized one by one: in float32 they would take four times the room."""
        fmt = _format(self.weights)
        parts = [fmt.quantize(torch.randn(rows, columns, device=self.device) / columns**0.5) for _ in range(EXPERTS)]

        def joined(name: str) -> Any:
            tensors = [getattr(p, name) for p in parts]
            if tensors[0] is None:
                return None
            return torch.cat([t.view(torch.uint8) for t in tensors]).view(tensors[0].dtype)

        scales, mins = joined("scales"), joined("mins")
        return replace(parts[0], shape=(EXPERTS * rows, columns), data=joined("data"), scales=scales, mins=mins)

    def _normed(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS)
        return (wide * (scale * self.norm.float())).bfloat16().double()

    def _logits(self, x: Tensor) -> Tensor:
        return self._normed(x) @ self.router.double().t()

    def _tokens(self) -> Tensor:
        """Tokens [T, hidden] whose experts rounding cannot change."""
        x = torch.randn(8 * self.tokens + 64, HIDDEN, device=self.device).bfloat16()
        top = self._logits(x).topk(TOP_K + 1, dim=-1).values
        return x[top[:, -2] - top[:, -1] > CLEAR][: self.tokens].contiguous()

    def _exact(self, x: Tensor, ids: Tensor) -> Tensor:
        h = self._normed(x)
        shares = torch.softmax(self._logits(x).gather(1, ids), dim=-1)
        gate_up, down = self.experts[0]
        fmt = _format(self.weights)
        out = x.double()
        for e in ids.unique().tolist():
            share = (shares * (ids == e)).sum(dim=-1, keepdim=True)
            wide = fmt.dequantize(gate_up.rows(e * 2 * WIDTH, (e + 1) * 2 * WIDTH)).double()
            narrow = fmt.dequantize(down.rows(e * HIDDEN, (e + 1) * HIDDEN)).double()
            gate, up = (h @ wide.t()).chunk(2, dim=-1)
            out = out + share * ((torch.nn.functional.silu(gate) * up) @ narrow.t())
        return out

    def block(self, call: int, config: Any) -> Tensor:
        """The whole operator on the tokens of a call."""
        from strata_lab.kernels.gpu.moe import moe_block_triton

        gate_up, down = self.experts[call % len(self.experts)]
        return moe_block_triton(
            self.inputs[call], self.norm, EPS, self.router, gate_up, down, top_k=TOP_K, normalize=True, config=config
        )

    def error(self, config: Any) -> float:
        """The largest error of an element, of its row's largest; NaN is infinite."""
        assert self.exact is not None
        y = self.block(0, config).double()
        ratio = ((y - self.exact).abs().amax(dim=-1) / self.exact.abs().amax(dim=-1)).max().item()
        return ratio if ratio == ratio else float("inf")

    def nbytes(self, stage: str) -> float:
        """Bytes of a call that must come from memory."""
        gate_up, down = (w.nbytes / EXPERTS * self.distinct for w in self.experts[0])
        router = float(self.router.numel() * 2)
        known = {"logits": router, "gate_up": gate_up, "down": down, "block": router + gate_up + down}
        return known.get(stage, 0.0)

    def call(self, stage: str, index: int, config: Any) -> Callable[[], object]:
        """What runs `stage` of call `index`, with all that goes before it done."""
        if stage == "block":
            return lambda: self.block(index, config)
        from strata_lab.kernels.gpu.moe_step import Routed, Step, empty_routing, select

        x = self.inputs[index]

        def fresh() -> Step:
            return Step(x, *self.experts[index % len(self.experts)], TOP_K, config)

        if stage == "logits":
            return lambda: fresh().norm_logits(self.norm, EPS, self.router)
        step = fresh()
        logits = step.norm_logits(self.norm, EPS, self.router)
        weights, ids = empty_routing(x, TOP_K, torch.int32)
        if self.tokens == 1:
            routed = Routed("logits", weights, ids, logits)
        else:
            plan = step.empty_plan()

            def route() -> None:
                select(logits, weights, ids, True, plan, config.pairs)

            route()
            if stage == "select":
                return route
            routed = Routed("plan", weights, ids, plan=plan)
        if stage == "gate_up":
            return lambda: step.hidden_units(routed)
        h, units = step.hidden_units(routed)
        if self.tokens == 1:
            return lambda: step.down_one(h, units, routed, x)
        if stage == "down":
            return lambda: step.down_pairs(h, units, routed)
        y = step.down_pairs(h, units, routed)
        return lambda: step.combine(y, weights, x)


def _format(weights: str) -> QuantFormat:
    """In the variant that an engine makes on a GPU."""
    return get_format(weights, engine_granularity(weights, "cuda"))


def _config(weights: str, overrides: Overrides) -> Any:
    from strata_lab.kernels.gpu.moe import config_of

    return replace(config_of(_format(weights).quantize(torch.zeros(1, 128))), **overrides)


@functools.cache
def _worker_bench(weights: str, tokens: int) -> Bench:
    return Bench(weights, tokens, torch.device("cuda"), checked=False)


def _compile(weights: str, tokens: int, overrides: Overrides) -> str:
    """Run one candidate in a process of the pool; what went wrong, or empty."""
    try:
        _worker_bench(weights, tokens).block(0, _config(weights, overrides))
        torch.cuda.synchronize()
    except Exception as problem:  # whatever it is, the others go on
        return f"{type(problem).__name__}: {problem}"[:300]
    return ""


def warm(work: Sequence[tuple[str, int, Overrides]], deadline: float, processes: int) -> int:
    """Compile candidates in parallel until `deadline` (`time.monotonic`); how many are done."""
    if processes < 1 or not work:
        return 0
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    futures = [pool.submit(_compile, *one) for one in work]
    done, _ = wait(futures, timeout=max(0.0, deadline - time.monotonic()))
    children = list((pool._processes or {}).values())  # no public way to stop what is running
    pool.shutdown(wait=False, cancel_futures=True)
    if len(done) < len(futures):
        for child in children:
            child.terminate()
    return sum(f.exception() is None for f in done)


def measured(bench: Bench, stage: str, overrides: Overrides, bytes_s: float) -> Result:
    """Check a candidate, then time it."""
    from strata_lab.telemetry.ceilings import median_us

    result = Result(stage, bench.tokens, bench.weights, overrides, byte_us=bench.nbytes(stage) / bytes_s * 1e6)
    try:
        config = _config(bench.weights, overrides)
        result.error = bench.error(config)
        if result.error > TOLERANCE:
            result.problem = f"wrong: error {result.error:.2g} of the row's largest"
            return result
        result.us = median_us([bench.call(stage, i, config) for i in range(CALLS)], bench.device)
    except Exception as problem:  # whatever it is, the others go on
        result.problem = f"{type(problem).__name__}: {problem}"[:300]
    return result


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def sweep(
    formats: Sequence[str], tokens: Sequence[int], seconds: float, processes: int,
    report: Callable[[list[Result]], None],
) -> list[Result]:  # fmt: skip
    """Everything, in `seconds`; `report` is called with all results so far whenever a stage has ended."""
    from strata_lab.telemetry import bandwidth

    start = time.monotonic()
    cases = list(itertools.product(formats, tokens))
    queues = {
        (weights, t, stage): candidates(stage, t, weights) for weights, t in cases for stage in stages(t)
    }  # fmt: skip
    turns = itertools.zip_longest(*([(w, t, o) for o in queue] for (w, t, _), queue in queues.items()))
    work = [one for turn in turns for one in turn if one is not None]
    _say(f"compiling {len(work)} candidates in {processes} processes")
    done = warm(work, start + COMPILE_SHARE * seconds, processes)
    _say(f"compiled {done} of {len(work)} after {time.monotonic() - start:.0f} s")
    device = torch.device("cuda")
    bytes_s = bandwidth.ceiling("cuda").bytes_s
    _say(f"reads {bytes_s / 1e12:.2f} TB/s")
    results: list[Result] = []
    share = (STAGES_SHARE * seconds - (time.monotonic() - start)) / len(queues)
    for weights, t in cases:
        bench = Bench(weights, t, device)
        for stage in stages(t):
            end = time.monotonic() + share
            for number, overrides in enumerate(queues[weights, t, stage]):
                if number and time.monotonic() > end:
                    break
                results.append(measured(bench, stage, overrides, bytes_s))
            _say(table(results, stage, t, weights))
            report(results)
        end = time.monotonic() + (1 - STAGES_SHARE) * seconds / len(cases)
        # of several tokens both stages choose `pairs`, so more of each are needed to agree
        fastest = [[r.overrides for r in best(results, stage, t, weights, 6)] for stage in ("gate_up", "down")]
        for number, overrides in enumerate([{}, *merged(*fastest)]):
            if number and time.monotonic() > end:
                break
            results.append(measured(bench, "block", overrides, bytes_s))
        _say(table(results, "block", t, weights))
        report(results)
        del bench
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=["fp8"], help="of the experts, as an engine makes them")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8], help="step sizes, 1 to 16")
    parser.add_argument("--seconds", type=float, default=240.0, help="time limit")
    parser.add_argument("--processes", type=int, default=min(15, os.cpu_count() or 1), help="that compile")
    parser.add_argument("--json", type=Path, help="where all results go")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("sweep_moe times kernels on a CUDA card, and there is none")

    def report(results: list[Result]) -> None:
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(r) for r in results], indent=1))

    with torch.inference_mode():
        sweep(options.formats, options.tokens, options.seconds, options.processes, report)


if __name__ == "__main__":
    main()
