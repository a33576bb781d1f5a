"""Laws of the router: the first word that says something decides, and what does not exist is refused."""

from __future__ import annotations

from typing import Any

import pytest

from strata_lab.engine import LLMEngine
from strata_lab.router import Router
from strata_lab.sampling_params import RequestError, SamplingParams
from strata_lab.settings import ConfigError
from tests.checkpoints import write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def router(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("router"), "llama")[0]
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 64}
    engines = {
        name: LLMEngine(folder, weight_format=f, **options) for name, f in (("precise", "fp32"), ("fast", "int4"))
    }
    with Router(engines, aliases={"tiny": "precise", "tiny-turbo": "fast"}, urgent="fast", urgent_from=5) as made:
        yield made


@pytest.mark.parametrize(
    ("asked", "name", "reason"),
    [
        ({}, "precise", "default"), ({"priority": 4}, "precise", "default"), ({"priority": 5}, "fast", "priority"),
        ({"model": "tiny", "priority": 9}, "precise", "model"), ({"model": "tiny-turbo"}, "fast", "model"),
        ({"model": "fast"}, "fast", "model"), ({"precision": "precise", "model": "tiny-turbo"}, "precise", "precision"),
    ],
)  # fmt: skip
def test_the_first_word_that_says_something_decides(asked: dict[str, Any], name: str, reason: str, router) -> None:
    chosen = router.choose(**asked)
    assert (chosen.name, chosen.reason) == (name, reason)
    assert chosen.engine is router.engines[name]


@pytest.mark.parametrize("asked", [{"model": "gpt"}, {"precision": "tiny"}, {"precision": "", "model": "tiny"}])
def test_what_does_not_exist_is_refused_and_not_sent_elsewhere(asked: dict[str, Any], router) -> None:
    with pytest.raises(RequestError, match="precise, fast"):
        router.choose(**asked)


def test_requests_really_run_in_the_format_they_were_routed_to(router) -> None:
    prompt = [5, 9, 11, 40, 41]
    tokens = {name: engine.generate([prompt], GREEDY)[0].token_ids for name, engine in router.engines.items()}
    assert tokens["precise"] != tokens["fast"], "four bits of a random model answer otherwise"
    assert router.generate([prompt], GREEDY)[0].token_ids == tokens["precise"]
    assert router.generate([prompt], GREEDY, priority=7)[0].token_ids == tokens["fast"]
    assert tuple(e.token_id for e in router.stream(prompt, GREEDY, model="tiny-turbo")) == tokens["fast"]
    assert router.models() == {"precise": "fp32", "fast": "int4", "tiny": "fp32", "tiny-turbo": "int4"}


def test_a_request_is_aborted_wherever_it_is(router) -> None:
    long = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    request_id = router.add_request([5, 6, 7], long, precision="fast", request_id="mine")
    assert request_id == "mine"
    router.abort("mine")
    assert router.engines["fast"].output("mine").finish_reason in ("abort", "length")
    assert router.abort("nobody") is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"default": "x"}, "default='x' must be one of a; try"), ({"urgent": "x"}, "urgent='x'"),
        ({"aliases": {"m": "x"}}, "alias 'm'='x'"), ({"urgent_from": 1.5}, "urgent_from=1.5"),
    ],
)  # fmt: skip
def test_names_are_checked_when_the_router_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Router({"a": object()}, **options)
    with pytest.raises(ConfigError, match="at least one"):
        Router({})
