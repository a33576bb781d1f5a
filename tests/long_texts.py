"""Texts long enough that part of their past can be left out, and small engines that answer them."""

from __future__ import annotations

from typing import Any

import torch

from strata_lab.engine import LLMEngine
from strata_lab.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def prompts(count: int = 4, shared: int = 0) -> list[list[int]]:
    """Of 30 tokens and more, behind as many `shared` ones."""
    generator = torch.Generator().manual_seed(8)
    common = torch.randint(3, 300, (shared,), generator=generator).tolist()
    return [common + torch.randint(3, 300, (30 + 7 * i,), generator=generator).tolist() for i in range(count)]


def engine(folder: Any, **options: Any) -> LLMEngine:
    """In float32 on the CPU, in blocks of 8 tokens."""
    base: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 8, "max_model_len": 128}
    return LLMEngine(folder, **base | options)


def tokens(folder: Any, texts: list[list[int]], **options: Any) -> list[tuple[int, ...]]:
    """Greedy answers of such an engine."""
    with engine(folder, **options) as e:
        return [o.token_ids for o in e.generate(texts, GREEDY)]


def evicted_thrice(e: LLMEngine, texts: list[list[int]]) -> list[tuple[int, ...]]:
    """Greedy answers of an engine that takes everybody's blocks away before three of its steps."""
    names = [e.add_request(text, GREEDY) for text in texts]
    for step in range(1000):
        if step in (2, 9, 30):
            for request in list(e._loop.scheduler.running):
                e._loop.scheduler._preempt(request)
        if e.step() is None:
            break
        e._loop.scheduler.blocks.check()
    return [e.output(name).token_ids for name in names]
