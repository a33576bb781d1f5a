"""Scheduling under fire, against its bars: five times the load, urgent requests, long prompts, second turns, blocks.

`python -m strata_lab.bench.overload` measures one engine, with a real model:

    storm      requests come five times as fast as they can be served: what those wait that are taken, and how soon
               after the storm the engine is as it was
    urgent     time to first token of requests of high priority, alone and while all seats do batch work
    long       gaps between tokens of running streams while a long prompt comes, with and without `pd_split`
    turn       time to first token of a conversation's second turn beside that of its first
    blocks     what it costs the host to give out and take back a block
    tables     decode steps over blocks that lie anywhere in the pool beside those over blocks that follow each other:
               what compaction could win (no bar: it is not done, docs/decisions/0013)

Times of requests are the engine's, from their arrival. Each part has its bar, and the record says whether it is kept.

What is measured is a user's second minute. The first steps of a new shape, on the prompt lane too, are compiled and
captured; that is the start of an engine and not its scheduling. So each part of the engine runs once
unmeasured, the same mix for a shorter time (`Sizes.warm_up`); `long` sends one unmeasured prompt after each change of
setting instead. All that is measured then counts, and the record has median, p95 and worst of what was waited, and
`captured_bytes`, the memory of steps that were captured nevertheless.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from strata_lab.bench.harness import REPOSITORY, Environment, Record, write_results
from strata_lab.bench.interference import disturb
from strata_lab.bench.traffic import Traffic, first_token_ms, latencies_ms
from strata_lab.block_manager import BlockManager
from strata_lab.config import DEFAULT_MODEL
from strata_lab.events import StepEvent
from strata_lab.sampling_params import SamplingParams
from strata_lab.session import Session

SCRIPT = "python -m strata_lab.bench.overload"
SEATS, TIMES_CAPACITY = 8, 5.0
QUEUE = 2  # a full queue adds its length over the seats to every wait: a quarter
MAX_MODEL_LEN = 4096
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32  # of the storm's requests
URGENT_TOKENS, BATCH_TOKENS, BATCH_OUTPUT = 128, 256, 64
TURN_TOKENS = {"cpu": 512, "cuda": 3072}  # of a first turn: a card reads 512 tokens in the time of two or three steps
ANSWER_TOKENS, NEXT_TOKENS = 32, 16
# What an urgent prompt is served best with: on a CPU a lane of its own, so that it waits for no step with another
# prompt; a card's lane would have a quarter of its multiprocessors, and steps are short where they hold few tokens.
URGENT_SETTINGS: dict[str, dict[str, Any]] = {"cpu": {"pd_split": True}, "cuda": {"max_num_batched_tokens": 256}}
LONG_TOKENS, LONG_STREAMS = 1024, 4
WARM = "Measured after an unmeasured run of the same mix, whose size is conditions.warm_up."
WARMED = {"storm", "urgent", "turn", "tables"}
RECOVERED = 2.0  # times what a first token takes in an idle engine
BARS: dict[str, tuple[str, float]] = {  # part to the metric that counts, and the most it may be
    "storm": ("latency_ratio", 1.3), "storm, after": ("recovery_s", 2.0), "urgent": ("ttft_p95_ratio", 2.0),
    "long": ("gap_p99_ratio", 0.5), "turn": ("ttft_ratio", 0.2), "blocks": ("us_per_block", 1.0),
}  # fmt: skip


@dataclass
class Sizes:
    """How long each part is measured."""

    seconds: float = 10.0
    probes: int = 20
    rounds: int = 2
    turns: int = 5
    long_tokens: int = LONG_TOKENS

    def warm_up(self) -> Sizes:
        """Of the run before that is not measured: the same mix, long enough to bring the shapes of its steps."""
        return replace(self, seconds=self.seconds / 8, probes=math.ceil(self.probes / 2), rounds=1, turns=1)


def _waits(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median, p95 and worst of milliseconds."""
    return {
        f"{name}_median_ms": statistics.median(values), f"{name}_p95_ms": _p95(values), f"{name}_worst_ms": max(values)
    }  # fmt: skip


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[round(0.95 * (len(values) - 1))]


# -- the parts --------------------------------------------------------------------------------------------------------


def storm(engine: Any, sizes: Sizes) -> dict[str, Any]:
    """What a request waits at capacity and in the storm, and when the engine is itself again."""
    engine.reset_prefix_cache()
    idle_ms = statistics.median(first_token_ms(engine, 16) for _ in range(5))
    calm = Traffic(engine, PROMPT_TOKENS, OUTPUT_TOKENS)
    calm.keep(1, 0.05)
    calm.until_idle()
    alone_s, started = latencies_ms(calm.done)[0] / 1e3, time.perf_counter()
    while (spent := time.perf_counter() - started) < alone_s:  # one after the other, so that they do not march in step
        calm.keep(1 + int((SEATS - 1) * spent / alone_s), 0.01)
    calm.done.clear()
    started = time.perf_counter()
    while time.perf_counter() - started < sizes.seconds or not calm.done:
        calm.keep(SEATS, 0.05)
    rate = len(calm.done) / (time.perf_counter() - started)
    calm.drop()
    engine.apply(max_waiting=QUEUE)
    cursor = engine.events.cursor
    rough = Traffic(engine, PROMPT_TOKENS, OUTPUT_TOKENS)
    storm_s = due = time.perf_counter()

    def amid() -> list[Session]:  # the first found an empty engine
        return [s for s in rough.done if s.request.arrival_s - storm_s > alone_s]

    while (now := time.perf_counter()) - storm_s < sizes.seconds + alone_s or not amid():
        while due <= now:
            rough.send()
            due += 1.0 / (TIMES_CAPACITY * rate)
        rough.take(max(0.0, due - time.perf_counter()))
    ended = time.perf_counter()
    while first_token_ms(engine, 16, while_waiting=lambda: rough.take(0.001)) > RECOVERED * idle_ms:
        assert time.perf_counter() - ended < 60.0, "the engine does not recover"
    recovery_s = time.perf_counter() - ended
    rough.until_idle()
    engine.apply(max_waiting=1024)
    steps = [e for e in engine.events.since(cursor)[0] if isinstance(e, StepEvent)]
    at_capacity, in_storm = latencies_ms(calm.done), latencies_ms(amid())
    return {
        "latency_ratio": statistics.median(in_storm) / statistics.median(at_capacity), "recovery_s": recovery_s,
        "alone_ms": alone_s * 1e3, **_waits("capacity", at_capacity), **_waits("storm", in_storm),
        "capacity_requests_s": rate,
        "accepted": len(rough.done), "refused": rough.refused,
        "most_waiting": max(e.num_waiting for e in steps), "max_waiting": QUEUE,
    }  # fmt: skip


def urgent(engine: Any, sizes: Sizes) -> dict[str, Any]:
    """First tokens of urgent requests, in an idle engine and among batch work."""
    engine.reset_prefix_cache()
    settings, usual = {"scheduling_policy": "priority", **URGENT_SETTINGS[engine.device.type]}, engine.optimizations
    engine.apply(**settings)
    idle = [first_token_ms(engine, URGENT_TOKENS, 1) for _ in range(sizes.probes)]
    load = Traffic(engine, BATCH_TOKENS, BATCH_OUTPUT)
    before = engine.stats()
    pauses = random.Random(3)
    among: list[float] = []
    while len(among) < sizes.probes:
        until = time.perf_counter() + pauses.uniform(0.1, 0.6)
        while time.perf_counter() < until:
            load.keep(2 * SEATS, 0.02)
        among.append(first_token_ms(engine, URGENT_TOKENS, 1, lambda: load.keep(2 * SEATS, 0.002)))
    after = engine.stats()
    load.drop()
    engine.apply(**{name: getattr(usual, name) for name in settings})
    return {
        "ttft_p95_ratio": _p95(among) / _p95(idle), **_waits("idle", idle), **_waits("among", among),
        "batch_preemptions": after.num_preemptions - before.num_preemptions,
        "batch_tokens": after.num_output_tokens - before.num_output_tokens,
    }  # fmt: skip


def long(engine: Any, sizes: Sizes) -> dict[str, Any]:
    """`interference.py`, both settings by turns; the first prompt after each change of setting is not measured."""
    found: dict[bool, list[Any]] = {False: [], True: []}
    for turn in range(2 * sizes.rounds):
        split = turn % 2 == 1
        engine.apply(pd_split=split)
        disturb(engine, LONG_STREAMS, sizes.long_tokens)  # the first of a setting compiles and captures its shapes
        found[split].append(disturb(engine, LONG_STREAMS, sizes.long_tokens))
    engine.apply(pd_split=False)
    made: dict[str, Any] = {"calm_ms": statistics.median(d.calm_ms for d in found[False] + found[True])}
    for name, runs in (("mixed", found[False]), ("split", found[True])):
        made |= {f"{name}_{gap}": statistics.median(getattr(d, gap) for d in runs) for gap in ("p99_ms", "median_ms")}
        made |= {f"{name}_worst_ms": max(d.worst_ms for d in runs)}
        made |= {f"{name}_ttft_ms": statistics.median(d.ttft_ms for d in runs)}
    return {"gap_p99_ratio": made["split_p99_ms"] / made["mixed_p99_ms"], **made}


def turn(engine: Any, sizes: Sizes) -> dict[str, Any]:
    """Two turns of conversations; the second repeats all that was said."""
    numbers, vocabulary = random.Random(9), engine.model_config.vocab_size
    answer = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    pairs = []
    for _ in range(sizes.turns):
        said = [numbers.randrange(5, vocabulary) for _ in range(TURN_TOKENS[engine.device.type])]
        first = engine.generate([said], answer)[0]
        more = [numbers.randrange(5, vocabulary) for _ in range(NEXT_TOKENS)]
        second = engine.generate([[*said, *first.token_ids, *more]], answer)[0]
        pairs.append((first.ttft_ms, second.ttft_ms, second.num_cached_tokens))
    first, second = _waits("first", [pair[0] for pair in pairs]), _waits("second", [pair[1] for pair in pairs])
    ratio = second["second_median_ms"] / first["first_median_ms"]
    return {"ttft_ratio": ratio, **first, **second, "cached_tokens": pairs[-1][2]}


def blocks(rounds: int = 5, requests: int = 200, length: int = 64) -> dict[str, Any]:
    """Tables that grow token by token, as they do, and are let go of; microseconds per block, the best of some rounds.

    Amortized: a request that decodes asks for every token and gets a block for every sixteenth.
    """
    size, times = 16, []
    for _ in range(rounds):
        manager = BlockManager(requests * length, size)
        names = [f"r{i}" for i in range(requests)]
        started = time.perf_counter()
        for name in names:
            manager.grow(name, size * length // 2)  # a prompt
        for index in range(length // 2, length):
            for name in names:
                manager.grow(name, size * (index + 1))
        for name in names:
            manager.free(name)
        times.append((time.perf_counter() - started) * 1e6 / (requests * length))
    return {
        "us_per_block": min(times),
        "us_per_block_median": statistics.median(times),
        "num_blocks": requests * length,
    }


def tables(engine: Any, sizes: Sizes) -> dict[str, Any]:
    """Decode steps with block tables in order and in none, by turns; milliseconds."""
    numbers = random.Random(4)
    times: dict[str, list[float]] = {"contiguous": [], "scattered": []}
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    for turn in range(2 * sizes.rounds + 1):
        kind = "scattered" if turn % 2 else "contiguous"
        engine.reset_prefix_cache()
        engine.between_steps(partial(_arrange, scattered=kind == "scattered", numbers=numbers))
        cursor, count = engine.events.cursor, sizes.long_tokens // 2
        vocabulary = engine.model_config.vocab_size
        texts = [[(11 + 97 * s + 31 * i) % vocabulary for i in range(count)] for s in range(LONG_STREAMS)]
        engine.generate(texts, params)
        steps = [e for e in engine.events.since(cursor)[0] if isinstance(e, StepEvent) and not e.num_prefill_tokens]
        if turn > 0:
            times[kind] += [e.forward_ms for e in steps if e.num_decode_tokens == LONG_STREAMS]
    ordered, anywhere = (statistics.median(times[kind]) for kind in ("contiguous", "scattered"))
    return {"scattered_ratio": anywhere / ordered, "contiguous_ms": ordered, "scattered_ms": anywhere}


def _arrange(scheduler: Any, *, scattered: bool, numbers: random.Random) -> None:
    free = scheduler.blocks._free
    free.sort(reverse=True)
    if scattered:
        numbers.shuffle(free)


# -- all of it --------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Any, Sizes], dict[str, Any]]] = {
    "storm": storm, "urgent": urgent, "long": long, "turn": turn, "blocks": lambda engine, sizes: blocks(),
    "tables": tables,
}  # fmt: skip


def verdicts(part: str, metrics: Mapping[str, Any]) -> Iterator[tuple[str, float, bool]]:
    """The bars of a part: metric, limit, whether it is kept."""
    for name, (metric, limit) in BARS.items():
        if name.partition(",")[0] == part:
            yield metric, limit, metrics[metric] <= limit


def measure(model: str, parts: Sequence[str], sizes: Sizes, **options: Any) -> list[Record]:
    """A record per part."""
    from strata_lab.engine import LLMEngine

    records = []
    settings = {"max_num_seqs": SEATS, "max_model_len": MAX_MODEL_LEN} | options
    with LLMEngine(model, **settings) as engine:
        environment = Environment.now(engine.device.type)
        engine.generate([[7] * PROMPT_TOKENS] * SEATS, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
        for part in parts:
            warm_up = vars(sizes.warm_up()) if part in WARMED else None
            if warm_up:
                PARTS[part](engine, Sizes(**warm_up))
            before = engine.stats().capture_bytes
            metrics = PARTS[part](engine, sizes)
            metrics["captured_bytes"] = engine.stats().capture_bytes - before
            bars = {f"bar_{metric}": limit for metric, limit, _ in verdicts(part, metrics)}
            good = all(kept for _, _, kept in verdicts(part, metrics))
            records.append(
                environment.record(
                    f"scheduling/{part}",
                    script=SCRIPT,
                    conditions={
                        "model": model,
                        "batch": SEATS,
                        "context": settings["max_model_len"],
                        "toggles": engine.optimizations.as_dict(),
                        **vars(sizes),
                        "warm_up": warm_up,
                    },
                    metrics={"good": good, **metrics, **bars},
                    note=" ".join(f"{PARTS[part].__doc__ or ''} {WARM if warm_up else ''}".split()),
                )
            )
    return records


def _others(records: Sequence[Record], device: str, folder: str | None) -> list[Record]:
    """Records of parts that were measured before and not now, so that parts can be measured one by one."""
    path = (Path(folder) if folder else REPOSITORY / "docs" / "results") / f"scheduling_{device}.json"
    now = {record.name for record in records}
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return [Record(**old) for old in before if old["name"] not in now]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog=SCRIPT, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    sizes = Sizes()
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a preset, or anything the engine loads")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which parts")
    for name, value in vars(sizes).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default {value}")
    parser.add_argument("--weights", help="format; default: as stored")
    parser.add_argument("--results", help="folder of the results file (default: docs/results)")
    options = parser.parse_args(arguments)
    extra = {"weight_format": options.weights} if options.weights else {}
    chosen = Sizes(**{name: getattr(options, name) for name in vars(sizes)})
    records = measure(options.model, options.parts, chosen, **extra)
    for record in records:
        sys.stdout.write("".join(f"{record.name:20} {name:22} {v:.4g}\n" for name, v in record.metrics.items()))
    device = "gpu" if "gpu" in records[0].hardware else "cpu"
    write_results(f"scheduling_{device}", [*_others(records, device, options.results), *records], options.results)
    return 0 if all(record.metrics["good"] for record in records) else 1


if __name__ == "__main__":
    raise SystemExit(main())
