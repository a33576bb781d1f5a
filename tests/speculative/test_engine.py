"""An engine that drafts gives the texts of one that does not, in every setting, for good, bad and lucky guesses."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from strata_lab.engine import LLMEngine
from strata_lab.events import SettingEvent, StepEvent
from strata_lab.request import Request
from strata_lab.sampling_params import SamplingParams
from strata_lab.settings import ConfigError
from strata_lab.speculative.speculator import NoSpeculation, Speculator
from tests.checkpoints import write_checkpoint

OPTIONS = {"device": "cpu", "max_model_len": 128}
PARAMS = (
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, max_tokens=24, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, seed=6, max_tokens=17, ignore_eos=True, repetition_penalty=1.3, top_k=20),
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, frequency_penalty=1.0, logit_bias={7: 2.0}),
    SamplingParams(temperature=1.2, seed=8, max_tokens=3, ignore_eos=True),
)


class Oracle:
    """Knows the texts, and errs as often as it is told to."""

    name, classes, costs_time, look_is_work = "oracle", (("known", 1),), False, False
    captures = 0

    def __init__(self, texts: dict[tuple[int, ...], list[int]], right: float) -> None:
        self.texts, self.right, self.rng = texts, right, random.Random(3)

    def look(self, requests):
        return [1] * len(requests)

    def draft(self, requests: list[Request], counts: list[int]) -> list[list[int]]:
        drafts = []
        for r, count in zip(requests, counts, strict=True):
            text = self.texts[tuple(r.prompt_token_ids)][r.num_output_tokens :][:count]
            drafts.append([t if self.rng.random() < self.right else (t + 1) % 300 for t in text])
        return drafts

    def forget(self, request: Request) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("speculative"), "llama")[0]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(3, 300, (7 + 3 * i,), generator=generator).tolist() for i in range(len(PARAMS))]


@pytest.fixture(scope="module")
def expected(folder) -> dict[tuple[int, ...], tuple]:
    with LLMEngine(folder, **OPTIONS) as engine:
        outputs = [engine.generate([p], s)[0] for p, s in zip(prompts(), PARAMS, strict=True)]
    return {o.prompt_token_ids: (o.token_ids, o.logprobs, o.finish_reason) for o in outputs}


def oracle(engine: LLMEngine, expected, right: float, most: int = 4) -> None:
    drafter = Oracle({prompt: list(tokens) for prompt, (tokens, _, _) in expected.items()}, right)
    loop = engine._loop
    loop.parts = dataclasses.replace(loop.parts, speculation=Speculator(drafter, None, most))


def check(outputs, expected) -> None:
    for o in outputs:
        tokens, logprobs, reason = expected[o.prompt_token_ids]
        assert (o.token_ids, o.finish_reason) == (tokens, reason)
        assert [(e.token_id, e.top.keys()) for e in o.logprobs] == [(e.token_id, e.top.keys()) for e in logprobs]
        assert [e.logprob for e in o.logprobs] == pytest.approx([e.logprob for e in logprobs], abs=1e-6)


SETTINGS = {
    "captured": {},
    "eager": {"cuda_graph": False},
    "split": {"pd_split": True},
    "static": {"continuous_batching": False},
    "few-blocks": {"block_size": 8, "num_kv_blocks": 7, "max_model_len": 56},
    "small-budget": {"max_num_batched_tokens": 7},
    "no-prefix-cache": {"prefix_cache": False},
    "two-seats": {"max_num_seqs": 2},
    "plain-kernels": {"fused_kernels": False},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_texts_logprobs_and_ends_are_those_of_plain_decoding(setting, folder, expected) -> None:
    with LLMEngine(folder, **(OPTIONS | SETTINGS[setting])) as engine:
        oracle(engine, expected, right=0.8)
        check(engine.generate(prompts(), PARAMS), expected)
        stats = engine.stats()
        assert 0 < stats.num_accepted_tokens < stats.num_drafted_tokens
        assert stats.tokens_per_step > 1.0
        assert engine._loop.scheduler.blocks.num_used == 0
        if setting == "few-blocks":
            assert stats.num_preemptions > 0


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_guesses_all_wrong_or_all_right_change_nothing_but_the_number_of_steps(right, folder, expected) -> None:
    with LLMEngine(folder, **OPTIONS) as engine:
        oracle(engine, expected, right)
        outputs = [engine.generate([p], s)[0] for p, s in zip(prompts(), PARAMS, strict=True)]
        check(outputs, expected)
        stats = engine.stats()
        tokens = sum(len(o.token_ids) for o in outputs)
        assert stats.acceptance_rate == right
        # A prompt's step gives one token; then 4 guesses and the token behind them, or one token alone.
        steps = [1 + -(-(s.max_tokens - 1) // 5) if right else s.max_tokens for s in PARAMS]
        assert stats.num_steps == sum(steps)
        assert stats.num_output_tokens == tokens


def test_stops_inside_a_window_end_the_text_there(folder, expected) -> None:
    prompt = prompts()[0]
    tokens = expected[tuple(prompt)][0]
    place = next(i for i in range(6, 24) if tokens[i] not in tokens[:i])
    params = dataclasses.replace(PARAMS[0], stop_token_ids=(tokens[place],))
    with LLMEngine(folder, **OPTIONS) as engine:
        oracle(engine, expected, right=1.0, most=8)
        output = engine.generate([prompt], params)[0]
        assert output.token_ids == tokens[: place + 1]
        assert output.finish_reason == "stop"
        again = engine.generate([prompt], params)[0]  # what it left in the prefix cache is right
        assert again.token_ids == output.token_ids


def test_it_can_be_toggled_while_texts_are_generated(folder, expected) -> None:
    with LLMEngine(folder, **OPTIONS) as engine:
        for p, s in zip(prompts(), PARAMS, strict=True):
            engine.add_request(p, s, request_id=str(p))
        for step in range(60):
            if step % 3 == 0:
                oracle(engine, expected, right=0.7)
            elif step % 3 == 2:
                loop = engine._loop
                loop.parts = dataclasses.replace(loop.parts, speculation=NoSpeculation())
            engine.step()
        check([engine.output(str(p)) for p in prompts()], expected)


def test_ngram_is_applied_live_and_reports_what_it_did(folder) -> None:
    pattern = [11, 12, 13, 14, 15, 16] * 6
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logit_bias={20: 100.0})
    with LLMEngine(folder, **OPTIONS) as engine:
        plain = engine.generate([pattern], params)[0]
        report = engine.apply(speculative="ngram", num_draft_tokens=6)
        assert report.ok
        assert {n: r.status for n, r in report.results.items()} == {
            "speculative": "applied", "num_draft_tokens": "applied",
        }  # fmt: skip
        cursor = engine.events.cursor
        assert engine.generate([pattern], params)[0].token_ids == plain.token_ids
        events, _, _ = engine.events.since(cursor)
        windows = [w for e in events if isinstance(e, StepEvent) for w in e.drafts]
        stats = engine.stats()
        assert windows
        assert sum(len(w.token_ids) for w in windows) == stats.num_drafted_tokens == sum(stats.drafted_by_position)
        assert sum(w.num_accepted for w in windows) == stats.num_accepted_tokens == sum(stats.accepted_by_position)
        assert max(len(w.token_ids) for w in windows) <= 6
        assert stats.speculation[0] in ("on", "off")
        if plain.token_ids[-30:] == (20,) * 30:  # the bias makes it say one thing
            assert windows[-1].is_loop == (stats.num_loop_tokens > 0)
        assert engine.apply(speculative="none").ok
        assert engine.stats().speculation == ("none", "")


def test_a_text_bound_to_a_grammar_gets_no_drafts(folder, expected) -> None:
    with LLMEngine(folder, **OPTIONS) as engine:
        oracle(engine, expected, right=1.0)
        for prompt in prompts()[:2]:
            engine.add_request(prompt, PARAMS[0], request_id=str(prompt))
        bound = engine._loop.session(str(prompts()[0])).request
        engine.step()
        bound.grammar = object()
        free = engine._loop.session(str(prompts()[1])).request
        engine._loop.parts.speculation.prepare(lambda: [bound, free])
        assert (len(bound.draft_token_ids), len(free.draft_token_ids)) == (0, 4)
        bound.grammar = None


def test_a_draft_model_must_be_named(folder) -> None:
    with LLMEngine(folder, **OPTIONS) as engine:
        report = engine.apply(speculative="draft")
        assert not report.ok
        assert "draft_model" in report.results["speculative"].reason
        assert engine.optimizations.speculative == "none"
        assert not [e for e in engine.events.since(0)[0] if isinstance(e, SettingEvent)]
    with pytest.raises(ConfigError, match="draft_model"):
        LLMEngine(folder, speculative="draft", **OPTIONS)
