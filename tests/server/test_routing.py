"""Laws of several engines behind one server: who answers is who was asked for, by model, header or priority."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

from strata_lab import cli
from strata_lab.cli.routes import open_routes, parse_routes
from strata_lab.engine import LLMEngine
from strata_lab.router import Router
from strata_lab.sampling_params import SamplingParams
from strata_lab.server.background import served
from strata_lab.settings import ConfigError
from tests.server.serving import TINY

PROMPT = [5, 9, 11, 40, 41]
ASK: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def routed(folder: Path) -> Iterator[tuple[httpx.Client, dict[str, str], str]]:
    """A client, each engine's own text, and the name that leaves the choice to the server."""
    engines = {name: LLMEngine(folder, **TINY, weight_format=f) for name, f in (("precise", "fp32"), ("fast", "int4"))}
    with Router(engines, aliases={"tiny-turbo": "fast"}, urgent="fast", urgent_from=5) as router:
        texts = {name: engine.generate([PROMPT], GREEDY)[0].text for name, engine in engines.items()}
        with served(router) as server, httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=30) as http:
            yield http, texts, server.service.names[0]


@pytest.mark.parametrize(
    ("body", "headers", "name"),
    [
        ({}, {}, "precise"), ({"priority": 4}, {}, "precise"), ({"priority": 5}, {}, "fast"),
        ({}, {"X-Strata-Priority": "7"}, "fast"), ({"model": "fast"}, {}, "fast"),
        ({"model": "tiny-turbo"}, {}, "fast"),
        ({"model": "precise", "priority": 9}, {}, "precise"), ({}, {"X-Strata-Precision": "fast"}, "fast"),
        ({"model": "fast"}, {"x-strata-precision": "precise"}, "precise"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_who_was_asked_for_answers(body: Any, headers: Any, name: str, stream: bool, routed: Any) -> None:
    http, texts, _ = routed
    assert texts["precise"] != texts["fast"], "four bits of a random model answer otherwise"
    answer = http.post("/generate", json=ASK | body | {"stream": stream}, headers=headers)
    last = answer.text.split("data: ")[-2] if stream else answer.text
    found = httpx.Response(200, text=last).json()
    assert (found["outputs"][0]["text"], found["model"]) == (texts[name], name)


def test_the_models_own_name_leaves_the_choice_to_the_server(routed: Any) -> None:
    http, texts, model = routed
    for priority, name in ((0, "precise"), (5, "fast")):
        answer = http.post("/v1/completions", json=ASK | {"model": model, "priority": priority}).json()
        assert (answer["choices"][0]["text"], answer["model"]) == (texts[name], name)


def test_openais_client_lists_and_asks_for_aliases(routed: Any) -> None:
    http, texts, model = routed
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        formats = {m.id: m.weight_format for m in client.models.list()}
        assert formats == {model: "fp32", "precise": "fp32", "fast": "int4", "tiny-turbo": "int4"}
        asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
        for alias, name in (("tiny-turbo", "fast"), ("precise", "precise")):
            assert client.completions.create(model=alias, **asked).choices[0].text == texts[name]


@pytest.mark.parametrize(
    ("body", "headers", "status", "message"),
    [
        ({"model": "gpt"}, {}, 404, "'tiny-turbo'"), ({}, {"X-Strata-Precision": "gpt"}, 400, "precise, fast"),
        ({}, {"X-Strata-Priority": "high"}, 400, "whole number"), ({}, {"X-Strata-Priority": "1_0"}, 400, "try 0"),
        ({}, {"X-Strata-Priority": str(2**31)}, 400, "whole number"),
        ({"priority": 3}, {"X-Strata-Priority": "4"}, 400, "give one"),
    ],
)  # fmt: skip
def test_what_does_not_exist_is_refused_and_sent_nowhere(
    body: Any, headers: Any, status: int, message: str, routed: Any
) -> None:
    answer = routed[0].post("/v1/completions", json=ASK | body, headers=headers)
    assert answer.status_code == status and message in answer.json()["error"]["message"]


def test_each_engine_has_its_own_settings_metrics_and_requests(routed: Any) -> None:
    http = routed[0]
    changed = http.patch("/v1/optimizations?model=tiny-turbo", json={"max_num_seqs": 3})
    assert changed.json()["ok"]
    values = {
        name: http.get("/v1/optimizations", params={"model": name}).json()["optimizations"]["max_num_seqs"]["value"]
        for name in ("fast", "precise")
    }
    assert values["fast"] == 3 != values["precise"]
    assert http.get("/v1/optimizations?model=gpt").status_code == http.get("/metrics?model=gpt").status_code == 404
    count = {n: http.get("/metrics", params={"model": n}).text for n in ("fast", "precise")}
    assert all("vllm:generation_tokens_total" in text for text in count.values()) and count["fast"] != count["precise"]
    assert http.get("/health").json()["live_requests_by_engine"] == {"precise": 0, "fast": 0}


def test_flags_become_engines_that_share_the_memory(folder: Path) -> None:
    routes = parse_routes(["precise=fp32", "fast=int4,max-num-seqs=3"], str(folder), dict(TINY))
    tasks: list[str] = []
    with open_routes(routes, "fast", 5, lambda task, done: tasks.append(task)) as router:
        values = {name: engine.optimizations for name, engine in router.engines.items()}
        assert (values["precise"].weight_format, values["fast"].weight_format) == ("fp32", "int4")
        assert values["fast"].max_num_seqs == 3 and values["precise"].gpu_memory_utilization == 0.45
        assert router.choose(priority=5).name == "fast" and router.choose().name == "precise"
    assert {task.partition(":")[0] for task in tasks} == {"precise", "fast"}


def test_the_command_loads_a_router_where_it_is_given_routes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[Any] = []
    monkeypatch.setattr(
        sys.modules["strata_lab.cli.serve"], "_run", lambda config, model, load: loads.append(load) or 0
    )
    flags = ["serve", "--model", str(folder), "--device", "cpu", "--max-model-len", "64", "--no-cuda-graph"]
    routes = ["--route", "precise=fp32", "--route", "fast=int4", "--urgent-route", "fast"]
    assert CliRunner().invoke(cli.app, flags + routes).exit_code == 0
    assert CliRunner().invoke(cli.app, flags).exit_code == 0
    with loads[0](lambda task, done: None) as router, loads[1](lambda task, done: None) as engine:
        assert list(router.engines) == ["precise", "fast"] and router.choose(priority=1).name == "fast"
        assert isinstance(engine, LLMEngine) and engine.optimizations.max_model_len == 64
    wrong = CliRunner().invoke(cli.app, [*flags, "--urgent-route", "fast"])
    assert wrong.exit_code == 2 and "urgent_route='fast'" in wrong.output


def test_an_engine_that_cannot_be_made_closes_those_before_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[LLMEngine] = []
    monkeypatch.setattr(LLMEngine, "close", lambda self, close=LLMEngine.close: (closed.append(self), close(self)))
    routes = {"a": (str(folder), dict(TINY)), "b": ("/no/such/model", {})}
    with pytest.raises(ValueError, match="no/such/model"):
        open_routes(routes, None, 1, lambda task, done: None)
    assert len(closed) == 1 and closed[0].closed


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["fast"], "NAME=SETTINGS"), (["a b=int4"], "letters"), (["a=int4", "a=int8"], "taken"),
        (["a=four"], "'four' must be a weight format"), (["a=max_num_seqs=0"], "at least 1"),
        (["a=speed=9"], "unknown toggle"),
    ],
)  # fmt: skip
def test_a_route_says_what_is_wrong_before_anything_is_loaded(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_routes(texts, "smollm2-135m", {})
