"""Tool calls in the Hermes convention: how a model is told of tools, and how its calls are found in its text.

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes, Qwen and others are trained to write.
What begins like a call and is none comes out as text: nothing a model wrote is lost.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from strata_lab.server.errors import bad
from strata_lab.server.protocol import ChatRequest, Tool, ToolChoice

OPEN, CLOSE = "<tool_call>", "</tool_call>"
INTRODUCTION = """You may call functions to answer. Their signatures are between <tools></tools>:
<tools>
{tools}
</tools>
For each call write a JSON object with the function's name and arguments between <tool_call></tool_call>:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        id: a name of its own, which the tool's answer refers to.
        name: the function.
        arguments: a JSON object, as text.
    """

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's shape."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def offered(body: ChatRequest) -> list[Tool]:
    """The tools that the model is told of; raises `ApiError` for choices that cannot be kept."""
    tools, choice = body.tools or [], body.tool_choice
    names = [tool.function.name for tool in tools]
    if len(set(names)) != len(names):
        raise bad(f"tools has the name {max(names, key=names.count)!r} twice; names must differ", "tools")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad("tool_choice needs tools; give some, or leave it out", "tool_choice")
        return []
    if isinstance(choice, ToolChoice) and choice.function.name not in names:
        near = ", ".join(names)
        raise bad(f"tool_choice names {choice.function.name!r}, which is not in tools; try {near}", "tool_choice")
    return [] if choice == "none" else list(tools)


def is_forced(body: ChatRequest) -> bool:
    """Whether the answer must be a call."""
    return body.tool_choice == "required" or isinstance(body.tool_choice, ToolChoice)


def forced_call(body: ChatRequest, tools: Sequence[Tool]) -> dict[str, Any] | None:
    """JSON schema of the one call that must be made; None where the model is free."""
    if not is_forced(body):
        return None
    wanted = body.tool_choice.function.name if isinstance(body.tool_choice, ToolChoice) else None
    calls: list[dict[str, Any]] = []
    shared: dict[str, dict[str, Any]] = {}
    for tool in tools:
        if wanted not in (None, tool.function.name):
            continue
        arguments = dict(tool.function.parameters or {"type": "object", "properties": {}})
        for place in ("$defs", "definitions"):  # references begin at the root, so that is where they must lead
            for name, definition in (arguments.pop(place, None) or {}).items():
                if shared.setdefault(place, {}).setdefault(name, definition) != definition:
                    raise bad(f"two tools define {name!r} in {place} differently; rename one", "tools")
        fields = {"name": {"const": tool.function.name}, "arguments": arguments}
        calls.append({"type": "object", "properties": fields, "required": list(fields)})
    return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), **shared}


def finder_of(body: ChatRequest) -> CallFinder:
    """What finds the calls in one answer."""
    return ForcedCall() if is_forced(body) else CallFinder(body.parallel_tool_calls is False)


def with_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[Tool], template: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools for a chat template.

    A template that speaks of tools gets them. For any other the tools become a system message, calls become text and
    answers of tools become a user's turn, in the same convention.
    """
    signatures = [tool.model_dump(exclude_none=True) for tool in tools]
    if "tools" in template and "tool_calls" in template:
        return [_parsed_arguments(message) for message in messages], signatures or None
    plain = [_as_text(message) for message in messages]
    if signatures:
        text = INTRODUCTION.format(tools="\n".join(json.dumps(s, ensure_ascii=False) for s in signatures))
        if plain and plain[0]["role"] == "system":
            plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}
        else:
            plain.insert(0, {"role": "system", "content": text})
    return plain, None


def _arguments(call: dict[str, Any]) -> Any:
    try:
        return json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError) as error:
        text = call["function"]["arguments"][:80]
        raise bad(
            f"tool call {call['id']!r} has arguments {text!r}, which is no JSON ({error}); try '{{}}'", "messages"
        ) from None


def _parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _arguments(call)}} for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if "tool_calls" not in message:
        return message
    calls = [
        json.dumps({"name": call["function"]["name"], "arguments": _arguments(call)}, ensure_ascii=False)
        for call in message["tool_calls"]
    ]
    texts = [message["content"]] * bool(message["content"]) + [f"{OPEN}\n{call}\n{CLOSE}" for call in calls]
    return {"role": "assistant", "content": "\n".join(texts)}


class CallFinder:
    """Splits a stream of text into content and calls.

    Args:
        single: keep the first call only.
    """

    def __init__(self, single: bool = False) -> None:
        self.calls: list[Call] = []
        self._single = single
        self._held = ""  # may be the beginning of a call, or is one that has not ended

    def push(self, text: str) -> tuple[str, list[Call]]:
        """More text; the content that is certain and the calls that are complete."""
        self._held += text
        content: list[str] = []
        found: list[Call] = []
        while True:
            start = self._held.find(OPEN)
            if start < 0:
                keep = _overlap(self._held, OPEN)
                content.append(self._held[: len(self._held) - keep])
                self._held = self._held[len(self._held) - keep :]
                break
            end = self._held.find(CLOSE, start)
            content.append(self._held[:start])
            self._held = self._held[start:]
            if end < 0:
                break
            body, self._held = self._held[: end - start + len(CLOSE)], self._held[end - start + len(CLOSE) :]
            self._take(body, body[len(OPEN) : -len(CLOSE)], content, found)
        return self._clean(content), found

    def finish(self) -> tuple[str, list[Call]]:
        """The end of the text: what was held back, a call whose end mark is missing included."""
        held, self._held = self._held, ""
        content: list[str] = []
        found: list[Call] = []
        if held.startswith(OPEN):
            self._take(held, held[len(OPEN) :], content, found)
        else:
            content.append(held)
        return self._clean(content), found

    def _take(self, whole: str, inside: str, content: list[str], found: list[Call]) -> None:
        call = parse_call(inside)
        if call is None:
            content.append(whole)
        elif not (self._single and self.calls):
            self.calls.append(call)
            found.append(call)

    def _clean(self, pieces: list[str]) -> str:
        """Line breaks around calls are part of the convention and not of the content."""
        text = "".join(pieces)
        return "" if self.calls and not text.strip() else text


class ForcedCall(CallFinder):
    """For an answer that is held to the shape of a call: all of it is the call, without marks."""

    def push(self, text: str) -> tuple[str, list[Call]]:
        """More of the call."""
        self._held += text
        return "", []

    def finish(self) -> tuple[str, list[Call]]:
        """The call; what was cut off before it was whole comes out as text."""
        call = parse_call(self._held)
        if call is None:
            return self._held, []
        self.calls.append(call)
        return "", [call]


def parse_call(text: str) -> Call | None:
    """The call that a text is; None if it is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return Call(call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
