"""The endpoints. Each line says which body goes in and which answers come out; the work is done elsewhere.

`create_app` makes an application around a `Service`; `run.py` loads the engine and listens.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Annotated, Any

from fastapi import Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from strata_lab import __version__
from strata_lab.config import toggles
from strata_lab.server import generate, schema
from strata_lab.server.backend import Backend
from strata_lab.server.errors import (
    ApiError,
    api_error_handler,
    bad,
    crash_handler,
    dump_ascii,
    http_error_handler,
    validation_handler,
)
from strata_lab.server.gate import KEYLESS, Gate
from strata_lab.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
    known_fields,
)
from strata_lab.server.service import PRECISION, PRIORITY, Service, priority_of
from strata_lab.server.tools import with_tools
from strata_lab.server.translate import message_dicts
from strata_lab.server.writers import token_text
from strata_lab.settings import ConfigError, check_names

JSON = "application/json"


def create_app(service: Service) -> FastAPI:
    """The application; `service` may still be loading."""
    app = FastAPI(title="strata", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_exception_handler(RequestValidationError, validation_handler(known_fields()))
    app.add_exception_handler(ApiError, api_error_handler)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, http_error_handler)  # type: ignore[arg-type]
    app.add_exception_handler(Exception, crash_handler)
    _add_generating(app, service)
    _add_tokenizing(app, service)
    _add_settings(app, service)
    _add_telling(app, service)
    app.add_middleware(Gate, service=service)
    if service.config.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.config.cors_origin),
            allow_methods=["GET", "POST", "PATCH"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id", PRECISION, PRIORITY],
            expose_headers=["Retry-After", "X-Request-Id", "X-Strata-Warning"],
        )
    app.openapi = lambda: _documented(app, service)  # type: ignore[method-assign]
    return app


def _documented(app: FastAPI, service: Service) -> dict[str, Any]:
    """FastAPI's document without the answer that ours replaces, with the names of engines and with the key."""
    if app.openapi_schema is None:
        from fastapi.openapi.utils import get_openapi

        engines = [backend.name for backend in service.backends]
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path, methods in document["paths"].items():
            for operation in methods.values():
                operation["responses"].pop("422", None)
                for parameter in operation.get("parameters", ()):
                    if parameter["name"] == PRECISION and engines:
                        parameter["schema"]["enum"] = engines
                if service.config.api_key and path not in KEYLESS:
                    operation["security"] = [{"key": []}]
        if service.config.api_key:
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        if not engines:  # still loading: made again when asked again
            return document
        app.openapi_schema = document
    return app.openapi_schema


def _add_generating(app: FastAPI, service: Service) -> None:
    def answers(model: Any) -> dict[int | str, dict[str, Any]]:
        return {200: {"model": model, "content": schema.STREAM}, **schema.GUARDED, **schema.BODY, **schema.BUSY}

    def chosen(request: Request, body: Any) -> tuple[Backend, int]:
        priority = priority_of(request.headers, body.priority)
        return service.choose(body.model, request.headers.get(PRECISION), priority), priority

    @app.post("/v1/completions", responses=answers(schema.Completion), openapi_extra=schema.ROUTING)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        backend, priority = chosen(request, body)
        return await generate.completions(backend, body, priority)

    @app.post("/v1/chat/completions", responses=answers(schema.ChatCompletion), openapi_extra=schema.ROUTING)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        backend, priority = chosen(request, body)
        return await generate.chat(backend, body, priority)

    @app.post("/generate", responses=answers(schema.Generated), openapi_extra=schema.ROUTING)
    async def generate_text(body: GenerateRequest, request: Request) -> Response:
        """Continue one prompt: text, tokens and times."""
        backend, priority = chosen(request, body)
        return await generate.generate(backend, body, priority)


def _add_tokenizing(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", responses={200: {"model": schema.Tokens}, **schema.GUARDED, **schema.BODY})
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text or a conversation."""
        backend = service.choose(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad("give either prompt or messages; try {'prompt': 'Hello'}", "prompt")
        tokenizer = backend.tokenizer("text")
        if body.messages is not None:
            if body.add_special_tokens is not None:
                raise bad(
                    "add_special_tokens goes with prompt; a chat template decides it itself", "add_special_tokens"
                )
            messages, _ = with_tools(message_dicts(body.messages), [], tokenizer.chat_template or "")
            ids = await backend.encode_chat(messages, None)
        else:
            ids = await backend.encode(body.prompt or "", body.add_special_tokens is not False)
        facts: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": _max_model_len(backend)}
        if body.return_token_strs:
            facts["token_strs"] = [token_text(tokenizer, i) for i in ids]
        return Response(dump_ascii(facts), media_type=JSON)

    @app.post("/detokenize", responses={200: {"model": schema.Text}, **schema.GUARDED, **schema.BODY})
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Text of token ids."""
        backend = service.choose(body.model)
        limit = backend.engine.model_config.vocab_size
        wrong = next((i for i in body.tokens if not 0 <= i < limit), None)
        if wrong is not None:
            raise bad(f"token id {wrong} must be from 0 to {limit - 1}; try 1", "tokens")
        text = backend.tokenizer("token ids").decode(body.tokens, skip_special_tokens=False)
        return Response(dump_ascii({"prompt": text}), media_type=JSON)


def _add_settings(app: FastAPI, service: Service) -> None:
    @app.get(
        "/v1/optimizations",
        responses={200: {"model": schema.OptimizationsAnswer}, **schema.GUARDED, **schema.errors(404)},
    )
    async def optimizations(model: str | None = None) -> Response:
        """Every toggle: its value, what it takes and what it does on this machine; of the default engine or `model`."""
        engine = service.choose(model).engine
        values, effects = engine.optimizations.as_dict(), engine.explain()
        listed = {
            t.name: {"value": values[t.name], "effect": effects[t.name], **dataclasses.asdict(t)} for t in toggles()
        }
        fallbacks = [dataclasses.asdict(f) for f in engine.fallbacks]
        return Response(dump_ascii({"optimizations": listed, "fallbacks": fallbacks}), media_type=JSON)

    @app.patch(
        "/v1/optimizations",
        responses={
            200: {"model": schema.ApplyAnswer}, 409: {"model": schema.ApplyAnswer, "description": "refused"},
            **schema.GUARDED, **schema.BODY,
        },
    )  # fmt: skip
    async def change(
        body: Annotated[dict[str, bool | int | float | str | None], Body()], model: str | None = None
    ) -> Response:
        """Change toggles while requests run, of the default engine or `model`; 409 if any was refused, with reasons."""
        if not body:
            raise bad("the body names no toggle; try {'max_num_seqs': 8}; GET /v1/optimizations lists them")
        try:
            check_names(body, [t.name for t in toggles()], "optimization")
        except ConfigError as error:
            raise bad(str(error), next(iter(body))) from error
        engine = service.choose(model).engine
        try:
            report = await asyncio.to_thread(engine.apply, **body)
        except RuntimeError:
            if engine.closed:
                raise service.unavailable() from None
            raise
        results = {name: dataclasses.asdict(result) for name, result in report.results.items()}
        facts = {"ok": report.ok, "results": results, "build_ms": report.build_ms, "swap_ms": report.swap_ms}
        return Response(dump_ascii(facts), 200 if report.ok else 409, media_type=JSON)


def _add_telling(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", responses={200: {"model": schema.ModelList}, **schema.GUARDED})
    async def models() -> Response:
        """What is served."""
        shared = {"object": "model", "created": service.created, "owned_by": "strata"}

        def card(name: str, backend: Backend) -> dict[str, Any]:
            engine = backend.engine
            facts = {"root": str(engine.config.model), "weight_format": engine.optimizations.as_dict()["weight_format"]}
            return {"id": name, **shared, **facts, "max_model_len": _max_model_len(backend)}

        listed = [card(name, backend) for name, backend in service.models().items()]
        return Response(dump_ascii({"object": "list", "data": listed}), media_type=JSON)

    @app.get(
        "/health",
        responses={200: {"model": schema.Health}, 503: {"model": schema.Health, "description": "not serving"}},
    )
    async def health() -> Response:
        """Whether it serves: 200, or 503 while it loads or stops."""
        good, facts = service.health()
        return Response(dump_ascii(facts), 200 if good else 503, {} if good else {"Retry-After": "5"}, JSON)

    @app.get(
        "/metrics",
        responses={200: {"content": schema.METRICS}, **schema.errors(401, 404, 501, 503)},
        response_class=Response,
    )
    async def metrics(model: str | None = None) -> Response:
        """Counters and gauges for Prometheus, of the default engine or `model`."""
        from strata_lab.telemetry import metrics

        try:
            text = await asyncio.to_thread(metrics.metrics_text, service.choose(model).engine)
        except metrics.MetricsUnavailable as error:
            raise ApiError(501, str(error), code="not_installed") from error
        return Response(text, headers={"Content-Type": metrics.content_type})


def _max_model_len(backend: Backend) -> int:
    return int(backend.engine.optimizations.max_model_len)
