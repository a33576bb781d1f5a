"""Laws of log probabilities of prompts and outputs: those of transformers, however the prompt is computed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from strata_lab import prompt_rows
from strata_lab.engine import LLMEngine
from strata_lab.request import TokenLogprobs
from strata_lab.sampling_params import RequestError, SamplingParams
from tests.checkpoints import write_checkpoint

OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "cuda_graph": False, "block_size": 8}
EXACT = {"weight_format": "fp32", "kv_cache_dtype": "fp32"}
PROMPT = [(5 + 7 * i) % 200 + 3 for i in range(45)]
TOLERANCE = 2e-4  # of a log probability: float32 sums in another order


def params(**more: Any) -> SamplingParams:
    options = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 3, "prompt_logprobs": 3, **more}
    return SamplingParams(**options)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("prompt"), "llama")


@pytest.fixture(scope="module")
def expected(checkpoint):
    """transformers' log probabilities of the prompt's and six more tokens: row i is of token i + 1."""
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(6):
            logits = checkpoint[1](torch.tensor([tokens])).logits[0]
            tokens.append(int(logits[-1].argmax()))
    return tokens, logits.double().log_softmax(dim=1)


def check(entries: Any, expected: Any, first: int) -> None:
    """Entries of the tokens from position `first` on are transformers'."""
    tokens, reference = expected
    for position, entry in enumerate(entries, first):
        row = reference[position - 1]
        assert isinstance(entry, TokenLogprobs) and entry.token_id == tokens[position]
        assert math.isclose(entry.logprob, float(row[entry.token_id]), abs_tol=TOLERANCE), position
        best = row.topk(3)
        assert list(entry.top) == best.indices.tolist(), position
        for value, other in zip(entry.top.values(), best.values.tolist(), strict=True):
            assert math.isclose(value, other, abs_tol=TOLERANCE), position


def same(one: Any, other: Any) -> bool:
    """Equal within the rounding of slices of another size."""
    return len(one) == len(other) and all(
        a is b is None or (a.token_id == b.token_id and math.isclose(a.logprob, b.logprob, abs_tol=TOLERANCE))
        for a, b in zip(one, other, strict=True)
    )


def test_prompt_and_output_have_the_log_probabilities_of_transformers(checkpoint, expected) -> None:
    with LLMEngine(checkpoint[0], **OPTIONS, **EXACT) as engine:
        output = engine.generate([PROMPT], params())[0]
    assert list(output.token_ids) == expected[0][len(PROMPT) :]
    assert len(output.prompt_logprobs) == len(PROMPT) and output.prompt_logprobs[0] is None
    check(output.prompt_logprobs[1:], expected, 1)
    check(output.logprobs, expected, len(PROMPT))


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 7}, {"pd_split": True, "max_num_batched_tokens": 16},
                                     {"cuda_graph": True}, {"max_num_batched_tokens": 1}], ids=str)  # fmt: skip
def test_however_the_prompt_is_sliced_its_entries_are_the_same(options, checkpoint, expected) -> None:
    with LLMEngine(checkpoint[0], **{**OPTIONS, **options}, **EXACT) as engine:
        stream = engine.stream([7] * 9, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        output = engine.generate([PROMPT], params())[0]
        stream.close()
    assert len(output.prompt_logprobs) == len(PROMPT)
    check(output.prompt_logprobs[1:], expected, 1)
    assert list(output.token_ids) == expected[0][len(PROMPT) :]


def test_few_rows_of_logits_are_held_at_a_time(checkpoint, expected, monkeypatch) -> None:
    monkeypatch.setattr(prompt_rows, "MAX_ROWS", 4)
    with LLMEngine(checkpoint[0], **OPTIONS, **EXACT) as engine:
        step, rows = engine._loop.parts.runner.step, []

        def watched(inputs):
            rows.append(inputs.sample_rows.shape[0])
            return step(inputs)

        monkeypatch.setattr(watched, "states", (), raising=False)
        monkeypatch.setattr(engine._loop.parts.runner, "step", watched)
        output = engine.generate([PROMPT], params())[0]
        check(output.prompt_logprobs[1:], expected, 1)
    assert output.finish_reason == "length"
    assert max(rows) == 4 and sum(rows) == len(PROMPT) - 1 + 6


def test_a_cached_beginning_is_computed_again_for_them_and_only_for_them(checkpoint, expected) -> None:
    with LLMEngine(checkpoint[0], **OPTIONS, **EXACT) as engine:
        engine.generate([PROMPT], params(prompt_logprobs=None))
        output = engine.generate([PROMPT], params())[0]
        assert output.num_cached_tokens == 0
        check(output.prompt_logprobs[1:], expected, 1)
        again = engine.generate([PROMPT], params(prompt_logprobs=None))[0]
        assert again.num_cached_tokens == 40 and again.prompt_logprobs == ()
        assert again.token_ids == output.token_ids


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preemption_neither_loses_nor_repeats_an_entry(preemption, checkpoint) -> None:
    asked = params(max_tokens=60)
    prompts = [[(3 + i * 5 + j * 11) % 200 + 3 for j in range(19)] for i in range(4)]
    with LLMEngine(checkpoint[0], **OPTIONS, **EXACT) as engine:
        alone = [engine.generate([prompt], asked)[0] for prompt in prompts]
    small = {**OPTIONS, "max_model_len": 96, "max_num_batched_tokens": 8}
    with LLMEngine(checkpoint[0], **small, **EXACT, num_kv_blocks=14, preemption=preemption) as engine:
        outputs = engine.generate(prompts, asked)
        assert engine.stats().num_preemptions > 0
    assert [o.token_ids for o in outputs] == [o.token_ids for o in alone]
    assert all(same(o.prompt_logprobs, a.prompt_logprobs) for o, a in zip(outputs, alone, strict=True))
    assert all(same(o.logprobs, a.logprobs) for o, a in zip(outputs, alone, strict=True))


def test_an_urgent_request_in_the_middle_of_the_prompt_neither_loses_nor_repeats_an_entry(checkpoint, expected) -> None:
    options = {**OPTIONS, "max_num_batched_tokens": 8, "max_num_seqs": 1, "scheduling_policy": "priority"}
    with LLMEngine(checkpoint[0], **options, **EXACT) as engine:
        name = engine.add_request(PROMPT, params())
        for _ in range(3):
            engine.step()
        assert len(engine.output(name).prompt_logprobs) == 1 + 24
        engine.add_request([9, 9, 9], params(prompt_logprobs=None), priority=5)
        while engine.step():
            pass
        assert engine.stats().num_preemptions == 1
        check(engine.output(name).prompt_logprobs[1:], expected, 1)
        assert len(engine.output(name).prompt_logprobs) == len(PROMPT)


def test_requests_of_one_batch_get_each_what_they_asked_for(checkpoint, expected) -> None:
    asked = [
        params(),
        params(prompt_logprobs=None),
        params(prompt_logprobs=0),
        params(prompt_logprobs=5, logprobs=None),
    ]
    prompts = [PROMPT, PROMPT, PROMPT, PROMPT[:1]]
    with LLMEngine(checkpoint[0], **OPTIONS, **EXACT) as engine:
        full, none, chosen, short = engine.generate(prompts, asked)
    check(full.prompt_logprobs[1:], expected, 1)
    assert none.prompt_logprobs == () and none.token_ids == full.token_ids
    assert same(chosen.prompt_logprobs, full.prompt_logprobs)
    assert all(entry.top == {} for entry in chosen.prompt_logprobs[1:] if entry)
    assert short.prompt_logprobs == (None,) and short.logprobs == ()


def test_several_texts_share_the_entries_of_their_prompt(checkpoint, expected) -> None:
    with LLMEngine(checkpoint[0], **OPTIONS, **EXACT) as engine:
        output = engine.generate([PROMPT], params(n=3, temperature=1.0, seed=1))[0]
    check(output.prompt_logprobs[1:], expected, 1)
    assert all(one.prompt_logprobs == output.prompt_logprobs for one in output.outputs)


@pytest.mark.parametrize("value", [-1, 21, 1.5, True])
def test_a_bad_number_of_alternatives_says_what_works(value) -> None:
    with pytest.raises(RequestError, match="prompt_logprobs=.*from 0 to 20; try 5"):
        SamplingParams(prompt_logprobs=value)
