"""Does guessing tokens pay? Ten kinds of text at several batch sizes, with the policy on against plain decoding.

`python -m strata_lab.bench.speculation` runs each group of requests plain, with drafts, and plain again (A/B/A) in one
engine, as somebody has it who leaves the toggle on: what the policy learned from one kind of text it takes to the
next, and what it loses until it notices is counted. The texts are the same on both sides. Where one goes round in
circles it is cut before the loop, except where loops are the workload, which is never counted as a gain.

`--check` compares greedy texts with and without drafts, with as many guesses as the window has in every step. Records
are joined to those that the results file has, so a run may be cut into pieces with `--workloads` and `--batches`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from strata_lab.bench.drafted_texts import NUM_REQUESTS, TEXT_KINDS, TextKind, text_kind
from strata_lab.bench.harness import Environment, Record, Spread, a_b_a, join_results, undisturbed
from strata_lab.bench.measure import RunFailed
from strata_lab.bench.speculation_report import text_table, verdict_lines
from strata_lab.config import DEFAULT_MODEL
from strata_lab.events import Draft, StepEvent
from strata_lab.sampling_params import SamplingParams
from strata_lab.speculative.loops import loop_start

SCRIPT = "python -m strata_lab.bench.speculation"
BATCHES = (1, 2, 4, 8, 16)
ROUNDS = {1: 6, 2: 3, 4: 3}  # groups of requests per batch size; larger batches have many texts in each
FEWEST_ROUNDS = 2
OUTPUT_TOKENS, TOKENS_TOGETHER, CHECKED_TOKENS = 64, 32, 128  # the second: of more than two requests
MIN_TOKENS = 16  # a text whose loop begins earlier is left out
CHECKED_BATCH, CHECKED_DRAFTS = 10, 3
MAX_MODEL_LEN = 1024


@dataclass(frozen=True)
class Pass:
    """One run of a group of requests, from when their last prompt was computed.

    Attributes:
        tok_s: tokens per second, all requests together, while all of them decode: drafts let some end far sooner than
            others, and the rest of a group is a smaller batch.
        total_tok_s: tokens per second until the last request has ended.
        texts: token ids of each request.
        drafts: verified proposals.
        num_steps, num_drafted: steps, and those with drafts.
        num_decodes: requests that decoded, summed over the steps.
        num_tokens: what they got.
        disturbed: share of the processors that other programs took meanwhile.
    """

    tok_s: float
    total_tok_s: float
    texts: tuple[tuple[int, ...], ...]
    drafts: tuple[Draft, ...]
    num_steps: int
    num_drafted: int
    num_decodes: int
    num_tokens: int
    disturbed: float = 0.0


def one_pass(engine: Any, kind: TextKind, numbers: Sequence[int], lengths: Mapping[int, int]) -> Pass:
    """Run requests of a kind together, each up to its length; `RunFailed` where that cannot be measured."""
    cursor = engine.events.cursor
    outputs = engine.generate(
        [kind.prompt(number) for number in numbers], [kind.params(number, lengths[number]) for number in numbers]
    )
    events, _, lost = engine.events.since(cursor)
    errors = [output.error for output in outputs if output.error is not None]
    if errors or lost:
        raise RunFailed(f"{kind.name}: {errors[0] if errors else f'{lost} events were lost; measure fewer tokens'}")
    steps = [event for event in events if isinstance(event, StepEvent)]
    begin = max(i for i, step in enumerate(steps) if step.num_prefill_tokens)
    decodes = steps[begin + 1 :]
    if not decodes:
        raise RunFailed(f"{kind.name}: all texts ended with their prompts; measure more tokens")
    num_tokens = sum(len(step.tokens) for step in decodes)
    full = [step for step in decodes if step.num_decode_tokens == len(numbers)]
    if not full:
        raise RunFailed(f"{kind.name}: no step had all {len(numbers)} requests; measure more tokens")
    return Pass(
        tok_s=sum(len(step.tokens) for step in full) / (full[-1].t_s - steps[begin].t_s),
        total_tok_s=num_tokens / (decodes[-1].t_s - steps[begin].t_s),
        texts=tuple(tuple(output.token_ids) for output in outputs),
        drafts=tuple(draft for step in decodes for draft in step.drafts),
        num_steps=len(decodes),
        num_drafted=sum(bool(step.drafts) for step in decodes),
        num_decodes=sum(step.num_decode_tokens for step in decodes),
        num_tokens=num_tokens,
    )


def usable_lengths(engine: Any, kind: TextKind, max_tokens: int) -> dict[int, int]:
    """How many tokens of each request are measured, by its number: up to its end or the beginning of a loop."""
    numbers = range(NUM_REQUESTS)
    outputs = engine.generate([kind.prompt(n) for n in numbers], [kind.params(n, max_tokens) for n in numbers])
    lengths = {n: len(o.token_ids) if kind.loops else loop_start(o.token_ids) for n, o in enumerate(outputs)}
    usable = {n: length for n, length in lengths.items() if length >= min(MIN_TOKENS, max_tokens)}
    if not usable:
        raise RunFailed(f"{kind.name}: all texts go round in circles from the beginning; try another --model")
    return usable


def rounds_of(
    engine: Any, kind: TextKind, batch: int, rounds: int, lengths: Mapping[int, int], drafter: str
) -> tuple[list[list[Pass]], list[Pass]]:
    """Passes without and with drafts, of `rounds` groups of requests: two without to each with."""
    numbers = sorted(lengths)
    plain: list[list[Pass]] = []
    drafted: list[Pass] = []
    one_pass(engine, kind, _group(numbers, 0, batch), dict.fromkeys(numbers, MIN_TOKENS // 4))  # captures plain steps
    for index in range(rounds):
        group = _group(numbers, index, batch)
        timed = partial(_calm_pass, engine, kind, group, lengths)
        off, on = a_b_a(lambda side: _switch(engine, drafter if side == "b" else "none"), timed, 1)
        plain.append(off)
        drafted += on
    return plain, drafted


def _calm_pass(engine: Any, kind: TextKind, numbers: Sequence[int], lengths: Mapping[int, int]) -> Pass:
    found, share = undisturbed(partial(one_pass, engine, kind, numbers, lengths))
    return replace(found, disturbed=share)


def _group(numbers: Sequence[int], index: int, batch: int) -> list[int]:
    return [numbers[(index * batch + i) % len(numbers)] for i in range(batch)]


def _switch(engine: Any, drafter: str) -> None:
    report = engine.apply(speculative=drafter)
    if not report.ok:
        raise RunFailed(report.results["speculative"].reason)


def verdict(engine: Any, drafter: str, batch: int) -> dict[str, Any]:
    """What the policy makes of a batch size: metrics of a record."""
    _switch(engine, drafter)
    policy = engine.parts.speculation.policy
    state, reason = policy.verdict(batch)
    kinds = {
        name: {"first": round(first, 3), "next": round(later, 3), "guesses": guesses}
        for name, first, later, guesses in policy.kinds(batch)
    }
    _switch(engine, "none")
    return {"state": state, "reason": reason, "expected": kinds}


def figures(plain: Sequence[Sequence[Pass]], drafted: Sequence[Pass]) -> dict[str, Any]:
    """Metrics of a record: what was gained, and what came true of the guesses."""
    windows = [draft for one in drafted for draft in one.drafts]
    by_place: tuple[list[int], list[int]] = [], []
    kinds: dict[str, dict[str, int]] = {}
    for draft in windows:
        draft.count_into(*by_place)
        kind = kinds.setdefault(draft.kind, {"windows": 0, "drafted": 0, "accepted": 0})
        kind["windows"] += 1
        kind["drafted"] += len(draft.token_ids)
        kind["accepted"] += draft.num_accepted
    accepted = sum(by_place[1])
    texts = [text for one in drafted for text in one.texts]
    return {
        "net_by_round": [
            round(on.tok_s / statistics.mean(off.tok_s for off in around), 4)
            for around, on in zip(plain, drafted, strict=True)
        ],
        "net_until_last": statistics.median(
            on.total_tok_s / statistics.mean(off.total_tok_s for off in around)
            for around, on in zip(plain, drafted, strict=True)
        ),
        "output_tok_s": statistics.median(one.tok_s for one in drafted),
        "plain_tok_s": statistics.median(one.tok_s for around in plain for one in around),
        "plain_drift": statistics.median(max(p.tok_s for p in s) / min(p.tok_s for p in s) for s in plain),
        "tokens_per_step": sum(one.num_tokens for one in drafted) / sum(one.num_decodes for one in drafted),
        "drafted_steps": sum(one.num_drafted for one in drafted) / sum(one.num_steps for one in drafted),
        "acceptance_rate": accepted / sum(by_place[0]) if windows else None,
        "drafted_by_position": by_place[0],
        "accepted_by_position": by_place[1],
        "kinds": kinds,
        "disturbed_by_others": max(one.disturbed for side in (drafted, *plain) for one in side),
        "loops": sum(loop_start(text) < len(text) for text in texts),
        "loop_share": sum(d.num_accepted for d in windows if d.is_loop) / accepted if accepted else 0.0,
        "texts": len(texts),
        "different_texts": sum(
            one != two
            for around, on in zip(plain, drafted, strict=True)
            for one, two in zip(around[0].texts, on.texts, strict=True)
        ),
    }


def measure(
    engine: Any, kinds: Sequence[TextKind], batches: Sequence[int], drafter: str, rounds: int | None, max_tokens: int
) -> Iterator[Record]:
    """A record per kind of text and batch size, as they are made."""
    environment = Environment.now(engine.device.type)
    for kind in kinds:
        _switch(engine, "none")
        lengths = usable_lengths(engine, kind, max_tokens)
        for batch in batches:
            count = rounds or ROUNDS.get(batch, FEWEST_ROUNDS)
            most = max_tokens if batch <= 2 else min(max_tokens, TOKENS_TOGETHER)
            shorter = {number: min(length, most) for number, length in lengths.items()}
            plain, drafted = rounds_of(engine, kind, batch, count, shorter, drafter)
            metrics = figures(plain, drafted) | verdict(engine, drafter, batch)
            spread = Spread.of(metrics["net_by_round"])
            yield environment.record(
                f"speculation/{drafter}/{kind.name}/x{batch}", script=SCRIPT,
                conditions=_conditions(engine, kind, drafter) | {"batch": batch, "output_tokens": most},
                metrics={"net": spread.median} | metrics, spread=spread,
                note="goes round in circles: no gain of it counts" if kind.loops else "",
            )  # fmt: skip


def check(engine: Any, kinds: Sequence[TextKind], drafter: str, max_tokens: int) -> Iterator[Record]:
    """Greedy texts with and without drafts; a record per kind of text, differences are written to stderr."""
    environment = Environment.now(engine.device.type)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for kind in kinds:
        prompts = [kind.prompt(number) for number in range(NUM_REQUESTS)]
        texts = {}
        for setting in ("none", drafter):
            _switch(engine, setting)
            speculation = engine.parts.speculation
            before = engine.stats()
            policy, speculation.policy = getattr(speculation, "policy", None), None  # every step drafts what it can
            texts[setting] = [output.token_ids for output in engine.generate(prompts, params)]
            speculation.policy = policy
        after = engine.stats()
        different = [n for n, pair in enumerate(zip(*texts.values(), strict=True)) if pair[0] != pair[1]]
        for number in different:
            sys.stderr.write(_difference(kind, number, *(side[number] for side in texts.values())))
        yield environment.record(
            f"speculation/{drafter}/{kind.name}/greedy", script=f"{SCRIPT} --check",
            conditions=_conditions(engine, kind, drafter) | {"batch": CHECKED_BATCH, "output_tokens": max_tokens},
            metrics={
                "texts": len(prompts), "different_texts": len(different),
                "drafted_tokens": after.num_drafted_tokens - before.num_drafted_tokens,
                "accepted_tokens": after.num_accepted_tokens - before.num_accepted_tokens,
            },
            note="greedy, as many guesses as the window has in every step",
        )  # fmt: skip


def _difference(kind: TextKind, number: int, plain: Sequence[int], drafted: Sequence[int]) -> str:
    place = next(i for i, (a, b) in enumerate(zip(plain, drafted, strict=True)) if a != b)
    return (
        f"{kind.name} {number}: token {place} is {plain[place]} without drafts and {drafted[place]} with them\n"
        f"  {json.dumps(kind.prompt(number), ensure_ascii=False)}\n"
    )


def _conditions(engine: Any, kind: TextKind, drafter: str) -> dict[str, Any]:
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
    from strata_lab.engine import LLMEngine

    kinds = [text_kind(name) for name in options.workloads.split(",")]
    batches = [int(size) for size in options.batches.split(",")]
    checks: dict[str, Any] = {"max_num_seqs": CHECKED_BATCH, "num_draft_tokens": CHECKED_DRAFTS}
    extra = checks if options.check else {"max_num_seqs": max(batches)}
    made: list[Record] = []
    with LLMEngine(
        options.model, device=options.device, draft_model=options.draft_model, max_model_len=MAX_MODEL_LEN, **extra
    ) as engine:
        if options.check:
            records = check(engine, kinds, options.drafter, options.tokens or CHECKED_TOKENS)
        else:
            tokens = options.tokens or OUTPUT_TOKENS
            records = measure(engine, kinds, batches, options.drafter, options.rounds, tokens)
        for record in records:
            made.append(record)
            path = join_results(options.name, made, options.results)  # what is there is kept if the run is cut
            sys.stderr.write(f"{record.name}: {record.metrics.get('net', record.metrics['different_texts'])}\n")
    joined = json.loads(path.read_text(encoding="utf-8"))
    if find_spec("rich"):  # a machine that is only measured may have no more than the core's packages
        from rich.console import Console

        Console().print(text_table(joined))
    sys.stdout.writelines(f"{line}\n" for line in verdict_lines(joined))
    return int(options.check and any(record.metrics["different_texts"] for record in made))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=SCRIPT, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="anything the engine loads")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index>")
    parser.add_argument("--drafter", default="ngram", choices=("ngram", "draft"))
    parser.add_argument("--draft-model", help="the model that guesses, with --drafter draft")
    parser.add_argument("--workloads", default=",".join(k.name for k in TEXT_KINDS), help="names with commas between")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="numbers with commas between")
    parser.add_argument("--rounds", type=int, help=f"groups of requests per batch size (default: {ROUNDS}, then 2)")
    parser.add_argument("--tokens", type=int, help=f"of output at most (default: {OUTPUT_TOKENS}; {CHECKED_TOKENS})")
    parser.add_argument("--check", action="store_true", help="compare greedy texts instead of speeds")
    parser.add_argument("--name", default="speculation_cpu", help="results file, which is added to")
    parser.add_argument("--results", help="folder of the results file (default: docs/results)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
