"""A fake model for the scheduler, whose answers come only from what the block tables lead to.

`FakeModel` keeps a KV pool in which a slot holds a token id. It writes the tokens of each scheduled slice through the
block table and derives the next token from what it *reads back* through it, so a wrong table, a block with two owners,
a stale slot or a skipped token changes the text. Free slots are poisoned before every step, and nothing may be written
where somebody else could read it: into a block with several holders, or one that the prefix cache has a name for.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from strata_lab.admission import ContinuousAdmission
from strata_lab.batch import ScheduledBatch
from strata_lab.block_manager import BlockManager
from strata_lab.kv_retention import KeepAll, Retention
from strata_lab.preemption import SwapToHost
from strata_lab.prefix_cache import PrefixCache
from strata_lab.request import Request
from strata_lab.sampling_params import SamplingParams
from strata_lab.scheduler import Scheduler

POISON = -1


def next_token(tokens: Iterable[int]) -> int:
    return zlib.crc32(repr(list(tokens)).encode()) % 1000


def seen(length: int, kept: tuple[int, ...]) -> Sequence[int]:
    """Positions that the last of `length` tokens sees; `kept`: sinks and window (`Retention.setting`), or all."""
    if len(kept) != 2:
        return range(length)
    sinks, window = kept
    return [*range(min(sinks, length)), *range(max(sinks, length - window), length)]


def content(request: Request, position: int, token: int, retention: Retention) -> int:
    """What a slot holds: the token, and how long its prompt was where that decides what is computed of it."""
    sure = position < retention.sure(request.num_prompt_tokens)
    return token if sure else token + 1000 * (1 + request.num_prompt_tokens)


def undisturbed(request: Request, max_model_len: int, retention: Retention | None = None) -> list[int]:
    """What a request alone on an endless machine generates."""
    tokens, kept = list(request.prompt_token_ids), retention or KeepAll()
    while len(tokens) - request.num_prompt_tokens < request.params.max_tokens and len(tokens) < max_model_len:
        read = seen(len(tokens), kept.setting)
        tokens.append(
            next_token(content(request, p, tokens[p], kept) for p in read) if kept.setting else next_token(tokens)
        )
    return tokens[request.num_prompt_tokens :]


class FakeModel:
    """Runs batches of one scheduler and finishes requests as the engine does."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.now_s = 0.0
        self.reset()

    def reset(self) -> None:
        blocks = self.scheduler.blocks
        self.kv = [[POISON] * blocks.block_size for _ in range(blocks.num_blocks)]
        self.host: dict[int, list[int]] = {}

    def take_from_old_pool(self, moves: list[tuple[int, int]]) -> None:
        """After the scheduler has gone over to another pool: nothing but these blocks is in it."""
        old = self.kv
        self.reset()
        for block, to in moves:
            self.kv[to] = old[block]

    def step(self) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        sampled = self.forward(batch)
        self.commit(batch, sampled)
        return batch

    def move(self, batch: ScheduledBatch) -> None:
        for pairs, source, target in (
            (batch.copies, self.kv, self.kv), (batch.swap_out, self.kv, self.host), (batch.swap_in, self.host, self.kv)
        ):  # fmt: skip
            read = [(new, list(source[old])) for old, new in pairs]  # type: ignore[index]
            assert len({new for new, _ in read}) == len(read), "written twice"
            for new, content in read:
                target[new] = content  # type: ignore[index]

    def forward(self, batch: ScheduledBatch) -> dict[str, int]:
        size = self.scheduler.blocks.block_size
        self.move(batch)
        if isinstance(self.scheduler.preemption, SwapToHost):
            self.scheduler.preemption.check()
        owned = {b for r in self.scheduler.running for b in self.scheduler.blocks.table(r.request_id)}
        named = set(self.scheduler.blocks.prefixes.named())
        for block in set(range(len(self.kv))) - owned - named:
            self.kv[block] = [POISON] * size
        for item in batch.items:
            for position in range(item.start, item.start + item.num_tokens):
                block = item.block_table[position // size]
                assert self.scheduler.blocks.num_holders(block) <= 1, "shared while written"
                assert block not in named, "named while written"
                token, kept = item.request.token_ids[position], self.scheduler.blocks.retention
                self.kv[block][position % size] = content(item.request, position, token, kept)
        sampled = {}
        for item in batch.items:
            if item.samples:
                length = item.start + item.num_tokens
                sampled[item.request.request_id] = next_token(
                    self.kv[item.block_table[p // size]][p % size]
                    for p in seen(length, self.scheduler.blocks.retention.setting)
                )
        return sampled

    def commit(self, batch: ScheduledBatch, sampled: dict[str, int]) -> None:
        self.now_s += 1.0
        self.scheduler.commit(batch)
        for item in batch.items:
            request = item.request
            if request.request_id not in sampled or request.finished:
                continue
            request.append(sampled[request.request_id], self.now_s)
            full = request.num_output_tokens >= request.params.max_tokens
            if full or request.num_tokens >= self.scheduler.max_model_len:
                self.scheduler.finish(request, "length")

    def drain(self, limit: int = 10_000) -> list[ScheduledBatch]:
        batches = []
        while self.scheduler.has_work:
            assert len(batches) < limit, "does not drain"
            batches.append(self.step())
        return batches


def make(
    num_blocks: int = 64, block_size: int = 4, *, cached: bool = False, retention: Retention | None = None,
    **options: Any,
) -> tuple[Scheduler, FakeModel]:  # fmt: skip
    settings_ = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "admission": ContinuousAdmission(),
        **options,
    }
    prefixes = PrefixCache(block_size) if cached else None
    scheduler = Scheduler(BlockManager(num_blocks, block_size, prefixes, retention), **settings_)
    return scheduler, FakeModel(scheduler)


def request(
    name: str, prompt: int = 4, max_tokens: int = 8, priority: int = 0, *, text: str = "", shared: int = 0,
    timeout_s: float | None = None,
) -> Request:  # fmt: skip
    """A request of its own text, or one that has the first `shared` tokens in common with all that begin as `text`."""
    ids = [zlib.crc32(f"{text if i < shared else name}{i}".encode()) % 1000 for i in range(prompt)]
    params = SamplingParams(max_tokens=max_tokens, timeout_s=timeout_s)
    return Request(name, ids, params, priority=priority, arrival_s=0.0)


def names(items: Iterable[Any]) -> list[str]:
    return [(item if isinstance(item, Request) else item.request).request_id for item in items]


def slices(batch: ScheduledBatch) -> list[tuple[str, int, int]]:
    return [(i.request.request_id, i.start, i.num_tokens) for i in batch.items]


def exhausted(*specs: tuple[str, int, int], num_blocks: int) -> tuple[Scheduler, FakeModel]:
    """Requests (name, prompt, priority) that all decode, in a pool of blocks of 4 with no block left."""
    scheduler, model = make(num_blocks=1000)
    for name, prompt, priority in specs:
        scheduler.add(request(name, prompt=prompt, max_tokens=4 * num_blocks - prompt, priority=priority))
    model.step()
    spare = scheduler.blocks.num_free - (num_blocks - scheduler.blocks.num_used)
    scheduler.blocks.grow("someone else", 4 * spare)
    assert scheduler.blocks.num_free == 0
    return scheduler, model
