"""The endpoints that generate: a body becomes requests, and their answers a document or a stream."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from strata_lab.sampling_params import RequestError, SamplingParams
from strata_lab.server import translate
from strata_lab.server.bridge import Reply
from strata_lab.server.chat_writer import ChatWriter
from strata_lab.server.errors import bad
from strata_lab.server.protocol import ChatRequest, CompletionRequest, GenerateRequest
from strata_lab.server.service import Service
from strata_lab.server.tools import finder_of, forced_call, offered, with_tools
from strata_lab.server.transport import StreamedAnswer, WholeAnswer
from strata_lab.server.writers import CompletionWriter, Envelope, GenerateWriter, Writer, now


async def completions(service: Service, body: CompletionRequest) -> Response:
    """POST /v1/completions."""
    service.check_model(body.model)
    translate.check_completion(body)
    tokens = translate.COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    params = _params(service, body, tokens, body.logprobs)
    texts = _prompts(body.prompt)
    prompts = [await service.encode(p) if isinstance(p, str) else p for p in texts]
    reply = await _queue(service, "cmpl", body, prompts, params)
    echoed = None
    if body.echo:
        tokenizer = service.tokenizer("token ids and echo is on")
        echoed = [p if isinstance(p, str) else tokenizer.decode(p) for p in texts for _ in range(params.n)]
    envelope = _envelope(service, reply, "text_completion", body)
    writer = CompletionWriter(envelope, reply, echoed, service.engine.tokenizer)
    return _answer(body, reply, writer, envelope)


def _prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad("prompt=[] is empty; give at least one, for example 'Hello'", "prompt")
    return [prompt] if isinstance(prompt[0], int) else list(prompt)


async def generate(service: Service, body: GenerateRequest) -> Response:
    """POST /generate."""
    service.check_model(body.model)
    translate.check_stream_options(body)
    if body.stream_options is not None:
        raise bad("stream_options has no effect here: every stream ends with its usage; leave it out", "stream_options")
    params = _params(service, body, body.max_tokens, body.logprobs)
    prompt = await service.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
    reply = await _queue(service, "gen", body, [prompt], params)
    envelope = _envelope(service, reply, "generation", body)
    return _answer(body, reply, GenerateWriter(envelope, reply, service.engine.tokenizer), envelope)


async def chat(service: Service, body: ChatRequest) -> Response:
    """POST /v1/chat/completions."""
    service.check_model(body.model)
    translate.check_stream_options(body)
    tools = offered(body)
    forced = forced_call(body, tools)
    messages, signatures = with_tools(
        translate.message_dicts(body.messages), tools, service.tokenizer("chat messages").chat_template or ""
    )
    most, logprobs = translate.chat_max_tokens(body), translate.chat_logprobs(body)
    _params(service, body, most, logprobs, forced)  # a wrong value shows before the prompt is tokenized
    prompt = await service.encode_chat(messages, signatures)
    room = max(1, service.engine.optimizations.max_model_len - len(prompt))
    params = _params(service, body, room if most is None else most, logprobs, forced)
    reply = await _queue(service, "chatcmpl", body, [prompt], params)
    finders = [finder_of(body) for _ in reply.sessions] if tools else []
    envelope = _envelope(service, reply, "chat.completion", body)
    return _answer(body, reply, ChatWriter(envelope, reply, service.engine.tokenizer, finders), envelope)


def _params(
    service: Service, body: Any, max_tokens: int | None, logprobs: int | None, forced: dict[str, Any] | None = None
) -> SamplingParams:
    structure = translate.structure(body, forced)
    limit_s = service.config.request_timeout_s
    try:
        return translate.sampling_params(body, structure, max_tokens=max_tokens, logprobs=logprobs, timeout_s=limit_s)
    except RequestError as error:
        raise bad(str(error), str(error).partition("=")[0].partition(" ")[0]) from error


async def _queue(service: Service, kind: str, body: Any, prompts: list[list[int]], params: SamplingParams) -> Reply:
    await service.compile(params)
    name = f"{kind}-{uuid.uuid4().hex}"
    return service.reply(name, prompts, params, body.priority or 0, whole=not body.stream)


def _envelope(service: Service, reply: Reply, kind: str, body: Any) -> Envelope:
    usage_wanted = bool(body.stream_options and body.stream_options.include_usage)
    chunk = ".chunk" if body.stream and kind.startswith("chat") else ""
    return Envelope(reply.name, kind + chunk, service.names[0], now(), usage_wanted, translate.warnings_of(body))


def _answer(body: Any, reply: Reply, writer: Writer, envelope: Envelope) -> Response:
    headers: Mapping[str, str] = {"X-Strata-Warning": "; ".join(envelope.warnings)} if envelope.warnings else {}
    return (StreamedAnswer if body.stream else WholeAnswer)(reply, writer, headers)
