"""The state machine of `test_scheduler_machine.py` under pressure: seeded runs that are known to evict, swap and fork.

Hypothesis finds small failures and rarely fills a pool; here every rare meeting of two features happens many times, and
the counts prove it.
"""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import pytest

from strata_lab.admission import (
    ContinuousAdmission,
    FirstComeFirstServed,
    HighestPriorityFirst,
    MixedPrefill,
    SplitPrefill,
    StaticAdmission,
)
from strata_lab.batch import Pairs
from strata_lab.kv_retention import SinksAndWindow, TopPages
from strata_lab.preemption import SwapToHost
from strata_lab.roster import Roster
from tests.test_scheduler_machine import SchedulerMachine

SEEDS, ACTIONS = 24, 220
KEPT = [None, None, None, None, SinksAndWindow(2, 5), SinksAndWindow(0, 9), TopPages(4, 3)]
MARKS = [(0.0, 0.0), (0.0, 0.0), (0.2, 0.2), (0.0, 0.5)]
WEIGHTS = {
    "add": 30, "step": 40, "fork": 14, "abort": 4, "abort_while": 2, "configure": 3, "held": 4, "swap": 1, "cache": 1,
    "drop": 1, "pool": 1, "move": 2,
}  # fmt: skip


class Soak:
    """One run; `seen` counts what happened."""

    def __init__(self, seed: int, seen: Counter[str]) -> None:
        self.random, self.seen = random.Random(seed), seen
        self.machine = SchedulerMachine()
        r = self.random
        self.machine.start(
            num_blocks=r.randint(8, 14), budget=r.choice([4, 9, 20]), seats=r.randint(3, 6), growth=r.choice([0, 0, 1]),
            cached=r.random() < 0.5, swap=r.choice([2, 7, 40, 40]), kept=r.choice(KEPT),
        )  # fmt: skip
        self.machine.scheduler.configure(order=r.choice([FirstComeFirstServed, HighestPriorityFirst])())

    def act(self) -> None:
        r, m = self.random, self.machine
        data = SimpleNamespace(draw=lambda _: r.choice(m.added[-8:]))
        action = r.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if action == "add":
            m.add(
                r.randint(1, 16), r.randint(1, 24), r.choice([0, 0, 0, 1, -1]), r.choice("ab"), r.randint(0, 16), None
            )
        elif action == "step":
            m.step(r.randint(1, 6))
        elif action == "fork" and m.scheduler.running:
            m.fork(
                SimpleNamespace(draw=lambda _: r.choice(m.scheduler.running)),
                r.randint(0, 30),
                r.randint(0, 4),
                r.randint(1, 12),
            )
        elif action == "abort" and m.added:
            m.abort(data)
        elif action == "abort_while" and m.scheduler.running:
            m.abort_while_the_model_runs()
        elif action == "held" and m.scheduler.running:
            m.a_held_batch_goes_beside_the_steps(r.random() < 0.5)
        elif action == "configure":
            admission = StaticAdmission if r.random() < 0.2 else ContinuousAdmission
            prefill = r.choice([MixedPrefill(), SplitPrefill(3)])
            order = r.choice([FirstComeFirstServed, HighestPriorityFirst])
            m.configure(
                r.randint(1, 6), r.randint(1, 20), admission, prefill, r.choice([0, 5]), order, r.choice([0, 5]),
                r.choice(MARKS),
            )  # fmt: skip
        elif action == "swap":
            m.switch_preemption(r.choice([None, 2, 7, 40, 40]))
        elif action == "cache":
            m.switch_the_prefix_cache(r.random() < 0.6)
        elif action == "drop":
            m.drop_the_prefixes()
        elif action == "pool":
            m.replace_pool(r.randint(7, 15), r.random() < 0.5)
        elif action == "move":
            before = m.scheduler.num_preemptions
            m.move_into_another_pool(r.randint(7, 15), r.random() < 0.7)
            self.seen["moved"] += sum(bool(m.scheduler.blocks.table(q.request_id)) for q in m.scheduler.running)
            self.seen["evicted by a smaller pool"] += m.scheduler.num_preemptions - before
        m.host_memory_is_of_those_who_were_preempted()
        m.nothing_is_lost()
        m.texts_are_undisturbed()

    def run(self) -> None:
        for _ in range(ACTIONS):
            self.act()
        scheduler = self.machine.scheduler
        kept = scheduler.blocks.retention
        self.seen["windows"] += isinstance(kept, SinksAndWindow)
        self.seen["pages"] += isinstance(kept, TopPages)
        self.seen["closures"] += scheduler.watermark.num_closures
        self.seen["evicted"] += scheduler.num_preemptions
        self.seen["recomputed"] += scheduler.num_recomputed_tokens
        self.seen["cached"] += scheduler.blocks.num_hit_tokens
        self.seen["finished"] += sum(r.finish_reason == "length" for r in self.machine.added)
        self.machine.teardown()


def test_everything_meets_everything_and_nothing_is_wrong_or_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    take_moves, save = Roster._take_moves, SwapToHost.save

    def counted(roster: Roster) -> tuple[Pairs, Pairs, Pairs]:
        copies, out, back = take_moves(roster)
        seen.update(copies=len(copies), out=len(out), back=len(back))
        return copies, out, back

    def counted_save(host: SwapToHost, request_id: str, blocks: list[int], num_tokens: int, block_size: int) -> int:
        kept = save(host, request_id, blocks, num_tokens, block_size)
        seen["part kept"] += 0 < kept < num_tokens
        return kept

    monkeypatch.setattr(Roster, "_take_moves", counted)
    monkeypatch.setattr(SwapToHost, "save", counted_save)
    for seed in range(SEEDS):
        Soak(seed, seen).run()
    least = {
        "evicted": 300, "out": 300, "back": 200, "part kept": 20, "copies": 60, "recomputed": 300,
        "cached": 300, "finished": 300, "moved": 50, "evicted by a smaller pool": 10, "windows": 3,
        "pages": 2, "closures": 10,
    }  # fmt: skip
    assert all(seen[name] >= n for name, n in least.items()), seen
