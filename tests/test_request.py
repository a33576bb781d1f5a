"""Laws of requests: parameters are checked once, one token counter tells every phase, illegal moves are bugs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from strata_lab.request import Request, RequestOutput, RequestState, TokenLogprobs, check_token_ids
from strata_lab.sampling_params import MAX_STOP_STRINGS, RequestError, SamplingParams

NAN, INF = float("nan"), float("inf")

# -- sampling parameters ----------------------------------------------------------------------------------------------

BAD_PARAMS = [
    *[
        ("temperature", v, r"a number in \[0, 100\]; try 0 for greedy, or 0.7")
        for v in (-0.1, 101, NAN, INF, "1", True)
    ],
    *[("top_p", v, r"a number in \(0, 1\]; try 0.9") for v in (0, 0.0, -0.5, 1.01, NAN, None)],
    *[("min_p", v, r"a number in \[0, 1\]; try 0.05") for v in (-0.01, 1.5, NAN)],
    *[("repetition_penalty", v, r"a number in \(0, 10\]; try 1.1") for v in (0, -1, 10.5, NAN)],
    *[("presence_penalty", v, r"a number in \[-2, 2\]; try 0") for v in (-2.1, 2.1, INF)],
    *[("frequency_penalty", v, r"a number in \[-2, 2\]; try 0") for v in (-2.1, 2.1, -INF)],
    *[("top_k", v, "a whole number, at least 0; try 40") for v in (-1, 1.0, "5", True, None)],
    *[("max_tokens", v, "a whole number, at least 1; try 256") for v in (0, -5, 2.0, None, False)],
    *[("logprobs", v, "a whole number, from 0 to 20; try 5") for v in (-1, 21, 1.5, True)],
    *[("seed", v, "a whole number, from 0 to 9223372036854775807; try 42") for v in (-1, 2**63, 0.5)],
    *[("stop", v, "at most 16 non-empty strings") for v in (["a", ""], "", [1], ["x"] * (MAX_STOP_STRINGS + 1))],
    *[("stop", v, r"a collection; try \(\) for none") for v in (None, 5)],
    *[("stop_token_ids", v, r"a collection; try \(\) for none") for v in (None, 5)],
    *[("logit_bias", v, "a collection; try {} for none") for v in (None, 5, [1])],
]


@pytest.mark.parametrize(("name", "value", "rule"), BAD_PARAMS, ids=lambda v: repr(v)[:24])
def test_a_bad_parameter_is_refused_with_value_rule_and_a_value_that_works(name: str, value: Any, rule: str) -> None:
    with pytest.raises(RequestError, match=f"must be {rule}") as error:
        SamplingParams(**{name: value})
    assert str(error.value).startswith(f"{name}=")
    assert "; try " in str(error.value)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_token_ids": [3, -1]}, "stop_token_ids=-1 must be a whole number, at least 0"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids=1.5 must be a whole number, at least 0"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias key='5' must be a whole number, at least 0; try a token id"),
        ({"logit_bias": {5: 101}}, r"logit_bias value=101 must be a number in \[-100, 100\]; try -100 to forbid"),
        ({"logit_bias": {5: NAN}}, r"logit_bias value=nan must be a number"),
    ],
    ids=str,
)
def test_members_of_collections_are_checked(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**params)


def test_bounds_are_inclusive() -> None:
    low = SamplingParams(temperature=0, top_k=0, min_p=0, presence_penalty=-2, max_tokens=1, logprobs=0, seed=0)
    high = SamplingParams(temperature=100, top_p=1, min_p=1, repetition_penalty=10, logprobs=20, seed=2**63 - 1)
    assert (low.greedy, high.greedy) == (True, False)


def test_collections_are_frozen_copies() -> None:
    stop, ids, bias = ["a", "b"], [1, 2], {3: 0.5}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)  # type: ignore[arg-type]
    stop.append("c"), ids.append(3), bias.update({4: 1.0})
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a", "b"), (1, 2), {3: 0.5})
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]


def test_an_unknown_parameter_is_an_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_errors_are_value_errors() -> None:
    assert issubclass(RequestError, ValueError)


# -- the counter ------------------------------------------------------------------------------------------------------


def make(prompt: int = 3) -> Request:
    return Request("r", list(range(prompt)), SamplingParams())


def test_one_counter_tells_prefill_decode_and_recompute() -> None:
    r = make(3)
    assert (r.num_uncomputed_tokens, r.is_decoding) == (3, False)  # prefill
    r.num_computed_tokens = 2
    assert (r.num_uncomputed_tokens, r.is_decoding) == (1, False)  # last slice of a prompt is no decode
    r.num_computed_tokens = 3
    r.append(7, 1.0)
    assert (r.num_tokens, r.num_uncomputed_tokens, r.is_decoding) == (4, 1, True)  # decode
    r.num_computed_tokens = 4
    r.append(8, 2.0)
    r.num_computed_tokens = 0
    assert (r.num_tokens, r.num_uncomputed_tokens, r.is_decoding) == (5, 5, False)  # recompute
    assert (r.num_prompt_tokens, r.num_output_tokens, r.output_token_ids) == (3, 2, [7, 8])


def test_the_prompt_is_copied_and_stays_as_it_was() -> None:
    r = make(2)
    r.append(9, 1.0)
    assert (r.prompt_token_ids, r.token_ids) == ([0, 1], [0, 1, 9])
    r.output_token_ids.append(5)
    assert r.output_token_ids == [9]


def test_the_time_of_the_first_token_stays_even_when_it_is_zero() -> None:
    r = make()
    r.append(1, 0.0)
    r.append(2, 5.0)
    assert (r.first_token_s, r.last_token_s) == (0.0, 5.0)


def test_a_live_request_is_equal_only_to_itself() -> None:
    assert make() != make()
    assert len({make(), make()}) == 2


LEGAL = {
    ("WAITING", "RUNNING"),
    ("WAITING", "FINISHED"),
    ("RUNNING", "PREEMPTED"),
    ("RUNNING", "FINISHED"),
    ("PREEMPTED", "RUNNING"),
    ("PREEMPTED", "FINISHED"),
}


@pytest.mark.parametrize("old", RequestState)
@pytest.mark.parametrize("new", RequestState)
def test_only_legal_moves_are_possible(old: RequestState, new: RequestState) -> None:
    r = make()
    r.state = old
    if (old.name, new.name) in LEGAL:
        r.move_to(new)
        assert r.state is new
    else:
        with pytest.raises(AssertionError, match="r: "):
            r.move_to(new)
        assert r.state is old


def test_a_request_finishes_once() -> None:
    r = make()
    r.finish("error", "no luck")
    assert (r.finished, r.finish_reason, r.error) == (True, "error", "no luck")
    with pytest.raises(AssertionError):
        r.finish("stop")


# -- what comes out ---------------------------------------------------------------------------------------------------


def test_an_output_is_a_snapshot_with_times_in_milliseconds() -> None:
    r = make(2)
    r.arrival_s = 10.0
    for token, now in ((5, 10.5), (6, 10.6), (7, 10.8)):
        r.append(token, now)
    r.logprobs.append(TokenLogprobs(5, -0.1, {5: -0.1}))
    out = RequestOutput.of(r, "prompt", "text")
    r.append(8, 11.0)
    assert (out.request_id, out.prompt, out.text) == ("r", "prompt", "text")
    assert (out.prompt_token_ids, out.token_ids, out.finish_reason) == ((0, 1), (5, 6, 7), None)
    assert out.logprobs == (TokenLogprobs(5, -0.1, {5: -0.1}),)
    assert out.ttft_ms == pytest.approx(500)
    assert out.tpot_ms == pytest.approx(150)
    assert out.e2e_ms == pytest.approx(800)


@pytest.mark.parametrize("count", [0, 1])
def test_times_that_do_not_exist_yet_are_none(count: int) -> None:
    r = make()
    for _ in range(count):
        r.append(1, r.arrival_s + 1)
    out = RequestOutput.of(r, "", "")
    assert out.tpot_ms is None
    assert (out.ttft_ms is None) == (out.e2e_ms is None) == (count == 0)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the prompt has no tokens; give at least one"),
        ([1, 10], "token id 10 must be a whole number from 0 to 9; try 1"),
        ([-1], "token id -1 must be"),
        ([1.0], "token id 1.0 must be"),
        (["a"], "token id 'a' must be"),
        ([True], "token id True must be"),
    ],
    ids=str,
)
def test_a_bad_prompt_is_refused(ids: list[Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_token_ids(ids, 10)


def test_a_good_prompt_comes_back_as_a_list() -> None:
    assert check_token_ids((0, 9), 10) == [0, 9]
