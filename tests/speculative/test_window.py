"""Drafts take only what is left of a step, and the scheduler's books stay right whatever comes true."""

from __future__ import annotations

import random

import pytest

from strata_lab.batch import ScheduledBatch
from tests.fake_model import FakeModel, make, next_token, request, undisturbed


class DraftingModel(FakeModel):
    """Drafts before each step, right or wrong at random, and verifies what the scheduler took."""

    def __init__(self, scheduler, rng: random.Random, most: int = 5) -> None:
        super().__init__(scheduler)
        self.rng, self.most, self.accepted = rng, most, 0

    def step(self) -> ScheduledBatch:
        for r in self.scheduler.running:
            if r.is_decoding:
                text, r.draft_token_ids = list(r.token_ids), []
                for _ in range(self.rng.randrange(self.most + 1)):
                    text.append(next_token(text) if self.rng.random() < 0.8 else 7)
                r.draft_token_ids = text[r.num_tokens :]
        return super().step()

    def forward(self, batch: ScheduledBatch) -> dict[str, list[int]]:
        size = self.scheduler.blocks.block_size
        plain = {i.request.request_id: (i.num_tokens, i.drafts) for i in batch.items}
        for item in batch.items:
            item.num_tokens -= len(item.drafts)
        first = super().forward(batch)
        named = set(self.scheduler.blocks.prefixes.named())
        tokens = {}
        for item in batch.items:
            name = item.request.request_id
            item.num_tokens, item.drafts = plain[name]
            stop = item.start + item.num_tokens
            for position, token_id in enumerate(item.drafts, stop - len(item.drafts)):
                block = item.block_table[position // size]
                assert self.scheduler.blocks.num_holders(block) == 1
                assert block not in named
                self.kv[block][position % size] = token_id
            if name in first:
                tokens[name] = [first[name]]
                for place, draft in enumerate(item.drafts):
                    if draft != tokens[name][-1]:
                        break
                    length = stop - len(item.drafts) + place + 1
                    tokens[name].append(
                        next_token(self.kv[item.block_table[p // size]][p % size] for p in range(length))
                    )
        return tokens

    def commit(self, batch: ScheduledBatch, sampled: dict[str, list[int]]) -> None:
        first = {name: tokens[0] for name, tokens in sampled.items()}
        super().commit(batch, first)
        for item in batch.items:
            r = item.request
            for token_id in sampled.get(r.request_id, [])[1:]:
                if r.finished:
                    break
                self.accepted += 1
                r.append(token_id, self.now_s)
                self.scheduler.commit_drafts(r)
                if r.num_output_tokens >= r.params.max_tokens or r.num_tokens >= self.scheduler.max_model_len:
                    self.scheduler.finish(r, "length")
            assert r.finished or not item.samples or r.num_uncomputed_tokens == 1


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_texts_are_undisturbed_by_drafts_under_preemption_and_a_prefix_cache(seed: int, cached: bool) -> None:
    rng = random.Random(seed)
    scheduler, _ = make(num_blocks=16, block_size=4, cached=cached, max_num_batched_tokens=24)
    model = DraftingModel(scheduler, rng)
    requests = [
        request(f"r{i}", prompt=rng.randrange(1, 20), max_tokens=rng.randrange(20, 40), text="t", shared=8,
                priority=rng.randrange(2))
        for i in range(9)
    ]  # fmt: skip
    for i, r in enumerate(requests):
        scheduler.add(r)
        if i % 3 == 2:
            for _ in range(4):
                model.step()
                scheduler.blocks.check()
    model.drain()
    scheduler.blocks.check()
    for r in requests:
        assert r.output_token_ids == undisturbed(r, scheduler.max_model_len)
    assert model.accepted > 5
    assert scheduler.num_preemptions > 0


def decoding(drafts: int, **options):
    scheduler, model = make(**options)
    r = request("a", prompt=3, max_tokens=40)
    scheduler.add(r)
    model.step()
    r.draft_token_ids = list(range(drafts))
    return scheduler, r


def test_drafts_end_where_the_request_ends() -> None:
    scheduler, model = make()
    r = request("a", prompt=3, max_tokens=4)
    scheduler.add(r)
    model.step()
    r.draft_token_ids = [5] * 8  # one token is there, two more can follow the next one
    (item,) = scheduler.schedule().items
    assert list(item.drafts) == [5, 5]


def test_drafts_take_what_the_budget_leaves_and_prompts_go_first() -> None:
    scheduler, r = decoding(8, max_num_batched_tokens=10)
    scheduler.add(request("b", prompt=6))
    batch = scheduler.schedule()
    assert [(i.request.request_id, i.num_tokens, len(i.drafts)) for i in batch.items] == [("a", 4, 3), ("b", 6, 0)]
    assert (batch.num_decode_tokens, batch.num_prefill_tokens, batch.num_draft_tokens) == (1, 6, 3)
    assert batch.num_tokens == 10
    assert not batch.is_decode_only
    batch.drop_drafts()
    assert (batch.num_draft_tokens, batch.num_tokens, [i.num_tokens for i in batch.items]) == (0, 7, [1, 6])
    assert r.draft_token_ids == [], "guesses are for one step"


def test_drafts_leave_a_free_block_for_everyone_who_runs() -> None:
    scheduler, r = decoding(8)
    scheduler.blocks.grow("someone else", 4 * (scheduler.blocks.num_free - 2))  # two are left
    (item,) = scheduler.schedule().items
    assert len(item.block_table) == 2  # one block more, one is left
    assert len(item.drafts) == 4
    scheduler.commit(ScheduledBatch([item], [], 1, 0))
    assert r.num_computed_tokens == 4  # drafts are not computed until they came true
    r.append(7, 0.0)
    r.draft_token_ids = [5] * 8
    (item,) = scheduler.schedule().items
    assert len(item.drafts) == 3, "only what its own blocks hold"


def test_a_prompt_slice_takes_no_drafts() -> None:
    scheduler, _ = make()
    r = request("a", prompt=8)
    r.draft_token_ids = [1, 2]
    scheduler.add(r)
    (item,) = scheduler.schedule().items
    assert (item.num_tokens, list(item.drafts)) == (8, [])
