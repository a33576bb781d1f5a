"""A full pool for minutes: requests of every length, priorities, deadlines, callers who leave, settings that change.

`python -m strata_lab.bench.stress` runs one engine with a model whose answers can be computed (`counting_model.py`) and
far more requests than blocks. Every answer is compared with the right one, whole or as far as it came; at the end
nothing may be missing and nothing may be held. What was sent and changed is a seed's; when each is served is not.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata_lab.bench.counting_model import VOCABULARY, CountingModel
from strata_lab.bench.harness import Environment, Record, write_results
from strata_lab.bench.traffic import Inbox
from strata_lab.config import toggles
from strata_lab.events import StepEvent, TokenEvent
from strata_lab.sampling_params import SamplingParams

SCRIPT = "python -m strata_lab.bench.stress"
CONTEXT, SEATS, BLOCK_SIZE, BLOCKS = 768, 48, 8, 800
LIVE = 500  # requests under way: those that run, and a long queue
LEAST_USE = 0.9  # of the blocks, in the median step
ABORTED, WITH_DEADLINE, HAVE_A_BEGINNING = 0.08, 0.04, 0.5  # shares of the requests
CHANGE_EVERY_S, LOOK_EVERY_S, PATIENCE_S = 0.25, 0.1, 300.0
# The same on every device. Nothing but the order of sums is left to rounding, so answers are as long as they are asked
# for, and long answers are what fills the pool; bfloat16 activations cut nearly all of them after three tokens.
EXACT = {"dtype": "float32", "weight_format": "bf16"}
# Numbers that keep the pool full; every other lossless toggle takes each of its values.
NUMBERS: dict[str, Sequence[Any]] = {
    "max_num_seqs": (40, 48, 64), "max_num_batched_tokens": (128, 256, 512), "max_passes": (0, 4),
    "num_draft_tokens": (2, 5), "watermark": (0.0, 0.005), "watermark_high": (0.0, 0.02),
}  # fmt: skip
LEFT_ALONE = {
    "max_waiting", "max_waiting_tokens", "max_model_len", "gpu_memory_utilization", "thermal_governor",
    "continuous_batching",  # off: the pool would run empty at the end of every batch
}  # fmt: skip
MAX_KEPT_FAILURES = 20


@dataclass
class Findings:
    """What happened.

    Attributes:
        ends: requests by finish reason.
        num_sent, num_tokens: requests, and tokens that they got.
        num_wrong, num_lost: answers that were not the right ones, and requests that never ended.
        failures: sentences about the first of them.
        changes: answers to changes of settings.
        use: share of the blocks in use, per step with a queue that would fill the pool.
        leaked_blocks, leaked_host_blocks: held after the last has ended.
        stats: of the engine, at the end.
    """

    ends: Counter[str] = field(default_factory=Counter)
    num_sent: int = 0
    num_tokens: int = 0
    num_wrong: int = 0
    num_lost: int = 0
    failures: list[str] = field(default_factory=list)
    changes: Counter[str] = field(default_factory=Counter)
    use: list[float] = field(default_factory=list)
    leaked_blocks: int = 0
    leaked_host_blocks: int = 0
    stats: Any = None

    @property
    def good(self) -> bool:
        """Nothing of what must not happen, and the pool was full."""
        return not (self.num_wrong or self.num_lost or self.leaked_blocks or self.leaked_host_blocks) and (
            self.use_percentile(50) >= LEAST_USE
        )

    def use_percentile(self, percent: int) -> float:
        """Share of the blocks that was in use in so many percent of the steps at most."""
        ordered = sorted(self.use)
        return ordered[round(percent / 100 * (len(ordered) - 1))] if ordered else 0.0

    def fail(self, sentence: str) -> None:
        """Keep one of the first."""
        if len(self.failures) < MAX_KEPT_FAILURES:
            self.failures.append(sentence)


@dataclass
class _Sent:
    prompt: list[int]
    right: list[int]
    tokens: list[int] = field(default_factory=list)


class Stress:
    """One run over one engine.

    Args:
        engine: with the counting model.
        model: what is right.
        seed: of all that is sent and changed.
        live: requests under way.
    """

    def __init__(self, engine: Any, model: CountingModel, seed: int, live: int = LIVE) -> None:
        self.engine, self.model, self.live = engine, model, live
        self.random = random.Random(seed)
        self.found = Findings()
        self._inbox = Inbox()
        self._sent: dict[str, _Sent] = {}
        self._leaving: deque[str] = deque()  # whose callers will leave
        self._cursor = engine.events.cursor
        self._beginnings = [self._tokens(n) for n in (0, 20, 64, 130, 130, 200)]
        self._changes = self._possible_changes()

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCABULARY) for _ in range(count)]

    def _possible_changes(self) -> list[tuple[str, Sequence[Any]]]:
        made: list[tuple[str, Sequence[Any]]] = []
        for toggle in toggles():
            if toggle.lossless and toggle.name not in LEFT_ALONE:
                values = (False, True) if toggle.kind == "bool" else toggle.choices or NUMBERS[toggle.name]
                made.append((toggle.name, [v for v in values if v != "draft"]))
        return made

    def run(self, seconds: float) -> Findings:
        """Keep the engine full for so long, then let all requests end."""
        self.engine.start()
        end = time.monotonic() + seconds
        change_at = look_at = 0.0
        while (now := time.monotonic()) < end:
            while len(self._sent) < self.live:
                self._send()
            self._take(LOOK_EVERY_S / 10)
            if now >= look_at:
                look_at = now + LOOK_EVERY_S
                self._look()
                while self._leaving and self.random.random() < 0.5:
                    self.engine.abort(self._leaving.popleft())
            if now >= change_at:
                change_at = now + CHANGE_EVERY_S
                self._change()
        patience = time.monotonic() + PATIENCE_S
        while self._sent and time.monotonic() < patience:
            self._take(LOOK_EVERY_S)
        self._settle()
        return self.found

    def _send(self) -> None:
        r = self.random
        begin = r.choice(self._beginnings) if r.random() < HAVE_A_BEGINNING else []
        prompt = [*begin, *self._tokens(r.choice((3, 60, 200, 400)) + r.randrange(40))]
        right = self.model.answer(prompt, r.choice((10, 120, 250)) + r.randrange(20))
        if not right:
            return
        deadline = r.uniform(0.5, 20.0) if r.random() < WITH_DEADLINE else None
        params = SamplingParams(temperature=0.0, max_tokens=len(right), ignore_eos=True, timeout_s=deadline)
        request_id = f"s{self.found.num_sent}"
        self._sent[request_id] = _Sent(prompt, right)
        self.found.num_sent += 1
        self.engine.follow(prompt, params, self._inbox, request_id=request_id, priority=r.choice((0, 0, 0, 1, 2)))
        if r.random() < ABORTED:
            self._leaving.insert(r.randrange(len(self._leaving) + 1), request_id)

    def _take(self, wait_s: float) -> None:
        for event in self._inbox.take(wait_s):
            self._book(event)

    def _book(self, event: TokenEvent) -> None:
        sent = self._sent.get(event.request_id)
        if sent is None:
            self.found.num_wrong += 1
            self.found.fail(f"{event} belongs to nobody")
            return
        if event.token_id >= 0:
            sent.tokens.append(event.token_id)
        if event.finish_reason is None:
            return
        del self._sent[event.request_id]
        self.engine.forget(event.request_id)
        self.found.ends[event.finish_reason] += 1
        self.found.num_tokens += len(sent.tokens)
        whole = event.finish_reason == "length"
        if event.finish_reason == "error" or sent.tokens != (sent.right if whole else sent.right[: len(sent.tokens)]):
            self.found.num_wrong += 1
            place = next((i for i, (a, b) in enumerate(zip(sent.tokens, sent.right, strict=False)) if a != b), -1)
            self.found.fail(
                f"{event.request_id} of {len(sent.prompt)} + {len(sent.right)} tokens ended by {event.finish_reason} "
                f"after {len(sent.tokens)}, wrong from {place}: {event.error}"
            )

    def _look(self) -> None:
        events, self._cursor, _ = self.engine.events.since(self._cursor)
        steps = (e for e in events if isinstance(e, StepEvent))
        self.found.use += [e.kv_blocks_used / e.kv_blocks_total for e in steps if e.num_waiting >= self.live // 4]

    def _change(self) -> None:
        name, values = self.random.choice(self._changes)
        for result in self.engine.apply(**{name: self.random.choice(values)}).results.values():
            self.found.changes[result.status] += 1
            if result.status == "refused":
                self.found.fail(f"{name} was refused: {result.reason}")

    def _settle(self) -> None:
        self.found.num_lost = len(self._sent)
        for request_id in list(self._sent):
            self.found.fail(f"{request_id} never ended")
        self.found.stats = stats = self.engine.stats()
        self.found.leaked_blocks, self.found.leaked_host_blocks = stats.kv_blocks_used, stats.swap_blocks_used


def stress(
    seconds: float, seed: int = 1, *, live: int = LIVE, device: str = "cpu", **options: Any
) -> tuple[Findings, Environment]:  # fmt: skip
    """Write the model, run over it, and say where that was."""
    from strata_lab.engine import LLMEngine

    model = CountingModel(seed, CONTEXT)
    fixed = {"block_size": BLOCK_SIZE, "num_kv_blocks": BLOCKS, "max_num_seqs": SEATS, "max_model_len": CONTEXT}
    with tempfile.TemporaryDirectory() as folder:
        made = model.write(Path(folder) / "counting")
        with LLMEngine(made, device=device, **(fixed | EXACT | options)) as engine:
            environment = Environment.now(engine.device.type)
            return Stress(engine, model, seed, live).run(seconds), environment


def record(found: Findings, environment: Environment, seconds: float, seed: int) -> Record:
    """What happened, with how full the pool was."""
    stats = found.stats
    use = {f"block_use_p{p}": found.use_percentile(p) for p in (5, 25, 50, 75, 95)}
    return environment.record(
        f"stress/{seconds:.0f}_s", script=f"{SCRIPT} --seconds {seconds:.0f} --seed {seed}",
        conditions={
            "model": "counting_model, 1 layer", "batch": SEATS, "context": CONTEXT, "block_size": BLOCK_SIZE,
            "num_kv_blocks": BLOCKS, "requests_under_way": LIVE, "least_block_use": LEAST_USE, **EXACT,
        },
        metrics={
            "good": found.good, "num_wrong": found.num_wrong, "num_lost": found.num_lost,
            "leaked_blocks": found.leaked_blocks, "leaked_host_blocks": found.leaked_host_blocks,
            "num_requests": found.num_sent, **{f"num_{reason}": n for reason, n in sorted(found.ends.items())},
            "output_tokens": found.num_tokens, "steps": stats.num_steps, "steps_with_a_queue": len(found.use), **use,
            "num_preemptions": stats.num_preemptions, "recomputed_tokens": stats.num_recomputed_tokens,
            "blocks_swapped_out": stats.num_swapped_out, "blocks_swapped_in": stats.num_swapped_in,
            "prefix_hit_rate": stats.prefix_hit_rate, "num_drafted_tokens": stats.num_drafted_tokens,
            "num_accepted_tokens": stats.num_accepted_tokens,
            **{f"changes_{status}": n for status, n in sorted(found.changes.items())},
        },
        note="every answer is compared with one computed in float64 from its prompt; block use is that of steps while "
        "requests wait; nothing here is a timing",
    )  # fmt: skip


def _lines(made: Record, found: Findings) -> Iterator[str]:
    for name, value in made.metrics.items():
        yield f"{name:24} {value:.4g}\n"
    for sentence in found.failures:
        yield f"{sentence}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 1 if anything happened that must not."""
    parser = argparse.ArgumentParser(prog=SCRIPT, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long the pool is kept full")
    parser.add_argument("--seed", type=int, default=1, help="of the model, the requests and the changes")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--results", help="folder of the results file (default: docs/results)")
    options = parser.parse_args(arguments)
    found, environment = stress(options.seconds, options.seed, live=LIVE, device=options.device)
    made = record(found, environment, options.seconds, options.seed)
    sys.stdout.writelines(_lines(made, found))
    write_results(f"stress_{'cpu' if options.device == 'cpu' else 'gpu'}", [made], options.results)
    return 0 if found.good else 1


if __name__ == "__main__":
    raise SystemExit(main())
