"""Speculation on a GPU: captured cycles and windows say what plain captured steps say, and give their memory back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from strata_lab.block_manager import BlockManager
from strata_lab.build import Builder
from strata_lab.engine import LLMEngine
from strata_lab.kv_cache import KVCache
from strata_lab.layers.weights import ModelWeights
from strata_lab.models.base import CausalLM
from strata_lab.models.hub import find_model
from strata_lab.run_ahead import RunAhead
from strata_lab.runner import EagerStep
from strata_lab.sampling_params import SamplingParams
from strata_lab.speculative.ahead import DraftAhead
from strata_lab.speculative.draft_model import DraftModel
from tests.checkpoints import write_checkpoint
from tests.drafts import write_feature_draft
from tests.gpu.card_memory import allocated
from tests.gpu.test_engine_gpu import prompts
from tests.gpu.test_triton_engine_gpu import check_coming_and_going, one_by_one
from tests.test_smollm2 import MODEL, PROMPTS

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, max_tokens=40, seed=3, ignore_eos=True)
SLACK_BYTES = 4 << 20  # counters of kernels, which stay with their streams
EXACT = {
    "device": "cuda", "dtype": "float32", "weight_format": "bf16", "kv_cache_dtype": "fp32", "max_model_len": 128,
    "num_kv_blocks": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """A target, another model of its vocabulary, and a draft that sees the target's states.

    Stored as the target holds them: a draft keeps its own format, and a model that drafts for itself must have the same
    numbers. The logits of these small models lie so close that rounded weights put them into another order, which
    hardly moves the first and changes every other draw.
    """
    models = [
        write_checkpoint(tmp_path_factory.mktemp(family), family, dtype=torch.bfloat16)[0]
        for family in ("llama", "qwen3")
    ]
    return [*models, write_feature_draft(models[0], tmp_path_factory.mktemp("drafts") / "features")]


def always(engine: LLMEngine, most: int) -> None:
    """Guess in every step, whether it pays or not."""
    engine._loop.parts.speculation.policy = None
    engine._loop.parts.speculation.most = most


def tokens(engine: LLMEngine, params: SamplingParams) -> list[list[int]]:
    """Of one request alone, then of four together."""
    outputs = engine.generate(prompts(1), params) + engine.generate(prompts(4), params)
    assert [o.error for o in outputs] == [None] * 5
    return [list(o.token_ids) for o in outputs]


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("draft", [0, 1, 2])
def test_drafts_made_ahead_change_no_token(folders: list[Any], params: SamplingParams, draft: int) -> None:
    with LLMEngine(folders[0], draft_model=folders[draft], **EXACT) as engine:
        assert isinstance(engine._loop.parts.runner, RunAhead)
        expected = tokens(engine, params)
        assert engine.apply(speculative="draft").ok
        assert isinstance(engine._loop.parts.runner, DraftAhead)
        for most in (1, 3, 7):
            always(engine, most)
            assert tokens(engine, params) == expected, most
        stats = engine.stats()
        assert stats.num_drafted_tokens > 100
        assert (stats.acceptance_rate > 0.95) == (draft == 0)
        assert stats.num_accepted_tokens > 0 or draft == 1


# Drawn coldly enough to repeat itself: where nothing has come before, nothing is looked up.
@pytest.mark.parametrize(
    "params", [GREEDY, replace(DRAWN, temperature=0.05, top_k=0, top_p=1.0)], ids=["greedy", "drawn"]
)
def test_copies_looked_up_ahead_change_no_token_and_are_captured_once(
    folders: list[Any], params: SamplingParams
) -> None:
    text = prompts(1)[0] * 3
    with LLMEngine(folders[0], **EXACT) as engine:
        expected = tokens(engine, params), engine.generate([text], params)[0].token_ids
        assert engine.apply(speculative="ngram").ok
        cycles = engine._loop.parts.runner.cycles
        for most in (1, 3, 7):
            always(engine, most)
            assert (tokens(engine, params), engine.generate([text], params)[0].token_ids) == expected, most
        assert engine.stats().num_drafted_tokens > 100
        captured = {key: dict(c.replays) for key, c in cycles._captures.items()}
        assert engine.generate([text], params)[0].token_ids == expected[1]
        assert {key: dict(c.replays) for key, c in cycles._captures.items()} == captured
        assert engine.stats().num_accepted_tokens > 0, "such texts of a small model go round"


def test_no_step_captures_anew_and_closing_gives_the_memory_back(folders: list[Any]) -> None:
    with LLMEngine(folders[0], **EXACT) as engine:  # what libraries keep for good
        engine.generate(prompts(1), GREEDY)
    before = allocated()
    options = EXACT | {"num_kv_blocks": 4096}
    with LLMEngine(folders[0], draft_model=folders[0], speculative="draft", **options) as engine:
        always(engine, 3)
        assert torch.cuda.memory_allocated() > before + 8 * SLACK_BYTES
        engine.generate(prompts(1), GREEDY)
        cycles = engine._loop.parts.runner.cycles
        captured, taken = {key: dict(c.replays) for key, c in cycles._captures.items()}, engine.stats().capture_bytes
        assert taken > 0
        engine.generate(prompts(1), GREEDY)
        assert {key: dict(c.replays) for key, c in cycles._captures.items()} == captured
        assert engine.stats().capture_bytes == taken
        del cycles, captured
    assert allocated() <= before + SLACK_BYTES


def test_requests_that_come_go_and_are_aborted_get_their_tokens(folders: list[Any]) -> None:
    with LLMEngine(folders[0], **EXACT) as engine:
        expected = one_by_one(engine)
    with LLMEngine(folders[0], draft_model=folders[0], speculative="draft", max_num_seqs=3, **EXACT) as engine:
        always(engine, 5)
        check_coming_and_going(engine, expected, steps_between=3)


def first_layers(builder: Builder, resolved: Any, whole: ModelWeights) -> DraftModel:
    """In the place of `Builder._draft_model`: the target's own first layers, under its head."""
    size = builder.config.block_size
    config, weights = replace(builder.model_config, num_layers=20), replace(whole, layers=whole.layers[:20])
    kv = KVCache(config, 64, size, resolved.kv_cache_dtype, builder.device, None)
    ops = builder._eager(resolved, weights, kv).model.ops
    model = CausalLM(config, weights, ops, builder.rotary, fused=True)
    return DraftModel(EagerStep(model, kv, builder.dtype), BlockManager(64, size), builder.device, "first layers")


@pytest.mark.skipif(find_model(MODEL) is None, reason=f"{MODEL} is not installed; run `make model`")
def test_smollm2_says_the_same_with_its_first_layers_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Builder, "_draft_model", first_layers)
    settings = {"device": "cuda", "dtype": "float32", "kv_cache_dtype": "fp32", "max_model_len": 512}
    with LLMEngine(MODEL, draft_model=MODEL, **settings) as engine:
        expected = [engine.generate([text], GREEDY)[0].token_ids for text in PROMPTS[:6]]
        for setting, most in (("draft", 3), ("ngram", 5)):
            assert engine.apply(speculative=setting).ok
            always(engine, most)
            assert [engine.generate([text], GREEDY)[0].token_ids for text in PROMPTS[:6]] == expected, setting
        assert engine.stats().num_accepted_tokens > 0
