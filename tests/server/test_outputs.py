"""Laws of what goes beyond one plain text: held to a structure, several per prompt, the prompt's own probabilities."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata_lab.sampling_params import SamplingParams
from strata_lab.server.protocol import ChatRequest, CompletionRequest, GenerateRequest
from tests.checkpoints import write_checkpoint
from tests.server.serving import Served, serving
from tests.server.test_api import events

CHAT = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
SUN, ZONE = {"sun": {"type": "boolean"}}, {"zone": {"$ref": "#/$defs/Zone"}}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": SUN, "required": ["sun"]}}
CLOCK = {
    "name": "clock",
    "parameters": {
        "type": "object", "properties": ZONE, "required": ["zone"], "$defs": {"Zone": {"enum": ["utc", "cet"]}}
    },
}  # fmt: skip
TOOLS = [{"type": "function", "function": f} for f in (WEATHER, CLOCK)]
ENOUGH = {"temperature": 1, "seed": 3, "max_tokens": 110}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
@pytest.mark.parametrize(
    "wish",
    [{"guided_json": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}, {"guided_regex": r'\{"on": (true|false)\}'}],
)
def test_every_endpoint_holds_its_text_to_a_structure(server: Served, path: str, wish: dict[str, Any]) -> None:
    body = {"messages": CHAT} if "chat" in path else {"prompt": "hello"}
    answer = server.post(path, **body, **wish, **ENOUGH).json()
    text = answer["text"][0] if path == "/generate" else answer["choices"][0].get("text")
    text = answer["choices"][0]["message"]["content"] if text is None else text
    assert isinstance(json.loads(text)["on"], bool)


def test_response_formats_are_kept(server: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    whole = server.post("/v1/chat/completions", messages=CHAT, response_format=form, **ENOUGH).json()
    text = whole["choices"][0]["message"]["content"]
    assert whole["choices"][0]["finish_reason"] == "stop" and set(json.loads(text)) == {"on"}
    pieces = events(server.post("/v1/chat/completions", messages=CHAT, response_format=form, **ENOUGH, stream=True))
    assert "".join(p["choices"][0]["delta"].get("content", "") for p in pieces) == text
    free = {"type": "json_object"}
    made = server.post("/v1/completions", prompt="a", response_format=free, temperature=0, max_tokens=20).json()
    assert made["choices"][0]["text"].lstrip().startswith("{")


@pytest.mark.parametrize(
    ("wish", "param", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
        ({"guided_regex": "("}, "structured_outputs", "regex"),
        ({"guided_json": SCHEMA, "guided_choice": ["a"]}, "guided_json", "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "did you mean 'json'"),
        ({"guided_choice": ["a"], "min_tokens": 2}, "min_tokens", "structured_outputs"),
    ],
)
def test_structures_that_cannot_be_are_refused(server: Served, wish: Any, param: str, words: str) -> None:
    response = server.post("/v1/chat/completions", messages=CHAT, **wish)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert words in error["message"]


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A context that holds the words about tools."""
    folder = write_checkpoint(tmp_path_factory.mktemp("roomy"), "llama", max_position_embeddings=1024)[0]
    with serving(folder, options={"max_model_len": 1024}) as served:
        yield served


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "clock"}}])
@pytest.mark.parametrize("stream", [True, False])
def test_a_call_that_is_forced_is_made(roomy: Served, choice: Any, stream: bool) -> None:
    body = {"messages": CHAT, "tools": TOOLS, "tool_choice": choice, **ENOUGH, "stream": stream}
    response = roomy.post("/v1/chat/completions", **body)
    if stream:
        pieces = [p["choices"][0] for p in events(response)]
        calls = [c for p in pieces for c in p["delta"].get("tool_calls", [])]
        content, reason = "".join(p["delta"].get("content", "") for p in pieces), pieces[-1]["finish_reason"]
    else:
        message, reason = (response.json()["choices"][0][name] for name in ("message", "finish_reason"))
        calls, content = message["tool_calls"], message["content"] or ""
    (call,) = calls
    arguments = json.loads(call["function"]["arguments"])
    good = {"clock": lambda: arguments["zone"] in ("utc", "cet"), "weather": lambda: isinstance(arguments["sun"], bool)}
    assert good[call["function"]["name"]]() and content == "" and reason == "tool_calls"
    assert choice == "required" or call["function"]["name"] == "clock"


def test_a_forced_call_that_is_cut_off_is_text(roomy: Served) -> None:
    body = {"messages": CHAT, "tools": TOOLS, "tool_choice": "required", "temperature": 0, "max_tokens": 3}
    choice = roomy.post("/v1/chat/completions", **body).json()["choices"][0]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"].lstrip().startswith("{")


def test_texts_of_one_prompt_are_those_of_the_engine_and_the_prompt_counts_once(server: Served) -> None:
    asked = {"n": 3, "seed": 5, "max_tokens": 6, "ignore_eos": True}
    own = [o.text for o in server.engine.generate(["hello"], SamplingParams(**asked))[0].outputs]
    answer = server.post("/v1/completions", prompt=["hello", "hello"], **asked).json()
    assert [c["text"] for c in answer["choices"]] == own * 2
    assert answer["usage"]["prompt_tokens"] == 2 * len(server.engine.tokenizer.encode("hello"))
    pieces = events(server.post("/v1/completions", prompt="hello", **asked, stream=True))
    streamed = ["".join(c["text"] for p in pieces for c in p["choices"] if c["index"] == i) for i in range(3)]
    assert streamed == own


def test_best_of_returns_the_engines_best(server: Served) -> None:
    asked = {"n": 2, "best_of": 5, "seed": 7, "max_tokens": 6, "ignore_eos": True}
    own = [o.text for o in server.engine.generate(["hello"], SamplingParams(**asked))[0].outputs]
    answer = server.post("/v1/completions", prompt="hello", **asked).json()
    assert [c["text"] for c in answer["choices"]] == own and answer["usage"]["completion_tokens"] == 30


def test_echo_with_logprobs_begins_with_the_prompts(server: Served) -> None:
    body = {"prompt": "hello w", "temperature": 0, "max_tokens": 3, "ignore_eos": True}
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    own = server.engine.generate(["hello w"], params)[0]
    choice = server.post("/v1/completions", **body, echo=True, logprobs=2).json()["choices"][0]
    table = choice["logprobs"]
    assert table["token_logprobs"][0] is None and table["top_logprobs"][0] is None
    entries = [*own.prompt_logprobs[1:], *own.logprobs]
    assert table["token_logprobs"][1:] == pytest.approx([e.logprob for e in entries])
    assert table["text_offset"][-1] == sum(map(len, table["tokens"][:-1]))
    listed = server.post("/generate", **body, prompt_logprobs=2).json()["outputs"][0]["prompt_logprobs"]
    assert listed[0] is None and len(listed) == len(own.prompt_token_ids)
    second = own.prompt_logprobs[1]
    assert listed[1][str(second.token_id)]["logprob"] == pytest.approx(second.logprob)


def test_generate_streams_no_empty_text_and_loses_no_token(server: Served) -> None:
    body = {"prompt": "hello", "seed": 11, "max_tokens": 100, "ignore_eos": True}
    whole = server.post("/generate", **body).json()["outputs"][0]
    *pieces, _ = events(server.post("/generate", **body, stream=True))
    assert all(p["text"] or "finish_reason" in p for p in pieces)
    assert [i for p in pieces for i in p["token_ids"]] == whole["token_ids"]
    assert "".join(p["text"] for p in pieces) == whole["text"]
    assert len(pieces) > 10


DOCUMENTS = [Path(__file__).resolve().parents[2] / name for name in ("README.md", "docs/serving.md")]
EXAMPLES = [
    b for path in DOCUMENTS for b in re.findall(r"```bash\n(curl .*?)```", path.read_text(encoding="utf-8"), re.S)
]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_the_documents_work(roomy: Served, example: str) -> None:
    command = example.replace("http://127.0.0.1:8000", roomy.url).replace("curl ", "curl --fail-with-body ", 1)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("[DONE]" if "stream" in example else "}")


def test_the_document_names_every_field_and_endpoint(server: Served) -> None:
    text = DOCUMENTS[1].read_text(encoding="utf-8")
    fields = {
        f.alias or n for m in (CompletionRequest, ChatRequest, GenerateRequest) for n, f in m.model_fields.items()
    }
    assert len(EXAMPLES) == 5 and [name for name in fields if f"`{name}`" not in text] == []
    paths = server.http.get("/openapi.json").json()["paths"]
    assert [(p, m) for p, ms in paths.items() for m in ms if f"`{m.upper()} {p}`" not in text] == []
