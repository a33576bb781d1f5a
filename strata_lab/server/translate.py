"""What a caller's body means to the engine: sampling parameters, prompts, and what is refused or has no effect."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from strata_lab.sampling_params import RequestError, SamplingParams
from strata_lab.server.errors import ApiError, bad
from strata_lab.server.protocol import GUIDED, INERT, SHAPED, ChatRequest, CompletionRequest, Generating

COMPLETION_TOKENS = 16  # OpenAI's default for completions
_SAME_NAME = {f.name for f in dataclasses.fields(SamplingParams)} & set(Generating.model_fields)


def sampling_params(
    body: Any,
    structure: dict[str, Any] | None,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    timeout_s: float | None,
) -> SamplingParams:
    """The engine's parameters.

    Args:
        body: a generating request.
        structure: what `structure` gave.
        max_tokens, logprobs: as the endpoint names them; None leaves the engine's default.
        timeout_s: deadline where the body has none.

    Raises:
        RequestError: a value is out of range.
    """
    given = {name: getattr(body, name) for name in _SAME_NAME if name not in SHAPED}
    given |= {"max_tokens": max_tokens, "logprobs": logprobs, "structured_outputs": structure}
    if isinstance(body, CompletionRequest):
        given["best_of"] = body.best_of
        if body.echo and logprobs is not None:
            given["prompt_logprobs"] = logprobs
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if v is not None}
    if body.logit_bias:
        given["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    if timeout_s is not None:
        given.setdefault("timeout_s", timeout_s)
    return SamplingParams(**given)


def _token_id(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 9:
        raise RequestError(f"logit_bias key {key[:40]!r} must be a token id in digits; try {{'42': -100}}")
    return int(key)


def structure(body: Any, forced: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """What shape the text must have, under the names of `StructuredOutputs`; None for any.

    Args:
        body: a generating request.
        forced: JSON schema of a tool call that must be made.

    Raises:
        ApiError: two of the fields that say so are given, or one says nothing.
    """
    found: dict[str, dict[str, Any]] = {}
    if forced is not None:
        found["tool_choice"] = {"json": forced}
    wish = getattr(body, "response_format", None)
    if wish is not None and wish.type == "json_object":
        found["response_format"] = {"json_object": True}
    elif wish is not None and wish.type == "json_schema":
        if wish.json_schema is None or wish.json_schema.schema_ is None:
            example = '{"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}'
            raise bad(f"response_format has no json_schema.schema; try {example}", "response_format")
        found["response_format"] = {"json": wish.json_schema.schema_}
    if body.structured_outputs is not None:
        found["structured_outputs"] = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
    for field, kind in GUIDED.items():
        if getattr(body, field) is not None:
            found[field] = {kind: getattr(body, field)}
    if len(found) > 1:
        raise bad(f"{' and '.join(found)} each say what the text must be; give one of them", next(iter(found)))
    return next(iter(found.values()), None)


def check_stream_options(body: Any) -> None:
    """`stream_options` without `stream` would be ignored, so it is refused; so is what no stream can carry."""
    if body.stream and body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs come with the whole answer; leave out stream", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise bad('stream_options needs "stream": true; leave it out', "stream_options")


def unsupported(message: str, param: str) -> ApiError:
    """A thing that others can do and this server cannot."""
    return ApiError(400, message, param=param, code="unsupported")


def check_completion(body: CompletionRequest) -> None:
    """What of OpenAI's completions is not there."""
    check_stream_options(body)
    if body.suffix:
        raise unsupported("suffix is not supported: no model here fills in the middle; leave it out", "suffix")
    n = body.n or 1
    if body.stream and (body.best_of or n) > n:
        raise unsupported(
            f"best_of={body.best_of} is known at the end only; leave out stream, or try best_of={n}", "best_of"
        )
    if body.stream and body.echo and body.logprobs is not None:
        raise unsupported("echo with logprobs comes with the whole answer; leave out stream", "echo")


def chat_logprobs(body: ChatRequest) -> int | None:
    """Alternatives per token, None for no log probabilities."""
    if body.top_logprobs is not None and not body.logprobs:
        raise bad('top_logprobs needs "logprobs": true; leave it out', "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def chat_max_tokens(body: ChatRequest) -> int | None:
    """The most tokens of an answer, by whichever of its two names."""
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise bad(f"max_completion_tokens={new} and max_tokens={old} are the same setting; give one", "max_tokens")
    return old if new is None else new


def warnings_of(body: Any) -> list[str]:
    """One sentence per field that was given and does nothing."""
    return [f"{name} has no effect on this server" for name in INERT if getattr(body, name)]


def message_dicts(messages: list[Any]) -> list[dict[str, Any]]:
    """Messages as templates take them: content is text, absent fields are absent."""
    made = []
    for i, message in enumerate(messages):
        content = message.content
        text = content if isinstance(content, str) or content is None else "".join(p.text for p in content)
        if text is None and not (message.role == "assistant" and message.tool_calls):
            raise bad(
                f"messages[{i}].content is missing; try {{'role': {message.role!r}, 'content': 'Hello'}}", "messages"
            )
        if message.tool_calls and message.role != "assistant":
            raise bad(f"messages[{i}].tool_calls belong to an assistant, not to a {message.role}", "messages")
        plain: dict[str, Any] = {"role": message.role, "content": text or ""}
        if message.name is not None:
            plain["name"] = message.name
        if message.tool_call_id is not None:
            plain["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            plain["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
        made.append(plain)
    return made


def retry_seconds(estimate_s: float | None) -> int:
    """Whole seconds for Retry-After, from 1 to 60."""
    return max(1, min(60, math.ceil(estimate_s))) if estimate_s is not None else 1
