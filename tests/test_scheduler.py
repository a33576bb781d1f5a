"""Laws of the scheduler: what a step holds, what is refused, how a request ends, what a step costs."""

from __future__ import annotations

import time

import pytest

from strata_lab.admission import SplitPrefill, StaticAdmission
from strata_lab.request import RequestState
from strata_lab.sampling_params import RequestError
from strata_lab.scheduler import MAX_WAITING, QueueFull
from tests.fake_model import exhausted, make, names, request, slices, undisturbed

# -- one request ------------------------------------------------------------------------------------------------------


def test_a_request_goes_through_prefill_then_one_token_per_step() -> None:
    scheduler, model = make()
    a = request("a", prompt=6, max_tokens=3)
    scheduler.add(a)
    first, second, third = model.drain()
    assert (slices(first), first.is_decode_only, first.items[0].samples) == ([("a", 0, 6)], False, True)
    assert (slices(second), second.is_decode_only, second.num_tokens) == ([("a", 6, 1)], True, 1)
    assert slices(third) == [("a", 7, 1)]
    assert (a.state, a.finish_reason, a.output_token_ids) == (RequestState.FINISHED, "length", undisturbed(a, 256))
    assert scheduler.blocks.num_free == 64


def test_a_prompt_longer_than_the_budget_is_sliced_and_only_the_last_slice_samples() -> None:
    scheduler, model = make(max_num_batched_tokens=5)
    a = request("a", prompt=12, max_tokens=1)
    scheduler.add(a)
    batches = model.drain()
    assert [slices(b) for b in batches] == [[("a", 0, 5)], [("a", 5, 5)], [("a", 10, 2)]]
    assert [b.items[0].samples for b in batches] == [False, False, True]
    assert [(b.num_prefill_tokens, b.num_decode_tokens) for b in batches] == [(5, 0), (5, 0), (2, 0)]
    assert a.output_token_ids == undisturbed(a, 256)


def test_whether_an_item_samples_is_fixed_when_the_step_is_built() -> None:
    scheduler, model = make()
    scheduler.add(request("a"))
    batch = model.step()  # the token is appended by now
    assert batch.items[0].samples
    assert scheduler.running[0].is_decoding


@pytest.mark.parametrize(("prompt", "blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)], ids=str)
def test_the_table_covers_exactly_the_tokens_of_the_step(prompt: int, blocks: int) -> None:
    """Blocks of 4: the prompt fills ceil(prompt / 4); the token sampled from it takes its slot one step later."""
    scheduler, model = make()
    scheduler.add(request("a", prompt=prompt, max_tokens=12))
    model.step()
    assert len(scheduler.blocks.table("a")) == blocks
    for written in range(prompt + 1, prompt + 6):
        model.step()
        assert len(scheduler.blocks.table("a")) == -(-written // 4)


@pytest.mark.parametrize(("prompt", "max_tokens"), [(4, 13), (1, 16), (15, 2), (16, 1)], ids=str)
def test_the_last_token_needs_no_slot(prompt: int, max_tokens: int) -> None:
    """prompt + max_tokens - 1 = 16 slots = all 4 blocks of 4: it fits; one more token does not."""
    scheduler, model = make(num_blocks=4)
    a = request("a", prompt=prompt, max_tokens=max_tokens)
    scheduler.add(a)
    model.drain()
    assert a.output_token_ids == undisturbed(a, 256)
    with pytest.raises(RequestError, match="may need 5 KV blocks of 4 tokens and the pool has 4"):
        scheduler.add(request("b", prompt=prompt, max_tokens=max_tokens + 1))


def test_max_model_len_bounds_the_slots_a_request_can_need() -> None:
    scheduler, model = make(num_blocks=4, max_model_len=17)
    a = request("a", prompt=16, max_tokens=500)
    b = request("b", prompt=2, max_tokens=500)
    scheduler.add(a)
    scheduler.add(b)
    model.drain()
    assert (a.num_output_tokens, b.num_output_tokens) == (1, 15)
    assert (a.output_token_ids, b.output_token_ids) == (undisturbed(a, 17), undisturbed(b, 17))


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_prompt_without_room_for_a_token_is_refused_with_the_numbers() -> None:
    scheduler, _ = make(max_model_len=16)
    with pytest.raises(
        RequestError, match=r"'a' has 16 tokens .* max_model_len=16; try at most 15 .* max_model_len=17"
    ):
        scheduler.add(request("a", prompt=16))
    scheduler.add(request("b", prompt=15))


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fix"), [(10, 100, "max_tokens=7"), (20, 5, "max_tokens=1 and a prompt 4 tokens shorter")]
)
def test_a_request_larger_than_the_pool_is_refused_with_numbers_that_work(
    prompt: int, max_tokens: int, fix: str
) -> None:
    scheduler, model = make(num_blocks=4)
    needed = -(-(prompt + max_tokens - 1) // 4)
    with pytest.raises(RequestError) as error:
        scheduler.add(request("a", prompt=prompt, max_tokens=max_tokens))
    assert f"may need {needed} KV blocks of 4 tokens and the pool has 4; try {fix}, or num_kv_blocks={needed}" in str(
        error.value
    )
    assert not scheduler.has_work
    scheduler.add(request("a", prompt=min(prompt, 16), max_tokens=7 if prompt == 10 else 1))
    model.drain()


def test_the_queue_is_bounded_and_the_error_names_the_numbers() -> None:
    scheduler, _ = make(max_waiting=2)
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    with pytest.raises(QueueFull, match=r"2 requests wait and max_waiting=2; try again later, or max_waiting=4"):
        scheduler.add(request("c"))
    scheduler.schedule()  # both are admitted
    scheduler.add(request("c"))
    assert make()[0].max_waiting == MAX_WAITING == 1024


def test_an_id_in_use_and_an_empty_prompt_are_refused() -> None:
    scheduler, model = make()
    scheduler.add(request("a"))
    with pytest.raises(RequestError, match="request_id='a' is in use; try another"):
        scheduler.add(request("a"))
    with pytest.raises(RequestError, match="'b' has an empty prompt; try at least one token"):
        scheduler.add(request("b", prompt=0))
    model.drain()
    scheduler.add(request("a"))


# -- sharing a step ---------------------------------------------------------------------------------------------------


def test_decodes_come_first_and_prompts_fill_the_rest_in_order_of_arrival() -> None:
    scheduler, model = make(max_num_batched_tokens=10)
    scheduler.add(request("a", prompt=4))
    scheduler.add(request("b", prompt=4))
    model.step()
    scheduler.add(request("c", prompt=13))
    scheduler.add(request("d", prompt=6))
    assert [slices(model.step()) for _ in range(3)] == [
        [("a", 4, 1), ("b", 4, 1), ("c", 0, 8)],
        [("a", 5, 1), ("b", 5, 1), ("c", 8, 5), ("d", 0, 3)],
        [("a", 6, 1), ("b", 6, 1), ("c", 13, 1), ("d", 3, 3)],
    ]


def test_decodes_never_wait_for_prompts() -> None:
    scheduler, model = make(num_blocks=256, max_num_batched_tokens=8)
    old = [request(f"old{i}", prompt=2, max_tokens=30) for i in range(4)]
    for r in old:
        scheduler.add(r)
    while not all(r.is_decoding for r in old):
        model.step()
    for i in range(4):
        scheduler.add(request(f"new{i}", prompt=50, max_tokens=2))
    for _ in range(20):
        assert set(names(model.step().items)) >= {"old0", "old1", "old2", "old3"}


def test_at_most_max_num_seqs_run() -> None:
    scheduler, model = make(max_num_seqs=3)
    for i in range(7):
        scheduler.add(request(f"r{i}", max_tokens=2 + i))
    sizes = [len(batch.items) for batch in model.drain()]
    assert max(sizes) == 3


def test_a_step_without_budget_left_admits_nobody() -> None:
    scheduler, model = make(max_num_batched_tokens=8)
    scheduler.add(request("a", prompt=8))
    scheduler.add(request("b"))
    model.step()
    assert (names(scheduler.running), names(scheduler.waiting)) == (["a"], ["b"])


def test_with_continuous_batching_a_newcomer_joins_a_running_batch() -> None:
    scheduler, model = make()
    scheduler.add(request("a"))
    model.step()
    scheduler.add(request("b"))
    assert names(model.step().items) == ["a", "b"]


def test_a_static_batch_admits_nobody_until_it_has_drained() -> None:
    scheduler, model = make(admission=StaticAdmission(), max_num_seqs=2)
    for name, max_tokens in (("a", 2), ("b", 5), ("c", 2)):
        scheduler.add(request(name, max_tokens=max_tokens))
    batches = [names(batch.items) for batch in model.drain()]
    assert batches == [["a", "b"], ["a", "b"], ["b"], ["b"], ["b"], ["c"], ["c"]]


def test_a_static_batch_takes_all_its_seats_even_when_its_prompts_need_several_steps() -> None:
    scheduler, model = make(admission=StaticAdmission(), max_num_batched_tokens=6, max_num_seqs=3)
    for name in "abcd":
        scheduler.add(request(name, prompt=6, max_tokens=9))
    model.step()
    assert names(scheduler.running) == ["a", "b", "c"]
    assert names(scheduler.waiting) == ["d"]
    model.step()
    assert slices(model.step()) == [("a", 7, 1), ("b", 5, 1), ("c", 0, 4)]


# -- abort, finish, commit --------------------------------------------------------------------------------------------


def test_abort_works_in_every_state_and_frees_the_blocks() -> None:
    scheduler, _ = exhausted(("a", 4, 0), ("b", 7, 0), num_blocks=3)
    scheduler.add(request("w"))
    scheduler.schedule()
    states = {r.request_id: r.state for r in (*scheduler.running, *scheduler.waiting)}
    assert states == {"a": RequestState.RUNNING, "b": RequestState.PREEMPTED, "w": RequestState.WAITING}
    for name in "abw":
        aborted = scheduler.abort(name)
        assert aborted is not None
        assert (aborted.request_id, aborted.finish_reason, aborted.finished) == (name, "abort", True)
        assert scheduler.blocks.table(name) == []
        assert scheduler.abort(name) is None
    assert scheduler.abort("stranger") is None
    assert (scheduler.has_work, list(scheduler.waiting), scheduler.running) == (False, [], [])


def test_an_abort_while_the_model_runs_leaves_the_others_alone() -> None:
    scheduler, model = make()
    a, b = request("a"), request("b")
    scheduler.add(a)
    scheduler.add(b)
    batch = scheduler.schedule()
    scheduler.abort("a")
    model.commit(batch, model.forward(batch))
    assert (a.num_computed_tokens, a.output_token_ids) == (0, [])
    model.drain()
    assert b.output_token_ids == undisturbed(b, 256)


def test_finish_records_reason_and_error() -> None:
    scheduler, model = make()
    a = request("a")
    scheduler.add(a)
    model.step()
    scheduler.finish(a, "error", "the logits are not numbers")
    assert (a.finish_reason, a.error) == ("error", "the logits are not numbers")
    assert (scheduler.running, scheduler.has_work, scheduler.blocks.num_free) == ([], False, 64)


def test_without_work_a_step_is_empty() -> None:
    scheduler, _ = make()
    batch = scheduler.schedule()
    assert (batch.items, batch.num_tokens, batch.is_decode_only) == ([], 0, False)


# -- cost -------------------------------------------------------------------------------------------------------------


def test_a_step_of_64_decodes_is_scheduled_in_well_under_a_millisecond() -> None:
    scheduler, model = make(num_blocks=4096, block_size=16, max_num_seqs=64, max_num_batched_tokens=512)
    for i in range(64):
        scheduler.add(request(f"r{i}", prompt=8, max_tokens=200))
    model.step()
    best = float("inf")
    for _ in range(50):
        start = time.perf_counter()
        batch = scheduler.schedule()
        best = min(best, time.perf_counter() - start)
        model.commit(batch, dict.fromkeys(names(batch.items), 1))
    assert batch.is_decode_only
    assert len(batch.items) == 64
    assert best < 1e-3  # seconds; about 0.1 ms on an idle core


def test_split_prefill_bounds_how_many_prompt_tokens_come_between_two_tokens_of_a_stream() -> None:
    scheduler, model = make(num_blocks=64, prefill=SplitPrefill(6), max_num_batched_tokens=40)
    scheduler.add(request("stream", 4, max_tokens=40))
    model.step()
    scheduler.add(request("long", 30, max_tokens=2))
    kinds = [(b.num_decode_tokens, b.num_prefill_tokens) for b in (model.step() for _ in range(11))]
    assert kinds == [(1, 0), (0, 6)] * 5 + [(2, 0)]


def test_split_prefill_gives_prompts_the_whole_budget_while_nobody_decodes() -> None:
    scheduler, model = make(num_blocks=64, prefill=SplitPrefill(6), max_num_batched_tokens=40)
    scheduler.add(request("long", 30, max_tokens=2))
    assert model.step().num_prefill_tokens == 30


def test_lookahead_reserves_blocks_for_decodes_and_never_more_than_a_request_can_fill() -> None:
    scheduler, model = make(num_blocks=64, lookahead=20)
    scheduler.add(request("short", 4, max_tokens=3))
    scheduler.add(request("long", 4, max_tokens=100))
    model.step()
    model.step()
    size = scheduler.blocks.block_size
    assert len(scheduler.blocks.table("short")) == scheduler.blocks.blocks_for(4 + 3 - 1)
    assert len(scheduler.blocks.table("long")) == scheduler.blocks.blocks_for(5 + 20)
    assert size < 20


def test_lookahead_takes_no_block_when_few_are_free() -> None:
    scheduler, model = make(num_blocks=4, lookahead=20)
    scheduler.add(request("only", 4, max_tokens=12))
    model.step()
    model.step()
    assert len(scheduler.blocks.table("only")) == scheduler.blocks.blocks_for(5)
