"""The server as its callers know it: OpenAI's own client, and curl."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator

import openai
import pytest

from strata_lab.sampling_params import SamplingParams
from tests.server.serving import Served

CHAT = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def text_of(server: Served) -> str:
    return server.engine.chat(CHAT, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)).text


def test_openais_client_chats(server: Served, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=CHAT, logprobs=True, top_logprobs=2, **GREEDY)
    assert answer.choices[0].message.content == text_of(server)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 8
    assert len(answer.choices[0].logprobs.content) == 8


def test_openais_client_streams(server: Served, client: openai.OpenAI) -> None:
    pieces = list(
        client.chat.completions.create(
            model="tiny", messages=CHAT, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == text_of(server)
    assert pieces[-1].usage.completion_tokens == 8


def test_openais_client_completes_and_lists_models(server: Served, client: openai.OpenAI) -> None:
    own = server.engine.generate(["hello"], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].text
    assert client.completions.create(model="tiny", prompt="hello", **GREEDY).choices[0].text == own
    streamed = client.completions.create(model="tiny", prompt="hello", stream=True, **GREEDY)
    assert "".join(p.choices[0].text for p in streamed) == own
    assert [m.id for m in client.models.list()] == ["tiny"]


def test_openais_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'tiny'"):
        client.chat.completions.create(model="gpt-4", messages=CHAT)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=CHAT, temperature=-1)
    assert caught.value.param == "temperature" and caught.value.code == "invalid_value"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_sees_tokens_as_they_come_and_can_time_them(server: Served) -> None:
    body = {"prompt": "hello", "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": True}
    command = [
        "curl", "-sSN", f"{server.url}/generate", "-H", "Content-Type: application/json", "-d", json.dumps(body),
        "-w", "\n%{http_code} %{time_starttransfer} %{time_total}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    *lines, timing = done.stdout.strip().splitlines()
    status, first_s, total_s = timing.split()
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert status == "200" and 0 < float(first_s) < float(total_s)
    assert sum(len(p.get("token_ids", ())) for p in pieces) == 100 and len(pieces) > 10
