"""Laws of prompt embeddings: rows equal to a token's give that token's text, however they are sliced or computed again,
and nothing of them is ever found by the ids of a text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strata_lab.engine import LLMEngine
from strata_lab.sampling_params import RequestError, SamplingParams
from tests.checkpoints import write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
IMAGE = 14 * 14  # patches of the articles' example
HIDDEN = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("embeds"), "llama")[0]


def opened(folder: Any, **options: Any) -> LLMEngine:
    return LLMEngine(folder, device="cpu", **({"max_model_len": 250} | options))


def result(engine: LLMEngine, **asked: Any) -> Any:
    request_id = engine.add_request(params=asked.pop("params", GREEDY), **asked)
    while engine.output(request_id).finish_reason is None:
        engine.step()
    return engine.output(request_id)


def tokens(count: int) -> list[int]:
    return torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(count)).tolist()


@pytest.mark.parametrize("budget", [512, 16, 1])
@pytest.mark.parametrize("weight_format", ["fp32", "int8"])
def test_rows_that_equal_tokens_give_the_same_text_however_sliced(budget: int, weight_format: str, folder) -> None:
    ids = tokens(33)  # slices of 16 leave one of a single token, which no captured step may take
    with opened(folder, weight_format=weight_format, max_num_batched_tokens=budget) as engine:
        expected = result(engine, prompt=ids).token_ids
        rows = engine.embed(ids)
        assert rows.shape == (33, HIDDEN) and rows.dtype == torch.float32
        output = result(engine, prompt_embeds=rows)
    assert output.token_ids == expected
    assert output.prompt_token_ids == (-1,) * 33 and output.prompt == ""


def test_an_image_between_two_texts_changes_the_text_and_repeats_it(folder) -> None:
    image = torch.randn(IMAGE, HIDDEN, generator=torch.Generator().manual_seed(1)) * 0.1
    with opened(folder) as engine:
        before, behind = engine.embed(tokens(9)), engine.embed(tokens(11))
        prompt = torch.cat([before, image, behind])
        with_image = result(engine, prompt_embeds=prompt).token_ids
        assert result(engine, prompt_embeds=prompt.double()).token_ids == with_image
        assert result(engine, prompt_embeds=torch.cat([before, -image, behind])).token_ids != with_image


def test_the_prefix_cache_takes_nobodys_picture_for_anothers(folder) -> None:
    with opened(folder, prefix_cache=True) as engine:
        rows = engine.embed(tokens(64))
        first = result(engine, prompt_embeds=rows)
        assert result(engine, prompt_embeds=rows).num_cached_tokens == 0
        assert result(engine, prompt_embeds=-rows).num_cached_tokens == 0
        assert result(engine, prompt=[0] * 64).num_cached_tokens == 0
        assert result(engine, prompt=tokens(64)).token_ids == first.token_ids


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_preempted_picture_is_computed_again_from_its_rows(prefix_cache: bool, folder) -> None:
    ids, options = tokens(40), {"max_num_seqs": 1, "scheduling_policy": "priority", "prefix_cache": prefix_cache}
    with opened(folder, **options) as engine:
        expected = result(engine, prompt=ids).token_ids
        mine = engine.add_request(None, GREEDY, prompt_embeds=engine.embed(ids))
        for _ in range(4):
            engine.step()
        assert 0 < len(engine.output(mine).token_ids) < 10
        engine.add_request(tokens(8), GREEDY, priority=5)  # takes the only seat
        while engine.step() is not None:
            pass
        assert engine.stats().num_preemptions == 1
        assert engine.output(mine).token_ids == expected


def test_the_callers_tensor_may_change_afterwards(folder) -> None:
    with opened(folder) as engine:
        rows = engine.embed(tokens(20))
        expected = result(engine, prompt_embeds=rows).token_ids
        request_id = engine.add_request(prompt_embeds=rows, params=GREEDY)
        rows.zero_()
        while engine.output(request_id).finish_reason is None:
            engine.step()
        assert engine.output(request_id).token_ids == expected


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "give a prompt or prompt_embeds"),
        ({"prompt": [1], "prompt_embeds": torch.zeros(1, HIDDEN)}, "one of them"),
        ({"prompt_embeds": torch.zeros(3, HIDDEN + 1)}, f"must be [tokens, {HIDDEN}]"),
        ({"prompt_embeds": torch.zeros(0, HIDDEN)}, "torch.zeros(4, 64)"),
        ({"prompt_embeds": torch.zeros(HIDDEN)}, "shape (64,)"),
        ({"prompt_embeds": torch.zeros(2, HIDDEN, dtype=torch.int64)}, "torch.int64"),
        ({"prompt_embeds": torch.full((2, HIDDEN), float("nan"))}, "not finite"),
        ({"prompt_embeds": torch.zeros(300, HIDDEN)}, "max_model_len"),
        ({"prompt_embeds": torch.zeros(2, HIDDEN), "params": SamplingParams(repetition_penalty=1.1)}, "presence"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_prompt_is_refused(asked: dict[str, Any], message: str, folder) -> None:
    with opened(folder) as engine, pytest.raises(RequestError) as caught:
        engine.add_request(**asked)
    assert message in str(caught.value)
