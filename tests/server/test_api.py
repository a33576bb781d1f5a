"""Laws of the endpoints: answers are the engine's, streams add up to them, and nothing is ignored in silence."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from strata_lab.sampling_params import SamplingParams
from tests.server.serving import Served

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
CHAT = [{"role": "user", "content": "hello"}]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The documents of a stream, which must end as OpenAI's do."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def expected(server: Served, prompt: Any, **params: Any) -> str:
    return server.engine.generate([prompt], SamplingParams(**{**GREEDY, **params}))[0].text


def test_a_completion_is_what_the_engine_generates(server: Served) -> None:
    answer = server.post("/v1/completions", prompt="hello w", **GREEDY).json()
    assert answer["choices"][0]["text"] == expected(server, "hello w")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["object"] == "text_completion" and answer["model"] == "tiny" and answer["id"].startswith("cmpl-")
    count = len(server.engine.tokenizer.encode("hello w"))
    assert (
        answer["usage"].items() >= {"prompt_tokens": count, "completion_tokens": 8, "total_tokens": count + 8}.items()
    )


def test_completions_take_every_kind_of_prompt_and_keep_their_order(server: Served) -> None:
    for prompts in (["hello", "world"], [[5, 6, 7], [8, 9]]):
        answer = server.post("/v1/completions", prompt=prompts, **GREEDY).json()
        assert [c["text"] for c in answer["choices"]] == [expected(server, p) for p in prompts]
        assert [c["index"] for c in answer["choices"]] == [0, 1]
    assert server.post("/v1/completions", prompt=[5, 6, 7], **GREEDY).json()["choices"][0]["text"] == expected(
        server, [5, 6, 7]
    )


def test_a_stream_adds_up_to_the_whole_answer_and_ends_with_its_usage(server: Served) -> None:
    body = {"prompt": ["hello w", "other"], **GREEDY}
    whole = server.post("/v1/completions", **body).json()
    response = server.post("/v1/completions", **body, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *pieces, last = events(response)
    for number in (0, 1):
        mine = [c for p in pieces for c in p["choices"] if c["index"] == number]
        assert "".join(c["text"] for c in mine) == whole["choices"][number]["text"]
        assert [c["finish_reason"] for c in mine][-1] == "length" and {c["finish_reason"] for c in mine[:-1]} <= {None}
    assert last["choices"] == [] and all(p["usage"] is None for p in pieces)
    assert last["usage"]["completion_tokens"] == 16


def test_a_chat_is_the_template_and_then_the_engine(server: Served) -> None:
    body = {"messages": CHAT, **GREEDY}
    answer = server.post("/v1/chat/completions", **body).json()
    text = server.engine.chat(CHAT, SamplingParams(**GREEDY)).text
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": text}
    pieces = events(server.post("/v1/chat/completions", **body, stream=True))
    deltas = [p["choices"][0]["delta"] for p in pieces]
    assert deltas[0] == {"role": "assistant", "content": ""} and all("role" not in d for d in deltas[1:])
    assert "".join(d.get("content", "") for d in deltas) == text
    assert pieces[-1]["choices"][0]["finish_reason"] == "length" and pieces[0]["object"] == "chat.completion.chunk"


def test_a_chat_may_fill_the_context_and_its_parts_are_one_text(server: Served) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    answer = server.post("/v1/chat/completions", messages=parts, temperature=0, ignore_eos=True).json()
    assert answer["usage"]["total_tokens"] == 128 and answer["choices"][0]["finish_reason"] == "length"
    assert (
        answer["choices"][0]["message"]["content"]
        == server.engine.chat(CHAT, SamplingParams(temperature=0, ignore_eos=True, max_tokens=128)).text
    )


def test_generate_gives_text_tokens_and_times(server: Served) -> None:
    answer = server.post("/generate", prompt="hello", **GREEDY).json()
    (output,) = answer["outputs"]
    assert answer["text"] == [output["text"]] == [expected(server, "hello")]
    assert len(output["token_ids"]) == 8 and output["e2e_ms"] >= output["ttft_ms"] > 0
    *pieces, last = events(server.post("/generate", prompt="hello", **GREEDY, stream=True))
    assert [i for p in pieces for i in p["token_ids"]] == output["token_ids"]
    assert "".join(p["text"] for p in pieces) == output["text"] and last["usage"]["completion_tokens"] == 8


def test_logprobs_have_openais_two_shapes(server: Served) -> None:
    own = server.engine.generate(["hello"], SamplingParams(**GREEDY, logprobs=3))[0].logprobs
    old = server.post("/v1/completions", prompt="hello", **GREEDY, logprobs=3).json()["choices"][0]["logprobs"]
    assert old["token_logprobs"] == pytest.approx([e.logprob for e in own])
    assert [len(top) for top in old["top_logprobs"]] == [3] * 8
    assert old["text_offset"] == [sum(map(len, old["tokens"][:i])) for i in range(8)]
    body = {"messages": CHAT, **GREEDY, "logprobs": True, "top_logprobs": 2}
    new = server.post("/v1/chat/completions", **body).json()["choices"][0]["logprobs"]["content"]
    assert len(new) == 8 and all(len(e["top_logprobs"]) == 2 for e in new)
    assert all(e["logprob"] == pytest.approx(e["top_logprobs"][0]["logprob"]) for e in new), "greedy takes the first"
    pieces = events(server.post("/v1/chat/completions", **body, stream=True))
    listed = [p["choices"][0]["logprobs"] for p in pieces]
    assert [e for table in listed if table for e in table["content"]] == new


def test_n_answers_of_a_seed_differ_and_the_first_is_that_of_one(server: Served) -> None:
    body = {"prompt": "hello", "max_tokens": 12, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    three = [c["text"] for c in server.post("/v1/completions", **body, n=3).json()["choices"]]
    one = server.post("/v1/completions", **body).json()["choices"][0]["text"]
    assert three[0] == one and len(set(three)) == 3
    assert three == [c["text"] for c in server.post("/v1/completions", **body, n=3).json()["choices"]]


def test_sampling_fields_reach_the_engine(server: Served) -> None:
    whole = expected(server, "hello")
    first = server.engine.generate(["hello"], SamplingParams(**GREEDY))[0].token_ids[0]
    banned = server.post("/v1/completions", prompt="hello", **GREEDY, logit_bias={str(first): -100}, logprobs=0).json()
    assert banned["choices"][0]["text"] != whole
    stopped = server.post("/v1/completions", prompt="hello", **GREEDY, stop_token_ids=[first]).json()
    assert stopped["choices"][0]["finish_reason"] == "stop" and stopped["usage"]["completion_tokens"] == 1
    echoed = server.post("/v1/completions", prompt="hello", **GREEDY, echo=True)
    assert echoed.json()["choices"][0]["text"] == "hello" + whole
    late = server.post("/v1/completions", prompt="hello", max_tokens=100, ignore_eos=True, timeout_s=0.0001)
    assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"


def test_what_has_no_effect_is_named(server: Served) -> None:
    response = server.post("/v1/chat/completions", messages=CHAT, max_tokens=1, user="me", store=False)
    assert response.json()["warnings"] == ["user has no effect on this server"]
    assert response.headers["x-strata-warning"] == "user has no effect on this server"


BAD = [
    ("/v1/completions", {"prompt": "x", "temprature": 1}, "temprature", "did you mean 'temperature'"),
    ("/v1/completions", {}, "prompt", "missing"),
    ("/v1/completions", {"prompt": 3}, "prompt", "valid string"),
    ("/v1/completions", {"prompt": []}, "prompt", "at least one"),
    ("/v1/completions", {"prompt": ""}, "prompt", "at least one character"),
    ("/v1/completions", {"prompt": "x", "temperature": -1}, "temperature", "[0, 100]"),
    ("/v1/completions", {"prompt": "x", "temperature": "1"}, "temperature", "valid number"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "token id"),
    ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix", "leave it out"),
    ("/v1/completions", {"prompt": "x", "best_of": 2, "stream": True}, "best_of", "best_of=1"),
    ("/v1/completions", {"prompt": "x", "best_of": 2, "n": 3}, "best_of", "from 3"),
    ("/v1/completions", {"prompt": "x", "n": 2, "temperature": 0}, "n", "n=1"),
    ("/v1/completions", {"prompt": "x", "echo": True, "logprobs": 1, "stream": True}, "echo", "leave out stream"),
    ("/generate", {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "leave out stream"),
    ("/v1/completions", {"prompt": "x", "stream_options": {}}, "stream_options", '"stream": true'),
    ("/v1/completions", {"prompt": "x", "n": 100}, "n", "max_choices=64"),
    ("/v1/completions", {"prompt": [7] * 200}, None, "max_model_len=128"),
    ("/v1/completions", {"prompt": [99999]}, None, "from 0 to 319"),
    ("/v1/completions", {"prompt": "\ud800"}, None, "lone surrogate"),
    ("/v1/chat/completions", {"messages": []}, "messages", "at least 1"),
    ("/v1/chat/completions", {"messages": [{"role": "me", "content": "x"}]}, "messages[0].role", "'assistant'"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages", "missing"),
    ("/v1/chat/completions", {"messages": CHAT, "top_logprobs": 2}, "top_logprobs", '"logprobs": true'),
    ("/v1/chat/completions", {"messages": CHAT, "tool_choice": "required"}, "tool_choice", "needs tools"),
    ("/tokenize", {}, "prompt", "either prompt or messages"),
    ("/detokenize", {"tokens": [320]}, "tokens", "from 0 to 319"),
]


@pytest.mark.parametrize(("path", "body", "param", "text"), BAD)
def test_a_mistake_is_named_with_what_works(server: Served, path: str, body: Any, param: str, text: str) -> None:
    response = server.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert text in error["message"]


def test_other_models_paths_methods_and_media_are_refused(server: Served) -> None:
    other = server.post("/v1/completions", prompt="x", model="gpt-4")
    assert other.status_code == 404 and "'tiny'" in other.json()["error"]["message"]
    assert server.http.get("/v2").status_code == 404
    wrong = server.http.delete("/v1/models")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "GET"
    form = server.http.post("/v1/completions", data={"prompt": "x"})
    assert form.status_code == 415 and "application/json" in form.json()["error"]["message"]
    broken = server.http.post("/generate", content="{", headers={"Content-Type": "application/json"})
    assert broken.status_code == 400 and "not JSON" in broken.json()["error"]["message"]


def test_tokenize_and_detokenize_are_inverse(server: Served) -> None:
    made = server.post("/tokenize", prompt="hello w", return_token_strs=True).json()
    assert made["tokens"] == server.engine.tokenizer.encode("hello w") and made["count"] == len(made["tokens"])
    assert (
        "".join(made["token_strs"]) == server.post("/detokenize", tokens=made["tokens"]).json()["prompt"] == "hello w"
    )
    chat = server.post("/tokenize", messages=CHAT).json()["tokens"]
    assert chat == server.engine.tokenizer.apply_chat_template(CHAT)


def test_toggles_are_listed_and_change_while_it_serves(server: Served) -> None:
    listed = server.http.get("/v1/optimizations").json()["optimizations"]
    assert {n: t["value"] for n, t in listed.items()} == server.engine.optimizations.as_dict()
    changed = server.http.patch("/v1/optimizations", json={"fused_kernels": False, "max_num_seqs": 16})
    assert changed.status_code == 200
    assert {n: r["status"] for n, r in changed.json()["results"].items()} == {
        "fused_kernels": "applied", "max_num_seqs": "unchanged"
    }  # fmt: skip
    assert server.engine.optimizations.as_dict()["fused_kernels"] is False
    refused = server.http.patch("/v1/optimizations", json={"max_model_len": 10**6})
    assert refused.status_code == 409 and "256" in refused.json()["results"]["max_model_len"]["reason"]
    unknown = server.http.patch("/v1/optimizations", json={"fused_kernel": True})
    assert unknown.status_code == 400 and "did you mean 'fused_kernels'" in unknown.json()["error"]["message"]
    assert server.http.patch("/v1/optimizations", json={"fused_kernels": True}).json()["ok"]


def test_models_health_and_metrics_tell_what_is_there(server: Served) -> None:
    (card,) = server.http.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 128)
    assert server.http.get("/health").json()["status"] == "ready"
    metrics = server.http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain") and "vllm:num_requests_running" in metrics.text


def test_a_request_keeps_the_name_it_came_with(server: Served) -> None:
    assert server.http.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert server.http.get("/health", headers={"X-Request-Id": "a" * 200}).headers["x-request-id"] != "a" * 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/generate", {"prompt": "x"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_endpoint_passes_the_priority_on(
    path: str, body: dict[str, Any], stream: bool, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow, seen = server.engine.follow, []

    def watched(*args: Any, priority: int = 0, **options: Any) -> Any:
        seen.append(priority)
        return follow(*args, priority=priority, **options)

    monkeypatch.setattr(server.engine, "follow", watched)
    assert server.post(path, **body, **GREEDY, priority=7, stream=stream).status_code == 200
    assert server.post(path, **body, **GREEDY, stream=stream).status_code == 200
    assert seen == [7, 0]
