"""Laws of tool calls: the model is told of them, its calls come out whole, and its text is never lost."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_lab.events import TokenEvent
from strata_lab.server.chat_writer import ChatWriter
from strata_lab.server.errors import ApiError
from strata_lab.server.protocol import ChatRequest
from strata_lab.server.tools import CallFinder, offered, with_tools
from strata_lab.server.translate import message_dicts
from strata_lab.server.writers import Envelope
from tests.server.serving import Served

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome <b>"}}\n</tool_call>'
CHAT = [{"role": "user", "content": "hello"}]


def cut(text: str, places: list[int]) -> list[str]:
    at = sorted({0, len(text), *(p % (len(text) + 1) for p in places)})
    return [text[a:b] for a, b in itertools.pairwise(at)]


def found(pieces: list[str], **options: Any) -> tuple[str, list[tuple[str, Any]]]:
    finder = CallFinder(**options)
    content = "".join(finder.push(piece)[0] for piece in pieces) + finder.finish()[0]
    return content, [(c.name, json.loads(c.arguments)) for c in finder.calls]


@given(st.lists(st.integers(0, 500), max_size=20))
def test_calls_are_found_however_the_text_is_cut(places: list[int]) -> None:
    text = f"I look.\n{CALL}\n{CALL.replace('Rome', 'Oslo')}"
    content, calls = found(cut(text, places))
    assert content.strip() == "I look."
    assert calls == [("weather", {"city": "Rome <b>"}), ("weather", {"city": "Oslo <b>"})]


@given(st.text(alphabet='<tool_cal>/{}" x\n', max_size=80), st.lists(st.integers(0, 80), max_size=8))
def test_text_that_is_no_call_comes_out_unchanged(text: str, places: list[int]) -> None:
    content, calls = found(cut(text, places))
    assert calls == [] and content == text


def test_a_call_without_its_end_mark_counts_and_a_broken_one_is_text() -> None:
    assert found([CALL.removesuffix("</tool_call>")])[1] == [("weather", {"city": "Rome <b>"})]
    for broken in ("<tool_call>{not json}</tool_call>", '<tool_call>{"a": 1}</tool_call>', "<tool_call>[1"):
        assert found([broken]) == (broken, [])


def test_one_call_is_kept_where_several_are_not_wanted() -> None:
    assert len(found([CALL * 3], single=True)[1]) == 1


def test_content_is_not_held_back_longer_than_it_may_be_a_call() -> None:
    finder = CallFinder()
    assert [finder.push(t)[0] for t in ("a <", "b", " <tool_c", "at", "x")] == ["a ", "<b", " ", "<tool_cat", "x"]


def chat(**body: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": CHAT, **body})


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "wether"}}}, "try weather"),
        ({"tools": [WEATHER, WEATHER]}, "twice"),
        ({"tool_choice": "required"}, "needs tools"),
    ],
)
def test_choices_that_cannot_be_kept_are_refused(body: dict[str, Any], text: str) -> None:
    with pytest.raises(ApiError, match=text):
        offered(chat(**body))


def test_none_offers_no_tools() -> None:
    assert offered(chat(tools=[WEATHER], tool_choice="none")) == []
    assert len(offered(chat(tools=[WEATHER]))) == 1


HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Rome?"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]  # fmt: skip


def test_a_template_without_tools_is_told_in_words() -> None:
    body = chat(messages=HISTORY, tools=[WEATHER])
    messages, tools = with_tools(message_dicts(body.messages), offered(body), "{{ messages }}")
    assert tools is None and [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"].startswith("Be brief.\n\n") and '"name": "weather"' in messages[0]["content"]
    assert messages[2]["content"] == '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert "<tool_response>\nsunny\n" in messages[3]["content"]


def test_a_template_with_tools_gets_them_and_arguments_as_objects() -> None:
    body = chat(messages=HISTORY, tools=[WEATHER])
    messages, tools = with_tools(message_dicts(body.messages), offered(body), "{{ tools }}{{ m.tool_calls }}")
    assert tools == [WEATHER]
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    assert messages[3] == {"role": "tool", "content": "sunny", "tool_call_id": "c1"}


def reply_of(text: str) -> Any:
    """An answer that has ended by itself."""
    request = SimpleNamespace(logprobs=[], num_prompt_tokens=1, num_output_tokens=2, num_cached_tokens=0)
    output = SimpleNamespace(text=text, logprobs=(), prompt_logprobs=(), finish_reason="stop")
    sessions = [SimpleNamespace(request=request)]
    return SimpleNamespace(sessions=sessions, firsts=sessions, outputs=lambda: [output])


def test_calls_end_an_answer_and_arrive_whole_in_streams_and_documents() -> None:
    envelope = Envelope("id", "chat.completion", "m", 1, False, [])
    reply: Any = reply_of(f"Well. {CALL}")
    (choice,) = json.loads(ChatWriter(envelope, reply, None, [CallFinder()]).whole())["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Well. "
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome <b>"}
    writer = ChatWriter(envelope, reply, None, [CallFinder()])
    parts = cut(f"Well. {CALL}", [3, 9, 20, 40])
    ends = [None] * (len(parts) - 1) + ["stop"]
    sent = b"".join(
        writer.piece([(0, TokenEvent("r", 5, t, i, e))]) for i, (t, e) in enumerate(zip(parts, ends, strict=True))
    )
    deltas = [json.loads(line[6:])["choices"][0] for line in sent.decode().split("\n\n") if line]
    assert "".join(d["delta"].get("content", "") for d in deltas) == "Well. "
    (calls,) = [d["delta"]["tool_calls"] for d in deltas if "tool_calls" in d["delta"]]
    assert calls[0]["function"]["name"] == "weather" and calls[0]["index"] == 0 and calls[0]["id"].startswith("call_")
    assert deltas[-1]["finish_reason"] == "tool_calls"


def test_a_chat_with_tools_is_served(server: Served) -> None:
    answer = server.post("/v1/chat/completions", messages=CHAT, tools=[WEATHER], max_tokens=4, temperature=0)
    assert answer.status_code == 400 and "max_model_len" in answer.json()["error"]["message"], (
        "the introduction is long"
    )
    short = server.post("/v1/chat/completions", messages=CHAT, tools=[WEATHER], tool_choice="none", max_tokens=4)
    assert short.status_code == 200
