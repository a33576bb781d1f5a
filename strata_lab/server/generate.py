"""The endpoints that generate: a body becomes requests, and their answers a document or a stream."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from strata_lab.sampling_params import RequestError, SamplingParams
from strata_lab.server import embeds, translate
from strata_lab.server.backend import Backend
from strata_lab.server.bridge import Reply
from strata_lab.server.chat_writer import ChatWriter
from strata_lab.server.errors import ApiError, bad
from strata_lab.server.protocol import ChatRequest, CompletionRequest, GenerateRequest
from strata_lab.server.tools import finder_of, forced_call, offered, with_tools
from strata_lab.server.transport import StreamedAnswer, WholeAnswer
from strata_lab.server.writers import CompletionWriter, Envelope, GenerateWriter, Writer, now


async def completions(backend: Backend, body: CompletionRequest, priority: int) -> Response:
    """POST /v1/completions."""
    translate.check_completion(body)
    tokens = translate.COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    params = _params(backend, body, tokens, body.logprobs)
    texts = [] if body.prompt_embeds is not None else _prompts(body.prompt)
    prompts: list[Any] = [await backend.encode(p) if isinstance(p, str) else p for p in texts]
    if body.prompt_embeds is not None:
        prompts = await _rows(backend, body, body.prompt_embeds)
    reply = await _queue(backend, "cmpl", body, priority, prompts, params)
    echoed = None
    if body.echo:
        tokenizer = backend.tokenizer("token ids and echo is on")
        echoed = [p if isinstance(p, str) else tokenizer.decode(p) for p in texts for _ in range(params.n)]
    envelope = _envelope(backend, reply, "text_completion", body)
    writer = CompletionWriter(envelope, reply, echoed, backend.engine.tokenizer)
    return _answer(body, reply, writer, envelope)


async def _rows(backend: Backend, body: CompletionRequest, given: str | list[str]) -> list[Any]:
    """The prompts that are no text, each [tokens, hidden]."""
    if body.prompt or body.echo:
        other = "prompt" if body.prompt else "echo"
        raise bad(f"prompt_embeds stand in place of a prompt and have no text; leave out {other}", other)
    engine = backend.engine
    hidden, most = engine.model_config.hidden_size, engine.optimizations.max_model_len - 1
    many = [given] if isinstance(given, str) else given
    return [await asyncio.to_thread(embeds.decode, text, hidden, most) for text in many]


def _prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if prompt is None:
        raise ApiError(400, "prompt is missing; it is required, or prompt_embeds", param="prompt", code="missing_field")
    if not prompt:
        raise bad("prompt=[] is empty; give at least one, for example 'Hello'", "prompt")
    return [prompt] if isinstance(prompt[0], int) else list(prompt)


async def generate(backend: Backend, body: GenerateRequest, priority: int) -> Response:
    """POST /generate."""
    translate.check_stream_options(body)
    if body.stream_options is not None:
        raise bad("stream_options has no effect here: every stream ends with its usage; leave it out", "stream_options")
    params = _params(backend, body, body.max_tokens, body.logprobs)
    prompt = await backend.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
    reply = await _queue(backend, "gen", body, priority, [prompt], params)
    envelope = _envelope(backend, reply, "generation", body)
    return _answer(body, reply, GenerateWriter(envelope, reply, backend.engine.tokenizer), envelope)


async def chat(backend: Backend, body: ChatRequest, priority: int) -> Response:
    """POST /v1/chat/completions."""
    translate.check_stream_options(body)
    tools = offered(body)
    forced = forced_call(body, tools)
    messages, signatures = with_tools(
        translate.message_dicts(body.messages), tools, backend.tokenizer("chat messages").chat_template or ""
    )
    most, logprobs = translate.chat_max_tokens(body), translate.chat_logprobs(body)
    _params(backend, body, most, logprobs, forced)  # a wrong value shows before the prompt is tokenized
    prompt = await backend.encode_chat(messages, signatures)
    room = max(1, backend.engine.optimizations.max_model_len - len(prompt))
    params = _params(backend, body, room if most is None else most, logprobs, forced)
    reply = await _queue(backend, "chatcmpl", body, priority, [prompt], params)
    finders = [finder_of(body) for _ in reply.sessions] if tools else []
    envelope = _envelope(backend, reply, "chat.completion", body)
    return _answer(body, reply, ChatWriter(envelope, reply, backend.engine.tokenizer, finders), envelope)


def _params(
    backend: Backend, body: Any, max_tokens: int | None, logprobs: int | None, forced: dict[str, Any] | None = None
) -> SamplingParams:
    structure = translate.structure(body, forced)
    limit_s = backend.config.request_timeout_s
    try:
        return translate.sampling_params(body, structure, max_tokens=max_tokens, logprobs=logprobs, timeout_s=limit_s)
    except RequestError as error:
        raise bad(str(error), str(error).partition("=")[0].partition(" ")[0]) from error


async def _queue(
    backend: Backend, kind: str, body: Any, priority: int, prompts: list[Any], params: SamplingParams
) -> Reply:
    await backend.compile(params)
    name = f"{kind}-{uuid.uuid4().hex}"
    return backend.reply(name, prompts, params, priority, whole=not body.stream)


def _envelope(backend: Backend, reply: Reply, kind: str, body: Any) -> Envelope:
    usage_wanted = bool(body.stream_options and body.stream_options.include_usage)
    chunk = ".chunk" if body.stream and kind.startswith("chat") else ""
    return Envelope(reply.name, kind + chunk, backend.name, now(), usage_wanted, translate.warnings_of(body))


def _answer(body: Any, reply: Reply, writer: Writer, envelope: Envelope) -> Response:
    headers: Mapping[str, str] = {"X-Strata-Warning": "; ".join(envelope.warnings)} if envelope.warnings else {}
    return (StreamedAnswer if body.stream else WholeAnswer)(reply, writer, headers)
