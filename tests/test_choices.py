"""Laws of several texts per prompt: each is what a request of its own seed gives, and the prompt is computed once."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from strata_lab.engine import LLMEngine
from strata_lab.events import StepEvent
from strata_lab.request import RequestOutput
from strata_lab.sampling_params import RequestError, SamplingParams
from strata_lab.sampling_random import child_seed
from tests.checkpoints import write_checkpoint

OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "cuda_graph": False, "block_size": 8}
PROMPT = [(5 + 7 * i) % 200 + 3 for i in range(37)]


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 7, "max_tokens": 20, "ignore_eos": True, **more})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("choices"), "llama")[0]


@pytest.fixture(scope="module")
def engine(folder):
    with LLMEngine(folder, **OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def alone(engine) -> list[RequestOutput]:
    """What each of six texts is as a request of its own."""
    return [engine.generate([PROMPT], params(seed=child_seed(7, i), logprobs=0))[0] for i in range(6)]


def tokens(output: RequestOutput) -> list[tuple[int, ...]]:
    return [one.token_ids for one in output.outputs]


@pytest.mark.parametrize("prompt_length", [1, 8, 9, 16, 37], ids="prompt {}".format)
def test_each_text_is_what_a_request_of_its_seed_gives(prompt_length, engine) -> None:
    prompt = PROMPT[:prompt_length]
    expected = [engine.generate([prompt], params(seed=child_seed(7, i)))[0].token_ids for i in range(4)]
    engine.reset_prefix_cache()
    output = engine.generate([prompt], params(n=4))[0]
    assert tokens(output) == expected and len(set(expected)) == 4
    assert output.token_ids == engine.generate([prompt], params())[0].token_ids, "text 0 is that of n=1"
    assert [one.index for one in output.outputs] == [0, 1, 2, 3]
    assert len({one.request_id for one in output.outputs}) == 4
    assert engine.stats().kv_blocks_used == engine.stats().num_running == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_prompt_is_computed_once(prefix_cache, folder, alone) -> None:
    with LLMEngine(folder, **OPTIONS, prefix_cache=prefix_cache) as engine:
        output = engine.generate([PROMPT], params(n=6))[0]
        steps = [e for e in engine.events.since(0)[0] if isinstance(e, StepEvent)]
        assert tokens(output) == [one.token_ids for one in alone]
        assert sum(e.num_prefill_tokens for e in steps) == len(PROMPT) + 5, "of each other text its last token"
        assert max(e.kv_blocks_used for e in steps) <= 4 + 6 * (1 + 3), "full blocks of the prompt are shared"


def test_more_texts_than_seats_change_nothing(folder, alone) -> None:
    with LLMEngine(folder, **OPTIONS, max_num_seqs=2) as engine:
        assert tokens(engine.generate([PROMPT], params(n=6))[0]) == [one.token_ids for one in alone]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_texts_that_lose_their_blocks_go_on_unchanged(preemption, folder, engine) -> None:
    long = {"max_tokens": 80, "logprobs": 0}
    expected = [engine.generate([PROMPT], params(seed=child_seed(7, i), **long))[0].token_ids for i in range(4)]
    with LLMEngine(folder, **OPTIONS, num_kv_blocks=20, preemption=preemption) as small:
        output = small.generate([PROMPT], params(n=4, **long))[0]
        assert small.stats().num_preemptions > 0 and small.stats().kv_blocks_used == 0
    assert tokens(output) == expected


def test_texts_among_other_requests_in_slices_change_nothing(folder, alone) -> None:
    with LLMEngine(folder, **OPTIONS, max_num_batched_tokens=8, pd_split=True) as engine:
        others = [[9] * 20, PROMPT, [4] * 30]
        outputs = engine.generate(others, [params(), params(n=6), params(n=2)])
    assert tokens(outputs[1]) == [one.token_ids for one in alone]
    assert [len(output.outputs) for output in outputs] == [1, 6, 2]


def test_an_ordinary_output_is_its_only_one(engine) -> None:
    output = engine.generate([PROMPT], params())[0]
    assert output.outputs == (output,) and output.index == 0 and output.others == ()


# -- the best ----------------------------------------------------------------------------------------------------------


def mean(output: RequestOutput) -> float:
    assert output.cumulative_logprob is not None
    return output.cumulative_logprob / len(output.token_ids)


@pytest.mark.parametrize("n", [1, 3, 6])
def test_the_best_are_those_of_the_highest_mean_log_probability(n, engine, alone) -> None:
    ranked = sorted(alone, key=mean, reverse=True) if n < 6 else alone
    output = engine.generate([PROMPT], params(n=n, best_of=6))[0]
    assert tokens(output) == [one.token_ids for one in ranked[:n]]
    assert [one.index for one in output.outputs] == list(range(n))
    assert all(one.logprobs == () for one in output.outputs), "not asked for"
    asked = engine.generate([PROMPT], params(n=n, best_of=6, logprobs=2))[0]
    assert tokens(asked) == tokens(output)
    assert all(len(entry.top) == 2 for one in asked.outputs for entry in one.logprobs)


def test_the_best_cannot_be_streamed(engine) -> None:
    with pytest.raises(RequestError, match=r"best_of=4 with n=2 cannot be streamed; use generate.*best_of=2"):
        engine.stream(PROMPT, params(n=2, best_of=4))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"n": 0}, "n=0 must be a whole number, from 1 to 128"),
        ({"n": 129}, "n=129"),
        ({"n": 3, "best_of": 2}, "best_of=2 must be a whole number, from 3"),
        ({"n": 2, "temperature": 0}, "n=2 with temperature=0 would give the same text 2 times; try temperature=0.7"),
        ({"best_of": 2, "temperature": 0}, "best_of=2 with temperature=0"),
    ],
)
def test_impossible_numbers_of_texts_are_refused(options, match) -> None:
    with pytest.raises(RequestError, match=match):
        params(**options)


# -- streams and ends --------------------------------------------------------------------------------------------------


def test_a_stream_carries_all_texts_and_ends_with_the_last(engine, alone) -> None:
    events = list(engine.stream(PROMPT, params(n=6)))
    for choice, expected in enumerate(alone):
        own = [e for e in events if e.choice == choice]
        assert tuple(e.token_id for e in own) == expected.token_ids
        assert "".join(e.text for e in own) == expected.text
        assert [e.index for e in own] == list(range(20))
        assert [e.finish_reason for e in own] == [None] * 19 + ["length"]
    assert len({e.request_id for e in events}) == 6


def test_asynchronous_streams_carry_them_too(engine, alone) -> None:
    async def read() -> list[tuple[int, ...]]:
        found: dict[int, list[int]] = {}
        async for event in engine.astream(PROMPT, params(n=3)):
            found.setdefault(event.choice, []).append(event.token_id)
        return [tuple(found[i]) for i in range(3)]

    assert asyncio.run(read()) == [one.token_ids for one in alone[:3]]


def test_texts_that_end_at_different_times_leave_the_others_going(engine, alone) -> None:
    stop = alone[1].token_ids[4]
    expected = [t[: t.index(stop) + 1] if stop in t else t for t in (one.token_ids for one in alone[:3])]
    output = engine.generate([PROMPT], params(n=3, stop_token_ids=[stop]))[0]
    assert tokens(output) == expected
    assert output.outputs[1].finish_reason == "stop" and output.outputs[1].stop_reason == stop
    assert {one.finish_reason for one in output.outputs} == {"stop", "length"}


def test_one_token_each_is_enough(engine, alone) -> None:
    assert tokens(engine.generate([PROMPT], params(n=6, max_tokens=1))[0]) == [one.token_ids[:1] for one in alone]


@pytest.mark.parametrize("steps", [0, 1, 4], ids=["waiting", "begun", "going"])
@pytest.mark.parametrize("how", ["abort", "forget"])
def test_aborting_a_request_ends_all_its_texts(steps, how, folder) -> None:
    with LLMEngine(folder, **OPTIONS) as engine:
        name = engine.add_request(PROMPT, params(n=3))
        for _ in range(steps):
            engine.step()
        session = engine._loop.session(name)
        assert engine.abort(name) if how == "abort" else engine._loop.forget(name) is None
        assert engine.step() is None
        assert {one.finish_reason for one in session.output().outputs} == {"abort"}
        ends = [session.next_event().finish_reason for _ in range(session._queue.qsize())]
        assert ends.count("abort") == 3
        assert engine.stats().kv_blocks_used == 0 and not engine.abort(name)
        assert engine.stats().num_finished == {"abort": 3}


def test_one_text_can_be_aborted_alone(folder, alone) -> None:
    with LLMEngine(folder, **OPTIONS) as engine:
        name = engine.add_request(PROMPT, params(n=3))
        assert engine.abort(f"{name}-1"), "before it begins"
        for _ in range(5):
            engine.step()
        assert engine.abort(f"{name}-2"), "while it goes"
        while engine.step():
            pass
        output = engine.output(name)
        assert [one.finish_reason for one in output.outputs] == ["length", "abort", "abort"]
        assert output.token_ids == alone[0].token_ids and output.outputs[1].token_ids == ()
        assert output.outputs[2].token_ids == alone[2].token_ids[:4]


def test_a_deadline_before_the_prompt_is_computed_ends_them_all(folder) -> None:
    with LLMEngine(folder, **OPTIONS) as engine:
        name = engine.add_request(PROMPT, params(n=3, timeout_s=1e-6))
        deadline = time.perf_counter() + 5
        while not engine.output(name).finish_reason and time.perf_counter() < deadline:
            engine.step()
        assert {one.finish_reason for one in engine.output(name).outputs} == {"timeout"}
        assert engine.stats().num_finished == {"timeout": 3}


def test_a_failing_step_ends_them_all(folder, monkeypatch) -> None:
    with LLMEngine(folder, **OPTIONS) as engine:
        monkeypatch.setattr(engine._loop.parts.runner, "step", lambda inputs: 1 / 0)
        output = engine.generate([PROMPT], params(n=3))[0]
        assert {one.finish_reason for one in output.outputs} == {"error"}
        assert all("ZeroDivisionError" in (one.error or "") for one in output.outputs)


def test_a_name_that_one_of_the_texts_would_have_is_refused(folder) -> None:
    with LLMEngine(folder, **OPTIONS) as engine:
        engine.add_request(PROMPT, params(), request_id="mine-2")
        with pytest.raises(RequestError, match="'mine-2' is in use"):
            engine.add_request(PROMPT, params(n=3), request_id="mine")
        engine.add_request(PROMPT, params(n=2), request_id="mine")
        with pytest.raises(RequestError, match="'mine-1' is in use"):
            engine.add_request(PROMPT, params(), request_id="mine-1")


def test_seeds_of_the_texts_are_different_and_the_same_every_time() -> None:
    assert child_seed(7, 0) == 7
    seeds = {child_seed(seed, index) for seed in range(50) for index in range(128)}
    assert len(seeds) == 50 * 128 and all(0 <= seed < 2**63 for seed in seeds)
    assert child_seed(2**63 - 1, 5) == child_seed(2**63 - 1, 5)
