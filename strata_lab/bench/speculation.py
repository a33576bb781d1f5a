"""Does guessing tokens pay? Ten kinds of text at several batch sizes, with the policy on against plain decoding.

`python -m strata_lab.bench.speculation` runs each group of requests twice at once in one engine, plain and with drafts,
a few tokens of each in turns (`in_turns.py`), as somebody has it who leaves the toggle on and goes on with one kind of
text. Each place begins with a policy that has learned nothing, so that no figure depends on the places before it, and
with groups that do not count, until one captures nothing new: in them steps are captured (on a card that takes seconds)
and the policy learns as it does from any text. What it loses in the groups that count is counted.

The texts are the same on both sides. Where one goes round in circles it is cut before the loop, except where loops are
the workload, which is never counted as a gain.

Records are joined to those that the results file has: a run may be cut into pieces with `--workloads` and `--batches`,
or simply be started again with `--missing`. `--check` compares greedy texts instead (`speculation_check.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import cycle
from typing import Any

from strata_lab.bench.drafted_texts import NUM_REQUESTS, TEXT_KINDS, TextKind, text_kind
from strata_lab.bench.harness import (
    Environment,
    Record,
    Spread,
    join_results,
    results_path,
    undisturbed,
)
from strata_lab.bench.in_turns import (
    Clocked,
    Side,
    Turns,
    run_all,
    speed_ratio,
    undisturbed_pairs,
)
from strata_lab.bench.measure import RunFailed, until_none_captured
from strata_lab.bench.speculation_check import CHECKED_BATCH, CHECKED_DRAFTS, CHECKED_TOKENS, check
from strata_lab.bench.speculation_figures import Group, figures, verdict
from strata_lab.bench.speculation_report import text_table, verdict_lines
from strata_lab.config import DEFAULT_MODEL, WEIGHT_FORMATS
from strata_lab.speculative.loops import loop_start

SCRIPT = "python -m strata_lab.bench.speculation"
BATCHES = (1, 2, 4, 8, 16)
PLACE_S = {1: 6.0, 2: 8.0, 4: 12.0, 8: 16.0, 16: 24.0}  # seconds by batch size: groups of requests begin within them
OUTPUT_TOKENS = 64
WARM_UPS = 3  # groups at most that are run before those that count
MIN_TOKENS = 16  # a text whose loop begins earlier is left out
MAX_MODEL_LEN = 1024


def one_group(
    engine: Any, kind: TextKind, numbers: Sequence[int], length: int, settings: tuple[Any, Any]
) -> Group:  # fmt: skip
    """Run requests of a kind together, by number, up to a length, without and with drafts in turns."""
    prompts = [kind.prompt(number) for number in numbers]
    params = [kind.params(number, length) for number in numbers]
    clock = Clocked(settings[1].speculation)
    off, on = (Side(engine, p, prompts, params) for p in (settings[0], replace(settings[1], speculation=clock)))
    turns = Turns(off, on).run()
    found = Group(
        pairs=tuple(turns.pairs), off_ms=turns.off_ms, on_ms=turns.on_ms,
        off_texts=tuple(off.texts), on_texts=tuple(on.texts),
        drafts=tuple(draft for step in on.steps for draft in step.drafts),
        num_steps=len(on.steps),
        num_drafted=sum(bool(step.drafts) for step in on.steps),
        num_decodes=sum(step.num_decode_tokens for step in on.steps),
        num_tokens=sum(len(step.tokens) for step in on.steps),
        idle_ms=tuple((ms, step.duration_ms) for ms, step in zip(clock.ms, on.steps, strict=True) if not step.drafts),
        pairs_capturing=turns.pairs_capturing,
    )  # fmt: skip
    off.forget()
    on.forget()
    return found


def usable_lengths(engine: Any, kind: TextKind, max_tokens: int) -> dict[int, int]:
    """How many tokens of each request are measured, by its number, longest first: to its end or beginning of a loop."""
    numbers = range(NUM_REQUESTS)
    outputs = run_all(engine, [kind.prompt(n) for n in numbers], [kind.params(n, max_tokens) for n in numbers])
    texts = [output.token_ids for output in outputs]
    lengths = {n: len(text) if kind.loops else loop_start(text) for n, text in enumerate(texts)}
    usable = {n: length for n, length in lengths.items() if length >= min(MIN_TOKENS, max_tokens)}
    if not usable:
        raise RunFailed(f"{kind.name}: all texts go round in circles from the beginning; try another --model")
    return dict(sorted(usable.items(), key=lambda item: -item[1]))


def groups_of(lengths: Mapping[int, int], batch: int) -> list[tuple[list[int], int]]:
    """Requests that run together, those of like lengths, and the length of the shortest of them: nobody ends early.

    Where there are fewer than a batch takes, some are asked for twice.
    """
    numbers = list(lengths)
    numbers *= -(-batch // len(numbers))
    groups = [numbers[i : i + batch] for i in range(0, len(numbers) - batch + 1, batch)]
    return [(group, min(lengths[n] for n in group)) for group in groups]


def settings_of(engine: Any, drafter: str) -> tuple[Any, Any]:
    """The parts of an engine without and with a drafter; the first are in force."""
    found = []
    for name in ("none", drafter, "none"):
        report = engine.apply(speculative=name)
        if not report.ok:
            raise RunFailed(report.results["speculative"].reason)
        found.append(engine.parts)
    return found[2], found[1]


def untaught(settings: tuple[Any, Any]) -> tuple[Any, Any]:
    """The same parts with a policy that has learned nothing, where that of `settings` has not."""
    speculation = copy(settings[1].speculation)
    speculation.policy, speculation.times = deepcopy((speculation.policy, speculation.times))
    return settings[0], replace(settings[1], speculation=speculation)


def warm_up(engine: Any, kind: TextKind, groups: Sequence[tuple[list[int], int]], settings: tuple[Any, Any]) -> int:
    """Run groups, at most `WARM_UPS`, until one has captured nothing new; how many were run."""
    next_group = cycle(groups)

    def group() -> Group:
        return one_group(engine, kind, *next(next_group), settings)

    return len(until_none_captured(group, partial(_captures, settings), WARM_UPS))


def _captures(settings: tuple[Any, Any]) -> int:
    return sum(parts.runner.captures + parts.speculation.captures for parts in settings)


def measure(
    engine: Any, places: Mapping[str, Sequence[int]], drafter: str, place_s: float | None, max_tokens: int
) -> Iterator[Record]:
    """A record per kind of text and batch size, as they are made.

    Args:
        engine: an open `LLMEngine` whose background loop does not run.
        places: kind of text to batch sizes.
        drafter: "ngram" or "draft".
        place_s: seconds for each; at least one group of requests is run. None is `PLACE_S`.
        max_tokens: of a text.
    """
    environment = Environment.now(engine.device.type)
    settings = settings_of(engine, drafter)
    for name, batches in places.items():
        kind = text_kind(name)
        engine._loop.put_in_force(settings[0], engine._builder.new_block_manager, 0.0)
        lengths = usable_lengths(engine, kind, max_tokens)
        for batch in batches:
            groups = groups_of(lengths, batch)
            place = untaught(settings)
            warm_ups = warm_up(engine, kind, groups, place)
            end_s = time.perf_counter() + (place_s or PLACE_S.get(batch, max(PLACE_S.values())))
            runs: list[tuple[Group, float]] = []
            while not runs or time.perf_counter() < end_s:
                group = groups[len(runs) % len(groups)]
                runs.append(undisturbed(partial(one_group, engine, kind, *group, place), tries=1))
            metrics = figures([run for run, _ in runs], kind.loops) | verdict(place, batch) | {"warm_ups": warm_ups}
            yield environment.record(
                f"speculation/{drafter}/{kind.name}/x{batch}", script=SCRIPT,
                conditions=conditions(engine, kind, drafter) | {"batch": batch, "output_tokens": max_tokens},
                metrics=metrics | {"disturbed_by_others": max(share for _, share in runs)},
                spread=Spread.of([speed_ratio(undisturbed_pairs(run.pairs)) for run, _ in runs if run.pairs]),
                note="goes round in circles: no gain of it counts" if kind.loops else "",
            )  # fmt: skip


def conditions(engine: Any, kind: TextKind, drafter: str) -> dict[str, Any]:
    """Of a record: model, toggles, task."""
    opt = engine.optimizations
    return {
        "model": engine.config.model, "weight_format": opt.weight_format, "kv_cache_dtype": opt.kv_cache_dtype,
        "prompt_tokens": None, "drafter": drafter, "draft_model": engine.config.draft_model,
        "num_draft_tokens": opt.num_draft_tokens, "workload": kind.name, "task": kind.doc, "copies": kind.copies,
        "loops": kind.loops, "temperature": kind.temperature,
        "toggles": {name: value for name, value in opt.as_dict().items() if name != "speculative"},
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 1 if texts differ in a check."""
    options = _parser().parse_args(arguments)
    started, made = time.perf_counter(), []
    for record in _records(options):
        made.append(record)
        join_results(options.name, made, options.results)  # what is there is kept if the run is cut
        sys.stderr.write(f"{record.name}: {record.metrics.get('net', record.metrics['different_texts'])}\n")
        if time.perf_counter() - started > options.limit_s:
            break
    joined = _found(options)
    if find_spec("rich"):  # a machine that is only measured may have no more than the core's packages
        from rich.console import Console

        Console().print(text_table(joined))
    sys.stdout.writelines(f"{line}\n" for line in verdict_lines(joined))
    return int(options.check and any(record.metrics["different_texts"] for record in made))


def _records(options: argparse.Namespace) -> Iterator[Record]:
    """What was asked for, as it is made."""
    from strata_lab.engine import LLMEngine

    batches = [int(size) for size in options.batches.split(",")]
    if not (places := _places(options, batches)):
        return
    checks: dict[str, Any] = {"max_num_seqs": CHECKED_BATCH, "num_draft_tokens": CHECKED_DRAFTS}
    extra = checks if options.check else {"max_num_seqs": max(batches)}
    if options.weights:
        extra["weight_format"] = options.weights
    with LLMEngine(
        options.model, device=options.device, draft_model=options.draft_model, max_model_len=MAX_MODEL_LEN,
        prefix_cache=False, **extra,  # one side would find the other's prompts, and a draft no states of them
    ) as engine:  # fmt: skip
        if options.check:
            kinds = [text_kind(name) for name in places]
            yield from check(engine, kinds, options.drafter, options.tokens, conditions, SCRIPT)
        else:
            yield from measure(engine, places, options.drafter, options.place_s, options.tokens or OUTPUT_TOKENS)


def _found(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Records of the results file; none where there is no file."""
    path = results_path(options.name, options.results)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


def _places(options: argparse.Namespace, batches: Sequence[int]) -> dict[str, list[int]]:
    """Kinds of text and batch sizes that are to be measured."""
    there = {record["name"] for record in _found(options)} if options.missing else set()
    places: dict[str, list[int]] = {}
    for name in options.workloads.split(","):
        head = f"speculation/{options.drafter}/{text_kind(name).name}"
        if options.check:
            places |= {} if f"{head}/greedy" in there else {name: []}
        elif missing := [batch for batch in batches if f"{head}/x{batch}" not in there]:
            places[name] = missing
    return places


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=SCRIPT, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="anything the engine loads")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index>")
    parser.add_argument("--weights", choices=WEIGHT_FORMATS, help="format of the model; default: as stored")
    parser.add_argument("--drafter", default="ngram", choices=("ngram", "draft"))
    parser.add_argument("--draft-model", help="the model that guesses, with --drafter draft")
    parser.add_argument("--workloads", default=",".join(k.name for k in TEXT_KINDS), help="names with commas between")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="numbers with commas between")
    parser.add_argument("--place-s", type=float, help=f"seconds for each of both (default by batch size: {PLACE_S})")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no other record after these seconds")
    parser.add_argument("--missing", action="store_true", help="only what the results file does not have")
    parser.add_argument("--tokens", type=int, help=f"of output at most (default: {OUTPUT_TOKENS}; {CHECKED_TOKENS})")
    parser.add_argument("--check", action="store_true", help="compare greedy texts instead of speeds")
    parser.add_argument("--name", default="speculation_cpu", help="results file, which is added to")
    parser.add_argument("--results", help="folder of the results file (default: docs/results)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
