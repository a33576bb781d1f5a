"""Laws of live changes: settings and the whole KV pool can be replaced between two steps, and nothing is lost."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from strata_lab.admission import ContinuousAdmission, StaticAdmission
from strata_lab.block_manager import BlockManager
from strata_lab.settings import ConfigError
from tests.fake_model import make, names, request, undisturbed

# -- settings ---------------------------------------------------------------------------------------------------------


def test_fewer_seats_let_those_who_run_finish() -> None:
    scheduler, model = make()
    for i in range(6):
        scheduler.add(request(f"r{i}", max_tokens=4 + i))
    model.step()
    scheduler.configure(max_num_seqs=2)
    scheduler.add(request("late"))
    seen = [names(batch.items) for batch in model.drain()]
    assert seen[0] == [f"r{i}" for i in range(6)]
    first = next(i for i, batch in enumerate(seen) if "late" in batch)
    assert len(seen[first]) == 2
    assert scheduler.num_preemptions == 0


def test_a_budget_below_the_number_of_decodes_serves_them_in_turns() -> None:
    scheduler, model = make()
    requests = [request(f"r{i}", max_tokens=20) for i in range(7)]
    for r in requests:
        scheduler.add(r)
    model.step()
    scheduler.configure(max_num_batched_tokens=3)
    scheduler.add(request("late"))
    turns = [names(model.step().items) for _ in range(14)]
    assert all(len(turn) == 3 for turn in turns)
    for r in requests:
        served = [i for i, turn in enumerate(turns) if r.request_id in turn]
        gaps = [b - a for a, b in itertools.pairwise(served)]
        assert served[0] <= 2
        assert max(gaps) <= 3  # ceil(7 / 3)
        assert len(served) == 6  # 14 steps of 3 places for 7 requests
    model.drain()
    assert [r.output_token_ids for r in requests] == [undisturbed(r, 256) for r in requests]


def test_switching_to_static_and_back_loses_nothing() -> None:
    scheduler, model = make()
    requests = [request(f"r{i}", max_tokens=5) for i in range(12)]
    for r in requests:
        scheduler.add(r)
    for admission in (StaticAdmission(), ContinuousAdmission()) * 3:
        model.step()
        scheduler.configure(admission=admission)
    model.drain()
    assert [r.output_token_ids for r in requests] == [undisturbed(r, 256) for r in requests]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, r"max_num_seqs=0 must be a whole number of at least 1; try 16"),
        ({"max_num_batched_tokens": 1.5}, r"max_num_batched_tokens=1.5 must be a whole number of at least 1; try 512"),
        ({"max_model_len": 1}, r"max_model_len=1 must be a whole number of at least 2; try 2048"),
        ({"max_waiting": True}, r"max_waiting=True must be a whole number of at least 1; try 64"),
        ({"max_num_sequences": 4}, r"unknown scheduler setting 'max_num_sequences'; did you mean 'max_num_seqs'\?"),
    ],
)
def test_a_bad_setting_is_refused_and_changes_nothing(changes: dict[str, Any], message: str) -> None:
    scheduler, _ = make()
    before = {k: v for k, v in vars(scheduler).items() if not k.startswith("_")}
    with pytest.raises(ConfigError, match=message):
        scheduler.configure(admission=StaticAdmission(), **changes)
    assert {k: v for k, v in vars(scheduler).items() if not k.startswith("_")} == before


def test_max_model_len_cannot_be_set_below_or_beyond_what_live_requests_can_bear() -> None:
    scheduler, model = make(num_blocks=4, max_model_len=17)
    scheduler.add(request("a", prompt=10, max_tokens=100))
    model.step()
    with pytest.raises(ConfigError, match=r"max_model_len=11 does not suit a live request: 'a'|'a' has 11 tokens"):
        scheduler.configure(max_model_len=11)
    with pytest.raises(ConfigError, match="may need 5 KV blocks of 4 tokens and the pool has 4"):
        scheduler.configure(max_model_len=18)
    assert scheduler.max_model_len == 17
    scheduler.configure(max_model_len=12)
    model.drain()


# -- a new pool -------------------------------------------------------------------------------------------------------


def test_a_new_pool_recomputes_what_ran_and_the_text_does_not_change() -> None:
    scheduler, model = make()
    requests = [request(f"r{i}", prompt=4 + i, max_tokens=12) for i in range(5)]
    for r in requests:
        scheduler.add(r)
    for _ in range(4):
        model.step()
    old, lost = scheduler.blocks, sum(r.num_computed_tokens for r in requests)
    assert scheduler.reset_blocks(BlockManager(40, 8)) == []
    model.reset()
    assert (old.num_free, scheduler.running, names(scheduler.waiting)) == (64, [], [f"r{i}" for i in range(5)])
    assert (scheduler.num_preemptions, scheduler.num_recomputed_tokens) == (5, lost)
    model.drain()
    assert [r.output_token_ids for r in requests] == [undisturbed(r, 256) for r in requests]


def test_a_new_pool_returns_the_requests_it_can_never_hold() -> None:
    scheduler, model = make()
    scheduler.add(request("large", prompt=20, max_tokens=30))
    scheduler.add(request("small", prompt=4, max_tokens=8))
    model.step()
    misfits = scheduler.reset_blocks(BlockManager(4, 4))
    model.reset()
    assert names(misfits) == ["large"]
    reason = scheduler.why_never_fits(misfits[0])
    assert reason is not None
    assert "'large' has 21 tokens and max_tokens=30: it may need 13 KV blocks of 4 tokens and the pool has 4" in reason
    scheduler.finish(misfits[0], "error", reason)
    model.drain()
    assert not scheduler.has_work


def test_a_new_pool_brings_its_max_model_len() -> None:
    scheduler, model = make(num_blocks=4, max_model_len=17)
    scheduler.add(request("a", prompt=10, max_tokens=100))
    model.step()
    assert scheduler.reset_blocks(BlockManager(20, 4), max_model_len=80) == []
    assert names(scheduler.reset_blocks(BlockManager(20, 4), max_model_len=11)) == ["a"]
    with pytest.raises(ConfigError, match="max_model_len=0"):
        scheduler.reset_blocks(BlockManager(20, 4), max_model_len=0)
