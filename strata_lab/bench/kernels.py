"""Where the time of a decode step goes on a GPU, operator by operator, against what the card can read.

    python -m strata_lab.bench.kernels [--model qwen3.8-flash] [--batch 1 8] [--context 512] [--weights fp8] [--kv fp8]
                                       [--whole]

One step of a few layers with random weights is run once and its operator calls are recorded (`bench/op_calls.py`). Each
operator is then timed alone: a CUDA graph of its calls on so many sets of weights that the cache cannot hold them. The
step as a whole is timed the same way, and layers that were not built count as the built ones do. Percentages are of the
measured read bandwidth; one above 100 is an error of measurement: it is marked, nothing is written, the exit code is 1.
With `--whole` the preset's engine is measured too, and the step is split by cause (`bench/causes.py`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from strata_lab.bench import causes
from strata_lab.bench.causes import Whole, measure_wholes
from strata_lab.bench.evidence import SLACK_TOKENS
from strata_lab.bench.harness import Environment, Record, RooflineExceeded, write_results
from strata_lab.bench.op_calls import BuiltStep, Conditions, Operator, load_weights_of, operators
from strata_lab.kernels import BACKENDS
from strata_lab.kv_cache import KV_DTYPES
from strata_lab.models.presets import PRESETS, preset_config
from strata_lab.quant import FORMATS
from strata_lab.settings import ConfigError
from strata_lab.telemetry.ceilings import Ceilings, ceilings, median_us

CACHES_BEYOND = 4  # sets of weights hold the cache this many times
MIN_CALLS = 64  # in a graph: a few microseconds each, timed by events of half a microsecond
MAX_SETS = 512
SETS_BYTES = 4 << 30  # most memory for further sets of weights

Clock = Callable[[Sequence[Callable[[], object]]], float]  # calls -> median microseconds of one


@dataclass(frozen=True)
class Row:
    """One operator of the step.

    Attributes:
        label: operator and shape.
        calls: in a step of the whole model.
        us: of one call.
        nbytes: that one call has to move.
        share: of the read bandwidth, 1.0 is all.
        from_cache: the sets of weights may have fitted into the cache.
        router_bytes: bytes of the router, in an operator that does more than route.
    """

    label: str
    calls: int
    us: float
    nbytes: int
    share: float
    from_cache: bool
    router_bytes: int = 0

    @property
    def impossible(self) -> bool:
        """Faster than the memory: the figure is wrong."""
        return self.share > 1.0


@dataclass(frozen=True)
class Report:
    """A measured step.

    Attributes:
        conditions: what was measured.
        ceiling: the card's limits.
        rows: operators in the order of the step.
        step_us: the whole step, layers that were not built included.
    """

    conditions: Conditions
    ceiling: Ceilings
    rows: list[Row]
    step_us: float

    @property
    def sum_us(self) -> float:
        """All operators, each timed alone."""
        return sum(row.calls * row.us for row in self.rows)

    @property
    def step_bytes(self) -> int:
        """Bytes of a whole step."""
        return sum(row.calls * row.nbytes for row in self.rows)

    @property
    def share(self) -> float:
        """Of the read bandwidth, for the whole step."""
        return share_of(self.step_bytes, self.step_us, self.ceiling.bytes_s)

    @property
    def impossible(self) -> bool:
        """Whether a figure is above what the memory can deliver."""
        return self.share > 1.0 or any(row.impossible for row in self.rows)


def share_of(nbytes: int, us: float, bytes_s: float) -> float:
    """Bytes per second over the ceiling."""
    return nbytes / (us * 1e-6) / bytes_s


def num_sets(wanted_bytes: int, call_bytes: int, set_bytes: int, present: int) -> int:
    """How many sets of weights to use.

    Args:
        wanted_bytes: all sets together should move this much.
        call_bytes: that a call on one set moves.
        set_bytes: memory of a set; 0 for an operator without weights, which keeps the sets there are.
        present: sets there are.
    """
    if not set_bytes:
        return present
    wanted = -(-wanted_bytes // max(1, call_bytes))
    return max(present, min(wanted, MAX_SETS, present + SETS_BYTES // set_bytes))


def measure(conditions: Conditions, step: BuiltStep, ceiling: Ceilings, clock: Clock) -> Report:
    """Time every operator of a step, and the step."""
    rows = [_row(operator, conditions, ceiling, clock) for operator in operators(step)]
    built, layers = step.config.num_layers, conditions.num_layers
    step_us = clock([step.run])
    if layers > built:
        step_us += (layers - built) * clock([step.run_layers]) / built
    return Report(conditions, ceiling, rows, step_us)


def _row(operator: Operator, conditions: Conditions, ceiling: Ceilings, clock: Clock) -> Row:
    wanted = CACHES_BEYOND * ceiling.cache_bytes
    sets = num_sets(wanted, operator.nbytes, operator.set_bytes, len(operator.calls))
    calls = operator.on_sets(sets)
    us = clock(calls * -(-MIN_CALLS // len(calls)))
    count = operator.per_layer * conditions.num_layers + operator.per_step
    from_cache = operator.set_bytes > 0 and sets * operator.nbytes < wanted
    share = share_of(operator.nbytes, us, ceiling.bytes_s)
    return Row(operator.label, count, us, operator.nbytes, share, from_cache, operator.router_bytes)


def table(report: Report, built_layers: int) -> Iterator[str]:
    """The report as lines of text."""
    c, top, launch = report.conditions, report.ceiling, report.ceiling.launch
    dependent = "" if launch.dependent_us is None else f", {launch.dependent_us:.2f} with dependent launch"
    yield f"{c.model}, batch {c.batch}, context {c.context}, {c.weight_format} weights, {c.kv_cache_dtype} KV cache"
    yield (
        f"{top.name}: reads {top.bytes_s / 1e12:.2f} TB/s ({top.reader}); a kernel in a graph costs "
        f"{launch.graph_us:.2f} us{dependent}, {launch.eager_us:.1f} from Python"
    )
    yield f"{'operator':34}{'calls':>6}{'us each':>10}{'us/step':>10}{'MB each':>10}{'GB/s':>8}{'of ceiling':>12}"
    for row in report.rows:
        speed = row.nbytes / (row.us * 1e-6) / 1e9
        mark = "  ERROR: faster than the memory" if row.impossible else "  (cache)" if row.from_cache else ""
        yield (
            f"{row.label:34}{row.calls:6}{row.us:10.2f}{row.calls * row.us:10.1f}{row.nbytes / 1e6:10.3f}"
            f"{speed:8.0f}{row.share:12.1%}{mark}"
        )
    mark = "  ERROR: faster than the memory" if report.share > 1.0 else ""
    yield f"{'sum of operators':50}{report.sum_us:10.1f}"
    yield f"{'measured step':50}{report.step_us:10.1f}{report.step_bytes / 1e6:10.1f}{'':8}{report.share:12.1%}{mark}"
    if built_layers < c.num_layers:
        yield f"({built_layers} of {c.num_layers} layers were built; the others count as these do)"
    floor_us = report.step_bytes / top.bytes_s * 1e6
    rate, roof = c.batch * 1e6 / report.step_us, c.batch * 1e6 / floor_us
    yield f"{rate:.0f} tok/s without the host, of {roof:.0f} if a step only read its bytes ({floor_us:.0f} us)"


def as_record(report: Report, environment: Environment, script: str, built_layers: int) -> Record:
    """One record for a results file. Raises `RooflineExceeded` for a figure above 100%."""
    c = report.conditions
    for row in report.rows:
        if row.impossible:
            raise RooflineExceeded(f"{row.label}: {row.share:.1%} of the measured read bandwidth cannot be")
    metrics = {
        "step_us": report.step_us,
        "sum_of_operators_us": report.sum_us,
        "step_bytes": report.step_bytes,
        "output_tok_s": c.batch * 1e6 / report.step_us,
        "mbu": report.share,
        "bandwidth_gb_s": report.ceiling.bytes_s / 1e9,
        "launch_graph_us": report.ceiling.launch.graph_us,
        "launch_dependent_us": report.ceiling.launch.dependent_us,
        "launch_eager_us": report.ceiling.launch.eager_us,
        "operators": [asdict(row) for row in report.rows],
    }
    note = "random weights; operators and step in CUDA graphs, without the host"
    return environment.record(
        f"kernels/{c.model}/x{c.batch}",
        script=script,
        conditions=condition_names(report, built_layers),
        metrics=metrics,
        note=note,
    )


def condition_names(report: Report, built_layers: int) -> dict[str, Any]:
    """What was measured, as records say it."""
    c = report.conditions
    return {
        "model": c.model, "weight_format": c.weight_format, "kv_cache_dtype": c.kv_cache_dtype, "batch": c.batch,
        "context": c.context, "backend": c.backend, "sampler": c.sampler, "layers": c.num_layers,
        "layers_built": built_layers,
    }  # fmt: skip


def by_cause(
    report: Report, whole: Whole, environment: Environment, script: str, built_layers: int
) -> tuple[list[str], Record | None]:
    """The split of a step as lines and as a record, which is None where the captured step is impossibly fast."""
    top = report.ceiling.bytes_s
    found = causes.split(report.rows, top, whole)
    lines = list(causes.table(found, whole))
    share = causes.captured_mbu(whole, report.step_bytes, top)
    if share > 1.0:
        return [*lines, f"ERROR: the captured step is faster than the memory ({share:.1%})"], None
    names = condition_names(report, built_layers)
    return lines, causes.record(found, whole, report.step_bytes, top, names, environment, script)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Checked command line; exits with code 2 and a sentence where something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m strata_lab.bench.kernels", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="qwen3.8-flash", help=f"a preset: {', '.join(PRESETS)}, or preset@scale")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="requests in a step; one table for each")
    parser.add_argument("--context", type=int, default=512, help="tokens in the cache per request")
    parser.add_argument("--weights", choices=FORMATS, default="fp8", help="weight format")
    parser.add_argument("--kv", choices=KV_DTYPES, default="fp8", help="KV cache dtype")
    parser.add_argument("--backend", choices=BACKENDS, default="triton", help="who computes the operators")
    parser.add_argument("--layers", type=int, default=4, help="layers to build; the others count as these do")
    parser.add_argument("--sampler", choices=["greedy", "drawn"], default="greedy", help="what ends the step")
    parser.add_argument("--whole", action="store_true", help="measure an engine's step too, and split it by cause")
    parser.add_argument("--fresh", action="store_true", help="measure the card's limits again")
    parser.add_argument("--json", type=Path, help="results file to write, ending in .json")
    options = parser.parse_args(argv)
    try:
        config = preset_config(options.model)
    except ConfigError as error:
        parser.error(str(error))
    if config is None:
        parser.error(f"--model {options.model!r} must be one of {', '.join(PRESETS)}, or one of them with @scale")
    if min(options.batch) < 1:
        parser.error(f"--batch {min(options.batch)} must be at least 1; try 1")
    if not 1 <= options.context < config.max_position:
        parser.error(f"--context {options.context} must be from 1 to {config.max_position - 1}; try 512")
    if options.whole and (options.backend, options.sampler) != ("triton", "greedy"):
        parser.error("--whole measures an engine, which decodes with --backend triton and here --sampler greedy")
    if options.whole and options.context + SLACK_TOKENS > config.max_position:
        parser.error(f"--context {options.context} must be at most {config.max_position - SLACK_TOKENS} with --whole")
    if not 1 <= options.layers <= config.num_layers:
        parser.error(f"--layers {options.layers} must be from 1 to {config.num_layers}; try 4")
    if options.json is not None and options.json.suffix != ".json":
        parser.error(f"--json {options.json} must end in .json; try {options.json.with_suffix('.json')}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    options = arguments(argv)
    if not torch.cuda.is_available():
        sys.stderr.write(f"bench.kernels needs a CUDA device, and torch {torch.__version__} sees none here\n")
        return 2
    device = torch.device("cuda")
    ceiling, environment = ceilings(device, fresh=options.fresh), Environment.now("cuda")
    wholes: dict[int, Whole] = {}
    if options.whole:  # before anything else takes memory
        wholes = measure_wholes(options.model, options.weights, options.kv, options.batch, options.context)
    config, weights = load_weights_of(options.model, options.weights, options.layers, device, torch.bfloat16)
    geometry = preset_config(options.model)
    assert geometry is not None
    records, bad = [], False
    words = list(argv if argv is not None else sys.argv[1:])
    if options.json is not None and "--json" in words:  # where the file went is no part of what was measured
        at = words.index("--json")
        del words[at : at + 2]
    script = " ".join(["python -m strata_lab.bench.kernels", *words])
    for batch in options.batch:
        conditions = Conditions(
            options.model, batch, options.context, options.weights, options.kv, geometry.num_layers, options.backend,
            options.sampler,
        )  # fmt: skip
        step = BuiltStep(conditions, config, weights, device, torch.bfloat16)
        report = measure(conditions, step, ceiling, lambda calls: median_us(calls, device))
        sys.stdout.write("\n".join(table(report, config.num_layers)) + "\n\n")
        bad = bad or report.impossible
        if not report.impossible:
            records.append(as_record(report, environment, script, config.num_layers))
        if batch in wholes:
            lines, record = by_cause(report, wholes[batch], environment, script, config.num_layers)
            sys.stdout.write("\n".join(lines) + "\n\n")
            bad = bad or record is None
            records += [record] if record is not None else []
    if bad:
        sys.stderr.write("a figure is above 100% of the measured read bandwidth: nothing is recorded; try --fresh\n")
        return 1
    if options.json is not None:
        sys.stdout.write(f"records: {write_results(options.json.stem, records, options.json.parent)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
