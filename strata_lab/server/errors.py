"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}, every one with what would work.

Messages may quote what a caller sent, so they are cut to a length and written in ASCII: no input can make an answer
that cannot be encoded.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from strata_lab.sampling_params import RequestError
from strata_lab.waiting_queue import QueueFull

MAX_MESSAGE = 600  # characters
TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
    408: "timeout_error", 409: "conflict_error", 413: "invalid_request_error", 415: "invalid_request_error",
    429: "rate_limit_error", 499: "client_closed_request", 500: "server_error", 501: "not_implemented_error",
    503: "unavailable_error", 504: "timeout_error",
}  # fmt: skip


class ApiError(Exception):
    """A request is answered with an error.

    Args:
        status: HTTP status.
        message: value, rule and a value that works.
        param: field the error is about.
        code: a word for programs.
        retry_after_s: whole seconds for the Retry-After header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after_s = status, param, code, retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON document."""
        return error_body(self.status, str(self), self.param, self.code)

    @property
    def headers(self) -> dict[str, str]:
        """Headers that belong to it."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})

    def response(self) -> Response:
        """The answer."""
        return Response(dump_ascii(self.body()), self.status, self.headers, "application/json")


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The document of an error."""
    text = (
        message if len(message) <= MAX_MESSAGE else f"{message[: MAX_MESSAGE // 2]} ... {message[-MAX_MESSAGE // 2 :]}"
    )
    return {"error": {"message": text, "type": TYPES[status], "param": param, "code": code}}


def dump_ascii(document: Any) -> bytes:
    """JSON that exists whatever characters a caller sent, lone surrogates included."""
    return json.dumps(document).encode()


def bad(message: str, param: str | None = None) -> ApiError:
    """The caller is wrong."""
    return ApiError(400, message, param=param, code="invalid_value")


def of_request_error(error: RequestError, retry_after_s: int) -> ApiError:
    """What the engine refused, for HTTP."""
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", retry_after_s=retry_after_s)
    return bad(str(error))


def of_validation(errors: Sequence[Mapping[str, Any]], known: Mapping[str, list[str]]) -> ApiError:
    """The first thing that is wrong with a body, in words.

    Args:
        errors: what pydantic found.
        known: title of a body model to its field names, for the nearest one to a misspelt name.
    """
    first = errors[0]
    path = _fields_of(first, known)
    param = _written(path)
    kind, given = first["type"], first.get("input")
    if kind == "json_invalid":
        return bad(f'the body is not JSON: {first["ctx"]["error"]}; try {{"prompt": "Hello"}}')
    if kind == "extra_forbidden":
        return _unknown(path, param, known)
    if kind == "missing":
        return ApiError(400, f"{param or 'the body'} is missing; it is required", param=param, code="missing_field")
    rules = dict.fromkeys(_sentence(e) for e in errors if _fields_of(e, known)[: len(path)] == path)
    return bad(f"{param or 'the body'}={_shown(given)}: {', or '.join(list(rules)[:3])}", param or None)


def _fields_of(error: Mapping[str, Any], known: Mapping[str, list[str]]) -> list[Any]:
    """Where an error is, without the names that pydantic gives to the alternatives of a field."""
    path = [part for part in error["loc"] if part != "body"]
    if error["type"] == "extra_forbidden":
        return path
    names = {name for fields in known.values() for name in fields}
    return [part for part in path if isinstance(part, int) or part in names]


def _unknown(path: list[Any], param: str, known: Mapping[str, list[str]]) -> ApiError:
    near = difflib.get_close_matches(str(path[-1]), sorted({n for names in known.values() for n in names}), n=1)
    hint = f"did you mean {near[0]!r}?" if near else "GET /openapi.json lists the fields; leave it out"
    return ApiError(400, f"unknown field {_shown(param)}; {hint}", param=param, code="unknown_field")


def _written(path: Sequence[Any]) -> str:
    """`messages[0].role`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _sentence(error: Mapping[str, Any]) -> str:
    text = str(error["msg"])
    return text[:1].lower() + text[1:]


def validation_handler(known: Mapping[str, list[str]]) -> Any:
    """FastAPI's handler for bodies that pydantic refuses."""

    async def handle(request: Request, error: RequestValidationError) -> Response:
        return of_validation(error.errors(), known).response()

    return handle


async def api_error_handler(request: Request, error: ApiError) -> Response:
    """An `ApiError` as an answer."""
    return error.response()


async def http_error_handler(request: Request, error: HTTPException) -> Response:
    """Starlette's own errors: no such path, wrong method, a body that cannot be parsed."""
    status = error.status_code if error.status_code in TYPES else 400
    texts = {
        404: f"there is no {request.method} {request.url.path}; GET /openapi.json lists the endpoints",
        405: f"{request.method} is not offered at {request.url.path}; see GET /openapi.json",
    }
    answer = ApiError(status, texts.get(status, str(error.detail)), code="not_found" if status == 404 else None)
    response = answer.response()
    response.headers.update({k: v for k, v in (error.headers or {}).items() if k.lower() == "allow"})
    return response


async def crash_handler(request: Request, error: Exception) -> Response:
    """A bug of ours: the caller learns that it is one."""
    return ApiError(500, f"the server failed: {type(error).__name__}; this is a bug, its log says more").response()
