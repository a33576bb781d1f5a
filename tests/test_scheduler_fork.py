"""Laws of forks: a child goes on from what its parent has computed, and neither ever sees what the other writes."""

from __future__ import annotations

import pytest

from strata_lab.admission import StaticAdmission
from strata_lab.preemption import SwapToHost
from strata_lab.request import Request, RequestState
from strata_lab.sampling_params import RequestError, SamplingParams
from tests.fake_model import FakeModel, make, request, undisturbed


def child_of(parent: Request, name: str, *, tokens: list[int] | None = None, max_tokens: int = 8) -> Request:
    """A request that asks the same again, or goes on from other tokens."""
    prompt = parent.prompt_token_ids if tokens is None else tokens
    return Request(name, list(prompt), SamplingParams(max_tokens=max_tokens), priority=parent.priority, arrival_s=0.0)


def computed(prompt: int, *, steps: int = 1, **options: object) -> tuple[object, FakeModel, Request]:
    scheduler, model = make(**options)  # type: ignore[arg-type]
    parent = request("parent", prompt=prompt, max_tokens=20)
    scheduler.add(parent)
    for _ in range(steps):
        model.step()
    return scheduler, model, parent


@pytest.mark.parametrize("prompt", [1, 2, 4, 5, 8, 11, 12], ids=str)
@pytest.mark.parametrize("cached", [False, True], ids=["plain", "cached"])
def test_children_compute_one_token_and_have_the_undisturbed_text(prompt: int, cached: bool) -> None:
    scheduler, model, parent = computed(prompt, cached=cached)
    children = [child_of(parent, f"c{i}") for i in range(3)]
    used = scheduler.blocks.num_used
    assert [scheduler.fork(parent, c) for c in children] == [prompt - 1] * 3
    partial = (prompt - 1) % 4 > 0
    assert scheduler.blocks.num_used == used + 3 * partial, "only the block that each writes is its own"
    batch = model.step()
    assert len(batch.copies) == 3 * partial
    assert [i.num_tokens for i in batch.items if i.request in children] == [1] * 3
    model.drain()
    for r in (parent, *children):
        assert r.output_token_ids == undisturbed(r, 256)
    scheduler.blocks.check()
    assert scheduler.blocks.num_used == 0


def test_a_child_of_a_beam_shares_the_output_too_and_stops_where_the_texts_part() -> None:
    scheduler, model, parent = computed(6, steps=7)
    whole = child_of(parent, "whole", tokens=list(parent.token_ids))
    other = child_of(parent, "other", tokens=[*parent.token_ids[:9], 7, 7, 7])
    stranger = child_of(parent, "stranger", tokens=[1, 2, 3])
    assert [scheduler.fork(parent, c) for c in (whole, other, stranger)] == [12, 9, 0]
    assert stranger.state is RequestState.WAITING
    model.drain()
    for r in (parent, whole, other, stranger):
        assert r.output_token_ids == undisturbed(r, 256)


def test_a_child_of_a_child_that_was_not_copied_yet_reads_the_original() -> None:
    scheduler, model, parent = computed(7)
    child = child_of(parent, "child")
    grandchild = child_of(parent, "grandchild")
    scheduler.fork(parent, child)
    scheduler.fork(child, grandchild)
    source = scheduler.blocks.table("parent")[1]
    assert [old for old, _ in model.step().copies] == [source, source]
    model.drain()
    assert grandchild.output_token_ids == child.output_token_ids == undisturbed(child, 256)


@pytest.mark.parametrize("ends", ["parent", "child", "both"])
def test_who_ends_before_the_copy_is_made_takes_nothing_with_it(ends: str) -> None:
    scheduler, model, parent = computed(7)
    child, second = child_of(parent, "child"), child_of(parent, "second")
    scheduler.fork(parent, child)
    for name in ("parent", "child") if ends == "both" else (ends,):
        scheduler.abort(name)
    if ends == "child":
        scheduler.fork(parent, second)  # takes the block that the first gave back
    new = request("new", prompt=30)
    scheduler.add(new)
    model.drain()
    scheduler.blocks.check()
    assert scheduler.blocks.num_used == 0
    for r in (parent, child, second, new):
        if r.finish_reason == "length":
            assert r.output_token_ids == undisturbed(r, 256)


@pytest.mark.parametrize("reason", ["seat", "blocks", "parent"])
def test_without_seat_or_blocks_or_parent_a_child_waits_and_loses_nothing(reason: str) -> None:
    scheduler, model, parent = computed(7, max_num_seqs=1 if reason == "seat" else 8)
    if reason == "parent":
        model.drain()
    if reason == "blocks":
        scheduler.blocks.grow("someone else", 4 * (scheduler.blocks.num_free - 4))
    child = child_of(parent, "child", max_tokens=12)
    assert scheduler.fork(parent, child) == 0
    assert (child.state, child.num_computed_tokens) == (RequestState.WAITING, 0)
    scheduler.blocks.free("someone else")
    model.drain()
    assert child.output_token_ids == undisturbed(child, 256)


def test_a_child_joins_a_static_batch_and_asks_no_bound_of_the_queue() -> None:
    scheduler, model, parent = computed(7, admission=StaticAdmission(), max_waiting=1)
    scheduler.add(request("waits"))
    assert [scheduler.fork(parent, child_of(parent, f"c{i}")) for i in range(8)] == [6] * 7 + [0]
    model.drain()
    assert scheduler.blocks.num_used == 0


def test_a_bad_child_is_refused_and_changes_nothing() -> None:
    scheduler, _, parent = computed(7)
    for child, message in (
        (child_of(parent, "parent"), "'parent' is in use"),
        (child_of(parent, "empty", tokens=[]), "empty prompt"),
        (child_of(parent, "long", max_tokens=10_000, tokens=[1] * 256), "max_model_len=256"),
    ):
        with pytest.raises(RequestError, match=message):
            scheduler.fork(parent, child)
    assert (len(scheduler.running), len(scheduler.waiting)) == (1, 0)
    scheduler.blocks.check()


def test_the_block_that_a_held_parent_writes_is_not_shared() -> None:
    scheduler, model = make(max_num_batched_tokens=6)
    parent = request("parent", prompt=20)
    scheduler.add(parent)
    model.step()
    batch = scheduler.schedule()  # 6 of 20 tokens are computed, 6 more are on their way
    scheduler.hold(batch)
    child = child_of(parent, "child")
    assert scheduler.fork(parent, child) == 4
    scheduler.release(batch)
    model.commit(batch, model.forward(batch))
    model.drain()
    assert child.output_token_ids == undisturbed(child, 256)[:8]


def test_parents_and_children_are_evicted_swapped_and_finished_apart() -> None:
    scheduler, model = make(num_blocks=13, preemption=SwapToHost(6))
    parent = request("parent", prompt=9, max_tokens=30)
    scheduler.add(parent)
    model.step()
    children = [child_of(parent, f"c{i}", max_tokens=20 + i) for i in range(3)]
    for c in children:
        scheduler.fork(parent, c)
    model.drain()
    assert min(scheduler.num_preemptions, scheduler.num_swapped_in) > 0
    for r in (parent, *children):
        assert r.output_token_ids == undisturbed(r, 256)
    scheduler.blocks.check()
    assert scheduler.blocks.num_used == scheduler.preemption.num_used == 0
